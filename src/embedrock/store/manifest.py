"""Manifests: the content of one commit. Publishing one is the only atomic operation, and parsing trusts no input."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from embedrock.errors import counted
from embedrock.kernels.keys import PART_BITS
from embedrock.store import publication, publishing
from embedrock.store.publication import Publication
from embedrock.store.publishing import (
    COMMIT,
    LIST,
    NUMBER,
    OBJECT,
    BaseManifest,
    FieldCheck,
    check_fields,
    or_null,
    text,
    whole,
)
from embedrock.store.segments import FORMAT, GOING, KINDS, UNMARKED, SegmentEntry, damaged, run_bytes

MAX_STEPS = 1 << 62  # far below 2^63, so that sums do not overflow
MAX_RECORD_BYTES = 1 << 30
MAX_COUNT = 1 << 40  # records of a file: the lower part of a location
POLICIES = {"admission", "eviction"}  # keys in the spec of a table with dynamic rows
GROUP_FORMAT = 4  # for manifests of groups
FOLDED_FORMAT = 5  # for tables alone whose segments contain logs that the commit names
COUNTS_FORMAT = 6  # for a history in several files, and for groups with dynamic rows
FORGOTTEN_FORMAT = 7  # for tombstones, and for rollbacks
PUBLISHED_FORMAT = 8  # for published folders, and no others
SPEC_FORMAT = 9  # for tables with one of `NEW_KEYS` in the spec
NEW_KEYS = {"segments", "frozen"}
MAX_HISTORY = 64  # files of a history
MAX_PARTS = 1 << (63 - PART_BITS)  # members that a pool may have had: each has a range of keys, so that it may grow
KEYS = 1 << 63  # all keys are less
_FILE = re.compile(r"(base|delta|history)(/[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}){1,2}", re.ASCII)


@dataclass(frozen=True)
class HistoryFile:
    """Entry of a file of step history in a manifest.

    Attributes:
        file: path relative to the table's folder.
        size: bytes of the whole file.
        crc: CRC-32 of the whole file.
        count: number of steps in it.
    """

    file: str
    size: int
    crc: int
    count: int


@dataclass(frozen=True)
class StoreEntry:
    """Entry of one pool in a manifest: the content of one record store in a commit.

    Attributes:
        uuid: id of the table or group.
        commit: number of the commit.
        record_bytes: bytes of a record, without its CRC.
        rows: ids lie in ``[0, rows)``. None: any int64.
        count: number of records.
        base: sorted segments in order of ids, without overlap.
        delta: logs. A record in a later log wins.
        parts: number of members that a pool has ever had. None: the records of one table.
        dropped: numbers of a pool's dropped members. Some of their records may remain.
    """

    uuid: str
    commit: int
    record_bytes: int
    rows: int | None
    count: int
    base: tuple[SegmentEntry, ...] = ()
    delta: tuple[SegmentEntry, ...] = ()
    parts: int | None = None
    dropped: tuple[int, ...] = ()


@dataclass(frozen=True)
class TableEntry:
    """Entry of one table in a manifest.

    Attributes:
        name: the table's name. "": a table alone.
        pool: number of the pool with its records.
        part: its number in the pool: the key of a row is ``(part << 44) + id``. None: its own pool, where keys are ids.
        spec: description of the table as plain JSON. Only `rows` is read here.
        steps: steps of the rule so far.
        skipped_steps: steps without any row.
        count: number of records.
        history: files of step history.
    """

    name: str
    pool: int
    part: int | None
    spec: dict[str, Any]
    steps: int
    skipped_steps: int
    count: int
    history: tuple[HistoryFile, ...] = ()

    def check_spec(self, rows: int | None, record_bytes: int, content: StoreEntry, where: str) -> None:
        """Raise `CorruptTableError` unless its pool fits a table of `rows` rows. None: open ids.

        A record of a row outside the table would be written outside its memory.
        """
        entries = (*content.base, *content.delta)
        if record_bytes != content.record_bytes:
            said = "`spec` says" if self.part is None else f"{self.name!r} has"
            raise damaged(where, f"records of {record_bytes} bytes, as {said}", content.record_bytes)
        if self.part is not None:
            if rows is None or rows > 1 << PART_BITS:
                raise damaged(where, f"at most 2^{PART_BITS} rows of {self.name!r}, whose pool has others", rows)
        elif rows is not None and any(entry.lo < 0 or entry.hi > rows for entry in entries):
            low, high = min(entry.lo for entry in entries), max(entry.hi for entry in entries)
            raise damaged(where, f"ids in [0, {rows}), as `spec` says", f"some in [{low}, {high})")


@dataclass(frozen=True)
class Manifest(BaseManifest):
    """Manifest of one commit of a group, or of a table alone.

    A table alone is the only member, with the name "" and a pool of its own. Its file has the fields of both entries.

    Attributes:
        step: the caller's step number, or None.
        name: the caller's tag, or None.
        time: ISO 8601, UTC.
        pools: entries of the pools. A pool has the records of members with one record layout.
        members: entries of the tables.
        origin: the commit whose content this one has, after a rollback, or a compaction of one. None: its own content.
        forgotten: files of `Tombstones` since the oldest retained commit. Each `count` is the last commit in the file.
        published: of a published folder: what its tables were published from.
    """

    step: int | None
    name: str | None
    time: str
    pools: tuple[StoreEntry, ...] = ()
    members: tuple[TableEntry, ...] = ()
    origin: int | None = None
    forgotten: tuple[HistoryFile, ...] = ()
    published: Publication = field(default_factory=Publication)

    def body(self) -> dict[str, Any]:
        body = super().body()
        if self.is_group:
            body["pools"] = [{key: getattr(pool, key) for key in _POOL} for pool in self.pools]
        else:
            (pool,), (member,) = body.pop("pools"), body.pop("members")
            body |= {key: getattr(member, key) for key in _TABLE} | {key: getattr(pool, key) for key in _RECORDS}
        lacking = {} if self.published.chain else _PUBLISHED
        lacking = lacking | _FORGOTTEN if self.format < FORGOTTEN_FORMAT else lacking
        return {key: value for key, value in body.items() if key not in lacking}

    @property
    def is_group(self) -> bool:
        return [member.name for member in self.members] != [""]

    @property
    def format(self) -> int:
        if self.published.chain:
            return PUBLISHED_FORMAT
        if any(member.spec.keys() & NEW_KEYS for member in self.members):
            return SPEC_FORMAT
        if self.origin is not None or self.forgotten:
            return FORGOTTEN_FORMAT
        comes_and_goes = any(member.spec.keys() & POLICIES for member in self.members)
        if self.is_group:
            return COUNTS_FORMAT if comes_and_goes else GROUP_FORMAT
        if len(self.history) > 1:
            return COUNTS_FORMAT
        (pool,) = self.pools
        if any(entry.folded for entry in pool.base):
            return FOLDED_FORMAT
        return GOING if comes_and_goes or any(entry.gone for entry in pool.delta) else FORMAT

    @property
    def files(self) -> list[str]:
        runs = [entry.file for pool in self.pools for entry in (*pool.base, *pool.delta)]
        dense = self.published.dense
        return [*runs, *(part.file for part in self.histories), *([dense.file] if dense else [])]

    @property
    def count(self) -> int:
        return sum(member.count for member in self.members)

    @property
    def history(self) -> tuple[HistoryFile, ...]:
        """Return the files of the members' step histories."""
        return tuple(part for member in self.members for part in member.history)

    @property
    def histories(self) -> tuple[HistoryFile, ...]:
        """Return the files that have no records."""
        return (*self.history, *self.forgotten)

    @property
    def content_commit(self) -> int:
        """Return the number of the commit that created its content."""
        return self.commit if self.origin is None else self.origin

    def after(self, commit: int, pools: Sequence[StoreEntry], changes: Mapping[str, Any]) -> Manifest:
        """Return the manifest of a later commit, with changed fields and new entries of its pools."""
        made = replace(self, **{"commit": commit, "parent": commit - 1, **changes})
        return replace(made, pools=_of_members(pools, made))


