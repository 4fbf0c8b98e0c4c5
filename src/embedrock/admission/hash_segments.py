"""`HashSegments`: the parts of the hash space that a process has rows of, as tables that ranks share are cut."""

from __future__ import annotations

import numpy as np

from embedrock.admission.copy_on_write import damaged
from embedrock.batch.ids import owners


class HashSegments:
    """Segments of the hash space, numbered in the order in which their ids come.

    A table of one process has one segment. In a table that ranks share, each segment admits and evicts rows for itself,
    and one rank owns all of it. So the rows do not depend on the number of ranks.

    Args:
        count: number of segments of the table, on all ranks.

    Attributes:
        known: int64 (k,), the segments that have a number here.

    Example:
        >>> segments = HashSegments(256)
        >>> segments.numbers_of(np.array([1, 8, 1])).tolist(), len(segments.known)
        ([0, 1, 0], 2)
    """

    def __init__(self, count: int) -> None:
        self.count, self.known = count, np.zeros(int(count == 1), np.int64)
        self._numbers = np.full(count, int(count == 1) - 1, np.int64)  # 0 of one segment, otherwise not numbered yet

    @property
    def is_one(self) -> bool:
        """Return whether the table has one segment."""
        return self.count == 1

    def numbers_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the number of each id's segment, int64 (n,). New segments get the next numbers."""
        if self.is_one:
            return np.zeros(len(ids), np.int64)
        own = owners(ids, self.count)
        if (numbers := self._numbers[own]).min(initial=0) < 0:
            new, first = np.unique(own[numbers < 0], return_index=True)
            self._number(new[np.argsort(first)])
            numbers = self._numbers[own]
        return numbers

    def load(self, segments: np.ndarray) -> None:
        """Number segments, int64 (n,), as another process did.

        Raises:
            ArgumentError: they are damaged.
        """
        if len(np.unique(segments)) != len(segments) or not ((segments >= 0) & (segments < self.count)).all():
            raise damaged(f"segments below {self.count} that do not repeat")
        self._number(segments)

    def _number(self, segments: np.ndarray) -> None:
        self._numbers[segments] = np.arange(len(self.known), len(self.known) + len(segments))
        self.known = np.concatenate([self.known, segments])

    def shares(self, most: int) -> np.ndarray:
        """Return the share of each numbered segment in `most` rows of the table, int64 (k,)."""
        return (self.known + 1) * most // self.count - self.known * most // self.count


def nth_of_equals(numbers: np.ndarray) -> np.ndarray:
    """Return for each number, int64 (n,), how often it occurs before.

    Example:
        >>> nth_of_equals(np.array([3, 5, 3, 3])).tolist()
        [0, 0, 1, 2]
    """
    counts = np.bincount(numbers)
    nth = np.empty(len(numbers), np.int64)
    nth[np.argsort(numbers, kind="stable")] = counting_each(counts)
    return nth


def counting_each(counts: np.ndarray) -> np.ndarray:
    """Return the numbers from 0 up to each count, one count after the other, int64 (sum,).

    Example:
        >>> counting_each(np.array([2, 0, 3])).tolist()
        [0, 1, 0, 1, 2]
    """
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
