"""A table on disk and more than one process: who may write, what readers see, forks, and disks that refuse."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from disks import BALLAST, fill, mounted
from embedrock.errors import CommitError, ReadOnlyTableError, TableLockedError
from embedrock.io.vfs import OS_SYSTEM, System
from embedrock.store.verify import verify
from forked import in_child
from on_system import on
from same_tables import check_same

# From Python 3.12 on, it warns where a process with threads forks.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

ROWS, DIM, BATCH = 300, 4, 20
RULE = er.SGD(lr=1.0)
ALL = np.arange(ROWS)


def make(path: Path, slots: int = 2 * BATCH, **options: Any) -> er.Table:
    """Make or open a table whose rows, once all of them have made s steps, are -s."""
    memory = er.Table(ROWS, DIM, rule=RULE).memory_for(slots)
    return er.Table(ROWS, DIM, path=path, rule=RULE, init=er.Zeros(), memory=memory, **options)


def step_all(table: er.Table) -> None:
    """Step every row once."""
    for first in range(0, ROWS, BATCH):
        table.update(ALL[first : first + BATCH], np.ones((BATCH, DIM), np.float32))


def go_on(table: er.Table, steps: int) -> None:
    """Step every row so often, commit each of these steps, and compact at every fifth."""
    for step in range(1, steps + 1):
        step_all(table)
        table.commit(step=step)
        if step % 5 == 0:
            table.compact()


def check_rows(table: er.Table, steps: int | None) -> None:
    """Fail unless all rows have made so many steps."""
    np.testing.assert_array_equal(table.lookup(ALL), np.full((ROWS, DIM), -(steps or 0), np.float32))


# ---------------------------------------------------------------- the other process

_opened: dict[str, er.Table] = {}


def open_there(path: Path, mode: str = "w", at: int | None = None) -> int:
    """Open a table in this process, keep it, and return the process's number."""
    _opened[str(path)] = er.open(path, mode=mode, at=at)
    return os.getpid()


def check_there(path: Path, steps: int) -> None:
    check_rows(_opened[str(path)], steps)


def close_there(path: Path) -> None:
    _opened.pop(str(path)).close()


def look_until(path: Path, step: int) -> list[int]:
    """Open the newest commit again and again until it is that of `step`, and return the steps that were seen."""
    seen = [-1]
    while seen[-1] != step:
        with er.open(path, mode="r") as table:
            check_rows(table, table.last_step)
            seen.append(table.last_step or 0)
    return seen


def verify_until(path: Path, step: int) -> None:
    """Verify all commits again and again until that of `step` is there."""
    last = None
    while last != step:
        verdict = verify(OS_SYSTEM, str(path))
        assert verdict.problems == []
        assert verdict.newest_good is not None
        with er.open(path, mode="r") as table:
            last = table.last_step


def write_there(path: Path) -> int:
    with er.open(path) as table:
        step_all(table)
        return table.commit(step=(table.last_step or 0) + 1)


@pytest.fixture(scope="module")
def other() -> Iterator[ProcessPoolExecutor]:
    """Another process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


def there(other: ProcessPoolExecutor, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in the other process."""
    return other.submit(function, *args).result(timeout=300)


# ---------------------------------------------------------------- one writer


def test_a_second_writer_is_told_at_once_who_the_first_is(other: ProcessPoolExecutor, tmp_path: Path):
    path = tmp_path / "table"
    with make(path) as table:
        there_it_is = (
            f"another writer has the table open: process {os.getpid()} on host {re.escape(socket.gethostname())}"
        )
        here = f"this process has it open for writing already: table {str(path)!r}, since {__file__}:"
        for open_it, text in (
            (lambda: there(other, open_there, path), there_it_is),
            (lambda: er.open(path), re.escape(here)),
            (lambda: make(path), re.escape(here)),
        ):
            with pytest.raises(TableLockedError, match=text) as caught:
                open_it()
            assert caught.value.errno == errno.EWOULDBLOCK
            assert caught.value.filename == str(path)
        table.update([1], np.ones((1, DIM)))
        assert table.commit() == 1
    assert there(other, write_there, path) == 2


