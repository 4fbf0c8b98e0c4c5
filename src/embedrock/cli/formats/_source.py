"""What every format of files of vectors shares: `Source` is read in batches, and errors say where."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from embedrock.errors import EmbedrockError, RequirementError

BATCH_BYTES = 4 << 20  # of vectors, at a time
MAX_BATCH_ROWS = 1 << 16
ROW_NUMBERS = "row-number"  # in place of the name of ids: rows are numbered from 0


class FileError(EmbedrockError, ValueError):
    """A file of vectors that cannot be read, or written, as asked."""


class Batch(NamedTuple):
    """Rows of a file, in its order.

    Attributes:
        ids: int64 (n,).
        vectors: float32 (n, dim), finite.
        words: what the file calls them, as bytes; None where rows have no words.
    """

    ids: np.ndarray
    vectors: np.ndarray
    words: list[bytes] | None = None


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What a user says about a file to read.

    Attributes:
        ids: name of the array or column of ids, `ROW_NUMBERS`, "word", or a .npy file; None: the format's own choice.
        vectors: name of the array or column of vectors; None: the format's own choice.
        dim: columns, where the file does not say.
        dtype: of the numbers, where the file does not say.
        header: whether the first line of a CSV or TSV file names its columns; None: as it looks.
    """

    ids: str | None = None
    vectors: str | None = None
    dim: int | None = None
    dtype: str | None = None
    header: bool | None = None


class Source(ABC):
    """A file of vectors.

    Attributes:
        path: of the file.
        rows: how many there are.
        dim: width of the vectors.
        has_ids: the file says the ids; otherwise rows are numbered from 0.
        has_words: rows have words.
    """

    path: Path
    rows: int
    dim: int
    has_ids = False
    has_words = False

    def batches(self, start: int = 0, batch_rows: int | None = None) -> Generator[Batch]:
        """Go through the rows from number `start` on, in RAM for one batch.

        Raises:
            FileError: the file is not what it should be from here on; rows that were yielded before are good.
        """
        for batch in self._batches(start, batch_rows or rows_at_once(self.dim)):
            self._check(batch, start)
            yield batch
            start += len(batch.ids)

    @abstractmethod
    def _batches(self, start: int, batch_rows: int) -> Iterator[Batch]: ...

    def place(self, row: int, column: int | None = None) -> str:
        """Return where in the file a row is, or one of its numbers, for people."""
        return f"row {row} (from 0)"

    def fail(self, expected: str, got: str, remedy: str, where: str = "") -> NoReturn:
        """Raise a `FileError` about this file."""
        fail(self.path, expected, got, remedy, where)

    def _check(self, batch: Batch, start: int) -> None:
        finite = np.isfinite(batch.vectors)
        if not finite.all():
            row, column = divmod(int(np.argmin(finite)), self.dim)
            place = self.place(start + row, column)
            self.fail("finite float32 numbers", f"{batch.vectors[row, column]}", "Fix or remove the row.", place)


def fail(path: Path, expected: str, got: str, remedy: str, where: str = "") -> NoReturn:
    """Raise a `FileError` that says subject, where, expected, got and remedy."""
    raise FileError(f"{path}{', ' if where else ''}{where}: expected {expected}; got {got}. {remedy}")


def rows_at_once(dim: int) -> int:
    """Return the rows of a batch."""
    return max(1, min(MAX_BATCH_ROWS, BATCH_BYTES // (4 * dim)))


def import_pyarrow(kind: str, *parts: str) -> Any:
    """Return pyarrow, with some of its parts, to read or write a kind of file.

    Raises:
        RequirementError: it is not installed.
    """
    try:
        for part in parts:
            import_module(f"pyarrow.{part}")
        return import_module("pyarrow")
    except ImportError as error:
        raise RequirementError(
            f'{kind} needs pyarrow, which does not import: {error}. pip install "embedrock[files]"'
        ) from error
