"""What was forgotten does not come back: by no door, after any sequence of calls, killed at any instant."""

from __future__ import annotations

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
from embedrock.machine.vfs import OS_SYSTEM
from embedrock.store.nearby import holds_table
from forgetting_life import ACTS, KINDS, WEIGHTS, Book, Life, check, shown_by

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
    @settings(max_examples=12, deadline=None)
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