def test_a_writer_that_died_locks_nobody_out(tmp_path: Path):
    path = tmp_path / "table"
    make(path).close()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        number = there(pool, open_there, path)
        with pytest.raises(TableLockedError, match=f"process {number} on host"):
            er.open(path)
        os.kill(number, signal.SIGKILL)
        pool.shutdown(wait=True)
    make(path).close()


class Overtaken(System):
    """Lets somebody else do something right before the table is locked."""

    def __init__(self, first: Callable[[], object]) -> None:
        super().__init__()
        self._first: Callable[[], object] | None = first

    def lock(self, path: str, text: str) -> int:
        first, self._first = self._first, None
        if first is not None:
            first()
        return super().lock(path, text)


def test_two_processes_that_make_a_table_share_it(tmp_path: Path):
    path = tmp_path / "table"

    def make_first() -> None:
        with make(path) as table:
            step_all(table)
            table.commit(step=1)

    with on(Overtaken(make_first))(make, path) as table:
        check_rows(table, 1)


def test_the_lock_of_one_table_is_not_that_of_another(tmp_path: Path):
    with make(tmp_path / "users"), make(tmp_path / "items"):
        pass


# ---------------------------------------------------------------- readers


def test_a_reader_keeps_its_snapshot(other: ProcessPoolExecutor, tmp_path: Path):
    path = tmp_path / "table"
    with make(path, keep=1) as table:
        step_all(table)
        table.commit(step=1)
        files = {file for file in path.rglob("*.*") if file.is_file() and file.suffix != ".ids"}
        there(other, open_there, path, "r")
        for step in range(2, 6):
            step_all(table)
            table.commit(step=step, wait=step % 2 == 0)
            there(other, check_there, path, 1)
        table.compact()
        step_all(table)  # not committed
        assert not any(file.exists() for file in files)
        there(other, check_there, path, 1)
        there(other, close_there, path)
        there(other, open_there, path, "r")
        there(other, check_there, path, 5)
        there(other, close_there, path)
        with pytest.raises(er.ArgumentError, match="has no commit 1: it has"):
            there(other, open_there, path, "r", 1)
        table.commit(step=6)


def test_what_readers_open_is_always_whole(other: ProcessPoolExecutor, tmp_path: Path):
    path = tmp_path / "table"
    with make(path, keep=1) as table:
        seen = other.submit(look_until, path, 30)
        go_on(table, 30)
        assert sorted(seen.result(timeout=300)) == seen.result()


def test_a_table_that_goes_on_verifies(other: ProcessPoolExecutor, tmp_path: Path):
    path = tmp_path / "table"
    with make(path, keep=1) as table:
        done = other.submit(verify_until, path, 40)
        go_on(table, 40)
        done.result(timeout=300)


def test_a_reader_of_an_older_commit(other: ProcessPoolExecutor, tmp_path: Path):
    path = tmp_path / "table"
    with make(path, keep=5) as table:
        go_on(table, 3)
        there(other, open_there, path, "r", 2)
        there(other, check_there, path, 2)
        table.rollback(1)
        check_rows(table, 1)
        there(other, check_there, path, 2)
        there(other, close_there, path)


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.update([1], np.ones((1, DIM))),
        lambda table: table.assign([1], np.ones((1, DIM))),
        lambda table: table.commit(),
        lambda table: table.compact(),
        lambda table: table.rollback(0),
        lambda table: table.release("a"),
    ],
)
def test_a_reader_changes_nothing(change: Callable[[er.Table], object], tmp_path: Path):
    make(tmp_path / "table").close()
    with er.open(tmp_path / "table", mode="r") as reader:
        with pytest.raises(ReadOnlyTableError, match='was opened with mode="r" and cannot change'):
            change(reader)
        check_rows(reader, 0)


# ---------------------------------------------------------------- forks


def test_a_forked_reader_reopens_by_itself(tmp_path: Path):
    path = tmp_path / "table"
    with make(path) as table, er.open(path, mode="r", at=0) as old:
        step_all(table)
        table.commit(step=1)
        with er.open(path, mode="r") as reader:
            check_rows(reader, 1)  # its cache and its reading threads exist
            pin = reader.bring(ALL[:9])

            def read() -> None:
                check_rows(reader, 1)
                check_rows(old, 0)
                for ids in reader.prefetch([[k] for k in range(9)]):
                    assert reader.lookup(ids).tolist() == [[-1.0] * DIM]
                pin.release()
                reader.close()

            for _ in range(3):
                in_child(read)
            check_rows(reader, 1)
            step_all(table)
            table.commit(step=2)
            in_child(read)


