"""Compile every GPU kernel for an H200, on a machine that may have none: run by test_gpu_compiles.py.

It runs the functions ``example_*`` of the files ``examples_*.py`` beside it. They call the launchers with small CPU
tensors, as a table would; Triton compiles for the GPU that a driver says is there, and the driver launches nothing.
An argument says for how many of the examples each kernel is compiled; without it, for all.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"
sys.path.append(str(Path(__file__).resolve().parents[1]))  # of the suites

from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from embedrock.kernels.gpu import binding, runtime

# Not rounded once, to nearest, as IEEE 754 says. (The exponential function in float64 has instructions of its own.)
INEXACT = re.compile(r"\bfma\.rn\.f32|\b(?:add|sub|mul|div|sqrt)[.\w]*\.(?:ftz|approx)[.\w]*")
H200 = GPUTarget("cuda", 90, 32)


class NoGPU:
    """A driver of a GPU that is not there."""

    utils = SimpleNamespace(
        load_binary=lambda name, binary, *_: (None, (name, hash(binary)), 0, 0, 1024),
        get_device_properties=lambda _: {"max_shared_mem": 232448},
    )

    def get_current_device(self) -> int:
        return 0

    get_current_stream = staticmethod(int)  # no call of Python, as on a GPU

    def get_current_target(self) -> GPUTarget:
        return H200

    def launcher_cls(self, *_: Any) -> Any:
        return "".format  # which takes any arguments, and is no Python, as on a GPU


def run_examples() -> None:
    for file in sorted(Path(__file__).parent.glob("examples_*.py")):
        for name, example in vars(importlib.import_module(file.stem)).items():
            if name.startswith("example_"):
                example()


def compiled(kernel: Any) -> list[Any]:
    return [binary for caches in kernel.device_caches.values() for binary in caches[0].values()]


def check(kernel: Any, binary: Any) -> None:
    """Fail where a compiled kernel is none, or rounds otherwise."""
    assert binary.asm["cubin"]
    inexact = INEXACT.search(binary.asm["ptx"])
    assert inexact is None, f"{kernel.__name__} has {inexact[0]}"


def compile_at_most(most: int) -> None:
    run = JITFunction.run

    def run_few(self: Any, *arguments: Any, **options: Any) -> Any:
        if len(compiled(self)) < most:
            return run(self, *arguments, **options)
        before, self._do_compile = self._do_compile, lambda *_: None
        try:
            return run(self, *arguments, **options)  # if it was compiled before
        finally:
            self._do_compile = before

    JITFunction.run = run_few


class Kept:
    """Launches all that was launched before once more: by Triton, and by what `launch` keeps of it.

    Both must be the same kernel, and be given the same arguments.
    """

    def __init__(self, gpu: NoGPU) -> None:
        self.as_before, self.count = runtime.ReadyKernel.launch, 0
        self._calls: list[tuple[Any, ...]] = []
        gpu.launcher_cls = lambda *_: lambda *call: self._calls.append(call)

    def launch(self, ready: runtime.ReadyKernel, grid_size: int, *args: Any) -> None:
        kernel = ready.kernel
        if not compiled(kernel):
            return
        del self._calls[:]
        if kernel[(grid_size,)](*binding.plain(args), enable_fp_fusion=False, **ready.options) is None:
            return  # it is one of those that were left out
        known = len(ready.compiled)
        self.as_before(ready, grid_size, *args)
        assert len(ready.compiled) == known, f"{kernel.__name__} was not kept"
        one, two = self._calls
        assert (one[:3], one[4:6]) == (two[:3], two[4:6]), f"another kernel or grid of {kernel.__name__}"
        assert plain(one[9:]) == plain(two[9:]), f"other arguments of {kernel.__name__}"
        self.count += 1


def plain(values: Any) -> list[Any]:
    """Return arguments with tensors by their addresses."""
    return [
        plain(value) if isinstance(value, tuple) else value.data_ptr() if hasattr(value, "data_ptr") else value
        for value in values
    ]


if __name__ == "__main__":
    gpu: Any = NoGPU()
    kept = Kept(gpu)
    driver.set_active(gpu)
    if len(sys.argv) > 1:
        compile_at_most(int(sys.argv[1]))
    run_examples()
    setattr(runtime.ReadyKernel, "launch", lambda ready, *args: kept.launch(ready, *args))  # noqa: B010
    run_examples()
    assert kept.count, "nothing was launched again"
    for kernel in runtime.KERNELS:
        for binary in compiled(kernel):
            check(kernel, binary)
        print(kernel.__name__, len(compiled(kernel)))
    from host_cost import costs  # which imports this file

    runtime.ReadyKernel.launch = kept.as_before
    print("costs", json.dumps(costs(0.0), separators=(",", ":")))
