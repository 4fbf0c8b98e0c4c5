"""However many commits there are, few files are open; where the system gives none, the error says so."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.errors import CommitError
from embedrock.store import folding
from embedrock.store.compaction import compact
from embedrock.store.folding import fold
from slow import slow
from table_files import compact_in_background, store_of

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts /proc/self/fd")

ROWS, DIM, RULE = 400, 4, er.Adam(lr=0.1)


def open_files(path: Path) -> int:
    """Return how many files below a folder this process has open."""
    found = 0
    for each in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{each}").startswith(str(path))
        except OSError:
            continue
    return found


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[er.Table, er.Table]]:
    with er.Table(ROWS, DIM, path=tmp_path / "t.rock", rule=RULE, seed=0, memory="1MiB") as table:
        yield table, er.Table(ROWS, DIM, rule=RULE, seed=0)
        table.commit()


def train(pair: tuple[er.Table, er.Table], rng: np.random.Generator, count: int = 20) -> None:
    ids = rng.integers(0, ROWS, count)
    grads = rng.standard_normal((count, DIM), dtype=np.float32)
    for each in pair:
        each.update(ids, grads)


def assert_same(table: er.Table, twin: er.Table) -> None:
    for got, expected in zip(table.export(), twin.export(), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_few_files_are_open_however_many_commits(pair: tuple[er.Table, er.Table], tmp_path: Path):
    table, twin = pair
    _commit_often(pair, 70, tmp_path)
    assert_same(table, twin)
    table.commit()
    with er.open(tmp_path / "t.rock", mode="r") as snapshot:
        assert_same(snapshot, twin)
    assert not table.verify().problems


@slow
def test_few_files_are_open_after_600_commits(pair: tuple[er.Table, er.Table], tmp_path: Path):
    _commit_often(pair, 600, tmp_path)
    assert_same(*pair)


def _commit_often(pair: tuple[er.Table, er.Table], commits: int, folder: Path) -> None:
    rng, table, most = np.random.default_rng(0), pair[0], 0
    for number in range(commits):
        train(pair, rng)
        assert table.commit(step=number, wait=number % 3 > 0) == number + 1
        most = max(most, open_files(folder))
    assert most <= 2 * folding.FAN + 4, "logs, two for those that were folded since, the lock, what a commit is writing"
    stats = table.stats()
    stride = stats["record_bytes"] + 4
    assert stats["bytes_written"] < 2.2 * commits * 20 * stride, "each row about once more"
    assert stats["compactions_failed"] == 0
    assert len(store_of(table).delta) <= folding.FAN


def test_commits_that_are_kept_stay(pair: tuple[er.Table, er.Table], tmp_path: Path):
    rng, table, kept = np.random.default_rng(0), pair[0], dict[int, np.ndarray]()
    for number in range(60):
        train(pair, rng)
        commit = table.commit(name=f"n{number}" if number % 11 == 0 else None)
        if number % 11 == 0:
            kept[commit] = table.lookup(np.arange(ROWS))
    for commit, rows in kept.items():
        with er.open(tmp_path / "t.rock", mode="r", at=commit) as snapshot:
            np.testing.assert_array_equal(snapshot.lookup(np.arange(ROWS)), rows)
    first = min(kept)
    table.rollback(first)
    np.testing.assert_array_equal(table.lookup(np.arange(ROWS)), kept[first])
    assert not table.verify().problems
    assert not table.verify().strange


def test_newer_rows_win_also_where_compaction_comes_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(folding, "FAN", 3)
    rng = np.random.default_rng(0)
    with er.Table(ROWS, DIM, path=tmp_path / "t.rock", rule=RULE, seed=0, memory="64KiB") as table:
        twin = er.Table(ROWS, DIM, rule=RULE, seed=0)
        for number in range(60):
            train((table, twin), rng, 60)
            if number % 2:
                table.commit(wait=False)
            if number % 7 == 0:
                compact_in_background(table)
            if number % 13 == 0:
                table.compact()
            if number % 10 == 9:
                table.commit()
                with er.open(tmp_path / "t.rock", mode="r") as snapshot:
                    assert_same(snapshot, twin)
        table.commit()
        assert_same(table, twin)


def test_commits_made_while_logs_are_folded_are_newer_also_after_a_compaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rng, table = np.random.default_rng(0), er.Table(ROWS, DIM, path=tmp_path / "t.rock", rule=RULE, seed=0, memory=9000)
    pair = table, er.Table(ROWS, DIM, rule=RULE, seed=0)
    store, calls = store_of(table), list[int]()

    def meanwhile() -> None:
        calls.append(len(calls))
        for _ in range(3):
            train(pair, rng)
            table.commit()
        while not store.logs:  # rows that left the cache for the log of the next commit
            train(pair, rng)

    for _ in range(4):
        train(pair, rng)
        table.commit()
    with monkeypatch.context() as patch:
        patch.setattr(folding, "FAN", 4)
        patch.setattr(folding, "_fold", partial(_fold_with_others, folding._fold, patch))
        fold(store, None, meanwhile)
    assert calls
    assert len(store.delta) == 4
    compact(store, None, lambda: False)
    table.commit()
    assert_same(*pair)
    with er.open(tmp_path / "t.rock", mode="r") as snapshot:
        assert_same(snapshot, pair[1])
    table.close()


def _fold_with_others(original: Callable[..., None], patch: pytest.MonkeyPatch, *args: Any) -> None:
    patch.setattr(folding, "FAN", 100)  # of the commits meanwhile, nothing is folded
    original(*args)


def test_logs_that_cannot_be_folded_stay_and_are_folded_later(
    pair: tuple[er.Table, er.Table], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    rng, table, tried = np.random.default_rng(0), pair[0], list[int]()

    def full(*args: object) -> None:
        tried.append(len(store_of(table).delta))
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        patch.setattr(folding, "open_run", full)
        for _ in range(folding.FAN + 1):
            train(pair, rng)
            table.commit()
    assert tried == [folding.FAN, folding.FAN + 1]
    assert all("could not be compacted, and is as it was: [Errno 28] No space" in str(each.message) for each in told)
    assert table.stats()["compactions_failed"] == 2
    assert len(os.listdir(tmp_path / "t.rock" / "delta")) == folding.FAN + 1, "what it had written is gone"
    train(pair, rng)
    table.commit()
    assert len(store_of(table).delta) == 1
    assert_same(*pair)


LIMITED = """
import resource, sys
import numpy as np, embedrock as er

