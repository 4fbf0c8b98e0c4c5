"""Files of records: what is written is read again; what is not what was written is refused, and named."""

from __future__ import annotations

import errno
import os
import struct
import tracemalloc
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedrock.errors import CorruptTableError, EmbedrockError, MissingFileError, NewerFormatError
from embedrock.io.vfs import BLOCK
from embedrock.store import segments as runs
from embedrock.store.reading import marks_of
from embedrock.store.segments import CRC_BYTES, Log, Segment, SegmentEntry, owner_of, run_bytes
from embedrock.system.arena import joined as joined_ids
from suites import FaultFS

UUID, OTHER = "0123456789abcdef" * 2, "fedcba9876543210" * 2
WIDTH = 12
LOWEST, BEYOND = -(2**63), 2**63
DAMAGES = ("truncated", "extended", "missing", "foreign", "another width", "newer", "no header", "another file")
DAMAGES += "no version", "another time"


def seal(ids: np.ndarray, records: np.ndarray, first_mark: int = 0, step: int = 0) -> np.ndarray:
    """Return records as they are stored, or, without marks, as they are appended."""
    crcs = [
        zlib.crc32(struct.pack("<q", row) + record.tobytes()) ^ (first_mark + place * step) % 2**32
        for place, (row, record) in enumerate(zip(ids.tolist(), records, strict=True))
    ]
    return np.concatenate([records, np.array(crcs, "<u4").view(np.uint8).reshape(-1, 4)], axis=1)


def some_records(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, WIDTH)).astype(np.uint8)


def new_system(capacity: int | None = None) -> FaultFS:
    system = FaultFS(capacity)
    for folder in ("/t", "/t/base", "/t/delta"):
        system.mkdir(folder)
    return system


def new_log(system: FaultFS) -> Log:
    return Log.create(system, "/t", "delta/1.dlt", UUID, WIDTH, 0)


def reopened(system: FaultFS, entry: SegmentEntry, uuid: str = UUID, width: int = WIDTH) -> Segment:
    return Segment.open(system, "/t", entry, uuid, width, 3)


def listed(run: Segment) -> list[int]:
    """Return the ids of a run's index, by Python's own integers."""
    index = run.index()
    if run.kind == "full":
        assert not len(index)
        return list(range(run.lo, run.hi))
    if run.kind == "ids":
        return index.tolist()
    return [run.lo + 64 * k + bit for k, word in enumerate(index.tolist()) for bit in range(64) if word >> bit & 1]


def stored(run: Segment) -> np.ndarray:
    data = run.file.read(run.first, run.count * run.stride)
    return np.frombuffer(data, np.uint8).reshape(run.count, run.stride)


@given(st.lists(st.lists(st.integers(LOWEST, BEYOND - 1), max_size=5), min_size=1, max_size=5).filter(any))
def test_a_log_is_what_was_appended(batches: list[list[int]]):
    system, pieces = new_system(), []
    log, all_ids = new_log(system), [row for batch in batches for row in batch]
    for batch in batches:
        ids = np.array(batch, np.int64)
        first, records = sum(map(len, pieces)), some_records(len(ids))
        pieces.append(seal(ids, records, log.salt + first * 0x9E3779B1, 0x9E3779B1))
        assert log.append(seal(ids, records), ids) == first
        np.testing.assert_array_equal(stored(log), np.concatenate(pieces))  # while it grows, too
    assert log._ids.count == len(all_ids)
    entry = log.seal()
    assert log._ids.count == 0
    assert (entry.lo, entry.hi, entry.count) == (min(all_ids), max(all_ids) + 1, len(all_ids))
    run = reopened(system, entry)
    assert entry.size == run_bytes(WIDTH, entry) == len(system.files()["/t/delta/1.dlt"])
    assert (run.number, run.path, run.stride, run.entry) == (3, "delta/1.dlt", WIDTH + 4, entry)
    assert run.salt == log.salt == entry.salt == zlib.crc32(system.files()["/t/delta/1.dlt"][:4092])
    np.testing.assert_array_equal(
        marks_of([run], np.array([run.number]), run.locations()), unmarked(all_ids, stored(run))
    )
    assert listed(run) == listed(log) == all_ids
    np.testing.assert_array_equal(stored(run), np.concatenate(pieces))


def unmarked(ids: list[int], stored: np.ndarray) -> list[int]:
    """Return what is left of the seals of stored records without the CRC of ids and records."""
    crcs = [zlib.crc32(struct.pack("<q", row) + record[:-4].tobytes()) for row, record in zip(ids, stored, strict=True)]
    return [int.from_bytes(seal, "little") ^ crc for seal, crc in zip(map(bytes, stored[:, -4:]), crcs, strict=True)]


