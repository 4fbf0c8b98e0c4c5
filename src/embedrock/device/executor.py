"""`GpuExecutor`: the rows of a table on a GPU, as lookups, gradients and optimizers use them."""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from embedrock.batch.plan import Plan
from embedrock.device import pooling
from embedrock.device.cache import KEPT_LOOKUPS, BatchCounter, DeviceCache
from embedrock.device.device_errors import DeviceErrors
from embedrock.device.features import DeviceFeature, FeatureBags
from embedrock.device.gradients import DeviceRowGradients, sum_rows
from embedrock.device.joint_plan import PrefetchedPlan
from embedrock.device.plan import DevicePlan, FoundWeights
from embedrock.device.pooling import DeviceBags
from embedrock.device.steps import StepVerdict, judge
from embedrock.device.stream_order import InStreamOrder, StreamOrder
from embedrock.errors import ArgumentError, UnsupportedError
from embedrock.initializers import Constant, Initializer, Normal, TruncatedNormal, Uniform, Zeros
from embedrock.kernels.gpu import gate, rows
from embedrock.kernels.gpu.runtime import RecordForm
from embedrock.optimizers import Rule
from embedrock.spec.spec import Spec
from embedrock.storage.backend import Backend
from embedrock.system.spans import spanned
from embedrock.table.rows import TableState
from embedrock.table.stepping import DeferredInserts, next_numbers


def form_of(spec: Spec) -> RecordForm:
    """Return how records of `spec` lie, for kernels."""
    layout = spec.layout
    return RecordForm(spec.dim, spec.dtype, layout.record_bytes, layout.state_start, layout.state_width)


# The kernel of an initializer, and the fields that are its numbers.
DRAWS: dict[type[Initializer], tuple[str, tuple[str, ...]]] = {
    Zeros: ("constant", ("value",)),
    Constant: ("constant", ("value",)),
    Uniform: ("uniform", ("low", "high")),
    Normal: ("normal", ("mean", "std")),
    TruncatedNormal: ("truncated_normal", ("mean", "std", "beyond")),
}


def drawn_by(init: Initializer) -> tuple[Any, ...] | None:
    """Return the kernel of an initializer and its numbers, or None where only the CPU can draw first values."""
    if type(init) not in DRAWS:
        return None
    kind, fields = DRAWS[type(init)]
    return kind, *(float(getattr(init, field)) for field in fields)


_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}
HISTORIES = ("history", "log_fade")  # of a dense rule's numbers: arrays that grow by a row at each step


def uploaded(array: np.ndarray, device: torch.device) -> Tensor:
    """Return a copy of an array on a device. Nothing waits for it."""
    return on_device(torch.from_numpy(np.array(array)), device)


def uploaded_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return copies of arrays on a device, in one allocation and by one copy. Nothing waits for it."""
    sizes = [part for array in arrays for part in (array.nbytes, -array.nbytes % 16)]
    host = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    for array, part in zip(arrays, np.split(host.numpy(), np.cumsum(sizes)[:-1])[::2], strict=True):
        part[:] = array.view(np.uint8)
    made = host.to(device, non_blocking=True).split(sizes)[::2]
    return [part.view(_DTYPES[array.dtype]) for part, array in zip(made, arrays, strict=True)]


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; one on the host is pinned first, so that nothing waits for the copy."""
    if tensor.device == device:
        return tensor
    return pinned_copy(tensor, device).to(device, non_blocking=True)


def pinned_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor that can be copied to a device while the host goes on: of one on the host, a pinned copy.

    (The copy to the device is made later, and whoever has the tensor, pinned or not, may fill it anew before.)
    """
    if tensor.device.type == "cpu" and device.type == "cuda":
        return torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor


class _HistoryCopies:
    """Copies of a rule's history on the device, which get the rows that came since."""

    def __init__(self, device: torch.device, timeline: StreamOrder) -> None:
        self._device, self._timeline = device, timeline
        self._copies: dict[str, tuple[np.ndarray, Tensor, int]] = {}

    def follow(self, name: str, numbers: Any) -> Tensor:
        """Return one of the arrays of a step's numbers, on the device."""
        array, steps = getattr(numbers, name), numbers.steps
        known, copy, done = self._copies.get(name, (None, None, 0))
        if known is not array or copy is None or steps < done:
            if copy is not None:
                self._timeline.uses(copy)
            copy = uploaded(array, self._device)
        else:
            start = max(0, done - 1)  # a step that was taken back may have been made anew
            copy[start : steps + 1] = uploaded(array[start : steps + 1], self._device)
        self._copies[name] = array, copy, steps
        return copy


