"""Adam (lazy, or with dense Adam's trajectory) and AdamW."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from embedrock.errors import ArgumentError
from embedrock.kernels import arguments
from embedrock.rules._rule import History, Rule, StateColumn, rule


class _AdamFamily(Rule):
    lr: float
    betas: tuple[float, float]
    eps: float

    def check(self) -> None:
        super().check()
        self.at_least("eps", 0.0)
        if not isinstance(self.betas, tuple | list) or len(self.betas) != 2:
            raise ArgumentError(f"`betas` of {type(self).__name__} must be two numbers: got {self.betas!r}.")
        for name, beta in zip(("betas[0]", "betas[1]"), self.betas, strict=True):
            self.check_number(name, beta, 0.0, 1.0)


@rule
class Adam(_AdamFamily):
    """Adam, for the rows touched or (``dense=True``) for all rows.

    ``m = m + (1 - b1) * (g - m); v = v + (1 - b2) * (g * g - v)``, then

    - ``dense=False``: ``w = w - lr * sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps)``. Lazy: rows that a batch does
      not touch stay as they are. Equal to `torch.optim.SparseAdam`; ``t`` counts the table's steps.
    - ``dense=True``: ``w = w - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)``. Equal (to float32 rounding) to
      `torch.optim.Adam` on the dense gradient: rows that a batch does not touch go on moving along ``m``. Each row
      carries the step at which it was last stepped, and makes up for the steps since then when it is next read,
      stepped or exported. The table remembers 44 bytes for every step made.

    Args:
        lr: learning rate.
        betas: decay of ``m`` and of ``v``, each in [0, 1).
        eps: keeps the quotient finite.
        dense: give every row dense Adam's trajectory, at the cost of the rows touched.

    Source: Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015.

    Example:
        >>> Adam(lr=0.01, dense=True).state_width(64)
        129
    """

    FIXED = frozenset({"dense"})
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    dense: bool = False

    def state(self) -> tuple[StateColumn, ...]:
        moments = StateColumn("exp_avg"), StateColumn("exp_avg_sq")
        return (*moments, StateColumn("last_step", per_row=True)) if self.dense else moments

    def numbers(self, step: int) -> Any:
        if self.dense:
            return super().numbers(step)
        beta1, beta2 = map(float, self.betas)
        step_size = float(self.lr) * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        return arguments.AdamStep(step_size, 1 - beta1, 1 - beta2, float(self.eps))

    def history(self) -> DenseAdamHistory | None:
        return DenseAdamHistory() if self.dense else None


@rule
class AdamW(_AdamFamily):
    """Adam with decoupled weight decay, for the rows touched.

    ``w = w * (1 - lr * weight_decay)``, then the step of `torch.optim.AdamW`:
    ``w = w - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)``.

    Lazy: rows that a batch does not touch stay as they are; their weights do not decay either. ``t`` counts the
    table's steps.

    Args:
        lr: learning rate.
        betas: decay of ``m`` and of ``v``, each in [0, 1).
        eps: keeps the quotient finite.
        weight_decay: share of the weights, times ``lr``, that a step takes away.

    Source: Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019.

    Example:
        >>> AdamW(weight_decay=0.1).state_width(64)
        128
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2

    def check(self) -> None:
        super().check()
        self.at_least("weight_decay", 0.0)

    def state(self) -> tuple[StateColumn, ...]:
        return StateColumn("exp_avg"), StateColumn("exp_avg_sq")

    def numbers(self, step: int) -> arguments.AdamWStep:
        lr, (beta1, beta2) = float(self.lr), map(float, self.betas)
        return arguments.AdamWStep(
            lr / (1 - beta1**step),
            1 - lr * float(self.weight_decay),
            1 - beta1,
            beta2,
            1 - beta2,
            math.sqrt(1 - beta2**step),
            float(self.eps),
        )


class DenseAdamHistory(History):
    """The numbers of all steps of a table, for rows that catch up with dense Adam."""

    def __init__(self) -> None:
        self._steps, self._largest, self._fading = 0, 0.0, True
        self._table = np.empty((0, len(arguments.DENSE_ADAM_COLUMNS)), np.float32)
        self._log_fade = np.zeros((1, 2))

    def append(self, rule: Adam) -> None:
        if self._steps == len(self._table):
            # New arrays, so that numbers handed out before stay valid.
            room = max(1024, self._steps)
            self._table = np.concatenate([self._table, np.zeros((room, self._table.shape[1]), np.float32)])
            self._log_fade = np.concatenate([self._log_fade, np.zeros((room, 2))])
        self._steps += 1
        step, (beta1, beta2) = self._steps, map(float, rule.betas)
        row = (
            rule.lr / (1 - beta1**step),
            beta1,
            beta2,
            1 - beta1,
            1 - beta2,
            math.sqrt(1 - beta2**step),
            rule.eps,
        )
        self._table[step - 1] = row
        self._log_fade[step] = self._log_fade[step - 1] + [_log(beta1), _log(beta2)]
        self._bound(self._table[step - 1 : step])

    def numbers(self) -> arguments.DenseAdamStep:
        return arguments.DenseAdamStep(self._table, self._log_fade, self._steps, self._largest, float(self._fading))

    def state(self) -> dict[str, np.ndarray]:
        return {"table": self._table[: self._steps], "log_fade": self._log_fade[: self._steps + 1]}

    def load(self, state: dict[str, np.ndarray], steps: int) -> None:
        shapes = {"table": (steps, len(arguments.DENSE_ADAM_COLUMNS)), "log_fade": (steps + 1, 2)}
        for name, shape in shapes.items():
            if name not in state or np.shape(state[name]) != shape:
                raise ArgumentError(
                    f"`history_{name}` of a state of Adam(dense=True) must have shape {shape} after {steps} steps: "
                    f"got {np.shape(state[name]) if name in state else 'none'}."
                )
        self._largest, self._fading = 0.0, True
        self._table, self._log_fade = np.array(state["table"], np.float32), np.array(state["log_fade"], np.float64)
        self._steps = steps
        self._bound(self._table)

    def _bound(self, rows: np.ndarray) -> None:
        done = rows.astype(np.float64)
        self._largest = max(self._largest, float(done[:, 0].max(initial=0.0)))
        self._fading = self._fading and bool(np.all(done[:, 1] < np.sqrt(done[:, 2])))


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -1e4  # exp(-1e4) is zero; -inf would turn differences into NaN
