"""`Near`: records in GPU memory, and which rows they are of."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from embedrock.device.placement import DevicePlacement
from embedrock.device.plan import DevicePlan
from embedrock.device.timeline import Timeline
from embedrock.kernels.gpu import cache
from embedrock.kernels.gpu.plan import blocks
from embedrock.kernels.gpu.runtime import Form

KEPT_LOOKUPS = 4  # of those since the last step, whose rows stay near: it will use them
EVERYWHERE = 2**62  # a limit of keys that all are below
WINDOW = 2  # near slots that are looked at for each position of a batch, to find those worth least
# A use of a row loses half of its weight in as many batches as fill the cache so many times. Simulated under Zipf's law
# (1.05), that misses hardly more rows than exact counts of uses do; less would forget too soon, and more would not
# follow rows that come and go.
HALF_LIFE = 30.0


def present(where: Tensor) -> Tensor:
    """Return which rows have a record."""
    return (where >= 0) | ((-1 - where) & 1 == 0)


class Bringing(NamedTuple):
    """How rows are brought near.

    Attributes:
        aside: their records are copied on a stream of its own.
        counts: it is counted which were near.
    """

    aside: bool
    counts: bool


class Near:
    """Records in GPU memory: of all rows, of those in use, or of none. Nothing here waits for the device.

    Args:
        where: int32 (rows,), where each row is; `Near` changes it. (0,): all have records in RAM.
        placement: how the records are spread.
        form: of the records.
        far: address of the first record in RAM.
    """

    def __init__(self, where: Tensor, placement: DevicePlacement, form: Form, far: int) -> None:
        count, device = placement.near_rows, where.device
        self.placement = placement
        self.is_identity, self.is_cache = placement.mode == "device", placement.mode == "cached"
        self.records = torch.empty(count, form.record_bytes, dtype=torch.uint8, device=device)
        self.memory = cache.RecordMemory(self.records.data_ptr(), far, form.record_bytes)
        slots = count if self.is_cache else 0
        self.slots = cache.Slots(
            where,
            torch.empty(slots, dtype=torch.int64, device=device),
            torch.empty(slots, dtype=torch.float32, device=device),
            torch.empty(slots, dtype=torch.int32, device=device),
            torch.zeros(slots, dtype=torch.uint8, device=device),
            torch.zeros(8, dtype=torch.int64, device=device),
        )
        self._not_counted = torch.zeros_like(self.slots.tallies)
        self._limit, self._hand = len(where), 0
        self._scratch: cache.Search | None = None
        self.clear()

    def grow(self, where: Tensor, timeline: Timeline) -> None:
        """Take a larger `where`, of which the rows so far come first."""
        known = self.slots.where
        where[: len(known)] = known
        timeline.uses(known)
        self.slots, self._limit = self.slots._replace(where=where), len(where)

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory."""
        tensors = self.records, *self.slots
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def let_go(self) -> None:
        """Give the GPU's memory back. Nothing uses it any more."""
        self.records, self._scratch = self.records[:0].clone(), None
        self.slots = cache.Slots(*(part[:0].clone() for part in self.slots))

    def clear(self) -> None:
        """Empty the cache. Its records are no newer than those in RAM."""
        self.slots.owner.fill_(-1)
        for state in (self.slots.worth, self.slots.used, self.slots.dirty):
            state.zero_()

    # ------------------------------------------------------------ who comes, and who leaves

    def bring(self, plan: DevicePlan, oldest: int, timeline: Timeline, how: Bringing) -> None:
        """Bring the rows of a batch near, where they are worth more than others.

        Args:
            plan: of the batch.
            oldest: stamp of the oldest batch whose rows stay.
            timeline: in which order things happen.
            how: it is done.
        """
        if not self.is_cache or not plan.keys.numel():
            return
        batch = plan.keys, plan.count, self._limit
        count = len(plan.keys)
        search, time = self._search(count, timeline), cache.BatchTime(plan.stamp, oldest, self._half_life(count))
        slots = self.slots if how.counts else self.slots._replace(tallies=self._not_counted)
        cache.touch(slots, search, time, *batch)
        cache.offer(self.slots, search, time, self._hand)
        cache.choose(self.slots, search, self._hand)
        # So that what is written back lies in order, as what is fetched does: sorted rows are what a bus is fast at.
        search = search._replace(victims=search.victims.sort().values)
        moves = torch.empty(len(search.victims), 3, dtype=torch.int64, device=plan.keys.device)
        cache.swap(self.slots, search, time, *batch, moves)
        self._hand = (self._hand + len(search.bins)) % len(self.slots.owner)
        if how.aside:
            with timeline.aside(moves, self.records):
                cache.exchange(moves, self.memory)
        else:
            timeline.wait_for_copies()
            cache.exchange(moves, self.memory)

    def _half_life(self, n: int) -> float:
        return HALF_LIFE * max(1.0, len(self.slots.owner) / n)

    def _search(self, n: int, timeline: Timeline) -> cache.Search:
        """Return scratch for a batch of n positions: that of the last batch, if it was as large."""
        window, victims = min(len(self.slots.owner), WINDOW * n), min(len(self.slots.owner), n)
        kept, device = self._scratch, self.records.device
        if kept is None or len(kept.bins) != window or len(kept.counts) != blocks(n) or len(kept.victims) != victims:
            if kept is not None:
                timeline.uses(*kept)
            kept = self._scratch = cache.Search(
                torch.empty(blocks(n), dtype=torch.int32, device=device),
                torch.empty(window, dtype=torch.uint8, device=device),
                torch.empty(cache.BINS, blocks(window), dtype=torch.int32, device=device),
                torch.empty(cache.BINS, dtype=torch.int32, device=device),
                torch.empty(victims, dtype=torch.int64, device=device),
            )
        return kept

    # ------------------------------------------------------------ where rows are

    def places(self, plan: DevicePlan) -> Tensor:
        """Return the addresses of a plan's records: int64 (n,), ``-1 - k`` for row k where there is none."""
        out = torch.empty(plan.keys.numel(), dtype=torch.int64, device=plan.keys.device)
        where, limit = (self.slots.where, self._limit) if self._limit else (None, EVERYWHERE)
        cache.locate(plan.keys, plan.count, where, limit, self.memory, out)
        return out

    def settle(self, plan: DevicePlan, live: Tensor, places: Tensor, new: Tensor) -> None:
        """Before a step: give rows without a record a place, and note which near records will be newer."""
        dirty = self.slots.dirty if self.is_cache else None
        args = self.slots.where, dirty, self.is_identity, self._limit, self.memory, places, new
        cache.settle(plan.keys, plan.count, live, *args)

    def write_back(self) -> None:
        """Bring the records in RAM up to date with those of the cache."""
        changed = self.slots.dirty.nonzero()[:, 0]
        if len(changed):
            owners, order = self.slots.owner[changed].sort()
            size = self.memory.record_bytes
            sources, targets = self.memory.near + changed[order] * size, self.memory.far + owners * size
            cache.copy_records(sources, targets, size)
            self.slots.dirty.zero_()

    def stats(self) -> dict[str, float]:
        """Return numbers about the cache. Waits for the device."""
        names = "hits", "misses", "first_uses", "fetched", "evictions", "written_back"
        counts = self.slots.tallies.tolist()
        counted = {f"device_{name}": counts[k] for k, name in enumerate(names)}
        return {**counted, "device_bypassed": counted["device_misses"] - counted["device_fetched"]}
