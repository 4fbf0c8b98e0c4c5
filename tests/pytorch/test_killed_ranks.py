"""Ranks that are killed at random moments leave one commit of all parts, whatever their number is next time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from embedrock.distributed import commits


def run(lives: int, seed: int, latest: float, kind: str) -> str:
    program = Path(__file__).with_name("kill_ranks.py")
    done = subprocess.run(
        [sys.executable, program, str(lives), str(seed), str(latest), kind], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["stays", "goes"])
def test_two_lives_leave_what_one_table_has(kind: str) -> None:
    assert re.match(r"2 lives, \d different commits, \d+ steps", run(2, 3, 2.0, kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stays", "goes"])
def test_a_hundred_lives_leave_what_one_table_has(kind: str) -> None:
    found = re.match(r"100 lives, (\d+) different commits", run(100, 4, 4.0, kind))
    assert found is not None
    assert int(found[1]) > 10  # many of them had time to commit


def mark(number: int, step: int, made: int, files: int | None = None) -> commits.ShardCommit:
    return commits.ShardCommit(None, step, made, (number,), (number if files is None else files,))


def test_the_newest_commit_of_all_is_gone_back_to_and_no_more_than_two_are_left() -> None:
    own = [mark(step, step, step) for step in (1, 2, 3)]
    known = [commits.known_as(each) for each in own]
    assert commits.agreed("users.rock", [known, known[1:2], known[:2]]) == known[1]
    assert commits.since(own, known[1]) == (own[1], 1)
    assert commits.since(own, known[2]) == (own[2], 0)
    commits.check_ahead("users.rock", [commits.since(own, known[0])[1], 0])
    back = [*own[:2], mark(4, 2, 2, files=2)]  # it went back once, which is no commit of its own
    assert commits.since(back, known[1])[1] == 0
    with pytest.raises(commits.ArgumentError, match=r"got \[3, 0\] after the newest that all have, by rank"):
        commits.check_ahead("users.rock", [3, 0])
    with pytest.raises(commits.ArgumentError, match=r"got rank 0 1 commit; rank 1 2 commits, and none of all"):
        commits.agreed("users.rock", [known[:1], known[1:]])
