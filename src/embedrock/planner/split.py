"""How to split a budget: each table has several ways to be, which cost RAM and time."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple


class Option(NamedTuple):
    """A way for a table to be.

    Attributes:
        nbytes: of RAM.
        cost: of a step: seconds, or rows read.
        how: what it is.
    """

    nbytes: int
    cost: float
    how: Any = None


def worthwhile(options: Sequence[Option]) -> list[Option]:
    """Return the options that are best at some price of RAM, the smallest first: each byte more buys less.

    Example:
        >>> [one.nbytes for one in worthwhile([Option(1, 9), Option(2, 8), Option(3, 1), Option(9, 1)])]
        [1, 3]
    """
    hull: list[Option] = []
    for one in sorted(options, key=lambda one: one[:2]):
        if hull and one.cost >= hull[-1].cost:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], one):
            hull.pop()
        hull.append(one)
    return hull


def _slope(one: Option, other: Option) -> float:
    return (other.cost - one.cost) / max(1, other.nbytes - one.nbytes)


def split(tables: Sequence[Sequence[Option]], budget: int) -> list[Option] | None:
    """Return an option for each table, all within a budget, of about the least cost; None where nothing fits.

    RAM goes to the table that gains most of each byte, as long as there is some.

    Args:
        tables: the options of each.
        budget: bytes of RAM.
    """
    hulls = [worthwhile(options) for options in tables]
    chosen, left = [0] * len(hulls), budget - sum(hull[0].nbytes for hull in hulls)
    if left < 0:
        return None
    waiting = [(_slope(hull[0], hull[1]), k) for k, hull in enumerate(hulls) if len(hull) > 1]
    heapq.heapify(waiting)
    while waiting:
        _, k = heapq.heappop(waiting)
        hull, at = hulls[k], chosen[k]
        more = hull[at + 1].nbytes - hull[at].nbytes
        if more > left:
            continue  # smaller ones may fit still
        left, chosen[k] = left - more, at + 1
        if at + 2 < len(hull):
            heapq.heappush(waiting, (_slope(hull[at + 1], hull[at + 2]), k))
    return _filled([hull[at] for hull, at in zip(hulls, chosen, strict=True)], tables, left)


def _filled(chosen: list[Option], tables: Sequence[Sequence[Option]], left: int) -> list[Option]:
    """Spend what is left, too little for the next option that is worthwhile, on what gains most."""
    while True:
        better = [
            (now.cost - one.cost, k, one)
            for k, (now, options) in enumerate(zip(chosen, tables, strict=True))
            for one in options
            if one.cost < now.cost and one.nbytes - now.nbytes <= left
        ]
        if not better:
            return chosen
        _, k, one = max(better, key=lambda gain: gain[0])
        left, chosen[k] = left - (one.nbytes - chosen[k].nbytes), one
