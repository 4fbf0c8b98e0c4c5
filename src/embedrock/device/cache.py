"""`DeviceCache`: records in GPU memory, and which rows they are of."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from embedrock.device.stream_order import StreamOrder
from embedrock.kernels.gpu import addresses as homes
from embedrock.kernels.gpu import cache
from embedrock.kernels.gpu.plan import blocks
from embedrock.kernels.gpu.runtime import RecordForm
from embedrock.storage.device_layout import DeviceLayout

KEPT_LOOKUPS = 4  # of those since the last step, whose rows stay near: it will use them
EVERYWHERE = 2**62  # a limit of keys that all are below
WINDOW = 2  # near slots that are looked at for each position of a batch, to find those worth least
# A use of a row loses half of its weight in as many batches as fill the cache so many times. Simulated under Zipf's law
# (1.05), that misses hardly more rows than exact counts of uses do; less would forget too soon, and more would not
# follow rows that come and go.
HALF_LIFE = 30.0
# Victims that are sorted are written back in order, as what is fetched lies, and a bus is fast at that. Fewer are soon
# written, whatever their order, and would cost a sort.
SORTED_FROM = 1 << 14


def present(where: Tensor) -> Tensor:
    """Return which rows have a record."""
    return (where >= 0) | ((-1 - where) & 1 == 0)


def as_written_back(victims: Tensor) -> Tensor:
    """Return victims in the order in which they should be written back."""
    return victims if len(victims) < SORTED_FROM else victims.sort().values


class BatchNumbers(NamedTuple):
    """When a batch is: its stamp, that of the oldest batch whose rows stay, and the near slot that it begins at."""

    stamp: int
    oldest: int
    hand: int

    def time(self, half_life: float) -> homes.BatchTime:
        """Return when it is, for kernels."""
        return homes.BatchTime(self.stamp, self.oldest, half_life)


class BatchNumbersInMemory(NamedTuple):
    """The same of a batch that a CUDA graph plans again and again: where kernels find their numbers, int32 ()."""

    stamp: Tensor
    span: Tensor
    hand: Tensor

    def time(self, half_life: float) -> homes.TimeInMemory:
        """Return when it is, for kernels."""
        return homes.TimeInMemory(self.stamp, self.span, half_life)


class DeviceCache:
    """Records in GPU memory: of all rows, of those in use, or of none. Nothing here waits for the device.

    Args:
        where: int32 (rows,), where each row is; `DeviceCache` changes it. (0,): all have records in RAM.
        placement: how the records are spread.
        form: of the records.
        far: address of the first record in RAM.
    """

    def __init__(self, where: Tensor, placement: DeviceLayout, form: RecordForm, far: int) -> None:
        count, device = placement.near_rows, where.device
        self.placement = placement
        self.is_identity, self.is_cache = placement.mode == "device", placement.mode == "cached"
        self.records = torch.empty(count, form.record_bytes, dtype=torch.uint8, device=device)
        self.memory = homes.RecordMemory(self.records.data_ptr(), far, form.record_bytes)
        slots = count if self.is_cache else 0
        self.slots = homes.CacheSlots(
            where,
            torch.empty(slots, dtype=torch.int64, device=device),
            torch.empty(slots, dtype=torch.float32, device=device),
            torch.empty(slots, dtype=torch.int32, device=device),
            torch.zeros(slots, dtype=torch.uint8, device=device),
            torch.zeros(8, dtype=torch.int64, device=device),
        )
        self.homes = self._homes()
        self.not_counted = torch.zeros_like(self.slots.tallies)
        self._hand = 0
        self._scratch: cache.VictimScratch | None = None
        self.clear()

    def grow(self, where: Tensor, timeline: StreamOrder) -> None:
        """Take a larger `where`, of which the rows so far come first."""
        known = self.slots.where
        where[: len(known)] = known
        timeline.uses(known)
        self.slots = self.slots._replace(where=where)
        self.homes = self._homes()

    def _homes(self) -> homes.RecordAddresses:
        """Say where the records are. Without a map of rows, all have one in RAM."""
        where = self.slots.where
        dirty = self.slots.dirty if self.is_cache else None
        if not len(where):
            return homes.RecordAddresses(None, None, False, EVERYWHERE, self.memory)
        return homes.RecordAddresses(where, dirty, self.is_identity, len(where), self.memory)

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory."""
        tensors = self.records, *self.slots
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def free(self) -> None:
        """Give the GPU's memory back. Nothing uses it any more."""
        self.records, self._scratch = self.records[:0].clone(), None
        self.slots = homes.CacheSlots(*(part[:0].clone() for part in self.slots))
        self.homes = self._homes()

    def clear(self) -> None:
        """Empty the cache. Its records are no newer than those in RAM."""
        self.slots.owner.fill_(-1)
        for state in (self.slots.worth, self.slots.used, self.slots.dirty):
            state.zero_()

    # ------------------------------------------------------------ who comes, and who leaves

    def stamps(self, n: int, stamp: int, oldest: int) -> BatchNumbers:
        """Begin a batch of n positions, and return when it is; `stamp`, `oldest`: see `BatchNumbers`."""
        hand = self._hand
        if self.is_cache:
            self._hand = (hand + self.window(n)) % len(self.slots.owner)
        return BatchNumbers(stamp, oldest, hand)

    def window(self, n: int) -> int:
        """Return how many near slots a batch of n positions looks at, to find those worth least."""
        return min(len(self.slots.owner), WINDOW * n)

    def search_of(self, n: int) -> tuple[int, int, float]:
        """Return the window of a batch of n positions, how many rows may leave for it, and what uses fade by."""
        return self.window(n), min(len(self.slots.owner), n), self.half_life(n)

    def half_life(self, n: int) -> float:
        """Return in how many batches of n positions a use of a row loses half of its weight."""
        return HALF_LIFE * max(1.0, len(self.slots.owner) / max(1, n))

    def arrival(
        self, n: int, stamps: BatchNumbers | BatchNumbersInMemory, timeline: StreamOrder, counts: bool
    ) -> cache.CacheInsertion | None:
        """Return what is to be done where the rows of n positions come near; None where no rows come and go.

        Args:
            n: positions.
            stamps: of the batch.
            timeline: in which order things happen.
            counts: it is counted which were near.
        """
        if not self.is_cache or not n:
            return None
        slots = self.slots if counts else self.slots._replace(tallies=self.not_counted)
        search = self._search(n, timeline)
        timeline.keep(*search)
        return cache.CacheInsertion(slots, search, stamps.time(self.half_life(n)), stamps.hand)

    def bring(self, arrival: cache.CacheInsertion, keys: Tensor, count: Tensor | int) -> None:
        """Bring the rows of a batch near, where they are worth more than others.

        Args:
            arrival: of these rows, which were noted by `cache.touch`.
            keys: of the batch; equal ones lie together, and count once.
            count: how many there are.
        """
        _, search, time, hand = arrival
        cache.offer(self.slots, search, time, hand)
        cache.choose(self.slots, search, hand)
        search = search._replace(victims=as_written_back(search.victims))
        moves = torch.empty(len(search.victims), 3, dtype=torch.int64, device=keys.device)
        cache.swap(self.slots, search, time, keys, count, len(self.slots.where), self.memory, moves)
        cache.exchange(moves, self.memory.record_bytes)

    def _search(self, n: int, timeline: StreamOrder) -> cache.VictimScratch:
        """Return scratch for a batch of n positions: that of the last batch, if it was as large."""
        window, victims, _ = self.search_of(n)
        kept, device = self._scratch, self.records.device
        if kept is None or len(kept.bins) != window or len(kept.counts) != blocks(n) or len(kept.victims) != victims:
            if kept is not None:
                timeline.uses(*kept)
            kept = self._scratch = cache.VictimScratch(
                torch.empty(blocks(n), dtype=torch.int32, device=device),
                torch.empty(window, dtype=torch.uint8, device=device),
                torch.empty(cache.BINS, blocks(window), dtype=torch.int32, device=device),
                torch.empty(cache.BINS, dtype=torch.int32, device=device),
                torch.empty(victims, dtype=torch.int64, device=device),
            )
        return kept

    # ------------------------------------------------------------ what is known

    def write_back(self) -> None:
        """Bring the records in RAM up to date with those of the cache. Waits for the device."""
        self._write_back(self.slots.dirty.nonzero()[:, 0])

    def write_back_rows(self, keys: Tensor) -> None:
        """Bring the records of some rows in RAM up to date, int64 (n,). Waits for the device."""
        words = self.slots.where[keys]
        slots = words[words >= 0].long()
        self._write_back(slots[self.slots.dirty[slots] != 0])

    def forget(self, keys: Tensor) -> None:
        """Forget that rows are near which were brought back: others will have their keys. It takes no memory."""
        if self.is_cache:
            cache.forget(self.slots, keys)

    def _write_back(self, slots: Tensor) -> None:
        """Copy the records of near slots, which have changed, to RAM."""
        if len(slots):
            owners, order = self.slots.owner[slots].sort()
            size = self.memory.record_bytes
            sources, targets = self.memory.near + slots[order] * size, self.memory.far + owners * size
            cache.copy_records(sources, targets, size)
            self.slots.dirty[slots] = 0

    def stats(self) -> dict[str, float]:
        """Return numbers about the cache. Waits for the device."""
        names = "hits", "misses", "first_uses", "fetched", "evictions", "written_back"
        counts = self.slots.tallies.tolist()
        counted = {f"device_{name}": counts[k] for k, name in enumerate(names)}
        return {**counted, "device_bypassed": counted["device_misses"] - counted["device_fetched"]}


FIRST_STAMP = 1 << 16  # 0, that of rows that were never used, has to look long ago


class BatchCounter:
    """The numbers of batches: of those of one table, or of all tables that share a cache.

    Attributes:
        stamp: of the last batch.
        begun: stamp of the first lookup since the last step.
        tables: how many look rows up between two steps.
    """

    def __init__(self) -> None:
        self.stamp, self.begun, self.tables = FIRST_STAMP, FIRST_STAMP + 1, 1

    def oldest(self, kept: int) -> int:
        """Return the stamp of the oldest lookup since the last step, of at most `kept` of each table."""
        return max(self.begun, self.stamp - kept * self.tables)
