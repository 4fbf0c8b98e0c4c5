"""`StringRun`: a file of strings, found by hash or by id, and written from RAM or merged from others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from embedrock import kernels
from embedrock.batch.strings import Strings
from embedrock.io.vfs import System
from embedrock.store.segments import Log, Segment, SegmentEntry, damaged
from embedrock.vocabulary import blocks as pages_of
from embedrock.vocabulary.blocks import (
    HASHED,
    PAGE_BYTES,
    PAGE_WORDS,
    PLAIN,
    Blocks,
    BlockWriter,
    HashEntries,
    Index,
    MemTable,
    Packed,
    StringQuery,
)
from embedrock.vocabulary.manifest import StringFile
from embedrock.vocabulary.shape import NO_STRINGS, Shape

MOST_KEY = 2**63 - 1
LOOKED_UP_PAGES = 1024  # pages that a thread reads, checks and searches at a time
PACKED_AT = 0.5  # part of a file's pages that lookups have read, after which its strings are loaded to RAM
TAG_SHIFT = 31  # shift of hashes, as in `tests/reference/vocabulary.py`


class StringRun:
    """File of strings, open for reading.

    Attributes:
        entry: the file's entry in a checked manifest.
        reads: number of pages that lookups have read so far.

    Raises:
        CorruptTableError: the file is not the committed one.
    """

    def __init__(self, system: System, folder: str, entry: StringFile, uuid: str) -> None:
        self._system, self.entry = system, entry
        pages = SegmentEntry(entry.file, entry.size, entry.pages, "full", 0, entry.pages, 0, entry.salt)
        self._segment = Segment.open(system, folder, pages, uuid, PAGE_BYTES, 0, direct=True)
        self._packed: Packed | None = None
        self._may_pack, self.reads = False, 0
        self._strings, self._hashes = self._read_index()

    def _read_index(self) -> tuple[Index, Index]:
        entry = self.entry
        pages = np.arange(entry.pages - entry.index_pages, entry.pages)
        words = pages_of.read_pages(self._system, self._segment, pages).reshape(-1).view(np.uint8)
        indexes, at = list[Index](), 0
        for count in (entry.string_blocks, entry.hash_blocks):
            firsts = words[at : at + 8 * count].view("<i8").astype(np.int64)
            ends = words[at + 8 * count : at + 16 * count].view("<i8").astype(np.int64)
            indexes.append(Index(firsts, np.concatenate([[0], ends])))
            at += 16 * count
        strings = indexes[0].checked(entry.string_pages, entry.count, self.path)
        if strings.firsts[0] != 0:
            raise pages_of.malformed(self.path)
        return strings, indexes[1].checked(entry.hash_pages, MOST_KEY, self.path)

    @property
    def path(self) -> str:
        return self._segment.file.path

    @property
    def end(self) -> int:
        return self.entry.first + self.entry.count

    @property
    def index_bytes(self) -> int:
        return self._strings.nbytes + self._hashes.nbytes

    @property
    def nbytes(self) -> int:
        return self.index_bytes + (0 if self._packed is None else self._packed.nbytes)

    @property
    def is_resident(self) -> bool:
        return self._packed is not None

    def keep(self, may_pack: bool) -> None:
        """Allow the file to keep its strings in RAM, packed, or free them.

        Lookups load the packed strings once they have read half as many pages as loading takes.
        """
        self._may_pack = may_pack
        if not may_pack:
            self._packed = None

    def _read_packed(self) -> Packed:
        packed = Packed(self.entry.shape)
        for some, columns, starts in self._hashed_entries():
            if not packed.add(columns, starts, some.pages.reshape(-1).view(np.uint8)):
                raise pages_of.malformed(self.path)
        return packed

    # ------------------------------------------------------------ strings to ids

    def find(self, query: StringQuery) -> np.ndarray:
        """Return the ids of strings, int64 (n,). -1: not in this file. The strings are sorted by hash."""
        if self._packed is not None:
            return self._find_packed(self._packed, query)
        blocks = self._hashes.block_of(query.hashes)
        there = np.unique(blocks[int(np.searchsorted(blocks, 0)) :])
        pages = self._hashes.pages_of(there)
        if self._may_pack and self.reads + pages >= PACKED_AT * self.entry.hash_pages:
            self._packed = self._read_packed()
            return self._find_packed(self._packed, query)
        out = np.full(len(query.hashes), -1, np.int64)
        # Threads take parts in turn: one part is read while another is checked and searched.
        parts = self._hashes.parts(there, LOOKED_UP_PAGES)
        args = parts, blocks, query, out
        kernels.cpu.threads.run(self._find_in_parts, len(parts), args, grain=1, cuts=max(1, len(parts)))
        self.reads += pages
        return out

    def _find_packed(self, packed: Packed, query: StringQuery) -> np.ndarray:
        found = packed.find(query)
        return np.where(found < 0, found, found + self.entry.first)

    def _find_in_parts(
        self, parts: Sequence[np.ndarray], blocks: np.ndarray, query: StringQuery, out: np.ndarray, lo: int, hi: int
    ) -> None:
        for part in parts[lo:hi]:
            some = Blocks.read(self._system, self._segment, self._hashes, self.entry.string_pages, part)
            own = np.arange(*np.searchsorted(blocks, (part[0], part[-1] + 1)).tolist())
            out[own] = self._found(some, np.searchsorted(part, blocks[own]), query.some(own))

    def _read(self, index: Index, first_page: int, blocks: np.ndarray) -> Blocks:
        some = Blocks.read(self._system, self._segment, index, first_page, blocks)
        self.reads += len(some.pages)
        return some

    def _found(self, some: Blocks, at: np.ndarray, query: StringQuery) -> np.ndarray:
        out = np.empty(len(at), np.int64)
        find = kernels.cpu.vocabulary.find_in_blocks
        kernels.cpu.launch(find, some.pages, some.rows[at], some.rows[at + 1], *query, out)
        if len(out) and (out.min() < -1 or out.max() >= self.entry.count):
            raise pages_of.malformed(self.path)
        return np.where(out < 0, out, out + self.entry.first)

    # ------------------------------------------------------------ ids to strings

    def texts(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the concatenated strings of ascending ids, uint8, and their sizes, int64."""
        texts, sizes = [np.empty(0, np.uint8)], [np.empty(0, np.int64)]
        numbers = ids - self.entry.first
        blocks = self._strings.block_of(numbers)
        for part in self._strings.parts(np.unique(blocks)):
            lo, hi = np.searchsorted(blocks, (part[0], part[-1] + 1)).tolist()
            firsts, counts = self._strings.firsts[part], self._counts(part)
            some = self._read(self._strings, 0, part)
            columns, starts = some.entries(counts, PLAIN, self.path)
            within = np.searchsorted(part, blocks[lo:hi])
            at = (np.cumsum(counts) - counts)[within] + numbers[lo:hi] - firsts[within]
            sizes.append(columns[at, 0].astype(np.int64))
            texts.append(some.texts(starts[at], sizes[-1]))
        return np.concatenate(texts), np.concatenate(sizes)

    def _counts(self, blocks: np.ndarray) -> np.ndarray:
        return np.append(self._strings.firsts, self.entry.count)[blocks + 1] - self._strings.firsts[blocks]

    # ------------------------------------------------------------ scans

    def in_order_of_ids(self) -> Iterator[HashEntries]:
        """Yield all strings in pieces, in order of ids. The keys are ids."""
        for part in self._strings.parts(np.arange(self.entry.string_blocks)):
            some, counts = self._read(self._strings, 0, part), self._counts(part)
            columns, starts = some.entries(counts, PLAIN, self.path)
            ids = np.arange(len(columns)) + int(self._strings.firsts[part[0]]) + self.entry.first
            yield HashEntries(ids, columns, some.texts(starts, columns[:, 0]))

    def in_order_of_hashes(self, salt: tuple[int, int]) -> Iterator[HashEntries]:
        """Yield all strings in pieces, in order of hashes. The keys are hashes, and the ids those of the vocabulary."""
        last = -1
        for some, columns, starts in self._hashed_entries():
            sizes = columns[:, 2].astype(np.int64)
            data = some.pages.reshape(-1).view(np.uint8)
            hashes = StringQuery.of(_strings(data, starts, sizes), salt).hashes
            if len(hashes) and (hashes[0] < last or np.any(hashes[:-1] > hashes[1:])):
                raise pages_of.malformed(self.path)
            if len(columns) and columns[:, 1].max() >= self.entry.count:
                raise pages_of.malformed(self.path)
            last = int(hashes[-1]) if len(hashes) else last
            columns[:, 1] += np.uint32(self.entry.first)
            yield HashEntries(hashes, columns, some.texts(starts, sizes))

    def _hashed_entries(self) -> Iterator[tuple[Blocks, np.ndarray, np.ndarray]]:
        """Yield blocks in pieces, in order of hashes, with the result of `Blocks.entries`."""
        for part in self._hashes.parts(np.arange(self.entry.hash_blocks)):
            some = Blocks.read(self._system, self._segment, self._hashes, self.entry.string_pages, part)
            counts = np.minimum(some.pages[some.rows[:-1], 0], self.entry.count).astype(np.int64)
            yield some, *some.entries(counts, HASHED, self.path)

    def verify(self, salt: tuple[int, int]) -> None:
        """Read the whole file, and raise `CorruptTableError` unless each string is found by its hash under its id."""
        numbers, hashed, shape = 0, np.zeros(self.entry.count, np.int64), self.entry.shape
        for entries in self.in_order_of_hashes(salt):
            hashed[entries.columns[:, 1].astype(np.int64) - self.entry.first] = entries.keys
            numbers += len(entries.keys)
        for entries in self.in_order_of_ids():
            sizes = entries.columns[:, 0].astype(np.int64)
            hashes = StringQuery.of(_strings(entries.texts, entries.starts, sizes), salt).hashes
            if not np.array_equal(hashes, hashed[entries.keys - self.entry.first]):
                raise pages_of.malformed(self.path)
            if not shape.allows(Shape.of(entries.texts, sizes)):
                raise damaged(self.path, "strings as the manifest says", "others")
        if numbers != self.entry.count:
            raise pages_of.malformed(self.path)

    def close(self) -> None:
        self._segment.close()


