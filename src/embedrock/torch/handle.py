"""The handle: one scalar parameter that stands for all rows of a table in PyTorch's machinery."""

from __future__ import annotations

import copy
import math
import weakref
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from embedrock.errors import ArgumentError, UnsupportedError
from embedrock.fronts.arguments import lags_behind
from embedrock.gradients import RowGradients
from embedrock.rules import Rule
from embedrock.table import Table
from embedrock.torch.pending import Pending, number_of
from embedrock.torch.vigil import ForgottenGradientsError, Vigil

# Handles by table: layers on one table share its handle, as tied layers share a parameter. So its rows get one
# summed gradient in a backward, count once in a norm, and are stepped once.
_handles: weakref.WeakKeyDictionary[Table, weakref.ref[Handle]] = weakref.WeakKeyDictionary()


class Handle(nn.Parameter):
    """A scalar parameter whose gradient is the L2 norm of the pending gradients of a table's rows.

    - Its device is where lookups are delivered.
    - Scaling ``handle.grad`` scales the rows' gradients, and zeroing it drops them.
    - ``requires_grad_(False)`` freezes the rows.
    - Its value means nothing and stays 0: an optimizer that moves it was given the wrong parameters.

    Layers make it; `handles` finds it.

    Attributes:
        table: the rows.
        label: what error messages call the layer.
        pending: gradients of the rows since the last zeroing.
        vigil: sees to it that the gradients are applied.
        max_norm: of the layers on the table, None where none has one.
    """

    table: Table
    label: str
    pending: Pending
    vigil: Vigil
    max_norm: float | None
    _arrived: dict[int, RowGradients]
    _untouched_version: int
    _is_original: bool  # no copy, of the kind that weight averaging writes to

    def __new__(cls, table: Table) -> Handle:
        device = torch.get_default_device()
        with torch.inference_mode(False):  # a tensor of inference mode could never be trained
            zero = torch.zeros((), dtype=torch.float32, device="cpu" if device.type == "meta" else device)
            return super().__new__(cls, zero)

    def __init__(self, table: Table) -> None:
        self.table, self.label = table, f"an embedding layer of {table!r}"
        self.pending, self.vigil, self.max_norm = Pending(), Vigil(), None
        self._arrived, self._untouched_version, self._is_original = {}, self._version, True
        self.register_post_accumulate_grad_hook(_show_pending)

    # ------------------------------------------------------------ forward and backward

    def begin_forward(self) -> None:
        """Forget what came of a backward that failed, or that `torch.autograd.grad` asked for."""
        if self._arrived and torch._C._current_graph_task_id() == -1:  # not inside of a backward
            self._arrived.clear()

    def receive(self, grads: RowGradients) -> Tensor:
        """Take the row gradients of one lookup, during a backward.

        They are added to the pending ones only when autograd accumulates the handle's own gradient, so that
        `torch.autograd.grad` leaves nothing behind, as it leaves ``.grad`` of any parameter alone.

        Returns:
            What autograd has to add for this lookup: by how much the norm of this backward's gradients grew.
        """
        self._follow_grad()
        task = torch._C._current_graph_task_id()
        earlier = self._arrived.get(task)
        self._arrived[task] = grads if earlier is None else earlier.merge(grads)
        before = 0.0 if earlier is None else number_of(earlier)
        growth = number_of(self._arrived[task]) - before if math.isfinite(before) else 0.0
        return torch.tensor(growth, dtype=torch.float32, device=self.device)

    def _follow_grad(self) -> None:
        if self.pending.grads is not None:  # looked at first, because reading a number from a GPU waits for it
            self.pending.follow(None if self.grad is None else self.grad.item())

    def accumulate(self) -> None:
        """Add what this backward brought to the pending gradients. Autograd has just added to ``handle.grad``."""
        arrived = self._arrived.pop(torch._C._current_graph_task_id(), None)
        if arrived is None or self.grad is None:  # the gradient is not of rows: a penalty on all parameters, say
            return
        norm = self.pending.add(arrived)
        self.grad.fill_(norm)
        if math.isfinite(norm):  # otherwise GradScaler skips the step, or the step refuses
            self.vigil.received()

    def register_hook(self, hook: Any) -> NoReturn:
        """Refuse hooks: what they return would be replaced by the norm."""
        raise UnsupportedError(
            f"the handle of {self.label} takes no hooks, which would see only a part of a norm. Change handle.grad "
            "after the backward, or register a hook on the layer's output."
        )

    # ------------------------------------------------------------ steps

    def gradients(self) -> RowGradients | None:
        """Return the pending gradients, scaled as ``handle.grad`` was; None if there is no gradient.

        Raises:
            ArgumentError: ``handle.grad`` was set by hand, while no gradients of rows are pending.
        """
        self._follow_grad()
        if self.grad is None or self.pending.grads is not None:
            return self.pending.grads
        if (value := self.grad.item()) != 0.0:
            raise ArgumentError(
                f"`handle.grad` of {self.label} is {value}, but no gradients of its rows are pending: it was set "
                "by hand. Gradients of rows come from backward() only; they cannot be copied from another model."
            )
        # Zeroed in place: PyTorch's optimizers make a step then, and so does ours, one that touches no row.
        return self.table.sum(self.table.plan([]), np.empty((0, self.table.dim), np.float32))

    def forget(self) -> None:
        """Drop all gradients of the rows."""
        self.pending.drop()
        self.grad = None

    def check_untouched(self) -> None:
        """Raise `ForgottenGradientsError` if something wrote to the handle."""
        # The value is looked at too, because fused optimizers leave the version as it is; but only on the CPU,
        # because reading it from elsewhere waits for the device.
        if self._version == self._untouched_version and (self.device.type != "cpu" or self.item() == 0.0):
            return
        harmless = (
            self._is_original
            and torch.distributed.is_available()
            and torch.distributed.is_initialized()
            and self.item() == 0.0
        )
        self.data.zero_()  # an error for each offence, not for ever
        self._untouched_version = self._version
        if harmless:  # DistributedDataParallel writes all parameters once, as they are
            return
        self.vigil.forgive()
        raise ForgottenGradientsError(
            f"something wrote to the handle of {self.label}: an optimizer over model.parameters(), weight "
            "averaging, or an initialization of all parameters. The handle only stands for the rows, so that "
            "changed nothing in them. Give PyTorch's optimizers ert.dense_parameters(model), and step the rows "
            "by one of Embedrock's: `optimizer = ert.Adam(model, lr=1e-3)`. First values are chosen by init=."
        )

    def check_rule(self, rule: Rule | None) -> None:
        """Raise `UnsupportedError` if the layers on the table cannot work under a rule."""
        if self.max_norm is not None and lags_behind(rule):
            raise UnsupportedError(
                f"`max_norm` ({self.max_norm}) of {self.label} cannot go with {rule}, whose rows lag behind and "
                "cannot be shrunk when they are looked up. Use Adam() without dense=True, or leave out `max_norm`."
            )

    # ------------------------------------------------------------ moves and copies

    def stand_for(self, table: Table) -> None:
        """Stand for the rows of another table from now on."""
        _handles.pop(self.table, None)
        self.forget()
        self.table = table
        _handles[table] = weakref.ref(self)

    def move(self, device: torch.device) -> None:
        """Have lookups delivered on another device. ("meta" asks to allocate nothing, and nothing ever is.)"""
        if device.type != "meta":
            self.data = self.data.to(device)
            self.grad = None if self.grad is None else self.grad.to(device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        if id(self) not in memo:
            made = handle_of(copy.deepcopy(self.table, memo))
            made.requires_grad_(self.requires_grad)
            made.move(self.device)
            made.label, made.max_norm, made._is_original = self.label, self.max_norm, False
            memo[id(self)] = made
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, tuple[Table]]:
        return handle_of, (self.table,)

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Handle of {self.label}"


def _show_pending(handle: Tensor) -> None:
    assert isinstance(handle, Handle)  # the hook is only registered there
    handle.accumulate()


def handle_of(table: Table) -> Handle:
    """Return the one handle of a table, and make it if there is none."""
    reference = _handles.get(table)
    handle = None if reference is None else reference()
    if handle is None:
        handle = Handle(table)
        _handles[table] = weakref.ref(handle)
    return handle
