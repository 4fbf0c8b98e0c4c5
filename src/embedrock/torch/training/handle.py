"""`Handle`: the scalar proxy parameter of a table's rows in PyTorch."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, itemgetter
from typing import Any, ClassVar, NoReturn, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._dynamo import decorators
from torch.utils._mode_utils import no_dispatch

from embedrock.batch.gradients import RowGradients
from embedrock.device.requirements import device_side, indexed
from embedrock.distributed.owners import Replica, Shard
from embedrock.errors import ArgumentError, ForgottenGradientsError, UnsupportedError
from embedrock.frontend.arguments import lags_behind
from embedrock.optimizers import Rule
from embedrock.table.missing import Missing
from embedrock.table.opening import check_segments
from embedrock.table.table import Table, rows_of
from embedrock.torch.training.backward import BackwardPass, accumulates, as_it_is
from embedrock.torch.training.cpu_executor import CpuExecutor
from embedrock.torch.training.executor import Executor, Gradients
from embedrock.torch.training.generation import generation
from embedrock.torch.training.handle_gradient import HandleGradient, Pending, number_of, set_number
from embedrock.torch.training.handle_value import Factors, HandleValue, factors_of
from embedrock.torch.training.ranks import are_there_groups, group_of
from embedrock.torch.training.sharing import ShardingOptions, SharedTable, known_as
from embedrock.torch.training.unapplied import BOTH, StateDictCheck, UnappliedGradientsCheck

# Handles by table: layers on one table share its handle, as tied layers share a parameter. So its rows get one
# summed gradient in a backward, count once in a norm, and are stepped once.
_handles: weakref.WeakKeyDictionary[Table, weakref.ref[Handle]] = weakref.WeakKeyDictionary()


_DATA: Any = Tensor.data
_NO_BITS = np.zeros((), np.int32).data
# Many handles are read by one call of `map`.
_ADDRESS: Callable[[Tensor], int] = Tensor.data_ptr
_VERSION, _BITS, _READ = attrgetter("_version"), attrgetter("_bits"), itemgetter(())
_WATCHED, _UNTOUCHED = attrgetter("state_dicts.watched"), attrgetter("_untouched")
MINUS_ZERO = -(2**31)  # bits of -0.0 as an int32


class Handle(HandleValue, nn.Parameter):
    """Scalar proxy parameter of a table's rows. The gradient is the L2 norm of the pending row gradients.

    - The device is that of lookup outputs.
    - Scaling ``handle.grad`` scales the rows' gradients, and zeroing it drops them.
    - ``requires_grad_(False)`` freezes the rows.
    - The value has no meaning and stays 0. Reading or writing the value raises an error: see `HandleValue`.

    Layers create the handle, and `handles` returns it.

    Attributes:
        table: the rows.
        label: name of the layer in error messages.
        pending: row gradients since the last zeroing.
        unapplied: check that an optimizer applies the gradients.
        state_dicts: check of the rows in state dicts.
        followers: observers, whose `note` gets the gradients of each step before it; None: none so far.
        terms: how the rows are shared with other processes.
        known_as: name of the table among processes that share it; None: not named yet.
        average: average of the rows, for an `AveragedHandle`; else None.
        shown: the `RowAverage` that lookups return in place of the rows; None: the rows.
        before_copy: called with the copies made so far.
        max_norm: `max_norm` of the layers on the table; None without one.
        is_applied: a step has applied the pending gradients.
        is_watched: other code may look at ``.grad`` when autograd accumulates it.

    Args:
        table: the rows.
        of_weights: none are accepted.

    Raises:
        UnsupportedError: other code makes the handle anew, with weights.

    Example:
        >>> import embedrock.torch as ert
        >>> layer = ert.Embedding(10, 4)
        >>> layer(torch.tensor([3, 3])).sum().backward()
        >>> layer.handle.grad.item()  # the norm of a row's gradient (2, 2, 2, 2)
        4.0
    """

    table: Table
    max_norm: float | None = None
    followers: weakref.WeakSet[Any] | None = None
    average: Any = None
    shown: Any = None
    before_copy: ClassVar[Callable[[dict[int, Any]], None]]
    terms = ShardingOptions()
    known_as: str | None = None
    is_applied = False
    _sharing: SharedTable | None = None
    _host: CpuExecutor
    _placed_on: torch.device | None = None  # device set by `place`; None: the device of the handle
    _stays_on_cpu: torch.device | None = None  # a GPU that cannot hold the rows
    # Version and bits of the value, None (no watched state dict), and its address. None: other code wrote to it.
    _untouched: tuple[int, int, None, int] | None
    _zero_bits: int  # expected bits of the value: 0.0, or -0.0 of a copy, so that averages of the two are detected
    _bits: memoryview  # the value as an int32, faster than a tensor; 0 for a value that is not on the CPU
    _is_original = True  # no copy of the kind that weight averaging writes to

    def __new__(cls, table: Table, **of_weights: Any) -> Self:
        if of_weights:  # as for a parameter of a subclass that is put elsewhere
            raise UnsupportedError(
                "the handle of an embedding layer cannot be made again with other weights, as `offload` of accelerate "
                "does: the rows are not in the model. First offload the model, and then put the layer into it."
            )
        device = torch.get_default_device()
        with torch.inference_mode(False):  # a tensor of inference mode can never train
            zero = torch.zeros((), dtype=torch.float32, device="cpu" if device.type == "meta" else device)
            return super().__new__(cls, zero)

    def __init__(self, table: Table) -> None:
        self.table, self.label = table, f"an embedding layer of {table!r}"
        self._host, self.unapplied = CpuExecutor(table), UnappliedGradientsCheck(self)
        self.pending, self.state_dicts = Pending(self._host), StateDictCheck()
        self._write_zero(0)
        self._nothing = torch.zeros((), dtype=torch.float32, device=self.device)  # a constant zero
        self.register_post_accumulate_grad_hook(_accumulated)
        self.is_watched = False

    # ------------------------------------------------------------ forward and backward

    def receive(self, grads: Gradients, node: Any, run: BackwardPass) -> Tensor:
        """Receive the row gradients of one lookup, during a backward.

        They become pending only when autograd accumulates the handle's own gradient. So `torch.autograd.grad` leaves no
        pending gradients, as it leaves ``.grad`` of any parameter alone.

        Args:
            grads: gradients of the lookup.
            node: autograd's node that accumulates the handle's gradient.
            run: the backward.

        Returns:
            The number that autograd adds for this lookup. For ``.grad`` it is 0, which keeps earlier changes to
            ``.grad`` visible. For `torch.autograd.grad` it is the growth of the norm of this backward's gradients.
        """
        self.pending.drop_unless_shown(self)
        earlier = run.gradients.get(id(self))
        if run.brought and (brought := run.take(self)) is not None:
            earlier = brought
        both = grads if earlier is None else self.pending.executor.merge(earlier, grads)
        run.gradients[id(self)] = both
        if accumulates(node):
            BackwardPass.has_eager = True
            if grads.spare and grads.spare[0].device == self.device:
                return grads.spare[0].detach()  # autograd keeps this tensor without a copy
            if not (self.is_cpu and self._nothing.is_cpu) and self._nothing.device != self.device:
                self._nothing = torch.zeros((), dtype=torch.float32, device=self.device)
            return self._nothing
        return torch.as_tensor(both.growth_since(earlier), dtype=torch.float32, device=self.device)

    def accumulate(self) -> None:
        """Add the gradients of this backward to the pending ones. Autograd has just added to ``handle.grad``.

        Autograd calls it for one backward at a time.
        """
        run, grad = BackwardPass.running(), self._number()
        arrived = None if run is None else run.gradients.pop(id(self), None)
        if arrived is None or grad is None:  # the gradient is not of rows: of a penalty on all parameters
            return
        time = run.times.get(id(self)) if run is not None else None
        if self._sharing is None:  # as the forward set it
            self._add(arrived, grad, time)
            return
        self.is_applied = False
        self._check_origin(grad)
        self.pending.follow(grad)  # before DistributedDataParallel averages it
        self._sharing.arrive(cast(RowGradients, arrived), time)  # the CPU holds rows that processes share

    def add_rows(self, rows: RowGradients, time: float | None = None) -> None:
        """Add gradients to the pending ones, which other code may have seen. `time`: see `Pending`."""
        grad = self._number()
        self._add(rows, torch.zeros((), device=self.device) if grad is None else grad, time)

    def _add(self, grads: Gradients, grad: Tensor, time: float | None) -> None:
        self.is_applied = False
        self._check_origin(grad)
        self._show(self.pending.add(grads, grad, time), grad)

    @property
    def grad(self) -> Tensor | None:
        """L2 norm of the pending gradients of the rows: a `HandleGradient`, made when code first reads it. None: none
        are pending.
        """
        run = BackwardPass.running()
        if run is not None:
            run.arrive()
        return self._number()

    @grad.setter
    def grad(self, number: Tensor | None) -> None:
        if number is None:
            self.pending.joint = None
        elif self.pending.joint is not None:
            self.pending.look(self)
        set_number(self, number)

    @grad.deleter
    def grad(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.pending.joint = None
        set_number(self, None)

    def _number(self) -> Tensor | None:
        if self.pending.joint is not None:
            self.pending.look(self)
        return number_of(self)

    def show(self, grads: Gradients, time: float | None) -> None:
        """Set the pending gradients to the sums over all processes, and the handle's gradient to their norm.

        `time`: of the newest event of all, see `Pending`.
        """
        self._host_executor()  # their executor, even if this process has not looked up rows yet
        number = torch.zeros((), dtype=torch.float32, device=self.device) if self.grad is None else self.grad
        self._show(self.pending.show(grads, number, time), self.grad)

    def _show(self, shows: Tensor, grad: Tensor | None) -> None:
        if shows is not grad:
            set_number(self, shows)
        # If not finite, GradScaler skips the step, or the step raises an error. A GPU's number is unknown yet.
        norm = self.pending.shown
        if isinstance(norm, Tensor) or math.isfinite(norm):
            self.unapplied.received()

    def _check_origin(self, grad: Tensor | None) -> None:
        """Raise an error unless ``handle.grad`` can represent the pending gradients."""
        if type(grad) is HandleGradient:
            if grad.belongs_to(self.pending):
                return
            raise ArgumentError(
                f"`handle.grad` of {self.label} is that of another layer. Gradients of rows come from backward() only; "
                "they cannot be copied from another model."
            )
        if grad is None or self.pending.grads is None or grad.device.type != "cpu" or are_there_groups():
            return  # DistributedDataParallel may put a view of its buffer there
        value = grad.item()
        if value not in (0.0, self.pending.shown):
            raise ArgumentError(
                f"`handle.grad` of {self.label} is {value}, and was {self.pending.shown}, the norm of the gradients "
                "that wait for a step: it was set by hand. What is done to the number (multiplying, clamping, zeroing) "
                "is done to the gradients; what was computed from it otherwise cannot stand for them. Change the "
                "loss, or the gradient of the layer's output by a hook on it."
            )

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Register a hook that autograd calls after it has accumulated ``handle.grad``."""
        self.is_watched = True
        return super().register_post_accumulate_grad_hook(hook)

    def register_hook(self, hook: Any) -> NoReturn:
        """Refuse hooks: the norm would replace their results."""
        raise UnsupportedError(
            f"the handle of {self.label} takes no hooks, which would see only a part of a norm. Change handle.grad "
            "after the backward, or register a hook on the layer's output."
        )

    # ------------------------------------------------------------ steps

    def gradients(self) -> Gradients | None:
        """Return the pending gradients, scaled as ``handle.grad`` was; None without a gradient.

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
            return None  # torch.distributed.checkpoint sets it, so that optimizers create their state
        # Zeroed in place: PyTorch's optimizers make a step then, and so does this one, without touching a row.
        return self.pending.executor.no_gradients()

    def waits(self) -> bool:
        """Return whether gradients wait for a step. Gradients zeroed on a GPU count, as far as the host knows."""
        if self.is_applied or self.grad is None or self.pending.grads is None:
            return False
        return self.grad.device.type != "cpu" or self.grad.item() != 0.0

    def stepped(self) -> None:
        """Record a step of an Embedrock optimizer."""
        self.is_applied = True
        self.changed()
        self.unapplied.stepped()

    def changed(self) -> None:
        """Record that rows may have changed, on all processes that share them."""
        if self._sharing is not None:
            self._sharing.rank_group.changes += 1

    def forget(self) -> None:
        """Drop all gradients of the rows."""
        self.pending.grads = None
        set_number(self, None)

    def check_untouched(self) -> None:
        """Raise `ForgottenGradientsError` if other code wrote to the handle, or to the rows in a state dict."""
        if self.state_dicts.watched is not None:
            self.state_dicts.check(self.label)
        if self._is_untouched():
            return
        with no_dispatch():
            may_write = self.factors() is not None or (self._is_original and are_there_groups())
            harmless = may_write and self.item() == 0.0
        self._write_zero(self._zero_bits)  # report each write once
        if not harmless:  # DistributedDataParallel and averages write to parameters, without changing them
            self.refuse_write()

    def refuse_write(self) -> NoReturn:
        """Raise the error for a write to the handle."""
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
        """Value of the handle. It can be set to the same value, also on another device."""
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, HandleValue) or value.dtype != self.dtype:
            self.refuse_write()
        if (factors := factors_of(value)) is not None:
            self.write(factors)
        self.move(value.device)

    def own_factors(self) -> Factors:
        """Return what stands for the rows as they are now."""
        return {(self, rows_of(self.table).version.of_rows): 1.0}

    def factors(self) -> Factors | None:
        """Return the rows or averages that the handle shows; None: no averages follow the rows."""
        shown = self.shown
        return {(shown, shown.changes): 1.0} if shown is not None else self.own_factors() if self.followers else None

    def write(self, factors: Factors) -> None:
        """Show averages in place of the rows while the average is a copy of the rows, or the rows again. Else overwrite
        the rows with their averages.
        """
        average = next((one for one in self.followers or () if factors == {(one, one.changes): 1.0}), None)
        if factors != self.own_factors() and average is None:
            self.refuse_write()
        if factors != self.factors():
            self.shown = average
            if average is not None and not average.is_copy:
                self.shown = None
                average.become_rows()
            generation.advance()

    def check_shows_rows(self, done: str) -> None:
        """Raise `UnsupportedError` while lookups return averages in place of the rows."""
        if self.shown is not None:
            self.shown.refuse_in_model(done)

    def _is_untouched(self) -> bool:
        # The value is checked too, because fused optimizers and writes to .data keep the version. The check is for
        # the CPU only, because reading from another device waits for it.
        return self._untouched == (self._version, self._bits[()], None, self.data_ptr())

    def _write_zero(self, bits: int) -> None:
        self._zero_bits = bits
        with no_dispatch():
            zero = torch.full((), bits, dtype=torch.int32, device=self.device)
            _DATA.__set__(self, zero.view(torch.float32))
        self._note_untouched()

    def _note_untouched(self) -> None:
        bits, self._bits = 0, _NO_BITS
        if self.is_cpu:
            with no_dispatch():
                bits, self._bits = self._zero_bits, _DATA.__get__(self).view(torch.int32).numpy().data
        self._untouched = self._version, bits, None, self.data_ptr()

    def check_rule(self, rule: Rule | None) -> None:
        """Raise `UnsupportedError` if the layers on the table, or averages of its rows, do not support a rule."""
        for follower in self.followers or ():
            follower.check_rule(rule)
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
        """Become the proxy of another table's rows."""
        _handles.pop(self.table, None)
        self.forget()
        self.table = table
        self.pending.executor = self._host = CpuExecutor(table)
        self._sharing = None
        _handles[table] = weakref.ref(self)
        rows_of(table).name_by(self.label)
        generation.advance(gone=self)

    def move(self, device: torch.device) -> None:
        """Return outputs on another device from now on. "meta" requests no memory, and changes nothing.

        Raises:
            UnsupportedError: gradients are pending, and the rows would move to or from a GPU.
        """
        if device.type == "meta":
            return
        device = indexed(device)
        if (self.rows_on is not None or device.type == "cuda") and device != self.rows_on:  # the rows move, too
            self._check_nothing_pends(device)
        was_untouched = self._is_untouched()
        with no_dispatch():
            _DATA.__set__(self, _DATA.__get__(self).to(device))
        self._note_untouched()
        if not was_untouched:
            self._untouched = None  # so that the next forward raises the error
        if (number := self.grad) is not None:
            set_number(self, number.to(device))
        self._placed_on = None
        generation.advance()

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
        """Shared table of the process group; None: this process trains alone."""
        if self._sharing is None and not are_there_groups():  # groups are rare, and tables may be many
            return None
        known, group = self._sharing, group_of(self.terms.sharded)
        if group is None:
            self._sharing = None
        elif known is None or known.group is not group:
            self._sharing = SharedTable(self, group)
        else:
            known.rank_group.exchange.uneven.settle()
        return self._sharing

    def share_by(self, terms: ShardingOptions) -> None:
        """Share the rows with other processes by a layer's options."""
        is_said = self._sharing is not None or not self.terms.are_default
        if is_said and terms._replace(path=None) != self.terms._replace(path=None):
            raise ArgumentError(
                f"the rows of {self.label} are shared with other processes by {self.terms.told} already: got "
                f"{terms.told}. Say so in the first layer on a table."
            )
        if terms.sharded is not False:
            check_segments(rows_of(self.table))
        self.terms = terms
        self.name_for_others()

    def name_for_others(self) -> str:
        """Return the name of the table among processes that share it. All name their tables in the same order."""
        self.known_as = self.known_as or known_as(self)
        return self.known_as

    def refuse(self, error: Exception, trains: bool) -> NoReturn:
        """Raise the error of a lookup that cannot begin, on all ranks of this lookup."""
        if self.shard is not None:
            assert self.sharing is not None  # it has a shard
            self.sharing.refuse(error, trains)
        raise error

    @property
    def shard(self) -> Shard | None:
        """Shard of the rows on this process; None: all rows."""
        sharing = self.sharing
        return None if sharing is None or isinstance(sharing.placement, Replica) else sharing.placement

    def check_whole(self, done: str) -> None:
        """Raise `UnsupportedError` if an operation needs all rows, and this process has only a shard."""
        shard = self.shard
        if shard is not None:
            raise UnsupportedError(
                f"the rows of {self.label} cannot be {done}: they are shared out over {shard.ranks} processes, and "
                f"this one, rank {shard.rank}, has its own only. On each rank, layer.table.export() returns those, and "
                "layer.table.state() saves them with the optimizer's state; ert.save on all ranks saves all, and "
                "embedrock.torch.dcp.state_dict(model) is what torch.distributed.checkpoint saves; with sharded=False "
                "each rank has all rows."
            )

    # ------------------------------------------------------------ rows on a GPU

    @property
    def rows_on(self) -> torch.device | None:
        """GPU of the rows; None: the CPU."""
        return self.device if self._placed_on is None and self.device.type == "cuda" else self._placed_on

    def place(self, device: torch.device) -> None:
        """Move rows and outputs to a GPU, or to "cpu" under Triton's interpreter."""
        device = indexed(device)
        self._check_nothing_pends(device)
        self.move(device)
        self._placed_on, self._stays_on_cpu = device, None
        generation.advance()

    def executor(self) -> Executor:
        """Return the executor of the rows. Copy the rows to the GPU first if they belong there.

        Raises:
            UnsupportedError: GPU memory was requested, but the rows cannot be there. Or gradients are pending on a GPU
                that the rows must leave.
        """
        if self.shown is not None:
            return self.shown.executor(in_model=True)
        if self.sharing is not None:
            return self._host_executor()  # the CPU receives other processes' rows
        if self._placed_on is None and not self.is_cuda and self.pending.executor is self._host:
            return self._host
        device, known = self.rows_on, self.pending.executor
        if device is None or device == self._stays_on_cpu or self.max_norm is not None:  # the CPU shrinks rows
            return self._host_executor()
        if known.is_used_on(device):
            return known
        executor = device_side(self.table, device)
        if executor is None:
            self._stays_on_cpu = device
            return self._host_executor()
        self.pending.executor = executor
        generation.advance()
        return executor

    def _host_executor(self) -> CpuExecutor:
        host = self._host if self._sharing is None else self._sharing.executor
        if self.pending.executor is not host:
            self._check_nothing_pends(torch.device("cpu"))
            self.pending.executor = host
            rows_of(self.table).leave_side()
            generation.advance()
        return host

    def leave_side(self) -> None:
        """Write rows back from a GPU. The next use may copy them to it again.

        Raises:
            UnsupportedError: gradients are pending on the GPU.
        """
        if self.table.executor is not None:
            self._check_nothing_pends(torch.device("cpu"))
            rows_of(self.table).leave_side()

    def rows(self, ids: np.ndarray, missing: Missing | None = None) -> np.ndarray:
        """Return rows as lookups return them, on any executor: float32 ``ids.shape + (dim,)``.

        Raises:
            ForgottenGradientsError: other code wrote to the handle.
        """
        self.check_untouched()
        self.check_whole("frozen")
        if self.shown is not None:
            return self.shown.of(ids, in_model=True)
        return self.table.lookup(ids, missing=missing)

    def executor_of_gradients(self) -> Executor:
        """Return the executor of the pending gradients, or a new one if the rows' layout has changed."""
        return self.pending.executor if self.pending.executor.is_current else self.executor()

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        Handle.before_copy(memo)
        if id(self) not in memo:
            self.check_shows_rows("copied")
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


