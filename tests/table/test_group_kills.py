"""Processes that train a group on disk are killed: all of its tables are as of one commit, and none is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import embedrock as er
from disk_groups import KINDS, made, step
from same_tables import check_same

PROGRAM = """
import sys
sys.path[:0] = {paths!r}
from disk_groups import made, step
group = made({path!r}, memory=40_000)
number = (group.last_step or 0) + 1
while True:
    step(group, number)
    group.commit(step=number, wait=number % 3 > 0)
    if number % 3:
        print(number, flush=True)
    if number % 17 == 0:
        group.compact()
    number += 1
"""


def killed_after(path: Path, seconds: float) -> int:
    """Train in a process that is killed so many seconds after its first commit; return the last one that it told."""
    program = PROGRAM.format(paths=sys.path, path=str(path))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = [int(process.stdout.readline())]
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        told += [int(line) for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    return told[-1]


def kill_often(path: Path, kills: int) -> None:
    rng, ram, number = np.random.default_rng(0), er.Group(), 0
    for seed, (name, kind) in enumerate(KINDS.items()):
        ram.table(name, **kind, seed=seed)
    for _ in range(kills):
        told = killed_after(path, rng.random() * 0.3)
        with er.open(path, mode="r", kind=er.Group) as group:
            assert group.last_step is not None
            assert group.last_step >= told
            assert not group.verify().problems
            while number < group.last_step:
                number += 1
                step(ram, number)
            for name in KINDS:
                check_same(group[name], ram[name])
    made(path).close()


def test_a_kill_leaves_all_tables_as_of_one_commit(tmp_path: Path) -> None:
    kill_often(tmp_path / "m", 1)


@pytest.mark.slow
def test_many_kills_leave_all_tables_as_of_one_commit(tmp_path: Path) -> None:
    kill_often(tmp_path / "m", 40)
