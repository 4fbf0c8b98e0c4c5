"""`DeviceCache`: records in GPU memory and the map from rows to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from embedrock.device.copies import uploaded
from embedrock.device.stream_order import StreamOrder
from embedrock.kernels.gpu import cache
from embedrock.kernels.gpu.addresses import AGES, BatchTime, CacheSlots, DeviceTables
from embedrock.kernels.gpu.runtime import RecordForm
from embedrock.storage.device_layout import DeviceLayout

KEPT_LOOKUPS = 4  # since the last step; rows of the lookups before these may be evicted
EVERYWHERE = 2**62  # above all keys: no limit
# Half-life of a row's score, in units of the batches that fill the cache once. In simulations with Zipf's law (1.05),
# this value misses hardly more rows than exact counts. A smaller one forgets too soon. A larger one does not follow
# rows as their use changes.
HALF_LIFE = 30.0
NO_TIME = BatchTime(0, 0, 0.0)  # of a batch without a cache


def present(where: Tensor) -> Tensor:
    """Return which rows have a record."""
    return (where >= 0) | ((-1 - where) & 1 == 0)


def load_rows(tables: DeviceTables, search: cache.VictimSearch, keys: Tensor, count: Tensor | int) -> None:
    """Load a batch's rows into the caches where they score higher than the rows they replace.

    Args:
        tables: of the batch.
        search: of these rows, which `cache.touch` has marked.
        keys: of the batch; equal ones are adjacent and count once.
        count: number of keys.
    """
    cache.insert(tables, search, keys, count)
    cache.exchange(search.moves, tables.form.record_bytes)


class DeviceCache:
    """Records in GPU memory: those of all rows, of a cache, or none. No method waits for the device unless it says so.

    Args:
        where: int32 (rows,), the address word of each row; `DeviceCache` changes it. (0,): all records are in RAM.
        placement: the split of the records between GPU memory and RAM.
        form: layout of the records.
        far: address of the first record in RAM.

    Attributes:
        kind: of the record addresses, see `DeviceTables`. Without a map, all rows have a record in RAM.
        limit: keys outside ``[0, limit)`` are of no row.
        near, far: addresses of the first records in GPU memory and in RAM.
        slot_count: number of records that a cache has room for.
    """

    def __init__(self, where: Tensor, placement: DeviceLayout, form: RecordForm, far: int) -> None:
        count, device = placement.near_rows, where.device
        self.placement = placement
        self.is_identity, self.is_cache = placement.mode == "device", placement.mode == "cached"
        self.records = torch.empty(count, form.record_bytes, dtype=torch.uint8, device=device)
        self.near, self.far = self.records.data_ptr(), far
        slots = count if self.is_cache else 0
        dtypes = torch.int64, torch.float32, torch.int32, torch.uint8
        state = [torch.empty(slots, dtype=dtype, device=device) for dtype in dtypes]
        self._use(where, *state, torch.zeros(8, dtype=torch.int64, device=device))
        self.not_counted = torch.zeros_like(self.slots.tallies)
        self._hand, self.slot_count = 0, slots
        self.clear()

    def grow(self, where: Tensor, timeline: StreamOrder) -> None:
        """Replace `where` by a larger tensor; the known rows come first in it."""
        known = self.slots.where
        where[: len(known)] = known
        timeline.uses(known)
        self._use(where, *self.slots[1:])

    def _use(self, where: Tensor, *state: Tensor) -> None:
        """Use `CacheSlots` from now on."""
        self.slots = CacheSlots(where, *state)
        self.kind = self.placement.mode if len(where) else "recorded"
        self.limit = len(where) or EVERYWHERE

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory."""
        return sum(tensor.nbytes for tensor in (self.records, *self.slots))

    def free(self) -> None:
        """Release the GPU memory. Nothing may use it any more."""
        self.records = self.records[:0].clone()
        self._use(*(part[:0].clone() for part in self.slots))

    def clear(self) -> None:
        """Empty the cache. The caller has written dirty records back."""
        self.slots.owner.fill_(-1)
        for state in (self.slots.worth, self.slots.used, self.slots.dirty):
            state.zero_()

    # ------------------------------------------------------------ insertion and eviction

    def begin_batch(self, n: int, clock: BatchCounter, trains: bool) -> BatchTime:
        """Begin a batch of n positions; return its time in a cache. `trains`: a step may follow."""
        if not self.is_cache:
            return NO_TIME
        hand, slots = self._hand, self.slot_count
        self._hand = (hand + min(slots, cache.WINDOW * n)) % slots
        stamp = clock.stamp
        return BatchTime(stamp & AGES, stamp - clock.oldest(trains), 1.0 / self.half_life(n), hand)

    def half_life(self, n: int) -> float:
        """Return the half-life of a row's score, in batches of n positions."""
        return HALF_LIFE * max(1.0, self.slot_count / max(1, n))

    # ------------------------------------------------------------ write-back and statistics

    def write_back(self) -> None:
        """Write all dirty records back to RAM. Waits for the device."""
        self._write_back(self.slots.dirty.nonzero()[:, 0])

    def write_back_rows(self, keys: Tensor) -> None:
        """Write the dirty records of some rows back to RAM; keys are int64 (n,). Waits for the device."""
        words = self.slots.where[keys]
        slots = words[words >= 0].long()
        self._write_back(slots[self.slots.dirty[slots] != 0])

    def forget(self, keys: Tensor) -> None:
        """Remove rows from the map after their write-back, as other rows will reuse their keys. Allocates no memory."""
        if self.is_cache:
            cache.forget(self.slots, keys)

    def _write_back(self, slots: Tensor) -> None:
        if len(slots):
            owners, order = self.slots.owner[slots].sort()
            size = self.records.shape[1]
            sources, targets = self.near + slots[order] * size, self.far + owners * size
            cache.copy_records(sources, targets, size)
            self.slots.dirty[slots] = 0

    def stats(self) -> dict[str, float]:
        """Return the cache's statistics. Waits for the device."""
        names = "hits", "misses", "first_uses", "fetched", "evictions", "written_back"
        counts = self.slots.tallies.tolist()
        counted = {f"device_{name}": counts[k] for k, name in enumerate(names)}
        return {**counted, "device_bypassed": counted["device_misses"] - counted["device_fetched"]}


