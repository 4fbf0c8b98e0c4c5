"""Runs: append-only files of stored records. `Segment` reads one, `Log` grows.

docs/format.md has the format. A stored record is the record's bytes and a seal: a CRC-32 over (id, record), marked with
its file and its position in it, so that one read serves a row and proves that it is this one and in its place. Which
ids a file has, and in which order, says its index at the end of the file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from embedrock import kernels
from embedrock.errors import CorruptTableError, MissingFileError, NewerFormatError, counted
from embedrock.io.vfs import BLOCK, File, System, create, open_file, retried
from embedrock.kernels.constants import CRC_BYTES, MARK_STEP
from embedrock.system.arena import returned

FORMAT = 2  # of what is written
GOING = 3  # of commits of tables whose rows come and go, or are forgotten
UNMARKED = 1  # the format before it, which is read: its records are sealed without a mark
MAGIC = b"EMBROCK1"
HEADER_BYTES = 4096  # one page, so that records start aligned
ID_BYTES = 8
KINDS = ("full", "bits", "ids")  # of an index; the first that fits and is smallest is taken
NONCE_BYTES = 8
_HEADER = struct.Struct(f"<8s4I16s{NONCE_BYTES}s")
_PIECE = 1 << 16  # words of which the bits are unpacked at a time
_BLOCK_ROWS = BLOCK // 4  # whatever the size of their records, a multiple of 4 bytes
_BLOCK_IDS = 1 << 17  # have memory together, until they are written
_BEHIND_BYTES = 8 << 20  # appended between two calls of `System.behind`
REMEDY = "Restore the file from a copy of the table, or go back: `embedrock verify` names the newest good commit."


def piece_rows(record_bytes: int, nbytes: int) -> int:
    """Return how many rows make a piece of about so many bytes of a run.

    Where it can be, pieces are whole blocks of the disk, so that they are written as they lie in RAM.
    """
    rows = max(1, nbytes // record_bytes)
    return rows // _BLOCK_ROWS * _BLOCK_ROWS or rows


@dataclass(frozen=True)
class SegmentEntry:
    """How a manifest describes a run. Ids lie in ``[lo, hi)``.

    Attributes:
        file: path relative to the table's folder.
        size: bytes of the whole file.
        count: stored records.
        index: "full" (all ids of the range), "bits" (a bitmap of the range) or "ids" (int64, one for each record).
        lo: at least -2**63.
        hi: at most 2**63.
        index_crc: CRC-32 of the index.
        salt: of the marks of its records, the CRC-32 of its header; None: a file of format 1, without marks.
        gone: of a log, ids that have no record any more from then on, which its index names at its end.
        folded: of a base chunk, how many of the commit's logs, from the first on, it has in it: what they have of its
            ids is out of date. That is of the commit, not of the file, so entries are equal without it.
    """

    file: str
    size: int
    count: int
    index: str
    lo: int
    hi: int
    index_crc: int
    salt: int | None = None
    gone: int = 0
    folded: int = field(default=0, compare=False)


def damaged(where: str, expected: str, got: object) -> CorruptTableError:
    """Return the error of a file that is not what was committed."""
    return CorruptTableError(f"{where} is damaged: expected {expected}, got {got}. {REMEDY}")


def index_bytes(kind: str, count: int, span: int) -> int:
    """Return the size of an index of `count` records whose ids lie in a range of `span`."""
    return {"full": 0, "bits": -(-span // 64) * 8, "ids": count * 8}[kind]


def run_bytes(record_bytes: int, entry: SegmentEntry) -> int:
    """Return the size that the file of an entry must have."""
    records = entry.count * (record_bytes + CRC_BYTES)
    return HEADER_BYTES + records + index_bytes(entry.index, entry.count, entry.hi - entry.lo) + entry.gone * ID_BYTES


class Segment:
    """A file of stored records, open for reading.

    Attributes:
        number: its position in the store's list of runs, the upper part of a location.
        file: the open file.
        path: relative to the table's folder.
        record_bytes: without the CRC.
        stride: with it.
        count: stored records; record i is at ``first + i * stride``.
        lo: ids are at least this.
        hi: ids are below this.
        kind: of the index.
        salt: of the marks of its records, see `tests/reference/storage.py`.
        step: between those of neighbours; 0, as `salt` then, where they have none.
        folded_below: of a base chunk, runs of less than this number are folded into it.
    """

    first = HEADER_BYTES

    def __init__(self, file: File, path: str, record_bytes: int, number: int) -> None:
        self.file, self.path, self.number = file, path, number
        self.record_bytes, self.stride = record_bytes, record_bytes + CRC_BYTES
        self.count, self.lo, self.hi, self.kind = 0, 0, 0, "ids"
        self.salt, self.step, self.folded_below = 0, 0, 0
        self.entry: SegmentEntry | None = None
        self._index: np.ndarray | None = None

    @classmethod
    def open(
        cls,
        system: System,
        folder: str,
        entry: SegmentEntry,
        uuid: str,
        record_bytes: int,
        number: int,
        direct: bool = False,
    ) -> Segment:
        """Open the file of an entry, and check its size and header.

        Args:
            system: that has the file.
            folder: of the table.
            entry: of a manifest that was checked.
            uuid: of the table, 32 hexadecimal digits.
            record_bytes: of the table's records.
            number: of the run.
            direct: pass the page cache by, where the file system allows it.

        Raises:
            CorruptTableError: the file is missing, has another size, or belongs to another table.
            NewerFormatError: the file is of a newer format.
        """
        where = f"{folder}/{entry.file}"
        try:
            file = open_file(system, where, direct)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise MissingFileError(
                f"{where} is missing: the commit needs its {counted(entry.count, 'record')}. {REMEDY}"
            ) from error
        try:
            if file.size != entry.size:
                raise damaged(where, f"{entry.size} bytes", f"{file.size}")
            _check_salt(file.read(0, HEADER_BYTES), where, uuid, record_bytes, entry)
        except BaseException:
            file.close()
            raise
        run = cls(file, entry.file, record_bytes, number)
        run.count, run.lo, run.hi, run.kind, run.entry = entry.count, entry.lo, entry.hi, entry.index, entry
        run._mark_with(entry.salt)
        return run

    def _mark_with(self, salt: int | None) -> None:
        self.salt, self.step = (0, 0) if salt is None else (salt, MARK_STEP)

    def marks(self, first: int, count: int) -> np.ndarray:
        """Return the marks, uint32, of so many records from one on."""
        marks = np.empty(count, np.uint32)
        salts, steps = (np.array([of_run], np.uint32) for of_run in (self.salt, self.step))
        kernels.cpu.storage.mark(np.arange(first, first + count), np.zeros(1, np.int64), salts, steps, marks)
        return marks

    def index(self) -> np.ndarray:
        """Return the ids int64 (count,), or the bitmap uint64, or nothing where all ids of the range are there.

        Raises:
            CorruptTableError: the index is damaged.
        """
        return self._whole_index()[0] if self._index is None else self._index

    def keep_index(self, index: np.ndarray) -> None:
        """Return this array from now on when the index is asked for, which has it."""
        self._index = index

    def gone_ids(self) -> np.ndarray:
        """Return the ids int64 (n,), ascending, that have no record from then on: none in it, or in older runs.

        Raises:
            CorruptTableError: the index is damaged.
        """
        return self._whole_index()[1] if self.entry is not None and self.entry.gone else np.empty(0, np.int64)

    def _whole_index(self) -> tuple[np.ndarray, np.ndarray]:
        assert self.entry is not None  # a log has its index once it is sealed
        start = self.first + self.count * self.stride
        data = self.file.read(start, self.entry.size - start)
        crc = zlib.crc32(data)
        if crc != self.entry.index_crc:
            raise damaged(
                self.file.path, f"CRC-32 {self.entry.index_crc:#010x} of the index at {start}", f"{crc:#010x}"
            )
        end = len(data) - self.entry.gone * ID_BYTES
        index = np.frombuffer(data[:end], "<u8" if self.kind == "bits" else "<i8")
        gone = np.frombuffer(data[end:], "<i8")
        self._check_index(index)
        if len(gone) and not (self.lo <= gone[0] and gone[-1] < self.hi and np.all(gone[:-1] < gone[1:])):
            where = f"the index of {self.file.path}"
            raise damaged(where, f"ids in [{self.lo}, {self.hi}) that are gone, ascending", "others")
        return index, gone

    def _check_index(self, index: np.ndarray) -> None:
        """Refuse what no writer of ours makes, so that nothing that reads an index has to think of it."""
        where = f"the index of {self.file.path}"
        if self.kind == "bits":
            ones, rest = _count_ones(index), (self.hi - self.lo) % 64
            if ones != self.count or (rest and int(index[-1]) >> rest):
                raise damaged(
                    where,
                    f"{counted(self.count, 'id')} in [{self.lo}, {self.hi})",
                    f"{counted(ones, 'id')}, or ids above",
                )
        elif self.kind == "ids" and len(index):
            if int(index.min()) < self.lo or int(index.max()) >= self.hi:
                raise damaged(where, f"ids in [{self.lo}, {self.hi})", f"{index.min()} to {index.max()}")
            if self.path.startswith("base/") and not np.all(index[:-1] < index[1:]):
                raise damaged(where, "ascending ids", "others")

    def close(self) -> None:
        """Close the file."""
        self.file.close()


class IdBuffer:
    """Ids that come in small arrays, and go at once. Their memory is not `malloc`'s, which would keep it."""

    def __init__(self) -> None:
        self._blocks, self._size, self.count = list[np.ndarray](), _BLOCK_IDS, 0

    def append(self, ids: np.ndarray) -> None:
        """Copy ids behind those that there are."""
        while len(ids):
            place = self.count % self._size
            if not place:
                self._blocks.append(returned(self._size, np.int64, "the index of a file"))
            part, ids = np.split(ids, [self._size - place])
            self._blocks[-1][place : place + len(part)] = part
            self.count += len(part)

    def __iter__(self) -> Iterator[np.ndarray]:
        """Go through them, many at a time."""
        for number, block in enumerate(self._blocks):
            yield block[: self.count - number * self._size]

    def joined(self) -> np.ndarray:
        """Return them as one array of its own."""
        made, end = returned(self.count, np.int64, "ids of a file"), 0
        for part in self:
            made[end : end + len(part)], end = part, end + len(part)
        return made

    def clear(self) -> None:
        """Forget them."""
        self._blocks, self.count = [], 0

    @property
    def nbytes(self) -> int:
        """RAM that they take."""
        return 8 * self.count


