"""Have Triton compile each interpreted kernel for the arguments that it is launched with, in a process of its own.

The interpreter accepts what the compiler refuses, such as a variable of a loop that changes its type. So a launch in a
test fails here as it would on a GPU. Each kernel is compiled once for each sequence of types. Sizes change no types.
Triton keeps what it has compiled in its cache, so only new kernels take time.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"

from triton.runtime.interpreter import InterpretedFunction

from embedrock.kernels.gpu import binding, runtime


class Compiler:
    """Process that compiles kernels for a GPU that is not there."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, sys.path))
        variables = os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "0"}
        command = sys.executable, __file__
        self._program = subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._lock, self._owner, self._known = threading.Lock(), os.getpid(), set[bytes]()

    def compile(self, ready: runtime.ReadyKernel, args: tuple[Any, ...]) -> None:
        """Compile a kernel for arguments of such types, unless it was before.

        Raises:
            AssertionError: Triton refuses to.
        """
        kernel: Any = ready.kernel
        varying = kernel.kwargs.get("do_not_specialize") or ()
        given = [alike(arg, name in varying) for name, arg in zip(kernel.arg_names, binding.plain(args), strict=False)]
        kinds = {name: kind_of(option) for name, option in ready.options.items()}
        key = dumped((kernel, given, kinds))
        with self._lock:
            if key in self._known or os.getpid() != self._owner:  # a forked child
                return
            self._known.add(key)
            assert self._program.stdin is not None
            assert self._program.stdout is not None
            self._program.stdin.write(dumped((kernel, given, ready.options)))
            self._program.stdin.flush()
            refusal = pickle.load(self._program.stdout)
        types = [getattr(one, "dtype", one) for one in given]
        assert refusal is None, f"Triton refuses to compile {kernel.__name__} for {types}, {ready.options}: {refusal}"

    def close(self) -> None:
        self._program.communicate()


def alike(value: Any, varies: bool = False) -> Any:
    """Return an argument that stands for all of its type; `varies`: 1 is not a type of its own."""
    if isinstance(value, tuple):
        parts = map(alike, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if type(value) is float:
        return 0.0
    if type(value) is int and (varies or value != 1):
        return 2 if -(2**31) <= value < 2**31 else 2**62 if value < 2**63 else 2**63
    return value


def kind_of(option: Any) -> Any:
    """Return a constexpr without sizes."""
    if isinstance(option, runtime.RecordForm):
        return option.dtype_name
    return None if type(option) is int else option


class Pickler(pickle.Pickler):
    """Pickles kernels by name, and memory by dtype."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, InterpretedFunction):
            return obj.fn.__module__, obj.fn.__qualname__
        return obj.dtype if isinstance(obj, torch.Tensor) else None


class Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, torch.dtype):
            return torch.zeros(16, dtype=pid)
        module, name = pid
        return getattr(importlib.import_module(module), name)


def dumped(value: Any) -> bytes:
    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


@contextmanager
def compiling() -> Iterator[None]:
    """Compile the kernels that are interpreted meanwhile."""
    compiler, interpret = Compiler(), runtime.ReadyKernel._interpret

    def compile_and_interpret(self: runtime.ReadyKernel, grid_size: int, *args: Any) -> None:
        compiler.compile(self, args)
        interpret(self, grid_size, *args)

    runtime.ReadyKernel._interpret = compile_and_interpret
    try:
        yield
    finally:
        runtime.ReadyKernel._interpret = interpret
        compiler.close()


def serve() -> None:
    """Compile what is asked for on standard input; answer each request with None, or why Triton refuses."""
    import compile_all
    from triton.runtime import driver

    gpu: Any = compile_all.NoGPU()
    driver.set_active(gpu)
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    while True:
        try:
            kernel, args, options = Unpickler(sys.stdin.buffer).load()
        except EOFError:
            return
        try:
            compile_all.check(kernel, kernel.warmup(*args, grid=(1,), enable_fp_fusion=False, **options))
            refusal = None
        except Exception as error:
            refusal = "".join(traceback.format_exception(error))
        pickle.dump(refusal, answers)
        answers.flush()


if __name__ == "__main__":
    serve()
