"""The base of all file formats of vectors: `VectorSource` is read in batches, `Sink` is written and can be
continued.
"""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import numpy as np

from embedrock.cli.terminal.tables import format_count
from embedrock.errors import EmbedrockError, RequirementError
from embedrock.io.vfs import OS_SYSTEM
from embedrock.system import platform

BATCH_BYTES = 4 << 20  # of vectors, at a time
MAX_BATCH_ROWS = 1 << 16
ROW_NUMBERS = "row-number"  # as a name of ids: rows are numbered from 0
PART = ".part"
CHECKED_ROWS = 64  # last rows of a part, compared with the table before the part is continued
PIECE_NUMBERS = 1 << 16  # numbers to format at a time: Python's own floats take 32 bytes each
BLOCK_BYTES = 1 << 20  # to read at a time


class FileError(EmbedrockError, ValueError):
    """An error: a file of vectors cannot be read, or written, as requested."""


class RowBatch(NamedTuple):
    """Rows of a file, in file order.

    Attributes:
        ids: int64 (n,).
        vectors: float32 (n, dim), finite.
        words: names of the rows in the file, as bytes; None if rows have no words.
    """

    ids: np.ndarray
    vectors: np.ndarray
    words: list[bytes] | None = None


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """A user's options for a file to read.

    Attributes:
        ids: name of the array or column of ids, `ROW_NUMBERS`, "word", or a .npy file; None: the format's own choice.
        vectors: name of the array or column of vectors; None: the format's own choice.
        dim: number of columns, if the file does not say.
        dtype: dtype of the numbers, if the file does not say.
        header: whether the first line of a CSV or TSV file names its columns; None: detect.
    """

    ids: str | None = None
    vectors: str | None = None
    dim: int | None = None
    dtype: str | None = None
    header: bool | None = None


class VectorSource(ABC):
    """A file of vectors.

    Attributes:
        path: file.
        rows: number of rows.
        dim: width of the vectors.
        has_ids: whether the file has ids; otherwise rows are numbered from 0.
        has_words: whether rows have words.
    """

    path: Path
    rows: int
    dim: int
    has_ids = False
    has_words = False

    def batches(self, start: int = 0, batch_rows: int | None = None) -> Generator[RowBatch]:
        """Iterate over the rows from number `start` on, in RAM for one batch.

        Raises:
            FileError: the file is invalid from here on; rows that were yielded before are good.
        """
        for batch in self._batches(start, batch_rows or rows_at_once(self.dim)):
            self._check(batch, start)
            yield batch
            start += len(batch.ids)

    @abstractmethod
    def _batches(self, start: int, batch_rows: int) -> Iterator[RowBatch]: ...

    def place(self, row: int, column: int | None = None) -> str:
        """Return the place in the file of a row, or of one of its numbers, for people."""
        return f"row {row} (from 0)"

    def fail(self, expected: str, got: str, remedy: str, where: str = "") -> NoReturn:
        """Raise a `FileError` about this file."""
        fail(self.path, expected, got, remedy, where)

    def _check(self, batch: RowBatch, start: int) -> None:
        finite = np.isfinite(batch.vectors)
        if not finite.all():
            row, column = divmod(int(np.argmin(finite)), self.dim)
            place = self.place(start + row, column)
            self.fail("finite float32 numbers", f"{batch.vectors[row, column]}", "Fix or remove the row.", place)


def fail(path: Path, expected: str, got: str, remedy: str, where: str = "") -> NoReturn:
    """Raise a `FileError` with subject, place, expectation, finding and remedy."""
    raise FileError(f"{path}{', ' if where else ''}{where}: expected {expected}; got {got}. {remedy}")


