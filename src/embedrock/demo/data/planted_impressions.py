"""Impressions from planted effects: as DLRM is trained on, endless, deterministic, and with a known best score."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

import embedrock as er
from embedrock.bench.harness.many_tables import ManyTables
from embedrock.demo.data.examples import Impressions
from embedrock.demo.data.planted import RANK, Split, drawn_labels

TEST_IMPRESSIONS = 50_000
NUMBERS = 13
SPREAD = 1.5  # of the logarithms of the numbers
# What the numbers, the ids and their meetings add to a logit: factors of what has a variance of 1 or so. The best AUC
# is about 0.85.
NUMBER_PULL, ID_PULL, MATCH, BIAS = 1.5, 1.3, 0.4, -1.3


@dataclass(frozen=True)
class PlantedImpressions(Impressions):
    """Impressions that were clicked by chances that are known.

    Attributes:
        planted: float32 (n,), the logit that the label was drawn from: no model scores better than by it.
    """

    planted: np.ndarray


@dataclass(frozen=True)
class ImpressionLog:
    """Impressions with bags of ids of bounded Zipf popularity, and numbers.

    Each id has a pull and `RANK` factors, normally distributed; a bag has their sums over the root of its size. The
    chance of a click is the sigmoid of the sum of all numbers (each times its own weight) and pulls, and of the
    products of factors of every two features, as in a factorization machine. Pulls and factors are the first values of
    tables that are never trained, so they are a function of the feature and the id and take no RAM.

    Args:
        tables: how many rows there are, how large the bags, and how popular the ids.
        seed: of everything.

    Example:
        >>> log = ImpressionLog(ManyTables(max_bag=2), seed=0)
        >>> some = log.clicks(np.random.default_rng(0), 5)
        >>> some.labels.shape, some.numbers.shape, len(some.ids), some.ids[0].shape
        ((5,), (5, 13), 26, (5, 2))
    """

    tables: ManyTables
    seed: int

    def clicks(self, random: np.random.Generator, count: int) -> PlantedImpressions:
        """Draw `count` impressions."""
        ids = tuple(self.tables.draw(random, count))
        counts = np.floor(np.exp(SPREAD * random.standard_normal((count, NUMBERS))))
        numbers = np.log1p(counts).astype(np.float32)
        planted = self.planted(ids, numbers)
        return PlantedImpressions(ids, numbers, drawn_labels(random, planted), planted)

    def planted(self, ids: tuple[np.ndarray, ...], numbers: np.ndarray) -> np.ndarray:
        """Return the logits of a click: float32 (n,)."""
        sums = np.stack([_bag_effect(table, each) for table, each in zip(self._effects, ids, strict=True)], 1)
        pulls = sums[:, :, 0].sum(1) / len(ids) ** 0.5
        factors = sums[:, :, 1:]
        pairs = RANK * len(ids) * (len(ids) - 1) / 2
        match = (np.square(factors.sum(1)) - np.square(factors).sum(1)).sum(1) / (2 * pairs**0.5)
        logits = BIAS + NUMBER_PULL * (numbers - 1) @ self._weights + ID_PULL * pulls + MATCH * match
        return logits.astype(np.float32)

    @cached_property
    def _effects(self) -> list[er.Table]:
        seeds = np.random.SeedSequence((self.seed, RANK)).generate_state(len(self.tables.rows)).tolist()
        return [
            er.Table(rows, 1 + RANK, init=er.Normal(), seed=seed, directory="hashed")
            for rows, seed in zip(self.tables.rows, seeds, strict=True)
        ]

    @cached_property
    def _weights(self) -> np.ndarray:
        weights = np.random.default_rng((self.seed, NUMBERS)).standard_normal(NUMBERS)
        return (weights / np.linalg.norm(weights)).astype(np.float32)


def _bag_effect(table: er.Table, ids: np.ndarray) -> np.ndarray:
    """Return the sums of pulls and factors of bags over the root of their size: (n, bag) to (n, 1 + RANK)."""
    return np.einsum("nbk->nk", table.lookup(ids)) / np.float32(ids.shape[1] ** 0.5)


class ImpressionSplit(Split[PlantedImpressions]):
    """Planted impressions.

    Args:
        log: where impressions come from.
        batch_size: impressions in a batch.
    """

    def __init__(self, log: ImpressionLog, batch_size: int) -> None:
        super().__init__(log, batch_size, TEST_IMPRESSIONS)
