"""`GpuExecutor`: base of the executors that read and step a table's rows on a GPU."""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedrock.device.cache import BatchCounter, DeviceCache
from embedrock.device.copies import on_device, uploaded
from embedrock.device.device_errors import DeviceErrors
from embedrock.device.features import DeviceFeature, FeatureBags, bag_words
from embedrock.device.gradients import DeviceRowGradients, sum_rows
from embedrock.device.plan import DeviceBatchPlan, FoundWeights, PrefetchedPlan, SteppedTables
from embedrock.device.pooling import DeviceBags, PlannedTables
from embedrock.device.step_constants import StepConstants
from embedrock.device.stream_order import InStreamOrder, StreamOrder
from embedrock.errors import UnsupportedError
from embedrock.initializers import Constant, Initializer, Normal, TruncatedNormal, Uniform, Zeros
from embedrock.kernels.gpu import rows
from embedrock.kernels.gpu.addresses import DeviceTables, TableEntryWords
from embedrock.kernels.gpu.runtime import RecordForm, single
from embedrock.spec.spec import Spec
from embedrock.storage.backend import Backend
from embedrock.system.spans import spanned
from embedrock.table.rows import TableState

NO_PADDING = -2


def form_of(spec: Spec) -> RecordForm:
    """Return the kernels' layout of a spec's records."""
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
    """Return an initializer's kernel and numbers; None where only the CPU can draw initial values."""
    if type(init) not in DRAWS:
        return None
    kind, fields = DRAWS[type(init)]
    return kind, *(float(getattr(init, field)) for field in fields)


