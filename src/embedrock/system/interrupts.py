"""Ctrl-C, delayed while a table changes, so that it never interrupts a change."""

from __future__ import annotations

import importlib
import signal
import threading
from types import FrameType
from typing import Any, ClassVar

# The C functions behind `signal`. The wrappers spend most of their time on enums, and this runs at every step.
_signal: Any = importlib.import_module("_signal")


class held_back:
    """Context manager that delays Ctrl-C. At the end of the outermost one, the previous handler gets it.

    Python interrupts only the main thread. In other threads, the context does nothing.
    """

    _outermost: ClassVar[held_back | None] = None
    _main: ClassVar[int | None] = threading.main_thread().ident

    def __enter__(self) -> None:
        if held_back._outermost is None and (thread := threading.get_ident()) == held_back._main:
            handler = _signal.getsignal(signal.SIGINT)
            if callable(handler):  # not a handler installed outside of Python
                self._handler: Any = handler
                self._caught: tuple[int, FrameType | None] | None = None
                self._thread = thread
                _signal.signal(signal.SIGINT, self._record)
                held_back._outermost = self

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._caught = number, frame

    def __exit__(self, *error: object) -> None:
        if held_back._outermost is self:
            held_back._outermost = None
            _signal.signal(signal.SIGINT, self._handler)
            if self._caught is not None:
                self._handler(*self._caught)

    @staticmethod
    def begin_child() -> None:
        """End a delay of the parent's main thread in the child, unless the main thread forked."""
        held_back._main, holder = threading.get_ident(), held_back._outermost
        if holder is not None and holder._thread != threading.get_ident():
            held_back._outermost = None
            _signal.signal(signal.SIGINT, holder._handler)