def run(name, commits):
    table = er.Table(100, 4, path=f"{sys.argv[1]}/{name}.rock", memory="1MiB", rule=er.SGD(lr=0.1), seed=0)
    for step in range(commits):
        table.update(np.arange(20), np.ones((20, 4), np.float32))
        table.commit(step=step)
    return table

run("a", 20).close()                                           # all is compiled and imported
limit = 48
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
table = run("b", 60)
print("commit", table.last_commit)
hogs = []
try:
    while True:
        hogs.append(open("/dev/null"))
except OSError:
    pass
for attempt in (table.commit, lambda: er.open(f"{sys.argv[1]}/a.rock"), lambda: table.verify()):
    try:
        attempt()
    except OSError as error:
        print(type(error).__name__, error)
hogs.clear()
print("commit", table.commit())
"""


def test_a_process_with_few_files(tmp_path: Path):
    command = [sys.executable, "-W", "ignore", "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, *errors, last = done.stdout.splitlines()
    assert (first, last) == ("commit 60", "commit 61")
    assert len(errors) == 3
    assert errors[0].startswith(
        "CommitError [Errno 24] commit 61 failed: Too many open files: this process, of 48, has"
    )
    assert "Commit 60 is whole, and so are the rows in RAM" in errors[0]
    for error in errors:
        assert "Too many open files: this process, of 48, has no more left." in error
        assert "Raise the limit (`ulimit -n 65536`" in error


def test_a_commit_without_a_file_names_cause_and_remedy(
    pair: tuple[er.Table, er.Table], monkeypatch: pytest.MonkeyPatch
):
    rng, table = np.random.default_rng(0), pair[0]
    train(pair, rng)
    system_open = os.open

    def refused(path: str, flags: int, *args: int) -> int:
        if str(path).endswith(".dlt"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        return system_open(path, flags, *args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        with pytest.raises(
            CommitError, match=r"commit 1 failed: Too many open files: this process, of .*ulimit -n"
        ) as e:
            table.commit()
    assert e.value.errno == errno.EMFILE
    assert "is whole, and so are the rows in RAM" in str(e.value)
    assert table.commit() == 1
    assert_same(*pair)
