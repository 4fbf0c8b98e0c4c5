"""Children that are forked, call a function, and have only so long for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

SECONDS = 120  # a child that hangs is ended then


def child(function: Callable[[], object]) -> int:
    """Fork, and return the number of a child that calls a function; its exit code is 0 where that returns in time."""
    number = os.fork()
    if number == 0:
        signal.alarm(SECONDS)
        try:
            function()
        except BaseException as error:
            os.write(2, f"in the child: {error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    return number


def ended(number: int) -> int:
    """Return a child's exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def in_child(function: Callable[[], object]) -> None:
    """Call a function in a forked child, and fail unless it returns in time."""
    assert ended(child(function)) == 0
