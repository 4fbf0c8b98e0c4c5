"""Who asks whom for how many rows in a step: counted for ids of a log, drawn for those of Zipf's law."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from embedrock.errors import ArgumentError
from embedrock.planner.zipf import expected_misses
from embedrock.shards.owners import owners

DISCRETE = 1 << 21  # most popular ids, whose owners and askers are drawn one by one; the others are spread evenly


class Traffic(NamedTuple):
    """Rows that ranks ask for in a step, on average over steps.

    Attributes:
        unique: different ids of a rank's batch.
        asked: rows that are asked of each rank, by all with itself: float64 (ranks,).
        owned: different rows that are asked of a rank, which its step changes.
        remote: rows that a rank asks others for.
        beyond: of those, rows that come from another node.
    """

    unique: float
    asked: np.ndarray
    owned: float
    remote: float
    beyond: float

    @property
    def balance(self) -> float:
        """How much more than the mean the rank has to serve that has most."""
        return float(self.asked.max() / self.asked.mean())


def of_zipf(rows: int, exponent: float, lookups: int, ranks: int, per_node: int, seed: int = 0) -> Traffic:
    """Return the traffic of ids by Zipf's law, each popular one with an owner by a hash, as all its askers ask it."""
    unique = expected_misses(rows, exponent, lookups, 0)
    owned = expected_misses(rows, exponent, lookups * ranks, 0) / ranks
    popular = np.arange(1, min(rows, DISCRETE) + 1, dtype=np.float64)
    chances = -np.expm1(lookups * np.log1p(-_chances(popular, rows, exponent)))
    draw = np.random.default_rng(seed)
    asked = np.bincount(draw.integers(ranks, size=len(popular)), draw.binomial(ranks, chances), ranks).astype(float)
    others = max(0.0, unique - float(chances.sum()))  # of a rank; each is asked of a rank of its own, or nearly so
    asked += draw.poisson(others, ranks)
    remote = unique * (ranks - 1) / ranks
    return Traffic(unique, asked, owned, remote, unique * max(0, ranks - per_node) / ranks)


def _chances(popular: np.ndarray, rows: int, exponent: float) -> np.ndarray:
    """Return the chance of each of the first ids of Zipf's law as `bounded_zipf` draws them."""
    edges = np.append(popular, popular[-1] + 1)
    edges = np.minimum(edges, rows)
    if exponent == 1:
        cdf = np.log(edges) / np.log(max(rows, 2))
    else:
        cdf = (edges ** (1 - exponent) - 1) / (float(max(rows, 2)) ** (1 - exponent) - 1)
    return np.clip(np.diff(cdf), 0, 1 - 1e-12)


def of_log(log: Iterable[np.ndarray], lookups: int, ranks: int, per_node: int, steps: int) -> Traffic:
    """Return the traffic of the first steps of a log, whose ids ranks take in turn: counted.

    Raises:
        ArgumentError: it has fewer ids than one step.
    """
    counts, owned, done = np.zeros((ranks, ranks)), 0, 0
    for _, step in zip(range(steps), _cut(log, lookups * ranks), strict=False):
        seen = [np.unique(ids) for ids in step.reshape(ranks, lookups)]
        for rank, ids in enumerate(seen):
            counts[rank] += np.bincount(owners(ids, ranks), minlength=ranks)
        owned, done = owned + len(np.unique(step)), done + 1
    if not done:
        raise ArgumentError(f"`log` must have the ids of a step, {lookups} for each of {ranks} ranks: it has fewer.")
    counts /= done
    nodes = np.arange(ranks) // per_node
    beyond = float(counts[nodes[:, None] != nodes].sum()) / ranks
    remote = float(counts.sum() - np.trace(counts)) / ranks
    return Traffic(float(counts.sum()) / ranks, counts.sum(0), owned / done / ranks, remote, beyond)


def _cut(log: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    waiting = np.empty(0, np.int64)
    for part in log:
        waiting = np.concatenate([waiting, np.asarray(part, np.int64).reshape(-1)])
        while len(waiting) >= size:
            yield waiting[:size]
            waiting = waiting[size:]
