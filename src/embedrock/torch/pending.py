"""`Pending`: gradients of rows that wait for a step, behind one number that stands for them outside."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from embedrock.batch.gradients import RowGradients

FLOAT32_MAX = float(np.finfo(np.float32).max)


def number_of(grads: RowGradients) -> float:
    """Return what stands for row gradients: their L2 norm as a float32, Inf where one of them is not finite."""
    norm = grads.norm
    return float(np.float32(norm)) if norm <= FLOAT32_MAX else math.inf  # NaN compares as false


class Pending:
    """Row gradients since the last zeroing, and the number last shown for them.

    Whoever scales the number scales the rows, and whoever zeroes it drops them: that is how loss scaling,
    clipping by norm and zeroing reach rows that nobody outside can see.

    Attributes:
        grads: the gradients, None when there are none.
    """

    def __init__(self) -> None:
        self.grads: RowGradients | None = None
        self._shown = 0.0

    def drop(self) -> None:
        """Forget the gradients."""
        self.grads, self._shown = None, 0.0

    def follow(self, shown: Tensor | None) -> None:
        """Do to the gradients what was done to the number since it was shown (None: it is gone)."""
        if self.grads is None:  # looked at first, because reading a number from a GPU waits for it
            return
        number = None if shown is None else shown.item()
        if number == self._shown:
            return
        if number is None or number == 0.0:
            return self.drop()
        # Gradients that are all zero stay so by any factor, but must not hide that a number is not finite.
        factor = number / self._shown if self._shown else number
        self.grads, self._shown = self.grads.scaled(factor), number

    def add(self, grads: RowGradients) -> float:
        """Add gradients, and return the number to show from now on."""
        self.grads = grads if self.grads is None else self.grads.merge(grads)
        self._shown = number_of(self.grads)
        return self._shown

    @staticmethod
    def arrive(earlier: RowGradients | None, grads: RowGradients) -> tuple[RowGradients, float]:
        """Add gradients to those that arrived earlier in the same backward.

        Returns:
            The sum, and what autograd has to add: by how much the number of this backward's gradients grew.
        """
        if earlier is None:
            return grads, number_of(grads)
        both, before = earlier.merge(grads), number_of(earlier)
        return both, number_of(both) - before if math.isfinite(before) else 0.0
