"""The two trainings in RAM print the same losses, and a killed one on disk repeats those after its last commit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "matrix_factorization.py"
LINE = re.compile(r"step +(\d+) +(\w+) +(loss \S+ +AUC \S+)")


def run(folder: Path, *options: str) -> tuple[str, str]:
    """Return what the example prints of its part in RAM, and of its part on disk."""
    command = [sys.executable, str(PROGRAM), "--users", "20000", "--memory", "1GiB", *options]
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=True)
    in_ram, on_disk = ran.stdout.split("2. On disk")
    return in_ram, on_disk


@pytest.mark.slow  # fast ones: tests/pytorch/test_optim.py and tests/table/test_kill_loop.py
def test_rows_train_as_in_torch_and_as_if_nobody_had_killed_them(tmp_path: Path):
    pytest.importorskip("torch")
    in_ram, on_disk = run(tmp_path, "--steps", "240", "--path", "rows.rock")
    found = {(step, name): result for step, name, result in LINE.findall(in_ram)}
    assert [found[step, "embedrock"] for step in ("50", "100")] == [found[step, "torch"] for step in ("50", "100")]
    killed, resumed = on_disk.split("Killed by SIGKILL")
    assert LINE.findall(killed)[-1][0] == "150"
    assert LINE.findall(killed)[-1] in LINE.findall(resumed)
    _, again = run(tmp_path, "--steps", "300", "--path", "rows.rock")
    assert "begins after step 240" in again
    assert [step for step, *_ in LINE.findall(again)] == ["250", "300"]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.rock"]
