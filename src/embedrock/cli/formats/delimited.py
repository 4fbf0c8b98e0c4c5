"""CSV and TSV: a line for each row, with its id and its numbers, read and written by pyarrow."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from functools import partial
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from embedrock.batch.wrong_ids import OF_STRINGS
from embedrock.cli.formats.arrays import MOST_ID, OF_BITS, as_id, is_number
from embedrock.cli.formats.base import (
    ROW_NUMBERS,
    LineSink,
    Output,
    ReadOptions,
    RowBatch,
    VectorSource,
    fail,
    import_pyarrow,
)
from embedrock.cli.formats.columns import CHECK, ColumnFile
from embedrock.cli.formats.files import opened_text
from embedrock.cli.terminal.tables import format_count
from embedrock.errors import did_you_mean, listed

BLOCK_BYTES = 4 << 20  # of text, parsed at a time
CHUNK_BYTES = 1 << 20  # of text per thread
MAX_LINE_BYTES = 1 << 24
FIX_LINE = "Fix or remove the line."
QUOTES, OPEN_QUOTE = "columns, and quotes in pairs", "a quote that its line does not close"
SEPARATORS = (",", ";", "\t")  # alternatives if the first line lacks the separator of the file's suffix
IDS = ("id", "ids", "")  # names of a column of ids; pandas gives its index no name
SAY_HEADER = "Say whether it names the columns: --header or --no-header."
EXPECTED = "rows"
# pyarrow's messages for refused rows.
NO_VALUE = re.compile(r"In CSV column #(\d+): Row #(\d+): CSV conversion error to \w+: invalid value '(.*)'", re.DOTALL)
NO_ROW = re.compile(r"CSV parse error: Row #(\d+): Expected \d+ columns, got (\d+)")


class Lines(NamedTuple):
    """The relation of lines and rows in a text."""

    separator: str  # between columns
    columns: int  # in a line
    head: int = 0  # number of lines before the first row
    plain: bool = False  # whether each line, even a blank one, is one value, and quotes have no meaning
    strict: bool = False  # whether quoted fields end in their line


class CsvFile(ColumnFile):
    """A text with a row in each line, compressed or not. Columns are called 0, 1, ...

    `conversion` are options of pyarrow's `ConvertOptions`.
    """

    kind, module = "CSV", "csv"

    def __init__(self, path: Path, expected: str, lines: Lines, conversion: dict[str, Any]) -> None:
        self._expected, self._lines, self._conversion = expected, lines, conversion
        self._names = [str(column) for column in range(lines.columns)]
        super().__init__(path)

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
                line += data.count(b"\n")

    def _rows_in(self, data: bytes) -> int:
        if b"\r" in data:
            lines = data.splitlines()
            return len(lines) if self._lines.plain else sum(map(bool, lines))
        ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
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


class Delimited(VectorSource):
    """A source of lines with an id and numbers. `separator` is between columns, if the first line has it."""

    def __init__(self, path: Path, options: ReadOptions, separator: str) -> None:
        self.path, arrow = path, import_pyarrow("CSV", "csv")
        with opened_text(path, EXPECTED) as file:
            line, first = _first_line(file, path)
        text = first.decode("utf-8", "replace")
        if separator not in text:
            separator = next((one for one in SEPARATORS if one in text), separator)
        fields = self._fields(first, separator, line)
        header = self._is_header(fields, line) if options.header is None else options.header
        self.names = fields if header else [str(column) for column in range(len(fields))]
        self.ids = self._find_ids(header, options.ids)
        self._vectors = self._find_vectors(options.vectors)
        self.has_ids, self.dim = self.ids is not None, len(self._vectors)
        # float64, as Python reads numbers, is rounded to float32 once.
        types = {str(column): arrow.float64() for column in self._vectors}
        types |= {} if self.ids is None else {str(self.ids): arrow.int64()}
        lines = Lines(separator, len(fields), line if header else 0, strict=True)
        self._file = _File(self, lines, {"column_types": types, "null_values": []})
        self._used, self.rows = [*types], self._file.rows
        if not self.rows:
            self.fail("rows", "none", f"{CHECK}.")

    def _fields(self, first: bytes, separator: str, line: int) -> list[str]:
        try:
            fields = fields_of(first, separator)
        except ValueError as error:
            self.fail(QUOTES, f"{error}", FIX_LINE, f"line {line}")
        if is_open(fields):
            self.fail(QUOTES, OPEN_QUOTE, FIX_LINE, f"line {line}")
        return [field.strip() for field in fields]

    def _is_header(self, fields: list[str], line: int) -> bool:
        """Return whether the first line names the columns. Pandas' names 0, 1, ... are the only numbers allowed."""
        numbers = [field for field in fields if is_number(field)]
        names = [field for field in fields if not is_number(field)]
        counted = numbers == [str(number) for number in range(len(numbers))]
        if not names and counted and len(fields) > 1:
            got = "0, 1, 2, ..., which may be both"
            self.fail("names of columns, or a row", got, SAY_HEADER, f"line {line}")
        if counted and (any(names) or (numbers and fields[0] == "")):
            return True
        if any(names):
            got = f"{numbers[0]!r} and {next(filter(None, names))!r}"
            self.fail("names of columns, or a row of numbers", got, SAY_HEADER, f"line {line}")
        return False

    def _find_ids(self, header: bool, name: str | None) -> int | None:
        if name == ROW_NUMBERS:
            return None
        if name is None and not header:
            return 0
        wanted = IDS if name is None else (name,)
        found = [k for k, one in enumerate(self.names) if (one.lower() if name is None else one) in wanted]
        if len(found) != 1:
            hint = did_you_mean(wanted[0], self.names)
            remedy = f"Name it: --ids NAME, or say --ids {ROW_NUMBERS}.{hint}"
            self._refuse_names(f"one column {wanted[0]!r} of ids", remedy)
        return found[0]

    def _find_vectors(self, name: str | None) -> list[int]:
        wanted = re.compile(".*" if name is None else rf"{re.escape(name)}[_.\- ]?\d*", re.DOTALL)
        found = [column for column, one in enumerate(self.names) if column != self.ids and wanted.fullmatch(one)]
        if not found:
            expected = "columns of numbers" if name is None else f"columns {name}0, {name}1, ... of numbers"
            hint = did_you_mean(name or "", (one.rstrip("0123456789_.- ") for one in self.names))
            self._refuse_names(expected, f"Name them: --vectors NAME takes NAME0, NAME1, ...{hint}")
        return found

    def _refuse_names(self, expected: str, remedy: str) -> NoReturn:
        self.fail(expected, f"columns {listed(self.names)}", remedy)

    def place(self, row: int, column: int | None = None) -> str:
        return self.named_place(row, None if column is None else self._vectors[column])

    def named_place(self, row: int, column: int | None) -> str:
        """Return the place of a row, or of one of the columns of the file."""
        named = "" if column is None else f", column {self.names[column]!r}"
        return f"line {self._file.line_of(row)}{named}"

    def _batches(self, start: int, batch_rows: int) -> Iterator[RowBatch]:
        for part in self._file.batches(self._used, start, batch_rows):
            columns, end = part.columns, start + part.num_rows
            ids = np.arange(start, end) if self.ids is None else columns[-1].to_numpy()
            vectors = np.empty((len(ids), self.dim), np.float32)
            with np.errstate(over="ignore"):  # a number that is too large becomes Inf, which is refused
                for column, values in enumerate(columns[: self.dim]):
                    vectors[:, column] = values.to_numpy()
            yield RowBatch(ids, vectors)
            start = end


