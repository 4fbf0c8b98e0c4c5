"""Real kills: whatever a process did when it died, its table opens as of a commit, and none acknowledged is lost."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import embedrock as er
from embedrock.errors import CorruptTableError
from embedrock.io.vfs import OS_SYSTEM
from embedrock.store import manifest as manifests
from embedrock.store.reading import holds_table
from embedrock.store.verify import verify
from kill_loop import INTERRUPTED, KINDS, PLANTED, train
from same_tables import check_changes, check_same
from slow import slow
from table_files import lists_of_commits

PROGRAM = Path(__file__).parents[1] / "support" / "kill_loop.py"
LONGEST_SECONDS = 0.6  # until a kill by the clock
MOST_CALLS = 700  # until a kill by the call
SAVED_STEPS = 100  # a table in RAM is kept after so many steps ...
SAVED = 30  # ... and so many of them
DEATHS = {0: "none", -signal.SIGKILL: "kill", -signal.SIGTERM: "term", -signal.SIGINT: "int", INTERRUPTED: "int"}


class Clock(threading.Thread):
    """Kills a process after some seconds.

    Args:
        pid: of the process.
        way: "term" and "int" are signals of that name, "stop" has it stopped first, and looked at.
        seconds: until then.
        look: called while it is stopped.

    Attributes:
        error: of `look`.
    """

    def __init__(self, pid: int, way: str, seconds: float, look: Callable[[], None]) -> None:
        super().__init__(name="clock")
        self._pid, self._way, self._seconds, self._look = pid, way, seconds, look
        self._cancelled, self.error = threading.Event(), None

    def run(self) -> None:
        if self._cancelled.wait(self._seconds):
            return
        if self._way == "stop":
            os.kill(self._pid, signal.SIGSTOP)
            try:
                self._look()
            except BaseException as error:
                self.error = error
        os.kill(self._pid, {"term": signal.SIGTERM, "int": signal.SIGINT}.get(self._way, signal.SIGKILL))
        if self._way == "int" and not self._cancelled.wait(60):
            os.kill(self._pid, signal.SIGKILL)  # Python drops a KeyboardInterrupt of a callback of a weak reference

    def cancel(self) -> None:
        self._cancelled.set()
        self.join()
        if self.error is not None:
            raise self.error


class Victims:
    """Processes to kill, one after the other: children of `kill_loop.py`."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        while self._line() != "ready":
            pass

    def _line(self) -> str:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line.endswith("\n"), "the server has died"
        return line.strip()

    def live(self, clock: Callable[[int], Clock] | None, **arguments: object) -> tuple[list[str], str]:
        """Start one, which the clock for its number kills, or else it itself; return what it said, and how it died."""
        assert self._server.stdin is not None
        print(json.dumps(arguments), file=self._server.stdin, flush=True)
        pid, said = int(self._line().removeprefix("pid ")), []
        killer = clock(pid) if clock is not None else None
        if killer is not None:
            killer.start()
        while not (line := self._line()).startswith("exit "):
            said.append(line)
        if killer is not None:
            killer.cancel()
        code = int(line.removeprefix("exit "))
        assert code in DEATHS, said
        return said, DEATHS[code]

    def close(self) -> None:
        self._server.communicate()
        assert self._server.returncode == 0


@pytest.fixture(scope="module")
def victims() -> Iterator[Victims]:
    made = Victims()
    yield made
    made.close()


class Ram:
    """What a table holds after each step."""

    def __init__(self, kind: str, seed: int) -> None:
        self._kind, self._seed = kind, seed
        self._saved = {0: er.Table(**KINDS[kind].arguments(seed))}

    def after(self, step: int) -> er.Table:
        """Return a table in RAM that has seen so many steps."""
        nearest = max(saved for saved in self._saved if saved <= step)
        table = copy.deepcopy(self._saved[nearest])
        for number in range(nearest + 1, step + 1):
            train(table, self._kind, self._seed, number)
            if number % SAVED_STEPS == 0:
                self._save(number, table)
        self._save(step, table)
        return table

    def _save(self, step: int, table: er.Table) -> None:
        self._saved[step] = copy.deepcopy(table)
        for old in [saved for saved in self._saved if saved][:-SAVED]:
            del self._saved[old]


class Commit(NamedTuple):
    """A commit by its number, and the step after which it was made."""

    number: int
    step: int


