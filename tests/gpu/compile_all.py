"""Compile every GPU kernel for an H200, on a machine that may have none: run by test_gpu_compiles.py.

It runs the functions ``example_*`` of the files ``examples_*.py`` beside it. They call the launchers with small CPU
tensors, as a table would; Triton compiles for the GPU that a driver says is there, and the driver launches nothing.
An argument says for how many of the examples each kernel is compiled; without it, for all.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from embedrock.kernels.gpu import runtime

# Not rounded once, to nearest, as IEEE 754 says. (The exponential function in float64 has instructions of its own.)
INEXACT = re.compile(r"\bfma\.rn\.f32|\b(?:add|sub|mul|div|sqrt)[.\w]*\.(?:ftz|approx)[.\w]*")
H200 = GPUTarget("cuda", 90, 32)


class NoGPU:
    """A driver of a GPU that is not there."""

    utils = SimpleNamespace(
        load_binary=lambda *_: (None, None, 0, 0, 1024),
        get_device_properties=lambda _: {"max_shared_mem": 232448},
    )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return H200

    def launcher_cls(self, *_: Any) -> Any:
        return lambda *_: None


def run_examples() -> None:
    for file in sorted(Path(__file__).parent.glob("examples_*.py")):
        for name, example in vars(importlib.import_module(file.stem)).items():
            if name.startswith("example_"):
                example()


def compiled(kernel: Any) -> list[Any]:
    return [binary for caches in kernel.device_caches.values() for binary in caches[0].values()]


def compile_at_most(most: int) -> None:
    run = JITFunction.run

    def run_few(self: Any, *arguments: Any, **options: Any) -> Any:
        return run(self, *arguments, **options) if len(compiled(self)) < most else None

    JITFunction.run = run_few


if __name__ == "__main__":
    gpu: Any = NoGPU()
    driver.set_active(gpu)
    if len(sys.argv) > 1:
        compile_at_most(int(sys.argv[1]))
    run_examples()
    for kernel in runtime.KERNELS:
        for binary in compiled(kernel):
            assert binary.asm["cubin"]
            inexact = INEXACT.search(binary.asm["ptx"])
            assert inexact is None, f"{kernel.__name__} has {inexact[0]}"
        print(kernel.__name__, len(compiled(kernel)))