class Log(Segment):
    """A run that grows until it is sealed. Its records can be read from the start.

    Attributes:
        noted: ids whose records were forgotten while it was the newest run; they may have newer ones by now.
        gone: those of them that its index is to name: once it is sealed, ascending and without repeats.
        broken: whether a write-back failed, so that nobody can tell what is on the disk, or left bytes behind the end.
            Such a file is never sealed: its records, which can still be read, must be written to another one.
    """

    def __init__(self, system: System, file: File, path: str, record_bytes: int, number: int) -> None:
        super().__init__(file, path, record_bytes, number)
        self.broken = False
        self._system, self._ids, self._behind = system, IdBuffer(), 0
        self.noted, self.gone = IdBuffer(), np.empty(0, np.int64)

    @classmethod
    def create(cls, system: System, folder: str, path: str, uuid: str, record_bytes: int, number: int) -> Log:
        """Make a new file at `path`, relative to the table's folder, which has the folder for it."""
        file, header = create(system, f"{folder}/{path}"), make_header(uuid, record_bytes, path)
        try:
            file.append(header)
        except BaseException:
            file.close()
            with contextlib.suppress(OSError):  # then the next writer removes it
                retried(system.unlink, file.path)
            raise
        log = cls(system, file, path, record_bytes, number)
        log._mark_with(_crc_of(header))
        return log

    def append(self, sealed: np.ndarray, ids: np.ndarray) -> int:
        """Append stored records, and return the index of the first. One thread at a time may do so.

        Args:
            sealed: records with their CRC, uint8 (n, stride), contiguous. They get their marks in place.
            ids: their ids int64 (n,). They may repeat: later records win.

        Raises:
            OSError: nothing was appended.
        """
        assert self.entry is None and sealed.shape == (len(ids), self.stride)  # noqa: PT018
        first = self.count
        if not len(ids):
            return first
        kernels.cpu.launch(kernels.cpu.storage.stamp, sealed, self.salt, first)
        self.file.size = self.first + first * self.stride  # what an interrupted append left is written over
        self._append(sealed)
        lo, hi = int(ids.min()), int(ids.max()) + 1
        self.lo, self.hi = (min(lo, self.lo), max(hi, self.hi)) if first else (lo, hi)
        self._ids.append(ids)
        self.count = first + len(ids)
        return first

    def ids(self) -> np.ndarray:
        """Return the ids of all its records, in order: int64 (count,)."""
        return self.index() if self.entry is not None else self._ids.joined()

    def seal(self) -> SegmentEntry:
        """Write the index and make the file and its name durable. After an error it can be called again.

        Raises:
            OSError: the file is not sealed. Where the disk is full, it can be once there is room; see `broken`.
        """
        return self.seal_as("ids", self.lo, self.hi)

    def seal_as(self, kind: str, lo: int, hi: int) -> SegmentEntry:
        """Seal with an index of that kind over ``[lo, hi)``; bits and full need ascending ids."""
        assert not self.is_empty  # a run that says nothing has no entry
        if len(self.gone):
            self.gone.sort()
            is_first = np.append(True, self.gone[1:] != self.gone[:-1])
            self.gone = self.gone if is_first.all() else self.gone[is_first]
            ends = int(self.gone[0]), int(self.gone[-1]) + 1
            lo, hi = (min(lo, ends[0]), max(hi, ends[1])) if self.count else ends
        self.file.size = self.first + self.count * self.stride  # an index may lie there that was written in part
        crc = 0
        for piece in {"full": (), "bits": _bits(self._ids, lo, hi), "ids": self._ids}[kind]:
            self._append(piece)
            crc = zlib.crc32(piece, crc)
        if len(self.gone):
            self._append(self.gone)
            crc = zlib.crc32(self.gone.data, crc)
        # Of an append that failed, more may have been written than was since; files are never cut off.
        self.broken = self.broken or retried(self._system.size, self.file.fd) > self.file.size
        self._sync()
        self.kind, self.lo, self.hi = kind, lo, hi
        self.entry = SegmentEntry(self.path, self.file.size, self.count, kind, lo, hi, crc, self.salt, len(self.gone))
        self._ids.clear()
        return self.entry

    def seal_as_chunk(self, lo: int, hi: int) -> SegmentEntry:
        """Seal with the smallest index that says which of the ids in ``[lo, hi)`` it has. They must ascend."""
        kinds = KINDS if self.count == hi - lo else KINDS[1:]
        return self.seal_as(min(kinds, key=lambda kind: index_bytes(kind, self.count, hi - lo)), lo, hi)

    @property
    def is_empty(self) -> bool:
        """Whether a commit need not name it."""
        return not self.count and not len(self.gone)

    @property
    def is_unused(self) -> bool:
        """Whether it got no record yet, and no id was noted."""
        return not self.count and not self.noted.count

    @property
    def can_grow(self) -> bool:
        """Whether it takes more records."""
        return self.entry is None and not self.broken

    @property
    def nbytes(self) -> int:
        """RAM that the ids take until they are written."""
        return self._ids.nbytes

    def _append(self, data: np.ndarray) -> None:
        self.file.append(data.data)
        if self.file.size - self._behind >= _BEHIND_BYTES:
            start, self._behind = self._behind, self.file.size
            try:
                self.file.behind(start)
            except OSError:  # the bytes are there, so this is no error of appending: it is one of `seal`
                self.broken = True

    def _sync(self) -> None:
        if self.broken:
            raise OSError(errno.EIO, "a write failed before: its records must be written to another", self.file.path)
        try:
            self.file.sync()
            retried(self._system.fsync_folder, self.file.path.rpartition("/")[0])
        except OSError:
            self.broken = True
            raise
        self._system.drop(self.file.fd)


