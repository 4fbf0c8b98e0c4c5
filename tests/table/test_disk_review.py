"""Tables on disk: what a review found to break."""

from __future__ import annotations

import errno
import os
import re
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.cli.main import main
from embedrock.io.vfs import System
from embedrock.storage.records import Records
from embedrock.store import compaction
from embedrock.system.sizes import parse_bytes
from embedrock.table import upkeep
from embedrock.table.stepping import StepRequest, judge, step_judged
from embedrock.table.table import rows_of
from on_system import on
from suites import FaultFS
from table_files import files_of

DIM = 4


def grads(ids: Any, dim: int = DIM) -> np.ndarray:
    return np.ones((len(ids), dim), np.float32)


def make(path: Path | str, **options: Any) -> er.Table:
    arguments: dict[str, Any] = {"rows": 1000, "dim": DIM, "memory": "1MiB", "rule": er.SGD(lr=0.5), "init": er.Zeros()}
    return er.Table(path=path, **arguments | options)


def step(table: er.Table, *ids: int) -> None:
    table.update(ids, grads(ids))


# ---------------------------------------------------------------- compaction


@pytest.mark.parametrize("rows", [10**9, 2**62, 2**63 - 1, None])
def test_compaction_makes_as_few_files_as_there_are_records(rows: int | None, tmp_path: Path):
    low, high = (-(2**63), 2**63 - 1) if rows is None else (0, rows - 1)
    rng = np.random.default_rng(1)
    ids = np.unique([low, high, *rng.integers(low, high, 3000, endpoint=True)])
    with make(tmp_path / "t", rows=rows) as table:
        table.update(ids, grads(ids))
        table.commit()
        table.compact()
        assert len(list((tmp_path / "t" / "base").glob("*/*"))) == 1
        assert np.array_equal(table.export()[0], ids)


@pytest.mark.parametrize("rows", [2**63 - 1, 5000, None])
def test_compaction_rewrites_only_the_chunks_that_changed(
    rows: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compaction, "CHUNK_BYTES", 64 * (4 * DIM + 4))
    rng = np.random.default_rng(2)
    with make(tmp_path / "t", rows=rows) as table:
        ids = np.unique(np.concatenate([rng.integers(0, rows or 2**63 - 1, 1000), np.arange(500)]))
        for part in np.array_split(ids, 5):
            table.update(part, grads(part))
            table.commit()
            table.compact()
        before = table.stats()["bytes_compacted"]
        step(table, 0)
        table.commit()
        table.compact()
        assert 0 < table.stats()["bytes_compacted"] - before <= 64 * (4 * DIM + 4)
        assert np.array_equal(table.export()[0], ids)
        assert not table.verify().problems


# ---------------------------------------------------------------- rollback


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


def test_a_damaged_commit_never_becomes_the_last_one(tmp_path: Path):
    with make(tmp_path / "t", keep=9) as table:
        table.assign([1], grads([1]))
        table.commit()
        table.set_rule(er.Adam())  # lays all files out anew, so that the next commit needs none of the first one's
        table.commit()
        damage(next((tmp_path / "t" / "delta").glob("0000000001-*")))
        with pytest.raises(er.CorruptTableError):
            table.rollback(1)
        assert table.commits()[-1]["commit"] == table.last_commit == 2
        step(table, 5)
        assert table.commit() == 3
    er.open(tmp_path / "t").close()


def test_a_rollback_needs_memory_for_the_records_of_then(tmp_path: Path):
    with make(tmp_path / "t", rows=None, dim=64, rule=er.Adam()) as table:
        ids = np.arange(100)
        table.update(ids, grads(ids, 64))
        table.commit()
        table.set_rule(er.SGD(lr=0.5), reset_state=True)
        table.commit()
        memory = table.memory_for(1)
    with er.open(tmp_path / "t", memory=memory) as table:
        with pytest.raises(er.MemoryBudgetError):
            table.rollback(1)
        table.update([5], grads([5], 64))
        assert table.commit() == 3
        assert not table.verify().problems


# ---------------------------------------------------------------- commits


def test_without_another_thread_a_commit_fails_and_nothing_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with make(tmp_path / "t") as table:
        step(table, 1)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            table.commit(wait=False)
            with pytest.raises(RuntimeError, match="new thread"):
                step(table, 1)
            assert table.uncommitted
        assert table.commit() == 1


def test_a_compaction_that_cannot_begin_is_no_failure_of_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "embedrock-compact":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(upkeep, "LEAST_COMPACTED_BYTES", 1)
    monkeypatch.setattr(upkeep, "LEAST_OVERLAY_BYTES", 1)
    with make(tmp_path / "t", memory="64KiB") as table:
        for number in range(3):
            step(table, *range(100 * number, 100 * number + 100))
            assert table.commit() == number + 1
        assert table.stats()["compactions_failed"] > 0
    make(tmp_path / "t").close()


