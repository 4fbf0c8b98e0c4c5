"""Where in the user's program something happened, for error messages."""

from __future__ import annotations

import sys

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