def test_a_file_of_format_1_has_no_marks():
    system = new_system()
    log, ids = new_log(system), np.arange(5)
    log.append(seal(ids, some_records(5)), ids)
    entry, data = log.seal(), system.files()["/t/delta/1.dlt"]
    old = struct.pack("<8s4I16s", b"EMBROCK1", 1, WIDTH, WIDTH + 4, zlib.crc32(b"delta/1.dlt"), bytes.fromhex(UUID))
    page = old.ljust(4092, b"\0")
    page += struct.pack("<I", zlib.crc32(page))
    system.write_file("/t/delta/1.dlt", page + data[4096:])
    run = reopened(system, replace(entry, salt=None))
    assert marks_of([run], np.array([run.number]), run.locations()).tolist() == [0] * 5
    with pytest.raises(CorruptTableError, match=r"the file with salt 0x.*, got one with salt none \(format 1\)"):
        reopened(system, entry)
    system.write_file("/t/delta/1.dlt", data)
    with pytest.raises(CorruptTableError, match=r"the file with salt none \(format 1\), got one with salt 0x"):
        reopened(system, replace(entry, salt=None))


def test_no_two_files_are_marked_alike():
    salts = set()
    for _ in range(20):
        log = new_log(system := new_system())
        salts.add(log.salt)
        log.close()
        assert owner_of(system.files()["/t/delta/1.dlt"][:4096], "delta/1.dlt") == UUID
    assert len(salts) > 15


def chunk(system: FaultFS, ids: list[int], lo: int, hi: int, pieces: int = 3) -> SegmentEntry:
    writer = Log.create(system, "/t", "base/1.rows", UUID, WIDTH, -1)
    for part in np.array_split(np.array(ids, np.int64), pieces):
        writer.append(seal(part, some_records(len(part))), part)
    assert writer.count == len(ids)
    entry = writer.seal((lo, hi))
    writer.close()
    return entry


@given(
    st.sampled_from([LOWEST, -100, 0, BEYOND - 1000]),
    st.sets(st.integers(0, 999), min_size=1, max_size=80),
    st.integers(1, 4),
    st.booleans(),
)
def test_a_chunk_has_the_smallest_index(start: int, offsets: set[int], pieces: int, dense: bool):
    ids = [start + k for k in (range(len(offsets)) if dense else sorted(offsets))]
    lo, hi = (start, start + len(ids)) if dense else (start, start + 1000)
    system = new_system()
    entry = chunk(system, ids, lo, hi, pieces)
    assert entry.index == ("full" if len(ids) == hi - lo else "bits" if len(ids) >= 16 else "ids")
    assert (entry.lo, entry.hi, entry.count) == (lo, hi, len(ids))
    assert listed(reopened(system, entry)) == ids


def test_bits_are_counted_with_numpy_1(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(np, "bitwise_count", raising=False)
    monkeypatch.setattr(runs, "_PIECE", 2)
    system, ids = new_system(), list(range(0, 700, 3))
    assert listed(reopened(system, chunk(system, ids, 0, 700))) == ids


def test_rows_that_are_gone_are_named_once_and_ascend():
    system = new_system()
    log = new_log(system)
    log.gone = np.array([7, -3, 7, 2**62])
    run = reopened(system, log.seal())
    assert (run.gone_ids().tolist(), run.lo, run.hi) == ([-3, 7, 2**62], -3, 2**62 + 1)


def test_a_chunk_may_span_all_ids():
    ids = [LOWEST, 0, BEYOND - 1]
    system = new_system()
    assert listed(reopened(system, chunk(system, ids, LOWEST, BEYOND))) == ids


def test_a_sealed_log_survives_a_crash():
    system = new_system()
    for folder in ("/", "/t"):
        system.fsync_folder(folder)
    log, ids = new_log(system), np.arange(5)
    log.append(seal(ids, some_records(5)), ids)
    entry = log.seal()
    for clone in system.crash_clones(np.random.default_rng(0)):
        assert listed(reopened(clone, entry)) == ids.tolist()


def fill(log: Log, first: int, count: int) -> None:
    ids = np.arange(first, first + count)
    log.append(seal(ids, some_records(count)), ids)


def test_a_log_is_sealed_after_the_disk_was_full():
    system = new_system()
    log = new_log(system)
    fill(log, 0, 10)
    system.capacity = 4096 + 10 * (WIDTH + 4) + 72  # of 80 bytes of the index
    with pytest.raises(OSError, match=r"No space left.*delta/1\.dlt") as caught:
        log.seal()
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="No space left"):
        fill(log, 10, 10)
    system.mend()
    fill(log, 10, 10)
    assert listed(reopened(system, log.seal())) == list(range(20))
    assert not log.broken


