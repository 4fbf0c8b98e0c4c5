"""`Layout`: what the columns of a CSV or TSV file are, as its first line and the user say."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import NoReturn

from embedrock.cli.formats._lines import BLANK, MAX_LINE_BYTES
from embedrock.cli.formats._source import ROW_NUMBERS, ReadOptions, fail
from embedrock.wording import did_you_mean

SEPARATORS = (",", ";", "\t")  # looked for where the first line does not have the one that the file's name says
IDS = ("id", "ids", "")  # how a column of ids is called; pandas gives its index no name
FIX_LINE = "Fix or remove the line."
SAY_HEADER = "Say whether it names the columns: --header or --no-header."
WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
LEAST_ID, MOST_ID = -(2**63), 2**63 - 1
SHOWN_NAMES = 8  # in errors


@dataclass(frozen=True)
class Layout:
    """What the columns of a file are.

    Attributes:
        separator: between them.
        names: of all columns; their numbers where the file does not name them.
        lines: before the first row.
        ids: which one has ids; None: none does.
        vectors: which ones have the numbers of the vectors.
    """

    separator: str
    names: tuple[str, ...]
    lines: int
    ids: int | None
    vectors: tuple[int, ...]

    def place(self, line: int, column: int | None = None) -> str:
        """Return where in the file a line is, or one of its columns, for people."""
        return f"line {line}" + ("" if column is None else f", column {self.names[column]!r}")


def read_layout(file: BufferedReader, path: Path, separator: str, options: ReadOptions) -> Layout:
    """Read the lines before the first row.

    Raises:
        FileError: there is no row, or it cannot be told which column is what.
    """
    line, first = _first_line(file, path)
    text = first.decode("utf-8", "replace")
    if separator not in text:
        separator = next((one for one in SEPARATORS if one in text), separator)
    try:
        fields = [field.strip() for field in split(first, separator)]
    except ValueError as error:
        fail(path, "columns, and quotes in pairs", f"{error}", FIX_LINE, f"line {line}")
    header = _is_header(fields, path, line) if options.header is None else options.header
    names = tuple(fields if header else map(str, range(len(fields))))
    ids = _find_ids(names, header, path, options.ids)
    return Layout(separator, names, line if header else 0, ids, _find_vectors(names, ids, path, options.vectors))


def split(line: bytes, separator: str) -> list[str]:
    """Return the fields of a line without its end.

    Raises:
        ValueError: a quote is not closed, or something else that is no CSV.
    """
    try:
        fields = next(csv.reader([line.decode("utf-8", "surrogateescape") + "\n"], delimiter=separator))
    except csv.Error as error:
        raise ValueError(f"{error}") from error
    if fields[-1].endswith("\n"):
        raise ValueError("a quote that its line does not close")
    return fields


def as_number(text: str) -> float:
    """Return what a field says.

    Raises:
        ValueError: it is no number.
    """
    try:
        if not text.isascii() or "_" in text:  # which Python would take
            raise ValueError
        return float(text)
    except ValueError:
        raise ValueError("a number") from None


def as_id(text: str) -> int:
    """Return what a field says.

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
    """Return whether a field says a number."""
    try:
        as_number(text)
    except ValueError:
        return False
    return True


def _first_line(file: BufferedReader, path: Path) -> tuple[int, bytes]:
    """Return the first line that is not blank, and its number."""
    for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES), b""), 1):
        if line.removesuffix(b"\n") not in BLANK:
            return number, line.rstrip(b"\r\n")
    fail(path, "rows", "none", "Check that it is the right file.")


def _is_header(fields: list[str], path: Path, line: int) -> bool:
    """Return whether the first line names the columns. Names may be numbers only as pandas counts columns: 0, 1, ..."""
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
        _refuse(path, f"one column {wanted!r} of ids", names, remedy)
    return found[0]


def _find_vectors(names: tuple[str, ...], ids: int | None, path: Path, name: str | None) -> tuple[int, ...]:
    wanted = re.compile(".*" if name is None else rf"{re.escape(name)}[_.\- ]?\d*", re.DOTALL)
    found = tuple(column for column, one in enumerate(names) if column != ids and wanted.fullmatch(one))
    if not found:
        expected = "columns of numbers" if name is None else f"columns {name}0, {name}1, ... of numbers"
        hint = did_you_mean(name or "", (one.rstrip("0123456789_.- ") for one in names))
        _refuse(path, expected, names, f"Name them: --vectors NAME takes NAME0, NAME1, ...{hint}")
    return found


def _refuse(path: Path, expected: str, names: tuple[str, ...], remedy: str) -> NoReturn:
    more = f", ... ({len(names)} in all)" if len(names) > SHOWN_NAMES else ""
    fail(path, expected, f"columns {', '.join(map(repr, names[:SHOWN_NAMES]))}{more}", remedy)
