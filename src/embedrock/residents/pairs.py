"""`IdNumbers`: a number for each of some ids, in RAM."""

from __future__ import annotations

import numpy as np

from embedrock import kernels
from embedrock.machine.arena import reserve

FIRST_ENTRIES = 1024
FULLEST = 0.625  # share of entries in use at which the hash table doubles
ENTRY_BYTES = 16


class IdNumbers:
    """A hash table id -> number from 0 on. Ids are int64 arrays without repeats.

    Attributes:
        count: how many ids it has.

    Example:
        >>> pairs = Pairs()
        >>> pairs.put(np.array([7, -3]), np.array([1, 2]))
        >>> pairs.find(np.array([-3, 8])).tolist()
        [2, -1]
    """

    def __init__(self) -> None:
        self.count, self._entries = 0, _entries(FIRST_ENTRIES)

    @property
    def nbytes(self) -> int:
        """Bytes of RAM that it takes."""
        return self._entries.nbytes

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Return the number of each id, int64; -1 where it has none."""
        numbers = np.empty(len(ids), np.int64)
        kernels.cpu.launch(kernels.cpu.directory.find_hashed, self._entries, ids, numbers)
        return numbers

    def put(self, ids: np.ndarray, numbers: np.ndarray) -> None:
        """Give ids that have none numbers."""
        self.make_room(len(ids))
        self.set(ids, numbers)
        self.count += len(ids)

    def make_room(self, more: int) -> None:
        """See to it that so many more ids fit."""
        entries = len(self._entries)
        while self.count + more > FULLEST * entries:
            entries *= 2
        if entries > len(self._entries):
            larger = _entries(entries)
            kernels.cpu.directory.rehash(self._entries, larger)
            self._entries = larger

    def set(self, ids: np.ndarray, numbers: np.ndarray) -> None:
        """Give ids that have a number another one."""
        kernels.cpu.launch(kernels.cpu.residents.set_values, self._entries, ids, numbers)

    def remove(self, ids: np.ndarray) -> None:
        """Forget ids that have a number."""
        kernels.cpu.launch(kernels.cpu.cache.erase, self._entries, ids)
        self.count -= len(ids)

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all ids, ascending, and their numbers."""
        there = self._entries[self._entries[:, 1] != 0]
        there = there[np.argsort(there[:, 0])]
        return there[:, 0].copy(), there[:, 1] - 1


def _entries(count: int) -> np.ndarray:
    return reserve(count * ENTRY_BYTES, "an index of ids").view(np.int64).reshape(-1, 2)
