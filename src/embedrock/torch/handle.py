"""The handle: one scalar parameter that stands for all rows of a table in PyTorch's machinery."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from embedrock.errors import ArgumentError
from embedrock.gradients import RowGradients
from embedrock.table import Table
from embedrock.torch.pending import Pending, number_of
from embedrock.torch.vigil import ForgottenGradientsError, Vigil

# Handles by table: layers that share a table share its handle, as tied layers share a parameter. So the rows get one
# summed gradient in a backward, count once in a norm, and are stepped once.
_handles: weakref.WeakKeyDictionary[Table, weakref.ref[Handle]] = weakref.WeakKeyDictionary()


class Handle(nn.Parameter):
    """A scalar parameter whose gradient is the L2 norm of the pending gradients of a table's rows.

    - Its device is where lookups are delivered.
    - Scaling ``handle.grad`` scales the rows' gradients, and zeroing it drops them.
    - ``requires_grad_(False)`` freezes the rows.
    - Its value means nothing and stays 0: an optimizer of PyTorch's own that moves it was given the wrong parameters.

    Do not make one: layers do.

    Attributes:
        table: the rows.
        label: what error messages call the layer.
        pending: gradients of the rows since the last zeroing.
        vigil: sees to it that the gradients are applied.
    """

    table: Table
    label: str
    pending: Pending
    vigil: Vigil

    def __new__(cls, table: Table) -> Handle:
        with torch.inference_mode(False):  # a tensor of inference mode could never be trained
            self = super().__new__(cls, torch.zeros((), dtype=torch.float32))
        self.table, self.label = table, f"an embedding layer of {table!r}"
        self.pending, self.vigil = Pending(), Vigil()
        self._arrived: dict[int, RowGradients] = {}
        self._untouched_version = self._version
        self.register_post_accumulate_grad_hook(_show_pending)
        return self

    # ------------------------------------------------------------ forward and backward

    def begin_forward(self) -> None:
        """Forget gradients of a backward that ended in an error, or that `torch.autograd.grad` asked for."""
        if self._arrived and torch._C._current_graph_task_id() == -1:
            self._arrived.clear()

    def receive(self, grads: RowGradients) -> Tensor:
        """Take the row gradients of one lookup, during a backward.

        They are added to the pending ones only when autograd accumulates the handle's own gradient, so that
        `torch.autograd.grad` leaves nothing behind, as it leaves ``.grad`` of any parameter alone.

        Returns:
            What autograd has to add for this lookup: by how much the norm of this backward's gradients grew.
        """
        self.pending.follow(self._grad_value())
        task = torch._C._current_graph_task_id()
        earlier = self._arrived.get(task)
        self._arrived[task] = grads if earlier is None else earlier.merge(grads)
        before = 0.0 if earlier is None else number_of(earlier)
        growth = number_of(self._arrived[task]) - before if before != float("inf") else 0.0
        return torch.tensor(growth, dtype=torch.float32, device=self.device)

    def _grad_value(self) -> float | None:
        return None if self.grad is None else self.grad.item()

    # ------------------------------------------------------------ steps

    def gradients(self) -> RowGradients | None:
        """Return the pending gradients, scaled as ``handle.grad`` was; None if there is no gradient.

        Raises:
            ArgumentError: ``handle.grad`` was set by hand, where no gradients of rows are.
        """
        value = self._grad_value()
        self.pending.follow(value)
        if value is None:
            return None
        if self.pending.grads is not None:
            return self.pending.grads
        if value != 0.0:
            raise ArgumentError(
                f"`handle.grad` of {self.label} is {value}, but no gradients of its rows are pending: it was set by hand. "
                "Gradients of rows come from backward() only; they cannot be copied from another model."
            )
        nothing = self.table.plan(torch.empty(0, dtype=torch.int64).numpy())
        return self.table.sum(nothing, torch.empty(0, self.table.dim).numpy())

    def check_untouched(self) -> None:
        """Raise `ForgottenGradientsError` if something wrote to the handle."""
        # The value is looked at too because fused optimizers leave the version as it is; not on other devices, for
        # which the host would have to wait.
        if self._version == self._untouched_version and (self.device.type != "cpu" or self.item() == 0.0):
            return
        self.reset_value()
        raise ForgottenGradientsError(
            f"something wrote to the handle of {self.label}: an optimizer over model.parameters(), weight averaging, or "
            "an initialization of all parameters. The handle only stands for the rows, so that changed nothing in "
            "them. Give PyTorch's optimizers ert.dense_parameters(model), and step the rows by Embedrock's: "
            "`optimizer = ert.Adam(model, lr=1e-3)`; first values are chosen by init=."
        )

    def reset_value(self) -> None:
        """Make the value 0 again, as if nobody had written to it."""
        self.data.zero_()  # through .data, because a leaf that requires grad may not be written to
        self._untouched_version = self._version

    # ------------------------------------------------------------ copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        if id(self) not in memo:
            made = handle_of(copy.deepcopy(self.table, memo))
            made.requires_grad_(self.requires_grad)
            made.data = made.data.to(self.device)
            made.label = self.label
            memo[id(self)] = made
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, tuple[Table]]:
        return handle_of, (self.table,)

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Handle of {self.label}"


def _show_pending(handle: Tensor) -> None:
    """Add what a backward brought to the pending gradients; autograd has just added to ``handle.grad``."""
    assert isinstance(handle, Handle) and handle.grad is not None  # the hook is only registered on handles
    arrived = handle._arrived.pop(torch._C._current_graph_task_id(), None)
    if arrived is not None:
        handle.grad.fill_(handle.pending.add(arrived))
        handle.vigil.received()


def handle_of(table: Table) -> Handle:
    """Return the one handle of a table, and make it if there is none."""
    reference = _handles.get(table)
    handle = None if reference is None else reference()
    if handle is None:
        handle = Handle(table)
        _handles[table] = weakref.ref(handle)
    return handle
