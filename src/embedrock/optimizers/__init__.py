"""Sparse optimizers. A new one is a file here, an update in ``kernels/*/rules.py``, and a row in `RULES`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from embedrock.optimizers._rule import LAST_STEP, Rule, StateColumn, StepHistory
from embedrock.optimizers.adagrad import Adagrad, RowwiseAdagrad
from embedrock.optimizers.adam import Adam, AdamW
from embedrock.optimizers.ftrl import Ftrl
from embedrock.optimizers.rmsprop import RMSprop
from embedrock.optimizers.sgd import SGD, Momentum

RULES: tuple[type[Rule], ...] = (SGD, Momentum, Adagrad, RowwiseAdagrad, RMSprop, Adam, AdamW, Ftrl)


def describe_rule(rule: Rule | None) -> dict[str, Any] | None:
    """Return a rule as plain data. Options that older releases lack are left out while unused, so they can read it."""
    if rule is None:
        return None
    hyperparameters = asdict(rule)  # pyright: ignore[reportArgumentType]
    kept = {name: value for name, value in hyperparameters.items() if value or name not in rule.ADDED}
    return {"name": type(rule).__name__, **kept}


__all__ = [
    "LAST_STEP",
    "RULES",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Ftrl",
    "Momentum",
    "RMSprop",
    "RowwiseAdagrad",
    "Rule",
    "StateColumn",
    "StepHistory",
    "describe_rule",
]
