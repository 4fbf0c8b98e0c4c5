"""`commit_every=`: what commits by itself, tables, groups and layers; and what is said where nobody commits."""

from __future__ import annotations

import datetime
import gc
import itertools
import logging
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
import programs
from embedrock.errors import ArgumentError, CommitError
from embedrock.io.vfs import System
from embedrock.table import storage
from embedrock.table.storage import StorageManager
from on_system import on
from slow import slow
from table_files import files_of

ROWS, DIM = 50, 4
ONES = np.ones((1, DIM), np.float32)
NAMES = [f"C{k}" for k in range(26)]


class Alone:
    """A table whose row 1 is -steps."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.it = er.Table(ROWS, DIM, path=path, rule=er.SGD(lr=1.0), init=er.Zeros(), memory="4MiB", **options)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.it.update([1], ONES)

    @property
    def steps(self) -> int:
        """Made, which the row must say as well."""
        assert (self.it.lookup([1]) == -self.it.steps).all()
        return self.it.steps

    @property
    def manager(self) -> storage.StorageManager:
        return files_of(self.it)


class Many:
    """A group of 26, whose rows 1 are -steps."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.it = er.Group(path=path, memory="8MiB", **options)
        for name in NAMES:
            self.it.table(name, ROWS, DIM, rule=er.SGD(lr=1.0), init=er.Zeros())

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.it.update({name: [1] for name in NAMES}, dict.fromkeys(NAMES, ONES))

    @property
    def steps(self) -> int:
        assert len({self.it[name].steps for name in NAMES}) == 1
        steps = self.it[NAMES[0]].steps
        assert all((row == -steps).all() for row in self.it.lookup({name: [1] for name in NAMES}).values())
        return steps

    @property
    def manager(self) -> storage.StorageManager:
        return files_of(self.it)


KINDS = pytest.mark.parametrize("kind", [Alone, Many])


def ended(kind: Any) -> list[int | None]:
    """Return the steps of the commits, once that under way has ended."""
    if (commit := kind.manager.pending) is not None:
        commit.join()
    return [commit["step"] for commit in kind.it.commits()]


@KINDS
def test_a_commit_begins_after_so_many_steps(kind: Any, tmp_path: Path):
    made = kind(tmp_path / "t", commit_every=10, keep=9)
    made.step(9)
    assert ended(made) == [None]
    made.step()
    assert ended(made) == [None, 10]
    made.it.commit(step=77, name="mine")  # explicit ones are beside
    made.step(25)
    assert ended(made) == [None, 10, 77, 20, 30]
    made.it.close()  # has the rest
    again = kind(tmp_path / "t")
    assert (again.steps, again.it.last_step) == (35, 35)
    again.it.close()


@KINDS
def test_named_commits_stay_whatever_it_commits_by_itself(kind: Any, tmp_path: Path):
    made = kind(tmp_path / "t", commit_every=1)
    made.step()
    made.it.commit(step=1, name="kept")
    made.step(6)
    ended(made)
    assert [commit["name"] for commit in made.it.commits()] == ["kept", None, None]
    made.it.rollback(made.it.commits()[0]["commit"])
    assert made.steps == 1
    made.step(2)
    assert made.it.last_step is not None
    made.it.close()
    assert kind(tmp_path / "t").steps == 3


