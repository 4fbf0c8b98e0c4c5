"""Embedding tables of any size, trained exactly.

`Table` keeps rows of weights and optimizer state, in RAM or on disk. `embedrock.torch` and `embedrock.keras` have
layers whose rows it keeps, and optimizers that step them.

Example:
    >>> import embedrock as er
    >>> table = er.Table(rows=10**9, dim=2, rule=er.SGD(lr=0.5), init=er.Zeros())
    >>> table.update([7, 7], [[1.0, 1.0], [1.0, 1.0]])
    >>> table.lookup([7])
    array([[-1., -1.]], dtype=float32)
"""

from __future__ import annotations

from embedrock.batch.gradients import RowGradients
from embedrock.batch.ngrams import Ngrams
from embedrock.batch.plan import Plan
from embedrock.batch.pooling import jagged
from embedrock.batch.strings import hash_ids
from embedrock.distributed.reader import open_table as open  # noqa: A004  # er.open, as tarfile.open and others
from embedrock.errors import (
    ArgumentError,
    CacheTooSmallError,
    ClosedTableError,
    CommitError,
    CorruptTableError,
    EmbedrockError,
    GradientError,
    HistoryDroppedError,
    IdError,
    IdTypeError,
    MemoryBudgetError,
    NewerFormatError,
    NonFiniteGradientError,
    OtherRankError,
    OutdatedBatchError,
    ReadOnlyTableError,
    TableFileError,
    TableLockedError,
    UnknownArgumentError,
    UnknownStringError,
    UnknownTableError,
    UnsupportedError,
    WorkerLostError,
)
from embedrock.initializers import (
    Constant,
    FromArray,
    FromBfloat16,
    FromSafetensors,
    Initializer,
    Normal,
    TruncatedNormal,
    Uniform,
    Zeros,
)
from embedrock.kernels import get_threads, set_threads
from embedrock.optimizers import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Ftrl,
    Momentum,
    RMSprop,
    RowwiseAdagrad,
    RowwiseRMSprop,
    Rule,
)
from embedrock.planner.proposal import NoPlanError, plan_tables
from embedrock.serving.dense import Bfloat16
from embedrock.serving.publisher import Published, publish
from embedrock.serving.subscriber import ServedStep, Subscriber, Waiting
from embedrock.spec.admission import Admission
from embedrock.spec.eviction import Eviction
from embedrock.spec.spec import Spec
from embedrock.table.changed_rows import RowChanges
from embedrock.table.group import Group
from embedrock.table.numbers import StatsWarning, keep_stats
from embedrock.table.opened import close, opened
from embedrock.table.storage import UncommittedWarning
from embedrock.table.table import Table
from embedrock.vocabulary.vocabulary import Vocabulary

__version__ = "0.1.0"

plan = plan_tables  # its name until 0.1.0, for a release: Table.plan plans a batch

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Admission",
    "ArgumentError",
    "Bfloat16",
    "CacheTooSmallError",
    "ClosedTableError",
    "CommitError",
    "Constant",
    "CorruptTableError",
    "EmbedrockError",
    "Eviction",
    "FromArray",
    "FromBfloat16",
    "FromSafetensors",
    "Ftrl",
    "GradientError",
    "Group",
    "HistoryDroppedError",
    "IdError",
    "IdTypeError",
    "Initializer",
    "MemoryBudgetError",
    "Momentum",
    "NewerFormatError",
    "Ngrams",
    "NoPlanError",
    "NonFiniteGradientError",
    "Normal",
    "OtherRankError",
    "OutdatedBatchError",
    "Plan",
    "Published",
    "RMSprop",
    "ReadOnlyTableError",
    "RowChanges",
    "RowGradients",
    "RowwiseAdagrad",
    "RowwiseRMSprop",
    "Rule",
    "ServedStep",
    "Spec",
    "StatsWarning",
    "Subscriber",
    "Table",
    "TableFileError",
    "TableLockedError",
    "TruncatedNormal",
    "UncommittedWarning",
    "Uniform",
    "UnknownArgumentError",
    "UnknownStringError",
    "UnknownTableError",
    "UnsupportedError",
    "Vocabulary",
    "Waiting",
    "WorkerLostError",
    "Zeros",
    "close",
    "get_threads",
    "hash_ids",
    "jagged",
    "keep_stats",
    "open",
    "opened",
    "plan_tables",
    "publish",
    "set_threads",
]

__dir__ = [*__all__, "__version__"].copy  # what dir() lists
