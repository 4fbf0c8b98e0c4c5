"""Adagrad."""

from __future__ import annotations

import math

from embedrock.kernels import arguments
from embedrock.optimizers._rule import Rule, StateColumn, rule


@rule
class Adagrad(Rule):
    """Adagrad: ``h = h + g * g; w = w - lr * g / (sqrt(h) + eps)``.

    Rows that a batch does not touch stay as they are, as with a dense gradient of zero. Equal to
    `torch.optim.Adagrad` (with ``lr_decay=0``).

    Args:
        lr: learning rate.
        eps: keeps the quotient finite.
        initial_accumulator_value: of ``h``, in rows that were never stepped.
        eps_inside: add ``eps`` under the root, as `keras.optimizers.Adagrad` does: ``w = w - lr * g / sqrt(h + eps)``.

    Source: Duchi, Hazan and Singer, "Adaptive subgradient methods", JMLR 2011.

    Example:
        >>> Adagrad(lr=0.05).state()[0].name
        'sum'
    """

    FIXED = frozenset({"initial_accumulator_value"})
    BELOW = (("eps", math.inf), ("initial_accumulator_value", math.inf))
    ADDED = frozenset({"eps_inside"})
    lr: float = 1e-2
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0
    eps_inside: bool = False

    def state(self) -> tuple[StateColumn, ...]:
        return (StateColumn("sum", first=self.initial_accumulator_value),)

    def numbers(self, step: int) -> arguments.AdagradStep:
        inside, outside = (float(self.eps), 0.0) if self.eps_inside else (0.0, float(self.eps))
        return arguments.AdagradStep(float(self.lr), inside, outside)
