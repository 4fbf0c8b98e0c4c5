"""Parquet and Arrow: a column of ids and one of vectors (lists of floats), read and written by pyarrow."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from embedrock.batch.wrong_ids import OF_STRINGS
from embedrock.cli.formats._arrays import as_ids
from embedrock.cli.formats._pyarrow import CHECK, ColumnFile
from embedrock.cli.formats._sink import Output, Spool
from embedrock.cli.formats._source import ROW_NUMBERS, Batch, ReadOptions, Source, import_pyarrow, rows_at_once
from embedrock.terminal.tables import format_count
from embedrock.wording import did_you_mean

IDS, VECTORS = "id", "vector"  # names of the columns
FIX = "Fix or remove the row."


class Columns(Source):
    """Rows with an id and a vector."""

    def __init__(self, path: Path, options: ReadOptions, open_file: Callable[[Path], ColumnFile]) -> None:
        ids = options.ids or IDS
        self._ids, self._vectors = None if ids == ROW_NUMBERS else ids, options.vectors or VECTORS
        self.path, self._file = path, open_file(path)
        self._types, self.has_ids, self.rows = self._file.arrow.types, self._ids is not None, self._file.rows
        self._check_columns()
        if not self.rows:
            self.fail("rows", "none", f"{CHECK}, or get it again.")
        self.dim = self._find_dim()

    def _check_columns(self) -> None:
        types, kinds = self._types, self._file.types()
        listed = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        if self._ids is not None and not (self._ids in kinds and types.is_integer(self._decoded(kinds[self._ids]))):
            hint = did_you_mean(self._ids, (name for name in kinds if name != self._ids))
            words = f" {OF_STRINGS}" if "string" in str(kinds.get(self._ids)) else hint
            remedy = f"Name it: --ids NAME, or say --ids {ROW_NUMBERS}.{words}"
            self.fail(f"a column {self._ids!r} of integers", listed, remedy)
        kind = kinds.get(self._vectors)
        is_list = (types.is_list, types.is_large_list, types.is_fixed_size_list)
        if kind is None or not any(test(kind) for test in is_list) or not types.is_floating(kind.value_type):
            hint = did_you_mean(self._vectors, (name for name in kinds if name != self._vectors))
            self.fail(f"a column {self._vectors!r} of lists of floats", listed, f"Name it: --vectors NAME.{hint}")

    def _decoded(self, kind: Any) -> Any:
        return kind.value_type if self._types.is_dictionary(kind) else kind

    def _find_dim(self) -> int:
        first = next(self._file.batches([self._vectors], 0, 1)).column(0)[0].as_py()
        if not first:
            self.fail("a vector", f"{first}", FIX, self.place(0))
        return len(first)

    def _batches(self, start: int, batch_rows: int) -> Iterator[Batch]:
        names = [name for name in (self._ids, self._vectors) if name is not None]
        for part in self._file.batches(names, start, batch_rows):
            vectors = self._matrix(part.column(self._vectors), start)
            yield Batch(self._ids_of(part, start), vectors)
            start += part.num_rows

    def _ids_of(self, part: Any, start: int) -> np.ndarray:
        if self._ids is None:
            return np.arange(start, start + part.num_rows)
        column = part.column(self._ids)
        if self._types.is_dictionary(column.type):
            column = column.dictionary_decode()
        self._refuse_null(column, start)
        return as_ids(column.to_numpy(zero_copy_only=False), self, start)

    def _matrix(self, column: Any, start: int) -> np.ndarray:
        self._refuse_null(column, start)
        wrong = self._lengths(column) != self.dim
        if wrong.any():
            row = int(np.argmax(wrong))
            self.fail(format_count(self.dim, "number"), f"{len(column[row])}", FIX, self.place(start + row))
        flat = column.flatten()
        if flat.null_count:
            row = int(np.argmax(flat.is_null().to_numpy(zero_copy_only=False))) // self.dim
            self.fail("numbers", "null in a vector", FIX, self.place(start + row))
        with np.errstate(over="ignore"):
            return flat.to_numpy(zero_copy_only=False).astype(np.float32).reshape(-1, self.dim)

    def _lengths(self, column: Any) -> np.ndarray:
        if self._types.is_fixed_size_list(column.type):
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


class ParquetSink(ColumnsSink):
    """Writes a Parquet file, not compressed."""

    kind, part = "Parquet", "parquet"

    def _writer(self, path: Path, schema: Any) -> Any:
        return self._arrow.parquet.ParquetWriter(path, schema, compression="none", use_dictionary=False)


class ArrowSink(ColumnsSink):
    """Writes an Arrow file, not compressed."""

    kind, part = "Arrow", "ipc"

    def _writer(self, path: Path, schema: Any) -> Any:
        return self._arrow.ipc.new_file(str(path), schema)
