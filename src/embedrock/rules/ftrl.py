"""FTRL-Proximal."""

from __future__ import annotations

from embedrock.kernels import arguments
from embedrock.rules._rule import Rule, StateColumn, rule


@rule
class Ftrl(Rule):
    """FTRL-Proximal, in the form and with the defaults of `keras.optimizers.Ftrl` (learning rate power -0.5).

    ``n' = n + g * g;  z = z + g - (sqrt(n') - sqrt(n)) / lr * w;``
    ``w = 0 where |z| <= l1, else (sign(z) * l1 - z) / ((beta + sqrt(n')) / lr + 2 * l2)``.

    Rows that a batch does not touch stay as they are, as with a dense gradient of zero. A row's first value enters
    only through ``z``: with small learning rates its first step moves it far, as it does in Keras.

    Args:
        lr: learning rate, above 0.
        l1: strength of the L1 regularization, which makes weights exactly zero.
        l2: strength of the L2 regularization.
        beta: as in the paper.
        initial_accumulator_value: of ``n``, in rows that were never stepped.

    Source: McMahan et al., "Ad click prediction: a view from the trenches", KDD 2013.

    Example:
        >>> Ftrl(l1=0.01).state_width(64)
        128
    """

    FIXED = frozenset({"initial_accumulator_value"})
    lr: float = 1e-3
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 0.0
    initial_accumulator_value: float = 0.1

    def check(self) -> None:
        self.at_least("lr", 1e-30)
        for name in ("l1", "l2", "beta", "initial_accumulator_value"):
            self.at_least(name, 0.0)

    def state(self) -> tuple[StateColumn, ...]:
        return StateColumn("accumulator", first=self.initial_accumulator_value), StateColumn("linear")

    def numbers(self, step: int) -> arguments.FtrlStep:
        return arguments.FtrlStep(float(self.lr), float(self.l1), float(self.l2), float(self.beta))
