"""Arrays that lie in files, read from front to back in little RAM."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from embedrock.cli.formats._source import ROW_NUMBERS, Batch, ReadOptions, Source, fail
from embedrock.terminal.tables import format_count
from embedrock.wording import did_you_mean

# Types of vectors by name. NumPy has no bfloat16, which is the upper half of a float32.
FLOATS = {"float32": "<f4", "float16": "<f2", "float64": "<f8", "bfloat16": "<u2"}
OF_BITS = "Take hashes by their bits, ids.view(np.int64)."
MAPPING, MAPPING_ROWS = "mapping", 1 << 16
WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
LEAST_ID, MOST_ID = -(2**63), 2**63 - 1
CUT_OFF = "The file was cut off: get it again."


@dataclass(frozen=True)
class Array:
    """An array in a file.

    Attributes:
        path: of the file.
        name: of the array in it; "" where it is the only one.
        open: opens the file, or the member of an archive.
        offset: of the first element in it.
        dtype: of the elements as NumPy has it.
        shape: of the array.
        fortran: columns lie one after the other.
        bfloat16: the elements, uint16, are bits of bfloat16.
    """

    path: Path
    name: str
    open: Callable[[], AbstractContextManager[IO[bytes]]]
    offset: int
    dtype: np.dtype
    shape: tuple[int, ...]
    fortran: bool = False
    bfloat16: bool = False

    @property
    def length(self) -> int:
        """How many rows, or elements, there are."""
        return next(iter(self.shape), 0)

    @property
    def is_vectors(self) -> bool:
        """Whether it can be a table's vectors."""
        return len(self.shape) == 2 and (self.dtype.kind == "f" or self.bfloat16)

    @property
    def kind(self) -> str:
        """Type and shape, for people."""
        return f"{'bfloat16' if self.bfloat16 else self.dtype} {self.shape}"

    def parts(self, start: int, rows: int) -> Iterator[np.ndarray]:
        """Go through the array from row `start` on, `rows` at a time."""
        with self.open() as file:
            if self.fortran and len(self.shape) > 1:
                yield from self._by_columns(file, start, rows)
                return
            width = self.dtype.itemsize * int(np.prod(self.shape[1:]))
            file.seek(self.offset + start * width)
            for first in range(start, self.length, rows):
                count = min(rows, self.length - first)
                data = self._exactly(file, count * width, first)
                yield np.frombuffer(data, self.dtype).reshape(count, *self.shape[1:])

    def _by_columns(self, file: IO[bytes], start: int, rows: int) -> Iterator[np.ndarray]:
        size = self.dtype.itemsize
        for first in range(start, self.length, rows):
            part = np.empty((min(rows, self.length - first), *self.shape[1:]), self.dtype)
            for column in range(part.shape[1]):
                file.seek(self.offset + (column * self.length + first) * size)
                part[:, column] = np.frombuffer(self._exactly(file, len(part) * size, first), self.dtype)
            yield part

    def _exactly(self, file: IO[bytes], size: int, first: int) -> bytes:
        data = file.read(size)
        if len(data) != size:
            fail(self.path, format_count(size, "byte"), f"{len(data)}", CUT_OFF, f"row {first} (from 0)")
        return data

    def floats(self, start: int, rows: int) -> Iterator[np.ndarray]:
        """Go through it as float32."""
        for part in self.parts(start, rows):
            if self.bfloat16:
                yield (part.astype(np.uint32) << 16).view(np.float32)
                continue
            with np.errstate(over="ignore"):  # a float64 too large becomes Inf, which is refused
                floats = np.ascontiguousarray(part, np.float32)
            yield floats


class Arrays(Source):
    """An array of vectors, and perhaps one of ids.

    Raises:
        FileError: they are no such arrays.
    """

    def __init__(self, path: Path, vectors: Array, ids: Array | None) -> None:
        self.path, self._vectors, self._ids = path, vectors, ids
        _check_vectors(vectors)
        self.rows, self.dim = vectors.shape
        self.has_ids = ids is not None
        if ids is not None:
            _check_ids(ids, self.rows)

    def _batches(self, start: int, batch_rows: int) -> Iterator[Batch]:
        vectors = self._vectors.floats(start, batch_rows)
        if self._ids is None:
            for part in vectors:
                yield Batch(np.arange(start, start + len(part)), part)
                start += len(part)
            return
        for ids, part in zip(self._ids.parts(start, batch_rows), vectors, strict=True):
            yield Batch(as_ids(ids, self, start), part)
            start += len(part)


