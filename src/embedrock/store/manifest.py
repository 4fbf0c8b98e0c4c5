"""`Manifest`: what one commit consists of. Publishing is the only atomic act there is; parsing trusts nothing."""

from __future__ import annotations

import hashlib
import json
import math
import re
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple

from embedrock.errors import MissingFileError, NewerFormatError
from embedrock.machine.vfs import System, read_whole, write_whole
from embedrock.store.runs import FORMAT, KINDS, REMEDY, UNMARKED, RunFile, damaged, run_bytes
from embedrock.wording import counted

MAX_BYTES = 64 << 20  # of a manifest: some 400,000 files
MAX_DEPTH = 16  # of its JSON: the levels of `spec`, and two
MAX_COMMIT = 10**10
MAX_STEPS = 1 << 62  # so that nobody comes to 2^63
MAX_RECORD_BYTES = 1 << 30
MAX_COUNT = 1 << 40  # records of a file: the lower part of a location
_NAME = re.compile(r"(\d{10})\.json", re.ASCII)
_FILE = re.compile(r"(base|delta|history)(/[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}){1,2}", re.ASCII)
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|\+00:00)", re.ASCII)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"')


@dataclass(frozen=True)
class HistoryFile:
    """How a manifest describes a file of a rule's history.

    Attributes:
        file: path relative to the table's folder.
        size: bytes of the whole file.
        crc: CRC-32 of the whole file.
        count: steps in it.
    """

    file: str
    size: int
    crc: int
    count: int


@dataclass(frozen=True)
class Manifest:
    """What one commit consists of.

    Attributes:
        uuid: of the table, 32 hexadecimal digits. Every file carries it.
        commit: number of this commit.
        parent: number of the commit that it follows, or None.
        step: the caller's step number, or None.
        name: the caller's name for it, or None.
        time: ISO 8601, UTC.
        spec: describes the table; plain JSON, of which only `rows` is looked at here.
        record_bytes: of each record, without its CRC.
        steps: steps of the rule so far.
        skipped_steps: steps without any row.
        count: rows that have records.
        base: chunks in order of their ids, whose ranges do not overlap.
        delta: logs; a record in a later one wins.
        history: of the rule.
    """

    uuid: str
    commit: int
    parent: int | None
    step: int | None
    name: str | None
    time: str
    spec: dict[str, Any]
    record_bytes: int
    steps: int
    skipped_steps: int
    count: int
    base: tuple[RunFile, ...] = ()
    delta: tuple[RunFile, ...] = ()
    history: tuple[HistoryFile, ...] = ()

    def to_bytes(self) -> bytes:
        """Return the bytes of its file."""
        body = {"format": FORMAT} | {field.name: getattr(self, field.name) for field in fields(self)}
        for key in _KINDS:
            body[key] = [vars(entry) for entry in getattr(self, key)]
        line = json.dumps(body, sort_keys=True, allow_nan=False, separators=(",", ":")).encode("ascii")
        return line + b"\n" + hashlib.sha256(line).hexdigest().encode("ascii") + b"\n"

    @classmethod
    def parse(cls, data: bytes, where: str) -> Manifest:
        """Return the manifest of a file's bytes. Whatever they are, nothing large is allocated for them.

        Raises:
            CorruptTableError: they are not what `to_bytes` makes; the message names `where`.
            NewerFormatError: they are of a newer format.
        """
        body = _load(_checked_line(data, where), where)
        version = body.pop("format", None)
        if type(version) is int and version > FORMAT:
            raise NewerFormatError(
                f"{where} is of format {reprlib.repr(version)}: this release reads formats up to {FORMAT}. "
                "Install a newer embedrock."
            )
        if type(version) is not int or version < UNMARKED:
            raise damaged(where, f"`format` {UNMARKED} to {FORMAT}", reprlib.repr(version))
        _check(body, _FIELDS, where, "the manifest")
        for key, kind in _KINDS.items():
            checks = _HISTORY if kind is HistoryFile else _UNMARKED_ENTRY if version == UNMARKED else _ENTRY
            body[key] = tuple(_entry(item, kind, checks, where, key) for item in body[key])
        manifest = cls(**body)
        _check_files(manifest, where)
        return manifest

    @property
    def rows(self) -> int | None:
        """Number of rows of the table, None for open ids."""
        return self.spec.get("rows")

    def check_spec(self, rows: int | None, record_bytes: int, where: str) -> None:
        """Raise `CorruptTableError` unless its files are those of a table of `rows` rows (None: open ids).

        A record of a row that the table does not have would be written outside of its memory.
        """
        entries = (*self.base, *self.delta)
        if record_bytes != self.record_bytes:
            raise damaged(where, f"records of {record_bytes} bytes, as `spec` says", self.record_bytes)
        if rows is not None and any(entry.lo < 0 or entry.hi > rows for entry in entries):
            low, high = min(entry.lo for entry in entries), max(entry.hi for entry in entries)
            raise damaged(where, f"ids in [0, {rows}), as `spec` says", f"some in [{low}, {high})")


