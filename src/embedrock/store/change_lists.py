"""`ChangeList`: the ids of rows that differ between two commits, in a file beside the later one.

A file has an object as manifests do, and then the ids of each table. No manifest names it, so other releases read and
write the table. A list names its two manifests by their SHA-256. So the lists of a folder form a chain, which ends at a
commit without a list. docs/format.md has the format.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from embedrock.errors import EmbedrockError, HistoryDroppedError
from embedrock.io.vfs import System, read_whole, write_whole
from embedrock.store import publishing
from embedrock.store.forgotten import old_name
from embedrock.store.publishing import NUMBER, SHA, UUID, FieldCheck, check_fields, or_null, whole
from embedrock.store.segments import damaged

FOLDER = "changes"
DRAFT = f"{FOLDER}/.tmp"  # a joined list that has no name yet
FORMAT = 1
BLOCK_IDS = 1024  # ids whose differences have one width
WIDTHS = (1, 2, 4, 8)
_WIDTHS, _ENDS = np.array(WIDTHS, np.uint8), np.array([1 << 8 * width for width in WIDTHS[:3]], np.uint64)
MAX_BYTES = 1 << 33
JOINED = 16  # lists that become one ...
SINGLE = 2 * JOINED  # ... once there are as many of one commit
_LEAST_BYTES, _SHARE = 1 << 20, 64  # of lists older than the oldest commit: 1/64 of the table's, or as many
_NAME = re.compile(r"(\d{10})-(\d{10})-(\d+)(f?)-([0-9a-f]{8})-\d+\.ids", re.ASCII)


ChangedIds = Mapping[str, np.ndarray | None]


class ChangeList(NamedTuple):
    """Ids of the rows that differ between two commits. Some of them may be equal in both.

    Attributes:
        uuid: of the folder.
        commit, since: numbers of the two commits.
        manifest, parent: the SHA-256 of their manifests.
        tables: ids by table name as of `commit`, int64 (n,), ascending. None: any row may differ. Tables without
            changes may be left out. The name of a table alone is "".
        renamed: pairs of names of members, old and new, in order.
        forgets: whether the ids of forgotten rows are in it.
    """

    uuid: str
    commit: int
    since: int
    manifest: str
    parent: str
    tables: ChangedIds
    renamed: tuple[tuple[str, str], ...] = ()
    forgets: bool = False

    def stem(self, nbytes: int) -> str:
        """Return the start of the name of its file, of `nbytes` bytes. A number follows, see `Folder.free_name`."""
        return f"{FOLDER}/{self.commit:010d}-{self.since:010d}-{nbytes}{'f' * self.forgets}"

    def to_bytes(self) -> bytes:
        coded = {name: b"" if ids is None else encode(ids) for name, ids in self.tables.items()}
        counts = [[name, None if ids is None else len(ids), len(coded[name])] for name, ids in self.tables.items()]
        payload = b"".join(coded.values())
        fields = {key: value for key, value in self._asdict().items() if key != "forgets"}
        return publishing.to_bytes({"format": FORMAT, **fields, "tables": counts, "crc": zlib.crc32(payload)}) + payload


class ListFile(NamedTuple):
    """File of a change list, as its name says."""

    commit: int
    since: int
    nbytes: int
    forgets: bool
    name: str

    @property
    def is_single(self) -> bool:
        """Return whether it is of one commit: lists are joined from the oldest on."""
        return self.since == self.commit - 1


def files_in(system: System, folder: str, uuid: str) -> list[ListFile]:
    """Return the files of change lists of a folder, the oldest first."""
    try:
        found = map(_NAME.fullmatch, system.listdir(f"{folder}/{FOLDER}"))
    except OSError:  # as in folders of older releases
        return []
    own = [one for one in found if one and one[5] == uuid[:8]]
    return sorted(ListFile(int(one[1]), int(one[2]), int(one[3]), bool(one[4]), f"{FOLDER}/{one[0]}") for one in own)


def read(system: System, folder: str, file: ListFile) -> ChangeList:
    """Return a change list.

    Raises:
        CorruptTableError: the file is damaged.
    """
    where = f"{folder}/{file.name}"
    made = parse(read_whole(system, where, MAX_BYTES), where)._replace(forgets=file.forgets)
    if (made.commit, made.since) != (file.commit, file.since):
        raise damaged(where, f"a list of commits {file.since} to {file.commit}", f"of {made.since} to {made.commit}")
    return made


def write(system: System, folder: str, name: str, data: bytes, joins: bool = False) -> None:
    """Write the file of a change list. The first one makes the folder.

    Its name becomes durable with the manifest, where the file system keeps the order of names. Elsewhere, a loss of
    power may take the list away.

    Args:
        joins: it replaces others of published commits, so that no crash may leave a part of it under its name.

    Raises:
        OSError: the disk failed.
    """
    if not system.exists(f"{folder}/{FOLDER}"):
        system.mkdir(f"{folder}/{FOLDER}")
        system.fsync_folder(folder)
    path = f"{folder}/{name}"
    if joins:
        write_whole(system, f"{folder}/{DRAFT}", [data], link_to=path)
    else:
        write_whole(system, path, [data], sync_name=False)


# ---------------------------------------------------------------- chains


def chain(system: System, folder: str, newest: tuple[str, int, str], since: int) -> list[ChangeList]:
    """Return the lists from a commit back to an earlier one, the newest first.

    The last list may begin before `since`, where several were joined.

    Args:
        newest: the folder's uuid, the commit's number, and the SHA-256 of its manifest.
        since: number of the earlier commit.

    Raises:
        HistoryDroppedError: the lists do not reach back so far.
    """
    uuid, commit, manifest = newest
    files, found = files_in(system, folder, uuid), list[ChangeList]()
    while commit > since:
        there = (_readable(system, folder, one) for one in files if one.commit == commit)
        made = next((one for one in there if one and (one.uuid, one.manifest) == (uuid, manifest)), None)
        if made is None:
            raise HistoryDroppedError(folder, since, commit)
        found.append(made)
        commit, manifest = made.since, made.parent
    return found


def _readable(system: System, folder: str, file: ListFile) -> ChangeList | None:
    """Return a change list. Return None if it is damaged, or its writer has just removed it."""
    try:
        return read(system, folder, file)
    except (EmbedrockError, OSError):
        return None


def ids_of(lists: Iterable[ChangeList], name: str) -> tuple[np.ndarray | None, int, str]:
    """Return the ids that lists of a chain, the newest first, name for a table.

    Returns:
        The ids, int64 (n,), ascending, or None: any row may differ. Then the commit of the oldest list used, and the
        table's name before that.
    """
    parts, reached = [np.empty(0, np.int64)], 0
    for one in lists:
        ids = one.tables.get(name, parts[0])
        if ids is None:
            return None, one.commit, name
        parts.append(ids)
        name, reached = old_name(name, one.renamed), one.since
    return (parts[1] if len(parts) == 2 else distinct(parts)), reached, name


def distinct(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Return the ids of some arrays, ascending, without repeats."""
    ids = np.concatenate([np.empty(0, np.int64), *parts])
    ids.sort()
    is_new = ids[1:] != ids[:-1]
    return ids if is_new.all() else ids[np.append(True, is_new)]


