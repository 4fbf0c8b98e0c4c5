"""`Base`: positions of records in sorted segments, in about one bit of RAM per possible row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from embedrock import kernels
from embedrock.store.segments import Segment

BLOCK_WORDS = 8  # one cache line of bits per rank: 32 more bits for 512
BLOCK_BITS = 64 * BLOCK_WORDS


class Base:
    """Immutable index from ids to positions in sorted segments.

    The base copies the segments' indexes, and the segments keep views of the copies.

    Attributes:
        runs: the sorted segments. Ranges ascend and do not overlap.
        index: arrays of the kernel `find_base`.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        storage = kernels.cpu.storage
        kinds = {"full": storage.FULL, "bits": storage.BITS, "ids": storage.LISTED}
        self.runs, self.count = tuple(segments), sum(segment.count for segment in segments)
        self._lows = np.array([segment.lo for segment in segments], np.int64)
        self._lasts = np.array([segment.hi - 1 for segment in segments], np.int64)
        self._folded_below = np.array([segment.folded_below for segment in segments], np.int64)
        # Records in the segments before each one.
        self._below = np.cumsum([0, *(segment.count for segment in segments)])
        self._table = np.zeros((len(segments), 5), np.int64)
        self._listed = np.empty(sum(segment.count for segment in segments if segment.kind == "ids"), np.int64)
        blocks = sum(map(_blocks, segments))
        self._blocks, self._ranks = np.zeros((blocks, BLOCK_WORDS), np.uint64), np.empty(blocks, np.uint32)
        self.index = self._lows, self._lasts, self._table, self._listed, self._blocks, self._ranks
        self._indexes, starts = list[np.ndarray | None](), {"full": 0, "bits": 0, "ids": 0}
        for number, segment in enumerate(segments):
            start = starts[segment.kind]
            self._table[number] = segment.lo, kinds[segment.kind], segment.number, start, segment.count
            starts[segment.kind] += _blocks(segment) if segment.kind == "bits" else segment.count
            self._indexes.append(self._taken(segment, start))

    def _taken(self, segment: Segment, start: int) -> np.ndarray | None:
        if segment.kind == "full":
            return None
        words = self._blocks[start:].reshape(-1)[: -(-(segment.hi - segment.lo) // 64)]
        index = self._listed[start : start + segment.count] if segment.kind == "ids" else words
        index[:] = segment.index()
        segment.known_index = index
        if segment.kind == "bits":
            part = slice(start, start + _blocks(segment))
            kernels.cpu.storage.rank_blocks(self._blocks[part], self._ranks[part])
        return index

    @property
    def nbytes(self) -> int:
        arrays = self._lows, self._lasts, self._folded_below, self._table, self._listed, self._blocks, self._ranks
        return sum(array.nbytes for array in arrays)

    def find(self, ids: np.ndarray, known: np.ndarray | None = None) -> np.ndarray:
        """Return the location of each id, int64 (n,). -1: not found. Ids may repeat. `known` has locations of some."""
        locations = np.full(len(ids), -1) if known is None else known
        kernels.cpu.launch(kernels.cpu.storage.find_base, *self.index, ids, locations)
        return locations

    def has_folded(self, ids: np.ndarray, log: int) -> np.ndarray:
        """Return which ids lie in segments that a log was compacted into. The log's records of them are out of date."""
        numbers = np.flatnonzero(self._folded_below > log)
        lows, lasts = self._lows[numbers], self._lasts[numbers]
        if not len(numbers):
            return np.zeros(len(ids), bool)
        places = np.searchsorted(lows, ids, side="right") - 1
        return (places >= 0) & (ids <= lasts[places])

    def ids_of(self, number: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return the ids of records [start, stop) of a segment, ascending."""
        segment, index = self.runs[number], self._indexes[number]
        stop = segment.count if stop is None else min(stop, segment.count)
        if index is None:
            return segment.lo + np.arange(start, stop)  # not `arange` from the sums, which may be 2**63
        if segment.kind == "ids":
            return index[start:stop].copy()
        first = int(self._table[number, 3])
        ranks = self._ranks[first : first + _blocks(segment)]
        block = max(int(np.searchsorted(ranks, start, side="right")) - 1, 0)
        words = self._blocks[first + block : first + len(ranks)].reshape(-1)
        ids = np.empty(max(stop - start, 0), np.int64)
        kernels.cpu.storage.list_bits(words, start - int(ranks[block]), segment.lo + block * BLOCK_BITS, ids)
        return ids

    def id_batches(self, lo: int, hi: int, size: int) -> Iterator[np.ndarray]:
        """Iterate over the ids in [lo, hi) that have records, ascending, at most `size` at a time."""
        for number in self._numbers(lo, hi):
            end = self._rank(number, hi)
            for start in range(self._rank(number, lo), end, size):
                yield self.ids_of(number, start, min(start + size, end))

    def within(self, lo: int, hi: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids in [lo, hi) that have records, ascending, and their locations."""
        parts = [self._part(number, lo, hi) for number in self._numbers(lo, hi)]
        ids, locations = ([part[k] for part in parts] for k in (0, 1))
        nothing = np.empty(0, np.int64)
        return np.concatenate([nothing, *ids]), np.concatenate([nothing, *locations])

    def rank(self, row: int) -> int:
        """Return the number of records with ids less than `row`, which may be 2**63."""
        number = int(np.searchsorted(self._lasts, row - 1, side="right")) if row > -(2**63) else 0
        return int(self._below[number]) + (self._rank(number, row) if number < len(self.runs) else 0)

    def _numbers(self, lo: int, hi: int) -> range:
        # Numbers of the segments that may have ids in [lo, hi).
        return range(int(np.searchsorted(self._lasts, lo)), int(np.searchsorted(self._lows, hi - 1, side="right")))

    def _part(self, number: int, lo: int, hi: int) -> tuple[np.ndarray, np.ndarray]:
        start, stop = self._rank(number, lo), self._rank(number, hi)
        return self.ids_of(number, start, stop), self.runs[number].locations(start, stop - start)

    def _rank(self, number: int, row: int) -> int:
        # Number of records of a segment with ids less than `row`.
        segment, index = self.runs[number], self._indexes[number]
        offset = row - segment.lo
        if offset <= 0 or row >= segment.hi:
            return 0 if offset <= 0 else segment.count
        if index is None:
            return offset
        if segment.kind == "ids":
            return int(np.searchsorted(index, row))
        block = int(self._table[number, 3]) + offset // BLOCK_BITS
        bits = np.unpackbits(self._blocks[block].view(np.uint8), bitorder="little", count=offset % BLOCK_BITS)
        return int(self._ranks[block]) + int(np.count_nonzero(bits))


def _blocks(segment: Segment) -> int:
    return -(-(segment.hi - segment.lo) // BLOCK_BITS) if segment.kind == "bits" else 0
