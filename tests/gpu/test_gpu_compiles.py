"""Every GPU kernel is compiled for an H200, whether there is one or not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from embedrock.kernels.gpu import runtime


def test_every_kernel_compiles() -> None:
    program = Path(__file__).with_name("compile_all.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    missing = [kernel.__name__ for kernel in runtime.KERNELS if counts.get(kernel.__name__, "0") == "0"]
    assert not missing, f"no function example_* in tests/gpu/examples_*.py launches {', '.join(missing)}"
