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
    frame = outermost = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in OURS:
        outermost, frame = frame, frame.f_back
    frame = frame or outermost
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
