"""Segments: append-only files of stored records. `Segment` reads one, `Log` grows.

docs/format.md has the format. Each record ends with a CRC-32 of its id and bytes, combined with its file and position.
So one read returns the row, and detects damage, a wrong row, or a misplaced one. The index at the end of the file
lists its ids in order.
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
from embedrock.kernels.constants import CRC_BYTES, MARK_STEP, RUN_SHIFT
from embedrock.system.arena import joined, returned
from embedrock.system.scopes import on_failure

FORMAT = 2  # of new files
GOING = 3  # of commits of tables with dynamic or deleted rows
UNMARKED = 1  # the format before, still readable: its seals do not depend on file and position
MAGIC = b"EMBROCK1"
HEADER_BYTES = 4096  # one page, for alignment of the records
ID_BYTES = 8
KINDS = ("full", "bits", "ids")  # kinds of index; the smallest that fits is used
NONCE_BYTES = 8
_HEADER = struct.Struct(f"<8s4I16s{NONCE_BYTES}s")
_PIECE = 1 << 16  # words whose bits are unpacked at a time
_BLOCK_ROWS = BLOCK // 4  # multiple for any record size that is a multiple of 4 bytes
_BLOCK_IDS = 1 << 17  # ids per block of memory, until they are written
_BEHIND_BYTES = 8 << 20  # bytes appended between two calls of `System.behind`
REMEDY = "Restore the file from a copy of the table, or go back: `embedrock verify` names the newest good commit."


def piece_rows(record_bytes: int, nbytes: int) -> int:
    """Return the rows of a piece of about `nbytes` bytes.

    If possible, pieces are whole blocks of the disk, so that direct writes need no copy.
    """
    rows = max(1, nbytes // record_bytes)
    return rows // _BLOCK_ROWS * _BLOCK_ROWS or rows


@dataclass(frozen=True)
class SegmentEntry:
    """Entry of a segment in a manifest. Ids lie in ``[lo, hi)``.

    Attributes:
        file: path relative to the table's folder.
        size: bytes of the whole file.
        count: number of records.
        index: "full" (all ids of the range), "bits" (a bitmap of the range) or "ids" (int64, one per record).
        lo: at least -2**63.
        hi: at most 2**63.
        index_crc: CRC-32 of the index.
        salt: CRC-32 of its header, part of all seals of its records. None: a file of format 1.
        gone: number of tombstones of a log, at the end of its index.
        folded: number of the commit's first logs that a sorted segment contains. Records of its ids in these logs are
            out of date. Entries of one file in several commits differ in it, so comparisons ignore it.
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
    """Return the error of a file that differs from the commit."""
    return CorruptTableError(f"{where} is damaged: expected {expected}, got {got}. {REMEDY}")


