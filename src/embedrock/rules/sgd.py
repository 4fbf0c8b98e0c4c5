"""Stochastic gradient descent, plain and with momentum."""

from __future__ import annotations

from embedrock.kernels import arguments
from embedrock.rules._rule import Rule, StateColumn, rule


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

    def state(self) -> tuple[StateColumn, ...]:
        return ()

    def numbers(self, step: int) -> arguments.SGDStep:
        return arguments.SGDStep(float(self.lr))


@rule
class Momentum(Rule):
    """Gradient descent with momentum: ``b = momentum * b + g; w = w - lr * b``.

    With ``nesterov=True``, ``w = w - lr * (g + momentum * b)``.

    Lazy: in rows that a batch does not touch, neither the weights nor the buffer ``b`` move (a dense optimizer would
    go on moving them along ``b``). For the rows touched, a step equals that of `torch.optim.SGD` with momentum.

    Args:
        lr: learning rate.
        momentum: share of the buffer that is kept, in [0, 1).
        nesterov: look ahead along the momentum.

    Source: Polyak, 1964; Nesterov's form as in Sutskever et al., "On the importance of initialization and momentum in
    deep learning", ICML 2013, and `torch.optim.SGD`.

    Example:
        >>> Momentum(lr=0.1, nesterov=True)
        Momentum(lr=0.1, momentum=0.9, nesterov=True)
    """

    lr: float = 1e-2
    momentum: float = 0.9
    nesterov: bool = False

    def check(self) -> None:
        super().check()
        self.at_least("momentum", 0.0, 1.0)

    def state(self) -> tuple[StateColumn, ...]:
        return (StateColumn("momentum_buffer"),)

    def numbers(self, step: int) -> arguments.MomentumStep:
        return arguments.MomentumStep(float(self.lr), float(self.momentum), float(self.nesterov))
