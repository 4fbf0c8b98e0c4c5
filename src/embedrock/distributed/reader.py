"""`open_table`, and sharded tables as one, read only.

`ShardedBackend` has their records, `ShardedTableReader` their files and commits.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Unpack, overload

import numpy as np

from embedrock.admission.lifecycle import RowLifecycle
from embedrock.admission.moving import moved
from embedrock.batch.plan import NO_DIRECT, SlotIndex
from embedrock.distributed.commits import ShardCommit, ShardFolders, commits_of, last_of, layout_of, readable_of
from embedrock.distributed.owners import Shard
from embedrock.errors import (
    ArgumentError,
    CacheTooSmallError,
    CorruptTableError,
    HistoryDroppedError,
    TableFileError,
    UnsupportedError,
)
from embedrock.spec.description import check_same, describe_spec
from embedrock.spec.spec import Spec
from embedrock.storage.backend import Backend, RamLayout
from embedrock.storage.records import Records
from embedrock.store.record_store import distinct
from embedrock.store.table_folder import TableFolder
from embedrock.store.verify import Verification, verify_commits
from embedrock.system.arena import Arena
from embedrock.system.interrupts import held_back
from embedrock.system.log import tell
from embedrock.system.paths import AnyPath, local_path
from embedrock.system.scopes import on_failure
from embedrock.system.sizes import MAP, parse_bytes
from embedrock.table.changed_rows import ChangedRows, RowChanges
from embedrock.table.group import Group, asked
from embedrock.table.group import open_table as open_alone
from embedrock.table.options import OpenArguments, OpenOptions, shows
from embedrock.table.rows import TableState
from embedrock.table.storage import StorageManager
from embedrock.table.table import Table, rows_of

CONTENTS = ("rows", "dim", "dtype", "rule", "init", "seed")  # the same in all shards of one table
STAY = ("dim", "dtype", "init", "seed")  # the same for one table at all times: seeds distinguish tables


class ShardedBackend(Backend):
    """The records of a sharded table, read only: the location refuses changes. It copies those of a batch to an array.

    Args:
        spec: spec of the whole table.
        parts: the rows of each shard, by rank.
        subject: name of the table in error messages.
    """

    evicts = True

    def __init__(self, spec: Spec, parts: Sequence[TableState], subject: str) -> None:
        self._parts, self._shard = parts, Shard(0, len(parts), segments=spec.segments)
        super().__init__(spec, RamLayout(sum(part.tier.budget_bytes for part in parts), 0, direct=False), subject)

    def _allocated(self, placement: RamLayout) -> tuple[Arena, Records]:
        return Arena(0, self.subject), self._empty(0)

    @property
    def count(self) -> int:
        return sum(part.tier.count for part in self._parts)

    @property
    def bytes_used(self) -> int:
        return sum(part.tier.bytes_used for part in self._parts)

    @property
    def index(self) -> SlotIndex:
        return NO_DIRECT, np.zeros((1, 2), np.int64)  # a free entry: no id is here

    def find(self, ids: np.ndarray) -> np.ndarray:
        return np.full(len(ids), -1, np.int64)

    def bring(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        return self._bring_copies(ids)

    def read_through(self, ids: np.ndarray) -> tuple[Records, np.ndarray]:
        slots, found, taken = np.full(len(ids), -1, np.int64), self._empty(len(ids)), 0
        split = self._shard.split(ids)
        for part, places in zip(self._parts, split.places, strict=True):
            own = ids[places]
            records, here = _read_through(part.tier, own)
            places, here = np.arange(len(ids))[places][here >= 0], here[here >= 0]
            slots[places] = np.arange(taken, taken + len(here))
            found.bytes[taken : taken + len(here)] = records.bytes[here]
            taken += len(here)
        return found, slots

    def look_up(self, ids: np.ndarray, positions: np.ndarray, out: np.ndarray) -> np.ndarray:
        return self.find(ids)  # all are loaded

    def holds(self, ids: np.ndarray) -> np.ndarray:
        held, split = np.zeros(len(ids), bool), self._shard.split(ids)
        for part, places in zip(self._parts, split.places, strict=True):
            held[places] = part.tier.holds(ids[places])
        return held

    def id_batches(self, size: int) -> Iterator[np.ndarray]:
        for rank, part in enumerate(self._parts):
            for ids in part.tier.id_batches(size):
                if not self._shard._replace(rank=rank).owns(ids).all():
                    raise CorruptTableError(f"{part.subject} has rows that another part of the table must have.")
                yield ids

    def stay(self) -> NoReturn:
        raise UnsupportedError(
            f"rows of {self.subject}, which is in parts, cannot be used by a GPU. Share them out over one rank, "
            "embedrock reshard --shards 1, and open its part; or look them up on the CPU."
        )

    def stats(self) -> dict[str, float]:
        each = [part.tier.stats() for part in self._parts]
        return {name: sum(one[name] for one in each) for name in each[0] if name != "commit"} | {"parts": len(each)}


def _read_through(tier: Backend, ids: np.ndarray) -> tuple[Records, np.ndarray]:
    """Return records of a shard in which `ids` can be read. Rows that fit the cache stay there."""
    tier.begin_batch()
    try:
        slots = tier.bring(ids, tier.find(ids))  # may replace the cache
        return tier.records, slots
    except CacheTooSmallError:
        return tier.read_through(ids)


class OpenShards(NamedTuple):
    """A sharded table, open as of a commit that all shards have."""

    layout: ShardFolders
    commit: ShardCommit
    tables: Sequence[Table]  # the shards
    options: Mapping[str, Any]  # the arguments that opened the whole table

    @classmethod
    def as_of(cls, layout: ShardFolders, at: int | None, options: Mapping[str, Any]) -> OpenShards:
        """Open all shards as of a commit. If a writer drops that meanwhile, open the next one."""
        while True:
            common = _commit(layout, at)
            try:
                return cls(layout, common, _open_all(layout, common, options), options)
            except (ArgumentError, FileNotFoundError):
                if _commit(layout, at) == common:
                    raise

    def newer(self) -> OpenShards | None:
        """Open the shards as of the newest common commit; return None if they are open at that one."""
        layout = layout_of(self.layout.path)
        if layout is None:
            gone = "there is no table in parts here any more. Open it anew"
            raise TableFileError(errno.ENOENT, gone, self.layout.path)
        if (layout, last_of(layout)) == (self.layout, self.commit):
            return None
        newer = OpenShards.as_of(layout, None, self.options)
        with on_failure(newer.close):
            _check_like(self.tables[0], newer.tables[0], STAY)
        return newer

    @property
    def table_folder(self) -> TableFolder:
        storage = self.tables[0].storage
        assert storage is not None  # shards are tables on disk
        return storage.table_folder

    def close(self) -> None:
        for table in self.tables:
            table.close()


def _commit(layout: ShardFolders, at: int | None) -> ShardCommit:
    if at is None:
        return last_of(layout)
    found = {common.numbers[0]: common for common in readable_of(layout)}
    if at not in found:
        raise ArgumentError(
            f"{layout.path} has no commit {at} that all of its {layout.ranks} parts have: it has "
            f"{', '.join(map(str, found)) or 'none'}, by their numbers in the first part."
        )
    return found[at]


def _open_all(layout: ShardFolders, common: ShardCommit, options: Mapping[str, Any]) -> list[Table]:
    own = {key: value for key, value in options.items() if key != "name"}  # of the whole table
    if own.get("memory") not in (None, MAP):
        own["memory"] = max(1, parse_bytes(own["memory"]) // layout.ranks)
    opened = list[Table]()
    with contextlib.ExitStack() as held:
        for part, number in zip(layout.parts, common.numbers, strict=True):
            opened.append(held.enter_context(open_alone(part, "r", number, **own)))
            _check_like(opened[0], opened[-1], CONTENTS)
        held.pop_all()
    return opened


def _check_like(first: Table, other: Table, contents: Sequence[str]) -> None:
    expected, got = (describe_spec(table.spec) for table in (first, other))
    check_same({**got, **{key: expected[key] for key in contents}}, got, str(other.path))


class ShardChanges(RowChanges):
    """Rows of a sharded table that differ between two commits, one shard after the other."""

    def __init__(self, shards: OpenShards, since: int | None) -> None:
        self.since, self.commit = since, shards.commit.numbers[0]
        known = {each.numbers[0]: each.numbers for each in (*readable_of(shards.layout), shards.commit)}
        if since is not None and since not in known:
            raise HistoryDroppedError(shards.layout.path, since, min(known))
        numbers = [None] * len(shards.tables) if since is None else known[since]
        self._shards = [table.changes(number) for table, number in zip(shards.tables, numbers, strict=True)]
        found = [part.ids for part in self._shards if part.ids is not None]
        self.ids = distinct(found) if len(found) == len(self._shards) else None

    def __iter__(self) -> Iterator[ChangedRows]:
        return itertools.chain.from_iterable(self._shards)


def lifecycles_of(
    spec: Spec, tables: Sequence[Table], olds: Sequence[Shard], shards: Sequence[Shard]
) -> Sequence[RowLifecycle | None]:
    """Return the row lifecycle of each shard, out of those of old shards as of one commit; None without one."""
    sources = list[tuple[int, RowLifecycle]]()
    for old, table in zip(olds, tables, strict=True):
        if (lifecycle := rows_of(table).lifecycle) is not None:
            sources.append((old.first_segment, lifecycle))
    if not sources:
        return [None] * len(shards)
    return [moved(spec, tables[0].subject, sources, shard.own_segments) for shard in shards]


class ShardedTableReader(StorageManager):
    """The files of a sharded table, read as of a commit that all shards have."""

    def __init__(self, parts: OpenShards, opening: OpenOptions) -> None:
        super().__init__(parts.table_folder, opening)
        self._parts = parts
        self.subject = f"table {opening.name or opening.path!r}, in {len(parts.tables)} parts,"

    @property
    def last_commit(self) -> int:
        return self._parts.commit.numbers[0]

    @property
    def last_step(self) -> int | None:
        return self._parts.commit.step

    def commits(self) -> list[dict[str, Any]]:
        lines = [{line["commit"]: line for line in part.commits()} for part in self._parts.tables]
        found = []
        for common in readable_of(self._parts.layout):
            each = [of_part.get(number) for of_part, number in zip(lines, common.numbers, strict=True)]
            if all(line is not None for line in each):  # or its writer has dropped it meanwhile
                whole = [line for line in each if line is not None]
                sums = {key: sum(line[key] for line in whole) for key in ("rows", "bytes")}
                found.append({**whole[0], **sums, "time": max(line["time"] for line in whole)})
        return found

    def verify(self) -> Verification:
        return verify_parts(self._parts.layout)

    def rows(self, options: dict[str, Any]) -> TableState:
        rows = TableState(self, options["on_nonfinite"])
        self.enter("", rows)
        self.resume()
        return rows

    def resume(self) -> None:
        (rows,) = self.open_rows()
        parts = [rows_of(part) for part in self._parts.tables]
        first, spec = parts[0], parts[0].spec
        tier = ShardedBackend(spec, parts, self.subject)
        rows.install(spec, tier, first.history, first.steps, first.skipped_steps, lifecycle=first.lifecycle)
        rows.version.commit()

    def _newest(self) -> OpenShards | None:
        return self._parts.newer()

    def _exchange(self, opened: Any) -> OpenShards:
        before, self._parts, self.table_folder = self._parts, opened, opened.table_folder
        return before

    def _release(self, before: OpenShards, newest: OpenShards) -> None:
        before.close()

    def _changed_ids(self, newest: OpenShards) -> Any:
        return super()._changed_ids(newest.table_folder)  # of one shard: whether its life is the same

    def changes(self, since: int | None, names: list[str] | None = None, ids: Any = None) -> dict[str, RowChanges]:
        """Return the changes of all shards. `since` is the number of a commit that all shards still have."""
        return {"": ShardChanges(self._parts, since)}

    def stats(self) -> dict[str, float]:
        """Return admission and eviction statistics of all shards; each shard decides by itself."""
        found = [rows.lifecycle for part in self._parts.tables if (rows := rows_of(part)).lifecycle is not None]
        each = [lifecycle.stats() for lifecycle in found if lifecycle is not None]
        made = {name: sum(one[name] for one in each) for one in each[:1] for name in one}
        if made.get("pending", 0) < 0:  # unknown, in each of them
            made["pending"] = -1
        return made | ({"sketch_error": made["sketch_error"] / len(each)} if "sketch_error" in made else {})

    def lifecycle_of(self, rows: TableState) -> RowLifecycle | None:
        """Return the row lifecycle of all shards as one; that of the first shard for tables without segments."""
        spec, tables = rows.spec, self._parts.tables
        if spec.segments == 1:
            return rows.lifecycle
        shards = [Shard(rank, len(tables), segments=spec.segments) for rank in range(len(tables))]
        return lifecycles_of(spec, tables, shards, [Shard(0, 1, segments=spec.segments)])[0]

    @property
    def where(self) -> str:
        return f"on disk at {self.opening.path!r} in {len(self._parts.tables)} parts (read only) behind caches in RAM"

    def reopening(self, name: str) -> str:
        return f'Open it again, er.open({self.opening.path!r}, mode="r").'

    def check_in_ram(self, verb: str, name: str) -> None:
        rows = rows_of(self._parts.tables[0])
        rows.location.check_in_ram(verb, name)

    def after_fork(self, subject: str) -> None:
        """Do nothing: each shard handles a fork by itself."""

    def close_all(self) -> None:
        self._parts.close()


def verify_parts(layout: ShardFolders) -> Verification:
    """Verify every checksum of a sharded table. The newest good commit is one that is good in all shards."""
    found = [verify_commits(part) for part in layout.parts]
    each = [verification for verification, _ in found]
    good = [
        common.numbers[0]
        for common in commits_of(layout)
        if all(number in of_part for number, (_, of_part) in zip(common.numbers, found, strict=True))
    ]
    return Verification(
        [problem for one in each for problem in one.problems],
        max(good, default=None),
        sum(one.files for one in each),
        sum(one.records for one in each),
        [file for one in each for file in one.strange],
    )


_readers: weakref.WeakSet[StorageManager] = weakref.WeakSet()  # of tables alone
_told_of = set[str]()  # folders around them


def _tell_of_others(storage: StorageManager) -> None:
    """Say once that tables alone are refreshed each by itself: a model with both may have rows of two steps."""
    own, place = storage.opening.path, os.path.dirname(storage.opening.path)
    others = [each.opening.path for each in list(_readers) if not each.is_closed]
    _readers.add(storage)
    near = next((path for path in others if path != own and os.path.dirname(path) == place), None)
    if near is not None and place not in _told_of:
        _told_of.add(place)
        tell(
            f"{storage.subject} and table {near!r} are read each by itself, so that after refresh() one may be of a "
            "later step than the other. Tables of one model that are members of one er.Group are always of one."
        )


@overload
def open_table(
    path: AnyPath, mode: str = "w", at: int | None = None, *, kind: type[Group], **options: Unpack[OpenArguments]
) -> Group: ...


@overload
def open_table(
    path: AnyPath, mode: str = "w", at: int | None = None, *, kind: type[Table] = ..., **options: Unpack[OpenArguments]
) -> Table: ...


@shows(OpenArguments)
def open_table(
    path: str | os.PathLike[str],
    mode: str = "w",
    at: int | None = None,
    *,
    kind: type[Table | Group] | None = None,
    **options: Unpack[OpenArguments],
) -> Table | Group:
    """Open a table on disk, a group, or a sharded table (see ``sharded=`` of layers), as of a commit.

    Args:
        path: its folder.
        mode: "w" for its one writer, or "r" for a snapshot, which stays the same until `refresh`. A sharded table is
            read as one table, and only its ranks can write it.
        at: number of the commit, for a reader; None: the last one. For a sharded table, the number in its first shard.
        kind: `er.Group` says to type checkers that the folder holds a group. It is an error if it holds a table.
        memory: as in `Table`. "map", for readers: map the files into memory. Processes share one copy of the rows.
        on_nonfinite, name, policy, keep, commit_every, lock, device_memory: as in `Table`.
        missing: of a reader, values of rows that are not there: "first", "zeros", "shared", "raise" or a row. See
            `Table.lookup`.
        init: for a table whose initial values come from an array: that `er.FromArray`.

    Returns:
        A `Table`, or a `Group` if the folder holds one.

    Raises:
        TableFileError: no table is there, or another `kind`; `init` is missing or differs; a writer opens shards.
        TableLockedError: another writer has it open.
        CorruptTableError, NewerFormatError: its files are damaged, or of a newer release.
        ArgumentError: there is no commit `at`, or none that all shards have.

    Example:
        >>> import tempfile, embedrock as er
        >>> folder = tempfile.mkdtemp() + "/users.rock"
        >>> with er.Table(rows=10**9, dim=4, path=folder, rule=er.SGD(lr=0.5), init=er.Zeros()) as table:
        ...     table.update([7], [[1.0, 1.0, 1.0, 1.0]])
        ...     table.commit(step=1)
        1
        >>> with er.open(folder, mode="r") as table:
        ...     table.lookup([7])
        array([[-0.5, -0.5, -0.5, -0.5]], dtype=float32)
    """
    opened = _opened(path, mode, at, options)
    if kind not in (None, type(opened)):
        with opened:
            got, name = getattr(kind, "__name__", kind), type(opened).__name__
            needed = f"`kind` must be er.{name}, as the folder holds one, or None: got {got!r}. Pass kind=er.{name}"
            raise TableFileError(errno.EINVAL, needed, opened.path)
    return opened


def _opened(path: AnyPath, mode: str, at: int | None, options: Mapping[str, Any]) -> Table | Group:
    layout = layout_of(os.path.abspath(local_path(path)))
    if layout is None:
        opened = open_alone(path, mode, at, **options)
        if isinstance(opened.storage, StorageManager) and mode == "r" and opened.storage.is_alone:
            _tell_of_others(opened.storage)
        return opened
    given, opening = asked(layout.path, mode, at, options)
    if mode != "r":
        raise TableFileError(
            errno.EISDIR,
            f"the table here is in {layout.ranks} parts, each of which one rank writes: a layer with sharded=True in "
            f'as many processes. Open it for reading: er.open({str(path)!r}, mode="r"), or a part of it, '
            f"{os.path.basename(layout.part(0))}",
            layout.path,
        )
    with held_back():  # or Ctrl-C may leave files open that belong to no table
        location = ShardedTableReader(OpenShards.as_of(layout, at, options), opening)
        with on_failure(location.close_all):
            return Table.over(location.rows(given), location, given)
