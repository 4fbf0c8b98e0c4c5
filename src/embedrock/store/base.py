"""`Base`: where the records of compacted rows are: about one bit a row that there could be, in RAM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from embedrock import kernels
from embedrock.kernels.constants import RUN_SHIFT

BLOCK_WORDS = 8  # a cache line of bits for each rank: 32 bits for 512
BLOCK_BITS = 64 * BLOCK_WORDS


@dataclass(frozen=True, eq=False)
class Chunk:
    """A run whose records are sorted by id, and which ids in [lo, hi) it has.

    Attributes:
        lo: least id that it may have.
        hi: all its ids are less (so it may be 2**63).
        kind: "full" (all of them), "bits" (those whose bits are set) or "ids" (those listed).
        run: its number.
        count: its records.
        index: uint64 words of bits, bit i % 64 of word i // 64 for id lo + i; or int64 ids, ascending; or None.
        folded_below: logs of less than this number are folded into it.
    """

    lo: int
    hi: int
    kind: str
    run: int
    count: int
    index: np.ndarray | None
    folded_below: int = 0


class Base:
    """Where the record of each id is; immutable. Chunks ascend and do not overlap, and have been checked.

    It keeps copies of the indexes: `chunks` has views of them.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        storage = kernels.cpu.storage
        self._kinds = {"full": storage.FULL, "bits": storage.BITS, "ids": storage.LISTED}
        self.count = sum(chunk.count for chunk in chunks)
        self._lows = np.array([chunk.lo for chunk in chunks], np.int64)
        self._lasts = np.array([chunk.hi - 1 for chunk in chunks], np.int64)
        self._folded_below = np.array([chunk.folded_below for chunk in chunks], np.int64)
        self._below = np.cumsum([0, *(chunk.count for chunk in chunks)])  # records of the chunks before each
        self._table = np.zeros((len(chunks), 5), np.int64)
        self._listed = np.empty(sum(chunk.count for chunk in chunks if chunk.kind == "ids"), np.int64)
        blocks = sum(_blocks(chunk) for chunk in chunks)
        self._blocks, self._ranks = np.zeros((blocks, BLOCK_WORDS), np.uint64), np.empty(blocks, np.uint32)
        self.chunks = self._take(chunks)

    def _take(self, chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
        taken, starts = [], {"full": 0, "bits": 0, "ids": 0}
        for number, chunk in enumerate(chunks):
            start = starts[chunk.kind]
            self._table[number] = chunk.lo, self._kinds[chunk.kind], chunk.run, start, chunk.count
            starts[chunk.kind] += _blocks(chunk) if chunk.kind == "bits" else chunk.count
            index = self._index(chunk, start)
            if index is not None:
                index[:] = chunk.index
            if chunk.kind == "bits":
                part = slice(start, start + _blocks(chunk))
                kernels.cpu.storage.rank_blocks(self._blocks[part], self._ranks[part])
            taken.append(replace(chunk, index=index))
        return tuple(taken)

    def _index(self, chunk: Chunk, start: int) -> np.ndarray | None:
        # Where the index of a chunk lies here.
        if chunk.kind == "bits":
            return self._blocks[start:].reshape(-1)[: -(-(chunk.hi - chunk.lo) // 64)]
        return self._listed[start : start + chunk.count] if chunk.kind == "ids" else None

    @property
    def nbytes(self) -> int:
        """Bytes of RAM that it takes."""
        arrays = self._lows, self._lasts, self._folded_below, self._table, self._listed, self._blocks, self._ranks
        return sum(array.nbytes for array in arrays)

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Return the location of each id, int64; -1 where it has none. Ids may repeat."""
        locations = np.empty(len(ids), np.int64)
        index = self._lows, self._lasts, self._table, self._listed, self._blocks, self._ranks
        kernels.cpu.launch(kernels.cpu.storage.find_base, *index, ids, locations)
        return locations

    def has_folded(self, ids: np.ndarray, log: int) -> np.ndarray:
        """Return which ids lie in chunks that a log is folded into: what it has of them is out of date."""
        numbers = np.flatnonzero(self._folded_below > log)
        lows, lasts = self._lows[numbers], self._lasts[numbers]
        if not len(numbers):
            return np.zeros(len(ids), bool)
        places = np.searchsorted(lows, ids, side="right") - 1
        return (places >= 0) & (ids <= lasts[places])

    def ids_of(self, number: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return the ids of records [start, stop) of a chunk, ascending."""
        chunk = self.chunks[number]
        stop = chunk.count if stop is None else min(stop, chunk.count)
        if chunk.index is None:
            return chunk.lo + np.arange(start, stop)  # not from their sums, which may be 2**63
        if chunk.kind == "ids":
            return chunk.index[start:stop].copy()
        first = int(self._table[number, 3])
        ranks = self._ranks[first : first + _blocks(chunk)]
        block = max(int(np.searchsorted(ranks, start, side="right")) - 1, 0)
        words = self._blocks[first + block : first + len(ranks)].reshape(-1)
        ids = np.empty(max(stop - start, 0), np.int64)
        kernels.cpu.storage.list_bits(words, start - int(ranks[block]), chunk.lo + block * BLOCK_BITS, ids)
        return ids

    def within(self, lo: int, hi: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids in [lo, hi) that have records, ascending, and their locations."""
        numbers = range(int(np.searchsorted(self._lasts, lo)), int(np.searchsorted(self._lows, hi - 1, side="right")))
        parts = [self._part(number, lo, hi) for number in numbers]
        ids, locations = ([part[k] for part in parts] for k in (0, 1))
        nothing = np.empty(0, np.int64)
        return np.concatenate([nothing, *ids]), np.concatenate([nothing, *locations])

    def rank(self, row: int) -> int:
        """Return how many records have ids less than `row`, which may be 2**63."""
        number = int(np.searchsorted(self._lasts, row - 1, side="right")) if row > -(2**63) else 0
        return int(self._below[number]) + (self._rank(number, row) if number < len(self.chunks) else 0)

    def _part(self, number: int, lo: int, hi: int) -> tuple[np.ndarray, np.ndarray]:
        start, stop = self._rank(number, lo), self._rank(number, hi)
        location = self.chunks[number].run << RUN_SHIFT
        return self.ids_of(number, start, stop), np.arange(location + start, location + stop)

    def _rank(self, number: int, row: int) -> int:
        # How many records of a chunk have ids less than `row`.
        chunk = self.chunks[number]
        offset = row - chunk.lo
        if offset <= 0 or row >= chunk.hi:
            return 0 if offset <= 0 else chunk.count
        if chunk.index is None:
            return offset
        if chunk.kind == "ids":
            return int(np.searchsorted(chunk.index, row))
        block = int(self._table[number, 3]) + offset // BLOCK_BITS
        bits = np.unpackbits(self._blocks[block].view(np.uint8), bitorder="little", count=offset % BLOCK_BITS)
        return int(self._ranks[block]) + int(np.count_nonzero(bits))


def _blocks(chunk: Chunk) -> int:
    return -(-(chunk.hi - chunk.lo) // BLOCK_BITS) if chunk.kind == "bits" else 0
