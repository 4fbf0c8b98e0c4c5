"""Strings in RAM: `MemTable` has those that no file has yet, `Recent` some of all files, `Packed` all of one file."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from embedrock import kernels
from embedrock.batch.strings import Strings
from embedrock.vocabulary.blocks import gathered
from embedrock.vocabulary.shape import Shape

FILL = 2  # places of the table for each string, at least
ROW_BYTES = 40  # of a string: its hash, where it ends, and its places in the table
GROWN = 2  # how much more than that may be there, as it grows by steps


class StringQuery(NamedTuple):
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
    def of(cls, strings: Strings, salt: tuple[int, int]) -> StringQuery:
        """Return strings with their hashes, keyed by a salt."""
        hashes, key = np.empty(len(strings.starts), np.int64), np.array(salt, np.uint64)
        kernels.cpu.launch(kernels.cpu.strings.hash_strings, *strings, key, 2**63 - 1, hashes)
        return cls(hashes, *strings)

    def some(self, chosen: np.ndarray) -> StringQuery:
        """Return those at some positions."""
        return StringQuery(self.hashes[chosen], self.data, self.starts[chosen], self.stops[chosen])

    @property
    def nbytes(self) -> int:
        """Bytes of the strings."""
        return int((self.stops - self.starts).sum())


class MemTable:
    """Strings in RAM, by number.

    Attributes:
        count: strings.
    """

    def __init__(self) -> None:
        self.count = 0
        self._table, self._known = np.zeros(128, np.int64), np.empty(64, np.int64)
        self._bounds, self._memory = np.zeros(65, np.int64), np.empty(1024, np.uint8)

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

    def find(self, wanted: StringQuery) -> np.ndarray:
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

    def insert(self, wanted: StringQuery) -> np.ndarray:
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


class Recent:
    """Ids of strings that were found by a read, the last ones that fit.

    There are two halves. Once the new one is full, it becomes the old one, whose strings are forgotten.

    Args:
        most_bytes: of RAM.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes // 2 // GROWN
        self._new, self._old = _Half(), _Half()

    @property
    def nbytes(self) -> int:
        """RAM that it takes."""
        return sum(half.nbytes + half.ids.nbytes for half in (self._new, self._old))

    def find(self, wanted: StringQuery) -> np.ndarray:
        """Return the ids of strings, int64; -1 for those that it does not have."""
        if not self._new.count + self._old.count:
            return np.full(len(wanted.hashes), -1)
        ids = self._new.ids_of(wanted)
        left = np.flatnonzero(ids < 0)
        ids[left] = self._old.ids_of(wanted.some(left))
        again = left[ids[left] >= 0]
        self.add(wanted.some(again), ids[again])
        return ids

    def add(self, wanted: StringQuery, ids: np.ndarray) -> None:
        """Keep the ids of strings, unless they are more than fit."""
        room = len(ids), wanted.nbytes
        if self._new.bytes_with(*room) > self._most_bytes:
            self._new, self._old = _Half(), self._new
        if len(ids) and self._new.bytes_with(*room) <= self._most_bytes:
            self._new.keep(wanted, ids)


class _Half(MemTable):
    """Strings in RAM with ids that are not their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = np.full(1, -1)  # by number, and behind them what number -1 gets

    def ids_of(self, wanted: StringQuery) -> np.ndarray:
        return self.ids[self.find(wanted)]

    def keep(self, wanted: StringQuery, ids: np.ndarray) -> None:
        self.reserve(len(ids), wanted.nbytes)
        numbers = self.insert(wanted)
        self.ids = np.append(self.ids[:-1], np.full(self.count + 2 - len(self.ids), -1))
        self.ids[numbers] = ids


class Packed:
    """Strings, each with its number in a file.

    Args:
        shape: of the strings that will be added.
    """

    def __init__(self, shape: Shape) -> None:
        self._codes, self._widths = shape.codes, np.array(shape.widths, np.int64)
        self._firsts, self._words = shape.empty()
        self._limit, self._state = shape.strings, np.zeros(3, np.int64)

    @property
    def nbytes(self) -> int:
        """RAM that it takes."""
        return self._firsts.nbytes + self._words.nbytes

    def add(self, columns: np.ndarray, starts: np.ndarray, data: np.ndarray) -> bool:
        """Add entries, uint32 (n, 3): tags, numbers and sizes of strings that begin so in `data`.

        They come in order of their tags, also from call to call. Returns whether they did, and had that shape.
        """
        args = columns, starts, data, self._codes, self._widths, self._limit, self._state, self._firsts, self._words
        fits = kernels.cpu.launch(kernels.cpu.vocabulary.pack_entries, *args)
        self._firsts[self._state[1] :] = self._state[0]
        return bool(fits)

    def find(self, wanted: StringQuery) -> np.ndarray:
        """Return the numbers of strings, int64; -1 for those that are not there."""
        out = np.empty(len(wanted.hashes), np.int64)
        args = self._firsts, self._words, self._codes, self._widths
        kernels.cpu.launch(kernels.cpu.vocabulary.find_packed, *args, *wanted, out)
        return out


def _grown(array: np.ndarray, count: int) -> np.ndarray:
    out = np.empty(max(count, len(array) * 3 // 2), array.dtype)
    out[: len(array)] = array
    return out
