"""The handle: one scalar parameter that stands for all rows of a table in PyTorch's machinery."""

from __future__ import annotations

import copy
import math
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NoReturn, Protocol, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch

from embedrock.device.requirements import device_side, indexed
from embedrock.distributed.owners import Replica, Shard
from embedrock.errors import ArgumentError, EmbedrockError, UnsupportedError
from embedrock.frontend.arguments import lags_behind
from embedrock.optimizers import Rule
from embedrock.table.table import Table, rows_of
from embedrock.torch.training.backward import BackwardPass, accumulates, as_it_is
from embedrock.torch.training.cpu_executor import CpuExecutor, HostGradients
from embedrock.torch.training.executor import Executor, Gradients
from embedrock.torch.training.handle_gradient import HandleGradient, Pending, is_in_process_group
from embedrock.torch.training.handle_value import HandleValue
from embedrock.torch.training.ranks import are_there_groups
from embedrock.torch.training.sharing import ShardingOptions, SharedTable, known_as, sharing_of
from embedrock.torch.training.unapplied import BOTH, ForgottenGradientsError, UnappliedGradientsCheck

# Handles by table: layers on one table share its handle, as tied layers share a parameter. So its rows get one
# summed gradient in a backward, count once in a norm, and are stepped once.
_handles: weakref.WeakKeyDictionary[Table, weakref.ref[Handle]] = weakref.WeakKeyDictionary()


def _counter_of(tensor: Tensor) -> Tensor:
    """Return a tensor without elements that counts, as ``_version``, what is written to another one."""
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return counter


def _no_dict() -> None:
    """Stand for a reference to a state dict that is gone."""


_DATA: Any = Tensor.data
MINUS_ZERO = -(2**31)  # the bits of -0.0 as an int32


class StepObserver(Protocol):
    """What follows the rows of a handle from step to step."""

    def note(self, grads: Gradients) -> None:
        """Take note that a step by these gradients is about to be made. The rows are as before."""
        ...


