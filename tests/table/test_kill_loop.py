"""Real kills: whatever a process did when it died, its table opens as of a commit, and none acknowledged is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import embedrock as er
from embedrock.machine.vfs import OS_SYSTEM
from embedrock.store import folder as folders
from embedrock.store import manifest as manifests
from embedrock.store.runs import HEADER_BYTES
from kill_loop import KINDS, train
from same_tables import check_same

PROGRAM = Path(__file__).parents[1] / "support" / "kill_loop.py"
LONGEST_SECONDS = 0.6  # until a kill by the clock
MOST_CALLS = 700  # until a kill by the call


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

    def live(self, seconds: float | None, **arguments: object) -> list[str]:
        """Start one, kill it after some seconds (None: it dies by itself), and return what it said."""
        assert self._server.stdin is not None
        print(json.dumps(arguments), file=self._server.stdin, flush=True)
        pid, said = int(self._line().removeprefix("pid ")), []
        clock = threading.Timer(seconds or 0, lambda: os.kill(pid, signal.SIGKILL))
        if seconds is not None:
            clock.start()
        while not (line := self._line()).startswith("exit "):
            said.append(line)
        clock.cancel()
        assert int(line.removeprefix("exit ")) in (0, -signal.SIGKILL), said
        return said

    def close(self) -> None:
        self._server.communicate()
        assert self._server.returncode == 0


@pytest.fixture(scope="module")
def victims() -> Iterator[Victims]:
    made = Victims()
    yield made
    made.close()


class Story:
    """A table that is killed again and again, and one in RAM that lives through all of it."""

    def __init__(self, kind: str, path: Path, seed: int) -> None:
        self.kind, self.path, self.seed = kind, str(path), seed
        self.rng, self.acknowledged, self.step = np.random.default_rng(seed), 0, 0
        self.ram = er.Table(**KINDS[kind].arguments(seed))

    def kill(self, victims: Victims) -> None:
        """Let a process work on the table until it is killed, by the clock or in a call of the operating system."""
        by_clock = self.rng.random() < 0.5
        said = victims.live(
            float(self.rng.uniform(0, LONGEST_SECONDS)) if by_clock else None,
            path=self.path,
            kind=self.kind,
            seed=self.seed,
            draw=int(self.rng.integers(2**32)),
            steps=10_000 if by_clock else 300,
            dies_at=None if by_clock else int(self.rng.integers(1, MOST_CALLS)),
        )
        for line in said:
            word, _, number = line.partition(" ")
            if word == "open":
                assert int(number) == self.step
            if word == "done":
                self.acknowledged = max(self.acknowledged, int(number))

    def check(self) -> None:
        """Fail unless the table is that of the last commit acknowledged, or of one since."""
        if not folders.holds_table(OS_SYSTEM, self.path):
            assert not self.acknowledged
            return
        mode, memory = str(self.rng.choice(["w", "r"])), self.ram.memory_for(int(self.rng.integers(1, 500)))
        with er.open(self.path, mode=mode, memory=memory) as table:
            step = table.last_step or 0
            assert step >= max(self.acknowledged, self.step)
            while self.step < step:
                self.step += 1
                train(self.ram, self.seed, self.step)
            check_same(table, self.ram)
            verdict = table.verify()
            assert verdict.problems == []
            assert verdict.newest_good == table.last_commit
            if mode == "w":
                self.check_files()

    def check_files(self) -> None:
        """Fail if files are left over that no commit needs, but for those that do not even say whose they are."""
        commits = [manifests.read(OS_SYSTEM, self.path, n) for n in manifests.numbers(OS_SYSTEM, self.path)]
        needed = set().union(*(folders.files_of(commit) for commit in commits))
        found = {str(path.relative_to(self.path)) for path in Path(self.path).rglob("*.*") if path.is_file()}
        left = {name for name in found - needed if not name.startswith("manifest/")}
        assert all((Path(self.path) / name).stat().st_size < HEADER_BYTES for name in left), left


def kill_again_and_again(kind: str, path: Path, seed: int, victims: Victims, kills: int) -> None:
    story = Story(kind, path, seed)
    for _ in range(kills):
        story.kill(victims)
        story.check()
    assert story.step > kills  # it came on between them


@pytest.mark.parametrize("kind", KINDS)
def test_kills(kind: str, tmp_path: Path, victims: Victims):
    kill_again_and_again(kind, tmp_path / "table", 7, victims, kills=7)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_kills(kind: str, tmp_path: Path, victims: Victims):
    kill_again_and_again(kind, tmp_path / "table", 11, victims, kills=67)
