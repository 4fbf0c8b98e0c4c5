"""Keras optimizers as update rules of rows: each rule does to a row what the optimizer does to a variable.

A new optimizer is a function here and a row in `FOLLOWED`. All rules are in Keras' form, and dense. So rows that a
batch does not touch have the same trajectory as in a variable.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from keras import optimizers

from embedrock import optimizers as rules
from embedrock.errors import UnsupportedError
from embedrock.optimizers import Rule


@functools.lru_cache(64)
def _kept(kind: type[Rule], **options: Any) -> Rule:
    return kind(**options)


def _made(kind: type[Rule], **options: Any) -> Rule:
    """Return a rule; mostly that of the step before."""
    try:
        return _kept(kind, **options)
    except TypeError:  # an option without a hash is no number: the rule raises its own error
        return kind(**options)


def _sgd(optimizer: Any, lr: float, decays: bool) -> Rule:
    if not optimizer.momentum:
        return _made(rules.SGD, lr=lr)
    return _made(
        rules.Momentum, lr=lr, momentum=optimizer.momentum, nesterov=optimizer.nesterov, dense=True, lr_inside=True
    )


def _adagrad(optimizer: Any, lr: float, decays: bool) -> Rule:
    first = optimizer.initial_accumulator_value
    return _made(rules.Adagrad, lr=lr, eps=optimizer.epsilon, initial_accumulator_value=first, eps_inside=True)


def _rmsprop(optimizer: Any, lr: float, decays: bool) -> Rule:
    return _made(rules.RMSprop, lr=lr, alpha=optimizer.rho, eps=optimizer.epsilon, dense=True, eps_inside=True)


def _adam(optimizer: Any, lr: float, decays: bool) -> Rule:
    betas, eps = (optimizer.beta_1, optimizer.beta_2), optimizer.epsilon
    if not decays:
        return _made(rules.Adam, lr=lr, betas=betas, eps=eps, dense=True, eps_hat=True)
    return _made(
        rules.AdamW, lr=lr, betas=betas, eps=eps, weight_decay=optimizer.weight_decay, dense=True, eps_hat=True
    )


def _ftrl(optimizer: Any, lr: float, decays: bool) -> Rule:
    l1, l2 = optimizer.l1_regularization_strength, optimizer.l2_regularization_strength
    first = optimizer.initial_accumulator_value
    return _made(rules.Ftrl, lr=lr, l1=l1, l2=l2, beta=optimizer.beta, initial_accumulator_value=first, dense=True)


# By class, the more special ones first: the rule of an optimizer's step, by its learning rate, and whether rows decay.
FOLLOWED: dict[type, Callable[[Any, float, bool], Rule]] = {
    optimizers.SGD: _sgd,
    optimizers.Adagrad: _adagrad,
    optimizers.RMSprop: _rmsprop,
    optimizers.AdamW: _adam,
    optimizers.Adam: _adam,
    optimizers.Ftrl: _ftrl,
}
# Options that no rule has, by class, with the harmless value of each.
OPTIONS: dict[type, dict[str, Any]] = {
    optimizers.RMSprop: {"momentum": 0.0, "centered": False},
    optimizers.Adam: {"amsgrad": False},
    optimizers.Ftrl: {"learning_rate_power": -0.5, "l2_shrinkage_regularization_strength": 0.0},
}
REMEDY = (
    "or give each layer a rule of its own, such as rule=er.Adagrad(), which takes the optimizer's learning rate unless "
    "it was given one."
)


def check_followed(optimizer: Any, decays: bool) -> None:
    """Raise `UnsupportedError` unless rows can follow an optimizer of Keras, whose weight decay may apply to them."""
    name, kind = f"keras.optimizers.{type(optimizer).__name__}", _kind(type(optimizer))
    if kind is None:
        known = ", ".join(each.__name__ for each in FOLLOWED)
        raise UnsupportedError(
            f"rows cannot follow {name}: there is no rule like it, only like {known}. Use one of these, {REMEDY}"
        )
    if own := _overridden(optimizer):
        raise UnsupportedError(
            f"rows cannot follow {type(optimizer).__name__}, whose {own} is not that of "
            f"keras.optimizers.{kind.__name__}: no rule does what it does. Change the gradients that it is given, or "
            "give each layer a rule of its own, such as rule=er.Adagrad()."
        )
    for base in type(optimizer).__mro__:
        for option, harmless in OPTIONS.get(base, {}).items():
            if (given := getattr(optimizer, option)) != harmless:
                raise UnsupportedError(
                    f"rows cannot follow {name} with {option}={given!r}: no rule has that. Leave it out, {REMEDY}"
                )
    if decays and FOLLOWED[kind] is not _adam:
        raise UnsupportedError(
            f"rows cannot follow {name} with weight_decay={optimizer.weight_decay}: only those of "
            f"keras.optimizers.AdamW decay. Leave it out, {REMEDY}"
        )


# Methods of optimizers that change variables.
STEPPING = ("update_step", "_apply_weight_decay", "_backend_update_step", "assign", "assign_add", "assign_sub")


def _overridden(optimizer: Any) -> str | None:
    """Return the name of a user-defined method that steps variables; None if all are Keras'."""
    for method in STEPPING:
        definers = [base.__module__ for base in type(optimizer).__mro__ if method in vars(base)]
        if method in vars(optimizer) or not all(module.startswith(("keras.", "embedrock.")) for module in definers):
            return method
    return None


def follow(optimizer: Any, lr: float, decays: bool, steps: int, table_steps: int) -> Rule:
    """Return the rule of a step for a checked optimizer and a learning rate.

    Keras corrects the moments of every variable by the optimizer's steps, even by steps without that variable. The rule
    gives that result with the table's step count. The correction is a factor of the learning rate.

    The table may have missed some of the optimizer's steps. It may have more steps, under an earlier optimizer, whose
    row state it continues.
    """
    made = FOLLOWED[_kind(type(optimizer))](optimizer, lr, decays)
    if steps <= table_steps or not isinstance(made, rules.Adam | rules.AdamW):
        return made  # no other rule uses the step count
    factor = _correction(made.betas, steps + 1) / _correction(made.betas, table_steps + 1)
    decay = {"weight_decay": made.weight_decay / factor} if isinstance(made, rules.AdamW) else {}
    return made.with_changes({"lr": made.lr * factor, **decay})


def _correction(betas: tuple[float, float], step: int) -> float:
    return math.sqrt(1 - betas[1] ** step) / (1 - betas[0] ** step)


@functools.cache
def _kind(own: type) -> Any:
    return next((kind for kind in FOLLOWED if issubclass(own, kind)), None)
