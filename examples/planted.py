"""Clicks drawn from planted factors: endless, the same in each run, and with a known best AUC."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

import embedrock as er
from common import auc

TEST_CLICKS = 200_000
TRAIN, TEST = 0, 1  # random streams
ZIPF = 1.05
SCATTER = 2_654_435_761  # Knuth's multiplicative hash; as a prime it permutes the ids of smaller tables
FACTORS = 2  # columns of the planted rows that meet in a product
# Items differ more than users do, as in real logs. With these numbers the best AUC is about 0.87.
USER_PULL, ITEM_PULL, MATCH, BIAS = 0.5, 2.0, 0.7, -1.0


class Clicks(NamedTuple):
    """Items shown to users.

    Attributes:
        users, items: int64 (n,).
        labels: float32 (n,), 1: clicked, 0: not.
        planted: float32 (n,), the logit of each label: no model scores better than by it.
    """

    users: np.ndarray
    items: np.ndarray
    labels: np.ndarray
    planted: np.ndarray


class PlantedClicks:
    """A click log with Zipf's popularity. The batch of a step is a function of its number.

    A user and an item have a pull and `FACTORS` factors, all normally distributed. They are the first values of two
    tables that never train, so they are a function of the id and take no RAM.

    Args:
        users, items: numbers of rows, below `SCATTER`.
        batch_size: clicks in a batch.
        seed: of everything.

    Attributes:
        test: clicks that no batch has.
        best: their AUC by the planted model itself.

    Example:
        >>> clicks = PlantedClicks(users=10**9, items=10**6, batch_size=5, seed=0)
        >>> clicks.batch(0).labels.shape
        (5,)
    """

    def __init__(self, users: int, items: int, batch_size: int, seed: int) -> None:
        if max(users, items) >= SCATTER:
            raise ValueError(f"users and items must be below {SCATTER:,}: got {users:,} and {items:,}")
        self._rows, self._batch_size, self._seed = (users, items), batch_size, seed
        seeds = np.random.SeedSequence((seed, FACTORS)).generate_state(2).tolist()
        self._tables = [
            er.Table(rows, 1 + FACTORS, init=er.Normal(), seed=own, directory="hashed")
            for rows, own in zip(self._rows, seeds, strict=True)
        ]
        self.test = self._draw(np.random.default_rng((seed, TEST)), TEST_CLICKS)
        self.best = auc(self.test.labels, self.test.planted)

    def batch(self, step: int) -> Clicks:
        """Return the clicks of a step; the first one is step 0."""
        return self._draw(np.random.default_rng((self._seed, TRAIN, step)), self._batch_size)

    def _draw(self, random: np.random.Generator, count: int) -> Clicks:
        users, items = (zipf(random.random(count), rows) * SCATTER % rows for rows in self._rows)
        p, q = (table.lookup(ids) for table, ids in zip(self._tables, (users, items), strict=True))
        match = np.einsum("nk,nk->n", p[:, 1:], q[:, 1:]) / np.float32(FACTORS**0.5)
        planted = USER_PULL * p[:, 0] + ITEM_PULL * q[:, 0] + MATCH * match + BIAS
        return Clicks(users, items, draw_labels(random, planted), planted)


def draw_labels(random: np.random.Generator, logits: np.ndarray) -> np.ndarray:
    """Draw a label for each logit: float32 (n,)."""
    return (random.random(len(logits)) < 1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)


def zipf(uniform: np.ndarray, ranks: int) -> np.ndarray:
    """Turn uniform numbers into ranks in [0, ranks): rank k is about as likely as (k + 1) ** -ZIPF."""
    power = 1 - ZIPF
    value = ((float(ranks) ** power - 1) * uniform + 1) ** (1 / power)
    return np.minimum(value.astype(np.int64) - 1, ranks - 1)
