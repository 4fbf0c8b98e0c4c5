"""The log that rows are read from while others are in the base: what is left of it as logs are folded, step by step.

As no commit is made meanwhile, there are three times:

1. Rows that leave the cache go to one log, until its rows take all the room in the overlay. Then all of them are
   folded, as there is no base yet.
2. The base is in files of 8 MiB and more, and a new log grows as the first one did: up to hundreds of MB, which are
   read past the page cache from `DIRECT_BYTES` on. Rows that left since the fold are read from there.
3. When the overlay is full again, a part of its rows is folded at a time (`embedrock.store.pieces`), and the log is
   closed: those that come after it have a part of the rows, and are small. The large one is needed for as long as a row
   of it is not folded and has not left anew, which is about as long as it took to grow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Seen = Callable[[float], float]  # different rows of so many batches


class LogThen(NamedTuple):
    """A log as it is after some steps.

    Attributes:
        share: of the rows that a step reads, those that are read from it.
        steps: whose rows that left are in it.
        is_written: whether more are appended.
        base_reads: rows read from the base since the first fold, which wrote it past the page cache.
    """

    share: float
    steps: int
    is_written: bool
    base_reads: float = 0.0


def log_then(seen: Seen, steps: int, slots: int, most_rows: float, reads: float) -> LogThen:
    """Return the log that rows are read from besides the base, once logs are folded.

    A row that is missed and was seen before is in the log if it was used last since the fold, or shortly before, so
    that it was in the cache still. Those that were not are as new to so many batches.

    Args:
        seen: different rows of so many batches.
        steps: since the table is trained.
        slots: of the cache.
        most_rows: that the overlay has room for.
        reads: rows that a step reads.

    Example:
        >>> then = log_then(lambda batches: 100 * batches**0.5, 60, 300, 450, 3.0)
        >>> round(then.share, 2), then.steps, then.is_written
        (0.25, 24, True)
    """
    first = max(1, _batches(seen, most_rows + slots / 2, steps))  # the most popular rows never leave
    since, held = min(steps - first, first), _batches(seen, slots, steps)
    if since < 1 or reads <= 0:
        return LogThen(0.0, 0, False)
    from_base = _new(seen, since + held) - _new(seen, first + since)
    folded = (steps - first - since) / first
    share = float(np.clip(1 - from_base / reads, 0, 1)) * max(0.0, 1 - folded)
    return LogThen(share, since, folded == 0, (steps - first) * min(from_base, reads))


def _batches(seen: Seen, rows: float, most: int) -> int:
    """Return how many batches have so many different rows; `most` if even these do not."""
    return bisect_left(range(most), rows, key=seen)


def _new(seen: Seen, batches: float) -> float:
    """Return how many rows a batch has that were in none of so many before."""
    return seen(batches + 0.5) - seen(batches - 0.5)
