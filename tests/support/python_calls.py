"""How many Python functions something calls: what a small batch costs, whatever else the machine does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from embedrock.kernels import cpu


def least_calls(function: Callable[[], Any], warm: int = 10, times: int = 10) -> int:
    """Return the least number of Python functions that a warm call of `function` calls, those of PyTorch left out.

    On one thread: with more, a worker or the caller makes the step, whoever is there first.
    """
    threads = cpu.threads.get_threads()
    cpu.threads.set_threads(1)
    try:
        for _ in range(warm):
            function()
        return min(_calls(function) for _ in range(times))
    finally:
        cpu.threads.set_threads(threads)


def _calls(function: Callable[[], Any]) -> int:
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and "/torch/" not in frame.f_code.co_filename.replace("/embedrock/torch/", "/")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count
