"""RMSprop."""

from __future__ import annotations

import math
from typing import Any

from embedrock.kernels import arguments
from embedrock.optimizers._rule import Rule, StateColumn, StepHistory, rule


class DenseRMSpropHistory(StepHistory):
    """The step constants of a table, for averages of rows that catch up with dense RMSprop."""

    moves_weights = False
    blank = (0.0,) * len(arguments.RMSPROP_COLUMN)
    fades = 1

    def numbers(self) -> Any:
        return arguments.DenseRMSpropStep(self._table, self._log_fade, self.steps)


@rule
class RMSprop(Rule):
    """RMSprop: ``v = alpha * v + (1 - alpha) * g * g; w = w - lr * g / (sqrt(v) + eps)``.

    Weights of rows that a batch does not touch stay as they are. For the rows touched, a step equals that of
    `torch.optim.RMSprop`, if ``v`` is the same:

    - ``dense=False``: lazy. In untouched rows, ``v`` does not decay.
    - ``dense=True``: ``v`` decays in every row, as under `torch.optim.RMSprop` on the dense gradient (to float32
      rounding). Each row carries the number of its last step. The table remembers 28 bytes for every step.

    Args:
        lr: learning rate.
        alpha: share of ``v`` that is kept, in [0, 1).
        eps: keeps the quotient finite.
        dense: decay ``v`` in every row, at the cost of the rows touched.
        eps_inside: add ``eps`` under the root, as `keras.optimizers.RMSprop` does: ``w = w - lr * g / sqrt(v + eps)``.

    Source: Hinton, lecture 6e of "Neural networks for machine learning", 2012.

    Example:
        >>> RMSprop(lr=0.01).state_width(64)
        64
    """

    FIXED = frozenset({"dense"})
    BELOW = (("alpha", 1.0), ("eps", math.inf))
    COLUMNS, HISTORY, FADE = (StateColumn("square_avg"),), DenseRMSpropHistory, "alpha"
    ADDED = frozenset({"dense", "eps_inside"})
    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    dense: bool = False
    eps_inside: bool = False

    def numbers(self, step: int) -> arguments.RMSpropStep:
        alpha, eps = float(self.alpha), float(self.eps)
        inside, outside = (eps, 0.0) if self.eps_inside else (0.0, eps)
        return arguments.RMSpropStep(float(self.lr), alpha, 1 - alpha, inside, outside)
