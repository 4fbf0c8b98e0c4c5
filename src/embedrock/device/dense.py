"""`DenseGpuExecutor`: an executor whose slots are ids, so that the GPU plans and locates every row."""

from __future__ import annotations

import numpy as np
import torch

from embedrock.device.batch import DeviceBatch
from embedrock.device.cache import DeviceCache, present
from embedrock.device.copies import uploaded
from embedrock.device.executor import COPIED_ROWS, GpuExecutor
from embedrock.device.features import TableFamily
from embedrock.device.gradients import DeviceRowGradients, RowSums, sum_rows
from embedrock.device.pinned import PinnedRecords, staging
from embedrock.device.steps import judge
from embedrock.errors import counted
from embedrock.kernels.gpu import cache
from embedrock.kernels.gpu.addresses import ABSENT, CHANGED, FAR
from embedrock.storage.device_layout import DeviceLayout
from embedrock.storage.ram_backend import RamBackend, take_ram
from embedrock.table.rows import TableState


class DenseGpuExecutor(GpuExecutor):
    """Executor that keeps all rows on device, a cache of them, or none. The rest is used zero-copy in pinned RAM.

    Args:
        rows: of the table.
        backend: backend of the records, with slot = id: the table's, or its pool's.
        device: the GPU.
        placement: the split of the records between GPU memory and RAM.

    Raises:
        PinningError: the system refuses to pin the backend's RAM.
    """

    judge = staticmethod(judge)
    batch = DeviceBatch
    plans = True

    def __init__(self, rows: TableState, backend: RamBackend, device: torch.device, placement: DeviceLayout) -> None:
        super().__init__(rows, rows.tier, device)
        count = self.spec.rows
        assert count is not None  # a dense index has a row count
        self.placement, self._count, self._memory, self._epoch = placement, count, backend, backend.epoch
        self._draw_on_device()
        far, self._pinned = 0, None
        if placement.mode != "device":
            self._pinned = PinnedRecords(backend.records.bytes, device, self.timeline.finish)
            backend.arena.expect_all()
            self._pinned.cover(backend.records.bytes.nbytes)
            far = self._pinned.address
        self.where = torch.full((self._count,), ABSENT, dtype=torch.int32, device=device)
        self.use(DeviceCache(self.where, placement, self.form, far))

    # ------------------------------------------------------------ copies between device and backend

    def _follow(self) -> None:
        """Load the CPU's changes. Device records are not newer: the CPU changes rows only after `finish`."""
        bits = torch.from_numpy(np.unpackbits(self._memory.dense.bits, count=self._count, bitorder="little"))
        self.cache.clear()
        for start in range(0, self._count, COPIED_ROWS):
            some = bits[start : start + COPIED_ROWS].to(self.device).bool()
            self.where[start : start + COPIED_ROWS] = torch.where(some, FAR, ABSENT).to(torch.int32)
        if self.placement.mode == "device":
            for ids in self._slots_where(present, self._count):
                self.cache.records[ids] = uploaded(self._memory.records.bytes[ids.cpu().numpy()], self.device)
                self.where[ids] = ids.to(torch.int32)
        self._seen = self._version.now

    def _write_back(self) -> None:
        if not self.is_newer:
            return
        if self.placement.mode == "device":
            self._check_ram()
            self._write_back_near()
        self.cache.write_back()
        bits = np.concatenate([present(part).cpu().numpy() for part in self.where.split(COPIED_ROWS)])
        index = self._memory.dense
        index.bits[:], index.count = np.packbits(bits, bitorder="little"), int(np.count_nonzero(bits))
        self.timeline.finish()
        self.is_newer = False

    def _check_ram(self) -> None:
        """Raise `MemoryBudgetError` if RAM is too small for the records that only the GPU has."""
        more = self._present_rows() - self._memory.count
        if more > 0 and not self._memory.placement.is_told:
            there = f"{counted(more, 'row')} of {self.rows.subject} are in GPU memory only, and who reads or saves them"
            remedy = "Nothing has changed. Free RAM and ask again, or pass memory= to say how much the table"
            take_ram(more * self.spec.record_bytes, f"{there} needs them in RAM", remedy)

    def _write_back_near(self) -> None:
        """Copy changed records to RAM, through pinned memory that the GPU writes."""
        size, through = self.spec.record_bytes, None
        for ids in self._slots_where(lambda words: words >= CHANGED, self._count):
            if through is None:
                through = staging(min(self._rows_at_a_time, self._count) * size, self.device)
            targets = through.data_ptr() + torch.arange(len(ids), device=self.device) * size
            cache.copy_records(self.cache.near + ids * size, targets, size)
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
        numbers = {"rows_touched": self._present_rows()} if self.is_newer else {}
        sizes = {"device_slots": self.placement.near_rows, "device_bytes": self.placement.bytes}
        return {**numbers, **sizes, **self.cache.stats()}

    def __repr__(self) -> str:
        return f"on {self.device}: {self.placement}"

    # ------------------------------------------------------------ lookups and steps

    @property
    def joins(self) -> TableFamily | None:
        # A dense rule's stale rows cannot be looked up together. Rules may differ.
        return None if self._rows_of().history is not None else self.family

    def begin(self) -> None:
        if not self.timeline.is_recorded:  # a recorded step does so before each replay
            self._check_open()
            if self._seen != self._version.now:
                self._follow()

    @property
    def not_captured(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.rows.history is not None:
            return "its rule has dense=True, and the numbers of all steps so far grow in GPU memory"
        return None

    def expect_nothing(self) -> None:
        """Discard the prefetched batch and the ids of the next batch."""
        self.timeline.wait_for_copies()
        self.ahead = self.expected = None

    def _merged(self, earlier: DeviceRowGradients, later: DeviceRowGradients) -> RowSums:
        dropped = torch.zeros((), dtype=torch.bool, device=self.device)
        parts = [(earlier.batch, earlier.is_dropped), (later.batch, dropped)]
        batch = DeviceBatch.of_rows(self, parts, later.batch.stamps[0])
        summed = sum_rows(torch.cat([earlier.whole(), later.whole()]), batch)
        return RowSums(batch, summed.values[: len(batch.keys)], summed.norms, summed)
