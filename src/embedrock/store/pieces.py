"""Pieces: the ranges of ids that compaction folds one after another, and which of them come first.

A piece is what a chunk of the base covers, or what lies between two of them. Folding one costs what its chunk has, and
makes room for the rows of it in the overlay. Where all rows are alike, the piece that was folded longest ago has most
of them: so chunks are folded round and round, each with twice as many rows as it has on average over time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from embedrock.store.base import Base


class CompactionGoal(NamedTuple):
    """What folding should come down to.

    Attributes:
        rows: in the overlay.
        age: see `KeyRange`; that of all records of the base, on average. No piece is left at twice that age.
    """

    rows: int
    age: int


class KeyRange(NamedTuple):
    """A range of ids.

    Attributes:
        lo: the least.
        hi: all are less (so it may be 2**63).
        records: that its new chunks have, about.
        waiting: rows in logs that can be folded.
        age: bytes of the logs that came since it was folded.
    """

    lo: int
    hi: int
    records: int
    waiting: int
    age: int


def bounds(base: Base, first: int, end: int) -> list[int]:
    """Return where the pieces of ``[first, end)`` begin, and `end`: at each chunk, and behind it."""
    cuts = {first, *(cut for chunk in base.runs for cut in (chunk.lo, chunk.hi)), end}
    return sorted(cut for cut in cuts if first <= cut <= end)


def ages(base: Base, logs: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Return the age of each chunk, and that of rows which are in none.

    Args:
        base: has the chunks.
        logs: the number and the bytes of each that can be folded.
    """
    since = [sum(nbytes for number, nbytes in logs if number >= chunk.folded_below) for chunk in base.runs]
    return since, sum(nbytes for _, nbytes in logs)


def mean_age(base: Base, logs: Sequence[tuple[int, int]], count: int) -> float:
    """Return the age of `count` records on average: as many as are not in the base are in none of its chunks."""
    of_chunks, of_others = ages(base, logs)
    known = sum(age * chunk.count for age, chunk in zip(of_chunks, base.runs, strict=True))
    return (known + of_others * max(count - base.count, 0)) / max(count, base.count, 1)


def cut(base: Base, cuts: Sequence[int], waiting: np.ndarray, logs: Sequence[tuple[int, int]]) -> list[KeyRange]:
    """Return the pieces between `cuts`, of which so many rows wait each."""
    of_chunks, of_others = ages(base, logs)
    known = {chunk.lo: (chunk.count, age) for chunk, age in zip(base.runs, of_chunks, strict=True)}
    pieces = []
    for lo, hi, rows in zip(cuts[:-1], cuts[1:], waiting.tolist(), strict=True):
        stored, age = known.get(lo, (0, of_others))
        pieces.append(KeyRange(lo, hi, max(stored, rows), rows, age))
    return pieces


def choose(pieces: Sequence[KeyRange], goal: CompactionGoal) -> list[KeyRange]:
    """Return which pieces to fold, so that what is left of all of them is as the goal says, if that can be."""
    rows = sum(piece.waiting for piece in pieces)
    records = sum(piece.records for piece in pieces)
    old = sum(piece.records * piece.age for piece in pieces)
    chosen = []
    for piece in sorted((one for one in pieces if one.waiting), key=lambda one: _worth(one, goal), reverse=True):
        if rows <= goal.rows and old <= goal.age * records and not _is_old(piece, goal):
            break
        chosen.append(piece)
        rows, old = rows - piece.waiting, old - piece.records * piece.age
    return chosen


def _is_old(piece: KeyRange, goal: CompactionGoal) -> bool:
    return piece.age > 2 * goal.age


def _worth(piece: KeyRange, goal: CompactionGoal) -> tuple[bool, float]:
    # The room for rows over the bytes written, and how long it will last: a piece that is old gets new rows slowly. By
    # both, a piece that gets four times as many rows is folded twice as often, which writes least for all.
    return _is_old(piece, goal), piece.waiting * piece.age / piece.records
