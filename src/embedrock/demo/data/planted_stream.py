"""A click stream whose items are born and die: endless, deterministic, and with a known best score on each day."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

import embedrock as er
from embedrock.bench.harness.workload import bounded_zipf
from embedrock.demo.data.planted import drawn_labels

ZIPF = 1.05
PULL, BIAS = 1.5, -1.0
ONCE = 1 << 40  # items from here on are shown once


class Shown(NamedTuple):
    """Items that were shown, and clicked (label 1) or not.

    Attributes:
        names: str or bytes (n,), of the items.
        labels: float32 (n,).
        planted: float32 (n,), the logit that the label was drawn from: no model scores better than by it; None where
            nobody knows it.
    """

    names: np.ndarray
    labels: np.ndarray
    planted: np.ndarray | None


@dataclass(frozen=True)
class PlantedStream:
    """Impressions of items, of which each day brings new ones and takes as many, with bounded Zipf popularity.

    An item has a pull, normally distributed. The chance of a click is the sigmoid of ``PULL * pull + BIAS``.

    Args:
        alive: items that are there on a day.
        born: of these, how many are new on each day.
        once: share of the impressions whose item is never shown again.
        seed: of everything.

    Example:
        >>> PlantedStream(alive=1000, born=100, once=0.3, seed=0).shown(day=3, step=0, count=5).names.shape
        (5,)
    """

    alive: int
    born: int
    once: float
    seed: int

    def shown(self, day: int, step: int, count: int) -> Shown:
        """Draw the impressions of a step of a day."""
        random = np.random.default_rng((self.seed, day, step))
        ranks = bounded_zipf(random.random(count), self.alive + 1, ZIPF)  # which leaves the last one out
        items = day * self.born + np.random.default_rng((self.seed, 7)).permutation(self.alive)[ranks]
        is_once = random.random(count) < self.once
        items[is_once] = ONCE + random.integers(0, ONCE, int(is_once.sum()))
        planted = PULL * self._pulls.lookup(items)[:, 0] + np.float32(BIAS)
        return Shown(np.char.add("item ", items.astype(str)), drawn_labels(random, planted), planted)

    @cached_property
    def _pulls(self) -> er.Table:
        return er.Table(None, 1, init=er.Normal(), seed=self.seed)
