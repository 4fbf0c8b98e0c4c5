"""Publishing of numbered JSON files, of which the newest is valid. Parsing trusts no input.

Each file has two lines: an object, and the SHA-256 of that line. Callers define the object.
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

MAX_BYTES = 64 << 20  # bytes of a manifest: enough for some 400,000 files of a table
VALUE_BYTES, SMALL_BYTES = 8, 1 << 20  # JSON of n bytes has at most (n + SMALL_BYTES) / VALUE_BYTES values
LEFT_OUT = ("gone", "folded")  # fields of entries that are left out if 0: older formats do not have them
MAX_DEPTH = 16  # levels of JSON: those of a table's `spec`, and two
MAX_COMMIT = 10**10
_NAME = re.compile(r"(\d{10})\.json", re.ASCII)
UNPUBLISHED = re.compile(r"\.\d{10}\.tmp", re.ASCII)  # files that were created for publishing
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|\+00:00)", re.ASCII)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"')


def numbers(system: System, folder: str) -> list[int]:
    """Return the published numbers in a folder, ascending.

    Raises:
        CorruptTableError: the folder is a file.
    """
    try:
        names = map(_NAME.fullmatch, system.listdir(folder))
    except NotADirectoryError as error:
        raise damaged(folder, "a folder", "a file") from error
    return sorted(int(name[1]) for name in names if name)


@dataclass(frozen=True)
class BaseManifest:
    """Common fields of all manifests.

    Attributes:
        uuid: id of the folder, 32 hexadecimal digits. All its files have it.
        parent: number of the commit before it, or None.
    """

    uuid: str
    commit: int
    parent: int | None

    @property
    def format(self) -> int:
        """Return the oldest format with all of its fields."""
        raise NotImplementedError

    @property
    def files(self) -> list[str]:
        """Return the names of the files that it needs."""
        raise NotImplementedError

    def body(self) -> dict[str, Any]:
        """Return its fields in its format."""
        return dict(vars(self))

    def to_bytes(self) -> bytes:
        return to_bytes({"format": self.format} | self.body())


AManifest = TypeVar("AManifest", bound=BaseManifest)


@dataclass(frozen=True)
class FolderKind(Generic[AManifest]):
    """Kind of folders with one writer, and with the manifests of their commits.

    Attributes:
        noun: its name in messages.
        reading: code that opens it for reading, for messages.
        inside: name of the folder of manifests.
        data: names of the folders of its other files.
        parse: takes a manifest's bytes and path, and returns the manifest. Errors name the path.
        is_linked: a manifest gets its name once it is whole. False: in folders that are carried elsewhere, where a file
            may be there in part at any time.
    """

    noun: str
    reading: str
    inside: str
    data: tuple[str, ...]
    parse: Callable[[bytes, str], AManifest]
    is_linked: bool = True

    @property
    def folders(self) -> tuple[str, ...]:
        return (self.inside, *self.data)

    def path_of(self, folder: str, number: int) -> str:
        return f"{folder}/{self.inside}/{number:010d}.json"

    def numbers(self, system: System, folder: str) -> list[int]:
        """Return the numbers of the published commits, ascending. See `numbers`."""
        return numbers(system, f"{folder}/{self.inside}")

    def read(self, system: System, folder: str, number: int) -> AManifest:
        """Return the manifest of a commit.

        Raises:
            CorruptTableError: the manifest is missing or damaged.
            NewerFormatError: the format is newer.
        """
        where = self.path_of(folder, number)
        try:
            manifest = self.parse(read_whole(system, where, MAX_BYTES), where)
        except FileNotFoundError as error:
            raise MissingFileError(f"{where} is missing: there is no commit {number}. {REMEDY}") from error
        except IsADirectoryError as error:
            raise damaged(where, "a file", "a folder") from error
        if manifest.commit != number:
            raise damaged(where, f"commit {number}", f"commit {manifest.commit}")
        return manifest

    def publish(self, system: System, folder: str, manifest: AManifest, data: bytes | None = None) -> None:
        """Publish a commit as the newest of its folder, atomically and durably. `data` has its bytes, if made before.

        Raises:
            FileExistsError: another writer has published this number.
            OSError: the manifest was not written. If only the sync of the folder failed, the manifest may exist.
        """
        data, where = data or manifest.to_bytes(), self.path_of(folder, manifest.commit)
        self.parse(data, where)  # a manifest that cannot be read back is a bug, and must not be published
        draft = f"{folder}/{self.inside}/.{manifest.commit:010d}.tmp"
        if self.is_linked:
            write_whole(system, draft, [data], where)
        else:
            write_whole(system, where, [data])


# ---------------------------------------------------------------- bytes


def sha_of(data: bytes) -> str:
    """Return the SHA-256 in a manifest's second line, 64 hexadecimal digits."""
    return data[-65:-1].decode("ascii")


