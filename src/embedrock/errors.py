"""Every error that Embedrock raises on purpose. Each is also the builtin that a caller would catch."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import numpy as np
import numpy.typing as npt


class EmbedrockError(Exception):
    """Base of all errors raised by Embedrock. When one is raised, nothing has changed."""


class ArgumentError(EmbedrockError, ValueError):
    """Value of an argument that cannot work."""


class UnknownTableError(EmbedrockError, KeyError):
    """Table name that a group does not have."""

    __str__ = Exception.__str__  # `KeyError` would quote the message


class UnknownArgumentError(EmbedrockError, TypeError):
    """Argument that this function does not have."""


class IdError(EmbedrockError, IndexError):
    """Ids that lie outside the table, or lack a row where one is demanded."""


class UnknownStringError(IdError, KeyError):
    """String that a vocabulary does not have."""

    __str__ = Exception.__str__


class IdTypeError(EmbedrockError, TypeError):
    """Ids that are not integers."""


class GradientError(EmbedrockError, ValueError):
    """Gradients (or row values) of the wrong shape or dtype."""


class NonFiniteGradientError(GradientError):
    """Gradients with NaN or Inf. The whole step was refused.

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


class OutdatedBatchError(ArgumentError):
    """A batch whose rows have changed since it was fetched, so that its gradients are those of older rows."""


class ForgottenGradientsError(EmbedrockError, RuntimeError):
    """Gradients of rows that no optimizer of rows applied, or a foreign write to what stands for rows in a model."""


class MemoryBudgetError(EmbedrockError, MemoryError):
    """Rows that do not fit the table's memory budget, or a table that does not fit the machine."""


class ClosedTableError(EmbedrockError, ValueError):
    """Use of a table that was closed."""


class UnsupportedError(EmbedrockError, NotImplementedError):
    """Operation that Embedrock refuses because its result would be wrong."""


class RequirementError(EmbedrockError, ImportError):
    """Required package that is missing, too old, or configured wrongly."""


class CorruptTableError(EmbedrockError, OSError):
    """Files of a table that differ from the commit: damaged, truncated, missing, foreign or forged."""


class MissingFileError(CorruptTableError, FileNotFoundError):
    """Missing file of a commit: lost, or removed by the writer while a reader opened the commit."""


class HistoryDroppedError(EmbedrockError, LookupError):
    """Commit of which nothing says any more which rows changed since.

    Attributes:
        oldest: number of the oldest commit of which something does.
    """

    def __init__(self, subject: str, since: int, oldest: int) -> None:
        super().__init__(
            f"{subject} has no list of the rows that changed since commit {since}: its lists reach back to commit "
            f"{oldest}. Ask for changes since that one or a later one, or read all rows: changes(None)."
        )
        self.subject, self.since, self.oldest = subject, since, oldest

    def __reduce__(self) -> tuple[type, tuple[str, int, int]]:
        return type(self), (self.subject, self.since, self.oldest)


class NewerFormatError(EmbedrockError, ValueError):
    """Table written in a newer format than this release reads."""


class TableLockedError(EmbedrockError, BlockingIOError):
    """Table that another writer has open, or a file system without locks."""


class TableFileError(EmbedrockError, OSError):
    """Path that holds no table, or another one than requested."""


class ReadOnlyTableError(EmbedrockError, PermissionError):
    """Change of a table that is open for reading only, or by a child of its writer process."""


class CommitError(EmbedrockError, OSError):
    """Failed commit. The last commit is intact, and the rows in RAM are unchanged."""


class CacheTooSmallError(MemoryBudgetError):
    """Cache that cannot hold the rows needed at once."""


class WorkerLostError(EmbedrockError, ConnectionError):
    """Lost process of a training on several ranks. The process failed, ended, or did not answer in time."""


class OtherRankError(EmbedrockError, RuntimeError):
    """Refusal or deviation of another process that trains with this one. Neither can go on."""


LEAST_LIKENESS = 0.6
MOST_NAMES = 8  # that a message shows


def plural(number: int, noun: str) -> str:
    """Return the singular or plural form of a noun for a number.

    Example:
        >>> plural(1, "row"), plural(2, "row")
        ('row', 'rows')
    """
    return noun if number == 1 else f"{noun}s"


def with_article(noun: str) -> str:
    """Return a noun with its indefinite article.

    Example:
        >>> with_article("id"), with_article("string")
        ('an id', 'a string')
    """
    return f"{'an' if noun[0] in 'aeioAEIO' else 'a'} {noun}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    Example:
        >>> counted(1, "row"), counted(12345, "row")
        ('1 row', '12345 rows')
    """
    return f"{number} {plural(number, noun)}"


def listed(names: Iterable[str]) -> str:
    """Return quoted names with commas between: all, or of more than `MOST_NAMES` the first ones and a count.

    Example:
        >>> listed(["user", "item"]), listed([]), listed(f"c{k}" for k in range(26))
        ("'user', 'item'", 'none', "'c0', 'c1', 'c2', 'c3', 'c4', 'c5' and 20 others")
    """
    known = list(map(repr, names))
    others = len(known) - MOST_NAMES
    return f"{', '.join(known[: MOST_NAMES - 2])} and {others + 2} others" if others > 0 else ", ".join(known) or "none"


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name that is most similar to a word, or None."""
    found = {name.lower(): name for name in names}
    close = get_close_matches(word.lower(), found, 1, LEAST_LIKENESS)
    return found[close[0]] if close else None


def did_you_mean(word: object, names: Iterable[str]) -> str:
    """Return a question with the most similar name, after a space. Return "" if no name is similar.

    Example:
        >>> did_you_mean("imprt", ["info", "import", "export"])
        " Did you mean 'import'?"
    """
    name = nearest(str(word), names)
    return "" if name is None else f" Did you mean {str(name)!r}?"  # a member of a StrEnum, too


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise `ArgumentError` unless an argument has one of the allowed values.

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
    """Return the error of a value that is not one of the allowed ones."""
    known = list(choices)
    return ArgumentError(f"{what} must be one of {', '.join(known)}: got {value!r}.{did_you_mean(value, known)}")
