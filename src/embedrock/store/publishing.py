"""Publishing: files of JSON by number, of which the newest is what counts. Parsing trusts nothing.

Each is two lines: an object, and the SHA-256 of that line. What is in the object is their users' business.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, NamedTuple, TypeVar

from embedrock.errors import MissingFileError, NewerFormatError
from embedrock.io.vfs import System, read_whole, write_whole
from embedrock.store.segments import REMEDY, damaged

MAX_BYTES = 64 << 20  # of a file: of a table, some 400,000 files
VALUE_BYTES, SMALL_BYTES = 8, 1 << 20  # values that JSON may have: one in so many bytes, and some more
LEFT_OUT = ("gone", "folded")  # of entries of files, where they are 0: older formats have no such fields
MAX_DEPTH = 16  # of its JSON: the levels of a table's `spec`, and two
MAX_COMMIT = 10**10
_NAME = re.compile(r"(\d{10})\.json", re.ASCII)
_UNPUBLISHED = re.compile(r"\.\d{10}\.tmp", re.ASCII)
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|\+00:00)", re.ASCII)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"')


def numbers(system: System, folder: str) -> list[int]:
    """Return the numbers that were published in a folder, ascending.

    Raises:
        CorruptTableError: a file is in the place of the folder.
    """
    try:
        names = map(_NAME.fullmatch, system.listdir(folder))
    except NotADirectoryError as error:
        raise damaged(folder, "a folder", "a file") from error
    return sorted(int(name[1]) for name in names if name)


def is_unpublished(name: str) -> bool:
    """Return whether a file in such a folder is one that was begun, and not published."""
    return _UNPUBLISHED.fullmatch(name) is not None


@dataclass(frozen=True)
class BaseManifest:
    """What one commit consists of, whatever lies in the folder.

    Attributes:
        uuid: of the folder, 32 hexadecimal digits. Every file carries it.
        commit: number of this commit.
        parent: number of the commit that it follows, or None.
    """

    uuid: str
    commit: int
    parent: int | None

    @property
    def format(self) -> int:
        """The oldest format that has all of it."""
        raise NotImplementedError

    @property
    def files(self) -> list[str]:
        """Names of the files that it needs."""
        raise NotImplementedError

    def body(self) -> dict[str, Any]:
        """Return its fields as its format has them."""
        return dict(vars(self))

    def to_bytes(self) -> bytes:
        """Return the bytes of its file."""
        return to_bytes({"format": self.format} | self.body())


AManifest = TypeVar("AManifest", bound=BaseManifest)


class Manifests(Generic[AManifest]):
    """The manifests of folders of one kind.

    Args:
        inside: name of the folder of manifests in such a folder.
        parse: returns the manifest of a file's bytes; errors name the path that it gets.
    """

    def __init__(self, inside: str, parse: Callable[[bytes, str], AManifest]) -> None:
        self.inside, self._parse = inside, parse

    def path_of(self, folder: str, number: int) -> str:
        """Return where the manifest of a commit lies."""
        return f"{folder}/{self.inside}/{number:010d}.json"

    def numbers(self, system: System, folder: str) -> list[int]:
        """Return the numbers of the commits whose manifest is in a folder, ascending: see `numbers`."""
        return numbers(system, f"{folder}/{self.inside}")

    def read(self, system: System, folder: str, number: int) -> AManifest:
        """Return the manifest of a commit.

        Raises:
            CorruptTableError: it is missing or damaged.
            NewerFormatError: it is of a newer format.
        """
        where = self.path_of(folder, number)
        try:
            manifest = self._parse(read_whole(system, where, MAX_BYTES), where)
        except FileNotFoundError as error:
            raise MissingFileError(f"{where} is missing: there is no commit {number}. {REMEDY}") from error
        except IsADirectoryError as error:
            raise damaged(where, "a file", "a folder") from error
        if manifest.commit != number:
            raise damaged(where, f"commit {number}", f"commit {manifest.commit}")
        return manifest

    def publish(self, system: System, folder: str, manifest: AManifest) -> None:
        """Make a commit the newest of its folder: it is there whole and durably, or not at all.

        Raises:
            FileExistsError: another writer has published this number.
            OSError: it could not be written. Where only the folder could not be synced, it may be there nevertheless.
        """
        data, where = manifest.to_bytes(), self.path_of(folder, manifest.commit)
        self._parse(data, where)  # what cannot be read back is a bug, and must not be
        write_whole(system, f"{folder}/{self.inside}/.{manifest.commit:010d}.tmp", data, link_to=where)


# ---------------------------------------------------------------- their bytes


def to_bytes(body: Mapping[str, Any]) -> bytes:
    """Return the bytes of an object."""
    text = json.dumps(body, sort_keys=True, allow_nan=False, separators=(",", ":"), default=fields_of)
    line = text.encode("ascii")
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode("ascii") + b"\n"


def fields_of(entry: Any) -> dict[str, Any]:
    """Return the fields of an entry of a file as they stand in a manifest."""
    return {name: value for name, value in vars(entry).items() if value or name not in LEFT_OUT}


def parse(data: bytes, where: str, formats: range) -> tuple[int, dict[str, Any]]:
    """Return the format, and the object without it. Whatever the bytes are, nothing large is allocated for them.

    Raises:
        CorruptTableError: they are not what `to_bytes` makes; the message names `where`.
        NewerFormatError: their format is above `formats`.
    """
    body = _load(_checked_line(data, where), where)
    version, newest = body.pop("format", None), formats[-1]
    if type(version) is int and version > newest:
        raise NewerFormatError(
            f"{where} is of format {reprlib.repr(version)}: this release reads formats up to {newest}. "
            "Install a newer embedrock."
        )
    if type(version) is not int or version not in formats:
        expected = f"`format` {formats[0]} to {newest}" if len(formats) > 1 else f"`format` {newest}"
        raise damaged(where, expected, reprlib.repr(version))
    return version, body


def _checked_line(data: bytes, where: str) -> bytes:
    """Return the first line of a manifest whose second line is its SHA-256."""
    if len(data) > MAX_BYTES:
        raise damaged(where, f"at most {MAX_BYTES} bytes", len(data))
    line, checksum = data[:-66], data[-66:]
    expected = b"\n" + hashlib.sha256(line).hexdigest().encode("ascii") + b"\n"
    if checksum != expected:
        raise damaged(where, f"a first line with SHA-256 {checksum[1:13]!r}...", f"{expected[1:13]!r}...")
    return line


def _load(line: bytes, where: str) -> dict[str, Any]:
    values = sum(map(line.count, (b",", b"[", b"{")))
    if values * VALUE_BYTES > len(line) + SMALL_BYTES:  # an empty list takes 30 times its two bytes
        raise damaged(where, f"a value in {VALUE_BYTES} bytes, on average", f"{values} in {len(line)}")
    brackets = _STRING.sub(b"", line).translate(None, _NO_BRACKETS)
    for _ in range(MAX_DEPTH):
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    if brackets:
        raise damaged(where, f"JSON of at most {MAX_DEPTH} levels", "more, or brackets without a partner")
    try:
        body = json.loads(
            line.decode("ascii"), object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        raise damaged(where, "a line of plain JSON", f"{type(error).__name__}: {reprlib.repr(str(error))}") from error
    if not isinstance(body, dict):
        raise damaged(where, "a JSON object", reprlib.repr(body))
    return body


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("an object has a key twice")
    return made


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{reprlib.repr(text)} is too large a number")
    return value


class FieldCheck(NamedTuple):
    """What a field must be, as a function and in words."""

    holds: Callable[[Any], bool]
    expected: str


def whole(low: int, below: int) -> FieldCheck:
    """Return the check of a whole number."""
    return FieldCheck(lambda value: type(value) is int and low <= value < below, f"a whole number in [{low}, {below})")


def text(pattern: re.Pattern[str], expected: str) -> FieldCheck:
    """Return the check of a text that a pattern describes."""
    return FieldCheck(lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None, expected)


def or_null(check: FieldCheck) -> FieldCheck:
    """Return the check of what may be missing."""
    return FieldCheck(lambda value: value is None or check.holds(value), f"{check.expected}, or null")


def now() -> str:
    """Return the time as it stands in a manifest."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _is_time(value: Any) -> bool:
    try:
        return isinstance(value, str) and _TIME.fullmatch(value) is not None and bool(datetime.fromisoformat(value))
    except ValueError:  # a month 13
        return False


UUID = text(re.compile("[0-9a-f]{32}"), "32 hexadecimal digits")
NUMBER = whole(0, MAX_COMMIT)
TIME = FieldCheck(_is_time, "a time in UTC (ISO 8601)")
LIST = FieldCheck(lambda value: isinstance(value, list), "a list")


def check_fields(values: Any, checks: Mapping[str, FieldCheck], where: str, subject: str) -> None:
    """Refuse values that are not an object of just these fields."""
    if not isinstance(values, dict) or values.keys() != checks.keys():
        got = sorted(values) if isinstance(values, dict) else values
        raise damaged(where, f"{subject} with {', '.join(sorted(checks))}", reprlib.repr(got))
    for name, check in checks.items():
        if not check.holds(values[name]):
            raise damaged(where, f"`{name}` of {subject} to be {check.expected}", reprlib.repr(values[name]))
