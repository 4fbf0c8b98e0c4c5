"""How far a program is: a bar on standard error, where that is a terminal; or lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

MANY = 10_000  # a larger number is shown as 12.3k


class Advance(Protocol):
    """Adds to what is done, and shows a few words beside it."""

    def __call__(self, count: int, note: str = "") -> None: ...


@contextmanager
def progress(label: str, total: int, done: int, unit: str = " rows") -> Iterator[Advance]:
    """Show how many of `total` rows, or steps, are done; without tqdm nothing is shown.

    Yields:
        A function that adds to them, and may show a few words beside: ``advance(count, "loss=0.5")``.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda count, note="": None
        return
    scale = total > MANY
    with tqdm(desc=label, total=total, initial=done, unit=unit, unit_scale=scale, leave=False, disable=None) as bar:

        def advance(count: int, note: str = "") -> None:
            if note:
                bar.set_postfix_str(note, refresh=False)
            bar.update(count)

        yield advance


def say(text: str, transient: bool = False) -> None:
    """Print a line about how far it is; a transient one gives way to the next, and is for terminals only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="" if transient else "\n", file=sys.stderr, flush=True)
    elif not transient:
        print(text, file=sys.stderr, flush=True)