def path_of(folder: str, number: int) -> str:
    """Return where the manifest of a commit lies."""
    return f"{folder}/manifest/{number:010d}.json"


def numbers(system: System, folder: str) -> list[int]:
    """Return the numbers of the commits whose manifest is in a table's folder, ascending.

    Raises:
        CorruptTableError: a file is in the place of the folder of manifests.
    """
    where = f"{folder}/manifest"
    try:
        names = map(_NAME.fullmatch, system.listdir(where))
    except NotADirectoryError as error:
        raise damaged(where, "a folder", "a file") from error
    return sorted(int(name[1]) for name in names if name)


def read(system: System, folder: str, number: int) -> Manifest:
    """Return the manifest of a commit.

    Raises:
        CorruptTableError: it is missing or damaged.
        NewerFormatError: it is of a newer format.
    """
    where = path_of(folder, number)
    try:
        data = read_whole(system, where, MAX_BYTES)
    except FileNotFoundError as error:
        raise MissingFileError(f"{where} is missing: there is no commit {number}. {REMEDY}") from error
    except IsADirectoryError as error:
        raise damaged(where, "a file", "a folder") from error
    manifest = Manifest.parse(data, where)
    if manifest.commit != number:
        raise damaged(where, f"commit {number}", f"commit {manifest.commit}")
    return manifest


def publish(system: System, folder: str, manifest: Manifest) -> None:
    """Make a commit the newest of its table: it is there whole and durably, or not at all.

    Raises:
        FileExistsError: another writer has published this number.
        OSError: it could not be written. Where only the folder could not be synced, it may be there nevertheless.
    """
    where = path_of(folder, manifest.commit)
    data = manifest.to_bytes()
    Manifest.parse(data, where)  # what cannot be read back is a bug, and must not become the table
    write_whole(system, f"{folder}/manifest/.{manifest.commit:010d}.tmp", data, link_to=where)


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
    """Return the object that a line of JSON holds."""
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


class _Check(NamedTuple):
    """What a field must be, as a function and in words."""

    holds: Callable[[Any], bool]
    expected: str


def _whole(low: int, below: int) -> _Check:
    return _Check(lambda value: type(value) is int and low <= value < below, f"a whole number in [{low}, {below})")


def _text(pattern: re.Pattern[str], expected: str) -> _Check:
    return _Check(lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None, expected)


def _or_null(check: _Check) -> _Check:
    return _Check(lambda value: value is None or check.holds(value), f"{check.expected}, or null")


def is_name(value: Any) -> bool:
    """Return whether a commit can have this name."""
    return isinstance(value, str) and 0 < len(value) <= 100 and value.isprintable()


def _is_time(value: Any) -> bool:
    try:
        return isinstance(value, str) and _TIME.fullmatch(value) is not None and bool(datetime.fromisoformat(value))
    except ValueError:  # a month 13
        return False


