"""`tell`: logs a line to the logger ``embedrock``, by default at level INFO.

Python shows INFO only after logging was set up. So if neither the root logger nor ours has a handler, ours gets one
that writes to stderr. That handler checks for each line whether logging has been set up since. So no line appears
twice.
"""

from __future__ import annotations

import logging
import sys

LOGGER = logging.getLogger("embedrock")


class _StderrHandler(logging.Handler):
    """Handler that writes lines to the current stderr until logging is set up."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers and sys.stderr is not None:
            sys.stderr.write(f"embedrock: {self.format(record)}\n")


def tell(text: str, level: int = logging.INFO) -> None:
    """Log a line.

    Example:
        >>> tell("users.rock resumed at step 3 (commit 3)")
    """
    if not LOGGER.hasHandlers():
        LOGGER.addHandler(_StderrHandler())
        if LOGGER.level == logging.NOTSET:
            LOGGER.setLevel(logging.INFO)
    LOGGER.log(level, "%s", text)


OURS = ("embedrock", "torch", "keras", "tensorflow", "functools", "contextlib", "weakref")  # packages of frames to skip


def caller() -> str:
    """Return the line of code that called Embedrock, such as "train.py:12".

    Example:
        >>> exec(compile("found = caller()", "train.py", "exec"), space := {"caller": caller, "__name__": "__main__"})
        >>> space["found"]
        'train.py:1'
    """
    frame = sys._getframe(caller_level() - 1)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def is_interrupted() -> bool:
    """Return whether a garbage collection interrupted a call of Embedrock. Finalizers use it."""
    frame, is_beyond = sys._getframe(1), False
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        is_beyond |= name == "weakref"
        if is_beyond and name.startswith("embedrock."):
            return True
        frame = frame.f_back
    return False


def caller_level() -> int:
    """Return the `stacklevel` with which the calling function's warning shows the line of `caller`."""
    frame, level = sys._getframe(1), 1
    while frame.f_globals.get("__name__", "").partition(".")[0] in OURS and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    return level
