"""Key ranges: the units of compaction, and their order.

A key range is that of a sorted segment, or lies between two of them. The compaction of a range rewrites its segment,
and frees its rows in the log index. If all rows are alike, the range compacted longest ago has most rows to free. So
compaction takes the segments in turn. Each then has twice its average number of rows to free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from embedrock.store.base import Base


class CompactionGoal(NamedTuple):
    """Goal of a compaction.

    Attributes:
        rows: rows in the log index.
        age: mean age of all records of the base, see `KeyRange`. No key range is left at twice that age.
    """

    rows: int
    age: int


class KeyRange(NamedTuple):
    """Range of ids.

    Attributes:
        lo: the least id.
        hi: the end, above all ids, up to 2**63.
        records: records of its new segment, about.
        waiting: rows in logs that can be compacted.
        age: bytes of logs since its last compaction.
    """

    lo: int
    hi: int
    records: int
    waiting: int
    age: int


def bounds(base: Base, first: int, end: int) -> list[int]:
    """Return the starts of the key ranges of ``[first, end)``, and `end`. Each segment starts and ends one."""
    cuts = {first, *(cut for segment in base.runs for cut in (segment.lo, segment.hi)), end}
    return sorted(cut for cut in cuts if first <= cut <= end)


def ages(base: Base, logs: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Return the age of each sorted segment, and that of rows outside all.

    Args:
        base: the sorted segments.
        logs: the number and the bytes of each log that can be compacted.
    """
    since = [sum(nbytes for number, nbytes in logs if number >= segment.folded_below) for segment in base.runs]
    return since, sum(nbytes for _, nbytes in logs)


def mean_age(base: Base, logs: Sequence[tuple[int, int]], count: int) -> float:
    """Return the mean age of `count` records. Records that are not in the base are in none of its segments."""
    of_segments, of_others = ages(base, logs)
    known = sum(age * segment.count for age, segment in zip(of_segments, base.runs, strict=True))
    return (known + of_others * max(count - base.count, 0)) / max(count, base.count, 1)


def cut(base: Base, cuts: Sequence[int], waiting: np.ndarray, logs: Sequence[tuple[int, int]]) -> list[KeyRange]:
    """Return the key ranges between `cuts`. `waiting` has the rows to compact in each."""
    of_segments, of_others = ages(base, logs)
    known = {segment.lo: (segment.count, age) for segment, age in zip(base.runs, of_segments, strict=True)}
    key_ranges = []
    for lo, hi, rows in zip(cuts[:-1], cuts[1:], waiting.tolist(), strict=True):
        stored, age = known.get(lo, (0, of_others))
        key_ranges.append(KeyRange(lo, hi, max(stored, rows), rows, age))
    return key_ranges


def choose(key_ranges: Sequence[KeyRange], goal: CompactionGoal) -> list[KeyRange]:
    """Return the key ranges to compact, so that the rest reaches the goal if possible."""
    rows = sum(key_range.waiting for key_range in key_ranges)
    records = sum(key_range.records for key_range in key_ranges)
    old = sum(key_range.records * key_range.age for key_range in key_ranges)
    chosen = []
    for key_range in sorted(
        (one for one in key_ranges if one.waiting), key=lambda one: _worth(one, goal), reverse=True
    ):
        if rows <= goal.rows and old <= goal.age * records and not _is_old(key_range, goal):
            break
        chosen.append(key_range)
        rows, old = rows - key_range.waiting, old - key_range.records * key_range.age
    return chosen


def _is_old(key_range: KeyRange, goal: CompactionGoal) -> bool:
    return key_range.age > 2 * goal.age


def _worth(key_range: KeyRange, goal: CompactionGoal) -> tuple[bool, float]:
    # Score: the freed rows per byte written, times how long the room lasts. An old key range gets new rows slowly. By
    # this score, a key range with four times as many new rows is compacted twice as often, which writes least in total.
    return _is_old(key_range, goal), key_range.waiting * key_range.age / key_range.records