def test_a_fork_while_other_threads_read(tmp_path: Path):
    path = tmp_path / "table"
    with make(path) as table:
        step_all(table)
        table.commit(step=1)
    with er.open(path, mode="r") as reader:
        done = threading.Event()

        def read() -> None:
            while not done.is_set():
                check_rows(reader, 1)

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(10):
                in_child(lambda: check_rows(reader, 1))
        finally:
            done.set()
            for thread in threads:
                thread.join()


def test_a_forked_writer_refuses(other: ProcessPoolExecutor, tmp_path: Path):
    path = tmp_path / "table"
    with make(path) as table:
        step_all(table)
        table.commit(step=1)
        step_all(table)

        def write() -> None:
            text = f"is written by process {os.getppid()}, and this is its child {os.getpid()}"
            calls: list[Callable[[], object]] = [
                lambda: table.update([1], np.ones((1, DIM))),
                lambda: table.lookup([1]),
                lambda: table.commit(step=9),
                lambda: table.rollback(0),
                lambda: table.bring([1]),
                lambda: table.compact(),
                lambda: table.release("a"),
            ]
            for call in calls:
                with pytest.raises(ReadOnlyTableError, match=text):
                    call()
            table.close()

        in_child(write)
        with pytest.raises(TableLockedError):
            there(other, open_there, path)
        table.commit(step=2, wait=False)
        in_child(write)  # while the commit may be under way
        check_rows(table, 2)
        assert table.verify().problems == []
    there(other, open_there, path)
    there(other, check_there, path, 2)
    there(other, close_there, path)


def test_a_forked_child_opens_the_table_by_itself(tmp_path: Path):
    path = tmp_path / "table"
    with make(path) as table:
        step_all(table)
        table.commit(step=1)
        step_all(table)
        in_child(lambda: look_until(path, 1))

        def write() -> None:
            with pytest.raises(TableLockedError, match=f"process {os.getppid()}"):
                er.open(path)

        in_child(write)
        table.commit()
    in_child(lambda: write_there(path))


# ---------------------------------------------------------------- read-only media


