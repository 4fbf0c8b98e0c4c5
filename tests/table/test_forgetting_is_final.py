"""What was forgotten does not come back: by no door, after any sequence of calls, killed at any instant."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import embedrock as er
from embedrock.io.vfs import OS_SYSTEM
from embedrock.store.reading import holds_table
from forgetting_life import ACTS, DIM, IDS, KINDS, WEIGHTS, Book, Life, check, shown_by
from format_reader import read_group
from on_system import on
from suites import FaultFS

PROGRAM = Path(__file__).parents[1] / "support" / "forgetting_life.py"
SOME_ACTS = st.lists(st.sampled_from([name for name, weight in WEIGHTS.items() for _ in range(weight)]), max_size=40)


def live(kind: str, acts: list[str], draw: int) -> int:
    """Do things to tables, and look at each commit after each; return how many rows were withheld."""
    with tempfile.TemporaryDirectory() as folder:
        path, book, withheld = Path(folder) / "t", Book(kind), 0
        life = Life(path, kind, draw, 0, book, OS_SYSTEM)
        for name in ("assign", "assign", "commit", *acts):
            ACTS[name](life)
            if name in ("commit", "named", "rollback", "compact", "reopen"):
                withheld += check(path, book)
                content = book.now
                assert shown_by(life.folder) == {name: content.rows[table] for name, table in content.names.items()}
        life.commit()
        life.close()
        check(path, book)
        check_bounded(path)
        return withheld


def check_bounded(path: Path) -> None:
    """Fail if files say what was forgotten where no kept commit is older."""
    with er.open(path, keep=1) as folder:
        for name in {each["name"] for each in folder.commits()} - {None}:
            folder.release(name)
        folder.commit()
        folder.compact()
        assert folder.verify().problems == []
    newest = max((path / "manifest").glob("*.json"))
    assert json.loads(newest.read_bytes().splitlines()[0]).get("forgotten", []) == []


@pytest.mark.parametrize("kind", KINDS)
def test_no_sequence_of_calls_brings_a_value_back(kind: str):
    @settings(max_examples=6, deadline=None)
    @given(acts=SOME_ACTS, draw=st.integers(0, 2**32))
    def every(acts: list[str], draw: int) -> None:
        live(kind, acts, draw)

    every()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_sequence_of_many_brings_a_value_back(kind: str):
    @settings(max_examples=300, deadline=None)
    @given(acts=SOME_ACTS, draw=st.integers(0, 2**32))
    def every(acts: list[str], draw: int) -> None:
        live(kind, acts, draw)

    every()


def test_rows_are_withheld_in_such_sequences():
    acts = ["named", "forget", "commit", "rollback", "assign", "commit"] * 3
    assert all(live(kind, acts, 1) for kind in KINDS)


def test_a_rollback_that_brings_a_table_back_hides_nothing(tmp_path: Path):
    group = made_group(tmp_path)
    fill(group, "users")
    first = group.commit(name="first")
    group.rename("users", "old")
    group.commit()
    fill(group, "users")  # another table
    both = group.commit(name="both")
    group.rollback(first)
    group.rollback(both)
    group["users"].forget([2])
    group.commit()
    assert held(tmp_path, both) == {"users": [1, 3], "old": [1, 2, 3]}
    assert held(tmp_path, first) == {"users": [1, 3]}  # which had that name, too
    group["old"].forget([3])
    group.commit()
    assert held(tmp_path, both) == {"users": [1, 3], "old": [1, 2]}
    assert held(tmp_path, first) == {"users": [1]}


def test_an_id_that_a_table_forgets_says_nothing_of_the_one_that_had_its_name(tmp_path: Path):
    group = made_group(tmp_path)
    for name in ("users", "new"):
        fill(group, name)
    first = group.commit(name="first")
    group["users"].forget([2])
    group.commit()
    group.rename("users", "old")
    group.rename("new", "users")
    group.commit()
    group["users"].forget([2])
    group.commit()
    assert held(tmp_path, first) == {"users": [1, 3], "new": [1, 3]}
    group.rollback(first)
    assert {name: group[name].export()[0].tolist() for name in group} == {"users": [1, 3], "new": [1, 3]}


def made_group(path: Path) -> er.Group:
    return er.Group(path=path / "t", memory="4MiB")


def fill(group: er.Group, name: str) -> None:
    table = group.table(name, rows=IDS, dim=DIM, init=er.Zeros(), rule=er.SGD(lr=0.1))
    table.assign([1, 2, 3], np.ones((3, DIM), np.float32))


def held(path: Path, commit: int) -> dict[str, list[int]]:
    """Return the ids of a commit, as it is read and by the description of the format alone."""
    told = {name: sorted(rows) for name, (_, rows) in read_group(path / "t", commit).items()}
    with er.open(path / "t", mode="r", at=commit, kind=er.Group) as group:
        assert {name: group[name].export()[0].tolist() for name in group} == told
    return told


class Victims:
    """Processes that kill themselves in a call of the operating system: children of `forgetting_life.py`."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line.endswith("\n"), "the server has died"
        return line.strip()

    def live(self, **arguments: object) -> tuple[list[str], int]:
        """Let one live; return what it said, and its exit status."""
        assert self._server.stdin is not None
        print(json.dumps(arguments), file=self._server.stdin, flush=True)
        said = list[str]()
        while not (line := self._line()).startswith("exit "):
            said.append(line)
        return said, int(line.removeprefix("exit "))

    def close(self) -> None:
        self._server.communicate()


