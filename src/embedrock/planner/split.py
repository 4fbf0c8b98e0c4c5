"""A split of a budget over tables: each has several options, which cost RAM and reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class SplitOption(NamedTuple):
    """An option for a table.

    Attributes:
        nbytes: bytes of RAM.
        cost: rows that a step reads.
        how: the option.
    """

    nbytes: int
    cost: float
    how: Any = None


def split(tables: Sequence[Sequence[SplitOption]], budget: int) -> list[SplitOption] | None:
    """Choose an option for each table within a budget, at about the least cost; None if nothing fits.

    RAM goes to the table that gains most per byte, as long as some is left.

    Args:
        tables: the options of each.
        budget: bytes of RAM.

    Example:
        >>> one, other = [SplitOption(1, 9.0), SplitOption(3, 1.0)], [SplitOption(1, 5.0), SplitOption(3, 4.0)]
        >>> [option.nbytes for option in split([one, other], 5) or ()]
        [3, 1]
    """
    chosen = [min(options, key=lambda one: one[:2]) for options in tables]
    left = budget - sum(one.nbytes for one in chosen)
    if left < 0:
        return None
    steps = [_best_step(one, options, left) for one, options in zip(chosen, tables, strict=True)]
    while any(steps):
        k = max(range(len(tables)), key=lambda k: _gain(chosen[k], steps[k]))
        step = steps[k]
        if step is not None and step.nbytes - chosen[k].nbytes <= left:
            left, chosen[k] = left - (step.nbytes - chosen[k].nbytes), step
        steps[k] = _best_step(chosen[k], tables[k], left)
    return chosen


def _best_step(now: SplitOption, options: Sequence[SplitOption], left: int) -> SplitOption | None:
    """Return the option that gains most per byte, of those that fit the rest of the budget."""
    better = (one for one in options if one.cost < now.cost and one.nbytes - now.nbytes <= left)
    return max(better, key=lambda one: _gain(now, one), default=None)


def _gain(now: SplitOption, step: SplitOption | None) -> float:
    return -1.0 if step is None else (now.cost - step.cost) / max(1, step.nbytes - now.nbytes)
