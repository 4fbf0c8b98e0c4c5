"""The README's program: killed by SIGKILL and run again, it ends as if nothing had happened."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from pages import blocks_of

pytest.importorskip("torch")

README = Path(__file__).resolve().parents[2] / "README.md"


def start(folder: Path) -> subprocess.Popen[str]:
    """Start the program in a folder."""
    folder.mkdir(exist_ok=True)
    source = blocks_of(README.read_text())[0].source
    assert 'memory="1GiB"' in source
    return subprocess.Popen([sys.executable, "-c", source], cwd=folder, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_killed_program_ends_as_one_that_was_not(tmp_path: Path):
    whole, _ = start(tmp_path / "whole").communicate()
    assert "nearest to" in whole

    killed, checkpoints = start(tmp_path / "killed"), tmp_path / "killed" / "checkpoints"
    while not any(checkpoints.glob("*.pt")):
        assert killed.poll() is None, "it ended before its first checkpoint"
        time.sleep(0.001)
    killed.kill()
    killed.communicate()

    again, _ = start(tmp_path / "killed").communicate()
    assert "saved step 150" in again
    assert again.splitlines()[-1] == whole.splitlines()[-1]
