"""Blocks of strings in pages of a run: writing them in order of a key, and finding the pages that have one.

A page is a stored record of a run, with the seal that proves it, and its number is its id. docs/format.md has the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from embedrock import kernels
from embedrock.batch.strings import Strings
from embedrock.errors import CorruptTableError
from embedrock.io.vfs import System
from embedrock.kernels.constants import ENTRY_WORDS
from embedrock.store.reading import read_records
from embedrock.store.segments import Log, Segment, damaged
from embedrock.vocabulary.shape import Shape

PAGE_WORDS = 1023  # and a seal, which makes a block of the disk
PAGE_BYTES = 4 * PAGE_WORDS
PLAIN, HASHED = 1, ENTRY_WORDS  # words of an entry: (size), or (hash, id, size)
PIECE_PAGES = 1024  # that are written, or read, at once


class HashEntries(NamedTuple):
    """Strings in order of a key, each with some words.

    Attributes:
        keys: int64 (n,), ascending: ids or hashes.
        columns: uint32 (n, width); the last has the bytes of the string.
        texts: uint8, the strings end to end.
    """

    keys: np.ndarray
    columns: np.ndarray
    texts: np.ndarray

    @property
    def starts(self) -> np.ndarray:
        """Where each string begins in `texts`."""
        sizes = self.columns[:, -1].astype(np.int64)
        return np.cumsum(sizes) - sizes

    def since(self, first: int) -> HashEntries:
        """Return a copy of the entries from one on."""
        texts = self.texts[self.starts[first] :] if first < len(self.keys) else self.texts[:0]
        return HashEntries(self.keys[first:].copy(), self.columns[first:].copy(), texts.copy())


def joined(parts: list[HashEntries]) -> HashEntries:
    """Return the entries of several, one after the other."""
    return HashEntries(*map(np.concatenate, zip(*parts, strict=True)))


class Index(NamedTuple):
    """Where blocks lie.

    Attributes:
        firsts: int64 (m,), ascending: the least key of each.
        rows: int64 (m + 1,), the first page of each, and the end of the last.
    """

    firsts: np.ndarray
    rows: np.ndarray

    @property
    def nbytes(self) -> int:
        """RAM that it takes."""
        return self.firsts.nbytes + self.rows.nbytes

    def block_of(self, keys: np.ndarray) -> np.ndarray:
        """Return the block in which each key must be if it is there; -1: it is in none."""
        return np.searchsorted(self.firsts, keys, "right") - 1

    def parts(self, blocks: np.ndarray, most: int | None = None) -> list[np.ndarray]:
        """Return ascending blocks in parts of about so many pages, or `PIECE_PAGES`; the first has half."""
        most = most or PIECE_PAGES
        pages = np.cumsum(self.rows[blocks + 1] - self.rows[blocks])
        cuts = np.flatnonzero(np.diff((pages - 1 + most // 2) // most)) + 1
        return np.split(blocks, cuts) if len(blocks) else []

    def pages_of(self, blocks: np.ndarray) -> int:
        """Return how many pages blocks have."""
        return int((self.rows[blocks + 1] - self.rows[blocks]).sum())

    def checked(self, pages: int, keys: int, where: str) -> Index:
        """Return it, if blocks have all of so many pages from their first on, and their keys are in ``[0, keys)``.

        Raises:
            CorruptTableError: they have not.
        """
        firsts, rows = self
        whole = rows[0] == 0 and rows[-1] == pages and np.all(rows[:-1] < rows[1:])
        if not whole or np.any(firsts[:-1] >= firsts[1:]) or (len(firsts) and not 0 <= firsts[0] <= firsts[-1] < keys):
            raise damaged(where, f"blocks of {pages} pages in order", "others")
        return self


class BlockWriter:
    """Writes entries as blocks behind what a log has. They come in order of their keys, also from call to call."""

    def __init__(self, log: Log, width: int) -> None:
        self._log, self._width = log, width
        self._carry: list[HashEntries] = []  # of a block that may not be full yet
        self._firsts, self._pages = list[np.ndarray](), list[np.ndarray]()

    def add(self, entries: HashEntries) -> None:
        """Write entries, but for those of the last block."""
        if not len(entries.keys):
            return
        entries = joined([*self._carry, entries])
        blocks = np.empty((len(entries.keys), 2), np.int64)
        sizes = entries.columns[:, -1].astype(np.int64)
        plan = kernels.cpu.vocabulary.plan_blocks
        count = kernels.cpu.launch(plan, sizes, entries.keys, self._width, PAGE_WORDS, blocks)
        self._carry = [entries.since(int(blocks[count - 1, 0]))]
        self._write(entries, blocks[: count - 1], int(blocks[count - 1, 0]))

    def finish(self) -> Index:
        """Write what is left, and return where all of it lies, the first page being 0."""
        for entries in self._carry:
            sizes = entries.columns[:, -1].astype(np.int64)
            need = 4 + 4 * self._width * len(sizes) + int(sizes.sum())
            self._write(entries, np.array([[0, -(-need // PAGE_BYTES)]]), len(sizes))
        self._carry = []
        firsts, pages = (np.concatenate([np.empty(0, np.int64), *parts]) for parts in (self._firsts, self._pages))
        return Index(firsts, np.concatenate([[0], np.cumsum(pages)]).astype(np.int64))

    def _write(self, entries: HashEntries, blocks: np.ndarray, end: int) -> None:
        if not len(blocks):
            return
        rows = np.concatenate([[0], np.cumsum(blocks[:, 1])])
        pages = np.empty((int(rows[-1]), PAGE_WORDS), np.uint32)
        firsts = np.append(blocks[:, 0], end)
        write = kernels.cpu.vocabulary.write_blocks
        kernels.cpu.launch(write, firsts, entries.columns, entries.starts, entries.texts, rows, pages)
        append_pages(self._log, pages)
        self._firsts.append(entries.keys[blocks[:, 0]])
        self._pages.append(blocks[:, 1].copy())


def append_pages(log: Log, pages: np.ndarray) -> None:
    """Append pages uint32 (n, `PAGE_WORDS`) to a log, sealed."""
    numbers = np.arange(log.count, log.count + len(pages))
    sealed = np.empty((len(pages), PAGE_BYTES + 4), np.uint8)
    kernels.cpu.launch(kernels.cpu.storage.seal, pages.view(np.uint8), np.arange(len(pages)), numbers, sealed)
    log.append(sealed, numbers)


def read_pages(system: System, run: Segment, rows: np.ndarray) -> np.ndarray:
    """Return pages of a run, uint32 (n, `PAGE_WORDS`), by their numbers."""
    pages = np.empty((len(rows), PAGE_WORDS), np.uint32)
    read_records(system, {0: run}, rows, rows, pages.view(np.uint8), np.arange(len(rows)))
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
    def read(cls, system: System, run: Segment, index: Index, first_page: int, blocks: np.ndarray) -> Blocks:
        """Read some ascending blocks of an index whose page 0 is `first_page` of a run."""
        begins, sizes = index.rows[blocks], index.rows[blocks + 1] - index.rows[blocks]
        rows = np.concatenate([[0], np.cumsum(sizes)])
        pages = np.arange(rows[-1]) + np.repeat(begins - rows[:-1], sizes) + first_page
        return cls(read_pages(system, run, pages), rows)

    def entries(self, counts: np.ndarray, width: int, where: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the words of all entries, uint32 (n, width), and where their strings begin in the bytes of `pages`.

        Args:
            counts: int64 (m,), entries that each block must have.
            width: words of an entry.
            where: for messages.

        Raises:
            CorruptTableError: a block is none.
        """
        firsts = np.concatenate([[0], np.cumsum(counts)])
        columns, starts = np.empty((int(firsts[-1]), width), np.uint32), np.empty(int(firsts[-1]), np.int64)
        good = np.empty(len(counts), np.uint8)
        kernels.cpu.launch(kernels.cpu.vocabulary.list_entries, self.pages, self.rows, firsts, columns, starts, good)
        if not good.all():
            raise malformed(where)
        return columns, starts

    def texts(self, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return strings that begin so in the bytes of `pages`, end to end."""
        return gathered(self.pages.reshape(-1).view(np.uint8), starts, sizes)


def gathered(data: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return strings of `data`, end to end."""
    bounds = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    out = np.empty(int(bounds[-1]), np.uint8)
    kernels.cpu.launch(kernels.cpu.vocabulary.copy_strings, data, starts, bounds, out)
    return out


def malformed(where: str) -> CorruptTableError:
    """Return the error of pages whose seals fit, and which make no sense."""
    return damaged(where, "blocks of strings, as docs/format.md has them", "others")


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
