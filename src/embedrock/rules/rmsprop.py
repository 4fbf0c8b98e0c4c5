"""RMSprop."""

from __future__ import annotations

from embedrock.kernels import arguments
from embedrock.rules._rule import Rule, StateColumn, rule


@rule
class RMSprop(Rule):
    """RMSprop: ``v = alpha * v + (1 - alpha) * g * g; w = w - lr * g / (sqrt(v) + eps)``.

    Lazy: in rows that a batch does not touch, ``v`` does not decay and the weights stay as they are (a dense
    optimizer would decay ``v``). For the rows touched, a step equals that of `torch.optim.RMSprop`.

    Args:
        lr: learning rate.
        alpha: share of ``v`` that is kept, in [0, 1).
        eps: keeps the quotient finite.

    Source: Hinton, lecture 6e of "Neural networks for machine learning", 2012.

    Example:
        >>> RMSprop(lr=0.01).state_width(64)
        64
    """

    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8

    def check(self) -> None:
        super().check()
        self.at_least("alpha", 0.0, 1.0)
        self.at_least("eps", 0.0)

    def state(self) -> tuple[StateColumn, ...]:
        return (StateColumn("square_avg"),)

    def numbers(self, step: int) -> arguments.RMSpropStep:
        return arguments.RMSpropStep(float(self.lr), float(self.alpha), 1 - float(self.alpha), float(self.eps))
