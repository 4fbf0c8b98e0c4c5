"""`Examples`: what a model is trained on; `Pairs` of a user and an item, and `Impressions` with many features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Examples(Protocol):
    """A batch, or all that there is.

    Attributes:
        inputs: what a model is given: the ids for each of its tables, in their order, then all else.
        labels: float32 (n,), 1 for an interaction, 0 for none.
    """

    @property
    def inputs(self) -> tuple[np.ndarray, ...]: ...

    @property
    def labels(self) -> np.ndarray: ...


class Source(Protocol):
    """Where batches come from: each is a function of its step, so that a training that was cut short goes on as it was.

    Attributes:
        test: examples that are not trained on.
        best: their AUC that no model can beat; None where nobody knows.
    """

    @property
    def test(self) -> Examples: ...

    @property
    def best(self) -> float | None: ...

    def batch(self, step: int) -> Examples:
        """Return what is trained on in a step; the first one is step 0."""
        ...

    def facts(self, steps: int) -> dict[str, float]:
        """Return further numbers about a training of so many steps."""
        ...


@dataclass(frozen=True)
class Pairs:
    """Pairs of a user and an item, with labels.

    Attributes:
        users, items: int64 (n,).
        labels: float32 (n,), 1 for an interaction, 0 for none.
    """

    users: np.ndarray
    items: np.ndarray
    labels: np.ndarray

    @property
    def inputs(self) -> tuple[np.ndarray, ...]:
        """Users and items."""
        return self.users, self.items

    def batch(self, number: int, size: int) -> Pairs:
        """Return the batch of that number, from 0, with `size` pairs each; the last one may be smaller."""
        part = slice(number * size, (number + 1) * size)
        return Pairs(self.users[part], self.items[part], self.labels[part])

    def batches(self, size: int) -> int:
        """Return how many batches of `size` pairs there are."""
        return -(-len(self.users) // size)


@dataclass(frozen=True)
class Impressions:
    """What was shown to somebody, described by features and numbers, and clicked (label 1) or not.

    Attributes:
        ids: for each feature int64 (n, bag): the ids that its table is asked for, whose rows are summed.
        numbers: float32 (n, m).
        labels: float32 (n,).
    """

    ids: tuple[np.ndarray, ...]
    numbers: np.ndarray
    labels: np.ndarray

    @property
    def inputs(self) -> tuple[np.ndarray, ...]:
        """The ids of each feature, and the numbers."""
        return *self.ids, self.numbers