def _of_members(pools: Sequence[StoreEntry], manifest: Manifest) -> tuple[StoreEntry, ...]:
    """Return the entries of pools, with the fields that follow from their members."""
    made = list[StoreEntry]()
    for number, pool in enumerate(pools):
        members = [member for member in manifest.members if member.pool == number]
        rows = KEYS if pool.parts is not None else members[0].spec.get("rows") if members else None
        made.append(replace(pool, commit=manifest.commit, rows=rows, count=sum(member.count for member in members)))
    return tuple(made)


def parse(data: bytes, where: str) -> Manifest:
    """Return the manifest of a file's bytes. Malformed bytes cause no large allocation.

    Raises:
        CorruptTableError: the bytes differ from all output of `to_bytes`. The message names `where`.
        NewerFormatError: the format is newer.
    """
    version, body = publishing.parse(data, where, range(UNMARKED, SPEC_FORMAT + 1))
    is_group = version in (GROUP_FORMAT, PUBLISHED_FORMAT) or (version >= COUNTS_FORMAT and "members" in body)
    checks = _GROUP_FIELDS if is_group else _FIELDS
    checks = checks | _FORGOTTEN if version >= FORGOTTEN_FORMAT else checks
    check_fields(body, checks | _PUBLISHED if version == PUBLISHED_FORMAT else checks, where, "the manifest")
    if version == PUBLISHED_FORMAT:
        body["published"] = publication.parse(body["published"], where)
    if not is_group:
        body["members"] = [{"name": "", "pool": 0, "part": None} | {key: body.pop(key) for key in _TABLE}]
        body["pools"] = [{"parts": None, "dropped": []} | {key: body.pop(key) for key in _RECORDS}]
    else:
        for values in body["members"]:
            check_fields(values, _MEMBER, where, "an entry of `members`")
    members = tuple(_member(values, version, where) for values in body["members"])
    pools = tuple(_pool(values, body, version, where) for values in body["pools"])
    plain = Manifest(**_with_forgotten(body, where) | {"pools": (), "members": members})
    manifest = replace(plain, pools=_of_members(pools, plain))
    _check_members(manifest, version, where)
    return manifest