def _first_line(file: BufferedReader, path: Path) -> tuple[int, bytes]:
    for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES), b""), 1):
        if text := line.rstrip(b"\r\n"):
            return number, text
    fail(path, EXPECTED, "none", f"{CHECK}.")


class _File(CsvFile):
    """The lines of a source. Rows that pyarrow refuses are refused in this package's words."""

    def __init__(self, source: Delimited, lines: Lines, conversion: dict[str, Any]) -> None:
        self._source = source
        super().__init__(source.path, EXPECTED, lines, conversion)

    def _refuse(self, said: str, start: int) -> NoReturn:
        source = self._source
        if found := NO_ROW.match(said):
            columns = f"{format_count(self._lines.columns, 'column')}, as in the first line"
            source.fail(columns, found[2], FIX_LINE, source.named_place(start + int(found[1]) - 1, None))
        if found := NO_VALUE.match(said):
            column, row, text = int(found[1]), start + int(found[2]) - 1, found[3]
            if "\n" in text:
                self.refuse_quote(self.line_of(row))
            got = repr(text[:60]) if text.strip() else "an empty field"
            expected, remedy = self._wanted(column, text)
            source.fail(expected, got, remedy, source.named_place(row, column))
        super()._refuse(said, start)

    def _wanted(self, column: int, text: str) -> tuple[str, str]:
        """Return the expected content of a field, and the remedy."""
        if column != self._source.ids:
            return "a number", f"{FIX_LINE} Where only some columns are numbers, --vectors NAME takes NAME0, NAME1, ..."
        expected = "a whole number as id"
        try:
            as_id(text)
        except ValueError as error:
            expected = f"{error}"
        if text.strip().isdecimal() and MOST_ID < int(text) < 2**64:
            return expected, OF_BITS
        words = "" if is_number(text) or not text.strip() else f" {OF_STRINGS}"
        remedy = f"{FIX_LINE} Another column may have the ids: --ids NAME; or none: --ids {ROW_NUMBERS}.{words}"
        return expected, remedy


class DelimitedSink(LineSink):
    """A sink for a line with the column names, then a line with id and numbers for each row."""

    def __init__(self, output: Output, done: int, separator: str) -> None:
        self._arrow = import_pyarrow("CSV", "csv")
        self._names = [IDS[0], *(f"v{column}" for column in range(output.dim))]
        self._options = self._arrow.csv.WriteOptions(include_header=False, delimiter=separator, quoting_style="none")
        self.header = (separator.join(self._names) + "\n").encode()
        super().__init__(output, done)

    def _lines(self, ids: np.ndarray, vectors: np.ndarray) -> bytes:
        """Format rows as lines. Numbers are the shortest texts that read back to the same float32."""
        columns = [self._arrow.array(one) for one in (ids, *np.asfortranarray(vectors).T)]
        out = self._arrow.BufferOutputStream()
        self._arrow.csv.write_csv(self._arrow.table(columns, names=self._names), out, self._options)
        return out.getvalue().to_pybytes()