def joined(lists: list[ChangeList]) -> ChangeList:
    """Return one list of the commits of a chain, the newest first."""
    names = set[str]()
    for one in reversed(lists):
        for old, new in one.renamed:
            names = names - {old} | {new}
        names |= one.tables.keys()
    tables = {name: ids_of(lists, name)[0] for name in sorted(names)}
    renamed = tuple(pair for one in reversed(lists) for pair in one.renamed)
    last, forgets = lists[-1], any(one.forgets for one in lists)
    return lists[0]._replace(since=last.since, parent=last.parent, tables=tables, renamed=renamed, forgets=forgets)


def orphans(files: list[ListFile], newest: float = math.inf) -> list[ListFile]:
    """Return the files that no chain needs: parts of joined lists, and lists above the newest commit."""
    joined_to = max((file.commit for file in files if not file.is_single and file.commit <= newest), default=0)
    return [file for file in files if file.commit > newest or (file.is_single and file.commit <= joined_to)]


def superfluous(files: list[ListFile], oldest: int, table_bytes: int) -> list[ListFile]:
    """Return the files to remove: parts of joined lists, too many bytes of old lists, or forgotten rows.

    Args:
        files: of all lists, the oldest first.
        oldest: number of the oldest commit of the folder. Lists of later commits stay.
        table_bytes: bytes of the table's newest commit.
    """
    room, gone, removed = max(_LEAST_BYTES, table_bytes // _SHARE), False, orphans(files)
    for file in reversed(files):
        if file.commit > oldest or file in removed:
            continue
        room -= file.nbytes
        gone = gone or room < 0 or (file.forgets and file.commit < files[-1].commit)  # the chain ends here
        removed += [file] * gone
    return removed


# ---------------------------------------------------------------- bytes


def parse(data: bytes, where: str) -> ChangeList:
    """Return the change list of a file's bytes. Malformed bytes cause no large allocation.

    Raises:
        CorruptTableError: the bytes differ from all output of `to_bytes`. The message names `where`.
    """
    end = data.find(b"\n", data.find(b"\n") + 1) + 1
    _, body = publishing.parse(data[:end], where, range(FORMAT, FORMAT + 1))
    check_fields(body, _FIELDS, where, "a list of changes")
    payload, tables, start = memoryview(data)[end:], dict[str, np.ndarray | None](), 0
    crc, nbytes = zlib.crc32(payload), sum(size for *_, size in body["tables"])
    if (crc, nbytes) != (body["crc"], len(payload)) or body["since"] >= body["commit"]:
        raise damaged(where, f"ids with CRC-32 {body['crc']:#010x}, of commits in order", f"{crc:#010x}")
    for name, count, size in body["tables"]:
        part, start = payload[start : start + size], start + size
        tables[name] = None if count is None else decode(part, count, where)
    fields = {key: body[key] for key in ("uuid", "commit", "since", "manifest", "parent")}
    return ChangeList(**fields, tables=tables, renamed=tuple((old, new) for old, new in body["renamed"]))


def encode(ids: np.ndarray) -> bytes:
    """Return ascending ids as differences, of the least width for each block.

    The widths come first, a byte for each block, and then all differences of one byte, of two, of four and of eight.
    """
    if not len(ids):
        return b""
    steps = np.empty(-(-len(ids) // BLOCK_IDS) * BLOCK_IDS, np.uint64)
    steps[0], steps[1 : len(ids)], steps[len(ids) :] = ids[:1].view(np.uint64)[0], np.diff(ids.view(np.uint64)), 0
    widths = _WIDTHS[np.searchsorted(_ENDS, steps.reshape(-1, BLOCK_IDS).max(axis=1), side="right")]
    steps, of_each = steps[: len(ids)], widths.repeat(BLOCK_IDS)[: len(ids)]
    return b"".join([widths.tobytes(), *(steps[of_each == width].astype(f"<u{width}").tobytes() for width in WIDTHS)])


def decode(data: bytes | memoryview, count: int, where: str = "") -> np.ndarray:
    """Return the ids of `encode`, int64 (count,).

    Raises:
        CorruptTableError: the bytes are malformed. The message names `where`.
    """
    blocks = -(-count // BLOCK_IDS)
    if len(data) < max(blocks, count):  # so that no forged count takes more memory than the file
        raise damaged(where, f"at least {max(blocks, count)} bytes of {count} ids", len(data))
    widths = np.frombuffer(data[:blocks], np.uint8)
    of_each = widths.repeat(BLOCK_IDS)[:count]
    if not np.isin(widths, WIDTHS).all() or blocks + int(of_each.sum(dtype=np.int64)) != len(data):
        raise damaged(where, "differences of 1, 2, 4 or 8 bytes, and no more", "others")
    steps, start = np.empty(count, np.uint64), blocks
    for width in WIDTHS:
        here = of_each == width
        end = start + int(np.count_nonzero(here)) * width
        steps[here], start = np.frombuffer(data[start:end], f"<u{width}"), end
    ids = np.cumsum(steps, dtype=np.uint64).view(np.int64)
    if not np.all(ids[:-1] < ids[1:]):
        raise damaged(where, "ids that ascend", "others")
    return ids


def _is_table(value: Any) -> bool:
    is_three = isinstance(value, list) and len(value) == 3 and isinstance(value[0], str)
    return is_three and or_null(_SIZE).holds(value[1]) and _SIZE.holds(value[2])


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(name, str) for name in value)


_SIZE = whole(0, 2**63)
_FIELDS = {
    "uuid": UUID,
    "commit": NUMBER,
    "since": NUMBER,
    "manifest": SHA,
    "parent": SHA,
    "crc": whole(0, 2**32),
    "tables": FieldCheck(
        lambda value: isinstance(value, list) and all(map(_is_table, value)), "a list of names, counts and bytes"
    ),
    "renamed": FieldCheck(lambda value: isinstance(value, list) and all(map(_is_pair, value)), "a list of pairs"),
}