def kill_again_and_again(kind: str, path: Path, kills: int, seed: int) -> None:
    rng, book, victims = np.random.default_rng(seed), Book(kind), Victims()
    died = value = withheld = 0
    try:
        while died < kills:
            how = {"draw": int(rng.integers(2**32)), "dies_at": int(rng.integers(1, 500))}
            said, status = victims.live(path=str(path), kind=kind, value=value, acts=60, **how)
            assert status in (0, -signal.SIGKILL), said
            died += status != 0
            for line in said:
                if line != "end":
                    verb, *what = json.loads(line)
                    getattr(book, verb)(*what)
            value += 1000
            if not holds_table(OS_SYSTEM, str(path)):
                assert book.last == 0
                book = Book(kind)
                continue
            with er.open(path, mode="r") as reader:
                book.found(reader.last_commit)
            withheld += check(path, book)
    finally:
        victims.close()
    assert book.dead
    print(f"kills of {kind!r}: {died}, values forgotten: {len(book.dead)}, withheld when read: {withheld}, bad: 0")


@pytest.mark.parametrize("kind", ["comes and goes"])
def test_kills(kind: str, tmp_path: Path):
    kill_again_and_again(kind, tmp_path / "t", 6, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_kills(kind: str, tmp_path: Path):
    kill_again_and_again(kind, tmp_path / "t", 100, seed=5)


# ---------------------------------------------------------------- a disk that fails, and loses power

LIVES: dict[str, list[str]] = {
    "rolled back": ["named", "forget", "commit", "assign", "rollback", "commit", "forget", "rollback", "assign"],
    "compacted": ["named", "assign", "forget", "compact", "commit", "compact", "rollback", "compact", "reopen"],
    "renamed": ["named", "rename", "forget", "commit", "rename", "forget", "rollback", "commit", "reopen", "release"],
}
PATH = Path("/data/t")


def made_system() -> FaultFS:
    system = FaultFS()
    system.mkdir("/data")
    system.fsync_folder("/")
    return system


def live_on(system: FaultFS, kind: str, acts: list[str], book: Book) -> int:
    """Do things to tables; after an error they are opened again, and go on. Returns how many errors there were."""
    life, errors = None, 0
    for name in ("assign", "commit", *acts, "commit"):
        try:
            life = life or Life(PATH, kind, 1, 0, book, system)
            ACTS[name](life)
        except (OSError, er.EmbedrockError):
            errors += 1
            system.mend()
            assert errors < 3, "it fails although the system works again"
            if life is not None:
                with contextlib.suppress(OSError, er.EmbedrockError):
                    life.close()
                with on(system).open(PATH, mode="r") as reader:
                    book.found(reader.last_commit)
                life.restart()
    assert life is not None
    life.close()
    return errors


def check_after_crash(system: FaultFS, book: Book) -> None:
    """Look at all commits that a loss of power has left, then as a writer, who removes what is left over."""
    found = copy.deepcopy(book)
    try:
        with on(system).open(PATH, mode="r") as reader:
            found.found(reader.last_commit)
    except er.TableFileError:
        assert book.last == 0
        return
    check(PATH, found, system)
    with on(system).open(PATH, keep=9) as writer:
        content = found.now
        assert shown_by(writer) == {name: content.rows[table] for name, table in content.names.items()}
        number = writer.last_commit + 1
        found.begin(number)
        assert writer.commit() == number
        found.done(number)
    check(PATH, found, system)


def crash_everywhere(kind: str, acts: list[str], share: float) -> int:
    """Lose power after each call that changes something, in every way; return in how many."""
    system, rng, seen, failures = made_system(), np.random.default_rng(0), set[int](), list[BaseException]()
    book = Book(kind)

    def after(name: str, path: str) -> None:
        if name not in CHANGES or failures:
            return
        for clone in system.crash_clones(rng):
            key = hash((frozenset(clone.files().items()), book.last))
            if key not in seen and rng.random() < share:
                seen.add(key)
                try:
                    check_after_crash(clone, book)
                except BaseException as error:
                    error.add_note(f"after {name} {path}, {clone.kind}")
                    failures.append(error)

    system.after = after
    live_on(system, kind, acts, book)
    if failures:
        raise failures[0]
    return len(seen)


CHANGES = {"open", "pwrite", "fdatasync", "fsync_folder", "mkdir", "rmdir", "link", "unlink"}


@pytest.mark.parametrize("life", LIVES)
def test_a_loss_of_power_brings_nothing_back(life: str):
    assert crash_everywhere("group" if life == "renamed" else "comes and goes", LIVES[life], share=0.015) > 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("life", LIVES)
def test_no_loss_of_power_brings_anything_back(life: str, kind: str):
    states = crash_everywhere(kind, LIVES[life], share=1)
    print(f"crash states of {life!r}, {kind!r}: {states:,}, bad: 0")


def fail_everywhere(kind: str, acts: list[str], every: int) -> int:
    """Let one call after another fail; return how many errors that made."""
    dry = made_system()
    live_on(dry, kind, acts, Book(kind))
    errors = 0
    for number, op in enumerate(range(4, dry.ops, every)):
        system, book = made_system(), Book(kind)
        system.fail(op, (errno.EIO, errno.ENOSPC)[number % 2])
        try:
            errors += live_on(system, kind, acts, book)
            system.mend()
            check(PATH, book, system)
        except BaseException as error:
            error.add_note(f"call {op} failed: {system.journal[op]}")
            raise
    return errors


@pytest.mark.parametrize("kind", ["group"])
def test_a_failing_disk_brings_nothing_back(kind: str):
    assert sum(fail_everywhere(kind, acts, 61) for acts in LIVES.values()) > 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_failure_of_a_disk_brings_anything_back(kind: str):
    print(f"errors: {sum(fail_everywhere(kind, acts, 1) for acts in LIVES.values())}, bad: 0")
