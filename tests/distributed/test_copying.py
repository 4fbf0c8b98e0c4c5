"""`copy_table` beside writers: the copy has one commit, the one before or the new one, whatever happens meanwhile."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
import programs
from embedrock.distributed import commits, copying
from embedrock.distributed.commits import ShardFolders, part_to_open
from embedrock.distributed.copying import copy_table
from embedrock.errors import TableFileError, TableLockedError
from embedrock.io.vfs import OS_SYSTEM, System
from embedrock.store import manifest as manifests
from embedrock.store.verify import verify
from on_system import on
from slow import slow
from suites import FaultFS

IDS, DIM = np.arange(120), 4
ARGUMENTS: dict[str, Any] = {"rows": 1000, "dim": DIM, "rule": er.SGD(lr=1.0), "init": er.Zeros(), "memory": "1MiB"}


class NoLinks(System):
    """A system in which the source and the copy are on two file systems."""

    def link(self, source: str, target: str) -> None:
        if "/manifest/." not in source:  # drafts are in the folder of the copy
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), source)
        super().link(source, target)


class FaultNoLinks(NoLinks, FaultFS):
    """The same in memory."""


SYSTEMS = {"links": OS_SYSTEM, "no links": NoLinks()}


def train(table: er.Table, steps: int = 1) -> None:
    """Step all rows. Each weight is minus the number of steps."""
    for _ in range(steps):
        table.update(IDS, np.ones((len(IDS), DIM), np.float32))
        table.commit(step=table.steps)


def check(path: str, system: System = OS_SYSTEM, least: int = 1) -> int:
    """Check that a copy is whole; return the number of its commit."""
    assert not verify(system, path).problems
    with on(system).open(path, mode="r", memory="1MiB") as found:
        assert found.steps >= least
        assert len(found.export()[0]) == (len(IDS) if found.steps else 0)
        assert np.all(found.lookup(IDS) == -found.steps)
        return found.last_commit


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = str(tmp_path / "t.rock")
    with er.Table(**ARGUMENTS, path=path) as table:
        train(table, 3)
    return path


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_only_new_files_travel(source: str, tmp_path: Path, system: System) -> None:
    target, how = str(tmp_path / "copy"), "linked" if system is OS_SYSTEM else "written"
    first = copy_table(source, target, system)
    assert first["commit"] == check(target) == 3
    assert first[how] == len(manifests.read(OS_SYSTEM, source, 3).files)
    again = copy_table(source, target, system)
    assert (again[how], again["there"], again["bytes"]) == (0, first[how], 0)
    with er.open(source) as table:
        train(table)
        assert copy_table(source, target, system)[how] == 1
        assert check(target) == 4
        table.compact()
        last = copy_table(source, target, system)
    assert last["commit"] == check(target) == 5
    names = {
        os.path.relpath(os.path.join(parent, name), target) for parent, _, files in os.walk(target) for name in files
    }
    kept = manifests.read(OS_SYSTEM, target, 5).files
    assert names == {*kept, "LOCK", "manifest/0000000005.json", "manifest/0000000005.copied"}
    with er.open(target) as copied:  # a table like any other
        assert copied.uuid == manifests.read(OS_SYSTEM, source, 5).uuid
        train(copied)
    check(target)


def test_files_are_shared_by_links_and_not_by_bytes(source: str, tmp_path: Path) -> None:
    for name, system in SYSTEMS.items():
        target = tmp_path / name
        copy_table(source, str(target), system)
        for file in manifests.read(OS_SYSTEM, source, 3).files:
            assert os.path.samefile(f"{source}/{file}", target / file) == (system is OS_SYSTEM)


def test_removed_files_are_copied_from_their_open_descriptors(source: str, tmp_path: Path) -> None:
    class Drops(System):
        def link(self, source: str, target: str) -> None:
            if "/delta/" in source:
                os.unlink(source)
            super().link(source, target)

    assert copy_table(source, str(tmp_path / "copy"), Drops())["written"] >= 1
    check(str(tmp_path / "copy"))


def test_a_dropped_commit_gives_way_to_the_next(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest, seen = commits._last_numbers, list[tuple[int, ...]]()

    def then_train(system: System, path: str) -> tuple[int, ...]:
        seen.append(newest(system, path))
        if len(seen) == 1:
            with er.open(path) as table:
                train(table, 3)
        return seen[-1]

    monkeypatch.setattr(commits, "_last_numbers", then_train)
    assert copy_table(source, str(tmp_path / "copy"))["commit"] == 6
    assert check(str(tmp_path / "copy")) == 6


def test_a_missing_file_is_an_error(source: str, tmp_path: Path) -> None:
    os.unlink(f"{source}/{manifests.read(OS_SYSTEM, source, 3).files[0]}")
    with pytest.raises(er.CorruptTableError, match="is missing: the commit needs it"):
        copy_table(source, str(tmp_path / "copy"))
    assert not (tmp_path / "copy").exists()


def test_forgotten_rows_leave_the_copy_when_it_is_made_again(source: str, tmp_path: Path) -> None:
    target = str(tmp_path / "copy")
    with er.open(source) as table:
        table.assign([7], np.full((1, DIM), 1234.5, np.float32))
        table.commit(step=3)
        copy_table(source, target)
        table.forget([7])
        table.commit(step=3)
        table.compact()
        needle = np.full(DIM, 1234.5, np.float32).tobytes()
        has = lambda: any(needle in each.read_bytes() for each in Path(target).rglob("*") if each.is_file())  # noqa: E731
        assert has()
        copy_table(source, target)
        assert not has()


# ---------------------------------------------------------------- what is refused


def refused(source: str, target: str, text: str) -> None:
    before = sorted(map(str, Path(target).rglob("*")))
    with pytest.raises(TableFileError, match=text) as caught:
        copy_table(source, target)
    assert "Copy to another folder" in str(caught.value) or "hoose another path" in str(caught.value)
    assert sorted(map(str, Path(target).rglob("*"))) == before


def test_other_content_is_refused(source: str, tmp_path: Path) -> None:
    other = str(tmp_path / "other")
    with er.Table(**ARGUMENTS, path=other):
        pass
    refused(source, other, "another table lies here, [0-9a-f]{32}, and not a copy of")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    refused(source, str(tmp_path / "mine"), "must be empty, and has 'notes.txt'")
    refused(source, f"{source}/base", "inside of the table at")
    refused(source, source, "did not make commit 3 here: this table has changes of its own")


def test_a_copy_with_changes_of_its_own_is_refused(source: str, tmp_path: Path) -> None:
    target = str(tmp_path / "copy")
    copy_table(source, target)
    with er.open(target) as copied:
        with pytest.raises(TableLockedError, match="another writer has the table open"):
            copy_table(source, target)
        train(copied)
    refused(source, target, "did not make commit 4 here")
    with er.open(source) as table:
        train(table, 3)
    refused(source, target, "did not make commit 4 here")


def test_another_history_is_refused(source: str, tmp_path: Path) -> None:
    backup, target = str(tmp_path / "backup"), str(tmp_path / "copy")
    shutil.copytree(source, backup)
    with er.open(source) as table:
        train(table)
    copy_table(source, target)
    shutil.rmtree(source)
    shutil.copytree(backup, source)
    refused(source, target, "has another history than commit 4 here: its last commit is 3")
    with er.open(source) as table:
        train(table)
    refused(source, target, "has another history than commit 4 here|another file than that of")
    assert check(target) == 4


# ---------------------------------------------------------------- groups, and parts


def test_a_group_is_copied(tmp_path: Path) -> None:
    source, target = str(tmp_path / "m.rock"), str(tmp_path / "copy")
    with er.Group(path=source, memory="1MiB") as group:
        for name in ("users", "items"):
            group.table(name, 1000, DIM, rule=er.SGD(lr=1.0), init=er.Zeros())
        group.update(dict.fromkeys(group, IDS), {name: np.ones((len(IDS), DIM)) for name in group})
        group.commit()
        copy_table(source, target)
    with er.open(target, mode="r", kind=er.Group) as copied:
        assert np.all(copied["items"].lookup(IDS) == -1)


def open_parts(path: str, ranks: int) -> list[er.Table]:
    return [er.Table(**ARGUMENTS, path=part_to_open(path, rank, ranks, "users"), seed=1) for rank in range(ranks)]


def test_parts_are_copied_as_of_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = str(tmp_path / "s.rock"), str(tmp_path / "copy")
    tables = open_parts(source, 2)
    for step in (1, 2):
        for table in tables:
            table.commit(step=step)
    tables[0].commit(step=3)  # cut short
    assert copy_table(source, target)["commit"] == 2
    with er.open(target, mode="r") as copied:
        assert copied.last_step == 2
    tables[1].commit(step=3)

    def killed(self: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(copying.FolderCopy, "tidy", killed)
        with pytest.raises(KeyboardInterrupt):
            copy_table(source, target)
    one, two = ShardFolders(target, 2).parts
    os.unlink(manifests.path_of(two, 3))  # as by a kill between the two
    with er.open(target, mode="r") as copied:
        assert copied.last_step == 2
    assert copy_table(source, target)["commit"] == 3
    assert manifests.numbers(OS_SYSTEM, one) == manifests.numbers(OS_SYSTEM, two) == [3]
    for table in tables:
        table.close()
    with er.open(target, mode="r") as copied:
        assert copied.last_step == 3


def test_another_number_of_parts_is_refused(source: str, tmp_path: Path) -> None:
    for ranks in (2, 3):
        for table in open_parts(str(tmp_path / f"{ranks}"), ranks):
            table.commit(step=1)
            table.close()
    copy_table(str(tmp_path / "2"), str(tmp_path / "copy"))
    refused(str(tmp_path / "3"), str(tmp_path / "copy"), "is in 2 parts, and the one to copy in 3")
    refused(source, str(tmp_path / "copy"), "must be empty, and has 'SHARDED'")
    refused(str(tmp_path / "3"), source, "parts of a table go to a folder of their own")


# ---------------------------------------------------------------- crashes, kills, and writers


@pytest.mark.parametrize("make", [FaultFS, FaultNoLinks])
@pytest.mark.parametrize("clones", [2, *slow(9)])
def test_after_a_crash_the_copy_is_the_one_before_or_the_new_one(make: type[FaultFS], clones: int) -> None:
    system, rng, states = make(), np.random.default_rng(0), list[str]()
    with on(system).Table(**ARGUMENTS, path="/t") as table:
        train(table, 2)
        old = 0
        for new in (2, 4):

            def lose_power(name: str, path: str, old: int = old, new: int = new) -> None:
                for clone in itertools.islice(system.crash_clones(rng), clones):
                    states.append(f"{clone.kind}, at {name} {path}")
                    clone.__class__ = make
                    has_table = clone.exists("/c/manifest") and bool(manifests.numbers(clone, "/c"))
                    assert (check("/c", clone) if has_table else 0) in (old, new), states[-1]
                    assert copy_table("/t", "/c", clone)["commit"] == check("/c", clone) == new, states[-1]

            system.after = lose_power
            copy_table("/t", "/c", system)
            system.after, old = None, new
            train(table)
            table.compact()
    assert len(states) > 40 * clones


KILLED = """
import os, signal, sys
from embedrock.distributed.copying import copy_table
from embedrock.io.vfs import System
from test_copying import NoLinks

