"""Sparse optimizers. A new one is a file here, an update in ``kernels/*/rules.py``, and a row in `RULES`."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from embedrock.optimizers._rule import LAST_STEP, Rule, StateColumn, StepHistory
from embedrock.optimizers.adagrad import Adagrad
from embedrock.optimizers.adam import Adam, AdamW
from embedrock.optimizers.ftrl import Ftrl
from embedrock.optimizers.rmsprop import RMSprop
from embedrock.optimizers.rowwise import RowwiseAdagrad, RowwiseRMSprop
from embedrock.optimizers.sgd import SGD, Momentum

RULES: tuple[type[Rule], ...] = (SGD, Momentum, Adagrad, RowwiseAdagrad, RMSprop, Adam, AdamW, Ftrl, RowwiseRMSprop)


def describe_rule(rule: Rule | None) -> dict[str, Any] | None:
    """Return a rule as plain data. Options that older releases lack are left out while unused, so they can read it."""
    if rule is None:
        return None
    known: Any = rule
    unused = {field.name: field.default for field in fields(known) if field.name in rule.ADDED}
    kept = {name: value for name, value in asdict(known).items() if name not in unused or value != unused[name]}
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
    "RowwiseRMSprop",
    "Rule",
    "StateColumn",
    "StepHistory",
    "describe_rule",
]
