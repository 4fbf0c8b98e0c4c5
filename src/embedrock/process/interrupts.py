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
                self._handler, self._thread = handler, threading.get_ident()
                signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._caught = number, frame

    def __exit__(self, *error: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._caught is not None:
                self._handler(*self._caught)

    def handler_for(self, thread: int) -> Any:
        """Return what gets Ctrl-C in a process whose only thread is `thread`: nobody else ends what was begun."""
        if self._thread == thread:
            return self._note
        before = getattr(self._handler, "__self__", None)
        return before.handler_for(thread) if isinstance(before, held_back) else self._handler


def begin_child() -> None:
    """Let Ctrl-C through in a child whose parent's main thread held it back, but not the thread that forked."""
    holder = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    if isinstance(holder, held_back):
        signal.signal(signal.SIGINT, holder.handler_for(threading.get_ident()))
