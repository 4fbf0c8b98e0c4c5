"""Popularity by Zipf's law, as of the ids of many logs."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

EXACT_RANKS = 1 << 15  # whose chances are computed each; those after them in groups ...
GROUPS = 1 << 12  # ... of so small a part of the ranks before them
SCATTER = 2_654_435_761  # Knuth's multiplicative hash: ids of popular rows lie far apart


@functools.lru_cache(1 << 12)  # a plan asks the same of all sizes of a table
def expected_misses(ranks: int, exponent: float, draws: int, slots: int) -> float:
    """Return how many different ranks of some draws are, on average, not among the `slots` most popular ones.

    It is the fewest misses that a cache of so many slots can have whose policy knows the popularity of every row, but
    not the batches to come. With 0 slots: how many different ranks there are.

    Example:
        >>> expected_misses(ranks=100, exponent=1.0, draws=1, slots=0)
        1.0
    """
    if ranks == 1:
        return float(slots < 1)
    edges = _edges(min(slots, ranks), ranks)
    counts = np.diff(edges)
    chances = np.diff(_zipf_cdf(edges, ranks, exponent)) / counts
    return float(-(counts * np.expm1(draws * np.log1p(-chances))).sum())


def best_split(laws: Sequence[tuple[int, float, int]], slots: int) -> list[int]:
    """Return how many of the ranks of each of several laws are among the `slots` that come most often of all.

    Args:
        laws: ranks, exponent and draws of each.
        slots: in all.

    Example:
        >>> best_split([(100, 1.0, 30), (100, 1.0, 10)], 41)
        [30, 10]
    """
    low, high = -700.0, 700.0  # logarithms of how often the rarest of them comes
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(_above(law, middle) for law in laws) > slots else (low, middle)
    return [int(_above(law, high)) for law in laws]


def _above(law: tuple[int, float, int], level: float) -> float:
    """Return how many ranks of a law come at least as often as the exponential of `level`."""
    ranks, exponent, draws = law
    whole = np.log(ranks) if exponent == 1 else (float(ranks) ** (1 - exponent) - 1) / (1 - exponent)
    often = np.log(draws) - np.log(max(whole, 1e-300))  # of the first rank
    return float(np.exp(np.clip((often - level) / max(exponent, 1e-3), -700, np.log(ranks))))


def bounded_zipf(uniform: npt.NDArray[np.float64], ranks: int, exponent: float) -> npt.NDArray[np.int64]:
    """Turn uniform numbers into ranks in [0, ranks), rank k about as likely as (k + 1) ** -exponent.

    The continuous power law on [1, ranks], by its inverse distribution function, rounded down.
    """
    if exponent == 1:
        value = float(ranks) ** uniform
    else:
        power = 1 - exponent
        value = ((float(ranks) ** power - 1) * uniform + 1) ** (1 / power)
    return np.minimum(value.astype(np.int64) - 1, ranks - 1)


def scattered(ranks: npt.NDArray[np.int64], rows: int) -> npt.NDArray[np.int64]:
    """Return ids in [0, rows) for ranks, one for each: those of popular ranks lie far apart."""
    return ranks * np.int64(SCATTER % rows or 1) % rows if rows < SCATTER else ranks


def _edges(first: int, ranks: int) -> npt.NDArray[np.int64]:
    """Return where groups of ranks of about one chance begin, and where the last one ends."""
    exact = min(ranks, max(first, EXACT_RANKS))
    grouped = np.geomspace(exact, ranks, 2 + int(GROUPS * np.log(ranks / max(exact, 1)))).astype(np.int64)
    edges = np.concatenate([np.arange(first, exact), grouped, [ranks]])
    return edges[np.diff(edges, prepend=-1) > 0]  # they ascend


def _zipf_cdf(values: npt.NDArray[np.int64], ranks: int, exponent: float) -> npt.NDArray[np.float64]:
    """Return the chance of a rank below each value: what `bounded_zipf` inverts, whose last rank has no mass."""
    values = np.minimum(values + 1.0, ranks)
    if exponent == 1:
        return np.log(values) / np.log(ranks)
    power = 1 - exponent
    return (values**power - 1) / (float(ranks) ** power - 1)
