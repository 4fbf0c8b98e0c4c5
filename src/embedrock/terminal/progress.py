"""How far a program is: a bar on standard error, where that is a terminal; or lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(label: str, total: int, done: int) -> Iterator[Callable[[int], object]]:
    """Show how many of `total` rows are done; yield a function that adds to them. Without tqdm nothing is shown."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda count: None
        return
    with tqdm(desc=label, total=total, initial=done, unit=" rows", unit_scale=True, leave=False, disable=None) as bar:
        yield bar.update


def say(text: str, transient: bool = False) -> None:
    """Print a line about how far it is; a transient one gives way to the next, and is for terminals only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="" if transient else "\n", file=sys.stderr, flush=True)
    elif not transient:
        print(text, file=sys.stderr, flush=True)
