"""Files of columns, read by pyarrow a part at a time: Parquet, Arrow (Feather is the same), and lines of text."""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

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
    line_ends,
    rows_at_once,
)
from embedrock.cli.formats.files import opened_text
from embedrock.cli.terminal.tables import format_count
from embedrock.errors import did_you_mean, with_article

READ_BYTES = 1 << 20
BLOCK_BYTES = 4 << 20  # of text, parsed at a time
CHUNK_BYTES = 1 << 20  # of text per thread
MAX_LINE_BYTES = 1 << 24
ARROW_MAGIC = b"ARROW1"  # magic bytes of a file; a stream has none
CHECK = "Check that it is the right file"
IDS, VECTORS = "id", "vector"  # names of the columns
WRITTEN_BY = {"Parquet": "parquet", "Arrow": "ipc"}  # modules of pyarrow
FIX = "Fix or remove the row."
FIX_LINE = "Fix or remove the line."
QUOTES, OPEN_QUOTE = "columns, and quotes in pairs", "a quote that its line does not close"


class ColumnFile(ABC):
    """A file of columns.

    Attributes:
        path: file.
        arrow: the module pyarrow.
        rows: number of rows in the file.
    """

    def __init__(self, path: Path, kind: str, part: str) -> None:
        self.path, self._kind, self.arrow = path, kind, import_pyarrow(kind, part)
        with self._reading():
            self.rows = self._count()

    def types(self) -> dict[str, Any]:
        """Return pyarrow's type of each column.

        Raises:
            FileError: pyarrow refuses the file.
        """
        with self._reading():
            return {field.name: field.type for field in self._schema()}

    def batches(self, names: Sequence[str], start: int, rows: int) -> Iterator[Any]:
        """Yield record batches of these columns from row `start` on, of at most `rows` rows.

        Raises:
            FileError: pyarrow refuses the file.
        """
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

    def __init__(self, path: Path, kind: str = "Parquet") -> None:
        super().__init__(path, kind, "parquet")

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

    def __init__(self, path: Path, kind: str = "Arrow") -> None:
        super().__init__(path, kind, "ipc")

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


class Lines(NamedTuple):
    """The relation of lines and rows in a text.

    Attributes:
        separator: between columns.
        columns: number of columns in a line.
        head: number of lines before the first row.
        plain: whether each line, even a blank one, is one value, and quotes have no meaning.
        strict: whether quoted fields end in their line.
    """

    separator: str
    columns: int
    head: int = 0
    plain: bool = False
    strict: bool = False