def to_bytes(body: Mapping[str, Any]) -> bytes:
    """Return the bytes of an object."""
    text = json.dumps(body, sort_keys=True, allow_nan=False, separators=(",", ":"), default=fields_of)
    line = text.encode("ascii")
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode("ascii") + b"\n"


def fields_of(entry: Any) -> dict[str, Any]:
    """Return the fields of an entry, as in a manifest."""
    return {name: value for name, value in vars(entry).items() if value or name not in LEFT_OUT}


def parse(data: bytes, where: str, formats: range) -> tuple[int, dict[str, Any]]:
    """Return the format, and the object without it. Malformed bytes cause no large allocation.

    Raises:
        CorruptTableError: the bytes differ from all output of `to_bytes`. The message names `where`.
        NewerFormatError: the format is above `formats`.
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
    """Return the first line of a manifest, after a check of its SHA-256 in the second line."""
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
    """Check of a field: a function, and its meaning in words."""

    holds: Callable[[Any], bool]
    expected: str


def whole(low: int, below: int) -> FieldCheck:
    """Return the check of a whole number."""
    return FieldCheck(lambda value: type(value) is int and low <= value < below, f"a whole number in [{low}, {below})")


def text(pattern: re.Pattern[str], expected: str) -> FieldCheck:
    """Return the check of a text that matches a pattern."""
    return FieldCheck(lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None, expected)


def or_null(check: FieldCheck) -> FieldCheck:
    """Return the check of a value that may be null."""
    return FieldCheck(lambda value: value is None or check.holds(value), f"{check.expected}, or null")


def now() -> str:
    """Return the current time in the format of manifests."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def age_of(time: str) -> float:
    """Return the seconds since a time in the format of manifests."""
    return (datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds()


def _is_time(value: Any) -> bool:
    try:
        return isinstance(value, str) and _TIME.fullmatch(value) is not None and bool(datetime.fromisoformat(value))
    except ValueError:  # such as month 13
        return False


UUID = text(re.compile("[0-9a-f]{32}"), "32 hexadecimal digits")
SHA = text(re.compile("[0-9a-f]{64}"), "64 hexadecimal digits")
NUMBER = whole(0, MAX_COMMIT)
TIME = FieldCheck(_is_time, "a time in UTC (ISO 8601)")
COMMIT = {"uuid": UUID, "commit": NUMBER, "parent": or_null(NUMBER), "time": TIME}  # of every manifest
LIST = FieldCheck(lambda value: isinstance(value, list), "a list")
OBJECT = FieldCheck(lambda value: isinstance(value, dict), "an object")


def check_fields(values: Any, checks: Mapping[str, FieldCheck], where: str, subject: str) -> None:
    """Raise `CorruptTableError` unless `values` is an object with exactly these fields."""
    if not isinstance(values, dict) or values.keys() != checks.keys():
        got = sorted(values) if isinstance(values, dict) else values
        raise damaged(where, f"{subject} with {', '.join(sorted(checks))}", reprlib.repr(got))
    for name, check in checks.items():
        if not check.holds(values[name]):
            raise damaged(where, f"`{name}` of {subject} to be {check.expected}", reprlib.repr(values[name]))
