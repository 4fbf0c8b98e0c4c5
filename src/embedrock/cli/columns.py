"""`Column`: one column of a file of a log, read in order, some of it at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from embedrock.cli.formats import fail
from embedrock.cli.formats._pyarrow import import_pyarrow
from embedrock.wording import did_you_mean, plural, with_article

BATCH_ROWS = 1 << 20
TABLES = {".parquet": "parquet", ".pq": "parquet", ".arrow": "feather", ".feather": "feather", ".ipc": "feather"}
TEXTS = {".csv": ",", ".tsv": "\t", ".inter": "\t", ".txt": " "}
STRING_TYPES = (
    "string", "large_string", "string_view", "binary", "large_binary", "binary_view", "fixed_size_binary"
)  # fmt: skip
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


STRINGS = Wanted("string", STRING_TYPES, tuple(TABLES))
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
            fail(path, f"a file called {listed}", repr(path.suffix), "Rename it.")
        self._arrow = import_pyarrow("Parquet and Arrow", "dataset", "csv")
        if not path.exists():
            raise FileNotFoundError(2, "there is no such file", str(path))
        try:
            self._data = self._arrow.dataset.dataset(str(path), format=self._format())
            self._check_column(self._data.schema)
            self.rows = self._data.count_rows()
        except self._arrow.ArrowException as error:
            self._refuse(error)

    def _format(self) -> Any:
        suffix = self.path.suffix.lower()
        if suffix in TABLES:
            return TABLES[suffix]
        with self.path.open(encoding="utf-8", errors="replace") as lines:
            first = lines.readline().rstrip("\r\n")
        separator = next((sign for sign in "\t,; |" if sign in first), TEXTS[suffix])
        values = first.split(separator)
        numbers = all(re.fullmatch(r"\s*[-+]?\d+(\.\d*)?([eE][-+]?\d+)?\s*", value) for value in values)
        csv, names = self._arrow.csv, [str(k) for k in range(len(values))] if numbers else None
        return self._arrow.dataset.CsvFileFormat(
            csv.ParseOptions(delimiter=separator), read_options=csv.ReadOptions(column_names=names)
        )

    def _refuse(self, error: Exception) -> NoReturn:
        kind = "Parquet or Arrow" if self.path.suffix.lower() in TABLES else "CSV"
        fail(self.path, f"a {kind} file", str(error).splitlines()[0], GET_AGAIN)

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
