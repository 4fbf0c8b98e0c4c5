"""Programs whose process is forked from one that has imported what they import, so that their start takes no seconds.

A program begins with a module `__main__` of its own, and ends as Python ends: with `atexit`, and the end of modules.
A server may import frameworks, but uses none of them: the fork of a process without threads is safe.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

CORE = ("numba", "pytest", "embedrock.kernels.cpu")
TORCH = (*CORE, "embedrock.torch")
KERAS = (*CORE, "embedrock.keras")
TIMEOUT_S = 300
PR_SET_PDEATHSIG = 1


def run(text: str, imports: tuple[str, ...] = CORE, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -c text *arguments`` in a fork of the server that has imported some modules."""
    server = _server(imports)
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "program").write_text(text)
        job = {"folder": folder, "arguments": ["-c", *arguments], "path": sys.path, "directory": os.getcwd()}
        print(json.dumps(job), file=server.stdin, flush=True)
        code = int(server.stdout.readline())
        output, errors = (Path(folder, name).read_text(errors="replace") for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(text, code, output, errors)


@functools.cache
def _server(imports: tuple[str, ...]) -> subprocess.Popen[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    server = subprocess.Popen(
        [sys.executable, __file__, *imports],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    server.kill()
    server.communicate()


# ---------------------------------------------------------------- the server


def serve(*imports: str) -> str | None:
    """Fork for each job on stdin. Return the program in the child; in the server None, once nobody has a job."""
    _die_with_parent()
    for name in imports:
        importlib.import_module(name)
    while line := sys.stdin.readline():
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            return _begin(**job)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return None


def _begin(folder: str, arguments: list[str], path: list[str], directory: str) -> str:
    _die_with_parent()
    signal.alarm(TIMEOUT_S)
    sys.argv[:], sys.path[:] = arguments, path
    os.chdir(directory)
    for number, name in enumerate([os.devnull, Path(folder, "stdout"), Path(folder, "stderr")]):
        file = os.open(name, os.O_RDWR | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    return Path(folder, "program").read_text()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    program: Any = serve(*sys.argv[1:])
    if program is not None:
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), sys.modules["__main__"].__dict__)