_LIST = _Check(lambda value: isinstance(value, list), "a list")
_FIELDS = {
    "uuid": _text(re.compile("[0-9a-f]{32}"), "32 hexadecimal digits"),
    "commit": _whole(0, MAX_COMMIT),
    "parent": _or_null(_whole(0, MAX_COMMIT)),
    "step": _or_null(_whole(-(2**63), 2**63)),
    "name": _or_null(_Check(is_name, "1 to 100 printable characters")),
    "time": _Check(_is_time, "a time in UTC (ISO 8601)"),
    "spec": _Check(lambda value: isinstance(value, dict), "an object"),
    "record_bytes": _whole(1, MAX_RECORD_BYTES),
    "steps": _whole(0, MAX_STEPS),
    "skipped_steps": _whole(0, MAX_STEPS),
    "count": _whole(0, 2**63),
    "base": _LIST,
    "delta": _LIST,
    "history": _LIST,
}
_FILE_FIELDS = {
    "file": _text(_FILE, "a path below base/, delta/ or history/"),
    "size": _whole(0, 2**63),
}
_UNMARKED_ENTRY = _FILE_FIELDS | {
    "count": _whole(1, MAX_COUNT),
    "index": _Check(lambda value: isinstance(value, str) and value in KINDS, f"one of {', '.join(KINDS)}"),
    "lo": _whole(-(2**63), 2**63),
    "hi": _whole(-(2**63), 2**63 + 1),
    "index_crc": _whole(0, 2**32),
}
_ENTRY = _UNMARKED_ENTRY | {"salt": _or_null(_whole(0, 2**32))}
_HISTORY = _FILE_FIELDS | {"crc": _whole(0, 2**32), "count": _whole(0, MAX_COUNT)}
_KINDS = {"base": RunFile, "delta": RunFile, "history": HistoryFile}


def _check(values: Any, checks: dict[str, _Check], where: str, subject: str) -> None:
    """Refuse values that are not an object of just these fields."""
    if not isinstance(values, dict) or values.keys() != checks.keys():
        got = sorted(values) if isinstance(values, dict) else values
        raise damaged(where, f"{subject} with {', '.join(sorted(checks))}", reprlib.repr(got))
    for name, check in checks.items():
        if not check.holds(values[name]):
            raise damaged(where, f"`{name}` of {subject} to be {check.expected}", reprlib.repr(values[name]))


def _entry(values: Any, kind: type, checks: dict[str, _Check], where: str, key: str) -> Any:
    _check(values, checks, where, f"an entry of `{key}`")
    if not values["file"].startswith(f"{key}/"):
        raise damaged(where, f"a file of `{key}` below {key}/", values["file"])
    return kind(**values)


def _check_files(manifest: Manifest, where: str) -> None:
    """Refuse entries that cannot be true, or not together."""
    for entry in (*manifest.base, *manifest.delta):
        _check_entry(entry, manifest.record_bytes, where)
    for entry in manifest.delta:
        if entry.index != "ids":
            raise damaged(where, f"an index of ids of {entry.file}, as every log has", repr(entry.index))
    for before, after in pairwise(manifest.base):
        if before.hi > after.lo:
            raise damaged(where, f"{after.file} to start at {before.hi} or above", after.lo)
    files = [entry.file for entry in (*manifest.base, *manifest.delta, *manifest.history)]
    if len(set(files)) != len(files):
        raise damaged(where, "each file once", f"{len(files) - len(set(files))} again")
    if len(manifest.history) > 1:
        raise damaged(where, "one history or none", len(manifest.history))
    low = sum(entry.count for entry in manifest.base)
    high = low + sum(entry.count for entry in manifest.delta)
    if not low <= manifest.count <= high:
        raise damaged(where, f"`count` in [{low}, {high}], as its files say", manifest.count)


def _check_entry(entry: RunFile, record_bytes: int, where: str) -> None:
    span, size = entry.hi - entry.lo, run_bytes(record_bytes, entry)
    if span <= 0:
        raise damaged(where, f"lo < hi of {entry.file}", f"{entry.lo}, {entry.hi}")
    distinct = entry.index != "ids" or entry.file.startswith("base/")
    if (distinct and entry.count > span) or (entry.index == "full" and entry.count != span):
        raise damaged(where, f"{entry.file} to have records for {counted(span, 'id')}", entry.count)
    if entry.size != size:
        raise damaged(where, f"{entry.file} of {size} bytes, as its records take", entry.size)
