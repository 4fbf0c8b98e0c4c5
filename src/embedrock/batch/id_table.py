"""`IdTable`: a hash table from id to slot. `IdNumbers`: one from id to any number."""

from __future__ import annotations

import numpy as np

from embedrock import kernels
from embedrock.batch.plan import NO_DIRECT, NO_ENTRIES, SlotIndex
from embedrock.system.arena import reserve
from embedrock.system.spans import spanned

ENTRY_BYTES = 16  # id and number + 1
FIRST_ENTRIES = 1024
FULLEST = 0.625  # share of entries in use at which the hash table doubles


class IdTable:
    """The entries of a hash table, as kernels read them. Ids are int64 arrays that the table has checked.

    Args:
        entries: number of entries, a power of two, or 0.
    """

    _subject = "the directory of a table"
    _direct = NO_DIRECT

    def __init__(self, entries: int = FIRST_ENTRIES) -> None:
        self._entries = self._new_entries(entries) if entries else NO_ENTRIES

    def _new_entries(self, count: int) -> np.ndarray:
        return reserve(count * ENTRY_BYTES, self._subject).view(np.int64).reshape(-1, 2)

    def _rehash(self, count: int) -> None:
        """Grow to `count` entries, a power of two."""
        larger = self._new_entries(count)
        kernels.cpu.directory.rehash(self._entries, self._direct, larger)
        self._entries = larger

    @property
    def index(self) -> SlotIndex:
        """The memory that `find` reads, until ids are inserted or removed."""
        return self._direct, self._entries

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Return the number of each id, int64; -1 where it has none. Ids may repeat."""
        numbers = np.empty(len(ids), np.int64)
        kernels.cpu.launch(kernels.cpu.directory.find, *self.index, ids, numbers)
        return numbers

    @spanned("gather")
    def look_up(self, ids: np.ndarray, weights: np.ndarray, positions: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Copy the weights of ids to `out` and return their slots, in one pass; rows without a slot become zeros."""
        slots, nothing = np.empty(len(ids), np.int64), np.zeros((1, out.shape[1]), np.float32)
        kernels.cpu.launch(kernels.cpu.rows.look_up, *self.index, ids, slots, weights, positions, nothing, out)
        return slots


class IdNumbers(IdTable):
    """Hash table from id to a number >= 0. Ids do not repeat.

    Attributes:
        count: number of ids.

    Example:
        >>> pairs = IdNumbers()
        >>> pairs.put(np.array([7, -3]), np.array([1, 2]))
        >>> pairs.find(np.array([-3, 8])).tolist()
        [2, -1]
    """

    _subject = "an index of ids"

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @property
    def nbytes(self) -> int:
        return self._entries.nbytes

    def put(self, ids: np.ndarray, numbers: np.ndarray) -> None:
        """Insert new ids with their numbers."""
        self.make_room(len(ids))
        self.set(ids, numbers)
        self.count += len(ids)

    def make_room(self, more: int) -> None:
        """Grow the table for `more` new ids."""
        if self.count + more > FULLEST * len(self._entries):
            self._rehash(entries_for(self.count + more))

    def set(self, ids: np.ndarray, numbers: np.ndarray) -> None:
        """Overwrite the numbers of known ids."""
        kernels.cpu.launch(kernels.cpu.directory.set_values, *self.index, ids, numbers)

    def remove(self, ids: np.ndarray) -> None:
        """Delete known ids."""
        kernels.cpu.launch(kernels.cpu.cache.erase, *self.index, ids)
        self.count -= len(ids)

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all ids, ascending, and their numbers."""
        there = self._entries[self._entries[:, 1] != 0]
        there = there[np.argsort(there[:, 0])]
        return there[:, 0].copy(), there[:, 1] - 1


def entries_for(count: int, first: int = FIRST_ENTRIES, fullest: float = FULLEST) -> int:
    """Return the entries of a hash table of `count` ids: `first`, or doubled until it is no fuller than `fullest`."""
    entries = first
    while count > fullest * entries:
        entries *= 2
    return entries
