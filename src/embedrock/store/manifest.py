"""`Manifest`: what one commit consists of. Publishing is the only atomic act there is; parsing trusts nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from embedrock.machine.vfs import System
from embedrock.store import publishing
from embedrock.store.publishing import LIST, NUMBER, TIME, UUID, Check, check_fields, or_null, text, whole
from embedrock.store.runs import FORMAT, KINDS, NEWEST, UNMARKED, RunFile, damaged, run_bytes
from embedrock.wording import counted

MAX_STEPS = 1 << 62  # so that nobody comes to 2^63
MAX_RECORD_BYTES = 1 << 30
MAX_COUNT = 1 << 40  # records of a file: the lower part of a location
POLICIES = {"admission", "eviction"}  # in the spec of a table whose rows come and go
_FILE = re.compile(r"(base|delta|history)(/[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}){1,2}", re.ASCII)


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
        body = {"format": self.format} | {field.name: getattr(self, field.name) for field in fields(self)}
        for key in _KINDS:
            body[key] = [_described(entry) for entry in getattr(self, key)]
        return publishing.to_bytes(body)

    @classmethod
    def parse(cls, data: bytes, where: str) -> Manifest:
        """Return the manifest of a file's bytes. Whatever they are, nothing large is allocated for them.

        Raises:
            CorruptTableError: they are not what `to_bytes` makes; the message names `where`.
            NewerFormatError: they are of a newer format.
        """
        version, body = publishing.parse(data, where, range(UNMARKED, NEWEST + 1))
        check_fields(body, _FIELDS, where, "the manifest")
        for key, kind in _KINDS.items():
            checks = _HISTORY if kind is HistoryFile else _UNMARKED_ENTRY if version == UNMARKED else _ENTRY
            checks_of = {True: _LOG_ENTRY, False: checks}
            is_new = key == "delta" and version == NEWEST
            body[key] = tuple(_entry(e, kind, checks_of[is_new and _names_gone(e)], where, key) for e in body[key])
        manifest = cls(**body)
        _check_files(manifest, where)
        return manifest

    @property
    def format(self) -> int:
        """The oldest format that has all of it."""
        comes_and_goes = self.spec.keys() & POLICIES or any(entry.gone for entry in self.delta)
        return NEWEST if comes_and_goes else FORMAT

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
    return publishing.path_of(_inside(folder), number)


def numbers(system: System, folder: str) -> list[int]:
    """Return the numbers of the commits whose manifest is in a table's folder, ascending.

    Raises:
        CorruptTableError: a file is in the place of the folder of manifests.
    """
    return publishing.numbers(system, _inside(folder))


def read(system: System, folder: str, number: int) -> Manifest:
    """Return the manifest of a commit.

    Raises:
        CorruptTableError: it is missing or damaged.
        NewerFormatError: it is of a newer format.
    """
    where, data = path_of(folder, number), publishing.read(system, _inside(folder), number)
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
    data = manifest.to_bytes()
    Manifest.parse(data, path_of(folder, manifest.commit))  # what cannot be read back is a bug, and must not be
    publishing.publish(system, _inside(folder), manifest.commit, data)


def _inside(folder: str) -> str:
    return f"{folder}/manifest"


def is_name(value: Any) -> bool:
    """Return whether a commit can have this name."""
    return isinstance(value, str) and 0 < len(value) <= 100 and value.isprintable()


_FIELDS = {
    "uuid": UUID,
    "commit": NUMBER,
    "parent": or_null(NUMBER),
    "step": or_null(whole(-(2**63), 2**63)),
    "name": or_null(Check(is_name, "1 to 100 printable characters")),
    "time": TIME,
    "spec": Check(lambda value: isinstance(value, dict), "an object"),
    "record_bytes": whole(1, MAX_RECORD_BYTES),
    "steps": whole(0, MAX_STEPS),
    "skipped_steps": whole(0, MAX_STEPS),
    "count": whole(0, 2**63),
    "base": LIST,
    "delta": LIST,
    "history": LIST,
}
_FILE_FIELDS = {
    "file": text(_FILE, "a path below base/, delta/ or history/"),
    "size": whole(0, 2**63),
}
_UNMARKED_ENTRY = _FILE_FIELDS | {
    "count": whole(1, MAX_COUNT),
    "index": Check(lambda value: isinstance(value, str) and value in KINDS, f"one of {', '.join(KINDS)}"),
    "lo": whole(-(2**63), 2**63),
    "hi": whole(-(2**63), 2**63 + 1),
    "index_crc": whole(0, 2**32),
}
_ENTRY = _UNMARKED_ENTRY | {"salt": or_null(whole(0, 2**32))}
_LOG_ENTRY = _ENTRY | {"count": whole(0, MAX_COUNT), "gone": whole(1, MAX_COUNT)}  # a log that names ids as gone
_HISTORY = _FILE_FIELDS | {"crc": whole(0, 2**32), "count": whole(0, MAX_COUNT)}
_KINDS = {"base": RunFile, "delta": RunFile, "history": HistoryFile}


def _names_gone(values: Any) -> bool:
    return isinstance(values, dict) and "gone" in values


def _described(entry: RunFile | HistoryFile) -> dict[str, Any]:
    return {name: value for name, value in vars(entry).items() if name != "gone" or value}


def _entry(values: Any, kind: type, checks: dict[str, Check], where: str, key: str) -> Any:
    check_fields(values, checks, where, f"an entry of `{key}`")
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
    based, gone = sum(entry.count for entry in manifest.base), sum(entry.gone for entry in manifest.delta)
    low, high = max(0, based - gone), based + sum(entry.count for entry in manifest.delta)
    if not low <= manifest.count <= high:
        raise damaged(where, f"`count` in [{low}, {high}], as its files say", manifest.count)


def _check_entry(entry: RunFile, record_bytes: int, where: str) -> None:
    span, size = entry.hi - entry.lo, run_bytes(record_bytes, entry)
    if span <= 0:
        raise damaged(where, f"lo < hi of {entry.file}", f"{entry.lo}, {entry.hi}")
    if entry.gone > span:
        raise damaged(where, f"{entry.file} to name at most {counted(span, 'id')} as gone", entry.gone)
    distinct = entry.index != "ids" or entry.file.startswith("base/")
    if (distinct and entry.count > span) or (entry.index == "full" and entry.count != span):
        raise damaged(where, f"{entry.file} to have records for {counted(span, 'id')}", entry.count)
    if entry.size != size:
        raise damaged(where, f"{entry.file} of {size} bytes, as its records take", entry.size)