def index_bytes(kind: str, count: int, span: int) -> int:
    """Return the bytes of an index of `count` records, with ids in a range of `span`."""
    return {"full": 0, "bits": -(-span // 64) * 8, "ids": count * 8}[kind]


def run_bytes(record_bytes: int, entry: SegmentEntry) -> int:
    """Return the bytes that an entry's file must have."""
    records = entry.count * (record_bytes + CRC_BYTES)
    return HEADER_BYTES + records + index_bytes(entry.index, entry.count, entry.hi - entry.lo) + entry.gone * ID_BYTES


class Segment:
    """File of stored records, open for reading.

    Attributes:
        number: its position in the store's list of segments, the upper part of a location.
        path: relative to the table's folder.
        record_bytes: bytes of a record, without the CRC.
        stride: bytes of a record, with the CRC.
        count: number of records. Record i is at ``first + i * stride``.
        lo: the least possible id.
        hi: the end of its ids.
        salt: start of its records' marks, see `tests/reference/storage.py`.
        step: difference of neighbours' marks. 0, with `salt` 0, if the file has no marks.
        folded_below: a sorted segment contains all logs below this number.
        known_index: its index, once it was read; None: the file has it.
    """

    first = HEADER_BYTES

    def __init__(self, file: File, path: str, record_bytes: int, number: int) -> None:
        self.file, self.path, self.number = file, path, number
        self.record_bytes, self.stride = record_bytes, record_bytes + CRC_BYTES
        self.count, self.lo, self.hi, self.kind = 0, 0, 0, "ids"
        self.salt, self.step, self.folded_below = 0, 0, 0
        self.entry: SegmentEntry | None = None
        self.known_index: np.ndarray | None = None

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
            entry: the file's entry in a checked manifest.
            uuid: the table's id, 32 hexadecimal digits.
            direct: bypass the page cache, if the file system allows it.

        Raises:
            CorruptTableError: the file is missing, has another size, or belongs to another table.
            NewerFormatError: the file has a newer format.
        """
        where = f"{folder}/{entry.file}"
        file = open_needed(system, where, f"its {counted(entry.count, 'record')}", direct)
        with on_failure(file.close):
            if file.size != entry.size:
                raise damaged(where, f"{entry.size} bytes", f"{file.size}")
            _check_salt(file.read(0, HEADER_BYTES), where, uuid, record_bytes, entry)
        segment = cls(file, entry.file, record_bytes, number)
        segment.count, segment.lo, segment.hi = entry.count, entry.lo, entry.hi
        segment.kind, segment.entry = entry.index, entry
        segment._mark_with(entry.salt)
        return segment

    def _mark_with(self, salt: int | None) -> None:
        self.salt, self.step = (0, 0) if salt is None else (salt, MARK_STEP)

    def locations(self, first: int = 0, count: int | None = None) -> np.ndarray:
        """Return the locations of consecutive records, by default of all, int64 (count,)."""
        start = (self.number << RUN_SHIFT) + first
        return np.arange(start, start + (self.count if count is None else count))

    def index(self) -> np.ndarray:
        """Return the ids, int64 (count,), or the bitmap, uint64. Return an empty array if all ids of the range exist.

        Raises:
            CorruptTableError: the index is damaged.
        """
        return self._whole_index()[0] if self.known_index is None else self.known_index

    def gone_ids(self) -> np.ndarray:
        """Return the tombstones, int64 (n,), ascending, of records in this and older segments.

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
        """Raise `CorruptTableError` if the index is malformed, so that its readers need no checks."""
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
        self.file.close()


class IdBuffer:
    """Buffer of ids that come in small arrays, and are freed together. `malloc` would keep such memory."""

    def __init__(self) -> None:
        self._blocks, self._size, self.count = list[np.ndarray](), _BLOCK_IDS, 0

    def append(self, ids: np.ndarray) -> None:
        while len(ids):
            place = self.count % self._size
            if not place:
                self._blocks.append(returned(self._size, np.int64, "the index of a file"))
            part, ids = np.split(ids, [self._size - place])
            self._blocks[-1][place : place + len(part)] = part
            self.count += len(part)

    def __iter__(self) -> Iterator[np.ndarray]:
        for number, block in enumerate(self._blocks):
            yield block[: self.count - number * self._size]

    def clear(self) -> None:
        self._blocks, self.count = [], 0


class Log(Segment):
    """Segment that grows until it is sealed. Readers may use the log from the start.

    Attributes:
        noted: ids deleted while it was the newest segment. Some may have newer records by now.
        gone: its tombstones among them. Sealing sorts them and removes repeats.
        broken: whether a write-back failed. Then the content on disk is unknown, or bytes are left behind the end. Such
            a file is never sealed. The records are still readable, and must be written to another file.
    """

    def __init__(self, system: System, file: File, path: str, record_bytes: int, number: int) -> None:
        super().__init__(file, path, record_bytes, number)
        self.broken = False
        self._system, self._ids, self._behind = system, IdBuffer(), 0
        self.noted, self.gone = IdBuffer(), np.empty(0, np.int64)

    @classmethod
    def create(cls, system: System, folder: str, path: str, uuid: str, record_bytes: int, number: int) -> Log:
        """Create a new file at `path`, relative to the table's folder. The folder of the file exists."""
        file, header = create(system, f"{folder}/{path}"), make_header(uuid, record_bytes, path)
        try:
            file.append(header)
        except BaseException:
            file.close()
            with contextlib.suppress(OSError):  # the next writer removes it
                retried(system.unlink, file.path)
            raise
        log = cls(system, file, path, record_bytes, number)
        log._mark_with(_crc_of(header))
        return log

    def append(self, sealed: np.ndarray, ids: np.ndarray) -> int:
        """Append stored records, and return the index of the first. One thread at a time may do so.

        Args:
            sealed: records with their CRC, uint8 (n, stride), contiguous. Marks are added in place.
            ids: ids of the records, int64 (n,). Ids may repeat: later records win.

        Raises:
            OSError: nothing was appended.
        """
        assert self.entry is None and sealed.shape == (len(ids), self.stride)  # noqa: PT018
        first = self.count
        if not len(ids):
            return first
        kernels.cpu.launch(kernels.cpu.storage.stamp, sealed, self.salt, first)
        self.file.size = self.first + first * self.stride  # overwrites the remains of an interrupted append
        self._append(sealed)
        lo, hi = int(ids.min()), int(ids.max()) + 1
        self.lo, self.hi = (min(lo, self.lo), max(hi, self.hi)) if first else (lo, hi)
        self._ids.append(ids)
        self.count = first + len(ids)
        return first

    def ids(self) -> np.ndarray:
        return joined(self._ids, self._ids.count, "ids of a file") if self.entry is None else self.index()

    def id_parts(self) -> Iterator[np.ndarray]:
        """Iterate over its ids in the order of the records, without a copy before it is sealed."""
        return iter(self._ids) if self.entry is None else iter([self.index()])

    def seal(self, ids_in: tuple[int, int] | None = None) -> SegmentEntry:
        """Write the index, and make the file and its name durable. After an error it can be called again.

        Args:
            ids_in: the range of ids that ascend, for the smallest kind of index. None: ids in any order.

        Raises:
            OSError: the file is not sealed. After a full disk, a retry may succeed, see `broken`.
        """
        assert not self.is_empty  # an empty segment has no entry
        kind, (lo, hi) = "ids", ids_in or (self.lo, self.hi)
        if ids_in is not None:
            kinds = KINDS if self.count == hi - lo else KINDS[1:]
            kind = min(kinds, key=lambda kind: index_bytes(kind, self.count, hi - lo))
        if len(self.gone):
            self.gone.sort()
            is_first = np.append(True, self.gone[1:] != self.gone[:-1])
            self.gone = self.gone if is_first.all() else self.gone[is_first]
            ends = int(self.gone[0]), int(self.gone[-1]) + 1
            lo, hi = (min(lo, ends[0]), max(hi, ends[1])) if self.count else ends
        self.file.size = self.first + self.count * self.stride  # a partly written index may lie there
        crc = 0
        for piece in {"full": (), "bits": _bits(self._ids, lo, hi), "ids": self._ids}[kind]:
            self._append(piece)
            crc = zlib.crc32(piece, crc)
        if len(self.gone):
            self._append(self.gone)
            crc = zlib.crc32(self.gone.data, crc)
        # A failed append may have written more bytes than later appends. Files are never truncated.
        self.broken = self.broken or retried(self._system.size, self.file.fd) > self.file.size
        self._sync()
        self.kind, self.lo, self.hi = kind, lo, hi
        self.entry = SegmentEntry(self.path, self.file.size, self.count, kind, lo, hi, crc, self.salt, len(self.gone))
        self._ids.clear()
        return self.entry

    @property
    def is_empty(self) -> bool:
        """Return whether a commit need not name this log."""
        return not self.count and not len(self.gone)

    @property
    def is_unused(self) -> bool:
        """Return whether it has no record and no deleted id."""
        return not self.count and not self.noted.count

    @property
    def can_grow(self) -> bool:
        return self.entry is None and not self.broken

    def _append(self, data: np.ndarray) -> None:
        self.file.append(data.data)
        if self.file.size - self._behind >= _BEHIND_BYTES:
            start, self._behind = self._behind, self.file.size
            try:
                self.file.behind(start)
            except OSError:  # the append itself succeeded, so `seal` raises the error
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
    """Return the uuid of the table that a file `path` was written for. "": the file has another name.

    None: the file has no complete first page, or is no segment.
    """
    if len(page) < HEADER_BYTES or zlib.crc32(page[:-CRC_BYTES]) != _crc_of(page):
        return None
    magic, _, _, _, name, uuid, _ = _HEADER.unpack_from(page)
    return uuid.hex() if magic == MAGIC and name == zlib.crc32(path.encode("ascii")) else ""


def open_needed(system: System, path: str, needed: str, direct: bool = False) -> File:
    """Open a file of a commit. If it is missing, the error says what the commit needs."""
    try:
        return open_file(system, path, direct)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingFileError(f"{path} is missing: the commit needs {needed}. {REMEDY}") from error


def read_start(system: System, path: str, size: int) -> bytes:
    """Return the first `size` bytes of a file, or all if it is shorter."""
    with contextlib.closing(open_file(system, path)) as file:
        return file.read(0, min(size, file.size))


def make_header(uuid: str, record_bytes: int, path: str) -> bytes:
    """Return the first page of a new file `path` of the table `uuid`. A nonce makes it unique."""
    return _page(FORMAT, uuid, record_bytes, path, os.urandom(NONCE_BYTES))


def _page(version: int, uuid: str, record_bytes: int, path: str, nonce: bytes) -> bytes:
    name = zlib.crc32(path.encode("ascii"))  # otherwise a log could replace another one with the same rows
    fields = _HEADER.pack(MAGIC, version, record_bytes, record_bytes + CRC_BYTES, name, bytes.fromhex(uuid), nonce)
    page = fields.ljust(HEADER_BYTES - CRC_BYTES, b"\0")
    return page + struct.pack("<I", zlib.crc32(page))


def _crc_of(page: bytes) -> int:
    return struct.unpack("<I", page[-CRC_BYTES:])[0]


def _check_salt(page: bytes, where: str, uuid: str, record_bytes: int, entry: SegmentEntry) -> None:
    """Raise `CorruptTableError` if a file has another salt than its entry: an older file of that name."""
    version = check_header(page, where, uuid, record_bytes, entry.file)
    salt = None if version == UNMARKED else _crc_of(page)
    if salt != entry.salt:
        raise damaged(where, f"the file with salt {_told(entry.salt)}", f"one with salt {_told(salt)}")


def _told(salt: int | None) -> str:
    return "none (format 1)" if salt is None else f"{salt:#010x}"


def check_header(page: bytes, where: str, uuid: str, record_bytes: int, path: str) -> int:
    """Return the format of the file `path` of the table `uuid`, from its first page.

    Raises:
        CorruptTableError: the page is damaged, or belongs to another file.
        NewerFormatError: the format is newer.
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
