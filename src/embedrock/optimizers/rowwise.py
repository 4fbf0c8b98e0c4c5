"""Adagrad and RMSprop with one accumulator a row, or one for each group of a row's columns."""

from __future__ import annotations

import math

import numpy as np

from embedrock.errors import ArgumentError
from embedrock.kernels import arguments
from embedrock.optimizers._rule import Rule, StateColumn, rule


class _RowwiseFamily(Rule):
    """Base of the rules of ``h = keep * h + add * mean(g * g)``, with one kernel."""

    FIXED = frozenset({"groups"})
    eps: float
    weight_decay: float
    groups: int

    def check(self) -> None:
        super().check()
        if isinstance(self.groups, bool) or not isinstance(self.groups, int | np.integer) or self.groups < 1:
            raise ArgumentError(
                f"`groups` of {type(self).__name__} must be a whole number from 1 on: got {self.groups!r}."
            )

    def check_dim(self, dim: int, subject: str = "a table") -> None:
        if dim % self.groups:
            raise ArgumentError(
                f"`groups` of {type(self).__name__} must divide the {dim} columns of a row of {subject} into equal "
                f"parts: got {self.groups}. groups={math.gcd(dim, self.groups)} does."
            )

    def _numbers(self, keep: float, add: float) -> arguments.RowwiseStep:
        lr, eps = float(self.lr), float(self.eps)
        return arguments.RowwiseStep(lr, keep, add, eps, 1 - lr * float(self.weight_decay))


@rule
class RowwiseAdagrad(_RowwiseFamily):
    """Adagrad with one accumulator a row: ``h = h + mean(g * g); w = w - lr * g / (sqrt(h) + eps)``.

    The state is 4 bytes a row, whatever the dimension. Rows that a batch does not touch stay as they are.

    Args:
        lr: learning rate.
        eps: keeps the quotient finite.
        initial_accumulator_value: of ``h``, in rows that were never stepped.
        weight_decay: first, ``w = w * (1 - lr * weight_decay)``, for the rows touched.
        groups: equal parts of a row, neighbouring columns each, with a mean and an ``h`` of their own: 4 bytes each.
            The row's dimension must be a multiple. For a row that holds the vectors of several layers, for example.

    Source: FBGEMM's EXACT_ROWWISE_ADAGRAD; Mudigere et al., "Software-hardware co-design for fast and scalable
    training of deep learning recommendation models", ISCA 2022.

    Example:
        >>> RowwiseAdagrad().state_width(64), RowwiseAdagrad(groups=4).state_width(64)
        (1, 4)
    """

    FIXED = frozenset({"initial_accumulator_value", "groups"})
    BELOW = tuple((name, math.inf) for name in ("eps", "initial_accumulator_value", "weight_decay"))
    ADDED = frozenset({"weight_decay", "groups"})
    lr: float = 1e-2
    eps: float = 1e-8
    initial_accumulator_value: float = 0.0
    weight_decay: float = 0.0
    groups: int = 1

    def state(self) -> tuple[StateColumn, ...]:
        return (StateColumn("momentum1", per_row=self.groups, first=self.initial_accumulator_value),)

    def numbers(self, step: int) -> arguments.RowwiseStep:
        return self._numbers(1.0, 1.0)


@rule
class RowwiseRMSprop(_RowwiseFamily):
    """RMSprop with one average a row: ``h = alpha * h + (1 - alpha) * mean(g * g); w = w - lr * g / (sqrt(h) + eps)``.

    The state is 4 bytes a row, whatever the dimension. Rows that a batch does not touch stay as they are: ``h`` does
    not decay, and neither do the weights.

    Args:
        lr: learning rate.
        alpha: share of ``h`` that is kept, in [0, 1).
        eps: keeps the quotient finite.
        weight_decay, groups: as of `RowwiseAdagrad`.

    Source: the row-wise form of `RMSprop`, as nanochat steps its table of hashed n-grams
    (https://github.com/karpathy/nanochat/pull/854). Its ``decay`` is ``lr * weight_decay``.

    Example:
        >>> RowwiseRMSprop(lr=0.2, weight_decay=0.005, groups=4).state_width(128)
        4
    """

    BELOW = (("alpha", 1.0), ("eps", math.inf), ("weight_decay", math.inf))
    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    groups: int = 1

    def state(self) -> tuple[StateColumn, ...]:
        return (StateColumn("square_avg", per_row=self.groups),)

    def numbers(self, step: int) -> arguments.RowwiseStep:
        return self._numbers(float(self.alpha), 1 - float(self.alpha))