class ReadyPlan(NamedTuple):
    """A plan that can be stepped.

    Attributes:
        plan: with the keys that the step is made of, once records are made.
        admit: makes records, or gives slots to rows that have none; None: none are to be made, or the step does so.
    """

    plan: DevicePlan
    admit: Callable[[], object] | None = None


class GpuExecutor(ABC):
    """Rows of a table that a GPU reads and steps, wherever they lie. Nothing here waits for it, but where it is said.

    Args:
        rows: of the table.
        tier: of the rows.
        device: the GPU; "cpu" under Triton's interpreter.
        timeline, clock: what it has together with other sides; None: its own.

    Attributes:
        working: a context, which holds the table's lock, for work on the device in its order.
        near: records in GPU memory, which subclasses make.
        first: what new records are before their first step; None where the host makes them.
    """

    near: DeviceCache
    first: rows.InitialRecord | None = None
    judge = staticmethod(judge)
    not_captured: str | None = "the host plans its batches"  # why no step of it can be captured; None: one can

    def __init__(
        self,
        rows: TableState,
        tier: Backend,
        device: torch.device,
        timeline: StreamOrder | None = None,
        clock: BatchCounter | None = None,
    ) -> None:
        self._rows_of, self.tier, self.device = weakref.ref(rows), tier, device
        self.spec = rows.spec
        self.form = form_of(self.spec)
        self.timeline = timeline or StreamOrder(device, rows.subject)
        self.working = InStreamOrder((self.timeline,), rows.table_lock.lock)
        self._version = rows.version
        self.faults, self.clock = DeviceErrors(rows, device), clock or BatchCounter()
        self._expected: Tensor | None = None
        self._ahead: PrefetchedPlan | None = None
        self._is_looked_up = False  # since the last step
        self._seen = -1  # version of the table that it knows of
        self._histories = _HistoryCopies(device, self.timeline)
        self.no_row = torch.full((1,), -1, dtype=torch.int32, device=device)  # no row

    @property
    def rows(self) -> TableState:
        """The table's rows. (They have the side, which must not keep them alive.)"""
        return self._rows_of()  # pyright: ignore[reportReturnType]  # there are: who uses them has the table

    # ------------------------------------------------------------ what a table asks of a side

    def finish(self) -> None:
        """Bring the tier's records up to date. Waits for the device.

        Raises:
            UnsupportedError, MemoryBudgetError: it cannot be done now. No row is lost; it may be asked for again.
        """
        self.rows.check_process()
        with self.timeline.ordered():
            self._finish()

    @abstractmethod
    def _finish(self) -> None: ...

    def check(self) -> None:
        """Raise what went wrong in earlier calls, as far as it is known."""
        if not self.timeline.is_recorded:
            self.faults.check()

    def may_forget(self) -> bool:
        """Return whether the host plans, which knows of batches that are not stepped yet."""
        return False

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Return numbers about it."""

    def close(self) -> None:
        """Give its memory back, though handles may go on knowing it."""
        self.timeline.finish()
        self._free()
        self._ahead = self._expected = None
        self._histories = _HistoryCopies(self.device, self.timeline)

    def _free(self) -> None:
        """Give the memory back that the records have."""
        self.near.free()

    def begin(self) -> None:
        """Begin to use rows: no step of the CPU is running, and the table is open. The caller holds the turn.

        Raises:
            ClosedTableError: it is not.
        """
        rows = self.rows
        rows.table_lock.settle_steps()
        rows.check_open()

    @property
    def is_current(self) -> bool:
        """Whether it is still that of the table: its records may have been laid out anew."""
        return self.rows.are_used_by(self, self.tier, self.spec)

    def is_used_on(self, device: torch.device) -> bool:
        """Return whether it is still that of the table, and this is its device."""
        return self.device == device and self.is_current

    # ------------------------------------------------------------ lookups

    @property
    def stamp(self) -> int:
        """The number of the last batch."""
        return self.clock.stamp

    @property
    def joins(self) -> Any:
        """What tables that are looked up together with this one have as well; None: it is looked up alone."""
        return None

    def feature(self, ids: Tensor, padding: int | None) -> DeviceFeature:
        """Return ids that are looked up together with those of others; the row of `padding` gets no gradient."""
        return DeviceFeature(self, ids, padding)

    def pooled_feature(
        self, ids: Tensor, padding: int | None, mode: str, starts: Tensor | None, weights: Tensor | None
    ) -> DeviceFeature:
        """Return bags that are looked up together with those of others.

        Args:
            ids: (bags, n); or (n,) with `starts`.
            padding: the id that gets no gradient, and counts in no bag.
            mode: "sum", "mean" or "max".
            starts: where bags begin, (bags,); those on the host were checked.
            weights: of the ids, in their shape, or None.
        """
        own = None if weights is None else self._float32(weights.reshape(-1))
        size = ids.shape[1] if starts is None else 0
        return DeviceFeature(self, ids.reshape(-1), padding, FeatureBags(mode, size, starts, own))

    @abstractmethod
    def plan(self, ids: Tensor, trains: bool) -> DevicePlan:
        """Decide what a batch of ids needs, and bring its rows near; they stay so for a step, if one follows."""

    def end_batch(self, trains: bool) -> None:
        """Note that a batch was planned whose ids may be wrong; `trains`: a step may follow."""
        if self.timeline.is_recorded:
            return
        if not trains or self._is_looked_up:
            self.faults.ask()  # else the step that follows does
        self._is_looked_up = trains

    def oldest(self, trains: bool) -> int:
        """Return the stamp of the oldest lookup whose rows stay near; those of one that does not train need not."""
        return self.clock.oldest(KEPT_LOOKUPS) if trains else self.clock.stamp

    def lookup(self, ids: Tensor) -> Tensor:
        """Return the weights of rows that no step follows: float32 ``ids.shape + (dim,)``."""
        return self.read(self.plan(ids, trains=False))

    def read(self, plan: DevicePlan) -> Tensor:
        """Return the weights of the row of each position: float32 ``plan.shape + (dim,)``."""
        if plan.positions is not None and self.near.is_identity and not self.rows.lags:
            out = self._read(plan, plan.positions)  # near rows go straight to where they are wanted
        else:
            out = self.read_rows(plan).index_select(0, plan.inverse)
        return out if len(plan.shape) == 1 else out.reshape(*plan.shape, self.spec.dim)

    def read_rows(self, plan: DevicePlan) -> Tensor:
        """Return the weights of a plan's rows: float32 (n, dim)."""
        out = self._read(plan, None)
        self.keep(plan, out)
        return out

    @property
    def keeps_weights(self) -> bool:
        """Whether a step goes on from the weights that a lookup has read: from RAM, and as records have them."""
        return not self.near.placement.near_rows and self.rows.history is None

    def keep(self, plan: DevicePlan, weights: Tensor) -> None:
        """Keep the weights of a plan's rows, which were just read, for a step."""
        if self.keeps_weights:
            plan.found = FoundWeights(weights, (self.rows.version.of_rows,))

    def _found(self, plan: DevicePlan) -> Tensor | None:
        """Return, once, the weights of a plan's rows that a lookup has read, if nobody has changed a row since."""
        if plan.found is None:
            return None
        weights, plan.found.weights = plan.found.weights, None
        return weights if plan.found.versions[0] == self.rows.version.of_rows else None

    def _read(self, plan: DevicePlan, positions: Tensor | None) -> Tensor:
        """Return the weights of a plan's rows, or those of the keys of positions, if none lags: float32 (n, dim)."""
        with self.working:
            self.timeline.wait_for_copies()
            count = (plan.keys if positions is None else positions).shape[0]
            out = torch.empty(count, self.spec.dim, dtype=torch.float32, device=self.device)
            self.gather(plan, positions, out)
            if positions is None and self.rows.history is not None and self.rows.lags:  # else they were asked for
                now = self._uploaded(self.rows.history.numbers())
                rows.refresh(out, plan.keys, plan.count, self.near.homes, now, self.form)
            self.note_use()
            expected = self.take_expected()
            if expected is not None:
                self._plan_ahead(expected)
        return out

    def expect(self, ids: Tensor | None) -> None:
        """Plan the next batch after the next lookup, and bring its rows near, beside what the device does then.

        What comes after that lookup, and uses rows, waits for the copies on the device. So no row is read or stepped
        while it moves, whether it was expected or not. A lookup of the same tensor, which was not written to since,
        takes the plan that was made then.
        """
        self._expected = ids

    def take_expected(self) -> Tensor | None:
        """Return, once, the ids of the next batch, if they are known."""
        expected, self._expected = self._expected, None
        return expected

    @abstractmethod
    def _plan_ahead(self, ids: Tensor) -> None:
        """Plan the next batch, for a step. The caller works in the table's order."""

    @abstractmethod
    def gather(self, plan: DevicePlan, positions: Tensor | None, out: Tensor) -> None:
        """Write the weights of a plan's rows to `out` float32 (n, dim), first values where there is no record.

        With `positions`, which are the keys of the plan's positions, those of each position.
        """

    def uploaded(self, array: np.ndarray) -> Tensor:
        """Return an array on the device. Nothing waits for the copy."""
        return uploaded(array, self.device)

    def on_device(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device. Nothing waits for the copy.

        Raises:
            UnsupportedError: it is on the host, and part of a step that a CUDA graph makes again.
        """
        if self.timeline.captured is not None and tensor.device != self.device:
            raise UnsupportedError(
                f"ids, offsets and weights of {self.rows.subject} must be on {self.device} in a captured step: got "
                f"some on {tensor.device}, which each replay would read as they are now. Give them to the step as "
                "arguments: ert.graphed copies these there."
            )
        return on_device(tensor, self.device)

    # ------------------------------------------------------------ gradients

    @spanned("sum")
    def sum(self, plan: DevicePlan, grads: Tensor, padding: int | None, by_frequency: bool) -> DeviceRowGradients:
        """Return the gradients (n, dim) of a plan's positions, summed to one for each row.

        Args:
            plan: of the positions.
            grads: of any float dtype.
            padding: id whose row gets none.
            by_frequency: divide a row's gradient by how often its id occurs.
        """
        with self.working:
            skip, plan = self._without(plan, padding)
            grads = grads if grads.dim() == 2 else grads.reshape(-1, self.spec.dim)
            if grads.stride(1) != 1:  # expanded, as that of a sum is, or transposed: kernels want whole rows
                grads = grads.contiguous()
            summed = sum_rows(grads, plan, skip)
            return summed.by_frequency() if by_frequency else summed

    def _without(self, plan: DevicePlan, padding: int | None) -> tuple[Tensor, DevicePlan]:
        """Return which row of a plan is that of an id, int32 (1,), -1 for none, and the plan without it."""
        if padding is None or not plan.ids.numel():
            return self.no_row, plan
        found = plan.ids == padding
        row = torch.where(found.any(), found.to(torch.int32).argmax(), -1)
        return row.to(torch.int32).reshape(1), self.masked(plan, found)

    @abstractmethod
    def masked(self, plan: DevicePlan, drop: Tensor) -> DevicePlan:
        """Return a plan whose rows in `drop`, bool (n,) or (), are not stepped."""

    def merge(self, earlier: DeviceRowGradients, later: DeviceRowGradients) -> DeviceRowGradients:
        """Return the sum of both; in a row that both have, the earlier gradient comes first."""
        with self.working:
            return self._merged(earlier, later)

    @abstractmethod
    def _merged(self, earlier: DeviceRowGradients, later: DeviceRowGradients) -> DeviceRowGradients: ...

    # ------------------------------------------------------------ bags

    def bounds(self, offsets: Tensor, n: int) -> Tensor:
        """Return where bags of n positions start and end, int64 (bags + 1,), for `bags`.

        Args:
            offsets: the same; on the host they have been checked, and a fault is noted of others.
            n: positions in all bags.
        """
        with self.working:
            placed = self.on_device(offsets)
            return placed if offsets.device.type == "cpu" else self.faults.checked_offsets(placed, n)

    def bags(self, plan: DevicePlan, bounds: Tensor, mode: str, padding: int | None) -> DeviceBags:
        """Return the positions of a plan as bags, in which the id `padding` does not count."""
        with self.working:
            skip, plan = self._without(plan, padding)
            return DeviceBags(plan, bounds, pooling.bag_of_position(bounds, len(plan.inverse)), skip, mode)

    def pool(self, rows: Tensor, weights: Tensor | None, bags: DeviceBags) -> tuple[Tensor, Tensor]:
        """Pool rows that `read_rows` returned, times the weights (n,) of the positions: see `pooling.pool`."""
        with self.working:
            return pooling.pool(rows, self._float32(weights), bags)

    @spanned("sum")
    def unpool(
        self, grads: Tensor, weights: Tensor | None, bags: DeviceBags, trace: Tensor, by_frequency: bool
    ) -> DeviceRowGradients:
        """Return the gradients of the rows from those of the bags, (bags, dim): see `pooling.unpool` and `sum`."""
        with self.working:
            summed = pooling.unpool(grads.contiguous(), self._float32(weights), bags, trace)
            return summed.by_frequency() if by_frequency else summed

    def weight_grads(self, grads: Tensor, rows: Tensor, bags: DeviceBags) -> Tensor:
        """Return the gradients of the positions' weights, float32 (n,)."""
        with self.working:
            return pooling.weight_grads(grads.contiguous(), rows, bags)

    def _float32(self, weights: Tensor | None) -> Tensor | None:
        return None if weights is None else self.on_device(weights.detach()).to(torch.float32).contiguous()

    # ------------------------------------------------------------ steps

    def begin_step(self, rule: Rule, grads: DeviceRowGradients, judged: StepVerdict) -> Callable[[], None]:
        """Do all of a step of the rule that can fail, whatever takes memory, too; return what makes it.

        Until that is called, by one who has kept the table, no row has changed, and no step is counted.

        Args:
            rule: laid out as the table's.
            grads: of the rows.
            judged: how and whether it is made.
        """
        self.check_rule(rule)
        plan, verdict = grads.plan, judged.verdict
        self.timeline.uses(grads.values, plan.keys, plan.ids, plan.count, grads.shown if verdict is None else verdict)
        ready = self.ready(plan, verdict, grads)
        return functools.partial(self._step, rule, grads, judged, ready, self.draft_step(rule))

    def _step(self, rule: Rule, grads: DeviceRowGradients, judged: StepVerdict, ready: ReadyPlan, draft: Any) -> None:
        (plan, admit), verdict = ready, judged.verdict
        case = gate.VerdictCase(grads.number, grads.shown, self.faults.tensor, plan.pins, judged.number)
        were = self._found(plan)
        if were is not None:
            self.timeline.uses(were)
        if admit is not None:
            admit()
        number, numbers = self.numbers_of_step(rule, draft, judged.number)
        self.step_beside(numbers)
        seed = int(self.rows.spec.key)
        args = case if verdict is None else verdict, grads.clip_value, plan.count, self.near.homes, self.first
        rows.step(plan.keys, plan.ids, grads.values, *args, seed, number, numbers, self.form, were)
        if not self.timeline.is_recorded:
            self.faults.ask()

    def draft_step(self, rule: Rule) -> Any:
        """Do all that can fail of counting a step; return the numbers of the rule, on the device. Nothing changes."""
        return self._uploaded(next_numbers(self.rows, rule))

    def numbers_of_step(self, rule: Rule, draft: Any, judged: Any) -> tuple[Any, Any]:
        """Count a step that was drafted; return its number and those of the rule, for kernels.

        Args:
            rule: laid out as the table's.
            draft: what `draft_step` returned.
            judged: see `StepVerdict.number`.
        """
        captured: Any = self.timeline.captured
        return self.count_step(draft, judged) if captured is None else captured.begin_step(self, rule)

    def count_step(self, draft: Any, judged: int) -> tuple[int, Any]:
        """Do what `numbers_of_step` does, where the step is made by launches, or by the replay that comes next."""
        rows = self.rows
        rows.count(draft)
        self.note_change()
        if judged:
            self.faults.note_step(judged)
        return rows.steps, draft

    def check_rule(self, rule: Rule) -> None:
        """Raise `ArgumentError` unless a rule is laid out as the table's."""
        if not rule.same_layout(self.rows.spec.rule):
            raise ArgumentError(f"`rule` must be laid out as that of {self.rows.subject}: got {rule}.")

    @property
    def room(self) -> Any:
        """What has room for the rows of a step: tables that have theirs together are prepared together.

        None: there is room for all rows from the beginning.
        """
        return self

    def prepare(self, grads: DeviceRowGradients) -> None:
        """Do all that can fail of `ready` for a step by these gradients. No row changes."""
        self.prepare_all([(self, grads)])

    @abstractmethod
    def prepare_all(self, parts: Sequence[tuple[Any, DeviceRowGradients]]) -> None:
        """Do what `prepare` does for a step of all tables that have this one's `room`: of these sides."""

    def judges(self, grads: DeviceRowGradients) -> bool:
        """Return whether the kernel that steps these gradients, of this table alone, decides if it is stepped."""
        return False  # rows get their records before, if it is

    def is_prepared(self, grads: DeviceRowGradients) -> bool:
        """Return whether what `prepare` found still holds. The caller has the table."""
        return True

    def plan_in_ram(self, grads: DeviceRowGradients) -> Plan | None:
        """Return the plan of the host whose rows have to be in RAM for a step."""
        return None

    def elsewhere(self, grads: DeviceRowGradients) -> list[DeferredInserts]:
        """Return the new rows of a step that are to find room together with those of others; none: it has its own."""
        return []

    def cover_all(self, parts: Sequence[tuple[Any, DeviceRowGradients]]) -> None:  # noqa: B027  # most have no more to do
        """See to it that the device may use new records of a step, as `prepare_all` does."""

    @abstractmethod
    def ready(self, plan: DevicePlan, verdict: Tensor | None, grads: DeviceRowGradients) -> ReadyPlan:
        """Let a step by the verdict, int32 (LINE,), begin; no row changes."""

    def step_beside(self, numbers: Any) -> None:  # noqa: B027  # most need not
        """Do what the host does of a step that was counted; `numbers` are the rule's."""

    def skip_step(self) -> None:
        """Count a step that is left out."""
        with self.rows.table_lock.lock:
            self.rows.skipped_steps += 1

    def note_use(self) -> None:
        """Let whatever changes the tier's records wait for `finish`."""
        self.rows.table_lock.use(self)

    def note_change(self) -> None:
        """Let whatever reads the tier's records wait for `finish`."""
        self.note_use()
        self._is_looked_up = False
        self._seen, self.clock.begun = self._version.now, self.clock.stamp + 1
        if self._ahead is not None and self._ahead.stamp is not None:  # its rows are in use from now on
            self.clock.begun = self._ahead.stamp

    def _uploaded(self, numbers: Any) -> Any:
        """Return a step's numbers with their history, which grows by a step at a time, on the device."""
        if not hasattr(numbers, "history"):
            return numbers
        fields = [name for name in HISTORIES if hasattr(numbers, name)]  # Ftrl's has no log_fade
        return numbers._replace(**{name: self._histories.follow(name, numbers) for name in fields})
