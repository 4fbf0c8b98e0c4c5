"""Read a log of interactions: a text file with lines "user item [rating] [timestamp]"."""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import NoReturn

import numpy as np

from embedrock.errors import EmbedrockError

# The first of these that the first line holds parts the fields; without any, whitespace does.
SEPARATORS = ("\t", "::", ",", ";")
SEPARATOR_NAMES = {"\t": "tabs", "::": '"::"', ",": "commas", ";": "semicolons", None: "whitespace"}
QUOTED = (",", ";")  # read as CSV, where a field may be "quoted"
FIELDS = ("user", "item", "rating", "timestamp")

# How headers name the fields, in lower case, without "_", spaces and a type such as ":token".
HEADER_NAMES = {
    "user": ("user", "userid", "uid", "reviewerid", "customerid", "visitorid"),
    "item": ("item", "itemid", "iid", "productid", "movieid", "bookid", "businessid", "asin", "parentasin"),
    "rating": ("rating", "ratings", "score", "stars", "overall"),
    "timestamp": ("timestamp", "time", "ts", "unixreviewtime"),
}

NAME_THE_COLUMNS = "If the columns mean something else, name them in a first line: user, item, rating, timestamp."
CHECK_THE_FILE = "Check that it is the right file."

Line = tuple[int, list[str]]  # number of the line in the file, from 1, and its fields


class LogError(EmbedrockError, ValueError):
    """A log of interactions that cannot be read."""


@dataclass(frozen=True)
class Interactions:
    """Interactions, in the order of the file.

    Attributes:
        users, items: int64 (n,), numbered from 0 in order of first appearance.
        times: float64 (n,), or None where the file has no timestamps.
        num_users, num_items: how many different ones there are.
        form: how the file was understood, for people.
        item_names: bytes of each different item as it stands in the file, by its number.
    """

    users: np.ndarray
    items: np.ndarray
    times: np.ndarray | None
    num_users: int
    num_items: int
    form: str
    item_names: list[bytes]


@dataclass(frozen=True)
class LineLayout:
    """Where the fields of a line are.

    Attributes:
        columns: field -> position, for those of `FIELDS` that there are.
        width: fields in every line.
        separator: between fields; None: whitespace.
        header: whether the first line names the fields.
    """

    columns: dict[str, int]
    width: int
    separator: str | None
    header: bool

    def __str__(self) -> str:
        names = " ".join(sorted(self.columns, key=self.columns.__getitem__))
        header = "header line" if self.header else "no header line"
        return f"{names}, separated by {SEPARATOR_NAMES[self.separator]}, {header}"


def read_log(path: Path) -> Interactions:
    """Read interactions from a text file.

    Fields are separated by tabs, "::", commas, semicolons or whitespace; users and items are any text. A
    first line of names is recognized by the names (then columns may come in any order, and columns with other
    names are skipped), or by having no number where the second line has some.

    Raises:
        LogError: the file is missing, empty or no text, or a line is malformed; with the line's number.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     _ = Path(file.name).write_text("user,item,timestamp\\nann,lamp,7\\nbob,lamp,9\\nann,sofa,8\\n")
        ...     log = read_log(Path(file.name))
        >>> log.users, log.items, log.times
        (array([0, 1, 0]), array([0, 0, 1]), array([7., 9., 8.]))
    """
    try:
        # Ids are opaque, so bytes that are not UTF-8 are kept, not refused.
        with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            return _Reader(path).read(file)
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error.strerror}. Check the path.") from error