def test_a_log_with_bytes_behind_its_end_is_not_sealed():
    system = new_system(4096 + 300)
    log = new_log(system)
    with pytest.raises(OSError, match="No space left"):
        fill(log, 0, 100)
    system.mend()
    fill(log, 0, 1)
    with pytest.raises(OSError, match="records must be written to another"):
        log.seal()
    assert log.broken
    assert len(stored(log)) == 1


@pytest.mark.parametrize("operation", ["fdatasync", "fsync_folder"])
def test_a_file_is_never_synced_again_after_an_error(operation: str):
    system = new_system()
    log, failing = new_log(system), True
    fill(log, 0, 4)

    def fail(name: str, path: str) -> None:
        if name == operation and failing:
            raise OSError(errno.EIO, "broken", path)

    system.before = fail
    with pytest.raises(OSError, match=r"broken|Input/output"):
        log.seal()
    failing = False
    assert log.broken
    with pytest.raises(OSError, match="records must be written to another"):
        log.seal()
    assert len(stored(log)) == 4


class Behind(FaultFS):
    """A disk that fails while it writes behind."""

    calls: list[tuple[int, int]]

    def behind(self, fd: int, start: int, end: int) -> None:
        self.calls.append((start, end))
        if start:
            raise OSError(errno.EIO, "broken")


def test_write_behind_that_fails_is_an_error_of_sealing():
    system = Behind()
    system.calls = []
    for folder in ("/t", "/t/delta"):
        system.mkdir(folder)
    log = Log.create(system, "/t", "delta/1.dlt", UUID, 1 << 20, 0)
    for row in range(17):
        log.append(np.zeros((1, (1 << 20) + 4), np.uint8), np.array([row]))
    first, second = system.calls
    assert first[0] == 0
    assert first[1] == second[0]
    assert log.broken
    assert log.count == 17
    with pytest.raises(OSError, match="records must be written to another"):
        log.seal()


def test_a_writer_that_cannot_begin_leaves_nothing_open():
    system = new_system(capacity=100)
    with pytest.raises(OSError, match="No space left"):
        new_log(system)
    assert system.open_files() == []
    assert system.files() == {}
    system.mend()
    log = new_log(system)
    with pytest.raises(FileExistsError):
        new_log(system)
    log.close()


def damage(system: FaultFS, entry: SegmentEntry, how: str, amount: int) -> None:
    """Make the file of an entry something else."""
    path = f"/t/{entry.file}"
    data = system.files()[path]
    own = WIDTH, WIDTH + 4, zlib.crc32(entry.file.encode()), bytes.fromhex(UUID)
    header = {
        "foreign": (2, *own[:3], bytes.fromhex(OTHER)),
        "another width": (2, WIDTH + 1, WIDTH + 5, *own[2:]),
        "another file": (2, *own[:2], own[2] ^ 1, own[3]),
        "newer": (3, *own),
        "no version": (0, *own),
        "another time": (2, *own),
    }
    if how in header:
        page = (struct.pack("<8s4I16s", b"EMBROCK1", *header[how]) + os.urandom(8)).ljust(4092, b"\0")
        data = page + struct.pack("<I", zlib.crc32(page)) + data[4096:]
    made = {
        "truncated": data[: -(amount % len(data)) - 1],
        "extended": data + bytes(amount),
        "missing": None,
        "no header": bytes(4096) + data[4096:],
    }
    system.write_file(path, made.get(how, data))


@given(st.sampled_from(DAMAGES), st.integers(1, 5000), st.booleans())
def test_other_files_are_refused(how: str, amount: int, in_base: bool):
    system = new_system()
    log, ids = new_log(system), list(range(0, 90, 3))
    fill(log, 0, 30)
    entry = chunk(system, ids, 0, 90) if in_base else log.seal()
    damage(system, entry, how, amount)
    wanted = NewerFormatError if how == "newer" else CorruptTableError
    with pytest.raises(wanted, match=f"/t/{entry.file} is .*\\. (Restore the file|Install a newer)") as caught:
        reopened(system, entry)
    assert (
        isinstance(caught.value, FileNotFoundError) == isinstance(caught.value, MissingFileError) == (how == "missing")
    )


@given(st.integers(0), st.data())
def test_bits_that_flip_are_noticed(seed: int, data: st.DataObject):
    system = new_system()
    rng = np.random.default_rng(seed % 2**32)
    ids = np.flatnonzero(rng.random(200) < 0.5).tolist() or [7]
    entry = chunk(system, ids, 0, 200)
    damaged = bytearray(system.files()["/t/base/1.rows"])
    records = range(4096, 4096 + len(ids) * (WIDTH + 4))
    at = data.draw(st.integers(0, len(damaged) - 1).filter(lambda at: at not in records))
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    system.write_file("/t/base/1.rows", bytes(damaged))
    with pytest.raises(EmbedrockError, match=r"/t/base/1\.rows is"):
        reopened(system, entry).index()


