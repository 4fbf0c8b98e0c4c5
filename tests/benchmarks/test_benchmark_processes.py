"""Children of benchmarks: they answer, say why they died, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.processes import Child, ChildError, child_environment


class Echo:
    def __init__(self, text: str) -> None:
        if text == "bad":
            raise ValueError("a bad text")
        self.text = text

    def both(self, other: str) -> str:
        return self.text + other

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def process(self) -> int:
        return os.getpid()

    def exit(self, status: int) -> None:
        os.write(1, b"last words\n")
        os._exit(status)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def echo(text: str = "a", timeout_s: float = 60.0, **environment: str) -> Child:
    return Child(Echo, text, environment=environment, timeout_s=timeout_s)


def is_alive(process: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    status = Path(f"/proc/{process}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(processes: Sequence[int], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_alive, processes))


def test_child_answers_calls_in_its_own_environment():
    with echo(EMBEDROCK_THREADS="3") as child:
        assert child.call("both", "b") == "ab"
        assert child.call("variable", "EMBEDROCK_THREADS") == "3"
        process = child.call("process")
        assert process != os.getpid()
    assert wait_until_gone([process])
    child.close()


def test_child_that_cannot_be_made():
    with pytest.raises(ChildError, match="a bad text") as raised:
        echo("bad")
    assert raised.value.kind == "ValueError"
    assert "Echo" in raised.value.details or "__init__" in raised.value.details


def test_child_stays_usable_after_an_error():
    with echo() as child:
        with pytest.raises(ChildError, match="no attribute 'missing'") as raised:
            child.call("missing")
        assert raised.value.kind == "AttributeError"
        assert child.call("both", "b") == "ab"


def test_child_that_dies_says_how():
    with echo() as child:
        with pytest.raises(ChildError, match="exit status 3") as raised:
            child.call("exit", 3)
        assert raised.value.kind == "Died"
        assert raised.value.details == "last words"


def test_child_that_does_not_answer():
    with echo(timeout_s=30.0) as child:
        child._timeout_s = 0.2
        process = child._process.pid
        with pytest.raises(ChildError, match=r"no answer within 0\.2 s"):
            child.call("sleep", 60)
    assert wait_until_gone([process])


PARENT = """
import test_benchmark_processes, sys, time
child = test_benchmark_processes.echo()
print(child.call("process"), flush=True)
child.call("sleep", 600)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_child_ends_with_its_parent(how):
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environment(), text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.send_signal(how)
    assert wait_until_gone([child])
