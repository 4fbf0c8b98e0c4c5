"""A stream that is late: what is launched beside the caller's work is done at random moments, or when it must be.

Under Triton's interpreter there are no streams, and work that is done at once hides what does not wait for it. Here the
kernels that `StreamOrder.aside` launches wait in a queue. Before each kernel of the caller's, some of them are run, in
order; `StreamOrder.wait_for_copies` runs all that are left. Or only the copies of records wait, as long as they can.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from triton.runtime import interpreter

from embedrock.device.stream_order import StreamOrder

AT_ONCE = ("_join",)  # what PyTorch sorts, and no call of PyTorch is late here


class LateCopies:
    """The queue.

    Attributes:
        late: how many kernels were run later than they were launched.
    """

    def __init__(self, seed: int | None) -> None:
        self.late = 0
        self._random = None if seed is None else random.Random(seed)  # None: records alone are late
        self._queue: deque[Callable[[], Any]] = deque()
        self._is_aside = False

    def launched(self, name: str, run: Callable[[], Any]) -> None:
        """Run a kernel, or let it wait."""
        if self._is_aside and name not in AT_ONCE and (self._random is not None or name == "_exchange"):
            self._queue.append(run)
            return
        while self._queue and self._random is not None and self._random.random() < 0.5:
            self._queue.popleft()()
        self.late += len(self._queue)
        run()

    @contextmanager
    def aside(self, timeline: Any) -> Iterator[None]:
        self._is_aside, timeline.copied = True, self  # in the place of an event
        try:
            yield
        finally:
            self._is_aside = False

    def wait_for(self, timeline: Any) -> None:
        """Do the same as `StreamOrder.wait_for_copies`."""
        if timeline.copied is not None:
            timeline.copied = None
            self.wait()

    def wait(self) -> None:
        """Run all that waits."""
        while self._queue:
            self._queue.popleft()()


def install(monkeypatch: pytest.MonkeyPatch, seed: int | None) -> LateCopies:
    """Let copies be late from now on."""
    copies, launch = LateCopies(seed), interpreter.GridExecutor.__call__
    monkeypatch.setattr(StreamOrder, "aside", lambda timeline, *tensors: copies.aside(timeline))
    monkeypatch.setattr(StreamOrder, "wait_for_copies", lambda timeline: copies.wait_for(timeline))
    monkeypatch.setattr(StreamOrder, "finish", lambda timeline: copies.wait())

    def launched(executor: Any, *args: Any, **options: Any) -> None:
        copies.launched(executor.fn.__name__, lambda: launch(executor, *args, **options))

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
    return copies