def owner_of(page: bytes, path: str) -> str | None:
    """Return the uuid of the table that a file was written for under the name `path`; "" for another name's.

    None: the file has no whole first page, as it was not finished, or is no run.
    """
    if len(page) < HEADER_BYTES or zlib.crc32(page[:-CRC_BYTES]) != _crc_of(page):
        return None
    magic, _, _, _, name, uuid, _ = _HEADER.unpack_from(page)
    return uuid.hex() if magic == MAGIC and name == zlib.crc32(path.encode("ascii")) else ""


def read_start(system: System, path: str, size: int) -> bytes:
    """Return the first `size` bytes of a file, or all that it has."""
    file = open_file(system, path)
    try:
        return file.read(0, min(size, file.size))
    finally:
        file.close()


def make_header(uuid: str, record_bytes: int, path: str) -> bytes:
    """Return the first page of a new file `path` of the table `uuid`, which no file before it has."""
    return _page(FORMAT, uuid, record_bytes, path, os.urandom(NONCE_BYTES))


def _page(version: int, uuid: str, record_bytes: int, path: str, nonce: bytes) -> bytes:
    name = zlib.crc32(path.encode("ascii"))  # or a log could take the place of another one with the same rows
    fields = _HEADER.pack(MAGIC, version, record_bytes, record_bytes + CRC_BYTES, name, bytes.fromhex(uuid), nonce)
    page = fields.ljust(HEADER_BYTES - CRC_BYTES, b"\0")
    return page + struct.pack("<I", zlib.crc32(page))


