"""Short messages between two processes of one machine, by a pipe each way."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from embedrock.system.shared_memory import MOST, PipeLine

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no such lines")


@pytest.fixture
def ends() -> Iterator[tuple[PipeLine, PipeLine]]:
    """Two ends of a line, both in this process."""
    one, other = PipeLine(), PipeLine()
    one.connect(other.address)
    other.connect(one.address)
    for each in (one, other):
        each.connected()
    yield one, other
    for each in (one, other):
        each.close()


def soon() -> float:
    return time.monotonic() + 30.0


def test_messages_come_whole_and_in_order(ends: tuple[PipeLine, PipeLine]) -> None:
    one, other = ends
    for size in (16, MOST):
        for number in range(2):
            one.send(bytes([number]) * size)
        other.send(b"an answer")
        assert [other.receive(size, soon()) for _ in range(2)] == [bytes([number]) * size for number in range(2)]
        assert one.receive(9, soon()) == b"an answer"


def test_one_that_closes_is_heard_of_by_who_waits_and_by_who_sends(ends: tuple[PipeLine, PipeLine]) -> None:
    one, other = ends
    one.send(b"the last")
    assert other.has_message
    assert not one.has_message
    one.close()
    assert not other.has_message  # of one that waits for an answer
    assert other.receive(8, soon()) == b"the last"
    with pytest.raises(ConnectionResetError, match="the process has closed the connection"):
        other.receive(8, soon())
    with pytest.raises(BrokenPipeError):
        other.send(b"who hears?")


def test_one_that_says_nothing_is_waited_for_until_its_time_is_up(ends: tuple[PipeLine, PipeLine]) -> None:
    with pytest.raises(TimeoutError, match="timed out"):
        ends[0].receive(8, time.monotonic())


def test_a_process_that_ends_is_heard_of_though_another_one_has_its_files_open() -> None:
    line = PipeLine()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        ours = os.open(f"/proc/{os.getpid()}/fd/{line.address[1]}", os.O_WRONLY)  # as a child has it that was forked
        line.connect((process.pid, 0))
        line.connected()
        process.kill()
        with pytest.raises(ConnectionResetError, match="the process is gone"):
            line.receive(8, soon())
    line.close()
    os.close(ours)


def test_a_file_that_is_no_pipe_is_refused() -> None:
    line = PipeLine()
    with open(os.devnull, "w") as file, pytest.raises(OSError, match="the file is another one"):
        line.connect((os.getpid(), file.fileno()))
    line.close()
