"""Processes that publish and follow are killed: what is shown is always one step, and publishing goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import embedrock as er
import served_life


def begun(kind: str, at: Path) -> subprocess.Popen[str]:
    """Start a process of `served_life`, and wait until it has published, or shown, a step."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    program = [sys.executable, served_life.__file__, kind, str(at)]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    if not process.stdout.readline():
        raise AssertionError(process.communicate()[1])
    return process


def killed(process: subprocess.Popen[str]) -> list[int]:
    """Kill a process; return the numbers that it told since it began."""
    assert process.poll() is None, process.communicate()[1]
    process.send_signal(signal.SIGKILL)
    told, _ = process.communicate()
    return [int(line) for line in told.splitlines(keepends=True) if line.endswith("\n")]


def kill_often(at: Path, kills: int, seed: int = 0) -> None:
    rng, last = np.random.default_rng(seed), 0
    followers = list[subprocess.Popen[str]]()
    try:
        for _ in range(kills):
            trainer = begun("trainer", at)
            try:
                followers.append(begun("follower", at))
                time.sleep(rng.random() * 0.4)
            finally:
                told = killed(trainer)
            if len(followers) == 2:
                killed(followers.pop(0))
            with er.Subscriber(at / "served", memory="4MiB", patience=60) as served, served.step() as step:
                assert step.number >= max([last, *told])
                served_life.check(step)
                last = step.number
    finally:
        for process in followers:
            killed(process)


def test_publishers_and_subscribers_are_killed(tmp_path: Path):
    kill_often(tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_publishers_and_subscribers_are_killed_often(tmp_path: Path, seed: int):
    kill_often(tmp_path, 30, seed)