def as_ids(ids: np.ndarray, source: Source, start: int) -> np.ndarray:
    """Return whole numbers of any type as int64; they are those of rows `start` and on."""
    if ids.dtype.kind == "u" and ids.size and int(ids.max()) >= 2**63:
        row = int(np.argmax(ids))
        source.fail(
            "ids below 2**63",
            f"{ids[row]}",
            OF_BITS,
            source.place(start + row),
        )
    return ids.astype(np.int64)


def as_id(text: str) -> int:
    """Return the id that a text says.

    Raises:
        ValueError: it is no id.
    """
    if not WHOLE.fullmatch(text.strip(" \t")):
        raise ValueError("a whole number as id")
    value = int(text)
    if not LEAST_ID <= value <= MOST_ID:
        raise ValueError("ids from -2**63 to 2**63 - 1")
    return value


def is_number(text: str) -> bool:
    """Return whether a text says a number, without the underscores that Python would take."""
    try:
        float(text)
    except ValueError:
        return False
    return text.isascii() and "_" not in text


def choose(path: Path, arrays: dict[str, Array], options: ReadOptions) -> Arrays:
    """Return the source made of those arrays that the user named, or else of the only ones that can be meant."""
    listed = ", ".join(f"{name} {array.kind}" for name, array in arrays.items()) or "no arrays"
    found = [name for name, array in arrays.items() if array.is_vectors]
    name = options.vectors
    if name is None:
        if len(found) != 1:
            fail(path, "one 2-D array of floats", listed, "Name one: --vectors NAME.")
        name = found[0]
    if name not in arrays:
        hint = did_you_mean(name, arrays)
        fail(path, f"an array {name!r} of vectors", listed, f"Name one of these: --vectors NAME.{hint}")
    _check_mapping(path, arrays, options)
    ids = options.ids or ("ids" if "ids" in arrays else ROW_NUMBERS)
    if ids != ROW_NUMBERS and ids not in arrays:
        remedy = f"Name one of these, or say --ids {ROW_NUMBERS}.{did_you_mean(ids, arrays)}"
        fail(path, f"an array {ids!r} of ids", listed, remedy)
    return Arrays(path, arrays[name], None if ids == ROW_NUMBERS else arrays[ids])


def _check_mapping(path: Path, arrays: dict[str, Array], options: ReadOptions) -> None:
    """Refuse to leave out what model2vec writes beside vectors that several tokens share: which one each token has."""
    found = arrays.get(MAPPING)
    if options.ids is None and "ids" not in arrays and found is not None and len(found.shape) == 1:
        first, is_identity = 0, found.dtype.kind in "iu"
        for part in found.parts(0, MAPPING_ROWS) if is_identity else ():
            is_identity &= bool((part == np.arange(first, first + len(part))).all())
            first += len(part)
        if not is_identity:
            remedy = (
                f"Import what numpy.save writes of each: vectors[{MAPPING}]; or say --ids {ROW_NUMBERS}, to number "
                "the vectors as they are."
            )
            fail(path, "a vector for each row", f"an array {MAPPING!r} {found.kind} of which token has which", remedy)


def file_size(path: Path) -> int:
    """Return the bytes of a file."""
    return os.stat(path).st_size


def _check_vectors(array: Array) -> None:
    if not array.is_vectors:
        remedy = 'Convert it: array.astype("float32").reshape(rows, dim).'
        fail(array.path, "a 2-D array of floats", array.kind, remedy, array.name)
    if 0 in array.shape:
        fail(array.path, "at least one row and column", array.kind, "Check that it is the right file.", array.name)


def _check_ids(array: Array, rows: int) -> None:
    if array.shape != (rows,) or array.dtype.kind not in "iu" or array.bfloat16:
        remedy = f"Name another array, or say --ids {ROW_NUMBERS}."
        fail(
            array.path,
            f"{format_count(rows, 'whole number')} as ids, one for each vector",
            array.kind,
            remedy,
            array.name,
        )