@pytest.mark.parametrize("rule", [er.SGD(lr=0.5), er.Adam(dense=True)])
def test_a_commit_that_cannot_begin_is_a_commit_error(rule: er.Rule, tmp_path: Path):
    class Full(System):
        is_full = False

        def open(self, path: str, flags: int) -> int:
            if self.is_full and flags & os.O_CREAT:
                raise OSError(errno.ENOSPC, "full")
            return super().open(path, flags)

    system = Full()
    with on(system)(make, tmp_path / "t", rule=rule) as table:
        step(table, 1)
        system.is_full = True
        with pytest.raises(er.CommitError, match="bytes") as error:
            table.commit()
        assert error.value.errno == errno.ENOSPC
        assert table.uncommitted
        system.is_full = False
        assert table.commit() == 1


def test_a_full_disk_says_what_is_missing_as_far_as_it_is_known():
    system = FaultFS()
    with on(system)(make, "/t") as table:
        step(table, 1, 2)
        system.capacity = 0
        with pytest.raises(er.CommitError) as rows:
            table.commit()
        system.capacity = None
        table.commit()
        table.grow(2000)  # which takes some bytes of a manifest, and no row
        system.capacity = 0
        with pytest.raises(er.CommitError) as no_rows:
            table.commit()
        system.capacity = None
        table.commit()
    full, free = "the disk is full", "and 0 B (0 bytes) are free. Free some and commit again. Commit"
    assert f"commit 1 failed, {full}: 56 B (56 bytes) more are needed, {free} 0 is whole" in str(rows.value)
    assert f"commit 2 failed, {full}: more is needed, {free} 1 is whole" in str(no_rows.value)


def fill(table: er.Table, files: er.Table | er.Group) -> None:
    """Give a table of open ids more rows than a small budget has room to know of."""
    for ids in np.random.default_rng(0).integers(0, 2**60, (40, 1000)):
        step(table, *ids.tolist())
        files.commit()
        files.compact()


@pytest.mark.parametrize("grouped", [False, True])
def test_the_memory_that_an_index_asks_for_is_what_it_is_to_be_given(grouped: bool, tmp_path: Path):
    """Of a group it is the group's, as nobody can give a pool some; and it is never less than what there is."""
    opened = er.Group(path=tmp_path / "g", memory="512KiB") if grouped else None
    if opened is None:
        opened = table = make(tmp_path / "t", rows=None, memory="512KiB")
    else:
        table = opened.table("open", None, DIM, rule=er.SGD())
        opened.table("other", 10**6, 2 * DIM, rule=er.SGD())
    with opened, pytest.warns(RuntimeWarning, match="the index of") as told:
        fill(table, opened)
    (text,) = [str(each.message) for each in told if "the index of" in str(each.message)]
    asked = re.search(r'memory="([^"]+)" instead of ([^ ]+ [KMG]iB)\.', text)
    assert asked is not None
    assert parse_bytes(asked[1]) > parse_bytes(asked[2]) == 512 << 10
    assert ("Give the group" in text) is ("its share of the group's 512.0 KiB." in text) is grouped


def test_the_step_of_a_commit_is_a_number_of_64_bits(tmp_path: Path):
    with make(tmp_path / "t") as table:
        for wrong in (2**63, -(2**63) - 1, 1.0, True):
            with pytest.raises(er.ArgumentError, match="`step`"):
                table.commit(step=wrong)  # pyright: ignore[reportArgumentType]
        table.commit(step=np.int64(7))  # pyright: ignore[reportArgumentType]
        assert table.last_step == 7


def test_numbers_of_numpy_go_into_a_manifest(tmp_path: Path):
    rule, init = er.Adam(lr=np.float32(0.1)), er.Normal(std=np.float32(0.5))  # pyright: ignore[reportArgumentType]
    with make(tmp_path / "t", rule=rule, init=init, keep=np.int64(3)) as table:
        step(table, 1)
        table.commit()
        expected = table.lookup([1, 2])
    with make(tmp_path / "t", rule=rule, init=init) as table:
        assert np.array_equal(table.lookup([1, 2]), expected)


def test_a_row_too_large_for_a_file_is_refused_before_a_table_is_made(tmp_path: Path):
    with pytest.raises(er.ArgumentError, match=r"1\.0 GiB"):
        make(tmp_path / "t", dim=2**28, memory="64GiB")
    assert not (tmp_path / "t").exists()


def test_nothing_is_committed_to_a_table_that_took_the_place_of_another(tmp_path: Path):
    with make(tmp_path / "t") as table:
        step(table, 1)
        table.commit()
        (tmp_path / "t").rename(tmp_path / "elsewhere")
        step(table, 1)
        with pytest.raises(er.CommitError, match="moved"):
            table.commit()
        with make(tmp_path / "t") as other:
            with pytest.raises(er.CommitError, match="moved"):
                table.commit()
            step(other, 2)
            other.commit(step=1)
        assert not list((tmp_path / "t" / "manifest").glob("*2.json"))
        (tmp_path / "t").rename(tmp_path / "other")
        (tmp_path / "elsewhere").rename(tmp_path / "t")
        assert table.commit() == 2


