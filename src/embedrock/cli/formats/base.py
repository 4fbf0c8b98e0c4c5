"""Base of all file formats of vectors: `VectorSource` is read in batches, `Sink` is written and can be continued."""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Generic, NamedTuple, NoReturn, TypeVar

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
# Types of vectors by name. NumPy has no bfloat16, which is the upper half of a float32.
FLOATS = {"float32": "<f4", "float16": "<f2", "float64": "<f8", "bfloat16": "<u2"}


class FileError(EmbedrockError, ValueError):
    """An error: a file of vectors cannot be read, or written, as requested."""


class RowBatch(NamedTuple):
    """Rows of a file, in file order."""

    ids: np.ndarray  # int64 (n,)
    vectors: np.ndarray  # float32 (n, dim), finite
    words: list[bytes] | None = None  # names of the rows in the file; None: rows have no words

    def head(self, rows: int) -> RowBatch:
        """Return the first rows."""
        return RowBatch(self.ids[:rows], self.vectors[:rows], self.words and self.words[:rows])


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """A user's options for a file to read. None: the file says it, or the format chooses."""

    ids: str | None = None  # name of the array or column of ids, `ROW_NUMBERS`, "word", or a .npy file
    vectors: str | None = None  # name of the array or column
    dim: int | None = None
    dtype: str | None = None
    header: bool | None = None  # whether the first line of a CSV or TSV file names its columns


class VectorSource(ABC):
    """A file of vectors."""

    path: Path
    rows: int
    dim: int
    has_ids = False  # without ids, rows are numbered from 0
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


def import_pyarrow(what: str, *parts: str) -> Any:
    """Import pyarrow, and some of its modules. `what` needs them, for errors.

    Raises:
        RequirementError: it is not installed.
    """
    try:
        for part in parts:
            import_module(f"pyarrow.{part}")
        return import_module("pyarrow")
    except ImportError as error:
        raise RequirementError(
            f'{what} needs pyarrow, which does not import: {error}. pip install "embedrock[files]"'
        ) from error


class Output(NamedTuple):
    """Description of a file to write."""

    path: Path
    rows: int
    dim: int
    has_ids: bool  # whether ids differ from the numbers of the rows, from 0
    words: Path | None = None  # a file with a word per line, that of id 0 first; None: ids are the words
    dtype: str = "float32"  # or "float16", "bfloat16"
    about: Mapping[str, str] = {}  # names and values that describe the rows, if the format has a place for them