@functools.lru_cache(maxsize=64)
def _placed(words: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(words, dtype=torch.int64, device=device)


class GpuExecutor(ABC):
    """A table's rows as a GPU reads and steps them: a `StaleExecutor`, and an `Executor` of the PyTorch front end.

    No method but `finish` waits for the device unless it says so.

    Args:
        rows: of the table.
        backend: backend of the rows.
        device: the GPU; "cpu" under Triton's interpreter.
        timeline, clock: shared with other executors; None: its own.

    Attributes:
        working: a context that holds the table lock and orders work on the device.
        cache: records in GPU memory, which subclasses create.
        first: initial record of a row; None where the host creates records.
        nobody: the key of no row.
    """

    cache: DeviceCache
    nobody: int
    first: rows.InitialRecord | None = None
    judge: Any  # `steps.judge`, in subclasses
    joins: Any = None  # the family of tables that can be looked up together with this one; None: it is looked up alone
    # The owner of the room for a step's rows. Tables with the same owner are prepared together, by
    # `HostPlannedExecutor.prepare_all`. None: all rows have room from the beginning.
    room: Any = None
    checks_in_step = False  # the kernels of a step check the gradients themselves, where a plan gives them work
    not_captured: str | None = "the host plans its batches"  # why steps cannot be captured; None: they can

    def __init__(
        self,
        rows: TableState,
        backend: Backend,
        device: torch.device,
        timeline: StreamOrder | None = None,
        clock: BatchCounter | None = None,
    ) -> None:
        self._rows_of: Any = weakref.ref(rows)  # the rows own the executor
        self.backend, self.device = backend, device
        self.spec = rows.spec
        self.form = form_of(self.spec)
        self.timeline = timeline or StreamOrder(device, rows.subject)
        self.working = InStreamOrder((self.timeline,), rows.table_lock.lock)
        self._version = rows.version
        self.faults, self.clock = DeviceErrors(rows, device), clock or BatchCounter()
        self._expected: Tensor | None = None
        self._ahead: PrefetchedPlan | None = None
        self._is_looked_up = False  # since the last step
        self._seen = -1  # the table version that it has loaded
        self._tables: tuple[int, DeviceTables] | None = None  # and the cache's generation that they were made for
        self.constants = StepConstants(device, self.timeline)
        self.no_row = torch.full((1,), -1, dtype=torch.int32, device=device)  # the row -1

    @property
    def rows(self) -> TableState:
        """The table's rows, which callers keep alive."""
        return self._rows_of()

    # ------------------------------------------------------------ for the table

    def finish(self) -> None:
        self.rows.check_process()
        with self.timeline.ordered():
            self._finish()

    @abstractmethod
    def _finish(self) -> None: ...

    def check(self) -> None:
        if not self.timeline.is_recorded:
            self.faults.check()

    def may_forget(self) -> bool:
        return False

    @abstractmethod
    def stats(self) -> dict[str, float]: ...

    def close(self) -> None:
        """Release the memory, even if handles still reference the executor."""
        self.timeline.finish()
        self._free()
        self._ahead = self._expected = self._tables = None
        self.constants = StepConstants(self.device, self.timeline)

    def _free(self) -> None:
        self.cache.free()

    @property
    def is_current(self) -> bool:
        return self._rows_of().are_used_by(self, self.backend, self.spec)

    def is_used_on(self, device: torch.device) -> bool:
        return self.device == device and self.is_current

    @property
    def tables(self) -> DeviceTables:
        """The table alone for kernels, with slots as keys. The caller holds `working`."""
        generation = self.cache.generation
        if self._tables is None or self._tables[0] != generation:
            self._forget_words()
            self._tables = generation, self._tables_of(self.entry_words())
        return self._tables[1]

    def _forget_words(self) -> None:
        """Forget the words about the table, as some have changed."""
        if self._tables is not None:
            self.timeline.uses(self._tables[1].entries)
        self._tables = None

    def _tables_of(self, words: TableEntryWords) -> DeviceTables:
        entries = uploaded(np.array([words.words], np.int64), self.device)
        draw = None if self.first is None else self.first.drawn[0]
        return DeviceTables(entries, self.cache.kind, draw, self.form)

    def counted(self, counts: bool) -> DeviceTables:
        """Return the table alone for a batch's insertion into the cache; `counts`: hits and misses are counted."""
        return self.tables if counts else self._tables_of(self.entry_words().uncounted(self.cache.not_counted))

    def entry_words(self) -> TableEntryWords:
        """Return the words about the table for kernels, without a range of keys, a padding, and a hash index."""
        cache, (state, numbers) = self.cache, (0, ())
        if self.first is not None:
            state, numbers = self.first.state.data_ptr(), self.first.drawn[1:]
        words = np.array([single(number) for number in (*numbers, 0.0, 0.0, 0.0)[:3]], np.float32).view(np.int32)
        places = cache.slots.where.data_ptr(), *cache.memory[:2]
        of_row = int(self.spec.key) % 2**64, state, self.faults.tensor.data_ptr(), tuple(words.tolist())
        slots = tuple(part.data_ptr() if cache.is_cache else 0 for part in cache.slots[1:])
        return TableEntryWords(0, cache.limit, *places, *of_row, NO_PADDING, (*slots, len(cache.slots.owner)))

    # ------------------------------------------------------------ lookups

    def feature(self, ids: Tensor, padding: int | None) -> DeviceFeature:
        return DeviceFeature(self, ids, padding)

    def pooled_feature(
        self, ids: Tensor, padding: int | None, mode: str, starts: Tensor | None, weights: Tensor | None
    ) -> DeviceFeature:
        """Return bags that are looked up together with those of others.

        Args:
            ids: (bags, n); or (n,) with `starts`.
            padding: the id that gets no gradient, and counts in no bag.
            mode: "sum", "mean" or "max".
            starts: first position of each bag, (bags,); host tensors are already checked.
            weights: of the ids, in their shape, or None.
        """
        own = None if weights is None else self._float32(weights.reshape(-1))
        size = ids.shape[1] if starts is None else 0
        return DeviceFeature(self, ids.reshape(-1), padding, FeatureBags(mode, size, starts, own))

    @abstractmethod
    def plan(self, ids: Tensor, trains: bool) -> DeviceBatchPlan:
        """Plan a batch of ids, and load its rows into the cache. They stay there for a following step."""

    def end_batch(self, trains: bool) -> None:
        """Record that a batch was planned, in which ids may be wrong; `trains`: a step may follow."""
        if self.timeline.is_recorded:
            return
        if not trains or self._is_looked_up:
            self.faults.ask()  # else the following step does
        self._is_looked_up = trains

    def lookup(self, ids: Tensor) -> Tensor:
        return self.read(self.plan(ids, trains=False))

    def read(self, plan: DeviceBatchPlan) -> Tensor:
        """Return the weights of the row of each position: float32 ``plan.shape + (dim,)``."""
        if plan.positions is not None and self.cache.is_identity and not self.rows.lags:
            out = self._read(plan, plan.positions)  # one kernel reads device rows into their final places
        else:
            out = self.read_rows(plan).index_select(0, plan.inverse)
        return out if len(plan.shape) == 1 else out.reshape(*plan.shape, self.spec.dim)

    def read_rows(self, plan: DeviceBatchPlan) -> Tensor:
        """Return the weights of a plan's rows: float32 (n, dim)."""
        out = self._read(plan, None)
        plan.found = FoundWeights(out, (self.rows.version.of_rows,)) if self.keeps_weights else None
        return out

    @property
    def keeps_weights(self) -> bool:
        """True if a step reuses the weights that its lookup read: records in RAM, no dense rule."""
        return not self.cache.placement.near_rows and self.rows.history is None

    def _read(self, plan: DeviceBatchPlan, positions: Tensor | None) -> Tensor:
        """Return the weights of a plan's rows, float32 (n, dim); with `positions`, one line for each position.

        With `positions`, no row may be stale.
        """
        with self.working:
            self.timeline.wait_for_copies()
            count = (plan.keys if positions is None else positions).shape[0]
            out = torch.empty(count, self.spec.dim, dtype=torch.float32, device=self.device)
            self.gather(plan, positions, out)
            if positions is None and self.rows.history is not None and self.rows.lags:  # otherwise no row is stale
                now = self.constants.uploaded(self.rows.history.numbers())
                rows.refresh(out, plan.keys, plan.count, self.tables, now)
            self.rows.table_lock.use(self)
            expected, self._expected = self._expected, None
            if expected is not None:
                self._plan_ahead(expected)
        return out

    def expect(self, ids: Tensor | None) -> None:
        """Plan the next batch after the next lookup, and load its rows, in parallel with the device's work.

        Later work that uses rows waits for the copies on the device. So no row is read or stepped while it moves. A
        lookup of the same unchanged tensor reuses the prefetched plan.
        """
        self._expected = ids

    def take_expected(self) -> Tensor | None:
        """Return the ids of the next batch, once; None if they are unknown."""
        expected, self._expected = self._expected, None
        return expected

    @abstractmethod
    def _plan_ahead(self, ids: Tensor) -> None:
        """Plan the next batch, for a step. The caller holds `working`."""

    @abstractmethod
    def gather(self, plan: DeviceBatchPlan, positions: Tensor | None, out: Tensor) -> None:
        """Write the weights of a plan's rows to `out` float32 (n, dim), initial values where there is no record.

        With `positions`, the keys of the plan's positions, write one line for each position.
        """

    def on_device(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device. The host does not wait for the copy.

        Raises:
            UnsupportedError: the tensor is on the host, and a CUDA graph replays the step.
        """
        if tensor.device == self.device:
            return tensor
        if self.timeline.captured is not None:
            raise UnsupportedError(
                f"ids, offsets and weights of {self.rows.subject} must be on {self.device} in a captured step: got "
                f"some on {tensor.device}, which each replay would read as they are now. Give them to the step as "
                "arguments: ert.graphed copies these there."
            )
        return on_device(tensor, self.device)

    # ------------------------------------------------------------ gradients

    @spanned("sum")
    def sum(self, plan: DeviceBatchPlan, grads: Tensor, padding: int | None, by_frequency: bool) -> DeviceRowGradients:
        with self.working:
            skip, plan = self._without(plan, padding)
            grads = grads if grads.dim() == 2 else grads.reshape(-1, self.spec.dim)
            if grads.stride(1) != 1:  # expanded (as of a sum) or transposed; kernels read contiguous rows
                grads = grads.contiguous()
            summed = sum_rows(grads, plan, skip)
            return summed.by_frequency() if by_frequency else summed

    def _without(self, plan: DeviceBatchPlan, padding: int | None) -> tuple[Tensor, DeviceBatchPlan]:
        """Return the row of the padding id, int32 (1,), -1 for none, and the plan without that row."""
        if padding is None or not plan.ids.numel():
            return self.no_row, plan
        found = plan.ids == padding
        row = torch.where(found.any(), found.to(torch.int32).argmax(), -1)
        return row.to(torch.int32).reshape(1), self.masked(plan, found)

    def masked(self, plan: DeviceBatchPlan, drop: Tensor) -> DeviceBatchPlan:
        """Return a plan that does not step the rows in `drop`, bool (n,) or ()."""
        return replace(plan, keys=torch.where(drop, self.nobody, plan.keys), new=None)

    def merge(self, earlier: DeviceRowGradients, later: DeviceRowGradients) -> DeviceRowGradients:
        with self.working:
            return self._merged(earlier, later)

    @abstractmethod
    def _merged(self, earlier: DeviceRowGradients, later: DeviceRowGradients) -> DeviceRowGradients: ...

    def no_gradients(self) -> DeviceRowGradients:
        nothing = torch.empty(0, self.spec.dim, device=self.device)
        return self.sum(self.plan(torch.empty(0, dtype=torch.int64, device="cpu"), True), nothing, None, False)

    # ------------------------------------------------------------ bags

    def bags(self, plan: DeviceBatchPlan, bags: FeatureBags, padding: int | None) -> DeviceBags:
        """Return the bags of a plan's positions."""
        with self.working:
            skip, plan = self._without(plan, padding)
            n = len(plan.inverse)
            cuts = self.placed((0, n, 0, *bag_words([bags], [n])), bags.starts is None)
            tickets = torch.zeros(2, dtype=torch.int32, device=self.device)
            made = DeviceBags([bags], [n], PlannedTables(self, plan, self.tables, skip, tickets), cuts)
            if not self.timeline.is_recorded:
                self.faults.ask_again()
            return made

    def placed(self, words: tuple[int, ...], recurs: bool) -> Tensor:
        """Return words on the device, int64, cached if the next batch may have the same words."""
        if self.timeline.captured is None and not recurs:
            return uploaded(np.array(words, np.int64), self.device)
        found = _placed(words, self.device)
        self.timeline.keep(found)
        return found

    def _float32(self, weights: Tensor | None) -> Tensor | None:
        return None if weights is None else self.on_device(weights.detach()).to(torch.float32).contiguous()

    # ------------------------------------------------------------ steps

    def prepare(self, grads: DeviceRowGradients) -> None:  # noqa: B027  # most need not
        ...

    def begin_step(self) -> None:  # noqa: B027  # where the host plans, `ready` does so
        """Begin a step. No row changes."""

    def ready(self, verdict: Any, grads: DeviceRowGradients) -> SteppedTables:
        """Return the table alone for a step that has begun. No row changes.

        `verdict`: int32 (LINE,), or a `gate.VerdictCase` if the executor `checks_in_step`.
        """
        plan = grads.plan
        return SteppedTables(self.tables, plan.keys, plan.ids, plan.count, None, grads.values, found=plan.found)

    def step_beside(self, numbers: Any) -> None:  # noqa: B027  # most need not
        """Do the host's part of a counted step; `numbers` are the rule's step constants."""

    def mark_changed(self) -> None:
        """Make later reads of the backend's records wait for `finish`."""
        self._rows_of().table_lock.use(self)
        self._is_looked_up = False
        self._seen, self.clock.begun = self._version.now, self.clock.stamp + 1
        if self._ahead is not None and self._ahead.stamp is not None:  # the prefetched rows are in use from now on
            self.clock.begun = self._ahead.stamp
