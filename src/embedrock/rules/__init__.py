"""Sparse optimizers. A new one is a file here, an update in ``kernels/*/rules.py``, and a row in `RULES`."""

from __future__ import annotations

from embedrock.rules._rule import History, Rule, StateColumn
from embedrock.rules.adagrad import Adagrad, RowwiseAdagrad
from embedrock.rules.adam import Adam, AdamW
from embedrock.rules.ftrl import Ftrl
from embedrock.rules.rmsprop import RMSprop
from embedrock.rules.sgd import SGD, Momentum

RULES: tuple[type[Rule], ...] = (SGD, Momentum, Adagrad, RowwiseAdagrad, RMSprop, Adam, AdamW, Ftrl)

__all__ = [
    "RULES",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Ftrl",
    "History",
    "Momentum",
    "RMSprop",
    "RowwiseAdagrad",
    "Rule",
    "StateColumn",
]
