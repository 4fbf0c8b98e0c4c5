"""How rows follow a Keras optimizer: by the rule that does to a row what the optimizer does to a variable.

A new optimizer is a function here and a row in `FOLLOWED`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from keras import optimizers

from embedrock import rules
from embedrock.errors import UnsupportedError
from embedrock.rules import Rule

# What a rule is made of: the optimizer, the learning rate of the step, and the step's number, from 1.
Follower = Callable[[Any, float, int], Rule]


def _sgd(optimizer: Any, lr: float, step: int) -> Rule:
    if optimizer.momentum:
        return rules.Momentum(lr=lr, momentum=optimizer.momentum, nesterov=optimizer.nesterov)
    return rules.SGD(lr=lr)


def _adam(optimizer: Any, lr: float, step: int) -> Rule:
    betas = optimizer.beta_1, optimizer.beta_2
    # Keras adds epsilon before the bias of the second moment is corrected.
    eps = optimizer.epsilon / math.sqrt(1 - optimizer.beta_2**step)
    return rules.Adam(lr=lr, betas=betas, eps=eps, dense=True)


FOLLOWED: dict[type, Follower] = {
    optimizers.SGD: _sgd,
    optimizers.Adam: _adam,
}


def follow(optimizer: Any, lr: float, step: int) -> Rule:
    """Return the rule of a step that rows make with an optimizer.

    Args:
        optimizer: of Keras.
        lr: the learning rate of the step.
        step: its number, from 1.

    Raises:
        UnsupportedError: rows cannot follow it.
    """
    for kind in type(optimizer).__mro__:
        if kind in FOLLOWED:
            return FOLLOWED[kind](optimizer, lr, step)
    raise UnsupportedError(
        f"rows cannot follow keras.optimizers.{type(optimizer).__name__}: there is no rule like it. Use one of "
        f"{', '.join(kind.__name__ for kind in FOLLOWED)}, or give each layer a rule of its own, for example "
        "rule=er.Adagrad(), which then takes the learning rate from the optimizer."
    )
