"""Maps from ids to slots: `HashIndex` and `DenseIndex`. Slots never move while their index lives."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from embedrock import kernels
from embedrock.batch.id_table import ENTRY_BYTES, FIRST_ENTRIES, FULLEST, IdNumbers, IdTable, entries_for
from embedrock.batch.plan import NO_DIRECT
from embedrock.kernels.keys import ID, LENGTH, PART_BITS
from embedrock.system.arena import cut, reserve
from embedrock.system.buffers import address_of

ID_BYTES, SLOT_BYTES = 8, 4
MOST_ROWS = 1 << PART_BITS  # of a table whose keys have its number
SCAN_BYTES = 1 << 20  # of the bitmap of a `DenseIndex`, scanned at a time
SCAN_IDS = 1 << 16
# A table with a record for one row in 8 or more gets a direct-address table, once the hash table is full. It takes as
# much RAM at most, and a row takes 2 instead of 20 ns to find.
SPARSE = 8
_NO_IDS, _NO_SLOTS = np.empty(0, np.int64), np.empty(0, np.int32)


class DenseIndex(IdTable):
    """An index with the methods of `HashIndex` whose slots are ids.

    Attributes:
        bits: bitmap of the rows with a record: uint8, lowest bit first.
        count: number of them.
    """

    def __init__(self, rows: int) -> None:
        super().__init__(0)
        self.count = 0
        self.bits = np.zeros(DenseIndex.bytes_for(rows), np.uint8)
        self._direct = np.array([[address_of(self.bits), rows, 1]])

    @staticmethod
    def bytes_for(rows: int) -> int:
        """Return the bytes of an index of `rows` rows."""
        return (rows + 7) // 8

    def next_slots(self, ids: np.ndarray) -> np.ndarray:
        return ids

    def insert(self, ids: np.ndarray, slots: np.ndarray | None = None) -> np.ndarray:
        slots = np.full(len(ids), -1, np.int64) if slots is None else slots
        more = int(np.count_nonzero(slots < 0))
        kernels.cpu.launch(kernels.cpu.directory.insert, *self.index, ids, slots, 0, _NO_IDS)
        self.count += more
        return slots

    def remove(self, ids: np.ndarray) -> None:
        kernels.cpu.launch(kernels.cpu.cache.erase, *self.index, ids)
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

    Slots are assigned in order of arrival, so that records lie densely. The slots of a table's ids are in a hash table,
    or in a direct-address table of its own, see `SPARSE`.

    Args:
        capacity: most slots.

    Attributes:
        rows: rows of each table, by its number in keys; missing if its ids are open. The owner sets them.
        count: number of ids.
        used: assigned slots, from the first on. Slots of deleted ids are reused first.
    """

    _subject = IdTable._subject

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.used, self._hashed = 0, 0  # the second one: ids in the hash table
        self.rows, self._tables = dict[int, int](), dict[int, np.ndarray]()
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
        is_new, most = slots < 0, FULLEST * len(self._entries)
        if self._hashed + np.count_nonzero(is_new) > most and self._hashed + self._to_hash(new := ids[is_new]) > most:
            old = self._entries
            known = (part[part[:, 1] != 0, 0] for part in cut(old, SCAN_IDS))
            self._use(*self._new_tables(itertools.chain(known, [new]), self._tables))
            self._hashed = cpu.directory.rehash(old, *self.index)
        if self._free_count:
            self._insert_free(ids, slots)
        self.used, hashed = cpu.launch(cpu.directory.insert, *self.index, ids, slots, self.used, self._slot_ids)
        self._hashed += hashed
        self.count = self.used - self._free_count
        return slots

    def _insert_free(self, ids: np.ndarray, slots: np.ndarray) -> None:
        missing = np.flatnonzero(slots < 0)[: self._free_count]
        given, new = np.ascontiguousarray(self._next_free(len(missing))), ids[missing]
        self.set(new, given)
        slots[missing], self._slot_ids[given] = given, new
        self._free_count -= len(given)

    def set(self, ids: np.ndarray, numbers: np.ndarray) -> None:
        self._hashed += kernels.cpu.launch(kernels.cpu.directory.set_values, *self.index, ids, numbers)

    def _to_hash(self, ids: np.ndarray) -> int:
        """Return how many ids no direct-address table has."""
        if not self._tables:
            return len(ids)
        lengths, numbers = self._direct[:, LENGTH], ids >> PART_BITS
        numbers[numbers < 0] = len(lengths)  # clipped to the last one, of no ids
        return int(np.count_nonzero((ids & ID) >= lengths.take(numbers, mode="clip")))

    def _new_tables(
        self, hashed: Iterable[np.ndarray], tables: dict[int, np.ndarray]
    ) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """Return a hash table for hashed ids, in parts, and direct-address tables, with new ones for many of them."""
        rows, count = self.rows, 0
        counts = np.zeros(max(rows, default=-1) + 1, np.int64)
        for ids in hashed:
            count += len(ids)
            if rows:
                counts += np.bincount(ids >> PART_BITS, minlength=len(counts))
        known = {number: tables.get(number, _NO_SLOTS) for number in rows}
        dense = [
            number
            for number, table in known.items()
            if rows[number] != len(table) and rows[number] <= SPARSE * (counts[number] + np.count_nonzero(table))
        ]
        left, nbytes = count - int(counts[dense].sum()), sum(rows[number] for number in dense) * SLOT_BYTES
        if nbytes + entries_for(left) * ENTRY_BYTES > entries_for(count) * ENTRY_BYTES:
            dense, left = [], count
        made = dict(tables)  # also those whose ids are open now
        for number in dense:
            made[number] = reserve(rows[number] * SLOT_BYTES, self._subject).view(np.int32)
            made[number][: len(known[number])] = known[number]
        return self._new_entries(entries_for(left)), made

    def _use(self, entries: np.ndarray, tables: dict[int, np.ndarray]) -> None:
        """Replace the tables of slots."""
        self._entries, self._tables = entries, tables
        self._direct = np.zeros((max(tables, default=-2) + 2, NO_DIRECT.shape[1]), np.int64)  # the last one has no ids
        for number, table in tables.items():
            self._direct[number] = address_of(table), len(table), 8 * SLOT_BYTES

    def remove(self, ids: np.ndarray) -> None:
        """Delete ids, without repeats, that have slots. Other ids keep theirs, and new ids get the free ones."""
        count, slots = self._free_count + len(ids), self.find(ids)
        if count > len(self._free):
            self._free = np.concatenate([self._free[: self._free_count], np.empty(count, np.int64)])
        self._hashed -= kernels.cpu.launch(kernels.cpu.cache.erase, *self.index, ids)
        self.count -= len(ids)
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
        kept = self._slot_ids[:count].copy()
        kept[holes] = self._slot_ids[moved]
        made = self._new_tables(cut(kept, SCAN_IDS), {})
        self._slot_ids[:count], self.count, self.used, self._free_count = kept, count, count, 0
        self._use(*made)
        self._hashed = 0
        self.set(kept, np.arange(count))

    @staticmethod
    def bytes_for(count: int, rows: int | None = None) -> int:
        """Return the most bytes of an index while it grows to `count` ids, of a table of `rows` rows."""
        entries, direct = entries_for(count) * 3 // 2, 0
        if rows is not None and (most := rows // SPARSE + 1) < count:  # its hash table doubles only while it is sparse
            entries, direct = entries_for(most) * 3 // 2 + FIRST_ENTRIES, rows * SLOT_BYTES
        return entries * ENTRY_BYTES + direct + count * ID_BYTES

    def bytes_with(self, more: int) -> int:
        """Return the most RAM in use while `more` ids are inserted."""
        sizes = {number: len(table) for number, table in self._tables.items()}
        direct, are_direct = sum(sizes.values()) * SLOT_BYTES, len(sizes) > 0 and sizes == self.rows
        entries = len(self._entries) if are_direct else entries_for(self._hashed + more)
        growing = len(self._entries) if entries > len(self._entries) else 0
        hashed = (max(entries, len(self._entries)) + growing) * ENTRY_BYTES
        return hashed + direct + self.slots_with(more) * ID_BYTES

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