TABLE = publishing.FolderKind("table", 'er.open(path, mode="r")', "manifest", ("base", "delta", "history"), parse)
path_of, numbers, read, publish = TABLE.path_of, TABLE.numbers, TABLE.read, TABLE.publish
PUBLISHED = publishing.FolderKind(
    "published folder", "er.Subscriber(folder)", TABLE.inside, (*TABLE.data, "dense"), parse, is_linked=False
)


def is_name(value: Any) -> bool:
    """Return whether a value can be a tag."""
    return isinstance(value, str) and 0 < len(value) <= 100 and value.isprintable()


_COMMIT = COMMIT | {
    "step": or_null(whole(-(2**63), 2**63)),
    "name": or_null(FieldCheck(is_name, "1 to 100 printable characters")),
}
_TABLE = {
    "spec": OBJECT,
    "steps": whole(0, MAX_STEPS),
    "skipped_steps": whole(0, MAX_STEPS),
    "count": whole(0, 2**63),
    "history": LIST,
}
_RECORDS = {"record_bytes": whole(1, MAX_RECORD_BYTES), "base": LIST, "delta": LIST}
_FIELDS = _COMMIT | _TABLE | _RECORDS
_GROUP_FIELDS = _COMMIT | {"pools": LIST, "members": LIST}
_FORGOTTEN = {"origin": or_null(NUMBER), "forgotten": LIST}
_PUBLISHED = {"published": OBJECT}
_POOL = _RECORDS | {"parts": or_null(whole(0, MAX_PARTS + 1)), "dropped": LIST}
_MEMBER = _TABLE | {
    "name": FieldCheck(lambda value: isinstance(value, str) and bool(value), "a text that is not empty"),
    "pool": whole(0, MAX_PARTS),
    "part": or_null(whole(0, MAX_PARTS)),
}
_FILE_FIELDS = {
    "file": text(_FILE, "a path below base/, delta/ or history/"),
    "size": whole(0, 2**63),
}
_UNMARKED_ENTRY = _FILE_FIELDS | {
    "count": whole(1, MAX_COUNT),
    "index": FieldCheck(lambda value: isinstance(value, str) and value in KINDS, f"one of {', '.join(KINDS)}"),
    "lo": whole(-(2**63), 2**63),
    "hi": whole(-(2**63), 2**63 + 1),
    "index_crc": whole(0, 2**32),
}
_ENTRY = _UNMARKED_ENTRY | {"salt": or_null(whole(0, 2**32))}
_GONE = {"count": whole(0, MAX_COUNT), "gone": whole(1, MAX_COUNT)}  # of a log with tombstones
_FOLDED = {"folded": whole(1, MAX_COUNT)}  # of a sorted segment that contains logs
_MORE = {("delta", "gone"): (GOING, _GONE), ("base", "folded"): (GROUP_FORMAT, _FOLDED)}  # fields since a format
_HISTORY = _FILE_FIELDS | {"crc": whole(0, 2**32), "count": whole(0, MAX_COUNT)}
_KINDS = {"base": SegmentEntry, "delta": SegmentEntry, "history": HistoryFile}


def _more(values: Any, key: str, version: int) -> dict[str, FieldCheck]:
    """Return the checks of an entry's optional fields."""
    found: dict[str, FieldCheck] = {}
    for (of, name), (first, checks) in _MORE.items():
        if of == key and version >= first and isinstance(values, dict) and name in values:
            found |= checks
    return found


