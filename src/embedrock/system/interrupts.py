"""Ctrl-C, held back while a table changes, so that it never leaves one half changed."""

from __future__ import annotations

import importlib
import signal
import threading
from types import FrameType
from typing import Any, ClassVar

# What `signal`'s functions call, once they have made enums of handlers: that is most of their time, and this runs at
# every step.
_signal: Any = importlib.import_module("_signal")


class held_back:
    """Within it, Ctrl-C waits. At its end the handler that was there before gets it: at the end of the outermost one.

    Only the main thread is ever interrupted; elsewhere it does nothing.
    """

    _outermost: ClassVar[held_back | None] = None

    def __enter__(self) -> None:
        if held_back._outermost is None and threading.current_thread() is threading.main_thread():
            handler = _signal.getsignal(signal.SIGINT)
            if callable(handler):  # not one that was installed outside of Python
                self._handler: Any = handler
                self._caught: tuple[int, FrameType | None] | None = None
                self._thread = threading.get_ident()
                _signal.signal(signal.SIGINT, self._note)
                held_back._outermost = self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._caught = number, frame

    def __exit__(self, *error: object) -> None:
        if held_back._outermost is self:
            held_back._outermost = None
            _signal.signal(signal.SIGINT, self._handler)
            if self._caught is not None:
                self._handler(*self._caught)

    @staticmethod
    def begin_child() -> None:
        """Let Ctrl-C through in a child whose parent's main thread held it back, but not the thread that forked."""
        holder = held_back._outermost
        if holder is not None and holder._thread != threading.get_ident():
            held_back._outermost = None
            _signal.signal(signal.SIGINT, holder._handler)