class _Reader:
    """Reads one file, and knows where in it a mistake is."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._line = 0  # number of the line that was read last, from 1

    def read(self, file: Iterable[str]) -> Interactions:
        lines = self._text(file)
        first = next((line for line in lines if line.strip()), "")
        separator = next((one for one in SEPARATORS if one in first), None)
        rows = self._rows(chain([first], lines), separator)
        head = list(islice(rows, 2))
        if not head:
            self._fail("one interaction per line: user item [rating] [timestamp]", "an empty file")
        layout = self._layout(head, separator)
        return self._parse(chain(head[layout.header :], rows), layout)

    def _text(self, file: Iterable[str]) -> Iterator[str]:
        for self._line, line in enumerate(file, 1):
            if "\0" in line:
                remedy = "Unpack the file, or export it as text."
                self._fail("a line of text", "binary data", remedy, self._line)
            yield line

    def _rows(self, lines: Iterator[str], separator: str | None) -> Iterator[Line]:
        """Go through the fields of the lines that are not blank."""
        if separator in QUOTED:
            records = csv.reader(lines, delimiter=separator, strict=True)
        else:
            records = (line.strip("\r\n").split(separator) for line in lines)
        try:
            for record in records:
                fields = [field.strip() for field in record]
                if len(fields) > 1 or any(fields):
                    yield self._line, fields
        except csv.Error as error:
            self._fail("CSV", str(error), "Close its quotes.", self._line)

    def _layout(self, head: list[Line], separator: str | None) -> LineLayout:
        line, first = head[0]
        named = {_field_called(name): column for column, name in reversed(list(enumerate(first)))}
        if "user" in named and "item" in named:
            columns = {field: named[field] for field in FIELDS if field in named}
            return LineLayout(columns, len(first), separator, header=True)
        if not 2 <= len(first) <= len(FIELDS):
            self._fail(
                f"2 to 4 fields separated by {SEPARATOR_NAMES[separator]}: user item [rating] [timestamp]",
                f"{len(first)}: {' '.join(first)!r}",
                NAME_THE_COLUMNS,
                line,
            )
        columns = {field: column for column, field in enumerate(FIELDS[: len(first)])}
        header = len(head) > 1 and _is_header(first, head[1][1])
        return LineLayout(columns, len(first), separator, header)

    def _parse(self, rows: Iterable[Line], layout: LineLayout) -> Interactions:
        users, items, times = array("q"), array("q"), array("d")
        user_numbers: dict[str, int] = {}
        item_numbers: dict[str, int] = {}
        columns, timed, rated = layout.columns, "timestamp" in layout.columns, "rating" in layout.columns
        for line, fields in rows:
            if len(fields) != layout.width:
                self._refuse_width(line, fields, layout)
            user, item = fields[columns["user"]], fields[columns["item"]]
            if not user or not item:
                self._fail("a user and an item", f"an empty field: {fields}", "Fix or remove the line.", line)
            users.append(user_numbers.setdefault(user, len(user_numbers)))
            items.append(item_numbers.setdefault(item, len(item_numbers)))
            if rated:
                self._number(fields[columns["rating"]], "rating", line)
            if timed:
                times.append(self._number(fields[columns["timestamp"]], "timestamp", line))
        if not users:
            self._fail("interactions after the header line", "none")
        return Interactions(
            np.array(users, np.int64),
            np.array(items, np.int64),
            np.array(times, np.float64) if timed else None,
            len(user_numbers),
            len(item_numbers),
            str(layout),
            [name.encode("utf-8", "surrogateescape") for name in item_numbers],
        )

    def _number(self, text: str, field: str, line: int) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            remedy = f"Fix or remove the line. {NAME_THE_COLUMNS}"
            self._fail(f"a number as {field}", repr(text), remedy, line)
        return value

    def _refuse_width(self, line: int, fields: list[str], layout: LineLayout) -> NoReturn:
        expected = f"{layout.width} fields ({layout})"
        self._fail(expected, f"{len(fields)}: {' '.join(fields)!r}", "Fix or remove the line.", line)

    def _fail(self, expected: str, got: str, remedy: str = CHECK_THE_FILE, line: int = 0) -> NoReturn:
        where = f"{self._path}, line {line}" if line else f"{self._path}"
        raise LogError(f"{where}: expected {expected}; got {got}. {remedy}")


def _field_called(name: str) -> str | None:
    """Return the field that a header means by `name`: "user_id:token" is the user."""
    plain = name.split(":")[0].lower().replace("_", "").replace(" ", "")
    return next((field for field, names in HEADER_NAMES.items() if plain in names), None)


def _is_header(first: list[str], second: list[str]) -> bool:
    """Return whether the first line has no number, and the second has."""
    return any(map(_is_number, second)) and not any(map(_is_number, first))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
