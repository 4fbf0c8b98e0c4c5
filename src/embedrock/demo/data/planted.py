"""A click log from planted factors: endless, deterministic, and with a known best score."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import numpy as np

import embedrock as er
from embedrock.bench.harness.workload import SCATTER, bounded_zipf
from embedrock.demo.data.examples import Examples, Pairs
from embedrock.demo.metrics import auc

TEST_CLICKS = 200_000
TRAIN_STREAM, TEST_STREAM = 0, 1  # of random numbers; the contest has another
ZIPF = 1.05
RANK = 2  # columns of the planted factors that meet in a product
# Items differ more than users do, as in real logs; with these, the best AUC is about 0.87.
USER_PULL, ITEM_PULL, MATCH, BIAS = 0.5, 2.0, 0.7, -1.0


@dataclass(frozen=True)
class Clicks(Pairs):
    """Items that were shown to users, and clicked (label 1) or not.

    Attributes:
        planted: float32 (n,), the logit that the label was drawn from: no model scores better than by it.
    """

    planted: np.ndarray


@dataclass(frozen=True)
class PlantedLog:
    """Impressions of items to users, with bounded Zipf popularity scattered over the ids.

    A user and an item have a pull of their own and `RANK` factors, all normally distributed. The chance of a click
    is the sigmoid of ``USER_PULL * a + ITEM_PULL * b + MATCH * <p, q> / sqrt(RANK) + BIAS``. Pulls and factors
    are the first values of two tables that are never trained, so they are a function of the id and take no RAM.

    Args:
        users, items: how many there are, at most `embedrock.bench.harness.workload.MAX_ROWS` each.
        seed: of everything.

    Example:
        >>> log = PlantedLog(users=10**9, items=10**6, seed=0)
        >>> log.clicks(np.random.default_rng(0), 5).labels.shape
        (5,)
    """

    users: int
    items: int
    seed: int

    def clicks(self, random: np.random.Generator, count: int) -> Clicks:
        """Draw `count` impressions."""
        users, items = self.pairs(random, count)
        planted = self.planted(users, items)
        return Clicks(users, items, drawn_labels(random, planted), planted)

    def pairs(self, random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw the users and items of `count` impressions, as `clicks` does."""
        return self._ids(random, count, self.users), self._ids(random, count, self.items)

    def planted(self, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Return the logits of a click of pairs: float32 (n,)."""
        user_table, item_table = self._tables
        p, q = user_table.lookup(users), item_table.lookup(items)
        match = np.einsum("nk,nk->n", p[:, 1:], q[:, 1:]) / np.float32(RANK**0.5)
        return USER_PULL * p[:, 0] + ITEM_PULL * q[:, 0] + MATCH * match + BIAS

    @cached_property
    def _tables(self) -> tuple[er.Table, er.Table]:
        user_seed, item_seed = np.random.SeedSequence((self.seed, RANK)).generate_state(2).tolist()
        return (
            er.Table(self.users, 1 + RANK, init=er.Normal(), seed=user_seed, directory="hashed"),
            er.Table(self.items, 1 + RANK, init=er.Normal(), seed=item_seed, directory="hashed"),
        )

    def _ids(self, random: np.random.Generator, count: int, rows: int) -> np.ndarray:
        # The multiplicative hash puts the popular ids far apart, as they are in real logs.
        return bounded_zipf(random.random(count), rows, ZIPF) * SCATTER % rows


class Planted(Examples, Protocol):
    """Examples whose labels were drawn from logits that are known: `planted`, float32 (n,)."""

    @property
    def planted(self) -> np.ndarray: ...


Drawn = TypeVar("Drawn", bound=Planted)
Drawn_co = TypeVar("Drawn_co", bound=Planted, covariant=True)


class Log(Protocol[Drawn_co]):
    """Where planted examples come from."""

    @property
    def seed(self) -> int: ...

    def clicks(self, random: np.random.Generator, count: int) -> Drawn_co:
        """Draw `count` of them."""
        ...


def drawn_labels(random: np.random.Generator, planted: np.ndarray) -> np.ndarray:
    """Draw labels whose logits are `planted`: float32 (n,)."""
    chances = 1 / (1 + np.exp(-planted.astype(np.float64)))
    return (random.random(len(planted)) < chances).astype(np.float32)


class Split(Generic[Drawn]):
    """Planted examples to train on, by number of the step, and others to test on: a `Source`.

    Args:
        log: where they come from.
        batch_size: examples in a batch.
        tested: how many there are to test on.

    Attributes:
        test: examples that are not trained on.
        best: their AUC by the planted model itself, which no model can beat.
    """

    def __init__(self, log: Log[Drawn], batch_size: int, tested: int) -> None:
        self._log, self._batch_size = log, batch_size
        self.test = log.clicks(np.random.default_rng((log.seed, TEST_STREAM)), tested)
        self.best = auc(self.test.labels, self.test.planted)

    def batch(self, step: int) -> Drawn:
        """Return what is trained on in a step; the first one is step 0."""
        return self._log.clicks(self._random(step), self._batch_size)

    def facts(self, steps: int) -> dict[str, float]:
        """Return nothing more."""
        return {}

    def _random(self, step: int) -> np.random.Generator:
        return np.random.default_rng((self._log.seed, TRAIN_STREAM, step))


class PlantedSplit(Split[Clicks]):
    """Planted clicks of users on items.

    Args:
        log: where clicks come from.
        batch_size: clicks in a batch.
    """

    def __init__(self, log: PlantedLog, batch_size: int) -> None:
        super().__init__(log, batch_size, TEST_CLICKS)
        self._pairs = log

    def facts(self, steps: int) -> dict[str, float]:
        """Return the share of the test that a training of so many steps could learn little of."""
        return {"test_unseen_share": self.unseen_share(steps)}

    def unseen_share(self, steps: int) -> float:
        """Return the share of the test whose user or item is in none of so many batches, by drawing them all again."""
        users, items = np.zeros(self._pairs.users, bool), np.zeros(self._pairs.items, bool)
        for step in range(steps):
            seen_users, seen_items = self._pairs.pairs(self._random(step), self._batch_size)
            users[seen_users] = items[seen_items] = True
        return float(np.mean(~(users[self.test.users] & items[self.test.items])))
