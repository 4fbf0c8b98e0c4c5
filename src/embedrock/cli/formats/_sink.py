"""`Sink`: a file of vectors in the making, which can be continued."""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from embedrock.cli.formats._arrays import Array
from embedrock.cli.formats._source import fail
from embedrock.cli.formats.vocabulary import keep_lines
from embedrock.machine.vfs import OS_SYSTEM
from embedrock.process import platform

PART = ".part"
CHECKED_ROWS = 64  # the last ones of a part, compared with the table before it is continued
PIECE_NUMBERS = 1 << 16  # written as text at a time: Python's own floats take 32 bytes each


class Output(NamedTuple):
    """What is to be written.

    Attributes:
        path: of the file.
        rows, dim: of the vectors.
        has_ids: they are not the numbers of the rows, from 0.
        words: file with a word per line, that of id 0 first; None: ids are the words.
    """

    path: Path
    rows: int
    dim: int
    has_ids: bool
    words: Path | None = None


class Sink(ABC):
    """A file of vectors, written to files with `PART` at the end of their names until it is whole.

    Args:
        output: what is to be written.
        done: rows that are in the parts already, and durable.
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
        """Make durable what was written."""

    @abstractmethod
    def finish(self) -> list[Path]:
        """Make the whole file of the parts; return what there is now."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the parts."""


def part_of(path: Path) -> Path:
    """Return where a file is while it is written."""
    return path.with_name(path.name + PART)


def publish(part: Path, path: Path) -> Path:
    """Give a part, which is durable, its name."""
    if path.exists():
        fail(path, "no file of this name yet", "one", "Move it away, and run the command again.")
    os.rename(part, path)
    OS_SYSTEM.fsync_folder(str(path.parent))
    return path


class LineSink(Sink):
    """Writes a line for each row."""

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
    def _header(self) -> bytes:
        """Return the lines before the first row."""

    @abstractmethod
    def _lines(self, ids: np.ndarray, vectors: np.ndarray) -> bytes:
        """Return the lines of some rows."""

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
    """An array in a file in the making.

    Args:
        path: of the file; it is made unless it is there.
        header: its first bytes, if they are this region's to write.
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
        """Return whether rows `first` and on are these."""
        wanted = np.ascontiguousarray(values, self.dtype).tobytes()
        self._file.seek(self.offset + first * self._row_bytes)
        return self._file.read(len(wanted)) == wanted

    def sync(self) -> None:
        """Make durable what was written."""
        self._file.flush()
        platform.sync(self._file.fileno())

    def end(self) -> None:
        """Give the file its final size, in case it was longer."""
        self._file.truncate(self.offset + self.shape[0] * self._row_bytes)
        self.sync()

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def array(self) -> Array:
        """Return it, to be read."""
        return Array(self.path, "", partial(open, self.path, "rb"), self.offset, self.dtype, self.shape)


def _open_to_change(path: Path) -> BinaryIO:
    # Neither truncated nor appended to: what is there is continued.
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")


class Regions(Sink):
    """Vectors, and perhaps ids, each in a `Region`."""

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


def npy_region(path: Path, dtype: str, shape: tuple[int, ...]) -> Region:
    """Return the array of a .npy file in the making."""
    file = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return Region(path, file.getvalue(), file.tell(), dtype, shape)


class Spool(Regions):
    """Vectors and ids in files of their own, from which a file that cannot be continued is made at the end."""

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
