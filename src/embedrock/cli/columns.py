"""`Column`: one column of a file of a log, read in order, some of it at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, NamedTuple, NoReturn
from weakref import finalize

from embedrock.cli.formats import fail
from embedrock.cli.formats._kinds import check_kind
from embedrock.cli.formats._packed import plain_text
from embedrock.cli.formats._pyarrow import import_pyarrow
from embedrock.wording import did_you_mean, plural, with_article

BATCH_ROWS = 1 << 20
LINES = ".txt"  # of strings: one in each line
TABLES = {".parquet": "parquet", ".pq": "parquet", ".arrow": "feather", ".feather": "feather", ".ipc": "feather"}
TEXTS = {".csv": ",", ".tsv": "\t", ".inter": "\t", ".txt": " "}
STRING_TYPES = (
    "string", "large_string", "string_view", "binary", "large_binary", "binary_view", "fixed_size_binary"
)  # fmt: skip
ARROW_KINDS = {"parquet": (".parquet",), "feather": (".arrow",)}
GET_AGAIN = "Check that it is the right file."


class Wanted(NamedTuple):
    """What a column has to have.

    Attributes:
        noun: what a value is called.
        types: Arrow's, by the names of their tests.
        suffixes: of files that are read.
        naming: how a user names the column.
    """

    noun: str
    types: tuple[str, ...]
    suffixes: tuple[str, ...]
    naming: str = "--column NAME"


STRINGS = Wanted("string", STRING_TYPES, (*TABLES, *TEXTS))
IDS = Wanted("id", ("integer", "null", *STRING_TYPES), (*TABLES, *TEXTS))


class Column:
    """A column of a file.

    Args:
        path: its suffix says how it is read: Parquet, Arrow (Feather), or text with a separator.
        name: of the column. In a text whose first line has numbers only, columns are called ``0``, ``1``, ...
        wanted: what it has to have.

    Attributes:
        rows: in the file.
    """

    def __init__(self, path: Path, name: str, wanted: Wanted) -> None:
        self.path, self._name, self._wanted = path, name, wanted
        if path.suffix.lower() not in wanted.suffixes:
            listed = ", ".join("*" + end for end in wanted.suffixes)
            if path.is_file():
                check_kind(path, f"a file called {listed}", list(wanted.suffixes))
            fail(path, f"a file called {listed}", repr(path.suffix), "Call it as what it is: Parquet, Arrow or text.")
        self._arrow = import_pyarrow("Parquet and Arrow", "dataset", "csv")
        if not path.exists():
            raise FileNotFoundError(2, "there is no such file", str(path))
        self._read_path = path
        if path.suffix.lower() in TABLES:
            check_kind(path, "a Parquet or Arrow file", ARROW_KINDS[TABLES[path.suffix.lower()]])
        else:
            self._read_path = plain_text(path, f"columns of {plural(2, wanted.noun)}", self._new_folder)
        try:
            self._data = self._arrow.dataset.dataset(str(self._read_path), format=self._format())
            self._check_column(self._data.schema)
            self.rows = self._data.count_rows()
        except self._arrow.ArrowException as error:
            self._refuse(error)

    def _new_folder(self) -> str:
        """Return a folder that is there as long as the column."""
        folder = mkdtemp(prefix="embedrock-")
        finalize(self, rmtree, folder, ignore_errors=True)
        return folder

    def _format(self) -> Any:
        suffix = self.path.suffix.lower()
        if suffix in TABLES:
            return TABLES[suffix]
        csv, is_strings = self._arrow.csv, self._wanted is STRINGS
        if is_strings and suffix == LINES:
            # No separator: this letter comes in no text.
            parsing = csv.ParseOptions(delimiter="\x01", quote_char=False, ignore_empty_lines=False)
            return self._csv_format(parsing, ["0"])
        with open(self._read_path, encoding="utf-8-sig", errors="replace") as lines:
            first = lines.readline().rstrip("\r\n")
        separator = next((sign for sign in "\t,; |" if sign in first), TEXTS[suffix])
        values = first.split(separator)
        numbers = all(re.fullmatch(r"\s*[-+]?\d+(\.\d*)?([eE][-+]?\d+)?\s*", value) for value in values)
        names = [str(k) for k in range(len(values))] if numbers else None
        return self._csv_format(csv.ParseOptions(delimiter=separator), names)

    def _csv_format(self, parsing: Any, names: list[str] | None) -> Any:
        csv, conversion = self._arrow.csv, None
        if self._wanted is STRINGS:  # a field, whatever it looks like; one without letters is missing
            types = {self._name: self._arrow.string()}
            conversion = csv.ConvertOptions(column_types=types, strings_can_be_null=True, null_values=[""])
        scan = self._arrow.dataset.CsvFragmentScanOptions(conversion, csv.ReadOptions(column_names=names))
        return self._arrow.dataset.CsvFileFormat(parsing, default_fragment_scan_options=scan)

    def _refuse(self, error: Exception) -> NoReturn:
        kind = "Parquet or Arrow" if self.path.suffix.lower() in TABLES else "CSV"
        said = str(error).splitlines()[0].replace(str(self._read_path), str(self.path))
        is_encoding = "invalid UTF8" in said
        fail(self.path, f"a {kind} file", said, "Save it in UTF-8." if is_encoding else GET_AGAIN)

    def _check_column(self, schema: Any) -> None:
        types, kinds = self._arrow.types, {field.name: field.type for field in schema}
        kind = kinds.get(self._name)
        if kind is not None and types.is_dictionary(kind):
            kind = kind.value_type
        tests = [getattr(types, f"is_{test}", None) for test in self._wanted.types]  # older ones lack some
        if kind is None or not any(test is not None and test(kind) for test in tests):
            listed = ", ".join(f"{name} ({kinds[name]})" for name in kinds)
            hint = did_you_mean(self._name, (name for name in kinds if name != self._name))
            fail(
                self.path,
                f"a column {self._name!r} of {plural(2, self._wanted.noun)}",
                listed,
                f"Name it: {self._wanted.naming}.{hint}",
            )

    @property
    def is_integer(self) -> bool:
        """Whether its values are numbers."""
        return self._arrow.types.is_integer(self._data.schema.field(self._name).type)

    def batches(self) -> Iterator[tuple[int, Any]]:
        """Go through the column in order: the number of a row, and the values from there on."""
        start = 0
        scanned = self._data.to_batches(
            columns=[self._name], batch_size=BATCH_ROWS, batch_readahead=2, fragment_readahead=1
        )
        try:
            for batch in scanned:
                if batch.num_rows:
                    yield start, batch.column(0)
                start += batch.num_rows
        except self._arrow.ArrowException as error:
            self._refuse(error)

    def checked(self, column: Any, start: int) -> Any:
        """Return values, if none is missing."""
        if column.null_count:
            row = start + column.is_null().to_numpy(zero_copy_only=False).argmax()
            expected, remedy = (
                f"{with_article(self._wanted.noun)} in column {self._name!r}",
                "Fix it, or pass --skip-nulls.",
            )
            fail(self.path, expected, "null", remedy, f"row {row}")
        return column
