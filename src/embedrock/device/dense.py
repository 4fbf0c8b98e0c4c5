"""`DenseGpuExecutor`: an executor whose slots are ids, so that the GPU plans and locates every row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedrock.device import joint_plan
from embedrock.device.cache import BatchNumbers, BatchNumbersInMemory, DeviceCache, present
from embedrock.device.executor import GpuExecutor, ReadyPlan, drawn_by
from embedrock.device.features import TableFamily, kind_of
from embedrock.device.gradients import DeviceRowGradients, RowSums, sum_rows
from embedrock.device.joint_plan import PrefetchedPlan, version_of
from embedrock.device.pinned import PinnedRecords, staging
from embedrock.device.plan import DevicePlan, make_plan
from embedrock.errors import counted
from embedrock.kernels.gpu import cache, rows
from embedrock.kernels.gpu import plan as kernels
from embedrock.kernels.gpu.addresses import ABSENT, CHANGED, FAR
from embedrock.kernels.gpu.joint import TableEntryWords
from embedrock.kernels.gpu.rows import InitialRecord
from embedrock.storage.device_layout import DeviceLayout
from embedrock.storage.ram_backend import RamBackend, take_ram
from embedrock.system.spans import spanned
from embedrock.table.rows import TableState

COPIED_ROWS, COPIED_BYTES = 1 << 20, 64 << 20  # at most at a time, between GPU memory and unpinned RAM


class DenseGpuExecutor(GpuExecutor):
    """Executor that keeps all rows on device, a cache of them, or none. The rest is used zero-copy in pinned RAM.

    Args:
        rows: of the table.
        tier: backend of the records, with slot = id: the table's, or its pool's.
        device: the GPU.
        placement: the split of the records between GPU memory and RAM.

    Raises:
        PinningError: the system refuses to pin the backend's RAM.
    """

    def __init__(self, rows: TableState, tier: RamBackend, device: torch.device, placement: DeviceLayout) -> None:
        super().__init__(rows, rows.tier, device)
        drawn = drawn_by(self.spec.init)
        count = self.spec.rows
        assert count is not None  # a dense index has a row count
        assert drawn is not None  # else the host plans, and draws
        self.placement, self._count, self._memory = placement, count, tier
        self.drawn = drawn
        self.first = InitialRecord(drawn, self.uploaded(self.spec.first_state))
        self._pinned = None
        if placement.mode != "device":
            self._pinned = PinnedRecords(tier.records.bytes, device, self.timeline.finish)
        far = 0
        if self._pinned is not None:
            tier.arena.expect_all()
            self._pinned.cover(tier.records.bytes.nbytes)
            far = self._pinned.address
        self.where = torch.full((self._count,), ABSENT, dtype=torch.int32, device=device)
        self.near = DeviceCache(self.where, placement, self.form, far)
        self._is_newer = False  # the device's records, compared to the backend's

    # ------------------------------------------------------------ copies between device and backend

    def _follow(self) -> None:
        """Load the CPU's changes. Device records are not newer: the CPU changes rows only after `finish`."""
        if self._seen == self._version.now:
            return
        bits = torch.from_numpy(np.unpackbits(self._memory.dense.bits, count=self._count, bitorder="little"))
        self.near.clear()
        for start in range(0, self._count, COPIED_ROWS):
            some = bits[start : start + COPIED_ROWS].to(self.device).bool()
            self.where[start : start + COPIED_ROWS] = torch.where(some, FAR, ABSENT).to(torch.int32)
        if self.placement.mode == "device":
            for ids in self._ids_where(present):
                self.near.records[ids] = self.uploaded(self._memory.records.bytes[ids.cpu().numpy()])
                self.where[ids] = ids.to(torch.int32)
        self._seen = self._version.now

    def _ids_where(self, holds: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
        """Yield batches of the ids whose word of `where` satisfies a condition."""
        copied = max(1, min(COPIED_ROWS, COPIED_BYTES // self.spec.record_bytes))
        for start in range(0, self._count, copied):
            ids = holds(self.where[start : start + copied]).nonzero()[:, 0] + start
            if len(ids):
                yield ids

    def _finish(self) -> None:
        self.timeline.finish()
        self.faults.look()
        if not self._is_newer:
            return
        if self.placement.mode == "device":
            self._check_ram()
            self._write_back()
        self.near.write_back()
        bits = np.concatenate([present(part).cpu().numpy() for part in self.where.split(COPIED_ROWS)])
        index = self._memory.dense
        index.bits[:], index.count = np.packbits(bits, bitorder="little"), int(np.count_nonzero(bits))
        self.timeline.finish()
        self._is_newer = False

    def _check_ram(self) -> None:
        """Raise `MemoryBudgetError` if RAM is too small for the records that only the GPU has."""
        more = self._present_rows() - self._memory.count
        if more > 0 and not self._memory.placement.is_told:
            there = f"{counted(more, 'row')} of {self.rows.subject} are in GPU memory only, and who reads or saves them"
            remedy = "Nothing has changed. Free RAM and ask again, or pass memory= to say how much the table"
            take_ram(more * self.spec.record_bytes, f"{there} needs them in RAM", remedy)

    def _write_back(self) -> None:
        """Copy changed records to RAM, through pinned memory that the GPU writes."""
        size, through = self.spec.record_bytes, None
        for ids in self._ids_where(lambda words: words >= CHANGED):
            if through is None:
                through = staging(max(size, min(COPIED_BYTES, self._count * size)), self.device)
            targets = through.data_ptr() + torch.arange(len(ids), device=self.device) * size
            cache.copy_records(self.near.memory.near + ids * size, targets, size)
            self.timeline.finish()
            self._memory.records.bytes[ids.cpu().numpy()] = through[: len(ids) * size].view(-1, size).numpy()
            self.where[ids] = ids.to(torch.int32)

    def _present_rows(self) -> int:
        return sum(int(present(part).sum()) for part in self.where.split(COPIED_ROWS))

    def close(self) -> None:
        super().close()
        self.where = self.where[:0].clone()
        if self._pinned is not None:
            self._pinned.close()

    def stats(self) -> dict[str, float]:
        """Return statistics, and the number of rows with records if only the device knows it. Waits for the device."""
        numbers = {"rows_touched": self._present_rows()} if self._is_newer else {}
        near = {"device_slots": self.placement.near_rows, "device_bytes": self.placement.bytes}
        return {**numbers, **near, **self.near.stats()}

    def __repr__(self) -> str:
        return f"on {self.device}: {self.placement}"

    # ------------------------------------------------------------ lookups and steps

    @spanned("plan")
    def plan(self, ids: Tensor, trains: bool) -> DevicePlan:
        with self.working:
            return self._planned(ids, trains)

    def _begin(self) -> None:
        if not self.timeline.is_recorded:  # a recorded step does so before each replay
            self.begin()
            self._follow()

    def _planned(self, ids: Tensor, trains: bool) -> DevicePlan:
        ahead = self.take_ahead()
        plan = None if ahead is None else ahead.plan
        if plan is not None and ahead is not None and trains and ahead.is_of(ids):
            assert ahead.fault is not None  # the device planned
            self.timeline.uses(plan.keys, plan.order, plan.all_keys, ahead.fault)  # one tensor of each allocation
            kernels.adopt(self.faults.tensor, ahead.fault)
            plan = replace(plan, shape=tuple(ids.shape))
        else:  # a prefetched batch was counted when it was loaded
            placed = self.on_device(ids)
            stamps = self.begin_batch(placed.numel(), trains)
            plan = self._planned_and_loaded(placed, self.faults.tensor, stamps, counts=ahead is None)
        self.end_batch(trains)
        return plan

    def _next_stamps(self, n: int, trains: bool) -> BatchNumbers:
        self.clock.stamp += 1
        return self.near.stamps(n, self.clock.stamp, self.oldest(trains))

    def _planned_and_loaded(
        self, ids: Tensor, fault: Tensor, stamps: BatchNumbers | BatchNumbersInMemory, counts: bool
    ) -> DevicePlan:
        """Plan a batch, and load its rows into the cache."""
        arrival = self.near.arrival(ids.numel(), stamps, self.timeline, counts)
        plan = make_plan(ids, self._count, fault, self.clock.stamp, arrival)
        if arrival is not None:
            self.near.bring(arrival, plan.all_keys, ids.numel())
        return plan

    def _plan_ahead(self, ids: Tensor) -> None:
        """Plan the next batch and load its rows, in parallel with the device's current work."""
        placed = self.on_device(ids)
        with self.timeline.aside(placed):
            fault = torch.zeros_like(self.faults.tensor)  # bad ids become an error only when the batch is looked up
            plan = self._planned_and_loaded(placed, fault, self._next_stamps(placed.numel(), trains=True), counts=True)
            self._ahead = PrefetchedPlan(ids, version_of(ids), plan, None, fault)

    def gather(self, plan: DevicePlan, positions: Tensor | None, out: Tensor) -> None:
        which = (plan.keys, plan.count) if positions is None else (positions, positions.shape[0])
        rows.read(*which, self.near.homes, int(self.spec.key), self.drawn, self.form, out)

    @property
    def room(self) -> None:
        """None: the kernel that steps rows creates their records."""

    def prepare_all(self, parts: Sequence[tuple[Any, DeviceRowGradients]]) -> None:
        """Do nothing: no step needs room."""

    def judges(self, grads: DeviceRowGradients) -> bool:
        # Not for merged gradients, those of several tables, or an empty plan, for which no kernel runs.
        return type(grads.sums) is RowSums and grads.plan.keys.shape[0] > 0

    def begin_together(self) -> None:
        """Begin a step of several tables. No row changes."""
        self._begin()
        self.timeline.wait_for_copies()

    def ready(self, plan: DevicePlan, verdict: Tensor | None, grads: DeviceRowGradients) -> ReadyPlan:
        self.begin_together()
        return ReadyPlan(plan)

    def note_change(self) -> None:
        super().note_change()
        self._is_newer = True

    @property
    def not_captured(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.rows.history is not None:
            return "its rule has dense=True, and the numbers of all steps so far grow in GPU memory"
        return None

    # ------------------------------------------------------------ together with other tables

    @property
    def joins(self) -> TableFamily | None:
        # A dense rule's stale rows cannot be looked up together. Rules may differ.
        return None if self.rows.history is not None else self._kind

    @functools.cached_property
    def _kind(self) -> TableFamily:
        return kind_of(self)

    @property
    def key_count(self) -> int:
        return self._count + 2

    @property
    def nobody(self) -> int:
        return self._count

    @functools.cached_property
    def known(self) -> TableEntryWords:
        return joint_plan.known_of(self)

    def take_ahead(self) -> PrefetchedPlan | None:
        """Begin a lookup and return its prefetched plan, once. Captured steps have none."""
        if self.timeline.captured is not None:
            return None
        self.check()
        self._begin()
        self.timeline.wait_for_copies()
        ahead, self._ahead = self._ahead, None
        return ahead

    def plan_together(self, joined: joint_plan.JoinedIds) -> joint_plan.DeviceBatchPlan:
        return joined.plan_of_keys()

    def note_ahead(self, ids: Tensor, part: joint_plan.PrefetchedPart) -> None:
        self._ahead = PrefetchedPlan(ids, version_of(ids), None, None, None, part)

    def begin_batch(self, n: int, trains: bool) -> BatchNumbers | BatchNumbersInMemory:
        captured: Any = self.timeline.captured
        return self._next_stamps(n, trains) if captured is None else captured.begin_batch(self, n, trains)

    def count_batch(self, n: int, trains: bool) -> BatchNumbers:
        """Begin a batch of a captured step, for its warm-up or for the next replay."""
        self.check()
        self._begin()
        self.expect_nothing()
        return self._next_stamps(n, trains)

    def expect_nothing(self) -> None:
        """Discard the prefetched plan and the ids of the next batch."""
        self.timeline.wait_for_copies()
        self._ahead = self._expected = None

    # ------------------------------------------------------------ gradients

    def masked(self, plan: DevicePlan, drop: Tensor) -> DevicePlan:
        return replace(plan, keys=torch.where(drop, self._count, plan.keys))

    def _merged(self, earlier: DeviceRowGradients, later: DeviceRowGradients) -> DeviceRowGradients:
        before = self.masked(earlier.plan, earlier.is_dropped)
        keys = torch.cat([before.keys, later.plan.keys])
        plan = make_plan(keys, self._count, self.faults.tensor, later.plan.stamp, merges=True)
        summed = sum_rows(torch.cat([earlier.whole(), later.whole()]), plan, self.no_row)
        most = self._count + 1  # with the key of no row, the last one; a bound for any number of accumulated batches
        count = (plan.keys < self._count).sum(dtype=torch.int32).reshape(1)
        plan = replace(plan, keys=plan.keys[:most], ids=plan.ids[:most], count=count)
        return replace(summed, sums=RowSums(plan, summed.values[:most]))
