"""`FrozenRows`: rows of a table that training leaves as they are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from embedrock.batch.ids import check_ids
from embedrock.errors import ArgumentError

MOST_RANGES = 1 << 16  # every commit lists them
LOW, HIGH = -(2**63), 2**63


class FrozenRows:
    """Ids of rows that no step changes, and no eviction deletes. It is false without ids.

    Args:
        ranges: pairs of a first id and the one after the last. They ascend, and do not overlap.

    Raises:
        ArgumentError: `ranges` do not ascend, are not of int64, or are too many.
    """

    def __init__(self, ranges: Sequence[Sequence[int]]) -> None:
        self.ranges = [[start, stop] for start, stop in ranges]
        ends = [end for pair in self.ranges for end in pair]
        ascend = all(a < b for a, b in self.ranges) and all(a <= b for a, b in pairwise(ends))
        if not ascend or not all(type(end) is int and LOW <= end <= HIGH for end in ends):
            raise ArgumentError(f"`frozen` must be ranges of int64 that ascend: got {ranges!r:.200}.")
        if len(self.ranges) > MOST_RANGES:
            raise ArgumentError(
                f"`frozen` must be at most {MOST_RANGES:,} ids and ranges of ids: got {len(ranges):,}. Give a range "
                "for ids that follow each other, or keep these rows in a table of their own, and freeze its layer."
            )
        self._first, self._last = np.array(ends[::2], np.int64), np.array([b - 1 for b in ends[1::2]], np.int64)

    @staticmethod
    def of(given: Any) -> FrozenRows | None:
        """Return the rows of an argument: an id, a range, an array of ids, or a list of ids and ranges. None: None.

        Raises:
            ArgumentError: see `FrozenRows`.
            IdTypeError: ids are not integers.

        Example:
            >>> FrozenRows.of([7, range(3), 3]).ranges
            [[0, 4], [7, 8]]
        """
        if given is None or isinstance(given, FrozenRows):
            return given
        if isinstance(given, bool):
            raise ArgumentError(
                f"`frozen` must be the ids of rows that stay as they are: got {given}. To freeze all rows, freeze the "
                "layer: requires_grad_(False), in Keras trainable = False."
            )
        parts = given if isinstance(given, list | tuple) else [given]
        ranges = [part for part in parts if isinstance(part, range)]
        ids = [part for part in parts if not isinstance(part, range)] if ranges or parts is given else given
        found = [[part.start, part.stop] for part in ranges if part.step == 1 and part]
        found += [[k, k + 1] for part in ranges if part.step != 1 for k in part[: MOST_RANGES + 1]]
        array = np.unique(check_ids(ids, None, "`frozen`"))
        runs = np.split(array, np.flatnonzero(np.diff(array) != 1) + 1)
        merged = list[list[int]]()
        for start, stop in sorted(found + [[int(run[0]), int(run[-1]) + 1] for run in runs if len(run)]):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(stop, merged[-1][1])
            else:
                merged.append([start, stop])
        return FrozenRows(merged)

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __le__(self, other: FrozenRows) -> bool:
        """Return whether all of them are among others."""
        both = FrozenRows.of([range(*pair) for pair in (*self.ranges, *other.ranges)])
        return both is not None and both.ranges == other.ranges

    def below(self, count: int) -> FrozenRows:
        """Return those of them in ``[0, count)``."""
        cut = [[max(start, 0), min(stop, count)] for start, stop in self.ranges]
        return FrozenRows([pair for pair in cut if pair[0] < pair[1]])

    def has(self, ids: np.ndarray) -> np.ndarray:
        """Return which ids (n,) are among them: bool (n,)."""
        at = self._first.searchsorted(ids, "right") - 1
        return (at >= 0) & (ids <= self._last[at]) if self else np.zeros(ids.shape, bool)

    def describe(self) -> dict[str, Any]:
        """Return them as plain data, the arguments of equal `FrozenRows`."""
        return {"ranges": self.ranges}
