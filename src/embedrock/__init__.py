"""Embedding tables of any size, trained exactly."""

from __future__ import annotations

from embedrock.errors import (
    ArgumentError,
    ClosedTableError,
    EmbedrockError,
    GradientError,
    IdError,
    IdTypeError,
    MemoryBudgetError,
    NonFiniteGradientError,
    UnknownArgumentError,
    UnsupportedError,
)
from embedrock.gradients import RowGradients
from embedrock.initializers import Constant, FromArray, Initializer, Normal, Uniform, Zeros
from embedrock.plan import Plan
from embedrock.rules import SGD, Adagrad, Adam, AdamW, Ftrl, Momentum, RMSprop, RowwiseAdagrad, Rule
from embedrock.spec import Spec
from embedrock.table import Table
from embedrock.threads import get_threads, set_threads

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "ArgumentError",
    "ClosedTableError",
    "Constant",
    "EmbedrockError",
    "FromArray",
    "Ftrl",
    "GradientError",
    "IdError",
    "IdTypeError",
    "Initializer",
    "MemoryBudgetError",
    "Momentum",
    "NonFiniteGradientError",
    "Normal",
    "Plan",
    "RMSprop",
    "RowGradients",
    "RowwiseAdagrad",
    "Rule",
    "Spec",
    "Table",
    "Uniform",
    "UnknownArgumentError",
    "UnsupportedError",
    "Zeros",
    "get_threads",
    "set_threads",
]
