"""Runs a function of a test in several real processes, the workers of a `MultiWorkerMirroredStrategy` on loopback.

To start quickly, a server imports TensorFlow once, and then forks the workers of each run: forking is safe as long as
TensorFlow was imported but not used. Results come back by files. No worker outlives its time, its server or pytest.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

PR_SET_PDEATHSIG = 1
GRACE_S = 10.0  # what a worker has, past its time, to print its stacks and end by itself


class Outcome(NamedTuple):
    """What became of one worker."""

    rank: int
    code: int  # as of `subprocess`: 0, or minus the signal that killed it
    result: Any  # what the function returned; None if it did not
    error: str  # the traceback of what it raised, else ""
    output: str  # its stdout and stderr
    seconds: float  # from the start of the run to the worker's end

    def __str__(self) -> str:
        return f"worker {self.rank}: code {self.code} after {self.seconds:.1f} s\n{self.output[-6000:]}\n{self.error}"


class WorkersError(Exception):
    """A worker that raised, was killed or took too long."""


def run(function: Callable[..., Any], *arguments: Any, workers: int = 2, timeout_s: float = 120.0) -> list[Any]:
    """Return what `function(*arguments)` returned in each worker.

    Args:
        function: of a module, so that it can be pickled. In it, `TF_CONFIG` is set if there are several workers.
        *arguments: what can be pickled.
        workers: number of processes. One is a process without a cluster, that may configure its own devices.
        timeout_s: after it, a worker prints the stack of every thread and is killed.

    Raises:
        WorkersError: not all of them returned; the text is what each of them printed.
    """
    outcomes = outcomes_of(function, *arguments, workers=workers, timeout_s=timeout_s)
    if any(outcome.code != 0 for outcome in outcomes):
        raise WorkersError("\n".join(map(str, outcomes)))
    return [outcome.result for outcome in outcomes]


def outcomes_of(
    function: Callable[..., Any], *arguments: Any, workers: int = 2, timeout_s: float = 120.0
) -> list[Outcome]:
    """Run as `run` does, and return what became of each worker, whatever it was."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "path").write_text(json.dumps(sys.path))
        (folder / "job").write_bytes(pickle.dumps((function, arguments)))
        ends = _ask({"folder": name, "workers": workers, "timeout_s": timeout_s})
        return [_outcome(folder, rank, code, seconds) for rank, (code, seconds) in enumerate(ends)]


def _outcome(folder: Path, rank: int, code: int, seconds: float) -> Outcome:
    result, error = None, ""
    with contextlib.suppress(FileNotFoundError):
        result, error = pickle.loads((folder / f"result{rank}").read_bytes())
    output = (folder / f"output{rank}").read_text(errors="replace")
    return Outcome(rank, code, result, error, output, seconds)


# ---------------------------------------------------------------- the server, as pytest sees it


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    server.kill()
    server.communicate()


def _ask(job: dict[str, Any]) -> list[tuple[int, float]]:
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        print(json.dumps(job), file=server.stdin, flush=True)
        answer = server.stdout.readline()
        if not answer:
            raise WorkersError("the server of workers ended; what it wrote to stderr says why")
        return json.loads(answer)
    except BaseException:  # as Ctrl-C: what it answers later is of no use to the next run
        _end(server)
        _server.cache_clear()
        raise


# ---------------------------------------------------------------- the server


def serve() -> None:
    """Start the workers of each job on stdin, and answer with their ends."""
    _die_with_parent()
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": ""}
    import keras  # noqa: F401
    import tensorflow  # noqa: F401

    import embedrock.keras  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(_run_job(**json.loads(line))), flush=True)


def _run_job(folder: str, workers: int, timeout_s: float) -> list[tuple[int, float]]:
    addresses = _free_addresses(workers)
    start = time.monotonic()
    pids = [_start_worker(Path(folder), rank, addresses, timeout_s) for rank in range(workers)]
    return _ends(pids, start, timeout_s + GRACE_S)


def _free_addresses(count: int) -> list[str]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def _start_worker(folder: Path, rank: int, addresses: list[str], timeout_s: float) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            _work(folder, rank, addresses, timeout_s)
        finally:
            os._exit(70)  # it could not even say what went wrong
    return pid


def _ends(pids: list[int], start: float, timeout_s: float) -> list[tuple[int, float]]:
    ends: dict[int, tuple[int, float]] = {}
    while len(ends) < len(pids):
        late = time.monotonic() - start > timeout_s
        for pid in set(pids) - set(ends):
            if late:
                os.kill(pid, signal.SIGKILL)
            done, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if done:
                ends[pid] = os.waitstatus_to_exitcode(status), time.monotonic() - start
        time.sleep(0.01)
    return [ends[pid] for pid in pids]


# ---------------------------------------------------------------- a worker


def _work(folder: Path, rank: int, addresses: list[str], timeout_s: float) -> NoReturn:
    _die_with_parent()
    _send_output_to(folder / f"output{rank}")
    faulthandler.enable()
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    if len(addresses) > 1:
        os.environ["TF_CONFIG"] = json.dumps(
            {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        )
    sys.path[:] = json.loads((folder / "path").read_text())
    result, error = None, ""
    try:
        function, arguments = pickle.loads((folder / "job").read_bytes())
        result = function(*arguments)
    except BaseException:
        error = traceback.format_exc()
    (folder / f"unfinished{rank}").write_bytes(pickle.dumps((result, error)))
    (folder / f"unfinished{rank}").rename(folder / f"result{rank}")
    if not error:
        _wait_for_others(folder, len(addresses))
    sys.stdout.flush()
    os._exit(1 if error else 0)  # at once: TensorFlow's own end may wait for workers that are gone


def _wait_for_others(folder: Path, workers: int) -> None:
    """Wait a little: they may still be in a collective operation that the worker has finished."""
    end = time.monotonic() + 2.0
    while time.monotonic() < end and len(list(folder.glob("result*"))) < workers:
        time.sleep(0.01)


def _send_output_to(path: Path) -> None:
    with path.open("wb") as file, open(os.devnull) as nothing:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        os.dup2(nothing.fileno(), 0)
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    serve()
