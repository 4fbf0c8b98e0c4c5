"""Blocks of strings in pages of a run: writing them in order of a key, and finding the pages that have one.

A page is a stored record of a run, with the seal that proves it, and its number is its id. docs/format.md has the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from embedrock import kernels
from embedrock.errors import CorruptTableError
from embedrock.kernels.constants import ENTRY_WORDS
from embedrock.machine.vfs import System
from embedrock.store.reading import read_records
from embedrock.store.runs import Log, Segment, damaged

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
