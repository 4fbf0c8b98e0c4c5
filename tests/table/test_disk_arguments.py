"""What tables on disk refuse, and what they say then."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import multiprocessing
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.errors import (
    CacheTooSmallError,
    CorruptTableError,
    MemoryBudgetError,
    NewerFormatError,
    TableFileError,
)
from embedrock.store.manifest import SPEC_FORMAT
from on_system import on
from suites import FaultFS

# From Python 3.12 on, it warns where a process with threads forks.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

ROWS, DIM, BATCH = 600, 4, 10
RULE = er.Adam(lr=0.1)
Opener = Callable[[Path], er.Table]


def make(path: Path, rows: int | None = ROWS, **options: Any) -> er.Table:
    arguments: dict[str, Any] = {"rule": RULE, "path": path, **options}
    return er.Table(rows, DIM, **arguments)


def table_at(path: Path) -> Path:
    """Make a table with all rows in the folder."""
    with make(path) as table:
        table.update(np.arange(ROWS), np.ones((ROWS, DIM), np.float32))
        table.commit(step=1)
    return path


def everything_in(path: Path) -> dict[str, bytes]:
    """Return all files below a folder; the text of the lock does not matter."""
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != "LOCK"}


OPENERS: dict[str, Opener] = {"Table": make, "open": er.open, "open to read": lambda path: er.open(path, mode="r")}


# ---------------------------------------------------------------- something else is there


@pytest.mark.parametrize("opener", OPENERS)
def test_a_path_that_is_a_file(opener: str, tmp_path: Path):
    path = tmp_path / "users.rock"
    path.write_text("mine")
    with pytest.raises(TableFileError) as caught:
        OPENERS[opener](path)
    assert caught.value.filename == str(path)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("opener", OPENERS)
def test_a_path_below_a_file(opener: str, tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="file"):
        OPENERS[opener](tmp_path / "file" / "users.rock")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("mode", ["w", "r"])
def test_nothing_is_there(mode: str, tmp_path: Path):
    with pytest.raises(TableFileError, match=r"there is no table here.*Make one: er.Table") as caught:
        er.open(tmp_path / "users.rock", mode=mode)
    assert caught.value.errno == errno.ENOENT
    assert not (tmp_path / "users.rock").exists()
    with pytest.raises(TableFileError, match="there is no table here"):
        make(tmp_path / "users.rock", mode="r")
    assert not (tmp_path / "users.rock").exists()


def test_a_folder_of_something_else(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(TableFileError, match=r"must be empty, and has 'thesis.tex'"):
        make(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_a_folder_whose_parent_is_missing(tmp_path: Path):
    with pytest.raises(TableFileError, match=f"Make this one first: '{tmp_path}/below'$"):
        make(tmp_path / "below" / "users.rock")


NEAR = {
    "a file": ("thesis.tex", "A table is a folder, and this is a file"),
    "the folder around tables": ("", r"There are some in {0}: {0}/items\.rock, {0}/users\.rock: "),
    "a folder inside": ("users.rock/delta", r"It lies inside of one: {0}/users\.rock: "),
    "a file inside": ("users.rock/LOCK", r"It lies inside of one: {0}/users\.rock: "),
    "a typing error": ("user.rock", r"Did you mean {0}/users\.rock\?: "),
    "another name": ("parts", r"There are some in {0}: {0}/items\.rock, {0}/users\.rock: "),
}


@pytest.mark.parametrize("near", NEAR)
@pytest.mark.parametrize("mode", ["w", "r"])
def test_near_misses_are_told(near: str, mode: str, tmp_path: Path):
    for name in ("users.rock", "items.rock"):
        make(tmp_path / name).close()
    (tmp_path / "thesis.tex").write_text("mine")
    name, hint = NEAR[near]
    with pytest.raises(TableFileError, match=rf"there is no table here\. {hint.format(tmp_path)}"):
        er.open(tmp_path / name, mode=mode)


@pytest.mark.parametrize("inside", ["new.rock", "delta/new.rock", "delta"])
def test_a_table_is_not_made_inside_of_another(inside: str, tmp_path: Path):
    make(tmp_path / "users.rock").close()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(TableFileError, match=r"this is inside of the table at '.*/users\.rock'\. Choose another path"):
        make(tmp_path / "users.rock" / inside)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_folder_is_taken(tmp_path: Path):
    make(tmp_path).close()
    er.open(tmp_path).close()


OTHERS: list[tuple[dict[str, Any], str, str]] = [
    ({"rows": 700}, "rows.*700", "600"),
    ({"rows": None}, "rows.*None", "600"),
    ({"dtype": "bfloat16"}, "bfloat16", "float32"),
    ({"seed": 5}, "seed.*5", "0"),
    ({"init": er.Zeros()}, "Constant|Zeros", "Normal"),
    ({"rule": er.SGD(lr=0.1)}, "SGD", "Adam"),
    ({"rule": er.Adam(dense=True)}, "dense=True|'dense': True|\"dense\": true", "dense=False|'dense': False|false"),
]


@pytest.mark.parametrize(("change", "asked", "found"), OTHERS, ids=lambda value: repr(value)[:30])
def test_a_table_of_another_kind(change: dict[str, Any], asked: str, found: str, tmp_path: Path):
    path = table_at(tmp_path / "users.rock")
    before = everything_in(path)
    with pytest.raises(TableFileError) as caught:
        make(path, **change)
    assert re.search(asked, str(caught.value))
    assert re.search(found, str(caught.value))
    assert str(path) in str(caught.value)
    assert everything_in(path) == before
    make(path).close()  # nobody has it locked


def test_a_rule_with_other_numbers_is_no_other_kind(tmp_path: Path):
    path = table_at(tmp_path / "users.rock")
    with make(path, rule=er.Adam(lr=0.5)) as table, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert table.rule == er.Adam(lr=0.5)
        table.close()
    with make(path, rule=None) as table:
        assert table.rule == RULE


# ---------------------------------------------------------------- no permission


def _open_as_nobody(opener: str, path: Path) -> str:
    os.seteuid(65534)
    try:
        with OPENERS[opener](path):
            return "opened"
    except OSError as error:
        return f"{type(error).__name__} {error.errno} {error}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("closed", ["", "manifest", "..", "delta"])
def test_no_permission(opener: str, closed: str):
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("fork").Pool(1) as pool:
        (Path(folder) / "parent").mkdir(0o755)
        os.chmod(folder, 0o755)
        path = table_at(Path(folder) / "parent" / "users.rock")
        before = everything_in(path)
        os.chmod(path / closed, 0o700)
        told = pool.apply(_open_as_nobody, (opener, path))
        assert f" {errno.EACCES} " in told, told
        assert "Permission denied" in told
        assert "users.rock" in told
        assert everything_in(path) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_table_that_one_may_only_read():
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("fork").Pool(1) as pool:
        os.chmod(folder, 0o755)
        path = table_at(Path(folder) / "users.rock")
        assert pool.apply(_open_as_nobody, ("open to read", path)) == "opened"
        assert " 13 " in pool.apply(_open_as_nobody, ("open", path))


def test_a_lock_that_has_no_room():
    system = FaultFS()
    system.mkdir("/data")
    on(system)(make, Path("/data/users.rock")).close()

    def full(name: str, path: str) -> None:
        if name == "lock":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    system.before = full
    told = (
        r"to lock it, .* bytes\) more are needed, and .* are free\. Free some\. A table that is there can still be rea"
    )
    with pytest.raises(OSError, match=told) as caught:
        on(system).open("/data/users.rock")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "/data/users.rock")
    on(system).open("/data/users.rock", mode="r").close()


# ---------------------------------------------------------------- budgets


def named_memory(error: Exception) -> int:
    """Return the budget that an error says is enough, as a number of bytes."""
    return int(re.findall(r"(?:memory=|memory= to )(\d+)", str(error))[-1])


@pytest.mark.parametrize("rows", [ROWS, 10**6, None])
def test_a_budget_without_room_for_a_row_names_one_that_has_it(rows: int | None, tmp_path: Path):
    path = tmp_path / "users.rock"
    with pytest.raises(MemoryBudgetError, match=r"memory=16 B\. Raise memory= to .* or more") as caught:
        make(path, rows, memory=16)
    assert not path.exists()  # what cannot be opened is not made
    memory = named_memory(caught.value)
    with make(path, rows, memory=memory) as table:
        table.update([1], np.ones((1, DIM), np.float32))
        table.update([2], np.ones((1, DIM), np.float32))
        table.commit()
    with pytest.raises(MemoryBudgetError):
        er.open(path, memory=memory * 8 // 10)


def test_a_batch_that_does_not_fit_names_a_budget_that_holds_it(tmp_path: Path):
    path = table_at(tmp_path / "users.rock")
    ids, grads = np.arange(100), np.ones((100, DIM), np.float32)
    with er.open(path, memory=er.Table(ROWS, DIM, rule=RULE).memory_for(60)) as table:
        before = table.lookup(np.arange(ROWS))
        with pytest.raises(CacheTooSmallError, match=r"holds \d+ rows") as caught:
            table.update(ids, grads)
        np.testing.assert_array_equal(table.lookup(np.arange(ROWS)), before)
        assert table.steps == 1
        assert not table.uncommitted
    memory = named_memory(caught.value)  # as it can be pasted, and not rounded
    assert f"memory={memory} (" in str(caught.value)
    with er.open(path, memory=memory) as table:
        table.update(ids, grads)
        table.update(ids[::-1] + 200, grads)
        table.commit()
    with er.open(path, memory=memory * 9 // 10) as table, pytest.raises(CacheTooSmallError):
        table.update(ids, grads)


@pytest.mark.parametrize("depth", [1, 2, 7, 30])
def test_a_budget_too_small_for_the_depth_names_one_that_works(depth: int, tmp_path: Path):
    path = table_at(tmp_path / "users.rock")
    batches = [np.arange(k, k + BATCH) for k in range(0, ROWS, BATCH)]

    def train(memory: int) -> None:
        with er.open(path, memory=memory) as table:
            for ids in table.prefetch(batches, depth):
                table.lookup(ids)
                table.update(ids, np.ones((BATCH, DIM), np.float32))
            table.commit()

    with pytest.raises(CacheTooSmallError, match=f"depth={depth}") as caught, quiet():
        train(er.Table(ROWS, DIM, rule=RULE).memory_for(BATCH))
    memory = named_memory(caught.value)
    train(memory)
    with pytest.raises(CacheTooSmallError), quiet():
        train(memory * 8 // 10)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Close tables without a commit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", er.UncommittedWarning)
        yield


# ---------------------------------------------------------------- formats


def rewrite(path: Path, **changes: Any) -> None:
    """Change fields of the newest manifest, and its checksum."""
    file = max((path / "manifest").glob("*.json"))
    body = json.loads(file.read_bytes().split(b"\n")[0]) | changes
    line = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    file.write_bytes(line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n")


@pytest.mark.parametrize("opener", OPENERS)
def test_a_newer_format(opener: str, tmp_path: Path):
    path = table_at(tmp_path / "users.rock")
    rewrite(path, format=SPEC_FORMAT + 1, invention="new")
    before = everything_in(path)
    with pytest.raises(NewerFormatError, match=rf"format {SPEC_FORMAT + 1}.*[Ii]nstall a newer embedrock"):
        OPENERS[opener](path)
    assert everything_in(path) == before


@pytest.mark.parametrize("opener", OPENERS)
def test_damage_is_never_stepped_over(opener: str, tmp_path: Path):
    path = table_at(tmp_path / "users.rock")
    file = max((path / "manifest").glob("*.json"))
    file.write_bytes(file.read_bytes()[:-9])
    text = rf"{file.name}.*the newest whole commit is 0\. To read it: er\.open\("
    with pytest.raises(CorruptTableError, match=text):
        OPENERS[opener](path)
    with er.open(path, mode="r", at=0) as table:
        assert table.stats()["rows_touched"] == 0


# ---------------------------------------------------------------- arguments

BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"mode": "a"}, er.ArgumentError, "`mode` must be one of w, r: got 'a'"),
    ({"policy": "fifo"}, er.ArgumentError, "`policy` must be one of lru, clock, lfu: got 'fifo'"),
    ({"keep": 0}, er.ArgumentError, "`keep` must be a whole number of at least 1: got 0"),
    ({"keep": True}, er.ArgumentError, "`keep` must be a whole number of at least 1: got True"),
    ({"keep": 1.5}, er.ArgumentError, "`keep` must be"),
    ({"memory": "lots"}, er.ArgumentError, "`memory` is not a size: got 'lots'"),
    ({"memory": 0}, er.ArgumentError, "`memory` must be positive: got 0"),
    ({"directory": "tree"}, er.ArgumentError, "`directory` must be one of auto, direct, hashed"),
    ({"path": ""}, er.ArgumentError, "`path` must be the name of a folder: got ''"),
    ({"path": b"users"}, er.ArgumentError, "`path` must be the name of a folder: got b'users'"),
    ({"path": 5}, (TypeError, er.ArgumentError), "path|int"),  # type: ignore[list-item]
    ({"path": "a\0b"}, er.ArgumentError, "`path`"),
    ({"depth": 5}, er.UnknownArgumentError, "Table has no argument 'depth'"),
]


@pytest.mark.parametrize(("change", "error", "text"), BAD, ids=lambda value: repr(value)[:30])
def test_bad_arguments(change: dict[str, Any], error: type[Exception], text: str, tmp_path: Path):
    with pytest.raises(error, match=text):
        make(**{"path": tmp_path / "users.rock", **change})
    assert not (tmp_path / "users.rock").exists()


OF_DISK: list[tuple[dict[str, Any], str]] = [
    ({"mode": "r"}, "got mode='r'"),
    ({"mode": "a"}, "got mode='a'"),
    ({"keep": 5}, "got keep=5"),
    ({"policy": "lru"}, "got policy='lru'"),
    ({"lock": False}, "got lock=False"),
    ({"mode": "r", "keep": 5, "directory": "hashed"}, "got keep=5, mode='r'"),
]


@pytest.mark.parametrize(("options", "got"), OF_DISK, ids=lambda value: repr(value)[:30])
def test_a_table_in_ram_refuses_options_of_tables_on_disk(options: dict[str, Any], got: str):
    text = f"table 'users' has no `path`, and lives in RAM without the options of tables on disk: {got}"
    with pytest.raises(er.ArgumentError, match=text) as caught:
        er.Table(ROWS, DIM, name="users", **options)
    assert str(caught.value).endswith(". Pass path= as well to keep its rows on disk, or leave these out.")


def test_a_table_in_ram_takes_the_defaults_of_options_of_tables_on_disk():
    er.Table(ROWS, DIM, mode="w", keep=2, policy="lfu", lock=True).close()


def test_arguments_that_only_tables_on_disk_have(tmp_path: Path):
    path = table_at(tmp_path / "users.rock")
    with pytest.raises(er.ArgumentError, match=r'`at` \(1\) goes with mode="r".*rollback\(1\)'):
        er.open(path, at=1)
    with pytest.raises(er.ArgumentError, match="has no commit 7: it has 0, 1"):
        er.open(path, mode="r", at=7)
    with pytest.raises(er.ArgumentError, match="`at` must be a whole number of at least 0: got -1"):
        er.open(path, mode="r", at=-1)
    with er.open(path) as table:
        with pytest.raises(er.ArgumentError, match="has no commit 7: it has 0, 1"):
            table.rollback(7)
        with pytest.raises(er.ArgumentError, match=r"`step` of a commit must be a whole number.*got 'x'"):
            table.commit(step="x")  # pyright: ignore[reportArgumentType]
        for name in ("", "x" * 101, "a\nb", 5):
            with pytest.raises(er.ArgumentError, match="`name` of a commit must be"):
                table.commit(name=name)  # pyright: ignore[reportArgumentType]
        assert table.last_commit == 1


@pytest.mark.parametrize("step", [np.int64(7), -3, 2**62])
def test_steps_of_any_kind(step: int, tmp_path: Path):
    with make(tmp_path / "users.rock") as table:
        table.commit(step=step)
        assert table.last_step == step


@pytest.mark.parametrize("step", [2**63, -(2**63) - 1, 2**70])
def test_a_step_that_no_manifest_can_hold(step: int, tmp_path: Path):
    with make(tmp_path / "users.rock") as table:
        with pytest.raises(er.ArgumentError, match="`step` of a commit"):
            table.commit(step=step)
        table.commit(step=1)
    with er.open(tmp_path / "users.rock") as table:
        assert table.last_step == 1