@pytest.mark.parametrize(
    ("kind", "ids", "file"),
    [
        ("ids", [3, 2], "base/1.rows"),
        ("ids", [3, 3], "base/1.rows"),
        ("ids", [-1, 3], "base/1.rows"),
        ("ids", [3, 100], "delta/1.dlt"),
        ("ids", [2**62, -(2**62)], "delta/1.dlt"),
        ("bits", [7, 0], "base/1.rows"),  # three ones
        ("bits", [0, 3 << 36], "base/1.rows"),  # ids 100 and 101 are beyond the range, in a word that exists
        ("bits", [0, 0], "base/1.rows"),
        ("bits", [-1, -1], "base/1.rows"),
    ],
)
def test_an_index_that_its_writer_never_made_is_refused(kind: str, ids: list[int], file: str):
    system, index = new_system(), np.array(ids, np.int64).tobytes()
    log = Log.create(system, "/t", file, UUID, WIDTH, 0)
    fill(log, 0, 2)
    entry = SegmentEntry(file, log.file.size + len(index), 2, kind, 0, 100, zlib.crc32(index), log.salt)
    system.write_file(f"/t/{file}", system.files()[f"/t/{file}"] + index)
    run = reopened(system, entry)
    with pytest.raises(CorruptTableError, match=f"index of /t/{file} is damaged"):
        run.index()


def test_nothing_is_allocated_for_sizes_that_are_made_up():
    system = new_system()
    fill(log := new_log(system), 0, 30)
    entry = log.seal()
    huge = replace(entry, count=2**39, size=4096 + 2**39 * (WIDTH + 12))
    tracemalloc.start()
    with pytest.raises(CorruptTableError, match=f"expected {huge.size} bytes, got {entry.size}"):
        reopened(system, huge)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_whose_file_it_is():
    system = new_system()
    fill(log := new_log(system), 0, 3)
    page = system.files()["/t/delta/1.dlt"][:4096]
    assert owner_of(page, "delta/1.dlt") == UUID
    assert owner_of(page, "delta/2.dlt") == ""
    damage(system, log.seal(), "foreign", 0)
    assert owner_of(system.files()["/t/delta/1.dlt"][:4096], "delta/1.dlt") == OTHER
    for data in (b"", b"EMBROCK1", bytes(4096), page[:-1], page[:-1] + bytes([page[-1] ^ 1])):
        assert owner_of(data, "delta/1.dlt") is None


# ---------------------------------------------------------------- pieces


@given(st.integers(1, 1 << 16).map(lambda words: 4 * words), st.integers(0, 1 << 25))
def test_pieces_are_whole_blocks_where_they_can_be(record_bytes: int, nbytes: int):
    rows, most, block_rows = runs.piece_rows(record_bytes, nbytes), nbytes // record_bytes, BLOCK // 4
    assert rows == max(1, most) if most < block_rows else most - block_rows < rows <= most
    assert most < block_rows or rows * (record_bytes + CRC_BYTES) % BLOCK == 0


@given(st.lists(st.lists(st.integers(LOWEST, BEYOND - 1), max_size=9), max_size=20), st.sampled_from([1, 3, 24, 999]))
def test_ids_that_come_one_after_the_other_are_all_there(parts: list[list[int]], block: int):
    ids = runs.IdBuffer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "_BLOCK_IDS", block)
        for part in parts:
            ids.append(np.array(part, np.int64))
        made, joined = list(ids), joined_ids(ids, ids.count, "a test")
    expected = [row for part in parts for row in part]
    assert joined.tolist() == [row for array in made for row in array.tolist()] == expected
    assert ids.count == len(expected)
    assert all(len(array) == block for array in made[:-1])


@pytest.mark.parametrize("block", [1, 5, 1 << 17])
def test_an_index_is_the_same_however_its_ids_are_kept(block: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runs, "_BLOCK_IDS", block)
    system, all_ids = new_system(), np.random.default_rng(0).integers(LOWEST, BEYOND - 1, 50)
    log = new_log(system)
    for ids in np.split(all_ids, [3, 4, 20, 49]):
        log.append(seal(ids, some_records(len(ids))), ids)
    entry = log.seal()
    assert entry.index_crc == zlib.crc32(all_ids.astype("<i8").tobytes())
    assert listed(reopened(system, entry)) == all_ids.tolist()
