"""`publish`: writes the rows of a commit, and dense weights of its step, to a folder that others may carry elsewhere.

Rows that changed since the step before come as logs. Now and then they are compacted into a new base.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from embedrock.distributed.commits import layout_of
from embedrock.errors import ArgumentError, UnsupportedError
from embedrock.initializers import FromArray, Initializer
from embedrock.io.vfs import OS_SYSTEM, System
from embedrock.kernels.keys import PART_BITS
from embedrock.serving import dense as dense_files
from embedrock.serving.dense import Dense
from embedrock.serving.sources import Inits, SourceTable, opened_commit
from embedrock.spec.description import describe_spec
from embedrock.spec.spec import Spec
from embedrock.storage.record_pools import are_alike, may_share
from embedrock.storage.records import encode
from embedrock.store.compaction import compact_all, fill
from embedrock.store.manifest import KEYS, StoreEntry, TableEntry
from embedrock.store.publication import DenseEntry, Publication
from embedrock.store.published_folder import PublishedFolder
from embedrock.store.record_store import RecordStore
from embedrock.store.table_folder import TableFolder
from embedrock.system.paths import local_path
from embedrock.table.changed_rows import ChangedRows
from embedrock.table.group import Group
from embedrock.table.storage import check_step
from embedrock.table.table import Table

KEEP_HOURS = 6.0
LOG_SHARE, MOST_LOGS = 1.5, 256  # logs of so many bytes of the base, or so many logs, are compacted into a new base


class Published(NamedTuple):
    """Result of `publish`.

    Attributes:
        number: of the published step, which its manifest's name has.
        step: training step.
        rows: rows written.
        gone: rows deleted since the published step before.
        is_base: whether all rows of some table were written.
        is_new: whether anything was published. False: the last published step is the same.
    """

    number: int
    step: int | None
    rows: int
    gone: int
    is_base: bool
    is_new: bool = True


class PublishOptions(NamedTuple):
    """Options of `publish_commits`.

    Attributes:
        dtype: of published rows; None: the tables' own.
        keep_hours: how long old files stay.
        dense: dense weights of the same step.
        step: training step; None: that of the commits.
        inits: initial values from arrays, by name of the table in its folder, "" for a table alone.
        system: system calls for I/O.
    """

    dtype: str | None = None
    keep_hours: float = KEEP_HOURS
    dense: Dense | None = None
    step: int | None = None
    inits: Inits = MappingProxyType({})
    system: System = OS_SYSTEM


def publish(
    source: Table | Group,
    folder: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    keep_hours: float = KEEP_HOURS,
    dense: Dense | None = None,
    step: int | None = None,
) -> Published:
    """Publish the last commit of a table or group on disk: rows without optimizer state, in a folder of their own.

    Any program may carry the folder's files elsewhere, in any order. An `er.Subscriber` shows them there. The first
    call writes all rows, and later ones those that changed. Training may go on meanwhile.

    Args:
        source: the table or group, open for writing or reading. A table alone is published under its name, or else that
            of its folder.
        folder: a folder for published rows only. A missing one is made.
        dtype: of the published weights; None: the tables' own.
        keep_hours: how long files stay after the last step that needs them. Forgotten rows leave at once.
        dense: arrays by name, of the same step: other weights of the model.
        step: training step; None: that of the commit.

    Raises:
        UnsupportedError: it lives in RAM or is in parts, or open ids have no end of rows to publish.
        GradientError: rows have NaN or Inf, or values too large for `dtype`. Nothing is published.
        ArgumentError: it has no commit yet.
        TableFileError: `folder` has something else.
        TableLockedError: another process publishes there.
        OSError: the disk failed. What was published before is whole.

    Example:
        >>> import tempfile, embedrock as er
        >>> at = tempfile.mkdtemp()
        >>> table = er.Table(rows=100, dim=2, path=at + "/users.rock", rule=er.SGD(lr=1.0), init=er.Zeros())
        >>> table.update([7], [[1.0, 1.0]])
        >>> table.commit(step=1)
        1
        >>> er.publish(table, at + "/served").number
        1
        >>> with er.Subscriber(at + "/served").step() as step:
        ...     step["users"].lookup([7])
        array([[-1., -1.]], dtype=float32)
    """
    opening = source._on_disk().opening
    options = PublishOptions(dtype, keep_hours, dense, step, arrays_of(source), opening.system)
    is_alone = isinstance(source, Table) and source.group is None
    alone = published_name(source, opening.path) if isinstance(source, Table) and is_alone else ""
    member = source.name if isinstance(source, Table) and not is_alone else None
    return publish_last(opening.path, os.path.abspath(local_path(folder)), options, member, alone)


def publish_last(
    path: str, folder: str, options: PublishOptions, member: str | None = None, name: str = ""
) -> Published:
    """Publish the last commit of the table or group at a path. See `publish`.

    Args:
        member: the only member of a group to publish; None: all.
        name: of a table alone; "": that of its folder.
    """
    if layout_of(path) is not None:
        raise UnsupportedError(
            f"the table at {path!r} is in parts, and cannot be published. Share its rows out over one rank, "
            "`embedrock reshard --shards 1`, and publish its part."
        )
    with opened_commit(path, None, options.system) as commit:
        own = [one.name for one in commit.manifest.members if member in (None, one.name)]
        if member is not None and not own:
            raise ArgumentError(f"{path} has no commit with table {member!r} yet. Call commit() first.")
        names = {each or name or _stem(path): each for each in own}
        return publish_commits([(commit, names)], folder, options)


def arrays_of(*sources: Table | Group) -> dict[str, Initializer]:
    """Return the initial values from arrays of tables, and of open members of groups, by name; "" for one alone."""
    tables = [table for one in sources for table in ([one] if isinstance(one, Table) else one.open_tables())]
    named = {str(table.name) if table.group is not None else "": table.spec.init for table in tables}
    return {name: init for name, init in named.items() if isinstance(init, FromArray)}


def published_name(table: Table, path: str) -> str:
    """Return the name under which a table alone is published."""
    return table.name or _stem(path)


def _stem(path: str) -> str:
    return os.path.splitext(os.path.basename(path))[0]


def publish_commits(
    commits: Sequence[tuple[TableFolder, Mapping[str, str]]], folder: str, options: PublishOptions
) -> Published:
    """Publish tables of commits of one training step as one step.

    Args:
        commits: open commits, each with names of its tables by the names under which they are published.
        folder: absolute path of the folder.
        options: see `PublishOptions`.
    """
    if not isinstance(options.keep_hours, int | float) or not options.keep_hours >= 0:
        raise ArgumentError(f"`keep_hours` of publish must be a number of at least 0: got {options.keep_hours!r}.")
    check_step(options.step)
    tables = dict[str, SourceTable]()
    for commit, names in commits:
        members = {member.name: member for member in commit.manifest.members}
        tables |= {
            new: SourceTable.of(commit, members[name], options.dtype, options.inits) for new, name in names.items()
        }
    step = commits[0][0].manifest.step if options.step is None else options.step
    out = PublishedFolder.open_or_make(options.system, folder)
    try:
        return _NextStep(out, tables).publish(step, options)
    except BaseException:
        out.discard_all()
        raise
    finally:
        out.close()


class _NextStep:
    """The next step of a published folder.

    Args:
        out: the folder.
        tables: tables by their published names.
    """

    def __init__(self, out: PublishedFolder, tables: Mapping[str, SourceTable]) -> None:
        self._out, self._tables, self._pools = out, tables, _pools_of(tables)
        assert out.manifest.published is not None
        self._before, known = out.manifest.published, {member.name: member for member in out.manifest.members}
        self._is_alike = _layout(out.manifest.members) == _layout(self._entries(dict.fromkeys(tables, 0)))
        self._counts = {name: known[name].count if self._is_alike else 0 for name in tables}
        sources = self._before.sources
        self._follows = {name: name in sources and table.follows(sources[name]) for name, table in tables.items()}
        self._rows = self._gone = 0
        self._is_base = False

    def publish(self, step: int | None, options: PublishOptions) -> Published:
        last, dense = self._out.manifest, self._dense(options.dense)
        sources = {name: table.entry for name, table in self._tables.items()}
        if self._is_alike and not self._out.is_torn and (sources, dense) == (self._before.sources, self._before.dense):
            return Published(last.commit, last.step, 0, 0, False, is_new=False)
        purges = self._write()
        time = self._out.next_time()
        # Rows of a table that was trained anew, or has gone back, do not follow from those published before.
        is_same_chain = all(self._follows.values()) and self._before.sources and not self._out.is_torn
        chain = (self._before.chain, self._before.began, self._out.sha) if is_same_chain else _new_chain(time)
        members = self._entries(self._counts)
        fields = {"step": step, "time": time, "members": members, "published": Publication(*chain, sources, dense)}
        self._out.publish_rows(fields, options.keep_hours, purges)
        return Published(self._out.manifest.commit, step, self._rows, self._gone, self._is_base)

    def _dense(self, arrays: Dense | None) -> DenseEntry | None:
        if arrays is None:
            return None
        data, before = dense_files.to_bytes(arrays), self._before.dense
        if before is not None and before.sha256 == dense_files.sha256_of(data):
            return before
        name = self._out.free_name(f"dense/{self._out.next_commit:010d}", ".safetensors")
        return dense_files.write(self._out.system, self._out.folder, name, data)

    def _write(self) -> bool:
        """Write the rows of all tables. Return whether old files have rows that were forgotten."""
        stores, purges = list[RecordStore](), self._forgets()
        for number, names in enumerate(self._pools):
            changed = {name: each for name in names if (each := self._changes(name)) is not None}
            if len(changed) == len(names):
                store = self._out.stores[number]
                for name, each in changed.items():
                    self._append(store, name, each)
                if purges or _is_due(store):
                    compact_all(store, self._rows_of(names))
            else:
                store = self._new_base(names)
            stores.append(store)
        self._out.stores = stores
        return purges

    def _forgets(self) -> bool:
        """Return whether rows may have been forgotten since the step before, under whatever names."""
        sources = {(one.uuid, one.commit): one for one in self._before.sources.values()}.values()
        tables = {id(table.table_folder): table for table in self._tables.values()}.values()
        return any(table.forgets(before) for table in tables for before in sources)

    def _changes(self, name: str) -> Iterable[ChangedRows] | None:
        """Return what changed since the published step before. None: all rows may have."""
        if not self._follows[name] or not self._is_alike:
            return None
        return self._tables[name].changes(self._before.sources[name].commit)

    def _new_base(self, names: Sequence[str]) -> RecordStore:
        first = self._tables[names[0]].spec
        parts = len(names) if may_share(first) else None
        uuid, commit = self._out.manifest.uuid, self._out.next_commit - 1
        store = RecordStore(
            self._out, StoreEntry(uuid, commit, first.record_bytes, self._rows_of(names), 0, parts=parts)
        )

        def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for part, name in enumerate(names):
                self._counts[name] = 0
                for ids, rows, _ in self._tables[name].all_rows():
                    self._counts[name] += len(ids)
                    yield ids + (part << PART_BITS), self._encoded(name, ids, rows)

        self._rows += fill(store, batches(), sum(self._tables[name].most_rows for name in names))
        self._is_base = True
        return store

    def _append(self, store: RecordStore, name: str, changes: Iterable[ChangedRows]) -> None:
        first = next(names.index(name) for names in self._pools if name in names) << PART_BITS
        for ids, rows, gone in changes:
            keys, gone = ids + first, gone + first
            gone = gone[store.locate(gone) >= 0]
            self._counts[name] += int(np.count_nonzero(store.locate(keys) < 0)) - len(gone)
            store.append(self._encoded(name, ids, rows), np.arange(len(keys)), keys)
            store.discard(gone)
            self._rows, self._gone = self._rows + len(ids), self._gone + len(gone)

    def _encoded(self, name: str, ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return encode(self._tables[name].spec, ids, rows, f"table {name!r}")

    def _rows_of(self, names: Sequence[str]) -> int | None:
        first = self._tables[names[0]].spec
        return KEYS if may_share(first) else first.rows

    def _entries(self, counts: Mapping[str, int]) -> tuple[TableEntry, ...]:
        found = list[TableEntry]()
        for number, names in enumerate(self._pools):
            for part, name in enumerate(names):
                spec, of = self._tables[name].spec, self._tables[name].member
                place = number, part if may_share(spec) else None
                found.append(TableEntry(name, *place, describe_spec(spec), of.steps, of.skipped_steps, counts[name]))
        return tuple(found)


def _pools_of(tables: Mapping[str, SourceTable]) -> list[list[str]]:
    """Return the names of the tables of each pool. Tables with one record layout share one, if they can."""
    pools = list[list[str]]()
    for name, table in tables.items():
        shares = [names for names in pools if may_share(table.spec) and _may_join(tables[names[0]].spec, table.spec)]
        if shares:
            shares[0].append(name)
        else:
            pools.append([name])
    return pools


def _may_join(spec: Spec, other: Spec) -> bool:
    return may_share(spec) and are_alike(spec, other)


def _layout(members: Sequence[TableEntry]) -> list[tuple[Any, ...]]:
    """Return what stays the same as long as changes can be appended."""
    fixed = ("dim", "dtype", "seed", "init")
    return [(one.name, one.pool, one.part, *(one.spec[key] for key in fixed)) for one in members]


def _is_due(store: RecordStore) -> bool:
    """Return whether it is time for a new base."""
    logs, base = [*store.delta, *store.logs], sum(segment.file.size for segment in store.base.runs)
    return len(logs) > MOST_LOGS or sum(segment.file.size for segment in logs) > LOG_SHARE * base


def _new_chain(time: str) -> tuple[str, str, None]:
    return secrets.token_hex(16), time, None