def _with_forgotten(body: dict[str, Any], where: str) -> dict[str, Any]:
    if (origin := body.get("origin")) is not None and origin >= body["commit"]:
        raise damaged(where, f"`origin` below {body['commit']}", origin)
    forgotten = _entries(body.get("forgotten", []), FORGOTTEN_FORMAT, where, "history")
    if len(forgotten) > MAX_HISTORY:
        raise damaged(where, f"at most {counted(MAX_HISTORY, 'file')} of `forgotten`", len(forgotten))
    return {**body, "forgotten": forgotten}


def _entry(values: Any, kind: type, checks: dict[str, FieldCheck], where: str, key: str) -> Any:
    check_fields(values, checks, where, f"an entry of `{key}`")
    if not values["file"].startswith(f"{key}/"):
        raise damaged(where, f"a file of `{key}` below {key}/", values["file"])
    return kind(**values)


def _entries(values: Any, version: int, where: str, key: str) -> tuple[Any, ...]:
    kind = _KINDS[key]
    checks = _HISTORY if kind is HistoryFile else _UNMARKED_ENTRY if version == UNMARKED else _ENTRY
    return tuple(_entry(each, kind, checks | _more(each, key, version), where, key) for each in values)


def _member(values: Any, version: int, where: str) -> TableEntry:
    return TableEntry(**{**values, "history": _entries(values["history"], version, where, "history")})


def _pool(values: Any, body: Mapping[str, Any], version: int, where: str) -> StoreEntry:
    check_fields(values, _POOL, where, "an entry of `pools`")
    dropped, parts = values["dropped"], values["parts"]
    is_number = whole(0, parts or 0)
    if not all(map(is_number.holds, dropped)) or sorted(set(dropped)) != dropped:
        raise damaged(where, f"`dropped` of a pool: numbers that ascend, below {parts or 0}", dropped)
    files = {key: _entries(values[key], version, where, key) for key in ("base", "delta")}
    made = {**values, **files, "dropped": tuple(dropped), "rows": None, "count": 0}
    return StoreEntry(uuid=body["uuid"], commit=body["commit"], **made)


def _check_members(manifest: Manifest, version: int, where: str) -> None:
    _check_distinct([member.name for member in manifest.members], where, "name of a member")
    _check_distinct([(member.pool, member.part) for member in manifest.members], where, "part of a pool")
    for member in manifest.members:
        if member.pool >= len(manifest.pools):
            raise damaged(where, f"the pool of {member.name!r} below {len(manifest.pools)}", member.pool)
        pool, part = manifest.pools[member.pool], member.part
        if (part is None) != (pool.parts is None) or (part is not None and part >= (pool.parts or 0)):
            raise damaged(where, f"the part of {member.name!r} below {pool.parts}", part)
        if part in pool.dropped:
            raise damaged(where, f"{member.name!r} not to be dropped", f"part {part} in `dropped`")
        # Only dynamic rows have several files, with changes.
        most = MAX_HISTORY if version >= COUNTS_FORMAT and member.spec.keys() & POLICIES else 1
        if len(member.history) > most:
            raise damaged(where, f"at most {counted(most, 'file')} of `history`", len(member.history))
    for pool in manifest.pools:
        _check_content(pool, where)
    _check_distinct(manifest.files, where, "file")


def _check_distinct(values: Sequence[Any], where: str, what: str) -> None:
    if len(set(values)) != len(values):
        raise damaged(where, f"each {what} once", f"{len(values) - len(set(values))} again")


def _check_content(content: StoreEntry, where: str) -> None:
    for entry in (*content.base, *content.delta):
        _check_entry(entry, content.record_bytes, where)
        if content.parts is not None and entry.lo < 0:
            raise damaged(where, f"keys of {entry.file} of 0 or above", entry.lo)
    for entry in content.delta:
        if entry.index != "ids":
            raise damaged(where, f"an index of ids of {entry.file}, as every log has", repr(entry.index))
    for entry in content.base:
        if entry.folded > len(content.delta):
            raise damaged(where, f"`folded` of {entry.file} up to {len(content.delta)}", entry.folded)
    for before, after in pairwise(content.base):
        if before.hi > after.lo:
            raise damaged(where, f"{after.file} to start at {before.hi} or above", after.lo)
    based, gone = sum(entry.count for entry in content.base), sum(entry.gone for entry in content.delta)
    low, high = max(0, based - gone), based + sum(entry.count for entry in content.delta)
    low = low if content.parts is None else 0  # records of dropped members may remain
    if not low <= content.count <= high:
        raise damaged(where, f"`count` in [{low}, {high}], as its files say", content.count)


def _check_entry(entry: SegmentEntry, record_bytes: int, where: str) -> None:
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
