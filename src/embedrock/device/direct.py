"""`DirectSide`: a table whose slots are its ids: the GPU plans, and knows where each row is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from embedrock.device.gradients import DeviceGradients, sum_rows
from embedrock.device.near import Bringing, Near, present
from embedrock.device.pinned import Pinned, staging
from embedrock.device.placement import DevicePlacement
from embedrock.device.plan import DevicePlan, make_plan
from embedrock.device.side import DeviceSide, drawn_by
from embedrock.device.steps import Targets
from embedrock.kernels.gpu import cache, rows
from embedrock.kernels.gpu.cache import ABSENT, CHANGED, FAR
from embedrock.process.spans import spanned
from embedrock.table.rows import Rows
from embedrock.tiers.memory import Memory, take_ram
from embedrock.wording import counted

COPIED_ROWS, COPIED_BYTES = 1 << 20, 64 << 20  # at most at a time, between near records and RAM that is not pinned


class DirectSide(DeviceSide):
    """All rows near, a cache of them, or none: whatever is not near is read and stepped in pinned RAM, in place.

    Args:
        rows: of the table.
        tier: of the rows, with a direct directory.
        device: the GPU.
        placement: how the records are spread.

    Raises:
        PinningError: the system does not let the tier's RAM be pinned.
    """

    def __init__(self, rows: Rows, tier: Memory, device: torch.device, placement: DevicePlacement) -> None:
        super().__init__(rows, tier, device)
        drawn = drawn_by(self.spec.init)
        count = self.spec.rows
        assert count is not None  # or its slots would not be its ids
        assert drawn is not None  # or the host plans, and draws
        self.placement, self._count, self._memory = placement, count, tier
        self._drawn, self._first_state = drawn, self.uploaded(self.spec.first_state)
        self._pinned = None
        if placement.mode != "device":
            self._pinned = Pinned(tier.records.bytes, device, self.timeline.finish)
        far = 0
        if self._pinned is not None:
            tier.arena.expect_all()
            self._pinned.cover(tier.records.bytes.nbytes)
            far = self._pinned.address
        self.where = torch.full((self._count,), ABSENT, dtype=torch.int32, device=device)
        self.near = Near(self.where, placement, self.form, far)
        self._expected: Tensor | None = None
        self._is_brought = False
        self._is_newer = False  # than the tier, since the last step

    # ------------------------------------------------------------ what the tier has

    def _follow(self) -> None:
        """Take over what the CPU changed. The near records are no newer: it has changed nothing before `finish`."""
        if self._seen == self.rows.version.now:
            return
        bits = torch.from_numpy(np.unpackbits(self._memory.present, count=self._count, bitorder="little"))
        self.near.clear()
        for start in range(0, self._count, COPIED_ROWS):
            some = bits[start : start + COPIED_ROWS].to(self.device).bool()
            self.where[start : start + COPIED_ROWS] = torch.where(some, FAR, ABSENT).to(torch.int32)
        if self.placement.mode == "device":
            for ids in self._ids_where(present):
                self.near.records[ids] = self.uploaded(self._memory.records.bytes[ids.cpu().numpy()])
                self.where[ids] = ids.to(torch.int32)
        self._seen = self.rows.version.now

    def _ids_where(self, holds: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
        """Go through the ids of rows for whose word of `where` something holds, as many as are copied at a time."""
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
            self._bring_back()
        self.near.write_back()
        bits = np.concatenate([present(part).cpu().numpy() for part in self.where.split(COPIED_ROWS)])
        self._memory.replace_present(np.packbits(bits, bitorder="little"), int(np.count_nonzero(bits)))
        self.timeline.finish()
        self._is_newer = False

    def _check_ram(self) -> None:
        """Raise `MemoryBudgetError` where there is no RAM for records that only the GPU has."""
        more = self._present_rows() - self._memory.count
        if more > 0 and not self._memory.placement.is_told:
            there = f"{counted(more, 'row')} of {self.rows.subject} are in GPU memory only, and who reads or saves them"
            remedy = "Nothing has changed. Free RAM and ask again, or pass memory= to say how much the table"
            take_ram(more * self.spec.record_bytes, f"{there} needs them in RAM", remedy)

    def _bring_back(self) -> None:
        """Copy records that changed to RAM, through memory that the GPU writes to."""
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
        """Return numbers about it, and how many rows have records, which only it knows. Waits for the device."""
        numbers = {"rows_touched": self._present_rows()} if self._is_newer else {}
        near = {"device_slots": self.placement.near_rows, "device_bytes": self.placement.bytes}
        return {**numbers, **near, **self.near.stats()}

    def __repr__(self) -> str:
        return f"on {self.device}: {self.placement}"

    # ------------------------------------------------------------ lookups and steps

    @spanned("plan")
    def plan(self, ids: Tensor, trains: bool) -> DevicePlan:
        with self.working():
            self.check()
            self._begin()
            return self._planned(ids, trains)

    def _begin(self) -> None:
        self.begin()
        self._follow()

    def _planned(self, ids: Tensor, trains: bool) -> DevicePlan:
        self._stamp += 1
        plan = make_plan(self.on_device(ids), self._count, self.faults.tensor, self._stamp)
        # Of a batch that was brought ahead it was counted then what was near.
        self.near.bring(plan, self.oldest(trains), self.timeline, Bringing(aside=False, counts=not self._is_brought))
        self._is_brought = False
        self.faults.ask()
        return plan

    def _bring_ahead(self, ids: Tensor) -> None:
        self._stamp += 1
        if ids.device == self.device:
            self.timeline.uses(ids)
        nothing = torch.zeros_like(self.faults.tensor)  # ids outside of the table are a fault when they are looked up
        plan = make_plan(self.on_device(ids), self._count, nothing, self._stamp)
        self.near.bring(plan, self.oldest(trains=True), self.timeline, Bringing(aside=True, counts=True))
        self._is_brought = True

    def expect(self, ids: Tensor | None) -> None:
        """Bring the rows of the next batch near after the next lookup, beside what the device does then.

        What comes after that lookup, and uses rows, waits for the copies on the device. So no row is read or stepped
        while it moves, whether it was expected or not.
        """
        self._expected = ids

    def read_rows(self, plan: DevicePlan) -> Tensor:
        with self.working():
            out = super().read_rows(plan)
            expected, self._expected = self._expected, None
            if expected is not None:
                self._bring_ahead(expected)
        return out

    def gather(self, plan: DevicePlan, places: Tensor, out: Tensor) -> None:
        rows.read(places, plan.ids, plan.count, int(self.spec.key), self._drawn, self.form, out)

    def prepare(self, grads: DeviceGradients) -> Targets:
        keys = grads.plan.keys
        return Targets(torch.empty_like(keys), torch.empty_like(keys, dtype=torch.uint8))

    def ready(self, plan: DevicePlan, verdict: Tensor, targets: Targets) -> Tensor:
        self._begin()
        self.timeline.wait_for_copies()
        self.near.settle(plan, verdict, targets.places, targets.new)
        drawn = plan.ids, int(self.spec.key), self._drawn
        rows.begin(targets.places, targets.new, *drawn, self._first_state, plan.count, verdict, self.form)
        return targets.places

    def note_change(self) -> None:
        super().note_change()
        self._is_newer = True

    # ------------------------------------------------------------ gradients

    def masked(self, plan: DevicePlan, drop: Tensor) -> DevicePlan:
        return replace(plan, keys=torch.where(drop, self._count, plan.keys))

    def _merged(self, earlier: DeviceGradients, later: DeviceGradients) -> DeviceGradients:
        before = self.masked(earlier.plan, earlier.is_dropped)
        keys = torch.cat([before.keys, later.plan.keys])
        plan = make_plan(keys, self._count, self.faults.tensor, later.plan.stamp, merges=True)
        values, squares = sum_rows(torch.cat([earlier.scaled(), later.values]), plan, self._none)
        most = self._count + 1  # with the key of no row: however many batches accumulate
        plan = replace(plan, keys=plan.keys[:most], ids=plan.ids[:most])
        return DeviceGradients.of(plan, values[:most], squares[:most])
