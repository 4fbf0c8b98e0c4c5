"""Ctrl-C, held back while a table changes, so that it never leaves one half changed."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class held_back:
    """Within it, Ctrl-C waits. At its end the handler that was there before gets it.

    Only the main thread is ever interrupted; elsewhere it does nothing.
    """

    def __enter__(self) -> None:
        self._handler: Any = None
        self._caught: tuple[int, FrameType | None] | None = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):  # not one that was installed outside of Python
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._caught = number, frame

    def __exit__(self, *error: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._caught is not None:
                self._handler(*self._caught)
