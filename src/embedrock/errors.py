"""Every error that Embedrock raises on purpose, each also the builtin that a caller would catch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class EmbedrockError(Exception):
    """Base of all errors raised by Embedrock. When one is raised, nothing has changed."""


class ArgumentError(EmbedrockError, ValueError):
    """An argument has a value that cannot work."""


class UnknownTableError(EmbedrockError, KeyError):
    """A group has no table of that name."""

    __str__ = Exception.__str__  # not that of `KeyError`, which quotes the message


class UnknownArgumentError(EmbedrockError, TypeError):
    """An argument that this function does not have."""


class IdError(EmbedrockError, IndexError):
    """Ids that lie outside the table."""


class IdTypeError(EmbedrockError, TypeError):
    """Ids that are not integers."""


class GradientError(EmbedrockError, ValueError):
    """Gradients (or row values) of the wrong shape or dtype."""


class NonFiniteGradientError(GradientError):
    """Gradients with NaN or Inf; the step was refused as a whole.

    Attributes:
        count: number of rows whose summed gradient is not finite.
        ids: the first of their ids (at most 8), int64.
    """

    def __init__(self, message: str, count: int, ids: npt.NDArray[np.int64]) -> None:
        super().__init__(message)
        self.count = count
        self.ids = ids

    def __reduce__(self) -> tuple[type, tuple[str, int, npt.NDArray[np.int64]]]:
        return type(self), (str(self), self.count, self.ids)


class MemoryBudgetError(EmbedrockError, MemoryError):
    """Rows that do not fit the table's memory budget, or a table that does not fit the machine."""


class ClosedTableError(EmbedrockError, ValueError):
    """A table that was closed is used."""


class UnsupportedError(EmbedrockError, NotImplementedError):
    """Something that Embedrock refuses to do rather than do wrongly."""


class RequirementError(EmbedrockError, ImportError):
    """A package that something needs is missing, too old, or set to something else than it needs."""


class CorruptTableError(EmbedrockError, OSError):
    """Files of a table that are not what was committed: damaged, truncated, missing, foreign or made up."""


class MissingFileError(CorruptTableError, FileNotFoundError):
    """A file that a commit needs is not there: lost, or removed by the writer while a reader was opening the commit."""


class NewerFormatError(EmbedrockError, ValueError):
    """A table written in a newer format than this release reads."""


class TableLockedError(EmbedrockError, BlockingIOError):
    """A table that another writer has open, or a file system that gives no locks."""


class TableFileError(EmbedrockError, OSError):
    """A path that holds no table, or another one than was asked for."""


class ReadOnlyTableError(EmbedrockError, PermissionError):
    """A change of a table that was opened for reading only, or by a child of the process that writes it."""


class CommitError(EmbedrockError, OSError):
    """A commit that failed. The last commit is whole, and the rows in RAM are as they were."""


class CacheTooSmallError(MemoryBudgetError):
    """A cache that cannot hold the rows that are needed at once."""


class WorkerLostError(EmbedrockError, ConnectionError):
    """A process that trains with others failed, is gone, or did not answer in time: the others cannot go on."""


class OtherRankError(EmbedrockError, RuntimeError):
    """Another process that trains with this one refused to go on, or did something else, so that neither can."""