source, target, calls, links = sys.argv[1:]
left, base = int(calls), System if links == "links" else NoLinks

def counted(name):
    def call(self, *args):
        global left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return getattr(base, name)(self, *args)
    return call

names = "open", "pwrite", "link", "unlink", "mkdir", "fsync_folder", "fdatasync", "lock"
print(copy_table(source, target, type("Counted", (base,), {name: counted(name) for name in names})())["commit"])
"""

TRAINER = """
import os, sys
import embedrock as er
from test_copying import ARGUMENTS, train

path, stop = sys.argv[1:]
with er.Table(**ARGUMENTS, path=path, commit_every=None) as table:
    while not os.path.exists(stop):
        train(table)
        if table.steps % 5 == 0:
            table.compact()
print(table.last_commit)
"""


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[str]:
    """Yield the path of a table that another process trains and compacts all the time."""
    path, stop, ended = str(tmp_path / "live.rock"), tmp_path / "stop", list[Any]()
    program = partial(programs.run, TRAINER, programs.CORE, path, str(stop))
    programs.run("")  # the server ends with the thread that has started it
    thread = threading.Thread(target=lambda: ended.append(program()))
    thread.start()
    while not (Path(path, "manifest").exists() and manifests.numbers(OS_SYSTEM, path)):
        time.sleep(0.01)
        assert thread.is_alive(), ended
    yield path
    stop.touch()
    thread.join()
    assert ended[0].returncode == 0, ended[0].stderr


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
@pytest.mark.parametrize("copies", [20, *slow(300)])
def test_a_table_is_copied_while_another_process_trains_it(
    trained: str, tmp_path: Path, system: System, copies: int
) -> None:
    seen = set[int]()
    while len(seen) < copies:
        made = copy_table(trained, str(tmp_path / "copy"), system)["commit"]
        assert check(str(tmp_path / "copy"), least=0) == made
        seen.add(made)


def killed(source: str, target: str, calls: int, links: str) -> bool:
    """Copy in a process that is killed at a call; return whether it was."""
    ended = programs.run(KILLED, (*programs.CORE, "test_copying"), source, target, str(calls), links)
    assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
    return ended.returncode != 0


@pytest.mark.parametrize("links", SYSTEMS)
@pytest.mark.parametrize("each", [7, *slow(1)])
def test_a_killed_copy_is_finished_by_the_next(source: str, tmp_path: Path, links: str, each: int) -> None:
    target, kills, old = str(tmp_path / "copy"), 0, 0
    for new in (3, 5):
        calls = 1
        while killed(source, target, calls, links):
            has_table = Path(target, "manifest").exists() and bool(manifests.numbers(OS_SYSTEM, target))
            assert (check(target) if has_table else 0) in (old, new)
            calls, kills = calls + each, kills + 1
        assert check(target) == new
        with er.open(source) as table:
            train(table)
            table.compact()
        old = new
    print(f"kills: {kills}")
    assert kills >= 40 // each
