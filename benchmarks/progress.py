"""Lines about the progress of a benchmark."""

from __future__ import annotations

import sys


def say(text: str, transient: bool = False) -> None:
    """Print a line about the progress. The next line replaces a transient one, which is for terminals only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="" if transient else "\n", file=sys.stderr, flush=True)
    elif not transient:
        print(text, file=sys.stderr, flush=True)
