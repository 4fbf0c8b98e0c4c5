"""`Examples`: what a model is trained on, a batch or all of an epoch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Examples:
    """Pairs of a user and an item, with labels.

    Attributes:
        users, items: int64 (n,).
        labels: float32 (n,), 1 for an interaction, 0 for none.
    """

    users: np.ndarray
    items: np.ndarray
    labels: np.ndarray

    def batch(self, number: int, size: int) -> Examples:
        """Return the batch of that number, from 0, with `size` pairs each; the last one may be smaller."""
        part = slice(number * size, (number + 1) * size)
        return Examples(self.users[part], self.items[part], self.labels[part])

    def batches(self, size: int) -> int:
        """Return how many batches of `size` pairs there are."""
        return -(-len(self.users) // size)