def _crc_of(page: bytes) -> int:
    return struct.unpack("<I", page[-CRC_BYTES:])[0]


def _check_salt(page: bytes, where: str, uuid: str, record_bytes: int, entry: SegmentEntry) -> None:
    """Refuse a file that has this name, but not the salt that the commit knows it by: an older one of that name."""
    version = check_header(page, where, uuid, record_bytes, entry.file)
    salt = None if version == UNMARKED else _crc_of(page)
    if salt != entry.salt:
        raise damaged(where, f"the file with salt {_told(entry.salt)}", f"one with salt {_told(salt)}")


def _told(salt: int | None) -> str:
    return "none (format 1)" if salt is None else f"{salt:#010x}"


def check_header(page: bytes, where: str, uuid: str, record_bytes: int, path: str) -> int:
    """Return the format of the file `path` of the table `uuid`, whose first page this is.

    Raises:
        CorruptTableError: it is that of another file, or damaged.
        NewerFormatError: it is of a newer format.
    """
    if len(page) < HEADER_BYTES:
        raise damaged(where, f"a first page of {HEADER_BYTES} bytes", len(page))
    magic, version, width, _, _, found_uuid, nonce = _HEADER.unpack_from(page)
    if magic != MAGIC:
        raise damaged(where, f"a file that starts with {MAGIC!r}", repr(magic))
    crc, told = zlib.crc32(page[:-CRC_BYTES]), _crc_of(page)
    if crc != told:
        raise damaged(where, f"CRC-32 {told:#010x} of its first page", f"{crc:#010x}")
    if version > FORMAT:
        raise NewerFormatError(
            f"{where} is of format {version}: this release reads formats up to {FORMAT}. Install a newer embedrock."
        )
    if found_uuid.hex() != uuid:
        raise damaged(where, f"a file of table {uuid}", f"one of table {found_uuid.hex()}")
    if width != record_bytes:
        raise damaged(where, f"records of {record_bytes} bytes", f"{width}")
    expected = _page(version, uuid, record_bytes, path, bytes(NONCE_BYTES) if version == UNMARKED else nonce)
    if version < UNMARKED or page != expected:
        raise damaged(where, "the file that was written under this name", "another one")
    return version


def _bits(pieces: Iterable[np.ndarray], lo: int, hi: int) -> Iterable[np.ndarray]:
    """Yield the bitmap of ascending ids, once it is asked for."""
    bits = np.zeros(index_bytes("bits", 0, hi - lo), np.uint8)
    for ids in pieces:
        offsets = ids - lo
        places = offsets >> 3
        starts = np.flatnonzero(np.diff(places, prepend=-1))
        bits[places[starts]] |= np.bitwise_or.reduceat(np.uint8(1) << (offsets & 7).astype(np.uint8), starts)
    yield bits


def _count_ones(words: np.ndarray) -> int:
    if hasattr(np, "bitwise_count"):  # NumPy 2
        return int(np.bitwise_count(words).sum(dtype=np.int64))
    return sum(
        int(np.unpackbits(part.view(np.uint8)).sum()) for part in np.array_split(words, len(words) // _PIECE + 1)
    )
