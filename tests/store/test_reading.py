"""Reading stored records: against what was written, through the real system."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from embedrock import kernels
from embedrock.errors import CorruptTableError
from embedrock.io.vfs import OS_SYSTEM, File, System, create, open_file
from embedrock.store import reading
from slow import examples
from suites import FaultFS

FIRST = 4096
STRAY = 0xA5
UNMARKED = 3  # the seed of a run of format 1


read_records: Any = reading.read_records  # of files that are less than segments


@dataclass
class Stored:
    """A run on disk and what it holds."""

    file: File
    ids: np.ndarray
    records: np.ndarray
    salt: int
    step: int
    first: int = FIRST


def store(path: Path, record_bytes: int, count: int, seed: int, direct: bool = False) -> Stored:
    rng = np.random.default_rng(seed)
    records, ids = rng.integers(0, 256, (count, record_bytes), np.uint8), rng.integers(-(2**63), 2**63 - 1, count)
    sealed = np.empty((count, record_bytes + 4), np.uint8)
    kernels.cpu.storage.seal(records, np.arange(count), ids, sealed, 0, count)
    salt, step = (int(rng.integers(0, 2**32)), reference.storage.MARK_STEP) if seed != UNMARKED else (0, 0)
    if seed != UNMARKED:
        kernels.cpu.storage.stamp(sealed, salt, 0, 0, count)
    file = create(OS_SYSTEM, str(path))
    file.append(bytes(FIRST))
    file.append(sealed.reshape(-1).data)
    file.close()
    return Stored(open_file(OS_SYSTEM, str(path), direct), ids, records, salt, step)


def at(run: int, indexes: np.ndarray) -> np.ndarray:
    return (run << 40) + indexes


class Recorder:
    """A system that notes what is asked of it."""

    def __init__(self, direct: bool = True) -> None:
        self.requests: list[tuple[int, int]] = []
        self.address, self._direct = 0, direct

    def is_direct(self, fd: int) -> bool:
        return self._direct

    def read_many(self, fds, offsets, sizes, out, starts) -> None:
        self.requests += zip(offsets.tolist(), sizes.tolist(), strict=True)
        self.address = out.ctypes.data
        OS_SYSTEM.read_many(fds, offsets, sizes, out, starts)


class Plain:
    """A system without threads, which reads in the loop of `FaultFS`."""

    pread = staticmethod(OS_SYSTEM.pread)
    is_direct = staticmethod(OS_SYSTEM.is_direct)

    def read_many(self, fds, offsets, sizes, out, starts) -> None:
        FaultFS.read_many(self, fds, offsets, sizes, out, starts)  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module", params=[(4, 5000), (96, 2000), (768, 700), (4092, 100), (40_000, 40)], ids=str)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Stored]]:
    record_bytes, count = request.param
    folder = tmp_path_factory.mktemp("runs")
    made = {number: store(folder / f"{number}", record_bytes, count, number) for number in (0, 3, 2**23 - 1)}
    yield made
    for run in made.values():
        run.file.close()


def check(system, runs: dict[int, Stored], where: list[tuple[int, int]]) -> tuple[int, int]:
    numbers, indexes = np.array(where, np.int64).reshape(-1, 2).T
    record_bytes = next(iter(runs.values())).records.shape[1]
    ids = np.array([runs[run].ids[index] for run, index in where], np.int64)
    records = np.full((len(where) + 5, record_bytes), STRAY, np.uint8)
    slots = np.random.default_rng(0).permutation(len(where) + 5)[: len(where)]
    counts = read_records(system, runs, (numbers << 40) + indexes, ids, records, slots)
    for slot, (run, index) in zip(slots.tolist(), where, strict=True):
        np.testing.assert_array_equal(records[slot], runs[run].records[index])
    assert (np.delete(records, slots, axis=0) == STRAY).all()
    return counts


@pytest.mark.parametrize("system", [OS_SYSTEM, Plain()], ids=["threads", "loop"])
@given(data=st.data())
@settings(max_examples=examples(30))
def test_random_records(runs: dict[int, Stored], system: System, data: st.DataObject):
    count = len(runs[0].ids)
    near = st.integers(0, min(count - 1, 20))
    index = st.one_of(near, near.map(lambda k: count - 1 - k), st.integers(0, count - 1))
    where = data.draw(st.lists(st.tuples(st.sampled_from(list(runs)), index), max_size=60))
    check(system, runs, where)


@pytest.mark.parametrize("staging", [1, 8192, 100_000])
def test_pieces_of_bounded_memory(runs: dict[int, Stored], staging: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reading, "STAGING_BYTES", staging)
    rng, count = np.random.default_rng(staging), len(runs[0].ids)
    recorder = Recorder()
    where = [(run, index) for run in runs for index in rng.permutation(count)[:50].tolist()]
    counts = check(recorder, runs, where)
    assert counts == (len(recorder.requests), sum(size for _, size in recorder.requests))


def test_memory_of_a_thread_grows(runs: dict[int, Stored], monkeypatch: pytest.MonkeyPatch):
    def read(staging: int) -> None:
        monkeypatch.setattr(reading, "STAGING_BYTES", staging)
        check(OS_SYSTEM, runs, [(3, index) for index in range(min(500, len(runs[3].ids)))])

    with ThreadPoolExecutor(1) as pool:
        pool.submit(read, 1).result()
        pool.submit(read, 1 << 20).result()


def test_all_in_order(runs: dict[int, Stored]):
    recorder, count = Recorder(), len(runs[3].ids)
    counts = check(recorder, runs, [(3, index) for index in range(count)])
    stride = runs[3].records.shape[1] + 4
    assert counts[0] <= count * stride / (reading.LONGEST_REQUEST - 2 * max(stride, 4096)) + 2
    assert counts[1] <= count * stride * 1.3 + 8192


def test_requests_are_whole_blocks_that_neighbours_share(tmp_path: Path):
    run, recorder = store(tmp_path / "a", 772, 3000, 0), Recorder()

    def requests(*indexes: int) -> list[tuple[int, int]]:
        recorder.requests.clear()
        check(recorder, {0: run}, [(0, index) for index in indexes])
        return recorder.requests

    assert requests(0, 3) == [(4096, 4096)]
    assert requests(5) == [(4096, 8192)]  # bytes 3880 to 4656 of the records
    assert requests(5, 0, 5) == [(4096, 8192)]
    assert requests(20, 5) == [(4096, 16384)]
    assert requests(6, 6 + 26) == [(8192, 24576)]  # 16 KiB between them are read along
    assert requests(6, 6 + 42) == [(8192, 4096), (40960, 4096)]
    assert recorder.address % 4096 == 0
    run.file.close()


def test_of_a_file_in_the_page_cache_little_more_is_read_than_asked_for(tmp_path: Path):
    run, recorder = store(tmp_path / "a", 772, 3000, 0), Recorder(direct=False)

    def requests(*indexes: int) -> list[tuple[int, int]]:
        recorder.requests.clear()
        check(recorder, {0: run}, [(0, index) for index in indexes])
        return recorder.requests

    assert requests(0) == [(4096, 832)]  # 776 bytes in whole lines of 64
    assert requests(0, 1, 1, 2) == [(4096, 2368)]
    assert requests(20, 5) == [(7936, 832), (19584, 832)]
    run.file.close()


def test_files_of_both_kinds_at_once(tmp_path: Path):
    runs = {0: store(tmp_path / "a", 96, 900, 0), 1: store(tmp_path / "b", 96, 900, 1, direct=True)}
    draw = np.random.default_rng(0)
    counts = check(OS_SYSTEM, runs, [(int(run), int(index)) for run, index in draw.integers(0, (2, 900), (300, 2))])
    if OS_SYSTEM.is_direct(runs[1].file.fd):
        assert counts[1] < 900 * 100 + 150 * 256 + 8192
    for run in runs.values():
        run.file.close()


def test_nothing():
    nothing = np.empty(0, np.int64)
    counts = read_records(OS_SYSTEM, {}, nothing, nothing, np.empty((0, 8), np.uint8), nothing)
    assert counts == (0, 0)


def test_direct_reads(tmp_path: Path):
    run = store(tmp_path / "a", 768, 1001, 0, direct=True)
    check(OS_SYSTEM, {0: run}, [(0, index) for index in np.random.default_rng(0).permutation(1001).tolist()])
    run.file.close()


def test_threads(runs: dict[int, Stored]):
    count = len(runs[0].ids)

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(5):
            check(OS_SYSTEM, runs, [(run, index) for run in runs for index in rng.permutation(count)[:40].tolist()])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(8)))


def change(path: str, offset: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        value = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([value ^ 1 << bit]))


def test_damage_names_file_and_rows(tmp_path: Path):
    runs = {0: store(tmp_path / "good", 768, 50, 0), 1: store(tmp_path / "bad", 768, 50, 1)}
    records, rows = np.empty((50, 768), np.uint8), runs[1].ids
    for index in range(12):
        change(runs[1].file.path, FIRST + index * 772 + index * 70, index % 8)
    for chosen in (np.arange(12), np.array([11]), np.arange(3, 50)):
        with pytest.raises(CorruptTableError) as error:
            read_records(OS_SYSTEM, runs, at(1, chosen), rows[chosen], records, chosen)
        damaged = np.sort(rows[chosen[chosen < 12]])
        named = ", ".join(map(str, damaged[:8].tolist())) + (", ..." if len(damaged) > 8 else "")
        text = f"{tmp_path / 'bad'} is damaged: {len(damaged)} record(s) do not fit their checksums, ids {named}."
        assert str(error.value).startswith(text)
        assert "embedrock verify" in str(error.value)
    check(OS_SYSTEM, runs, [*((0, k) for k in range(50)), *((1, k) for k in range(12, 50))])
    for run in runs.values():
        run.file.close()


def test_a_record_of_another_row_is_not_taken(tmp_path: Path):
    run, records = store(tmp_path / "a", 16, 50, 0), np.empty((1, 16), np.uint8)
    with pytest.raises(CorruptTableError, match=f"ids {run.ids[3]}\\."):
        read_records(OS_SYSTEM, {0: run}, np.array([4]), run.ids[3:4], records, np.zeros(1, np.int64))
    run.file.close()


def test_a_record_of_another_place_is_not_taken(tmp_path: Path):
    run, other = (store(tmp_path / name, 16, 50, 0) for name in "ab")
    data = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(data[: FIRST + 80] + data[FIRST + 60 : FIRST + 80] + data[FIRST + 100 :])
    other.salt ^= 1
    records = np.empty((1, 16), np.uint8)
    for damaged, place, row in ((run, 4, 3), (other, 7, 7)):
        with pytest.raises(CorruptTableError, match=f"ids {run.ids[row]}\\."):
            read_records(OS_SYSTEM, {0: damaged}, np.array([place]), run.ids[row : row + 1], records, np.zeros(1, int))
    for stored in (run, other):
        stored.file.close()


@pytest.mark.parametrize("lost", [1, 4, 5, 772, 5000])
@pytest.mark.parametrize("system", [OS_SYSTEM, Plain()], ids=["threads", "loop"])
def test_truncation_is_seen_although_the_memory_still_has_the_record(tmp_path: Path, lost: int, system: System):
    run, records = store(tmp_path / "a", 768, 20, 0), np.empty((20, 768), np.uint8)
    args = np.arange(20), run.ids, records, np.arange(20)
    read_records(system, {0: run}, *args)
    os.truncate(run.file.path, FIRST + 20 * 772 - lost)
    with pytest.raises(CorruptTableError, match=f"ids .*{run.ids[19]}"):
        read_records(system, {0: run}, *args)
    run.file.close()


def test_errors_of_the_system_pass(tmp_path: Path):
    run = store(tmp_path / "a", 16, 5, 0)
    run.file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        read_records(OS_SYSTEM, {0: run}, np.arange(5), run.ids, np.empty((5, 16), np.uint8), np.arange(5))
