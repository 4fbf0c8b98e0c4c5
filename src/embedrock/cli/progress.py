"""A progress bar, on a terminal only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(label: str, total: int, done: int) -> Iterator[Callable[[int], object]]:
    """Show how many of `total` rows are done; yields a function that adds to them. Without tqdm nothing is shown."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda count: None
        return
    with tqdm(desc=label, total=total, initial=done, unit=" rows", unit_scale=True, leave=False, disable=None) as bar:
        yield bar.update
