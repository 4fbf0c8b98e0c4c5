"""Embedding tables of any size, trained exactly."""

from __future__ import annotations

from embedrock.durability import UncommittedWarning
from embedrock.errors import (
    ArgumentError,
    CacheTooSmallError,
    ClosedTableError,
    CommitError,
    CorruptTableError,
    EmbedrockError,
    GradientError,
    IdError,
    IdTypeError,
    MemoryBudgetError,
    NewerFormatError,
    NonFiniteGradientError,
    ReadOnlyTableError,
    TableFileError,
    TableLockedError,
    UnknownArgumentError,
    UnsupportedError,
)
from embedrock.gradients import RowGradients
from embedrock.initializers import Constant, FromArray, Initializer, Normal, Uniform, Zeros
from embedrock.plan import Plan
from embedrock.rules import SGD, Adagrad, Adam, AdamW, Ftrl, Momentum, RMSprop, RowwiseAdagrad, Rule
from embedrock.spec import Spec
from embedrock.table import Table
from embedrock.table import open_table as open  # noqa: A004  # er.open, as tarfile.open and others
from embedrock.threads import get_threads, set_threads

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "ArgumentError",
    "CacheTooSmallError",
    "ClosedTableError",
    "CommitError",
    "Constant",
    "CorruptTableError",
    "EmbedrockError",
    "FromArray",
    "Ftrl",
    "GradientError",
    "IdError",
    "IdTypeError",
    "Initializer",
    "MemoryBudgetError",
    "Momentum",
    "NewerFormatError",
    "NonFiniteGradientError",
    "Normal",
    "Plan",
    "RMSprop",
    "ReadOnlyTableError",
    "RowGradients",
    "RowwiseAdagrad",
    "Rule",
    "Spec",
    "Table",
    "TableFileError",
    "TableLockedError",
    "UncommittedWarning",
    "Uniform",
    "UnknownArgumentError",
    "UnsupportedError",
    "Zeros",
    "get_threads",
    "open",
    "set_threads",
]