class PartFile:
    """A file that is being written, or continued: existing content stays."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: BinaryIO = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")

    def sync(self) -> None:
        """Make the written bytes durable."""
        self.file.flush()
        platform.sync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


class LineFile(PartFile):
    """Lines that are being written, after the first `done` lines of an earlier run."""

    def __init__(self, path: Path, done: int) -> None:
        if done:
            keep_lines(path, done)
        super().__init__(path)
        if not done:
            self.file.truncate()
        self.file.seek(0, os.SEEK_END)

    def write(self, lines: list[bytes]) -> None:
        """Write lines, without their ends."""
        self.file.write(b"".join([line + b"\n" for line in lines]))


class Region(PartFile):
    """An array in a file that is being written.

    `header` is the first bytes of the file, if this region writes them. `offset` is that of the first element.
    """

    def __init__(self, path: Path, header: bytes, offset: int, dtype: str, shape: tuple[int, ...]) -> None:
        super().__init__(path)
        self.offset, self.dtype, self.shape = offset, np.dtype(dtype), shape
        self._row_bytes = self.dtype.itemsize * int(np.prod(shape[1:]))
        self.file.write(header)

    def write(self, first: int, values: np.ndarray) -> None:
        """Write rows `first` and on."""
        self.file.seek(self.offset + first * self._row_bytes)
        self.file.write(np.ascontiguousarray(values, self.dtype).data)

    def holds(self, first: int, values: np.ndarray) -> bool:
        """Return whether rows `first` and on equal `values`."""
        wanted = np.ascontiguousarray(values, self.dtype).tobytes()
        self.file.seek(self.offset + first * self._row_bytes)
        return self.file.read(len(wanted)) == wanted

    def end(self) -> None:
        """Truncate the file to its final size."""
        self.file.truncate(self.offset + self.shape[0] * self._row_bytes)
        self.sync()


Part = TypeVar("Part", bound=PartFile)


class Sink(ABC, Generic[Part]):
    """A file of vectors, written to files with `PART` at the end of their names until it is complete.

    `done` is the number of rows that are in these parts, at the start durably.
    """

    parts: list[Part]

    def __init__(self, output: Output, done: int) -> None:
        self.output, self.done = output, done

    @abstractmethod
    def write(self, ids: np.ndarray, vectors: np.ndarray) -> None:
        """Write the next rows."""

    @abstractmethod
    def holds(self, ids: np.ndarray, vectors: np.ndarray) -> bool:
        """Return whether these are the last of the rows that are done."""

    @abstractmethod
    def finish(self) -> list[Path]:
        """Make the complete file of the parts; return the resulting files."""

    def sync(self) -> None:
        """Make the written rows durable."""
        for part in self.parts:
            part.sync()

    def close(self) -> None:
        """Close the parts."""
        for part in self.parts:
            part.close()


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


class LineSink(Sink[LineFile]):
    """A sink with a line for each row, after a header."""

    header = b""

    def __init__(self, output: Output, done: int) -> None:
        super().__init__(output, done)
        lines = LineFile(part_of(output.path), done and done + self.header.count(b"\n"))
        self.parts, self._file = [lines], lines.file
        if not done:
            self._file.write(self.header)

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

    def finish(self) -> list[Path]:
        self.sync()
        return [publish(part_of(self.output.path), self.output.path)]


class Regions(Sink[Region]):
    """A sink for vectors, and perhaps ids, each in a `Region`: the vectors first."""

    def write(self, ids: np.ndarray, vectors: np.ndarray) -> None:
        for region, rows in zip(self.parts, (vectors, ids), strict=False):
            region.write(self.done, rows)
        self.done += len(ids)

    def holds(self, ids: np.ndarray, vectors: np.ndarray) -> bool:
        first = self.done - len(ids)
        return all(region.holds(first, rows) for region, rows in zip(self.parts, (vectors, ids), strict=False))


def keep_lines(path: Path, count: int) -> None:
    """Truncate a file after its first `count` lines. Fewer are a `FileError`."""
    expected = f"{format_count(count, 'line')} from an earlier run"
    if not path.exists():
        fail(path, expected, "no such file", "Begin anew: --restart.")
    with open(path, "r+b") as file:
        seen = sum(line.endswith(b"\n") for line in islice(file, count))
        if seen < count:
            fail(path, expected, f"{seen}", "Begin anew: --restart.")
        file.truncate(file.tell())


def npy_region(path: Path, dtype: str, shape: tuple[int, ...]) -> Region:
    """Return the array of a .npy file that is being written."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return Region(path, file.getvalue(), file.tell(), dtype, shape)


class Spool(Regions):
    """A sink that spools vectors and ids, for a file that cannot be continued.

    `pack` writes the file at the end, from its path, vectors and, unless rows are numbered from 0, ids.
    """

    def __init__(self, output: Output, done: int, pack: Callable[..., None]) -> None:
        super().__init__(output, done)
        path, rows, self._pack = output.path, output.rows, pack
        paths = [path.with_name(f"{path.name}.{name}{PART}") for name in ("vectors", "ids")]
        self.parts = [npy_region(paths[0], FLOATS[output.dtype], (rows, output.dim))]
        self.parts += [npy_region(paths[1], "<i8", (rows,))] if output.has_ids else []

    def finish(self) -> list[Path]:
        for region in self.parts:
            region.end()
        part = part_of(self.output.path)
        self._pack(part, *(np.load(region.path, mmap_mode="r") for region in self.parts))
        with open(part, "rb") as file:
            platform.sync(file.fileno())
        made = publish(part, self.output.path)
        for region in self.parts:
            region.path.unlink()
        return [made]
