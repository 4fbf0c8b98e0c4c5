"""`Columns`: a file with a column of ids and one of vectors (lists of floats), as pyarrow reads it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np

from embedrock.batch.wrong_ids import OF_STRINGS
from embedrock.cli.formats._arrays import as_ids
from embedrock.cli.formats._pyarrow import import_pyarrow
from embedrock.cli.formats._sink import Output
from embedrock.cli.formats._source import ROW_NUMBERS, Batch, ReadOptions, Source, rows_at_once
from embedrock.cli.formats._spool import Spool
from embedrock.terminal.tables import format_count
from embedrock.wording import did_you_mean, with_article

IDS, VECTORS = "id", "vector"  # names of the columns
GET_AGAIN = "Check that it is the right file, or get it again."
FIX = "Fix or remove the row."


class Columns(Source):
    """Rows with an id and a vector.

    Attributes:
        kind: of the file, for people.
        part: of pyarrow that reads it.
    """

    kind: ClassVar[str]
    part: ClassVar[str]

    def __init__(self, path: Path, options: ReadOptions) -> None:
        self.path, self._arrow = path, import_pyarrow(self.kind, self.part)
        ids = options.ids or IDS
        self._ids, self._vectors = None if ids == ROW_NUMBERS else ids, options.vectors or VECTORS
        self.has_ids = self._ids is not None
        with self._told():
            self._check_columns(self._schema())
            self.rows = self._count()
            if not self.rows:
                self.fail("rows", "none", GET_AGAIN)
            self.dim = self._find_dim()

    @abstractmethod
    def _schema(self) -> Any:
        """Return names and types of the columns."""

    @abstractmethod
    def _count(self) -> int:
        """Return how many rows there are."""

    @abstractmethod
    def _parts(self, names: list[str], start: int, rows: int) -> Iterator[Any]:
        """Go through these columns from row `start` on, at most `rows` at a time."""

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Say in our own words what pyarrow finds wrong with a file."""
        try:
            yield
        except (self._arrow.ArrowException, OSError) as error:
            self._refuse(error)

    def _refuse(self, error: Exception) -> NoReturn:
        if isinstance(error, OSError) and error.errno is not None:
            raise error
        self.fail(f"{with_article(self.kind)} file", f"{error}".splitlines()[0], GET_AGAIN)

    def _check_columns(self, schema: Any) -> None:
        types, listed = self._arrow.types, ", ".join(f"{field.name} ({field.type})" for field in schema)
        kinds = {field.name: field.type for field in schema}
        if self._ids is not None and not (self._ids in kinds and types.is_integer(self._values(kinds[self._ids]))):
            hint = did_you_mean(self._ids, (name for name in kinds if name != self._ids))
            words = f" {OF_STRINGS}" if "string" in str(kinds.get(self._ids)) else hint
            remedy = f"Name it: --ids NAME, or say --ids {ROW_NUMBERS}.{words}"
            self.fail(f"a column {self._ids!r} of integers", listed, remedy)
        kind = kinds.get(self._vectors)
        is_list = (types.is_list, types.is_large_list, types.is_fixed_size_list)
        if kind is None or not any(test(kind) for test in is_list) or not types.is_floating(kind.value_type):
            hint = did_you_mean(self._vectors, (name for name in kinds if name != self._vectors))
            self.fail(f"a column {self._vectors!r} of lists of floats", listed, f"Name it: --vectors NAME.{hint}")

    def _values(self, kind: Any) -> Any:
        return kind.value_type if self._arrow.types.is_dictionary(kind) else kind

    def _find_dim(self) -> int:
        first = next(self._parts([self._vectors], 0, 1)).column(0)[0].as_py()
        if not first:
            self.fail("a vector", f"{first}", FIX, self.place(0))
        return len(first)

    def _batches(self, start: int, batch_rows: int) -> Iterator[Batch]:
        names = [name for name in (self._ids, self._vectors) if name is not None]
        with self._told():
            for part in self._parts(names, start, batch_rows):
                yield self._batch(part, start)
                start += part.num_rows

    def _batch(self, part: Any, start: int) -> Batch:
        vectors = self._matrix(part.column(self._vectors), start)
        if self._ids is None:
            return Batch(np.arange(start, start + len(vectors)), vectors)
        column = part.column(self._ids)
        if self._arrow.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        self._refuse_null(column, start)
        return Batch(as_ids(column.to_numpy(zero_copy_only=False), self, start), vectors)

    def _matrix(self, column: Any, start: int) -> np.ndarray:
        self._refuse_null(column, start)
        lengths = self._lengths(column)
        if (lengths != self.dim).any():
            row = int(np.argmax(lengths != self.dim))
            self.fail(format_count(self.dim, "number"), f"{lengths[row]}", FIX, self.place(start + row))
        flat = column.flatten()
        if flat.null_count:
            row = int(np.argmax(flat.is_null().to_numpy(zero_copy_only=False))) // self.dim
            self.fail("numbers", "null in a vector", FIX, self.place(start + row))
        with np.errstate(over="ignore"):
            return flat.to_numpy(zero_copy_only=False).astype(np.float32).reshape(-1, self.dim)

    def _lengths(self, column: Any) -> np.ndarray:
        if self._arrow.types.is_fixed_size_list(column.type):
            return np.full(len(column), column.type.list_size)
        return np.diff(column.offsets.to_numpy())

    def _refuse_null(self, column: Any, start: int) -> None:
        if column.null_count:
            row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
            self.fail("an id and a vector", "null", FIX, self.place(start + row))


class ColumnsSink(Spool):
    """Writes columns "id" and "vector"."""

    kind: ClassVar[str]
    part: ClassVar[str]

    def __init__(self, output: Output, done: int) -> None:
        self._arrow = import_pyarrow(self.kind, self.part)  # or the work would be for nothing
        super().__init__(output, done)

    @abstractmethod
    def _writer(self, path: Path, schema: Any) -> Any:
        """Return what writes tables of this schema to a file."""

    def _pack(self, path: Path) -> None:
        arrow, (rows, dim) = self._arrow, self.vectors.shape
        at_once = rows_at_once(dim)
        ids = self.ids.array().parts(0, at_once) if self.ids is not None else _numbers(rows, at_once)
        schema = arrow.schema([(IDS, arrow.int64()), (VECTORS, arrow.list_(arrow.float32(), dim))])
        with self._writer(path, schema) as writer:
            for part, values in zip(ids, self.vectors.array().parts(0, at_once), strict=True):
                lists = arrow.FixedSizeListArray.from_arrays(arrow.array(values.reshape(-1)), dim)
                writer.write_table(arrow.table([arrow.array(part), lists], schema=schema))


def _numbers(rows: int, at_once: int) -> Iterator[np.ndarray]:
    return (np.arange(first, min(rows, first + at_once)) for first in range(0, rows, at_once))
