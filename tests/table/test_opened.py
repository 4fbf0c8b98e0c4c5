"""Cells of a notebook that are run again: what they made before still has the table at their path."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.errors import TableLockedError
from embedrock.table.storage import StorageManager
from forked import in_child

ONES = np.ones((1, 4), np.float32)


@pytest.mark.parametrize("function", [er.opened, er.close])
def test_what_is_no_path(function: Callable[[Any], Any]):
    for path in (None, 3, "s3://bucket/users.rock"):
        with pytest.raises(er.ArgumentError, match="`path` must be "):
            function(path)


class Notebook:
    """Cells that run in one namespace, which keeps what they made, and the traceback of the last error."""

    def __init__(self, path: Path) -> None:
        self.space: dict[str, Any] = {"er": er, "ones": ONES, "path": str(path), "__name__": "__main__"}
        self.error: BaseException | None = None

    def run(self, number: int, cell: str) -> BaseException | None:
        """Run a cell; keep its error, as `sys.last_exc` does, and return it."""
        try:
            exec(compile(textwrap.dedent(cell), f"<cell {number}>", "exec"), self.space)
        except BaseException as error:
            self.error = error
            return error
        return None


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    made = tmp_path / "users.rock"
    yield made
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", er.UncommittedWarning)
        er.close(made)


@pytest.fixture
def notebook(path: Path) -> Notebook:
    return Notebook(path)


MAKE = """
table = er.Table(rows=100, dim=4, path=path, rule=er.SGD(lr=1.0), init=er.Zeros())
table.update([1], ones)
"""


def test_a_cell_that_is_run_again_is_told_how(notebook: Notebook, path: Path):
    assert notebook.run(1, MAKE) is None
    for cell in (MAKE, "table = er.open(path)", "table = er.Table(100, 4, path=path)"):
        error = notebook.run(2, cell)
        assert isinstance(error, TableLockedError)
        assert (error.errno, error.filename) == (errno.EWOULDBLOCK, str(path))
        assert error.strerror == (
            f"this process has it open for writing already: table {str(path)!r}, since <cell 1>:2, and it has "
            f"changes that no commit has. Go on with it, er.opened({str(path)!r}), or close it first, "
            f"er.opened({str(path)!r}).commit(); er.close({str(path)!r}). (A notebook's cell that begins with either "
            "can be run again.) Or open it for "
            'reading, mode="r"'
        )
    table = notebook.space["table"]  # which nothing has happened to
    assert table.lookup([1])[0, 0] == -1
    assert table.commit() == 1
    assert "no commit has" not in str(notebook.run(3, MAKE))


@pytest.mark.parametrize("commit", ["table.commit()", ""], ids=["committed", "not committed"])
def test_a_cell_that_begins_with_close_goes_on_from_the_last_commit(notebook: Notebook, commit: str):
    cell = f"er.close(path){MAKE}{commit}"
    for run in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert notebook.run(run, cell) is None
        lost = run > 0 and not commit
        assert [one.category for one in caught] == [er.UncommittedWarning] * lost
        assert all(one.filename == f"<cell {run}>" and one.lineno == 1 for one in caught)
        assert notebook.space["table"].lookup([1])[0, 0] == (-1 - run if commit else -1)


def test_a_cell_that_takes_the_open_table_goes_on_from_its_rows(notebook: Notebook):
    cell = "table = er.opened(path) or er.Table(rows=100, dim=4, path=path, rule=er.SGD(lr=1.0), init=er.Zeros())"
    for run in range(3):
        assert notebook.run(run, f"{cell}\ntable.update([1], ones)") is None
        assert notebook.space["table"].lookup([1])[0, 0] == -1 - run
    notebook.space["table"].commit()


def test_a_traceback_that_keeps_a_table(notebook: Notebook, path: Path):
    cell = """
    def train():
        table = er.Table(rows=100, dim=4, path=path)
        table.lookup([100])
    train()
    """
    assert isinstance(notebook.run(1, cell), er.IdError)
    error = notebook.run(2, cell)
    assert isinstance(error, TableLockedError)
    advice = re.search(r"er\.close\(.*?\)", str(error))
    assert advice is not None
    assert notebook.run(3, advice[0]) is None
    assert isinstance(notebook.run(4, cell), er.IdError)
    er.close(path)


def test_ctrl_c_while_a_table_is_opened(notebook: Notebook, path: Path, monkeypatch: pytest.MonkeyPatch):
    resume = StorageManager.resume

    def interrupted(*args: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        resume(*args)

    with monkeypatch.context() as patch:
        patch.setattr(StorageManager, "resume", interrupted)
        assert isinstance(notebook.run(1, MAKE), KeyboardInterrupt)
    assert isinstance(er.opened(path), er.Table)  # which the traceback has
    assert isinstance(notebook.run(2, MAKE), TableLockedError)
    assert notebook.run(3, f"er.close(path){MAKE}table.commit(); table.close()") is None
    with monkeypatch.context() as patch:
        patch.setattr(StorageManager, "resume", interrupted)
        assert isinstance(notebook.run(4, "er.open(path)"), KeyboardInterrupt)
    assert er.opened(path) is None
    assert notebook.run(5, MAKE + "table.commit()") is None
    assert notebook.space["table"].lookup([1])[0, 0] == -2


def test_a_table_that_nobody_has_any_more_is_no_hindrance(notebook: Notebook):
    assert notebook.run(1, MAKE + "table.commit(); table.itself = [table]; del table") is None
    gc.disable()
    try:
        assert notebook.run(2, MAKE) is None
    finally:
        gc.enable()
    assert notebook.space["table"].lookup([1])[0, 0] == -2
    notebook.space["table"].commit()


def test_what_is_open_is_found_by_any_name_of_its_path(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert er.opened(path) is None
    er.close(path)  # nothing happens
    with er.Table(100, 4, path=path) as table:
        (tmp_path / "link").symlink_to(tmp_path)
        monkeypatch.chdir(tmp_path)
        for name in (path, "users.rock", f"{tmp_path}/link/users.rock", f"{tmp_path}/./users.rock"):
            assert er.opened(name) is table
        with er.open(path, mode="r"):  # a reader is in nobody's way
            assert er.opened(path) is table
    assert er.opened(path) is None
    with er.open(path, mode="r"):
        assert er.opened(path) is None


def test_a_child_has_not_opened_what_its_parent_has(path: Path):
    def look() -> None:
        assert er.opened(path) is None
        er.close(path)
        with pytest.raises(TableLockedError, match=f"another writer has the table open: process {os.getppid()} on"):
            er.open(path)

    with er.Table(100, 4, path=path, rule=er.SGD(lr=1.0)) as table:
        in_child(look)
        table.update([1], ONES)
        table.commit()


def test_layers_that_fail_leave_no_table_open(path: Path):
    ert = pytest.importorskip("embedrock.torch")
    makers: list[Callable[[], Any]] = [
        lambda: ert.Embedding(100, 4, path=path, max_norm=-1),
        lambda: ert.EmbeddingBag(100, 4, path=path, norm_type="two"),
        lambda: ert.Embedding(100, 4, path=path, padding_idx=100),
    ]
    kept = []
    for make in makers:
        with pytest.raises(er.ArgumentError) as caught:
            make()
        kept.append(caught)  # and so the frames that the error came through
        assert er.opened(path) is None
    ert.Embedding(100, 4, path=path).table.close()


def test_two_layers_with_one_path_are_told(path: Path, capsys: pytest.CaptureFixture[str]):
    ert = pytest.importorskip("embedrock.torch")
    layer = ert.Embedding(100, 4, path=path)
    told = rf"already: Embedding\(100, 4\) at '.*users\.rock', since {re.escape(__file__)}:\d+\. Go on with it"
    with pytest.raises(TableLockedError, match=told):
        ert.EmbeddingBag(100, 4, path=path)
    both = ert.EmbeddingBag(er.opened(path))
    assert both.table is layer.table
    layer.table.close()
