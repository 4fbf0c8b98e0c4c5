"""`Fresh`: strings in RAM, found by their hash: those of a vocabulary that no file has yet."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from embedrock import kernels
from embedrock.batch.strings import Strings
from embedrock.vocabulary.blocks import gathered
from embedrock.vocabulary.shape import Shape

FILL = 2  # places of the table for each string, at least
ROW_BYTES = 40  # of a string: its hash, where it ends, and its places in the table


class Wanted(NamedTuple):
    """Strings that somebody asks for, with their hashes.

    Attributes:
        hashes: int64 (n,).
        data, starts, stops: see `Strings`.
    """

    hashes: np.ndarray
    data: np.ndarray
    starts: np.ndarray
    stops: np.ndarray

    @classmethod
    def of(cls, strings: Strings, salt: tuple[int, int]) -> Wanted:
        """Return strings with their hashes, keyed by a salt."""
        hashes, key = np.empty(len(strings.starts), np.int64), np.array(salt, np.uint64)
        kernels.cpu.launch(kernels.cpu.strings.hash_strings, *strings, key, 2**63 - 1, hashes)
        return cls(hashes, *strings)

    def some(self, chosen: np.ndarray) -> Wanted:
        """Return those at some positions."""
        return Wanted(self.hashes[chosen], self.data, self.starts[chosen], self.stops[chosen])

    @property
    def nbytes(self) -> int:
        """Bytes of the strings."""
        return int((self.stops - self.starts).sum())


class Fresh:
    """Strings in RAM, by number.

    Attributes:
        count: strings.
    """

    def __init__(self) -> None:
        self.count = 0
        self._table, self._known = np.zeros(1024, np.int64), np.empty(512, np.int64)
        self._bounds, self._memory = np.zeros(513, np.int64), np.empty(1 << 14, np.uint8)

    @property
    def nbytes(self) -> int:
        """RAM that it takes."""
        return sum(array.nbytes for array in (self._table, self._known, self._bounds, self._memory))

    def bytes_with(self, count: int, nbytes: int) -> int:
        """Return about how much RAM it takes with so many strings more."""
        return int(self._bounds[self.count]) + nbytes + ROW_BYTES * (self.count + count)

    @property
    def bounds(self) -> np.ndarray:
        """Where strings begin and end, int64 (count + 1,)."""
        return self._bounds[: self.count + 1]

    @property
    def shape(self) -> Shape:
        """What they are alike in."""
        return Shape.of(self._memory[: self.bounds[-1]], np.diff(self.bounds))

    def find(self, wanted: Wanted) -> np.ndarray:
        """Return the number of each string, int64; -1 for none."""
        out = np.full(len(wanted.hashes), -1, np.int64)
        if self.count:
            known = self._table, self._known, self._bounds, self._memory
            kernels.cpu.launch(kernels.cpu.vocabulary.find_in_memory, *known, *wanted, out)
        return out

    def reserve(self, count: int, nbytes: int) -> None:
        """Make room for so many strings more. Nothing else changes."""
        count, nbytes = self.count + count, int(self._bounds[self.count]) + nbytes
        if count > len(self._known):
            known = _grown(self._known, count)
            bounds = _grown(self._bounds, len(known) + 1)
            table = np.zeros(1 << (FILL * len(known) - 1).bit_length(), np.int64)
            kernels.cpu.launch(kernels.cpu.vocabulary.index_in_memory, table, known, self.count)
            self._known, self._bounds, self._table = known, bounds, table
        if nbytes > len(self._memory):
            self._memory = _grown(self._memory, nbytes)

    def insert(self, wanted: Wanted) -> np.ndarray:
        """Return the numbers of strings; those that are not there get the next ones. There is room for them."""
        out = np.full(len(wanted.hashes), -1, np.int64)
        known = self._table, self._known, self._bounds, self._memory
        self.count = kernels.cpu.launch(kernels.cpu.vocabulary.insert_in_memory, *known, self.count, *wanted, out)
        return out

    def texts(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return some strings end to end, uint8, and their sizes, int64."""
        starts = self._bounds[numbers]
        sizes = self._bounds[numbers + 1] - starts
        return gathered(self._memory, starts, sizes), sizes

    def in_order_of_hashes(self, lo: int, hi: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers from `lo` to `hi` in order of their hashes, and these."""
        order = np.argsort(self._known[lo:hi]) + lo
        return order, self._known[order]


def _grown(array: np.ndarray, count: int) -> np.ndarray:
    """Return a copy with room for `count` elements, and for some more."""
    out = np.empty(max(count, len(array) * 3 // 2), array.dtype)
    out[: len(array)] = array
    return out