@KINDS
@pytest.mark.parametrize("every", ["30s", "0.5min", datetime.timedelta(seconds=30)])
def test_a_commit_begins_after_so_much_time(kind: Any, every: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = time.monotonic()
    monkeypatch.setattr(storage.time, "monotonic", lambda: now)
    made = kind(tmp_path / "t", commit_every=every)
    for seconds, expected in [(0, 0), (29, 0), (31, 1), (60, 1), (62, 2)]:
        monkeypatch.setattr(storage.time, "monotonic", lambda at=now + seconds: at)
        made.step()
        ended(made)
        assert made.it.last_commit == expected
    made.it.close()


def test_members_that_are_stepped_alone_commit_together(tmp_path: Path):
    made = Many(tmp_path / "t", commit_every=10, keep=9)
    for name in NAMES:
        for _ in range(9):
            made.it[name].update([1], ONES)
    assert ended(made) == [None]
    for name in NAMES:
        made.it[name].update([1], ONES)
    assert ended(made) == [None, 10]
    made.it.close()


def test_steps_are_counted_anew_where_they_begin_anew(tmp_path: Path):
    made = Alone(tmp_path / "t", commit_every=10)
    made.step(9)
    made.it.set_rule(er.Adam(), reset_state=True)
    made.step(10)
    assert ended(made)[-1] == 10
    made.it.close()


class Full(System):
    """A disk that can be full."""

    is_full = False

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        if self.is_full:
            raise OSError(28, "No space left on device")
        return super().pwrite(fd, data, offset)


@KINDS
def test_what_fails_is_raised_before_the_next_step_changes_anything(kind: Any, tmp_path: Path):
    disk = Full()
    made = on(disk)(kind, tmp_path / "t", commit_every=5)
    made.step(4)
    disk.is_full = True
    made.step()  # is made
    assert made.steps == 5
    ended(made)
    with pytest.raises(CommitError, match="commit 1 failed"):
        made.step()
    assert made.steps == 5
    made.step()
    ended(made)
    disk.is_full = False
    with pytest.raises(CommitError, match="commit 1 failed"):  # it was tried again
        made.step()
    made.step()
    ended(made)
    assert made.it.last_step == made.steps == 7
    made.it.close()


@KINDS
def test_a_close_that_cannot_commit_leaves_it_open_once(kind: Any, tmp_path: Path):
    disk = Full()
    made = on(disk)(kind, tmp_path / "t", commit_every=100)
    made.step(3)
    disk.is_full = True
    with pytest.raises(CommitError, match="Free some and commit again"):
        made.it.close()
    assert made.steps == 3
    with pytest.warns(er.UncommittedWarning, match="which are lost"):
        made.it.close()
    made = kind(tmp_path / "t", commit_every=100)
    made.step(3)
    made.it.close()
    assert kind(tmp_path / "t").steps == 3


@pytest.mark.parametrize("every", [0, -1, True, 1.5, "soon", "0s", "", datetime.timedelta(0), b"30s"])
@KINDS
def test_what_is_no_time_and_no_steps_is_refused(kind: Any, every: Any, tmp_path: Path):
    with pytest.raises(ArgumentError, match=r'`commit_every` must be steps, at least 1, or a time such as "30s" or '):
        kind(tmp_path / "t", commit_every=every)
    assert not (tmp_path / "t").exists()


def test_tables_that_cannot_commit_refuse_it(tmp_path: Path):
    for make in (lambda: er.Table(9, 2, commit_every=5), lambda: er.Group(commit_every=5)):
        with pytest.raises(
            ArgumentError, match=r"lives in RAM without the options of tables on disk: got commit_every=5"
        ):
            make()
    Alone(tmp_path / "t").it.close()
    with pytest.raises(ArgumentError, match='goes with mode="w": a snapshot has nothing to commit'):
        er.open(tmp_path / "t", mode="r", commit_every=5)
    opened = er.open(tmp_path / "t", commit_every=np.int64(1))  # pyright: ignore[reportArgumentType]
    opened.set_rule(er.SGD(lr=1.0))
    opened.update([1], ONES)
    opened.close()
    assert er.open(tmp_path / "t").steps == 1


def test_a_step_looks_at_nothing_but_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    looked: list[int] = []
    look = StorageManager.look
    monkeypatch.setattr(StorageManager, "look", lambda files: (looked.append(files.open_rows()[0].steps), look(files)))
    made = Alone(tmp_path / "t", commit_every=10)
    made.step(35)
    assert looked == [10, 20, 30]
    made.it.close()
    made, looked[:] = Alone(tmp_path / "t"), []
    made.step(64)
    assert not looked  # it has a commit: nobody is to be told
    made.it.commit()
    made.it.close()


# ---------------------------------------------------------------- nobody commits


@KINDS
def test_it_is_said_once_that_nobody_commits(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    now = time.monotonic()
    made = kind(tmp_path / "t")
    made.step(32)
    assert not caplog.records
    monkeypatch.setattr(storage.time, "monotonic", lambda: now + storage.PATIENCE_SECONDS + 60)
    made.step(64)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("embedrock", logging.WARNING)
    said = record.getMessage()
    assert f"opened at {__file__}" in said
    assert "for 11 minutes now, and no commit has its steps" in said
    assert 'commit_every="5min"' in said
    made.it.commit()
    made.it.close()


@KINDS
@pytest.mark.parametrize("how", ["commit", "commit_every", "before"])
def test_nothing_is_said_to_those_who_commit(
    kind: Any, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    now = time.monotonic()
    made = kind(tmp_path / "t", commit_every=1000 if how == "commit_every" else None)
    if how != "commit_every":
        made.step()
        made.it.commit()
    if how == "before":
        made.it.close()
        made = kind(tmp_path / "t")
    monkeypatch.setattr(storage.time, "monotonic", lambda: now + storage.PATIENCE_SECONDS + 60)
    made.step(64)
    assert not caplog.records
    made.it.commit()
    made.it.close()


@KINDS
def test_a_close_says_the_line_to_add(kind: Any, tmp_path: Path):
    made = kind(tmp_path / "t")
    made.step()
    with pytest.warns(
        er.UncommittedWarning, match=r'closed with changes since commit 0, .*commit_every="5min"'
    ) as said:
        made.it.close()
    assert len(said) == 1
    assert f"It was opened at {__file__}" in str(said[0].message)


def test_a_table_that_nobody_has_any_more_commits_the_rest(tmp_path: Path):
    made = Alone(tmp_path / "t", commit_every=1000)
    made.step(3)
    del made
    gc.collect()
    again = Alone(tmp_path / "t")
    assert again.steps == 3
    again.it.close()


# ---------------------------------------------------------------- programs that end

CORE = """
from pathlib import Path
from test_commit_every import {kind}
made = {kind}(Path({path!r}), **{options!r})
begun = made.steps
"""
TORCH = """
import torch, embedrock as er, embedrock.torch as ert
layer = {layer}
model = torch.nn.Sequential(layer, torch.nn.Linear(4, 1))
optimizer = ert.optimizer(model, rows=ert.SGD, dense=torch.optim.SGD, lr=1.0)
class made:
    it = layer.table.group or layer.table
    steps = layer.table.steps
    def step(count=1):
        for _ in range(count):
            model(torch.tensor([[1]])).sum().backward()
            optimizer.step(); optimizer.zero_grad()
begun = made.steps
"""
KERAS = """
import keras, numpy as np, embedrock.keras as erk
layer = erk.{layer}(50, 4, path={path!r}, memory="4MiB", name="rows", **{options!r})
model = keras.Sequential([keras.Input((2,), dtype="int64"), layer, keras.layers.Flatten(), keras.layers.Dense(1)])
model.compile(optimizer=erk.optimizer("sgd"), loss="mse")
class made:
    it = layer.table
    steps = layer.table.steps
    def step(count=1):
        model.fit(np.ones((count, 2), np.int64), np.ones((count, 1)), batch_size=1, verbose=0)
begun = made.steps
"""


def program(kind: str, path: Path, options: dict[str, Any]) -> str:
    """Return the beginning of a program that has `made`, to step, and `begun`, the steps that it goes on from."""
    given = ", ".join(f"{name}={value!r}" for name, value in options.items())
    layers = {
        "ert.Embedding": f"ert.Embedding(50, 4, path={str(path)!r}, memory='4MiB', {given})",
        "ert.EmbeddingBag": f"ert.EmbeddingBag(50, 4, path={str(path)!r}, memory='4MiB', {given})",
        "ert.group": f"ert.Embedding(50, 4, name='a', group=er.Group(path={str(path)!r}, memory='4MiB', {given}))",
    }
    if kind in layers:
        return TORCH.format(layer=layers[kind])
    if kind.startswith("erk."):
        return KERAS.format(layer=kind.removeprefix("erk."), path=str(path), options=options)
    return CORE.format(kind=kind, path=str(path), options=options)


def run(kind: str, text: str) -> subprocess.CompletedProcess[str]:
    return programs.run(text, {"ert": programs.TORCH, "erk": programs.KERAS}.get(kind[:3], programs.CORE))


OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("ert.EmbeddingBag", "ert.group", "erk.EmbeddingBag")]
FRONTS = ["Alone", "Many", "ert.Embedding", pytest.param("erk.Embedding", marks=pytest.mark.slow)]
KILL = """
import os, time
made.step(25)
while made.it.last_commit < 2:
    made.it.is_open_here and time.sleep(0.01)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("kind", FRONTS + OTHERS)
def test_a_killed_program_goes_on_from_the_last_commit(kind: str, tmp_path: Path):
    begin = program(kind, tmp_path / "t", {"commit_every": 10})
    killed = run(kind, begin + KILL)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = run(kind, begin + "\nprint(begun, made.it.last_step, made.it.last_commit)\n")
    assert again.stdout == "20 20 2\n", again.stderr


@pytest.mark.parametrize(
    ("kind", "is_local"),
    [
        *(("Alone", True), ("Many", False)),
        *slow(("Alone", False), ("Many", True), *itertools.product(["ert.Embedding", "erk.Embedding"], [False, True])),
    ],
)
def test_a_program_that_ends_has_all_steps(kind: str, is_local: bool, tmp_path: Path):
    begin = program(kind, tmp_path / "t", {"commit_every": 10})
    text = begin + "\nmade.step(3)\n"
    if is_local:
        text = "def main():\n" + "".join(f"    {line}\n" for line in text.splitlines()) + "main()\n"
    done = run(kind, text)
    assert (done.returncode, done.stdout) == (0, "")
    assert "UncommittedWarning" not in done.stderr
    again = run(kind, begin + "\nprint(begun)\n")
    assert again.stdout == "3\n", done.stderr + again.stderr


@pytest.mark.parametrize("kind", [*FRONTS, *OTHERS])
def test_a_program_that_ends_without_a_commit_says_so_once(kind: str, tmp_path: Path):
    done = run(kind, program(kind, tmp_path / "t", {}) + "\nmade.step(3)\n")
    assert done.returncode == 0
    (said,) = [line for line in done.stderr.splitlines() if "UncommittedWarning" in line]
    assert "is closed with changes since commit 0, which are lost" in said
    assert 'Pass commit_every="5min" where it is made' in said


def test_the_end_of_a_program_that_starts_no_threads_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Show Python 3.12's: there, functions that `atexit` calls can start no threads."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    made = Alone(tmp_path / "t", commit_every=1000)
    made.step(3)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        made.it.close()
    again = Alone(tmp_path / "t")
    assert again.steps == 3
    again.it.close()
