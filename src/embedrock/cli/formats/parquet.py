"""Parquet: a column of ids and one of vectors (lists of floats). Needs pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from embedrock.cli.formats._arrays import as_ids
from embedrock.cli.formats._sink import Output
from embedrock.cli.formats._source import ROW_NUMBERS, Batch, MissingPackageError, ReadOptions, Source, rows_at_once
from embedrock.cli.formats._spool import Spool

IDS, VECTORS = "id", "vector"  # names of the columns
READ_BYTES = 1 << 20
REMEDY = "Check that it is the right file, or get it again."


def import_pyarrow() -> Any:
    """Return pyarrow, with its part for Parquet.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        import_module("pyarrow.parquet")
        return import_module("pyarrow")
    except ImportError as error:
        raise MissingPackageError(
            f'Parquet needs pyarrow, which does not import: {error}. pip install "embedrock[parquet]"'
        ) from error


def read(path: Path, options: ReadOptions) -> Parquet:
    """Open a Parquet file."""
    return Parquet(path, options.ids or IDS, options.vectors or VECTORS)


class Parquet(Source):
    """Rows with an id and a vector."""

    def __init__(self, path: Path, ids: str, vectors: str) -> None:
        self.path, self._arrow = path, import_pyarrow()
        self._ids, self._vectors = None if ids == ROW_NUMBERS else ids, vectors
        self.has_ids = self._ids is not None
        with self._opened() as file:
            self.rows = file.metadata.num_rows
            self._check_columns(file.schema_arrow)
            if not self.rows:
                self.fail("rows", "none", REMEDY)
            self.dim = self._find_dim(file)

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        try:
            # Pages are read as they come: a row group may be as large as the file.
            file = self._arrow.parquet.ParquetFile(self.path, pre_buffer=False, buffer_size=READ_BYTES)
        except (self._arrow.ArrowException, OSError) as error:
            self._refuse(error)
        try:
            with file:
                yield file
        except (self._arrow.ArrowException, OSError) as error:
            self._refuse(error)

    def _refuse(self, error: Exception) -> NoReturn:
        if isinstance(error, OSError) and error.errno is not None:
            raise error
        self.fail("a Parquet file", f"{error}".splitlines()[0], REMEDY)

    def _check_columns(self, schema: Any) -> None:
        types, listed = self._arrow.types, ", ".join(f"{field.name} ({field.type})" for field in schema)
        kinds = {field.name: field.type for field in schema}
        if self._ids is not None and not (self._ids in kinds and types.is_integer(kinds[self._ids])):
            remedy = f"Name it: --ids NAME, or say --ids {ROW_NUMBERS}."
            self.fail(f"a column {self._ids!r} of integers", listed, remedy)
        kind = kinds.get(self._vectors)
        is_list = (types.is_list, types.is_large_list, types.is_fixed_size_list)
        if kind is None or not any(test(kind) for test in is_list) or not types.is_floating(kind.value_type):
            self.fail(f"a column {self._vectors!r} of lists of floats", listed, "Name it: --vectors NAME.")

    def _find_dim(self, file: Any) -> int:
        first = next(file.iter_batches(1, columns=[self._vectors], use_threads=False)).column(0)[0].as_py()
        if not first:
            self.fail("a vector", f"{first}", "Fix or remove the row.", self.place(0))
        return len(first)

    def _batches(self, start: int, batch_rows: int) -> Iterator[Batch]:
        with self._opened() as file:
            groups, skipped = _groups_from(file.metadata, start)
            names = [name for name in (self._ids, self._vectors) if name is not None]
            for table in file.iter_batches(batch_rows, row_groups=groups, columns=names, use_threads=False):
                part = table.slice(max(0, start - skipped))
                skipped += table.num_rows
                if part.num_rows:
                    yield self._batch(part, start)
                    start += part.num_rows

    def _batch(self, part: Any, start: int) -> Batch:
        vectors = self._matrix(part.column(self._vectors), start)
        if self._ids is None:
            return Batch(np.arange(start, start + len(vectors)), vectors)
        column = part.column(self._ids)
        self._refuse_null(column, start)
        return Batch(as_ids(column.to_numpy(zero_copy_only=False), self, start), vectors)

    def _matrix(self, column: Any, start: int) -> np.ndarray:
        self._refuse_null(column, start)
        lengths = self._lengths(column)
        if (lengths != self.dim).any():
            row = int(np.argmax(lengths != self.dim))
            self.fail(f"{self.dim} numbers", f"{lengths[row]}", "Fix or remove the row.", self.place(start + row))
        flat = column.flatten()
        if flat.null_count:
            row = int(np.argmax(flat.is_null().to_numpy(zero_copy_only=False))) // self.dim
            self.fail("numbers", "null in a vector", "Fix or remove the row.", self.place(start + row))
        with np.errstate(over="ignore"):
            return flat.to_numpy(zero_copy_only=False).astype(np.float32).reshape(-1, self.dim)

    def _lengths(self, column: Any) -> np.ndarray:
        if self._arrow.types.is_fixed_size_list(column.type):
            return np.full(len(column), column.type.list_size)
        return np.diff(column.offsets.to_numpy())

    def _refuse_null(self, column: Any, start: int) -> None:
        if column.null_count:
            row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
            self.fail("an id and a vector", "null", "Fix or remove the row.", self.place(start + row))


def _groups_from(metadata: Any, start: int) -> tuple[list[int], int]:
    """Return the row groups that have rows from `start` on, and the number of their first row."""
    first = group = 0
    while group < metadata.num_row_groups and first + metadata.row_group(group).num_rows <= start:
        first += metadata.row_group(group).num_rows
        group += 1
    return list(range(group, metadata.num_row_groups)), first


class ParquetSink(Spool):
    """Writes columns "id" and "vector"."""

    def __init__(self, output: Output, done: int) -> None:
        import_pyarrow()  # or the work would be for nothing
        super().__init__(output, done)

    def _pack(self, path: Path) -> None:
        arrow = import_pyarrow()
        rows, dim = self.vectors.shape
        at_once = rows_at_once(dim)
        ids = self.ids.array().parts(0, at_once) if self.ids is not None else _numbers(rows, at_once)
        schema = arrow.schema([(IDS, arrow.int64()), (VECTORS, arrow.list_(arrow.float32(), dim))])
        with arrow.parquet.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
            for part, values in zip(ids, self.vectors.array().parts(0, at_once), strict=True):
                lists = arrow.FixedSizeListArray.from_arrays(arrow.array(values.reshape(-1)), dim)
                writer.write_table(arrow.table([arrow.array(part), lists], schema=schema))


def _numbers(rows: int, at_once: int) -> Iterator[np.ndarray]:
    return (np.arange(first, min(rows, first + at_once)) for first in range(0, rows, at_once))
