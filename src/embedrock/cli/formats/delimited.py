"""CSV and TSV: a line for each row, with its id and its numbers, read and written by pyarrow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

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
from embedrock.cli.formats.columns import (
    CHECK,
    FIX_LINE,
    MAX_LINE_BYTES,
    OPEN_QUOTE,
    QUOTES,
    CsvFile,
    Lines,
    fields_of,
    is_open,
)
from embedrock.cli.formats.files import opened_text
from embedrock.cli.terminal.tables import format_count
from embedrock.errors import did_you_mean

SEPARATORS = (",", ";", "\t")  # alternatives if the first line lacks the separator of the file's suffix
IDS = ("id", "ids", "")  # names of a column of ids; pandas gives its index no name
SAY_HEADER = "Say whether it names the columns: --header or --no-header."
SHOWN_NAMES = 8  # in error messages
EXPECTED = "rows"
# pyarrow's messages for refused rows.
NO_VALUE = re.compile(r"In CSV column #(\d+): Row #(\d+): CSV conversion error to \w+: invalid value '(.*)'", re.DOTALL)
NO_ROW = re.compile(r"CSV parse error: Row #(\d+): Expected \d+ columns, got (\d+)")


@dataclass(frozen=True)
class TextLayout:
    """The columns of a file.

    Attributes:
        lines: relation of lines and rows.
        names: of all columns; their numbers if the file does not name them.
        ids: column of the ids; None: there is none.
        vectors: columns of the vectors' numbers.
    """

    lines: Lines
    names: tuple[str, ...]
    ids: int | None
    vectors: tuple[int, ...]


def _read_layout(path: Path, separator: str, options: ReadOptions) -> TextLayout:
    with opened_text(path, EXPECTED) as file:
        line, first = _first_line(file, path)
    text = first.decode("utf-8", "replace")
    if separator not in text:
        separator = next((one for one in SEPARATORS if one in text), separator)
    try:
        fields = fields_of(first, separator)
    except ValueError as error:
        fail(path, QUOTES, f"{error}", FIX_LINE, f"line {line}")
    if is_open(fields):
        fail(path, QUOTES, OPEN_QUOTE, FIX_LINE, f"line {line}")
    fields = [field.strip() for field in fields]
    header = _is_header(fields, path, line) if options.header is None else options.header
    names = tuple(fields if header else map(str, range(len(fields))))
    ids = _find_ids(names, header, path, options.ids)
    lines = Lines(separator, len(names), line if header else 0, strict=True)
    return TextLayout(lines, names, ids, _find_vectors(names, ids, path, options.vectors))


def _first_line(file: BufferedReader, path: Path) -> tuple[int, bytes]:
    for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES), b""), 1):
        if text := line.rstrip(b"\r\n"):
            return number, text
    fail(path, EXPECTED, "none", f"{CHECK}.")


def _is_header(fields: list[str], path: Path, line: int) -> bool:
    """Return whether the first line names the columns. Pandas' names 0, 1, ... are the only numbers allowed."""
    numbers = [field for field in fields if is_number(field)]
    names = [field for field in fields if not is_number(field)]
    counted = numbers == [str(number) for number in range(len(numbers))]
    if not names and counted and len(fields) > 1:
        fail(path, "names of columns, or a row", "0, 1, 2, ..., which may be both", SAY_HEADER, f"line {line}")
    if counted and (any(names) or (numbers and fields[0] == "")):
        return True
    if any(names):
        got = f"{numbers[0]!r} and {next(filter(None, names))!r}"
        fail(path, "names of columns, or a row of numbers", got, SAY_HEADER, f"line {line}")
    return False


def _find_ids(names: tuple[str, ...], header: bool, path: Path, name: str | None) -> int | None:
    if name == ROW_NUMBERS:
        return None
    if name is None and not header:
        return 0
    found = [column for column, one in enumerate(names) if (one.lower() in IDS if name is None else one == name)]
    if len(found) != 1:
        wanted = name or IDS[0]
        remedy = f"Name it: --ids NAME, or say --ids {ROW_NUMBERS}.{did_you_mean(wanted, names)}"
        _refuse_names(path, f"one column {wanted!r} of ids", names, remedy)
    return found[0]


def _find_vectors(names: tuple[str, ...], ids: int | None, path: Path, name: str | None) -> tuple[int, ...]:
    wanted = re.compile(".*" if name is None else rf"{re.escape(name)}[_.\- ]?\d*", re.DOTALL)
    found = tuple(column for column, one in enumerate(names) if column != ids and wanted.fullmatch(one))
    if not found:
        expected = "columns of numbers" if name is None else f"columns {name}0, {name}1, ... of numbers"
        hint = did_you_mean(name or "", (one.rstrip("0123456789_.- ") for one in names))
        _refuse_names(path, expected, names, f"Name them: --vectors NAME takes NAME0, NAME1, ...{hint}")
    return found


def _refuse_names(path: Path, expected: str, names: tuple[str, ...], remedy: str) -> NoReturn:
    more = f", ... ({len(names)} in all)" if len(names) > SHOWN_NAMES else ""
    fail(path, expected, f"columns {', '.join(map(repr, names[:SHOWN_NAMES]))}{more}", remedy)


class Delimited(VectorSource):
    """A source of lines with an id and numbers.

    Args:
        path: file.
        options: the user's options.
        separator: between columns, if the first line has it.
    """

    def __init__(self, path: Path, options: ReadOptions, separator: str) -> None:
        self.path, arrow = path, import_pyarrow("CSV", "csv")
        self._layout = layout = _read_layout(path, separator, options)
        self.has_ids, self.dim = layout.ids is not None, len(layout.vectors)
        # float64, as Python reads numbers, is rounded to float32 once.
        types = {str(column): arrow.float64() for column in layout.vectors}
        types |= {} if layout.ids is None else {str(layout.ids): arrow.int64()}
        self._file = _File(self, layout, {"column_types": types, "null_values": []})
        self._used, self.rows = [*types], self._file.rows
        if not self.rows:
            self.fail("rows", "none", f"{CHECK}.")

    def place(self, row: int, column: int | None = None) -> str:
        return self.named_place(row, None if column is None else self._layout.vectors[column])

    def named_place(self, row: int, column: int | None) -> str:
        """Return the place of a row, or of one of the columns of the file."""
        named = "" if column is None else f", column {self._layout.names[column]!r}"
        return f"line {self._file.line_of(row)}{named}"

    def _batches(self, start: int, batch_rows: int) -> Iterator[RowBatch]:
        for part in self._file.batches(self._used, start, batch_rows):
            columns, end = part.columns, start + part.num_rows
            ids = np.arange(start, end) if self._layout.ids is None else columns[-1].to_numpy()
            yield RowBatch(ids, _matrix(columns[: self.dim]))
            start = end


def _matrix(columns: list[Any]) -> np.ndarray:
    vectors = np.empty((len(columns[0]), len(columns)), np.float32)
    with np.errstate(over="ignore"):  # a number that is too large becomes Inf, which is refused
        for column, values in enumerate(columns):
            vectors[:, column] = values.to_numpy()
    return vectors


class _File(CsvFile):
    """The lines of a source. Rows that pyarrow refuses are refused in this package's words."""

    def __init__(self, source: Delimited, layout: TextLayout, conversion: dict[str, Any]) -> None:
        self._source, self._ids = source, layout.ids
        super().__init__(source.path, EXPECTED, layout.lines, conversion)

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
        if column != self._ids:
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