class Unwritable(System):
    """A file system that was mounted read-only."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("mkdir", "rmdir", "link", "unlink", "pwrite", "fdatasync", "fsync_folder", "lock", "behind"):
            return _refuse
        return super().__getattribute__(name)

    def open(self, path: str, flags: int) -> int:
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            _refuse()
        return super().open(path, flags)


def _refuse(*args: object) -> Any:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def read_in_every_way(path: Path, **options: Any) -> None:
    memory = er.Table(ROWS, DIM, rule=RULE).memory_for(2 * BATCH)
    with er.open(path, mode="r", memory=memory, **options) as reader:
        check_rows(reader, 2)
        for ids in reader.prefetch([ALL[k : k + 9] for k in range(0, 90, 9)], depth=2):
            reader.lookup(ids)
        assert len(reader.export()[0]) == ROWS
        assert reader.verify().problems == []
        assert [commit["step"] for commit in reader.commits()] == [1, 2]


def written(path: Path) -> Path:
    with make(path) as table:
        go_on(table, 2)
    return path


def test_readers_write_nothing(tmp_path: Path):
    path = written(tmp_path / "table")
    on(Unwritable())(read_in_every_way, path)
    told = r'Read-only file system: this process may not write to the folder. Open it for reading: .*mode="r"'
    with pytest.raises(er.ReadOnlyTableError, match=told) as caught:
        on(Unwritable()).open(path)
    assert caught.value.errno == errno.EROFS


def test_a_read_only_mount(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    written(tmp_path / "disk" / "table")
    with mounted(tmp_path / "disk", tmp_path / "mount", "--bind") as mount:
        made = subprocess.run(["mount", "-o", "remount,ro,bind", str(mount)], capture_output=True)
        if made.returncode:
            pytest.skip("this machine has no read-only bind mounts")
        read_in_every_way(mount / "table")
        with pytest.raises(
            er.ReadOnlyTableError, match=r'Read-only file system: .*Open it for reading: er\.open\(path, mode="r"'
        ):
            er.open(mount / "table")
        with pytest.raises(
            er.ReadOnlyTableError, match=r"Read-only file system: a table cannot be made where.*another path"
        ):
            make(mount / "new")


# ---------------------------------------------------------------- full disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of a few MB."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(12 << 20)
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("there is no mkfs.ext4")
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True)
    with mounted(image, tmp_path / "mount", "-o", "loop") as mount:
        yield mount
        gc.collect()  # files that are no longer used are closed by then


LARGE_ROWS, LARGE_DIM, LARGE_BATCH = 2000, 128, 200


def large_batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(step)
    ids = rng.permutation(LARGE_ROWS)[:LARGE_BATCH]
    return ids, rng.standard_normal((LARGE_BATCH, LARGE_DIM)).astype(np.float32)


def check_numbers(error: OSError) -> None:
    """Fail unless the error says how many bytes are needed and how many are free."""
    assert error.errno == errno.ENOSPC
    assert re.search(r"\d+ bytes.*(needed|needs)|(needed|needs).*\d+ bytes", str(error))
    assert re.search(r"\d+ .*free", str(error))


def commit_twice(table: er.Table, step: int, wait: bool) -> None:
    """Commit, and see what became of it."""
    table.commit(step=step, wait=wait)
    table.commit(step=step)


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_costs_nothing(wait: bool, small_disk: Path):
    ram = er.Table(LARGE_ROWS, LARGE_DIM, rule=er.Adam(lr=0.1), seed=0)
    options = {"rule": er.Adam(lr=0.1), "seed": 0, "memory": ram.memory_for(2 * LARGE_BATCH), "keep": 1}
    with er.Table(LARGE_ROWS, LARGE_DIM, path=small_disk / "table", **options) as table:

        def train(steps: range) -> None:
            for step in steps:
                table.update(*large_batch(step))
                ram.update(*large_batch(step))

        train(range(5))
        table.commit(step=5)
        fill(small_disk, but=100_000)
        train(range(5, 6))
        with pytest.raises(CommitError, match="the disk is full") as caught:
            commit_twice(table, step=6, wait=wait)
        check_numbers(caught.value)
        with pytest.raises(OSError, match="No space left on device") as spilled:
            train(range(6, 40))
        check_numbers(spilled.value)
        check_same(table, ram)
        assert table.last_step == 5
        with er.open(small_disk / "table", mode="r") as reader:
            assert reader.last_step == 5
        (small_disk / BALLAST).unlink()
        table.commit(step=ram.steps)
        train(range(ram.steps, ram.steps + 2))
        table.commit(step=ram.steps)
    with er.open(small_disk / "table", memory=options["memory"]) as table:
        check_same(table, ram)
        assert table.last_step == ram.steps
        assert table.verify().problems == []


def test_a_table_on_a_full_disk_opens(small_disk: Path):
    path = written(small_disk / "table")
    fill(small_disk, but=0)
    for mode in ("w", "r"):
        with er.open(path, mode=mode) as table:
            check_rows(table, 2)


# ---------------------------------------------------------------- file systems without locks


class Lockless(System):
    """NFS, as it is often mounted."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def lock(self, path: str, text: str) -> int:
        raise OSError(self._number, os.strerror(self._number))


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_one_has_to_ask_for_it(number: int, tmp_path: Path):
    path, system = tmp_path / "table", Lockless(number)
    with pytest.raises(TableLockedError, match=r"gives no locks \(NFS\?\).*Pass lock=False") as caught:
        on(system)(make, path)
    assert caught.value.errno == number
    with on(system)(make, path, lock=False) as table:
        go_on(table, 2)
    with pytest.raises(TableLockedError, match="lock=False"):
        on(system).open(path)
    on(system)(read_in_every_way, path)
    with on(system).open(path, lock=False) as table:
        check_rows(table, 2)
        assert table.compact() == 3


def test_lock_false_still_locks_where_it_can(tmp_path: Path):
    with make(tmp_path / "table", lock=False), pytest.raises(TableLockedError, match="this process has"):
        er.open(tmp_path / "table", lock=False)