def _strings(data: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> Strings:
    return Strings(data, starts, starts + sizes)


# ---------------------------------------------------------------- writing


def write_fresh(log: Log, memtable: MemTable, first: int, lo: int, hi: int) -> StringFile:
    """Write strings `lo` to `hi` of a `MemTable` to a new log, and seal it. Number 0 has the id `first`."""

    def by_ids() -> Iterator[HashEntries]:
        for numbers in _pieces(np.arange(lo, hi), memtable):
            texts, sizes = memtable.texts(numbers)
            yield HashEntries(numbers + first, sizes.astype(np.uint32)[:, None], texts)

    def by_hashes() -> Iterator[HashEntries]:
        for numbers in _pieces(np.argsort(memtable.hashes[lo:hi]) + lo, memtable):
            texts, sizes = memtable.texts(numbers)
            keys = memtable.hashes[numbers]
            columns = np.stack([keys >> TAG_SHIFT, numbers + first, sizes], axis=1).astype(np.uint32)
            yield HashEntries(keys, columns, texts)

    return _write(log, first + lo, hi - lo, by_ids(), by_hashes())


def _pieces(numbers: np.ndarray, memtable: MemTable) -> Iterator[np.ndarray]:
    bounds = memtable.bounds
    total = np.cumsum(bounds[numbers + 1] - bounds[numbers]) + np.arange(len(numbers)) * 32
    cuts = np.flatnonzero(np.diff(total // (pages_of.PIECE_PAGES * PAGE_BYTES))) + 1
    yield from np.split(numbers, cuts)


def merge(log: Log, runs: Sequence[StringRun], salt: tuple[int, int]) -> StringFile:
    """Write the strings of neighbouring files to a new log, and seal it."""
    by_ids = (entries for run in runs for entries in run.in_order_of_ids())
    by_hashes = _merged([run.in_order_of_hashes(salt) for run in runs])
    return _write(log, runs[0].entry.first, sum(run.entry.count for run in runs), by_ids, by_hashes)


def _merged(sources: Sequence[Iterator[HashEntries]]) -> Iterator[HashEntries]:
    """Yield the entries of sorted sources in key order. Each piece ends at the least last key of all sources."""
    waiting: list[HashEntries | None] = [next(source, None) for source in sources]
    while heads := [entries for entries in waiting if entries is not None]:
        limit = min(int(entries.keys[-1]) for entries in heads)
        taken = list[HashEntries]()
        for number, entries in enumerate(waiting):
            if entries is None:
                continue
            first, rest = entries.split(int(np.searchsorted(entries.keys, limit, "right")))
            taken.append(first)
            waiting[number] = rest if len(rest.keys) else next(sources[number], None)
        some = pages_of.joined(taken)
        order = np.argsort(some.keys, kind="stable")  # a stable sort of a few ascending parts takes one pass
        columns = some.columns[order]
        texts = pages_of.gathered(some.texts, some.starts[order], columns[:, -1])
        yield HashEntries(some.keys[order], columns, texts)


def _write(
    log: Log, first: int, count: int, by_ids: Iterator[HashEntries], by_hashes: Iterator[HashEntries]
) -> StringFile:
    """Write strings in both orders, and the index of their blocks. Ids in a file begin with 0."""
    indexes, pages, shape = list[Index](), [0], NO_STRINGS
    for width, source in ((PLAIN, by_ids), (HASHED, by_hashes)):
        writer = BlockWriter(log, width)
        for entries in source:
            if width == PLAIN:
                writer.add(entries._replace(keys=entries.keys - first))
                shape = shape.with_more(Shape.of(entries.texts, entries.columns[:, 0]))
            else:
                entries.columns[:, 1] -= np.uint32(first)
                writer.add(entries)
        indexes.append(writer.finish())
        pages.append(log.count)
    words = np.concatenate([part.astype("<i8") for index in indexes for part in (index.firsts, index.rows[1:])])
    index_pages = np.zeros((-(-words.nbytes // PAGE_BYTES), PAGE_WORDS), np.uint32)
    index_pages.reshape(-1)[: words.nbytes // 4] = words.view(np.uint32)
    pages_of.append_pages(log, index_pages)
    sealed = log.seal((0, log.count))
    assert sealed.salt is not None  # all new segments have one
    blocks = [len(index.firsts) for index in indexes]
    where = blocks[0], pages[1], blocks[1], pages[2] - pages[1]
    return StringFile(sealed.file, sealed.size, sealed.salt, first, count, *where, *shape[1:])
