"""Blocks of strings in pages of a segment: written in order of a key, and found by key.

A page is a sealed record of a segment, and its id is its number in the file. docs/format.md has the layout.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from embedrock import kernels
from embedrock.batch.plan import bounds_of
from embedrock.batch.strings import Strings
from embedrock.errors import CorruptTableError
from embedrock.io.vfs import System
from embedrock.kernels.constants import ENTRY_WORDS
from embedrock.store.reading import read_records
from embedrock.store.segments import Log, Segment, damaged
from embedrock.vocabulary.shape import Shape

PAGE_WORDS = 1023  # a page and its seal fill a block of the disk
PAGE_BYTES = 4 * PAGE_WORDS
PLAIN, HASHED = 1, ENTRY_WORDS  # words per entry: (size), or (hash, id, size)
PIECE_PAGES = 1024  # pages written or read at once


class HashEntries(NamedTuple):
    """Strings in order of a key, each with some words.

    Attributes:
        keys: int64 (n,), ascending: ids or hashes.
        columns: uint32 (n, width). The last column is the size of the string in bytes.
        texts: uint8, the concatenated strings.
    """

    keys: np.ndarray
    columns: np.ndarray
    texts: np.ndarray

    @property
    def starts(self) -> np.ndarray:
        return bounds_of(self.columns[:, -1])[:-1]

    def split(self, count: int) -> tuple[HashEntries, HashEntries]:
        """Return the first `count` entries, and a copy of the others."""
        end = int(self.columns[:count, -1].sum(dtype=np.int64))
        others = self.keys[count:].copy(), self.columns[count:].copy(), self.texts[end:].copy()
        return HashEntries(self.keys[:count], self.columns[:count], self.texts[:end]), HashEntries(*others)


def joined(parts: list[HashEntries]) -> HashEntries:
    """Return the concatenated entries."""
    return HashEntries(*map(np.concatenate, zip(*parts, strict=True)))


class Index(NamedTuple):
    """Positions of blocks.

    Attributes:
        firsts: int64 (m,), ascending: the least key of each block.
        rows: int64 (m + 1,), the first page of each block, and the end of the last.
    """

    firsts: np.ndarray
    rows: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.firsts.nbytes + self.rows.nbytes

    def block_of(self, keys: np.ndarray) -> np.ndarray:
        """Return the only block that can have each key. -1: none."""
        return np.searchsorted(self.firsts, keys, "right") - 1

    def parts(self, blocks: np.ndarray, most: int | None = None) -> list[np.ndarray]:
        """Return ascending blocks in parts of about `most` pages, by default `PIECE_PAGES`. The first part has half."""
        most = most or PIECE_PAGES
        pages = np.cumsum(self.rows[blocks + 1] - self.rows[blocks])
        cuts = np.flatnonzero(np.diff((pages - 1 + most // 2) // most)) + 1
        return np.split(blocks, cuts) if len(blocks) else []

    def pages_of(self, blocks: np.ndarray) -> int:
        return int((self.rows[blocks + 1] - self.rows[blocks]).sum())

    def checked(self, pages: int, keys: int, where: str) -> Index:
        """Return this index if its blocks cover `pages` pages and its keys lie in ``[0, keys)``.

        Raises:
            CorruptTableError: the index is damaged.
        """
        firsts, rows = self
        whole = rows[0] == 0 and rows[-1] == pages and np.all(rows[:-1] < rows[1:])
        if not whole or np.any(firsts[:-1] >= firsts[1:]) or (len(firsts) and not 0 <= firsts[0] <= firsts[-1] < keys):
            raise damaged(where, f"blocks of {pages} pages in order", "others")
        return self


class BlockWriter:
    """Writer of entries as blocks at the end of a log. Keys ascend, also from call to call."""

    def __init__(self, log: Log, width: int) -> None:
        self._log, self._width = log, width
        self._carry: list[HashEntries] = []  # entries of a block that may not be full yet
        self._firsts, self._pages = list[np.ndarray](), list[np.ndarray]()

    def add(self, entries: HashEntries) -> None:
        """Write entries, except those of the last block."""
        if not len(entries.keys):
            return
        entries = joined([*self._carry, entries])
        blocks = np.empty((len(entries.keys), 2), np.int64)
        sizes = entries.columns[:, -1].astype(np.int64)
        plan = kernels.cpu.vocabulary.plan_blocks
        count = kernels.cpu.launch(plan, sizes, entries.keys, self._width, PAGE_WORDS, blocks)
        self._carry = [entries.split(int(blocks[count - 1, 0]))[1]]
        self._write(entries, blocks[: count - 1], int(blocks[count - 1, 0]))

    def finish(self) -> Index:
        """Write the last block, and return the index of all blocks. Pages count from 0."""
        for entries in self._carry:
            sizes = entries.columns[:, -1].astype(np.int64)
            need = 4 + 4 * self._width * len(sizes) + int(sizes.sum())
            self._write(entries, np.array([[0, -(-need // PAGE_BYTES)]]), len(sizes))
        self._carry = []
        firsts, pages = (np.concatenate([np.empty(0, np.int64), *parts]) for parts in (self._firsts, self._pages))
        return Index(firsts, bounds_of(pages))

    def _write(self, entries: HashEntries, blocks: np.ndarray, end: int) -> None:
        if not len(blocks):
            return
        rows = bounds_of(blocks[:, 1])
        pages = np.empty((int(rows[-1]), PAGE_WORDS), np.uint32)
        firsts = np.append(blocks[:, 0], end)
        write = kernels.cpu.vocabulary.write_blocks
        kernels.cpu.launch(write, firsts, entries.columns, entries.starts, entries.texts, rows, pages)
        append_pages(self._log, pages)
        self._firsts.append(entries.keys[blocks[:, 0]])
        self._pages.append(blocks[:, 1].copy())


def append_pages(log: Log, pages: np.ndarray) -> None:
    """Seal pages, uint32 (n, `PAGE_WORDS`), and append them to a log."""
    numbers = np.arange(log.count, log.count + len(pages))
    sealed = np.empty((len(pages), PAGE_BYTES + 4), np.uint8)
    kernels.cpu.launch(kernels.cpu.storage.seal, pages.view(np.uint8), np.arange(len(pages)), numbers, sealed)
    log.append(sealed, numbers)


def read_pages(system: System, segment: Segment, rows: np.ndarray) -> np.ndarray:
    """Return pages of a segment by number, uint32 (n, `PAGE_WORDS`)."""
    pages = np.empty((len(rows), PAGE_WORDS), np.uint32)
    read_records(system, {0: segment}, rows, rows, pages.view(np.uint8), np.arange(len(rows)))
    return pages


class Blocks(NamedTuple):
    """Blocks in RAM.

    Attributes:
        pages: uint32 (p, `PAGE_WORDS`).
        rows: int64 (m + 1,), the first page of each block, and the end of the last.
    """

    pages: np.ndarray
    rows: np.ndarray

    @classmethod
    def read(cls, system: System, segment: Segment, index: Index, first_page: int, blocks: np.ndarray) -> Blocks:
        """Read ascending blocks of an index whose page 0 is page `first_page` of the segment."""
        begins, sizes = index.rows[blocks], index.rows[blocks + 1] - index.rows[blocks]
        rows = bounds_of(sizes)
        pages = np.arange(rows[-1]) + np.repeat(begins - rows[:-1], sizes) + first_page
        return cls(read_pages(system, segment, pages), rows)

    def entries(self, counts: np.ndarray, width: int, where: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the words of all entries, uint32 (n, width), and the offsets of their strings in the bytes of `pages`.

        Args:
            counts: int64 (m,), entries that each block must have.
            width: words of an entry.
            where: path for messages.

        Raises:
            CorruptTableError: a block is malformed.
        """
        firsts = bounds_of(counts)
        columns, starts = np.empty((int(firsts[-1]), width), np.uint32), np.empty(int(firsts[-1]), np.int64)
        good = np.empty(len(counts), np.uint8)
        kernels.cpu.launch(kernels.cpu.vocabulary.list_entries, self.pages, self.rows, firsts, columns, starts, good)
        if not good.all():
            raise malformed(where)
        return columns, starts

    def texts(self, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        return gathered(self.pages.reshape(-1).view(np.uint8), starts, sizes)


def gathered(data: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the concatenated strings at some offsets in `data`."""
    bounds = bounds_of(sizes)
    out = np.empty(int(bounds[-1]), np.uint8)
    kernels.cpu.launch(kernels.cpu.vocabulary.copy_strings, data, starts, bounds, out)
    return out


def malformed(where: str) -> CorruptTableError:
    """Return the error of pages with valid seals and malformed content."""
    return damaged(where, "blocks of strings, as docs/format.md has them", "others")


FILL = 2  # places in the hash table per string, at least
ROW_BYTES = 40  # per string: its hash, its end, and its places in the table
GROWN = 2  # arrays may be this much larger, as they grow in steps


class StringQuery(NamedTuple):
    """Strings to find, with their hashes.

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
        return StringQuery(self.hashes[chosen], self.data, self.starts[chosen], self.stops[chosen])

    @property
    def nbytes(self) -> int:
        return int((self.stops - self.starts).sum())


class MemTable:
    """Strings in RAM, by number.

    Attributes:
        count: number of strings.
    """

    def __init__(self) -> None:
        self.count = 0
        self._table, self._known = np.zeros(128, np.int64), np.empty(64, np.int64)
        self._bounds, self._memory = np.zeros(65, np.int64), np.empty(1024, np.uint8)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self._table, self._known, self._bounds, self._memory))

    def bytes_with(self, count: int, nbytes: int) -> int:
        """Return about how much RAM the table takes with `count` more strings of `nbytes` bytes."""
        return int(self._bounds[self.count]) + nbytes + ROW_BYTES * (self.count + count)

    @property
    def bounds(self) -> np.ndarray:
        """Return the offsets of the strings and their end, int64 (count + 1,)."""
        return self._bounds[: self.count + 1]

    @property
    def shape(self) -> Shape:
        return Shape.of(self._memory[: self.bounds[-1]], np.diff(self.bounds))

    def find(self, query: StringQuery) -> np.ndarray:
        """Return the number of each string, int64 (n,). -1: not found."""
        out = np.full(len(query.hashes), -1, np.int64)
        if self.count:
            known = self._table, self._known, self._bounds, self._memory
            kernels.cpu.launch(kernels.cpu.vocabulary.find_in_memory, *known, *query, out)
        return out

    def reserve(self, count: int, nbytes: int) -> None:
        """Allocate memory for `count` more strings of `nbytes` bytes. Nothing else changes."""
        count, nbytes = self.count + count, int(self._bounds[self.count]) + nbytes
        if count > len(self._known):
            known = _grown(self._known, count)
            bounds = _grown(self._bounds, len(known) + 1)
            table = np.zeros(1 << (FILL * len(known) - 1).bit_length(), np.int64)
            kernels.cpu.launch(kernels.cpu.vocabulary.index_in_memory, table, known, self.count)
            self._known, self._bounds, self._table = known, bounds, table
        if nbytes > len(self._memory):
            self._memory = _grown(self._memory, nbytes)

    def insert(self, query: StringQuery) -> np.ndarray:
        """Return the numbers of strings. New strings get the next numbers. Callers have called `reserve`."""
        out = np.full(len(query.hashes), -1, np.int64)
        known = self._table, self._known, self._bounds, self._memory
        self.count = kernels.cpu.launch(kernels.cpu.vocabulary.insert_in_memory, *known, self.count, *query, out)
        return out

    def texts(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the concatenated strings of some numbers, uint8, and their sizes, int64."""
        starts = self._bounds[numbers]
        sizes = self._bounds[numbers + 1] - starts
        return gathered(self._memory, starts, sizes), sizes

    @property
    def hashes(self) -> np.ndarray:
        """Return the hashes of the strings, int64 (count,)."""
        return self._known[: self.count]


class Recent:
    """Cache of ids of strings that were read from files.

    The cache has two halves. Once the new half is full, it replaces the old half, which is dropped.

    Args:
        most_bytes: its limit of RAM.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes // 2 // GROWN
        self._new, self._old = _Half(), _Half()

    @property
    def nbytes(self) -> int:
        return sum(half.nbytes + half.ids.nbytes for half in (self._new, self._old))

    def find(self, query: StringQuery) -> np.ndarray:
        """Return the ids of strings, int64 (n,). -1: not cached."""
        if not self._new.count + self._old.count:
            return np.full(len(query.hashes), -1)
        ids = self._new.ids_of(query)
        left = np.flatnonzero(ids < 0)
        ids[left] = self._old.ids_of(query.some(left))
        again = left[ids[left] >= 0]
        self.add(query.some(again), ids[again])
        return ids

    def add(self, query: StringQuery, ids: np.ndarray) -> None:
        """Cache the ids of strings, unless they are too large for a half."""
        room = len(ids), query.nbytes
        if self._new.bytes_with(*room) > self._most_bytes:
            self._new, self._old = _Half(), self._new
        if len(ids) and self._new.bytes_with(*room) <= self._most_bytes:
            self._new.keep(query, ids)


class _Half(MemTable):
    """Strings in RAM with arbitrary ids."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = np.full(1, -1)  # by number; the last item, -1, is the id of number -1

    def ids_of(self, query: StringQuery) -> np.ndarray:
        return self.ids[self.find(query)]

    def keep(self, query: StringQuery, ids: np.ndarray) -> None:
        self.reserve(len(ids), query.nbytes)
        numbers = self.insert(query)
        self.ids = np.append(self.ids[:-1], np.full(self.count + 2 - len(self.ids), -1))
        self.ids[numbers] = ids


class Packed:
    """Compressed hash table from strings to their numbers in a file.

    Args:
        shape: the shape of the strings to add.
    """

    def __init__(self, shape: Shape) -> None:
        self._codes, self._widths = shape.codes, np.array(shape.widths, np.int64)
        self._firsts, self._words = shape.empty()
        self._limit, self._state = shape.strings, np.zeros(3, np.int64)

    @property
    def nbytes(self) -> int:
        return self._firsts.nbytes + self._words.nbytes

    def add(self, columns: np.ndarray, starts: np.ndarray, data: np.ndarray) -> bool:
        """Add entries, uint32 (n, 3): tag, number and size of each string. Strings begin at `starts` in `data`.

        Tags ascend, also from call to call. Return whether they do, and the strings have the table's shape.
        """
        args = columns, starts, data, self._codes, self._widths, self._limit, self._state, self._firsts, self._words
        fits = kernels.cpu.launch(kernels.cpu.vocabulary.pack_entries, *args)
        self._firsts[self._state[1] :] = self._state[0]
        return bool(fits)

    def find(self, query: StringQuery) -> np.ndarray:
        """Return the numbers of strings, int64 (n,). -1: not found."""
        out = np.empty(len(query.hashes), np.int64)
        args = self._firsts, self._words, self._codes, self._widths
        kernels.cpu.launch(kernels.cpu.vocabulary.find_packed, *args, *query, out)
        return out


def _grown(array: np.ndarray, count: int) -> np.ndarray:
    out = np.empty(max(count, len(array) * 3 // 2), array.dtype)
    out[: len(array)] = array
    return out