# ---------------------------------------------------------------- caches of several tables


def shares_of(caches: Iterable[DeviceCache], positions: Sequence[int]) -> tuple[np.ndarray, int]:
    """Return the shares of tables in a search for victims, given the positions of each, and its number of programs.

    Shares are int64 (tables * SHARE_WORDS,): see `cache.VictimSearch`.
    """
    shares, program, position = list[int](), 0, 0
    for own, size in zip(caches, positions, strict=True):
        fading = int(np.float32(1.0 / own.half_life(size)).view(np.int32))
        shares += fading, size, program, position
        program, position = program + cache.blocks(size), position + size
    return np.array(shares, np.int64), program


def times_of(times: Sequence[BatchTime], device: torch.device) -> Tensor:
    """Return the times of a batch, of each table, for kernels: int32 (tables, TIME_WORDS)."""
    first = times[0].stamp
    if type(first) is not int:
        return first  # in a CUDA graph, times are in memory, one after the other
    words = np.zeros((3 * len(times), 2), np.int64)
    words[:, 0] = [word for time in times for word in (time.stamp, time.span, time.hand)]
    return uploaded(words, device).view(torch.int32)


FIRST_STAMP = 1 << 16  # 0, the number of unused rows, must look old


class BatchCounter:
    """The numbers of batches, of one table or of all tables that share a cache.

    Attributes:
        stamp: of the last batch.
        begun: stamp of the first lookup since the last step.
        tables: the number of tables that look up rows between two steps.
    """

    def __init__(self) -> None:
        self.stamp, self.begun, self.tables = FIRST_STAMP, FIRST_STAMP + 1, 1

    def oldest(self, trains: bool) -> int:
        """Return the stamp of the oldest protected lookup. Lookups without a step are not protected."""
        return max(self.begun, self.stamp - KEPT_LOOKUPS * self.tables) if trains else self.stamp
