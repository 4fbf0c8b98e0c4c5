"""`TextColumn`: one column of a log file, read in order, a part at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from embedrock.cli.formats import fail
from embedrock.cli.formats.base import import_pyarrow
from embedrock.cli.formats.columns import ArrowFile, ColumnFile, ParquetFile, first_null
from embedrock.cli.formats.delimited import MAX_LINE_BYTES, CsvFile, Lines, fields_of
from embedrock.cli.formats.files import check_kind, opened_text
from embedrock.errors import did_you_mean, plural, with_article

BATCH_ROWS = 1 << 20
LINES = ".txt"  # of strings: one per line
TABLES = {".parquet": ParquetFile, ".pq": ParquetFile, ".arrow": ArrowFile, ".feather": ArrowFile, ".ipc": ArrowFile}
TEXTS = {".csv": ",", ".tsv": "\t", ".inter": "\t", ".txt": " "}
SEPARATORS = "\t,; |"
NUMBER = re.compile(r"\s*[-+]?\d+(\.\d*)?([eE][-+]?\d+)?\s*")
STRING_TYPES = (
    "string", "large_string", "string_view", "binary", "large_binary", "binary_view", "fixed_size_binary"
)  # fmt: skip


class ColumnQuery(NamedTuple):
    """The required contents of a column."""

    noun: str  # name of a value in messages
    types: tuple[str, ...]  # Arrow types, by the names of their tests
    naming: str = "--column NAME"  # how a user names the column


STRINGS = ColumnQuery("string", STRING_TYPES)
IDS = ColumnQuery("id", ("integer", "null", *STRING_TYPES))


class TextColumn:
    """A column of a file.

    Args:
        path: file; its suffix selects the reader: Parquet, Arrow (Feather), or text with a separator.
        name: name of the column. In a text whose first line has numbers only, columns are called ``0``, ``1``, ...
        wanted: required contents.
    """

    def __init__(self, path: Path, name: str, wanted: ColumnQuery) -> None:
        self.path, self._name, self._wanted = path, name, wanted
        _check_suffix(path)
        import_pyarrow("Parquet and Arrow")
        if not path.exists():
            raise FileNotFoundError(2, "there is no such file", str(path))
        if (kind := TABLES.get(path.suffix.lower())) is not None:
            check_kind(path, "a Parquet or Arrow file", (".parquet" if kind is ParquetFile else ".arrow",))
            self._file: ColumnFile = kind(path, "Parquet or Arrow")
            names = types = self._file.types()
        else:
            self._file, names = _open_text(path, name, wanted)
            types = dict(zip(names, self._file.types().values(), strict=True))
        self._check_type(types)
        self._key = name if kind is not None else str([*names].index(name))
        self.is_integer, self.rows = self._file.arrow.types.is_integer(types[name]), self._file.rows

    def _check_type(self, kinds: dict[str, Any]) -> None:
        types, kind = self._file.arrow.types, kinds.get(self._name)
        if kind is not None and types.is_dictionary(kind):
            kind = kind.value_type
        tests = [getattr(types, f"is_{test}", None) for test in self._wanted.types]  # older versions lack some
        if kind is None or not any(test is not None and test(kind) for test in tests):
            listed = ", ".join(f"{name} ({kinds[name]})" for name in kinds)
            hint = did_you_mean(self._name, (name for name in kinds if name != self._name))
            expected = f"a column {self._name!r} of {plural(2, self._wanted.noun)}"
            fail(self.path, expected, listed, f"Name it: {self._wanted.naming}.{hint}")

    def batches(self) -> Iterator[tuple[int, Any]]:
        """Iterate over the column in order: the number of a row, and the values from there on."""
        start = 0
        for batch in self._file.batches([self._key], 0, BATCH_ROWS):
            yield start, batch.column(0)
            start += batch.num_rows

    def checked(self, column: Any, start: int) -> Any:
        """Return values; raise if one is missing."""
        if column.null_count:
            expected, row = f"{with_article(self._wanted.noun)} in column {self._name!r}", start + first_null(column)
            fail(self.path, expected, "null", "Fix it, or pass --skip-nulls.", f"row {row}")
        return column


def _check_suffix(path: Path) -> None:
    suffixes = [*TABLES, *TEXTS]
    if path.suffix.lower() not in suffixes:
        listed = ", ".join("*" + end for end in suffixes)
        if path.is_file():
            check_kind(path, f"a file called {listed}", suffixes)
        fail(path, f"a file called {listed}", repr(path.suffix), "Call it as what it is: Parquet, Arrow or text.")


def _open_text(path: Path, name: str, wanted: ColumnQuery) -> tuple[CsvFile, list[str]]:
    expected, suffix = f"columns of {plural(2, wanted.noun)}", path.suffix.lower()
    conversion: dict[str, Any] = {}
    if wanted is STRINGS and suffix == LINES:
        lines, names = Lines("\x01", 1, plain=True), ["0"]  # no separator: this character occurs in no text
    else:
        with opened_text(path, expected) as file:
            first = file.readline(MAX_LINE_BYTES).rstrip(b"\r\n")
        separator = next((sign for sign in SEPARATORS if sign in first.decode("utf-8", "replace")), TEXTS[suffix])
        names = [name.rstrip("\n") for name in fields_of(first, separator)]
        is_head = not all(map(NUMBER.fullmatch, names))
        names = names if is_head else [str(column) for column in range(len(names))]
        lines = Lines(separator, len(names), int(is_head))
    if wanted is STRINGS and name in names:  # any field counts; an empty one is missing
        string = import_pyarrow("CSV").string()
        conversion = {
            "column_types": {str(names.index(name)): string},
            "strings_can_be_null": True,
            "null_values": [""],
        }
    return CsvFile(path, expected, lines, conversion), names
