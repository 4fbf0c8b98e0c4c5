"""Stochastic gradient descent, plain and with momentum."""

from __future__ import annotations

from typing import Any

import numpy as np

from embedrock.kernels import arguments
from embedrock.optimizers._rule import Rule, StateColumn, StepHistory, rule


@rule
class SGD(Rule):
    """Stochastic gradient descent: ``w = w - lr * g``.

    Rows that a batch does not touch stay as they are, as with a dense gradient of zero. Equal to `torch.optim.SGD`.

    Args:
        lr: learning rate.

    Source: Robbins and Monro, "A stochastic approximation method", 1951.

    Example:
        >>> SGD(lr=0.1)
        SGD(lr=0.1)
    """

    lr: float = 1e-2

    def numbers(self, step: int) -> arguments.SGDStep:
        return arguments.SGDStep(float(self.lr))


class DenseMomentumHistory(StepHistory):
    """The step constants of a table, for rows that catch up with dense momentum."""

    blank = (0.0,) * len(arguments.MOMENTUM_COLUMN)
    fades = 1

    def _clear(self) -> None:
        super()._clear()
        self._largest = 0.0

    def numbers(self) -> Any:
        return arguments.DenseMomentumStep(self._table, self._log_fade, self.steps, self._largest)

    def _bound(self, rows: np.ndarray) -> None:
        self._largest = max(self._largest, float(rows[:, arguments.MOMENTUM_COLUMN.buffer_rate].max(initial=0.0)))


@rule
class Momentum(Rule):
    """Gradient descent with momentum: ``b = momentum * b + g; w = w - lr * b``.

    With ``nesterov=True``, ``w = w - lr * (g + momentum * b)``.

    - ``dense=False``: lazy. In rows that a batch does not touch, neither the weights nor the buffer ``b`` move. A dense
      optimizer would keep moving them along ``b``. For the rows touched, a step equals that of `torch.optim.SGD` with
      momentum.
    - ``dense=True``: equal (to float32 rounding) to `torch.optim.SGD` with momentum on the dense gradient. Untouched
      rows keep moving along ``b``, as under ``Adam(dense=True)``. The table remembers 24 bytes for every step.

    Args:
        lr: learning rate.
        momentum: share of the buffer that is kept, in [0, 1).
        nesterov: look ahead along the momentum.
        dense: give every row the dense optimizer's trajectory, at the cost of the rows touched.
        lr_inside: multiply gradients by ``lr``, as `keras.optimizers.SGD` does:
            ``b = momentum * b + lr * g; w = w - b``, with Nesterov ``w = w - (lr * g + momentum * b)``. (Keras'
            velocity is ``-b``.) Equal while ``lr`` is constant.

    Source: Polyak, 1964; Nesterov's form as in Sutskever et al., "On the importance of initialization and momentum in
    deep learning", ICML 2013, and `torch.optim.SGD`.

    Example:
        >>> Momentum(lr=0.1, nesterov=True).state()[0].name
        'momentum_buffer'
    """

    FIXED = frozenset({"dense", "lr_inside"})
    BELOW = (("momentum", 1.0),)
    COLUMNS, HISTORY, FADE = (StateColumn("momentum_buffer"),), DenseMomentumHistory, "momentum"
    ADDED = frozenset({"dense", "lr_inside"})
    lr: float = 1e-2
    momentum: float = 0.9
    nesterov: bool = False
    dense: bool = False
    lr_inside: bool = False

    def numbers(self, step: int) -> arguments.MomentumStep:
        gradient_rate, buffer_rate = (float(self.lr), 1.0) if self.lr_inside else (1.0, float(self.lr))
        return arguments.MomentumStep(gradient_rate, float(self.momentum), buffer_rate, float(self.nesterov))
