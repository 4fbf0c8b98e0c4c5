"""FTRL-Proximal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from embedrock.errors import ArgumentError
from embedrock.kernels import arguments
from embedrock.optimizers._rule import Rule, StateColumn, StepHistory, rule

LEAST_RATE = 1e-30  # float32 can divide by it


class DenseFtrlHistory(StepHistory):
    """The step constants of a table. Rows need those of the last step."""

    blank = (0.0,) * len(arguments.FTRL_COLUMN)
    fades = 0

    def _numbers_of(self, rule: Rule) -> tuple[Sequence[float], np.ndarray]:
        numbers, log_fade = super()._numbers_of(rule)
        if self.steps and not numbers[arguments.FTRL_COLUMN.lr]:  # keeps the last constants
            last = arguments.DenseFtrlNumbers(*self._table[self.steps - 1])
            numbers = last._replace(lr=-abs(last.lr))
        return numbers, log_fade

    def numbers(self) -> Any:
        return arguments.DenseFtrlStep(self._table, self.steps)

    def first_scale(self) -> float:
        return 0.0 if self.steps and self._table[self.steps - 1, arguments.FTRL_COLUMN.lr] else 1.0


@rule
class Ftrl(Rule):
    """FTRL-Proximal, in the form and with the defaults of `keras.optimizers.Ftrl` (learning rate power -0.5).

    ``n' = n + g * g;  z = z + g + 2 * l2_shrinkage * w - (sqrt(n') - sqrt(n)) / lr * w;``
    ``w = 0 where |z| <= l1, else (sign(z) * l1 - z) / ((beta + sqrt(n')) / lr + 2 * l2)``.

    A row's initial value enters only through ``z``. With small learning rates its first step moves it far, as in Keras.

    - ``dense=False``: rows that a batch does not touch stay as they are.
    - ``dense=True``: equal (to float32 rounding) to `keras.optimizers.Ftrl` on the dense gradient. Keras recomputes
      ``w`` from ``z`` and ``n`` in every row at every step. So untouched rows follow changes of ``lr``, ``l1``, ``l2``
      and ``beta``. **Rows that were never stepped are zero after the table's first step**, whatever their initial
      values. The table remembers 16 bytes for every step.

    Args:
        lr: learning rate. With 0 a step moves nothing: weights and state stay, and the step counts. The formula divides
            by it, so rates below 1e-30 count as 0.
        l1: strength of the L1 regularization, which makes weights exactly zero.
        l2: strength of the L2 regularization.
        beta: as in the paper.
        initial_accumulator_value: of ``n``, in rows that were never stepped.
        l2_shrinkage: strength of the penalty that acts as a part of the gradient; not with ``dense=True``.
        dense: give every row the dense optimizer's trajectory, at the cost of the rows touched.

    Source: McMahan et al., "Ad click prediction: a view from the trenches", KDD 2013.

    Example:
        >>> Ftrl(l1=0.01).state_width(64)
        128
    """

    FIXED = frozenset({"initial_accumulator_value", "dense"})
    HISTORY, MOVES_ALL = DenseFtrlHistory, True
    BELOW = tuple((name, math.inf) for name in ("l1", "l2", "beta", "initial_accumulator_value", "l2_shrinkage"))
    ADDED = frozenset({"l2_shrinkage", "dense"})
    lr: float = 1e-3
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 0.0
    initial_accumulator_value: float = 0.1
    l2_shrinkage: float = 0.0
    dense: bool = False

    def check(self) -> None:
        super().check()
        if self.dense and self.l2_shrinkage:
            raise ArgumentError(
                f"`l2_shrinkage` of Ftrl(dense=True) must be 0: got {self.l2_shrinkage!r}. It would change the "
                "state of every row at every step. Leave out one of the two."
            )

    def state(self) -> tuple[StateColumn, ...]:
        return StateColumn("accumulator", first=self.initial_accumulator_value), StateColumn("linear")

    def numbers(self, step: int) -> arguments.FtrlStep:
        return arguments.FtrlStep(self._rate, *map(float, (self.l1, self.l2, self.beta, self.l2_shrinkage)))

    @property
    def _rate(self) -> float:
        return float(self.lr) if self.lr >= LEAST_RATE else 0.0

    def dense_numbers(self, step: int) -> tuple[arguments.DenseFtrlNumbers, tuple[()]]:
        return arguments.DenseFtrlNumbers(self._rate, *map(float, (self.l1, self.l2, self.beta))), ()
