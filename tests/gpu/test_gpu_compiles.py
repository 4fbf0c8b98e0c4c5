"""Every GPU kernel is compiled for an H200, whether there is one or not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from embedrock.kernels.gpu import runtime
from slow import slow


@pytest.mark.parametrize("most", [["2"], *slow([])], ids=["two of each", "all"])
def test_every_kernel_compiles(most: list[str]) -> None:
    program = Path(__file__).with_name("compile_all.py")
    done = subprocess.run([sys.executable, program, *most], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    missing = [kernel.__name__ for kernel in runtime.KERNELS if counts.get(kernel.__name__, "0") == "0"]
    assert not missing, f"no function example_* in tests/gpu/examples_*.py launches {', '.join(missing)}"
