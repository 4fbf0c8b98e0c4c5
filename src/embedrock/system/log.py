"""`tell`: a line to the logger ``embedrock``, as a rule at level INFO: what a program should know and need not act on.

Python shows INFO to nobody who has not set up logging. So where neither the root's logger nor ours has a handler, ours
gets one that writes to stderr. Whoever sets up logging later is asked for each line, and has it once.
"""

from __future__ import annotations

import logging
import sys

LOGGER = logging.getLogger("embedrock")


class _StderrHandler(logging.Handler):
    """Writes lines to stderr as it is now, as long as nobody has set up logging."""

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


OURS = ("embedrock", "torch", "keras", "tensorflow", "functools", "contextlib", "weakref")  # whose frames say nothing


def caller() -> str:
    """Return the line that called Embedrock, from wherever inside of it: "train.py:12".

    Example:
        >>> exec(compile("found = caller()", "train.py", "exec"), space := {"caller": caller, "__name__": "__main__"})
        >>> space["found"]
        'train.py:1'
    """
    frame = sys._getframe(caller_level() - 1)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def is_interrupted() -> bool:
    """Return whether garbage is being collected in the middle of a call of ours: a finalizer asks."""
    frame, is_beyond = sys._getframe(1), False
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        is_beyond |= name == "weakref"
        if is_beyond and name.startswith("embedrock."):
            return True
        frame = frame.f_back
    return False


def caller_level() -> int:
    """Return the `stacklevel` with which a warning of the function that calls this is shown at `caller`'s line."""
    frame, level = sys._getframe(1), 1
    while frame.f_globals.get("__name__", "").partition(".")[0] in OURS and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    return level
