"""`GpuExecutor`: base of the executors that read and step a table's rows on a GPU."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedrock.device import device_errors
from embedrock.device.batch import DeviceBatch
from embedrock.device.cache import BatchCounter, DeviceCache
from embedrock.device.copies import on_device, uploaded
from embedrock.device.features import NO_PADDING, FeatureBags, FeatureLayout, TableFamily, family_of
from embedrock.device.gradients import DeviceRowGradients, RowSums
from embedrock.device.lookup import DeviceLookup
from embedrock.device.prefetched import PrefetchedBatch
from embedrock.device.step_constants import StepConstants
from embedrock.device.stream_order import InStreamOrder, StreamOrder
from embedrock.errors import UnsupportedError
from embedrock.initializers import Constant, Initializer, Normal, TruncatedNormal, Uniform, Zeros
from embedrock.kernels.gpu import rows
from embedrock.kernels.gpu.addresses import BatchTime, TableEntryWords
from embedrock.kernels.gpu.runtime import RecordForm
from embedrock.spec.spec import Spec
from embedrock.storage.backend import Backend
from embedrock.table.rows import TableState

COPIED_ROWS, COPIED_BYTES = 1 << 20, 64 << 20  # at most at a time, between GPU memory and unpinned RAM


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
        family: of tables that batches may have together with this one.
        known: the words about the table for kernels: see `entry_words`.
        first: initial record of a row; None where the host creates records.
        batch: type of the batches of tables of the family.
        is_looked_up: a lookup that trains came since the last step.
        expected: ids of the next batch; None if they are unknown, or if no plan ahead of it is needed.
        ahead: the prefetched batch; None: there is none.
        is_newer: the device's records are newer than the backend's.
    """

    cache: DeviceCache
    family: TableFamily
    known: TableEntryWords
    first: rows.InitialRecord | None = None
    judge: Any  # `steps.judge`, in subclasses
    batch: type[DeviceBatch]
    is_newer = False
    # The device plans, not the host. Then `begin` does nothing unless the table's version or state has changed, and the
    # kernels of a step check the gradients themselves, where a batch gives them work.
    plans = False
    joins: Any = None  # the family of tables that can be looked up together with this one; None: it is looked up alone
    # The owner of the room for a step's rows. Tables with the same owner are prepared together, by
    # `HostPlannedExecutor.prepare_all`. None: all rows have room from the beginning.
    room: Any = None
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
        self.faults, self.clock = device_errors.DeviceErrors(rows, device), clock or BatchCounter()
        self.expected: Tensor | None = None
        self.ahead: PrefetchedBatch | None = None
        self.is_looked_up = False
        self._seen = -1  # the table version that it has loaded
        self.constants = StepConstants(device, self.timeline)
        self.no_fault = torch.ones(4, dtype=torch.int64, device=device)  # takes no other error

    @property
    def rows(self) -> TableState:
        """The table's rows, which callers keep alive."""
        return self._rows_of()

    # ------------------------------------------------------------ for the table

    def finish(self) -> None:
        self.rows.check_process()
        with self.timeline.ordered():
            self._finish()

    def _finish(self) -> None:
        self.timeline.finish()
        self.faults.look()
        self._write_back()

    @abstractmethod
    def _write_back(self) -> None:
        """Copy what is newer on the device to the backend. Waits for the device."""

    def check(self) -> None:
        if not self.timeline.is_recorded:
            device_errors.check([self.faults])

    def may_forget(self) -> bool:
        return False

    @abstractmethod
    def stats(self) -> dict[str, float]: ...

    def close(self) -> None:
        """Release the memory, even if handles still reference the executor."""
        self.timeline.finish()
        self._free()
        self.ahead = self.expected = None
        self.constants = StepConstants(self.device, self.timeline)

    def _free(self) -> None:
        self.cache.free()

    @property
    def is_current(self) -> bool:
        return self._rows_of().are_used_by(self, self.backend, self.spec)

    def is_used_on(self, device: torch.device) -> bool:
        return self.device == device and self.is_current

    def use(self, cache: DeviceCache) -> None:
        """Use records at the current places of a cache. Caller holds the table lock."""
        self.cache = cache
        self.family, self.known = family_of(self), self.entry_words()

    def entry_words(self) -> TableEntryWords:
        """Return the words about the table for kernels, without a range of keys, a padding, and a hash index."""
        cache, (state, numbers) = self.cache, (0, ())
        if self.first is not None:
            state, numbers = self.first.state.data_ptr(), self.first.drawn[1:]
        words = np.array((*numbers, 0.0, 0.0, 0.0)[:3], np.float32).view(np.int32)
        places = cache.slots.where.data_ptr(), cache.near, cache.far
        of_row = int(self.spec.key) % 2**64, state, self.faults.tensor.data_ptr(), tuple(words.tolist())
        slots = tuple(part.data_ptr() if cache.is_cache else 0 for part in cache.slots[1:])
        return TableEntryWords(0, cache.limit, *places, *of_row, NO_PADDING, (*slots, len(cache.slots.owner)))

    # ------------------------------------------------------------ where the device plans

    def _draw_on_device(self) -> None:
        drawn = drawn_by(self.spec.init)
        assert drawn is not None  # else the host plans, and draws
        self.first = rows.InitialRecord(drawn, uploaded(self.spec.first_state, self.device))

    def _check_open(self) -> None:
        rows = self._rows_of()
        rows.table_lock.settle_steps()
        rows.tier  # noqa: B018  # it is open

    @property
    def _rows_at_a_time(self) -> int:
        return max(1, min(COPIED_ROWS, COPIED_BYTES // self.spec.record_bytes))

    def _slots_where(self, holds: Callable[[Tensor], Tensor], count: int) -> Iterator[Tensor]:
        """Return those of the first `count` slots whose address words fulfil a condition, some at a time."""
        for start in range(0, count, self._rows_at_a_time):
            stop = min(start + self._rows_at_a_time, count)
            slots = holds(self.cache.slots.where[start:stop]).nonzero()[:, 0] + start
            if len(slots):
                yield slots

    # ------------------------------------------------------------ lookups

    def bags(self, ids: Tensor, mode: str, starts: Tensor | None, weights: Tensor | None) -> FeatureBags:
        """Return bags of ids.

        Args:
            ids: (bags, n); or (n,) with `starts`.
            mode: "sum", "mean" or "max".
            starts: first position of each bag, (bags,); host tensors are already checked.
            weights: of the ids, in their shape, or None.
        """
        if weights is not None:
            weights = self.on_device(weights.detach().reshape(-1)).to(torch.float32).contiguous()
        return FeatureBags(mode, ids.shape[1] if starts is None else 0, starts, weights)

    def layout(self, padding: int | None = None) -> FeatureLayout:
        """Return a new layout of lookups of the table alone. (The executor keeps none, as layouts keep executors.)"""
        return FeatureLayout([self], [padding])

    def begin_batch(self, n: int, trains: bool) -> BatchTime:
        """Begin a batch of n positions; return its time."""
        self.clock.stamp += 1
        return self.cache.begin_batch(n, self.clock, trains)

    @property
    def keeps_weights(self) -> bool:
        """True if a step can reuse weights that its lookup read from RAM: no dense rule."""
        return self.rows.history is None

    @property
    def lags(self) -> bool:
        """Return whether weights in records may be stale."""
        history = self._rows_of().history
        return history is not None and history.moves_weights

    @property
    def stale(self) -> Any:
        """Step constants by which copies of weights catch up; None if weights in records are not stale."""
        history = self._rows_of().history
        return None if history is None or not history.moves_weights else self.constants.uploaded(history.numbers())

    def expect(self, ids: Tensor | None) -> None:
        """Plan the next batch after the next lookup, and load its rows, in parallel with the device's work.

        Later work that uses rows waits for the copies on the device. So no row is read or stepped while it moves. A
        lookup of the same unchanged tensor reuses the prefetched plan. If the device plans, and no rows are copied to
        it, nothing is done ahead.
        """
        self.expected = None if self.plans and not self.cache.is_cache else ids

    def planned_by_host(self, layout: FeatureLayout, ids: Tensor, trains: bool) -> DeviceBatch:
        """Plan a batch of the table alone on the host, and load its rows."""
        raise NotImplementedError

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

    def merge(self, earlier: DeviceRowGradients, later: DeviceRowGradients) -> DeviceRowGradients:
        with self.working:
            return self._merged(earlier, later).of(0)

    @abstractmethod
    def _merged(self, earlier: DeviceRowGradients, later: DeviceRowGradients) -> RowSums: ...

    def no_gradients(self) -> DeviceRowGradients:
        lookup = DeviceLookup(self.layout(), [torch.empty(0, dtype=torch.int64, device="cpu")], trains=True)
        ((sums, _),) = lookup.sums([torch.empty(0, self.spec.dim, device=self.device)])
        return sums.of(0)

    # ------------------------------------------------------------ steps

    def prepare(self, grads: DeviceRowGradients) -> None:  # noqa: B027  # most need not
        ...

    def begin(self) -> None:  # noqa: B027  # where the host plans, its batch does so
        """Begin to use rows: wait for CPU steps, check that the table is open, and load changes of the CPU.

        Caller holds the table lock.

        Raises:
            ClosedTableError: the table is closed.
        """

    def mark_changed(self) -> None:
        """Make later reads of the backend's records wait for `finish`."""
        table_lock = self._rows_of().table_lock
        if self not in table_lock.running:
            table_lock.use(self)
        self.is_looked_up, self.is_newer = False, True
        self._seen, self.clock.begun = self._version.now, self.clock.stamp + 1
        if self.ahead is not None:  # the prefetched rows are in use from now on
            self.clock.begun = self.ahead.stamps.get(self, self.clock.begun)