def rows_at_once(dim: int) -> int:
    """Return the number of rows in a batch."""
    return max(1, min(MAX_BATCH_ROWS, BATCH_BYTES // (4 * dim)))


def import_pyarrow(kind: str, *parts: str) -> Any:
    """Import pyarrow and some of its modules, to read or write files of a kind.

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


class Output(NamedTuple):
    """Description of a file to write.

    Attributes:
        path: file.
        rows, dim: of the vectors.
        has_ids: whether ids differ from the numbers of the rows, from 0.
        words: file with a word per line, that of id 0 first; None: ids are the words.
    """

    path: Path
    rows: int
    dim: int
    has_ids: bool
    words: Path | None = None


class Sink(ABC):
    """A file of vectors, written to files with `PART` at the end of their names until it is complete.

    Args:
        output: description of the file.
        done: number of rows that are in the parts already, durably.
    """

    def __init__(self, output: Output, done: int) -> None:
        self.output, self.done = output, done

    @abstractmethod
    def write(self, ids: np.ndarray, vectors: np.ndarray) -> None:
        """Write the next rows."""

    @abstractmethod
    def holds(self, ids: np.ndarray, vectors: np.ndarray) -> bool:
        """Return whether these are the last of the rows that are done."""

    @abstractmethod
    def sync(self) -> None:
        """Make the written rows durable."""

    @abstractmethod
    def finish(self) -> list[Path]:
        """Make the complete file of the parts; return the resulting files."""

    @abstractmethod
    def close(self) -> None:
        """Close the parts."""


def part_of(path: Path) -> Path:
    """Return the path of a file while it is written."""
    return path.with_name(path.name + PART)


def publish(part: Path, path: Path) -> Path:
    """Rename a durable part to its final name."""
    if path.exists():
        fail(path, "no file of this name yet", "one", "Move it away, and run the command again.")
    os.rename(part, path)
    OS_SYSTEM.fsync_folder(str(path.parent))
    return path


class LineSink(Sink):
    """A sink with a line for each row."""

    def __init__(self, output: Output, done: int) -> None:
        super().__init__(output, done)
        part, header = part_of(output.path), self._header()
        if done:
            keep_lines(part, done + header.count(b"\n"))
        self._file = open(part, "r+b" if done else "w+b")  # noqa: SIM115  (closed by `close`)
        self._file.seek(0, os.SEEK_END)
        if not done:
            self._file.write(header)

    @abstractmethod
    def _header(self) -> bytes: ...

    @abstractmethod
    def _lines(self, ids: np.ndarray, vectors: np.ndarray) -> bytes: ...

    def write(self, ids: np.ndarray, vectors: np.ndarray) -> None:
        piece = max(1, PIECE_NUMBERS // self.output.dim)
        for start in range(0, len(ids), piece):
            self._file.write(self._lines(ids[start : start + piece], vectors[start : start + piece]))
        self.done += len(ids)

    def holds(self, ids: np.ndarray, vectors: np.ndarray) -> bool:
        wanted = self._lines(ids, vectors)
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, size - len(wanted)))
        return self._file.read() == wanted

    def sync(self) -> None:
        self._file.flush()
        platform.sync(self._file.fileno())

    def finish(self) -> list[Path]:
        self.sync()
        return [publish(part_of(self.output.path), self.output.path)]

    def close(self) -> None:
        self._file.close()


class Region:
    """An array in a file that is being written.

    Args:
        path: file, which is created if it does not exist.
        header: first bytes of the file, if this region writes them.
        offset: of the first element.
        dtype: of the elements.
        shape: of the array.
    """

    def __init__(self, path: Path, header: bytes, offset: int, dtype: str, shape: tuple[int, ...]) -> None:
        self.path, self.offset, self.dtype, self.shape = path, offset, np.dtype(dtype), shape
        self._row_bytes = self.dtype.itemsize * int(np.prod(shape[1:]))
        self._file = _open_to_change(path)
        self._file.write(header)

    def write(self, first: int, values: np.ndarray) -> None:
        """Write rows `first` and on."""
        self._file.seek(self.offset + first * self._row_bytes)
        self._file.write(np.ascontiguousarray(values, self.dtype).data)

    def holds(self, first: int, values: np.ndarray) -> bool:
        """Return whether rows `first` and on equal `values`."""
        wanted = np.ascontiguousarray(values, self.dtype).tobytes()
        self._file.seek(self.offset + first * self._row_bytes)
        return self._file.read(len(wanted)) == wanted

    def sync(self) -> None:
        """Make the written rows durable."""
        self._file.flush()
        platform.sync(self._file.fileno())

    def end(self) -> None:
        """Truncate the file to its final size."""
        self._file.truncate(self.offset + self.shape[0] * self._row_bytes)
        self.sync()

    def close(self) -> None:
        self._file.close()

    def mapped(self) -> np.ndarray:
        """Map the array in the file."""
        return np.memmap(self.path, self.dtype, "r", self.offset, self.shape)


def _open_to_change(path: Path) -> BinaryIO:
    # Neither truncated nor appended to: existing content is continued.
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")


class Regions(Sink):
    """A sink for vectors, and perhaps ids, each in a `Region`."""

    vectors: Region
    ids: Region | None

    def write(self, ids: np.ndarray, vectors: np.ndarray) -> None:
        self.vectors.write(self.done, vectors)
        if self.ids is not None:
            self.ids.write(self.done, ids)
        self.done += len(ids)

    def holds(self, ids: np.ndarray, vectors: np.ndarray) -> bool:
        first = self.done - len(ids)
        return self.vectors.holds(first, vectors) and (self.ids is None or self.ids.holds(first, ids))

    def sync(self) -> None:
        for region in self._regions():
            region.sync()

    def close(self) -> None:
        for region in self._regions():
            region.close()

    def _regions(self) -> list[Region]:
        return [self.vectors] if self.ids is None else [self.vectors, self.ids]


def keep_lines(path: Path, count: int) -> None:
    """Truncate a file after its first `count` lines.

    Raises:
        FileError: it has fewer.
    """
    seen = size = 0
    if not path.exists():
        fail(path, f"{format_count(count, 'line')} from an earlier run", "no such file", "Begin anew: --restart.")
    with open(path, "r+b") as file:
        while seen < count and (block := file.read(BLOCK_BYTES)):
            ends = line_ends(block)
            size += int(ends[count - seen - 1]) + 1 if seen + len(ends) >= count else len(block)
            seen += len(ends)
        if seen < count:
            fail(path, f"{format_count(count, 'line')} from an earlier run", f"{seen}", "Begin anew: --restart.")
        file.truncate(size)


def line_ends(block: bytes) -> np.ndarray:
    """Return the positions of newlines."""
    return np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))


def npy_region(path: Path, dtype: str, shape: tuple[int, ...]) -> Region:
    """Return the array of a .npy file that is being written."""
    file = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return Region(path, file.getvalue(), file.tell(), dtype, shape)


class Spool(Regions):
    """A sink that spools vectors and ids, and writes a file that cannot be continued at the end."""

    def __init__(self, output: Output, done: int) -> None:
        super().__init__(output, done)
        path, rows = output.path, output.rows
        self.vectors = npy_region(path.with_name(f"{path.name}.vectors{PART}"), "<f4", (rows, output.dim))
        ids = path.with_name(f"{path.name}.ids{PART}")
        self.ids = npy_region(ids, "<i8", (rows,)) if output.has_ids else None

    def finish(self) -> list[Path]:
        for region in self._regions():
            region.end()
        part = part_of(self.output.path)
        self._pack(part)
        with open(part, "rb") as file:
            platform.sync(file.fileno())
        made = publish(part, self.output.path)
        for region in self._regions():
            region.path.unlink()
        return [made]

    @abstractmethod
    def _pack(self, path: Path) -> None: ...
