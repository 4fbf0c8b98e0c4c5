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
