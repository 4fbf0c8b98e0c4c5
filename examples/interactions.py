"""Read a log of interactions: a text file with a line for each, ``user item [rating] [timestamp]``."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import NoReturn, TextIO

import numpy as np

from common import DataError

# The first of these that the first line holds separates the fields; without any, whitespace does.
SEPARATORS = {"\t": "tabs", "::": '"::"', ",": "commas", ";": "semicolons"}
QUOTED = ",;"  # read as CSV, whose fields may have quotes
FIELDS = "user", "item", "rating", "timestamp"
# Names of the fields in header lines, in lower case, without "_", spaces and a type such as ":token".
HEADER_NAMES = {
    "user": ("user", "userid", "uid", "reviewerid", "customerid", "visitorid"),
    "item": ("item", "itemid", "iid", "productid", "movieid", "bookid", "businessid", "asin", "parentasin"),
    "rating": ("rating", "ratings", "score", "stars", "overall"),
    "timestamp": ("timestamp", "time", "ts", "unixreviewtime"),
}
FORM = "one interaction per line: user item [rating] [timestamp]"
SNIFFED = 1 << 16  # characters at the start of a file that show its form


@dataclass(frozen=True)
class Interactions:
    """Interactions in the order of the file.

    Attributes:
        users, items: int64 (n,), numbered from 0 in order of first appearance.
        times: float64 (n,); None without timestamps.
        num_users: number of different users.
        names: bytes of each item, by its number.
        form: the form of the file, for people.
    """

    users: np.ndarray
    items: np.ndarray
    times: np.ndarray | None
    num_users: int
    names: list[bytes]
    form: str

    @property
    def num_items(self) -> int:
        """Number of different items."""
        return len(self.names)


def read_log(path: Path) -> Interactions:
    """Read interactions from a text file. Users and items are any text.

    A first line of names may have its columns in any order, and others beside them, which are skipped.

    Raises:
        DataError: the file is empty or no text, or a line is malformed; with the line's number.
        OSError: it cannot be read.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     _ = Path(file.name).write_text("user,item,timestamp\\nann,lamp,7\\nbob,lamp,9\\nann,sofa,8\\n")
        ...     log = read_log(Path(file.name))
        >>> log.users, log.items, log.times
        (array([0, 1, 0]), array([0, 0, 1]), array([7., 9., 8.]))
    """
    # Ids are opaque, so bytes that are not UTF-8 are kept, not refused.
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        start = file.read(SNIFFED)
        first = next((line for line in start.splitlines() if line.strip()), "")
        if not first or "\0" in start:
            fail(path, FORM, "binary data" if first else "an empty file")
        separator = next((one for one in SEPARATORS if one in first), None)
        file.seek(0)
        rows = split_lines(file, separator, path)
        head = list(islice(rows, 2))
        columns, has_header = find_columns(head, path)
        form = f"{SEPARATORS.get(separator or '', 'whitespace')}, {'header line' if has_header else 'no header line'}"
        return parse(chain(head[has_header:], rows), columns, len(head[0][1]), path, f"separated by {form}")


def split_lines(file: TextIO, separator: str | None, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Go through the lines that are not blank: number from 1, and fields."""
    if separator and separator in QUOTED:
        reader = csv.reader(file, delimiter=separator, strict=True)
        numbered = ((reader.line_num, fields) for fields in reader)
    else:
        numbered = ((number, line.strip("\r\n").split(separator)) for number, line in enumerate(file, 1))
    try:
        for number, fields in numbered:
            if any(field.strip() for field in fields):
                yield number, [field.strip() for field in fields]
    except csv.Error as error:
        fail(path, "CSV", f"{error}. Close its quotes")


def find_columns(head: Sequence[tuple[int, list[str]]], path: Path) -> tuple[dict[str, int], bool]:
    """Return the column of each field, and whether the first line is a header."""
    line, first = head[0]
    named = {field_of(name): column for column, name in reversed(list(enumerate(first)))}
    if "user" in named and "item" in named:
        return {field: named[field] for field in FIELDS if field in named}, True
    if not 2 <= len(first) <= len(FIELDS):
        fail(path, f"2 to 4 fields, or names in a first line: {', '.join(FIELDS)}", f"{len(first)}: {first}", line)
    is_header = len(head) > 1 and not any(map(is_number, first)) and any(map(is_number, head[1][1]))
    return {field: column for column, field in enumerate(FIELDS[: len(first)])}, is_header


def parse(
    rows: Iterator[tuple[int, list[str]]], columns: dict[str, int], width: int, path: Path, form: str
) -> Interactions:
    """Number users and items; read the timestamps."""
    users: dict[str, int] = {}
    items: dict[str, int] = {}
    pairs, times = list[tuple[int, int]](), list[float]()
    for line, fields in rows:
        if len(fields) != width:
            fail(path, f"{width} fields, as in the first line", f"{len(fields)}: {fields}", line)
        user, item = fields[columns["user"]], fields[columns["item"]]
        if not user or not item:
            fail(path, "a user and an item", f"an empty field: {fields}", line)
        for name in columns.keys() & {"rating", "timestamp"}:
            if not is_number(fields[columns[name]]):
                fail(path, f"a number as the {name}", repr(fields[columns[name]]), line)
        pairs.append((users.setdefault(user, len(users)), items.setdefault(item, len(items))))
        times.append(float(fields[columns["timestamp"]]) if "timestamp" in columns else 0.0)
    if not pairs:
        fail(path, "interactions after the header line", "none")
    numbers = np.array(pairs, np.int64)
    names = [name.encode("utf-8", "surrogateescape") for name in items]
    known = np.array(times) if "timestamp" in columns else None
    return Interactions(numbers[:, 0], numbers[:, 1], known, len(users), names, form)


def field_of(name: str) -> str:
    """Return the field that a header's name means, or the name."""
    plain = name.partition(":")[0].lower().replace("_", "").replace(" ", "")
    return next((field for field, names in HEADER_NAMES.items() if plain in names), name)


def is_number(text: str) -> bool:
    """Return whether a text is a finite number."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def fail(path: Path, expected: str, got: str, line: int | None = None) -> NoReturn:
    """Raise an error about a line of a log, or about all of it."""
    where = f"{path}, line {line}" if line else path
    raise DataError(f"{where}: expected {expected}; got {got}. Check that it is the right file.")