def check_untouched(handles: Sequence[Handle]) -> None:
    """Do `Handle.check_untouched` for many handles."""
    values = map(_VERSION, handles), map(_READ, map(_BITS, handles)), map(_WATCHED, handles), map(_ADDRESS, handles)
    if list(zip(*values, strict=True)) != list(map(_UNTOUCHED, handles)):
        for handle in handles:
            handle.check_untouched()


def drop_gradients(handles: Iterable[Handle], set_to_none: bool) -> None:
    """Drop the pending gradients of the rows; with `set_to_none` also ``.grad``."""
    for handle in handles:
        pending = handle.pending
        pending.joint = pending.seen = None
        if set_to_none and number_of(handle) is not None:
            set_number(handle, None)


def note_steps(handles: Iterable[Handle]) -> None:
    """Call `Handle.stepped` of all handles."""
    for handle in handles:
        if handle._sharing is None and handle.unapplied.is_settled:
            handle.is_applied = True
        else:
            handle.stepped()


@decorators.skip
def _accumulated(handle: Tensor) -> None:
    """Hook of all handles. PyTorch calls it without a gradient, too: see `BackwardPass.brought`."""
    if BackwardPass.has_eager:
        _accumulate(handle)


@as_it_is
def _accumulate(handle: Any) -> None:
    handle.accumulate()


def handle_of(table: Table) -> Handle:
    """Return the only handle of a table, created if missing."""
    reference = _handles.get(table)
    handle = None if reference is None else reference()
    if handle is None:
        handle = Handle(table)
        _handles[table] = weakref.ref(handle)
    return handle