class Story:
    """A table that is killed again and again, and what it must hold.

    Attributes:
        kills: by which signal, so many.
        furthest: step that was ever found.
        said: by the last process.
    """

    def __init__(self, kind: str, path: Path, seed: int) -> None:
        self.kind, self.path, self.seed = kind, str(path), seed
        self.rng, self.ram = np.random.default_rng(seed), Ram(kind, seed)
        self.kills = dict.fromkeys(["kill", "term", "int"], 0)
        self.furthest, self.said = 0, list[str]()
        self._found: Commit | None = None
        self._acknowledged, self._kept = -1, dict[int, set[int]]()
        self._possible = dict[int, set[int]]()

    def kill(self, victims: Victims) -> None:
        """Let a process work on the table until it is killed, by the clock or in a call of the operating system."""
        way = str(self.rng.choice(["kill", "term", "int", "stop", "call", "call"]))
        if way == "call":
            self.die(victims, int(self.rng.integers(1, MOST_CALLS)))
        else:
            seconds = float(self.rng.uniform(0, LONGEST_SECONDS))
            self._live(victims, lambda pid: Clock(pid, way, seconds, self._look), steps=10_000)

    def die(self, victims: Victims, calls: int, planted: str | None = None) -> None:
        """Let a process work on the table until it kills itself in a call of the operating system."""
        self._live(victims, None, steps=300, dies_at=calls, planted=planted)

    def _live(self, victims: Victims, clock: Callable[[int], Clock] | None, **how: object) -> None:
        draw = int(self.rng.integers(2**32))
        self.said, death = victims.live(clock, path=self.path, kind=self.kind, seed=self.seed, draw=draw, **how)
        for line in self.said:
            self._hear(*line.split())
        if death in self.kills:
            self.kills[death] += 1

    def _hear(self, word: str, number: str = "", step: str = "") -> None:
        commit = int(number or 0)
        if word == "open":
            found = Commit(commit, int(step))
            assert self._found in (None, found), f"{found} was opened, and {self._found} was there before"
            self._acknowledged, self._possible = commit, {commit: {found.step}}
        if word == "begin":
            self._possible.setdefault(commit, set()).add(int(step))
        if word == "done":
            self._acknowledged = max(self._acknowledged, commit)
        if word == "kept":
            self._kept[commit] = self._possible[commit]
        if word == "released":
            self._kept.pop(commit, None)

    def _look(self) -> None:
        """Fail if what a process has left that was stopped is not whole for a reader."""
        if holds_table(OS_SYSTEM, self.path):
            with er.open(self.path, mode="r", memory=self._memory()) as table:
                table.lookup(np.arange(100))
            assert verify(OS_SYSTEM, self.path).problems == []

    def _memory(self) -> int:
        rows = int(self.rng.integers(4, 500))  # of the first rule: those of another one may be three times as wide
        return self.ram.after(0).memory_for(rows)

    def check(self) -> None:
        """Fail unless the table is that of the last commit acknowledged, or of one since."""
        if not holds_table(OS_SYSTEM, self.path):
            assert self._acknowledged < 0, "the table is gone"
            return
        mode = str(self.rng.choice(["w", "r"]))
        with er.open(self.path, mode=mode, memory=self._memory()) as table:
            found = self._found = Commit(table.last_commit, table.last_step or 0)
            assert found.number >= self._acknowledged, f"commit {self._acknowledged} is lost: {found} was opened"
            possible = self._possible.get(found.number, {0})  # commit 0 is made before anything is said of it
            assert found.step in possible, f"{found} was opened, and it was made after one of the steps {possible}"
            self.furthest = max(self.furthest, found.step)
            check_same(table, self.ram.after(found.step))
            verdict = table.verify()
            assert verdict.problems == []
            assert verdict.newest_good == table.last_commit
            self._check_kept(table)
            if mode == "w":
                self.check_files()

    def _check_kept(self, table: er.Table) -> None:
        """Fail unless all commits that have a name are there, and open the oldest of them."""
        steps = {commit["commit"]: commit["step"] or 0 for commit in table.commits()}  # commit 0 has none
        assert all(steps.get(commit) in possible for commit, possible in self._kept.items()), (steps, self._kept)
        since = min(steps)
        check_changes(table, since, self.ram.after(steps[since]), self.ram.after(steps[table.last_commit]))
        if self._kept:
            oldest = min(self._kept)
            with er.open(self.path, mode="r", at=oldest, memory=self._memory()) as reader:
                check_same(reader, self.ram.after(steps[oldest]))

    def check_files(self) -> None:
        """Fail if files are left over that no commit needs."""
        commits = [manifests.read(OS_SYSTEM, self.path, n) for n in manifests.numbers(OS_SYSTEM, self.path)]
        needed = lists_of_commits(OS_SYSTEM, self.path).union(*(commit.files for commit in commits))
        found = {str(path.relative_to(self.path)) for path in Path(self.path).rglob("*.*") if path.is_file()}
        assert {name for name in found - needed if not name.startswith("manifest/")} == set()


def kill_again_and_again(kind: str, path: Path, seed: int, victims: Victims, kills: int) -> None:
    story = Story(kind, path, seed)
    while sum(story.kills.values()) < kills:
        story.kill(victims)
        try:
            story.check()
        except BaseException as error:
            error.add_note(f"seed {seed}, after kills {story.kills}; the last one said {story.said[-20:]}")
            raise
    assert story.furthest > kills  # it came on between them
    print(f"kills of a table {kind!r}: {sum(story.kills.values())} {story.kills}, bad: 0")


FAST = "adam", "come and go"  # what others have, is in crash states and in the gate, too


@pytest.mark.parametrize("kind", [*FAST, *slow(*(kind for kind in KINDS if kind not in FAST))])
def test_kills(kind: str, tmp_path: Path, victims: Victims):
    kill_again_and_again(kind, tmp_path / "table", 7, victims, kills=7)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_kills(kind: str, tmp_path: Path, victims: Victims):
    kill_again_and_again(kind, tmp_path / "table", 11, victims, kills=167)


@pytest.mark.slow
@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_wrong_is_found(planted: str, tmp_path: Path, victims: Victims):
    story = Story("adam", tmp_path / "table", 5)
    with pytest.raises((AssertionError, CorruptTableError), match=r"is lost|is damaged"):
        die_at_every_call(story, victims, range(15, 80), planted)


def die_at_every_call(story: Story, victims: Victims, calls: range, planted: str) -> None:
    for call in calls:
        story.die(victims, call, planted)
        story.check()