class CsvFile(ColumnFile):
    """A text with a row in each line, compressed or not. Columns are called 0, 1, ...

    Args:
        path: file.
        expected: expected content, for people.
        lines: relation of lines and rows.
        conversion: options of pyarrow's `ConvertOptions`.
    """

    def __init__(self, path: Path, expected: str, lines: Lines, conversion: dict[str, Any]) -> None:
        self._expected, self._lines, self._conversion = expected, lines, conversion
        self._names = [str(column) for column in range(lines.columns)]
        super().__init__(path, "CSV", "csv")

    def _blocks(self) -> Iterator[tuple[int, bytes]]:
        """Yield blocks of complete lines, each with the number of its first line."""
        with opened_text(self.path, self._expected) as file:
            line = 1 + sum(1 for _ in islice(file, self._lines.head))
            while data := file.read(BLOCK_BYTES):
                rest = b"" if data.endswith(b"\n") else file.readline(MAX_LINE_BYTES)
                if len(rest) == MAX_LINE_BYTES:
                    got, where = f"more than {MAX_LINE_BYTES} bytes without its end", line + data.count(b"\n")
                    fail(self.path, "a line of text", got, f"{CHECK}.", f"line {where}")
                data += rest
                if self._lines.plain or data.strip(b"\r\n"):
                    yield line, data
                line += len(line_ends(data))

    def _rows_in(self, data: bytes) -> int:
        if b"\r" in data:
            lines = data.splitlines()
            return len(lines) if self._lines.plain else sum(map(bool, lines))
        ends = line_ends(data)
        blank = 0 if self._lines.plain else int(np.count_nonzero(np.diff(ends, prepend=-1) == 1))
        return len(ends) - blank + (not data.endswith(b"\n"))

    def _count(self) -> int:
        return sum(self._rows_in(data) for _, data in self._blocks())

    def line_of(self, row: int) -> int:
        """Return the number of a row's line, from 1; 0 after the end."""
        for line, data in self._blocks():
            rows = self._rows_in(data)
            if row < rows:
                numbers = (number for number, text in enumerate(data.splitlines(), line) if text)
                return next(islice(numbers, row, None))
            row -= rows
        return 0

    def _schema(self) -> Any:
        null = self.arrow.schema([(name, self.arrow.null()) for name in self._names])
        return next((batch.schema for batch in self._batches(self._names, 0, 1)), null)

    def _batches(self, names: list[str], start: int, rows: int) -> Iterator[Any]:
        row, conversion = 0, self._conversion
        for line, data in self._blocks():
            if start > row and start >= (end := row + self._rows_in(data)):
                row = end
                continue
            try:
                table = self._parse(data, names, conversion, CHUNK_BYTES)
            except self.arrow.ArrowInvalid:  # of a single chunk, pyarrow reports which row is wrong
                with self._reading(row):
                    table = self._parse(data, names, conversion, len(data))
            self._check_quotes(line, data, table.num_rows)
            conversion = conversion | {"column_types": dict(zip(names, table.schema.types, strict=True))}
            yield from table.slice(max(0, start - row)).to_batches()
            row += table.num_rows

    def _parse(self, data: bytes, names: list[str], conversion: dict[str, Any], chunk: int) -> Any:
        csv, (separator, _, _, plain, _) = self.arrow.csv, self._lines
        reading = csv.ReadOptions(column_names=self._names, block_size=chunk, use_threads=chunk < len(data))
        parsing = csv.ParseOptions(
            delimiter=separator,
            quote_char=False if plain else '"',
            ignore_empty_lines=not plain,
            newlines_in_values=b'"' in data and not plain,  # or a chunk may end within quotes
        )
        converting = csv.ConvertOptions(include_columns=names, **conversion)
        return csv.read_csv(self.arrow.BufferReader(data), reading, parsing, converting)

    def _check_quotes(self, line: int, data: bytes, rows: int) -> None:
        """Raise unless quotes are closed by the last line, or by each line if all lines are rows."""
        if self._lines.plain or b'"' not in data:
            return
        lines, is_joined = data.splitlines(), rows != self._rows_in(data)
        if (is_joined and self._lines.strict) or self._is_open(lines[-1]):
            opened = (number for number, text in enumerate(lines, line) if self._is_open(text))
            self.refuse_quote(next(opened, line))

    def _is_open(self, line: bytes) -> bool:
        try:
            return is_open(fields_of(line, self._lines.separator))
        except ValueError:
            return True

    def refuse_quote(self, line: int) -> NoReturn:
        """Raise a `FileError` about a line."""
        fail(self.path, QUOTES, OPEN_QUOTE, FIX_LINE, f"line {line}")


def fields_of(line: bytes, separator: str) -> list[str]:
    """Return the fields of a line, without the line end.

    Raises:
        ValueError: it is no CSV.
    """
    try:
        return next(csv.reader([line.decode("utf-8", "surrogateescape") + "\n"], delimiter=separator))
    except csv.Error as error:
        raise ValueError(f"{error}") from error


def is_open(fields: list[str]) -> bool:
    """Return whether the last of these fields is quoted and continues in the next line."""
    return "".join(fields[-1:]).endswith("\n")


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


def columns_sink(output: Output, done: int, kind: str) -> Spool:
    """Return a sink for columns "id" and "vector" of a Parquet or Arrow file, not compressed."""
    arrow = import_pyarrow(kind, WRITTEN_BY[kind])  # or the work would be lost
    return Spool(output, done, partial(_pack, arrow, kind))


def _pack(arrow: Any, kind: str, path: Path, vectors: np.ndarray, ids: np.ndarray | None = None) -> None:
    (rows, dim), ids = vectors.shape, np.arange(len(vectors)) if ids is None else ids
    schema = arrow.schema([(IDS, arrow.int64()), (VECTORS, arrow.list_(arrow.float32(), dim))])
    if kind == "Parquet":
        made = arrow.parquet.ParquetWriter(path, schema, compression="none", use_dictionary=False)
    else:
        made = arrow.ipc.new_file(str(path), schema)
    with made as writer:
        for start in range(0, rows, rows_at_once(dim)):
            part = slice(start, start + rows_at_once(dim))
            lists = arrow.FixedSizeListArray.from_arrays(arrow.array(vectors[part].reshape(-1)), dim)
            writer.write_table(arrow.table([arrow.array(ids[part]), lists], schema=schema))
