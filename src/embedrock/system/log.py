"""`tell`: logs a line to the logger ``embedrock``, by default at level INFO.

It adds no handler and sets no level, so that logging is as the program sets it up. Until then, Python would show
warnings only, on stderr. `tell` shows INFO there as well.
"""

from __future__ import annotations

import contextlib
import logging
import sys

LOGGER = logging.getLogger("embedrock")


class _LastResort(logging.Handler):
    """Handler of programs that set up no logging, as `logging.lastResort` is. It writes to the current stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a broken pipe, closed, or None
            sys.stderr.write(f"embedrock: {self.format(record)}\n")


_LAST_RESORT = _LastResort()


def tell(text: str, level: int = logging.INFO, name: str = LOGGER.name) -> None:
    """Log a line to a logger. If no logger has a handler or a level, INFO is shown on stderr.

    Example:
        >>> tell("users.rock resumed at step 3 (commit 3)")
    """
    logger = logging.getLogger(name)
    has_level = logger.level or LOGGER.level or logging.root.level != logging.WARNING
    if logger.hasHandlers():
        logger.log(level, "%s", text, stacklevel=2)
    elif logger.isEnabledFor(level) or not (has_level or logger.disabled or logging.root.manager.disable >= level):
        _LAST_RESORT.handle(logging.LogRecord(name, level, "", 0, text, None, None))


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