# ---------------------------------------------------------------- a step of several tables


def test_a_check_of_a_step_raises_all_that_the_step_would(tmp_path: Path):
    system = FaultFS()
    with on(system)(make, "/t") as table:
        ids = np.arange(20)
        table.update(ids, grads(ids))
        table.commit(wait=False)
        table.check_step(table.sum(table.plan(ids), grads(ids)))
        table.commit()
        is_checked = threading.Event()

        def fail(*_: Any) -> None:
            is_checked.wait(60)
            raise OSError(errno.EIO, "I/O error")

        table.update(ids, grads(ids))
        files: Any = files_of(table)
        publish, files.table_folder.publish = files.table_folder.publish, fail
        table.commit(wait=False)
        summed = table.sum(table.plan(ids), grads(ids))
        assert table.rule is not None
        checked = judge([StepRequest((rows_of(table),), table.rule, summed)])
        is_checked.set()
        files._commit.join()
        files.table_folder.publish = publish
        step_judged(checked)  # whoever checked before the commit failed is not left half-way
        with pytest.raises(er.CommitError):
            table.check_step(summed)
        table.check_step(summed)
        table.commit()
        assert np.array_equal(table.lookup([3]), -0.5 * table.steps * grads([3]))


# ---------------------------------------------------------------- several threads


def test_tables_are_closed_and_rolled_back_while_others_are_at_work(tmp_path: Path):
    table = make(tmp_path / "t", rows=5000, memory=make(tmp_path / "x").memory_for(200))
    stop, wrong = threading.Event(), []
    rng = [np.random.default_rng(number) for number in range(4)]

    def worker(act: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            while not stop.is_set():
                try:
                    act()
                except er.ClosedTableError:
                    return
                except BaseException as error:
                    wrong.append(error)
                    return

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    threads = [
        worker(lambda: table.compact()),
        worker(lambda: table.commit(wait=False)),
        worker(lambda: table.commit(name="x") and table.release("x")),
        worker(lambda: table.lookup(rng[0].integers(0, 5000, 300))),
        worker(lambda: table.commits()),
    ]
    for _ in range(30):
        ids = rng[1].integers(0, 5000, 50)
        table.update(ids, grads(ids))
        time.sleep(0.002)
    table.commit()
    table.close()
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    with er.open(tmp_path / "t") as table:
        assert not table.verify().problems
        assert table.steps == 30


# ---------------------------------------------------------------- the command line


def test_the_command_line_refuses_to_go_back_to_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with make(tmp_path / "t", keep=9) as table:
        for number in range(3):
            step(table, number)
            table.commit()
    damage(tmp_path / "t" / "manifest" / "0000000003.json")
    damage(next((tmp_path / "t" / "delta").glob("0000000002-*")))
    assert main(["rollback", str(tmp_path / "t"), "2"]) == 1
    assert "damaged" in capsys.readouterr().err
    assert main(["rollback", str(tmp_path / "t"), "1"]) == 0
    with er.open(tmp_path / "t") as table:
        assert table.last_commit == 4
        assert table.steps == 1


# ---------------------------------------------------------------- processes


def test_a_process_may_open_more_files_than_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compaction, "CHUNK_BYTES", 64 * (4 * DIM + 4))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 60
    if few * 8 > hard:
        pytest.skip("this process may not open more files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        ids = np.arange(64 * 2 * few)
        with make(tmp_path / "t", rows=len(ids), memory="8MiB") as table:
            table.update(ids, grads(ids))
            table.commit()
            table.compact()
            assert len(list((tmp_path / "t" / "base").glob("*/*"))) == 2 * few
        er.open(tmp_path / "t", memory="1MiB").close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_child_that_was_just_forked_does_not_keep_the_lock(tmp_path: Path):
    for _ in range(20):
        with make(tmp_path / "t"):
            child = os.fork()
            if not child:
                os._exit(0)
        make(tmp_path / "t").close()
        os.waitpid(child, 0)


# ---------------------------------------------------------------- too little memory


@pytest.mark.parametrize("memory", ["12KiB", "1MiB"])
def test_a_step_that_runs_out_of_memory_can_be_made_again(memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begin, rng = Records.begin, np.random.default_rng(3)
    ram = er.Table(1000, DIM, rule=er.Adam(), seed=0)
    with make(tmp_path / "t", rule=er.Adam(), init=None, seed=0, memory=memory) as table:
        for _ in range(30):
            ids, values = rng.integers(0, 1000, 30), rng.normal(size=(30, DIM)).astype(np.float32)

            def fail(records: Records, *args: Any) -> None:
                raise MemoryError

            with monkeypatch.context() as patch:
                patch.setattr(Records, "begin", fail)
                try:
                    table.update(ids, values)
                except MemoryError:
                    patch.setattr(Records, "begin", begin)
                    table.update(ids, values)
            ram.update(ids, values)
            assert np.array_equal(ram.lookup(np.arange(1000)), table.lookup(np.arange(1000)))
        assert table.stats()["rows_touched"] == len(ram.export()[0])
        table.commit()
