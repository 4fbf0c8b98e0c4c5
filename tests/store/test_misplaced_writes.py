"""Bytes that are whole, but not in their place: replayed, swapped, misdirected and lost writes. They are refused."""

from __future__ import annotations

import numpy as np
import pytest

import embedrock as er
from embedrock.io.vfs import BLOCK
from embedrock.spec.spec import Spec
from embedrock.storage.ram_layout import memory_for
from embedrock.store.segments import CRC_BYTES, HEADER_BYTES
from on_system import on
from suites import FaultFS
from table_files import FOLDERS, newest_pool

ROWS, DIM = 2048, 4  # records of 16 bytes, 20 with their seal: every fifth block of a run begins with one
STRIDE = 4 * DIM + CRC_BYTES
HALF = ROWS // 2


def ones(ids: np.ndarray) -> np.ndarray:
    return np.ones((len(ids), DIM), np.float32)


def newest_log(system: FaultFS) -> str:
    return f"/t/{newest_pool(system, '/t').delta[-1].file}"


def overwrite(system: FaultFS, path: str, offset: int, data: bytes) -> None:
    """Put bytes somewhere else than they belong."""
    old = system.files()[path]
    assert old[offset : offset + len(data)] != data
    system.write_file(path, old[:offset] + data + old[offset + len(data) :])


def check_refused(system: FaultFS, path: str, damaged: list[int], whole: list[int], value: float) -> None:
    """Check that rows of a log are refused, by name, and others are as they were."""
    with on(system).open("/t", mode="r") as table:
        np.testing.assert_array_equal(table.lookup(whole), np.full((len(whole), DIM), value, np.float32))
        for row in damaged:
            with pytest.raises(er.CorruptTableError, match=rf"{path} is damaged: 1 record.* ids {row}\."):
                table.lookup([row])
        problems = table.verify().problems
    assert len(problems) == 1
    assert f"{path} is damaged: the checksums of {len(damaged)} of" in problems[0]


def make(system: FaultFS, commits: int) -> None:
    """Make a table whose commits each have a log of all rows in the same order."""
    ids = np.arange(ROWS)
    with on(system).Table(ROWS, DIM, rule=er.SGD(lr=1.0), init=er.Zeros(), path="/t", keep=9) as table:
        for _ in range(commits):
            table.update(ids, ones(ids))
            table.commit()


def test_a_record_of_an_older_commit():
    system = FaultFS()
    make(system, 2)
    old, new = (f"/t/{entry.file}" for entry in newest_pool(system, "/t").delta)
    at = HEADER_BYTES + 7 * STRIDE
    overwrite(system, new, at, system.files()[old][at : at + STRIDE])
    check_refused(system, new, [7], [6, 8, ROWS - 1], -2.0)


def spilled_twice() -> tuple[FaultFS, str]:
    """Return a table whose rows lie in one log, each of them twice, and that log."""
    system, rule = FaultFS(), er.SGD(lr=1.0)
    memory = memory_for(Spec(None, DIM, "float32", rule, er.Zeros(), 0), HALF)
    with on(system).Table(None, DIM, rule=rule, init=er.Zeros(), path="/t", memory=memory) as table:
        for ids in np.split(np.tile(np.arange(ROWS), 2), 4):
            table.update(ids, ones(ids))
        table.commit()
        assert table.stats()["cache_slots"] == HALF
    log = newest_log(system)
    index = np.frombuffer(system.files()[log][HEADER_BYTES + 2 * ROWS * STRIDE :], np.int64)
    np.testing.assert_array_equal(index, np.tile(np.arange(ROWS), 2))
    return system, log


def test_two_records_of_one_row_that_change_places():
    system, log = spilled_twice()
    older, newer = HEADER_BYTES + 5 * STRIDE, HEADER_BYTES + (ROWS + 5) * STRIDE
    first, second = (system.files()[log][at : at + STRIDE] for at in (older, newer))
    overwrite(system, log, older, second)
    overwrite(system, log, newer, first)
    with on(system).open("/t", mode="r") as table:
        with pytest.raises(er.CorruptTableError, match=r" ids 5\."):
            table.lookup([5])
        assert "the checksums of 2 of" in table.verify().problems[0]  # both of them
        np.testing.assert_array_equal(table.lookup([4, 6]), np.full((2, DIM), -2.0, np.float32))


def test_a_block_that_was_written_elsewhere():
    system, log = spilled_twice()
    shift = ROWS * STRIDE
    assert shift % BLOCK == 0
    block = 3 * BLOCK
    overwrite(system, log, block + shift, system.files()[log][block : block + BLOCK])
    inside = range(-(-(block - HEADER_BYTES) // STRIDE), (block + BLOCK - HEADER_BYTES) // STRIDE)
    with on(system).open("/t", mode="r") as table:
        for row in inside:
            with pytest.raises(er.CorruptTableError, match=rf" ids {row}\."):
                table.lookup([row])
        others = [row for row in range(ROWS) if not inside.start - 1 <= row <= inside.stop]
        np.testing.assert_array_equal(table.lookup(others), np.full((len(others), DIM), -2.0, np.float32))


def of_one_name() -> tuple[FaultFS, str, bytes]:
    """Return a table, its newest log, and what a log of the same name, size and index held that was not to be kept."""
    system, ids = FaultFS(), np.arange(ROWS)
    make(system, 1)
    before, lost = system.files(), b""
    for times in (3, 1):
        system = FaultFS()
        for folder in ("/t", *(f"/t/{name}" for name in FOLDERS)):
            system.mkdir(folder)
        for path, data in before.items():
            system.write_file(path, data)
        with on(system).open("/t") as table:
            for _ in range(times):
                table.update(ids, ones(ids))
            table.commit()
        log = newest_log(system)
        lost = lost or system.files()[log]
    assert len(lost) == len(system.files()[log])
    return system, log, lost


def test_sectors_of_an_older_file_of_the_same_name():
    system, log, lost = of_one_name()
    first = 10
    start = HEADER_BYTES + first * STRIDE
    overwrite(system, log, start, lost[start : start + 5 * STRIDE])
    check_refused(system, log, list(range(first, first + 5)), [0, first - 1, first + 5, ROWS - 1], -2.0)


def test_an_older_file_of_the_same_name():
    system, log, lost = of_one_name()
    system.write_file(log, lost)
    with pytest.raises(er.CorruptTableError, match=f"{log} is damaged: expected the file with salt 0x.*, got one with"):
        on(system).open("/t", mode="r")
