"""Maps from ids to slots: `HashIndex` and `DenseIndex`. Slots never move while their index lives."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from embedrock import kernels
from embedrock.batch.id_table import ENTRY_BYTES, IdNumbers, IdTable, entries_for, find_in, look_up_in
from embedrock.batch.plan import NO_ENTRIES, SlotIndex
from embedrock.system.arena import cut, reserve
from embedrock.system.spans import spanned

ID_BYTES = 8
SCAN_BYTES = 1 << 20  # of the bitmap of a `DenseIndex`, scanned at a time


class DenseIndex:
    """An index with the methods of `HashIndex` whose slots are ids.

    Attributes:
        bits: bitmap of the rows with a record: uint8, lowest bit first.
        count: number of them.
    """

    def __init__(self, rows: int) -> None:
        self.count = 0
        self.bits = np.zeros(DenseIndex.bytes_for(rows), np.uint8)

    @staticmethod
    def bytes_for(rows: int) -> int:
        """Return the bytes of an index of `rows` rows."""
        return (rows + 7) // 8

    @property
    def index(self) -> SlotIndex:
        return self.bits, NO_ENTRIES

    def find(self, ids: np.ndarray) -> np.ndarray:
        return find_in(kernels.cpu.directory.find_direct, self.bits, ids)

    @spanned("gather")
    def look_up(self, ids: np.ndarray, weights: np.ndarray, positions: np.ndarray, out: np.ndarray) -> np.ndarray:
        return look_up_in(kernels.cpu.rows.look_up_direct, self.bits, ids, (weights, positions), out)

    def next_slots(self, ids: np.ndarray) -> np.ndarray:
        return ids

    def insert(self, ids: np.ndarray, slots: np.ndarray | None = None) -> np.ndarray:
        slots = np.full(len(ids), -1, np.int64) if slots is None else slots
        more = int(np.count_nonzero(slots < 0))
        kernels.cpu.launch(kernels.cpu.directory.insert_direct, self.bits, ids, slots)
        self.count += more
        return slots

    def remove(self, ids: np.ndarray) -> None:
        kernels.cpu.launch(kernels.cpu.cache.erase_direct, self.bits, ids)
        self.count -= len(ids)

    def bytes_with(self, more: int) -> int:
        return self.bits.nbytes

    def batches(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for start in range(0, len(self.bits), SCAN_BYTES):
            bits = np.unpackbits(self.bits[start : start + SCAN_BYTES], bitorder="little")
            ids = np.flatnonzero(bits) + start * 8
            yield from ((part, part) for part in cut(ids, size))


class HashIndex(IdNumbers):
    """The map from touched ids to the slots of their records.

    Slots are assigned in order of arrival, so that records lie densely.

    Attributes:
        count: number of ids.
        used: assigned slots, from the first on. Slots of deleted ids are reused first.
    """

    _subject = IdTable._subject

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.used = 0
        self._free, self._free_count = np.empty(0, np.int64), 0  # a stack
        self._slot_ids = reserve(capacity * ID_BYTES, "the ids of a table").view(np.int64)

    def next_slots(self, ids: np.ndarray) -> np.ndarray:
        """Return the slots that `insert` will give to ids (without repeats) that have none, in their order."""
        free = self._next_free(len(ids))
        return np.concatenate([free, self.used + np.arange(len(ids) - len(free))])

    def _next_free(self, most: int) -> np.ndarray:
        return self._free[max(0, self._free_count - most) : self._free_count][::-1]

    def insert(self, ids: np.ndarray, slots: np.ndarray | None = None) -> np.ndarray:
        """Assign slots to all ids whose slot is -1, or to all without `slots`, and return `slots` with them.

        Ids do not repeat. Assigns all slots, or none.
        """
        cpu, slots = kernels.cpu, np.full(len(ids), -1, np.int64) if slots is None else slots
        self.make_room(int(np.count_nonzero(slots < 0)))
        if self._free_count:
            self._insert_free(ids, slots)
        args = self._entries, ids, slots, self.used, self._slot_ids
        self.used = cpu.launch(cpu.directory.insert_hashed, *args)
        self.count = self.used - self._free_count
        return slots

    def _insert_free(self, ids: np.ndarray, slots: np.ndarray) -> None:
        missing = np.flatnonzero(slots < 0)[: self._free_count]
        given, new = np.ascontiguousarray(self._next_free(len(missing))), ids[missing]
        self.set(new, given)
        slots[missing], self._slot_ids[given] = given, new
        self._free_count -= len(given)

    def remove(self, ids: np.ndarray) -> None:
        """Delete ids, without repeats, that have slots. Other ids keep theirs, and new ids get the free ones."""
        count, slots = self._free_count + len(ids), self.find(ids)
        if count > len(self._free):
            self._free = np.concatenate([self._free[: self._free_count], np.empty(count, np.int64)])
        super().remove(ids)
        self._free[self._free_count : count] = slots
        self._free_count = count

    def slots_with(self, more: int) -> int:
        """Return how many slots are assigned once `more` ids are inserted."""
        return max(self.used, self.count + more)

    @property
    def free(self) -> np.ndarray:
        """The slots below `used` that have no id."""
        return self._free[: self._free_count]

    def keep(self, count: int, holes: np.ndarray, moved: np.ndarray) -> None:
        """Keep `count` ids: those in the first `count` slots, where ids in slots `moved` replace those in `holes`."""
        entries, kept = self._new_entries(entries_for(count)), self._slot_ids[:count].copy()
        kept[holes] = self._slot_ids[moved]
        self._entries, self.count, self.used, self._free_count = entries, 0, 0, 0  # nothing after this line can fail
        self.insert(kept)

    @staticmethod
    def bytes_for(count: int) -> int:
        """Return the most bytes of an index while it grows to `count` ids."""
        return entries_for(count) * 3 // 2 * ENTRY_BYTES + count * ID_BYTES

    def bytes_with(self, more: int) -> int:
        """Return the most RAM in use while `more` ids are inserted."""
        entries = entries_for(self.count + more)
        growing = len(self._entries) if entries > len(self._entries) else 0
        return (max(entries, len(self._entries)) + growing) * ENTRY_BYTES + self.slots_with(more) * ID_BYTES

    def batches(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Iterate over all (ids, slots), at most `size` at a time."""
        is_free = np.zeros(self.used if self._free_count else 0, bool)
        is_free[self._free[: self._free_count]] = True
        for start in range(0, self.used, size):
            slots = np.arange(start, min(start + size, self.used))
            if len(is_free):
                slots = slots[~is_free[slots]]
            if len(slots):
                yield self._slot_ids[slots], slots
