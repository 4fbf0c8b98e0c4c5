"""Adam and AdamW, lazy or with the trajectory of the dense optimizer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from embedrock.errors import ArgumentError
from embedrock.kernels import arguments
from embedrock.optimizers._rule import Rule, StateColumn, StepHistory, rule


class DenseAdamHistory(StepHistory):
    """The step constants of a table, for rows that catch up with dense Adam or AdamW."""

    blank = arguments.DenseAdamNumbers(*(0.0,) * 7, shrink=1.0, decay=0.0)
    fades = len(arguments.ADAM_FADE)

    def _clear(self) -> None:
        super()._clear()
        self._largest, self._fading = 0.0, True

    def numbers(self) -> Any:
        return arguments.DenseAdamStep(self._table, self._log_fade, self.steps, self._largest, float(self._fading))

    def first_scale(self) -> float:
        return math.exp(self._log_fade[self.steps, arguments.ADAM_FADE.weights])

    def _bound(self, rows: np.ndarray) -> None:
        done, at = rows.astype(np.float64), arguments.ADAM_COLUMN
        self._largest = float(np.maximum.reduce(done[:, at.step_size], initial=self._largest))
        fades = np.sqrt(done[:, at.beta2]) * (done[:, at.shrink] - done[:, at.decay])
        self._fading = self._fading and bool(np.logical_and.reduce(done[:, at.beta1] < fades))


class _AdamFamily(Rule):
    FIXED = frozenset({"dense"})
    BELOW = (("eps", math.inf),)
    COLUMNS = StateColumn("exp_avg"), StateColumn("exp_avg_sq")
    lr: float
    betas: tuple[float, float]
    eps: float
    dense: bool
    eps_hat: bool

    def check(self) -> None:
        super().check()
        if not isinstance(self.betas, tuple | list) or len(self.betas) != 2:
            raise ArgumentError(f"`betas` of {type(self).__name__} must be two numbers: got {self.betas!r}.")
        for name, beta in zip(("betas[0]", "betas[1]"), self.betas, strict=True):
            self.check_number(name, beta, 1.0)

    def dense_numbers(self, step: int) -> tuple[arguments.DenseAdamNumbers, arguments.DenseAdamFades]:
        lr, (beta1, beta2), (shrink, decay) = float(self.lr), map(float, self.betas), self._decay()
        size, correction2 = lr / (1 - beta1**step), math.sqrt(1 - beta2**step)
        if self.eps_hat:
            size, correction2 = size * correction2, 1.0
        rests = 1 - beta1, 1 - beta2
        numbers = arguments.DenseAdamNumbers(size, beta1, beta2, *rests, correction2, float(self.eps), shrink, decay)
        return numbers, arguments.DenseAdamFades(beta1, beta2, shrink - decay)

    def _decay(self) -> tuple[float, float]:
        """Return shrink and decay of a step: the weights first become ``shrink * w - decay * w``."""
        return 1.0, 0.0


@rule
class Adam(_AdamFamily):
    """Adam, for the rows touched or (``dense=True``) for all rows.

    ``m = m + (1 - b1) * (g - m); v = v + (1 - b2) * (g * g - v)``, then

    - ``dense=False``: ``w = w - lr * sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps)``. Lazy: rows that a batch does
      not touch stay as they are. Equal to `torch.optim.SparseAdam`; ``t`` counts the table's steps.
    - ``dense=True``: ``w = w - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)``. Equal (to float32 rounding) to
      `torch.optim.Adam` on the dense gradient: untouched rows keep moving along ``m``. Each row carries the number of
      its last step, and catches up when it is next read, stepped or exported. The table remembers 60 bytes for every
      step, and saves 44.

    Args:
        lr: learning rate.
        betas: decay of ``m`` and of ``v``, each in [0, 1).
        eps: keeps the quotient finite.
        dense: give every row dense Adam's trajectory, at the cost of the rows touched.
        eps_hat: with ``dense=True``, add ``eps`` before the correction of ``v``, as ``dense=False`` and
            `keras.optimizers.Adam` do: ``w = w - lr * sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps)``. (The paper's
            "epsilon hat".)

    Source: Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015.

    Example:
        >>> Adam(lr=0.01, dense=True).state_width(64)
        129
    """

    ADDED = frozenset({"eps_hat"})
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    dense: bool = False
    eps_hat: bool = False

    def numbers(self, step: int) -> arguments.AdamStep:
        beta1, beta2 = map(float, self.betas)
        step_size = float(self.lr) * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        return arguments.AdamStep(step_size, 1 - beta1, 1 - beta2, float(self.eps))

    def history(self) -> DenseAdamHistory | None:
        kept = arguments.ADAM_COLUMN.shrink, arguments.ADAM_FADE.weights  # without the columns that only AdamW needs
        return DenseAdamHistory(Adam, kept) if self.dense else None


@rule
class AdamW(_AdamFamily):
    """Adam with decoupled weight decay, for the rows touched or (``dense=True``) for all rows.

    ``w = w * (1 - lr * weight_decay)``, then the step of `torch.optim.AdamW`:
    ``w = w - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)``.

    - ``dense=False``: lazy. Rows that a batch does not touch stay as they are; their weights do not decay either.
      ``t`` counts the table's steps.
    - ``dense=True``: equal (to float32 rounding) to `torch.optim.AdamW` on the dense gradient. Untouched rows keep
      moving along ``m``, and decay, **also rows that were never stepped**. The initial values shrink by the product of
      all steps' ``1 - lr * weight_decay``. The table remembers 60 bytes for every step.

    Args:
        lr: learning rate.
        betas: decay of ``m`` and of ``v``, each in [0, 1).
        eps: keeps the quotient finite.
        weight_decay: share of the weights, times ``lr``, that a step takes away; with ``dense=True``, less than all.
        dense: give every row dense AdamW's trajectory, at the cost of the rows touched.
        eps_hat: add ``eps`` before the correction of ``v``, and decay by ``w = w - lr * weight_decay * w``, as
            `keras.optimizers.AdamW` does: ``w = w - lr * sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps)``.

    Source: Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019.

    Example:
        >>> AdamW(weight_decay=0.1).state_width(64)
        128
    """

    BELOW = (("eps", math.inf), ("weight_decay", math.inf))
    HISTORY, MOVES_ALL = DenseAdamHistory, True
    ADDED = frozenset({"dense", "eps_hat"})
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    dense: bool = False
    eps_hat: bool = False

    def check(self) -> None:
        super().check()
        if self.dense and not self.lr * self.weight_decay < 1:
            raise ArgumentError(
                "`lr * weight_decay` of AdamW(dense=True) must be less than 1, or a step would leave nothing of rows "
                f"that it does not touch: got {self.lr!r} * {self.weight_decay!r}. Lower one of the two."
            )

    def numbers(self, step: int) -> arguments.AdamWStep:
        return arguments.adamw_step(self.dense_numbers(step)[0])

    def _decay(self) -> tuple[float, float]:
        taken = float(self.lr) * float(self.weight_decay)
        # The kernel's float32 numbers, so that rows that catch up by their product shrink as stepped rows do.
        return (1.0, float(np.float32(taken))) if self.eps_hat else (float(np.float32(1 - taken)), 0.0)