class Handle(HandleValue, nn.Parameter):
    """A scalar parameter whose gradient is the L2 norm of the pending gradients of a table's rows.

    - Its device is where lookups are delivered.
    - Scaling ``handle.grad`` scales the rows' gradients, and zeroing it drops them.
    - ``requires_grad_(False)`` freezes the rows.
    - Its value means nothing and stays 0. To read or write it is refused: see `HandleValue`.

    Layers make it; `handles` finds it.

    Attributes:
        table: the rows.
        label: what error messages call the layer.
        pending: gradients of the rows since the last zeroing.
        vigil: sees to it that the gradients are applied.
        followers: told of each step before it is made.
        terms: how the rows are shared with other processes.
        known_as: what the table is called among processes that share it; None: that is not said yet.
        average: None but for rows that are averages, see `AveragedHandle`.
        max_norm: of the layers on the table, None where none has one.
        is_applied: the pending gradients have made a step.
    """

    table: Table
    label: str
    pending: Pending
    unapplied: UnappliedGradientsCheck
    max_norm: float | None
    is_applied: bool
    followers: weakref.WeakSet[StepObserver]
    average: Any = None
    terms: ShardingOptions
    known_as: str | None
    _sharing: SharedTable | None
    _host: CpuExecutor
    # Of each tensor of the last state dict: the counter of writes to it, and its count then.
    _in_state: list[tuple[Tensor, int]] | None = None
    _saved: tuple[Any, str]  # the state dict that had the rows last, and the prefix of the layer that put them there
    _loaded: tuple[list[str], set[str] | None]  # keys that the last load misses, and ours of them; None: it has rows
    _nothing: Tensor  # a zero that nobody changes
    _placed_on: torch.device | None  # where `place` put the rows; None: where the handle is
    _stays_on_cpu: torch.device | None  # a GPU that cannot use them
    _untouched: tuple[int, int] | None  # version and address of the value; None: it was written to
    _zero_bits: int  # what it has to be: those of 0.0, or -0.0 of a copy, so that averages of the two are noticed
    _bits: (
        np.ndarray | None
    )  # the value, as an int32, seen by NumPy, which is quicker; None where that is not on the CPU
    _is_original: bool  # no copy, of the kind that weight averaging writes to

    def __new__(cls, table: Table) -> Self:
        device = torch.get_default_device()
        with torch.inference_mode(False):  # a tensor of inference mode could never be trained
            zero = torch.zeros((), dtype=torch.float32, device="cpu" if device.type == "meta" else device)
            return super().__new__(cls, zero)

    def __init__(self, table: Table) -> None:
        self.table, self.label = table, f"an embedding layer of {table!r}"
        self._host, self.unapplied, self.max_norm = CpuExecutor(table), UnappliedGradientsCheck(self), None
        self.followers, self.terms, self._sharing = weakref.WeakSet(), ShardingOptions(), None
        self.known_as = None
        self._saved, self._loaded = (_no_dict, ""), ([], None)
        self.pending = Pending(self._host)
        self._is_original = True
        self._write_zero(0)
        self._nothing = torch.zeros((), dtype=torch.float32, device=self.device)
        self._placed_on = self._stays_on_cpu = None
        self.is_applied = False
        self.register_post_accumulate_grad_hook(_show_pending)

    # ------------------------------------------------------------ forward and backward

    def receive(self, grads: Gradients, node: Any, run: BackwardPass | None = None) -> Tensor:
        """Take the row gradients of one lookup, during a backward.

        They are added to the pending ones only when autograd accumulates the handle's own gradient, so that
        `torch.autograd.grad` leaves nothing behind, as it leaves ``.grad`` of any parameter alone.

        Args:
            grads: of the lookup.
            node: of autograd's, that accumulates the handle's gradient.
            run: the backward, by whoever has asked for it; None: the current one.

        Returns:
            What autograd has to add for this lookup: 0, so that what was done to ``.grad`` until then can be told; to
            what `torch.autograd.grad` returns, by how much the norm of this backward's gradients grew.
        """
        self.pending.drop_unless_shown(self)
        run = BackwardPass.current() if run is None else run
        earlier = run.brought(self)
        both = grads if earlier is None else self.pending.executor.merge(earlier, grads)
        run.bring(self, both)
        if accumulates(node):
            own = grads.nothing()  # which autograd keeps as it is; of what others have, too, it makes a copy
            return self._zero() if own is None or own.device != self.device else own
        return torch.as_tensor(both.growth_since(earlier), dtype=torch.float32, device=self.device)

    def _zero(self) -> Tensor:
        if not (self.is_cpu and self._nothing.is_cpu) and self._nothing.device != self.device:
            self._nothing = torch.zeros((), dtype=torch.float32, device=self.device)
        return self._nothing

    def accumulate(self) -> None:
        """Add what this backward brought to the pending gradients. Autograd has just added to ``handle.grad``.

        Autograd lets one backward at a time do so.
        """
        run, grad = BackwardPass.running(), self.grad
        brought = None if run is None else run.take(self)
        if brought is None or grad is None:  # the gradient is not of rows: a penalty on all parameters, say
            return
        self.is_applied = False
        self._check_origin(grad)
        sharing = self._sharing  # as the forward found it
        if sharing is None:
            self._show(self.pending.add(brought, grad), grad)
        else:
            self.pending.follow(grad)  # before DistributedDataParallel averages it
            sharing.arrive(cast(HostGradients, brought))  # the CPU uses rows that processes share

    def show(self, grads: Gradients) -> None:
        """Let the handle's gradient stand for what all processes have brought."""
        self._host_side()  # where they are summed, though this process may not have looked rows up yet
        number = torch.zeros((), dtype=torch.float32, device=self.device) if self.grad is None else self.grad
        self._show(self.pending.show(grads, number), self.grad)

    def _show(self, shows: Tensor, grad: Tensor | None) -> None:
        if shows is not grad:
            self.grad = shows
        # If not, GradScaler skips the step, or the step refuses. Of a GPU's number nobody knows yet.
        norm = self.pending.shown
        if isinstance(norm, Tensor) or math.isfinite(norm):
            self.unapplied.received()

    def _check_origin(self, grad: Tensor | None) -> None:
        if type(grad) is HandleGradient:
            self._check_owner(grad)
        elif grad is not None and self.pending.grads is not None:
            self._check_shown(grad)

    def _check_owner(self, grad: HandleGradient) -> None:
        if not grad.belongs_to(self.pending):
            raise ArgumentError(
                f"`handle.grad` of {self.label} is that of another layer. Gradients of rows come from backward() only; "
                "they cannot be copied from another model."
            )

    def _check_shown(self, grad: Tensor) -> None:
        """Check a number that knows no gradients: what else could stand for the pending ones?"""
        if grad.device.type != "cpu" or is_in_process_group():
            return  # DistributedDataParallel may put a view of its buffer there
        value = grad.item()
        if value not in (0.0, self.pending.shown):
            raise ArgumentError(
                f"`handle.grad` of {self.label} is {value}, and was {self.pending.shown}, the norm of the gradients "
                "that wait for a step: it was set by hand. What is done to the number (multiplying, clamping, zeroing) "
                "is done to the gradients; what was computed from it otherwise cannot stand for them. Change the "
                "loss, or the gradient of the layer's output by a hook on it."
            )

    def register_hook(self, hook: Any) -> NoReturn:
        """Refuse hooks: what they return would be replaced by the norm."""
        raise UnsupportedError(
            f"the handle of {self.label} takes no hooks, which would see only a part of a norm. Change handle.grad "
            "after the backward, or register a hook on the layer's output."
        )

    # ------------------------------------------------------------ steps

    def gradients(self) -> Gradients | None:
        """Return the pending gradients, scaled as ``handle.grad`` was; None if there is no gradient.

        Raises:
            ArgumentError: ``handle.grad`` was set by hand, while no gradients of rows are pending.
        """
        grad = self.grad
        self._check_origin(grad)
        self.pending.follow(grad)
        if grad is None or self.pending.grads is not None:
            return self.pending.grads
        if (value := grad.item()) != 0.0:
            raise ArgumentError(
                f"`handle.grad` of {self.label} is {value}, but no gradients of its rows are pending: it was set "
                "by hand. Gradients of rows come from backward() only; they cannot be copied from another model."
            )
        if type(grad) is not HandleGradient:
            return None  # from no backward: torch.distributed.checkpoint does so to have optimizers make their state
        # Zeroed in place: PyTorch's optimizers make a step then, and so does ours, one that touches no row.
        executor, nothing = self.pending.executor, torch.empty(0, self.table.dim, device=self.device)
        no_ids = torch.empty(0, dtype=torch.int64, device="cpu")
        return executor.sum(executor.plan(no_ids, trains=True), nothing, padding=None, by_frequency=False)

    def waits(self) -> bool:
        """Return whether gradients wait for a step. Those that were zeroed on a GPU do, as far as the host knows."""
        if self.grad is None or self.pending.grads is None:
            return False
        return self.grad.device.type != "cpu" or self.grad.item() != 0.0

    def announce(self, grads: Gradients) -> None:
        """Announce a step to the followers, before it is made."""
        if self.followers:  # hardly ever, and going through a WeakSet takes longer
            for follower in self.followers:
                follower.note(grads)

    def stepped(self) -> None:
        """Note that our optimizer stepped."""
        self.is_applied = True
        self.changed()
        self.unapplied.stepped()

    def changed(self) -> None:
        """Note that rows may be others, on all processes that share them."""
        if self._sharing is not None:
            self._sharing.rank_group.changes += 1

    def forget(self) -> None:
        """Drop all gradients of the rows."""
        self.pending.drop()
        self.grad = None

    def check_untouched(self) -> None:
        """Raise `ForgottenGradientsError` if something wrote to the handle, or to the rows in a state dict."""
        if self._in_state is not None:
            self._check_state()
        if self._is_untouched():
            return
        with no_dispatch():
            harmless = self._is_original and is_in_process_group() and self.item() == 0.0
        self._write_zero(self._zero_bits)  # an error for each offence, not for ever
        if not harmless:  # DistributedDataParallel writes all parameters once, as they are
            self.refuse_write()

    def refuse_write(self) -> NoReturn:
        """Raise the error of whatever writes to the handle."""
        self.unapplied.forgive()
        raise ForgottenGradientsError(
            f"something wrote to the handle of {self.label}: an optimizer over model.parameters(), weight "
            "averaging, or an initialization of all parameters. The handle only stands for the rows, so that "
            f"changed nothing in them. Step rows and all else by `optimizer = {BOTH}`, or give PyTorch's optimizers "
            "ert.dense_parameters(model) and step the rows by ert.Adam(model). Average them by ert.average(model), and "
            "choose first values by init=."
        )

    @property
    def data(self) -> Tensor:
        """The value, which can be put back as it is, or as it was moved to another device."""
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, HandleValue) or value.dtype != self.dtype:
            self.refuse_write()
        self.move(value.device)

    def _is_untouched(self) -> bool:
        # The value is looked at too, because fused optimizers and writes to .data leave the version as it is; but only
        # on the CPU, because reading it from elsewhere waits for the device.
        is_same = self._untouched == (self._version, self.data_ptr())
        return is_same and (self._bits is None or self._bits.item() == self._zero_bits)

    def _write_zero(self, bits: int) -> None:
        self._zero_bits = bits
        with no_dispatch():
            zero = torch.full((), bits, dtype=torch.int32, device=self.device)
            _DATA.__set__(self, zero.view(torch.float32))
        self._note_untouched()

    def _note_untouched(self) -> None:
        self._untouched = self._version, self.data_ptr()
        with no_dispatch():
            self._bits = _DATA.__get__(self).view(torch.int32).numpy() if self.is_cpu else None

    def check_rule(self, rule: Rule | None) -> None:
        """Raise `UnsupportedError` if the layers on the table cannot work under a rule."""
        if self.max_norm is not None and lags_behind(rule):
            raise UnsupportedError(
                f"`max_norm` ({self.max_norm}) of {self.label} cannot go with {rule}, whose rows lag behind and "
                "cannot be shrunk when they are looked up. Use Adam() without dense=True, or leave out `max_norm`."
            )
        if self.max_norm is not None and self.table.spec.admission is not None:
            raise UnsupportedError(
                f"`max_norm` ({self.max_norm}) of {self.label} cannot go with admission=: a lookup would shrink rows "
                "that have no record, and so give them one. Leave one of them out."
            )

    # ------------------------------------------------------------ moves and copies

    def stand_for(self, table: Table) -> None:
        """Stand for the rows of another table from now on."""
        _handles.pop(self.table, None)
        self.forget()
        self.table = table
        self.pending.executor = self._host = CpuExecutor(table)
        self._sharing = None
        _handles[table] = weakref.ref(self)
        rows_of(table).name_by(self.label)

    def move(self, device: torch.device) -> None:
        """Deliver lookups on another device from now on. ("meta" asks to allocate nothing, and nothing ever is.)

        Raises:
            UnsupportedError: gradients of the rows are pending that only a GPU has, or that it will not have.
        """
        if device.type == "meta":
            return
        device = indexed(device)
        if self._rows_move_with(device):
            self._check_nothing_pends(device)
        was_untouched = self._is_untouched()
        with no_dispatch():
            _DATA.__set__(self, _DATA.__get__(self).to(device))
        self._note_untouched()
        if not was_untouched:
            self._untouched = None  # so that the next forward says so
        self.grad = None if self.grad is None else self.grad.to(device)
        self._placed_on = None

    def _rows_move_with(self, device: torch.device) -> bool:
        return (self.rows_on is not None or device.type == "cuda") and device != self.rows_on

    def _check_nothing_pends(self, device: torch.device) -> None:
        if self.pending.grads is not None and self.is_applied:
            self.forget()
        if self.pending.grads is not None:
            raise UnsupportedError(
                f"the rows of {self.label} cannot move to {device} while gradients of them wait for a step: those are "
                "where the rows were used. Call the optimizer's step() or zero_grad() first."
            )

    # ------------------------------------------------------------ rows that processes share

    @property
    def sharing(self) -> SharedTable | None:
        """How the processes of a group share the rows; None: this one trains alone."""
        if self._sharing is not None or are_there_groups():  # hardly ever, and this is asked of each of many tables
            self._sharing = sharing_of(self, self._sharing)
        return self._sharing

    def share_by(self, terms: ShardingOptions) -> None:
        """Share the rows with other processes as a layer says."""
        is_said = self._sharing is not None or not self.terms.are_default
        if is_said and terms._replace(path=None) != self.terms._replace(path=None):
            raise ArgumentError(
                f"the rows of {self.label} are shared with other processes by {self.terms.told} already: got "
                f"{terms.told}. Say so in the first layer on a table."
            )
        if terms.sharded is not False and self.table.spec.has_residents:
            raise UnsupportedError(
                f"the rows of {self.label} come and go (admission= or eviction=), and cannot be shared out by "
                f"sharded={terms.sharded!r}, as processes would have to decide together who has a record. Leave one of "
                "them out."
            )
        self.terms = terms
        self.name_for_others()

    def name_for_others(self) -> str:
        """Return what the table is called among processes that share it, which name theirs in the same order."""
        self.known_as = self.known_as or known_as(self)
        return self.known_as

    def refuse(self, error: EmbedrockError, trains: bool) -> NoReturn:
        """Raise the error of a lookup that does not begin, on all ranks that look up together with this one."""
        if self.shard is not None:
            assert self.sharing is not None  # as it has a shard
            self.sharing.refuse(error, trains)
        raise error

    @property
    def shard(self) -> Shard | None:
        """The part of the rows that is here; None: all of them."""
        sharing = self.sharing
        return None if sharing is None or isinstance(sharing.placement, Replica) else sharing.placement

    @property
    def is_elsewhere(self) -> bool:
        """Whether one other process has all rows."""
        shard = self.shard
        return shard is not None and shard.holder not in (None, shard.rank)

    def check_whole(self, done: str) -> None:
        """Raise `UnsupportedError` where something needs all rows, and this process has only some of them."""
        shard = self.shard
        if shard is not None:
            raise UnsupportedError(
                f"the rows of {self.label} cannot be {done}: they are shared out over {shard.ranks} processes, and "
                f"this one, rank {shard.rank}, has its own only. On each rank, layer.table.export() returns those, and "
                "layer.table.state() saves them with the optimizer's state; ert.save on all ranks saves all, and "
                "embedrock.torch.dcp.state_dict(model) is what torch.distributed.checkpoint saves; with sharded=False "
                "each rank has all rows."
            )

    # ------------------------------------------------------------ state dicts: layers on one table are in it once

    def is_saved_first(self, destination: Any, prefix: str) -> bool:
        """Return whether a state dict has no rows of the table yet by a layer with another prefix."""
        known, of = self._saved
        if known() is destination and of != prefix:
            return False
        self._saved = weakref.ref(destination) if isinstance(destination, OrderedDict) else _no_dict, prefix
        return True

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Take note of tensors in a state dict: whoever writes there means the rows, as those of a parameter are."""
        self._in_state = [(_counter_of(tensor), tensor._version) for tensor in tensors]

    def _check_state(self) -> None:
        told = self._in_state or ()
        if all(counter._version == version for counter, version in told):
            if self._saved[0]() is None:  # nobody has it any more
                self._in_state = None
            return
        self._in_state = None  # an error for each offence, not for ever
        raise ForgottenGradientsError(
            f"something wrote to the rows of {self.label} in what state_dict() returned, as averages of models do: "
            "those are copies, so that no row changed. Average rows by ert.average(model); put what was changed back "
            "by model.load_state_dict(state), or change rows by layer.table.assign(ids, values)."
        )

    def found_in(self, missing_keys: list[str]) -> None:
        """Note that the load that has this list has rows; so no layer on the table misses them."""
        self._in_state = None
        known, keys = self._loaded
        if known is missing_keys and keys:
            missing_keys[:] = [key for key in missing_keys if key not in keys]
        self._loaded = missing_keys, None

    def missed_in(self, missing_keys: list[str], key: str) -> None:
        """Note that a layer on the table finds no rows in the load that has this list."""
        known, keys = self._loaded if self._loaded[0] is missing_keys else (missing_keys, set())
        if keys is not None:
            missing_keys.append(key)
            self._loaded = known, {*keys, key}

    # ------------------------------------------------------------ rows on a GPU

    @property
    def rows_on(self) -> torch.device | None:
        """The GPU that uses the rows; None: the CPU does."""
        return self.device if self._placed_on is None and self.device.type == "cuda" else self._placed_on

    def place(self, device: torch.device) -> None:
        """Let kernels for GPUs use the rows on a device, "cpu" under Triton's interpreter, and deliver them there."""
        device = indexed(device)
        self._check_nothing_pends(device)
        self.move(device)
        self._placed_on, self._stays_on_cpu = device, None

    def executor(self) -> Executor:
        """Return the rows where they are used, and bring them to the GPU if they are not there but should be.

        Raises:
            UnsupportedError: GPU memory was asked for, and the rows cannot be used there; or gradients of them wait on
                a GPU that they have to leave.
        """
        if self.sharing is not None:
            return self._host_side()  # other processes' rows come by the CPU
        if self._placed_on is None and not self.is_cuda and self.pending.executor is self._host:
            return self._host
        device, known = self.rows_on, self.pending.executor
        if device is None or device == self._stays_on_cpu or self.max_norm is not None:  # rows are shrunk by the CPU
            return self._host_side()
        if known.is_used_on(device):
            return known
        executor = device_side(self.table, device)
        if executor is None:
            self._stays_on_cpu = device
            return self._host_side()
        self.pending.executor = executor
        return executor

    def _host_side(self) -> CpuExecutor:
        host = self._host if self._sharing is None else self._sharing.executor
        if self.pending.executor is not host:
            self._check_nothing_pends(torch.device("cpu"))
            self.pending.executor = host
            rows_of(self.table).leave_side()
        return host

    def leave_side(self) -> None:
        """Bring rows back from a GPU, until they are used next.

        Raises:
            UnsupportedError: gradients of them wait there.
        """
        if self.table.executor is not None:
            self._check_nothing_pends(torch.device("cpu"))
            rows_of(self.table).leave_side()

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Return what lookups find, wherever the rows are used: float32 ``ids.shape + (dim,)``.

        Raises:
            ForgottenGradientsError: something wrote to the handle.
        """
        self.check_untouched()
        self.check_whole("frozen")
        return self.table.lookup(ids)

    def side_of_gradients(self) -> Executor:
        """Return where the pending gradients are: the rows may have been laid out anew since."""
        return self.pending.executor if self.pending.executor.is_current else self.executor()

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        if id(self) not in memo:
            made = handle_of(copy.deepcopy(self.table, memo))
            made.requires_grad_(self.requires_grad)
            made.move(self.device)
            made._placed_on, made.terms = self._placed_on, self.terms._replace(path=None)
            made.label, made.max_norm, made._is_original = self.label, self.max_norm, False
            made.name_for_others()
            rows_of(made.table).name_by(self.label)
            self.check_untouched()
            self._write_zero(0)
            made._write_zero(MINUS_ZERO)
            memo[id(self)] = made
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, tuple[Table]]:
        return handle_of, (self.table,)

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Handle of {self.label}"


@as_it_is
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
