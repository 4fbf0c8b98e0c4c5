"""Files of columns, read by pyarrow a part at a time: Parquet, and Arrow (Feather is the same)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from embedrock.batch.wrong_ids import OF_STRINGS
from embedrock.cli.formats.arrays import as_ids
from embedrock.cli.formats.base import (
    ROW_NUMBERS,
    Output,
    ReadOptions,
    RowBatch,
    Spool,
    VectorSource,
    fail,
    import_pyarrow,
    rows_at_once,
)
from embedrock.cli.terminal.tables import format_count
from embedrock.errors import did_you_mean, with_article

READ_BYTES = 1 << 20
ARROW_MAGIC = b"ARROW1"  # magic bytes of a file; a stream has none
CHECK = "Check that it is the right file"
IDS, VECTORS = "id", "vector"  # names of the columns
FIX = "Fix or remove the row."


class ColumnFile(ABC):
    """A file of columns. If pyarrow refuses it, its methods raise a `FileError`."""

    kind: str  # of the file, for people
    module: str  # of pyarrow

    def __init__(self, path: Path, kind: str = "") -> None:
        self.path, self._kind = path, kind or self.kind
        self.arrow = import_pyarrow(self._kind, self.module, "compute")
        with self._reading():
            self.rows = self._count()

    def types(self) -> dict[str, Any]:
        """Return pyarrow's type of each column."""
        with self._reading():
            return {field.name: field.type for field in self._schema()}

    def batches(self, names: Sequence[str], start: int, rows: int) -> Iterator[Any]:
        """Yield record batches of these columns from row `start` on, of at most `rows` rows."""
        with self._reading(start):
            for batch in self._batches(list(names), start, rows):
                for first in range(0, batch.num_rows, rows):
                    yield batch.slice(first, rows)

    @abstractmethod
    def _count(self) -> int: ...

    @abstractmethod
    def _schema(self) -> Any: ...

    @abstractmethod
    def _batches(self, names: list[str], start: int, rows: int) -> Iterator[Any]: ...

    @contextmanager
    def _reading(self, start: int = 0) -> Iterator[None]:
        try:
            yield
        except (self.arrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            self._refuse(f"{error}", start)

    def _refuse(self, said: str, start: int) -> NoReturn:
        """Raise a `FileError` with pyarrow's message about the rows from number `start` on."""
        remedy = "Save it in UTF-8." if "invalid UTF8" in said else f"{CHECK}, or get it again."
        fail(self.path, f"{with_article(self._kind)} file", said.splitlines()[0], remedy)


class ParquetFile(ColumnFile):
    """A Parquet file."""

    kind, module = "Parquet", "parquet"

    def _open(self) -> Any:
        # Pages are read one by one: a row group may be as large as the file.
        return self.arrow.parquet.ParquetFile(self.path, pre_buffer=False, buffer_size=READ_BYTES)

    def _count(self) -> int:
        with self._open() as file:
            return file.metadata.num_rows

    def _schema(self) -> Any:
        with self._open() as file:
            return file.schema_arrow

    def _batches(self, names: list[str], start: int, rows: int) -> Iterator[Any]:
        with self._open() as file:
            groups, row = _groups_from(file.metadata, start)
            for batch in file.iter_batches(rows, row_groups=groups, columns=names, use_threads=False):
                yield batch.slice(max(0, start - row))
                row += batch.num_rows


def _groups_from(metadata: Any, start: int) -> tuple[list[int], int]:
    """Return the row groups with rows from `start` on, and the number of their first row."""
    first = group = 0
    while group < metadata.num_row_groups and first + metadata.row_group(group).num_rows <= start:
        first += metadata.row_group(group).num_rows
        group += 1
    return list(range(group, metadata.num_row_groups)), first


class ArrowFile(ColumnFile):
    """A file or stream of Arrow."""

    kind, module = "Arrow", "ipc"

    @contextmanager
    def _opened(self, columns: list[int] | None = None) -> Iterator[Any]:
        options = self.arrow.ipc.IpcReadOptions(included_fields=columns)
        # Memory-mapped: a record batch may be as large as the file, and takes no RAM if it is not compressed.
        with self.arrow.memory_map(str(self.path)) as file:
            is_file = file.read(len(ARROW_MAGIC)) == ARROW_MAGIC
            file.seek(0)
            opener = self.arrow.ipc.open_file if is_file else self.arrow.ipc.open_stream
            with opener(file, options=options) as reader:
                yield reader

    def _records(self, columns: list[int]) -> Iterator[Any]:
        with self._opened(columns) as reader:
            if hasattr(reader, "get_batch"):
                yield from map(reader.get_batch, range(reader.num_record_batches))
            else:
                yield from reader

    def _count(self) -> int:
        return sum(batch.num_rows for batch in self._records([0]))

    def _schema(self) -> Any:
        with self._opened() as reader:
            return reader.schema

    def _batches(self, names: list[str], start: int, rows: int) -> Iterator[Any]:
        row, columns = 0, self._schema().names
        for batch in self._records([columns.index(name) for name in names]):
            yield batch.slice(max(0, start - row))
            row += batch.num_rows


class ColumnFormat(VectorSource):
    """A source of rows with an id and a vector."""

    def __init__(self, path: Path, options: ReadOptions, open_file: Callable[[Path], ColumnFile]) -> None:
        ids = options.ids or IDS
        self._ids, self._vectors = None if ids == ROW_NUMBERS else ids, options.vectors or VECTORS
        self.path, self._file = path, open_file(path)
        self._types, self.has_ids, self.rows = self._file.arrow.types, self._ids is not None, self._file.rows
        self._check_columns()
        if not self.rows:
            self.fail("rows", "none", f"{CHECK}, or get it again.")
        first = next(self._file.batches([self._vectors], 0, 1)).column(0)[0].as_py()
        if not first:
            self.fail("a vector", f"{first}", FIX, self.place(0))
        self.dim = len(first)

    def _check_columns(self) -> None:
        types, kinds = self._types, self._file.types()
        listed = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        kind = kinds.get(self._ids or "")
        is_integer = kind and types.is_integer(kind.value_type if types.is_dictionary(kind) else kind)
        if self._ids is not None and not is_integer:
            hint = did_you_mean(self._ids, (name for name in kinds if name != self._ids))
            words = f" {OF_STRINGS}" if "string" in str(kind) else hint
            remedy = f"Name it: --ids NAME, or say --ids {ROW_NUMBERS}.{words}"
            self.fail(f"a column {self._ids!r} of integers", listed, remedy)
        kind = kinds.get(self._vectors)
        is_list = (types.is_list, types.is_large_list, types.is_fixed_size_list)
        if kind is None or not any(test(kind) for test in is_list) or not types.is_floating(kind.value_type):
            hint = did_you_mean(self._vectors, (name for name in kinds if name != self._vectors))
            self.fail(f"a column {self._vectors!r} of lists of floats", listed, f"Name it: --vectors NAME.{hint}")

    def _batches(self, start: int, batch_rows: int) -> Iterator[RowBatch]:
        names = [name for name in (self._ids, self._vectors) if name is not None]
        for part in self._file.batches(names, start, batch_rows):
            vectors = self._matrix(part.column(self._vectors), start)
            yield RowBatch(self._ids_of(part, start), vectors)
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
        wrong = self._file.arrow.compute.list_value_length(column).to_numpy() != self.dim
        if wrong.any():
            row = int(np.argmax(wrong))
            self.fail(format_count(self.dim, "number"), f"{len(column[row])}", FIX, self.place(start + row))
        flat = column.flatten()
        if flat.null_count:
            self.fail("numbers", "null in a vector", FIX, self.place(start + first_null(flat) // self.dim))
        with np.errstate(over="ignore"):
            return flat.to_numpy(zero_copy_only=False).astype(np.float32).reshape(-1, self.dim)

    def _refuse_null(self, column: Any, start: int) -> None:
        if column.null_count:
            self.fail("an id and a vector", "null", FIX, self.place(start + first_null(column)))


def first_null(column: Any) -> int:
    """Return the position of the first null in an array of Arrow's."""
    return int(column.is_null().to_numpy(zero_copy_only=False).argmax())


def columns_sink(output: Output, done: int, file: type[ColumnFile]) -> Spool:
    """Return a sink for columns "id" and "vector" of a Parquet or Arrow file, not compressed."""
    arrow = import_pyarrow(file.kind, file.module)  # or the work would be lost
    return Spool(output, done, partial(_pack, arrow, file))


def _pack(arrow: Any, kind: type[ColumnFile], path: Path, vectors: np.ndarray, ids: np.ndarray | None = None) -> None:
    (rows, dim), ids = vectors.shape, np.arange(len(vectors)) if ids is None else ids
    schema = arrow.schema([(IDS, arrow.int64()), (VECTORS, arrow.list_(arrow.float32(), dim))])
    if kind is ParquetFile:
        made = arrow.parquet.ParquetWriter(path, schema, compression="none", use_dictionary=False)
    else:
        made = arrow.ipc.new_file(str(path), schema)
    with made as writer:
        for start in range(0, rows, rows_at_once(dim)):
            part = slice(start, start + rows_at_once(dim))
            lists = arrow.FixedSizeListArray.from_arrays(arrow.array(vectors[part].reshape(-1)), dim)
            writer.write_table(arrow.table([arrow.array(ids[part]), lists], schema=schema))
