"""Every error that Embedrock raises on purpose, each also the builtin that a caller would catch."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

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


LEAST_LIKENESS = 0.6


def plural(number: int, noun: str) -> str:
    """Return what so many things are called; `noun` is what one of them is.

    Example:
        >>> plural(1, "row"), plural(2, "row")
        ('row', 'rows')
    """
    return noun if number == 1 else f"{noun}s"


def with_article(noun: str) -> str:
    """Return one of what a noun says.

    Example:
        >>> with_article("id"), with_article("string")
        ('an id', 'a string')
    """
    return f"{'an' if noun[0] in 'aeioAEIO' else 'a'} {noun}"


def counted(number: int, noun: str) -> str:
    """Return a number of things.

    Example:
        >>> counted(1, "row"), counted(12345, "row")
        ('1 row', '12345 rows')
    """
    return f"{number} {plural(number, noun)}"


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name that is most like a word; None where none is."""
    found = {name.lower(): name for name in names}
    close = get_close_matches(word.lower(), found, 1, LEAST_LIKENESS)
    return found[close[0]] if close else None


def did_you_mean(word: object, names: Iterable[str]) -> str:
    """Return a question with the name that is most like a word, after a space; "" where none is.

    Example:
        >>> did_you_mean("imprt", ["info", "import", "export"])
        " Did you mean 'import'?"
    """
    name = nearest(str(word), names)
    return "" if name is None else f" Did you mean {name!r}?"


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise `ArgumentError` unless an argument has one of some values.

    Example:
        >>> check_choice("policy", "lruu", ("lfu", "lru"))
        Traceback (most recent call last):
        ...
        embedrock.errors.ArgumentError: `policy` must be one of lfu, lru: got 'lruu'. Did you mean 'lru'?
    """
    known = tuple(choices)
    if not isinstance(value, str) or value not in known:
        raise not_one_of(f"`{name}`", value, known)


def not_one_of(what: str, value: Any, choices: Iterable[str]) -> ArgumentError:
    """Return the error of something that must be one of some values, and is not."""
    known = list(choices)
    return ArgumentError(f"{what} must be one of {', '.join(known)}: got {value!r}.{did_you_mean(value, known)}")
