"""`publish`: writes the rows of a commit, and dense weights of its step, to a folder that others may carry elsewhere.

Rows that changed since the step before come as logs. Now and then they are compacted into a new base.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from embedrock.distributed.commits import is_part_of, layout_of, with_last_commit
from embedrock.distributed.reader import OpenShards
from embedrock.errors import ArgumentError
from embedrock.initializers import Given, Initializer
from embedrock.io.vfs import OS_SYSTEM, System
from embedrock.kernels.keys import PART_BITS
from embedrock.serving import dense as dense_files
from embedrock.serving.dense import Dense
from embedrock.serving.sources import SourceTable, forgets, opened_commit
from embedrock.spec.description import describe_spec
from embedrock.storage.record_pools import may_share
from embedrock.storage.records import encode
from embedrock.store.compaction import fill, relieve
from embedrock.store.manifest import KEYS, StoreEntry, TableEntry
from embedrock.store.publication import DenseEntry, Publication
from embedrock.store.published_folder import PublishedFolder
from embedrock.store.publishing import now
from embedrock.store.record_store import RecordStore
from embedrock.store.table_folder import TableFolder
from embedrock.system.paths import local_path
from embedrock.system.scopes import on_failure
from embedrock.system.sizes import MAP
from embedrock.table.changed_rows import ChangedRows
from embedrock.table.group import Group
from embedrock.table.storage import check_step
from embedrock.table.table import Table

KEEP_HOURS = 6.0
Sources = tuple[Mapping[str, SourceTable], int | None]  # tables by their published names, and the training step
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
    """Options of `publish_commits`: those of `publish`, the results of `arrays_of`, and system calls for I/O."""

    dtype: str | None = None
    keep_hours: float = KEEP_HOURS
    dense: Dense | None = None
    step: int | None = None
    inits: Mapping[str, Initializer] = MappingProxyType({})
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
            of its folder. Of a sharded table, one rank publishes all parts, as of the last commit that all have.
        folder: a folder for published rows only. A missing one is made.
        dtype: of the published weights; None: the tables' own.
        keep_hours: how long files stay after the last step that needs them. Forgotten rows leave at once.
        dense: arrays by name, of the same step: other weights of the model.
        step: training step; None: that of the commit.

    Raises:
        UnsupportedError: it lives in RAM, or open ids have no end of rows to publish.
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
    if not isinstance(source, Table | Group):
        raise ArgumentError(f"`source` of er.publish must be a table or a group, as layer.table is: got {source!r}.")
    opening = source._on_disk().opening
    options = PublishOptions(dtype, keep_hours, dense, step, arrays_of(source), opening.system)
    names = {published_name(source): member_name(source)} if isinstance(source, Table) else None
    return publish_last(opening.path, os.path.abspath(local_path(folder)), options, names)


def publish_last(path: str, folder: str, options: PublishOptions, names: Mapping[str, str] | None = None) -> Published:
    """Publish tables of the last commit at a path. See `publish_commits` for `names`; None: all tables."""
    path = _whole(path)

    def publish_now(_: object) -> Published:
        if not options.system.exists(folder):  # an error of the table comes before the folder is made
            with _last_sources(path, options, names):
                pass
        # The folder is locked first: or another publisher may show a later commit than this one before it.
        with _opened(options.system, folder) as out, _last_sources(path, options, names) as (tables, step):
            return _NextStep(out, tables).publish(step, options)

    return with_last_commit(options.system, path, publish_now)


@contextlib.contextmanager
def _last_sources(path: str, options: PublishOptions, names: Mapping[str, str] | None) -> Iterator[Sources]:
    with _last_commits(path, options) as commits:
        own = [one.name for one in commits[0].manifest.members]
        names = {each or _stem(path): each for each in own} if names is None else names
        for name in set(names.values()).difference(own):
            raise ArgumentError(f"{path} has no commit with table {name!r} yet. Call commit() first.")
        yield _sources([(commit, names) for commit in commits], options)


@contextlib.contextmanager
def _last_commits(path: str, options: PublishOptions) -> Iterator[list[TableFolder]]:
    """Context manager that has the last commit open for reading, of each part of a sharded table."""
    layout = layout_of(path)
    if layout is None:
        with opened_commit(path, None, options.system) as commit:
            yield [commit]
        return
    init = next(iter(options.inits.values()), None)
    with contextlib.closing(OpenShards.as_of(layout, None, {"memory": MAP, "init": init})) as shards:
        yield [table._on_disk().table_folder for table in shards.tables]


@contextlib.contextmanager
def _opened(system: System, folder: str) -> Iterator[PublishedFolder]:
    out = PublishedFolder.open_or_make(system, folder)
    with contextlib.closing(out), on_failure(out.tidy):
        yield out


def arrays_of(*sources: Table | Group) -> dict[str, Initializer]:
    """Return the given initial values of tables, and of open members of groups, by their published names."""
    tables = [table for one in sources for table in ([one] if isinstance(one, Table) else one.open_tables())]
    return {published_name(table): init for table in tables if isinstance(init := table.spec.init, Given)}


def member_name(table: Table) -> str:
    """Return the name of a table in its folder, "" for a table alone."""
    return "" if table.group is None else str(table.name)


def published_name(table: Table) -> str:
    """Return the name under which a table is published."""
    return table.name or _stem(_whole(str(table.path)))


def _whole(path: str) -> str:
    """Return the folder of a sharded table, given that of one of its parts."""
    return around if is_part_of(around := os.path.dirname(path), path) else path


def _stem(path: str) -> str:
    return os.path.splitext(os.path.basename(path))[0]


def _sources(commits: Sequence[tuple[TableFolder, Mapping[str, str]]], options: PublishOptions) -> Sources:
    """Return the tables of open commits, by their published names, and their training step: see `publish_commits`."""
    if not isinstance(options.keep_hours, int | float) or not options.keep_hours >= 0:
        raise ArgumentError(f"`keep_hours` of publish must be a number of at least 0: got {options.keep_hours!r}.")
    check_step(options.step)
    parts = dict[str, list[tuple[TableFolder, TableEntry]]]()
    for commit, names in commits:
        members = {member.name: member for member in commit.manifest.members}
        for new, name in names.items():
            parts.setdefault(new, []).append((commit, members[name]))
    tables = {new: SourceTable.of(each, options.dtype, options.inits.get(new)) for new, each in parts.items()}
    return tables, commits[0][0].manifest.step if options.step is None else options.step


def publish_commits(
    commits: Sequence[tuple[TableFolder, Mapping[str, str]]], folder: str, options: PublishOptions
) -> Published:
    """Publish tables of commits of one training step as one step.

    Args:
        commits: open commits, each with names of its tables by the names under which they are published. Several of one
            name are the parts of a table, by rank.
        folder: absolute path of the folder.
        options: see `PublishOptions`.
    """
    tables, step = _sources(commits, options)
    with _opened(options.system, folder) as out:
        return _NextStep(out, tables).publish(step, options)


class _NextStep:
    """The next step of a published folder.

    Args:
        out: the folder.
        tables: tables by their published names.
    """

    def __init__(self, out: PublishedFolder, tables: Mapping[str, SourceTable]) -> None:
        self._out, self._tables, self._pools = out, tables, _pools_of(tables)
        self._entries = _entries(self._pools, tables)
        self._before, known = out.manifest.published, {member.name: member for member in out.manifest.members}
        self._is_alike = _layout(out.manifest.members) == _layout(self._entries)
        self._counts = {name: known[name].count if self._is_alike else 0 for name in tables}
        sources = self._before.sources
        self._follows = {name: name in sources and table.follows(sources[name]) for name, table in tables.items()}
        self._rows = self._gone = 0
        self._is_base = False

    def publish(self, step: int | None, options: PublishOptions) -> Published:
        last, dense = self._out.manifest, self._dense(options.dense)
        sources = {name: table.entries for name, table in self._tables.items()}
        if self._is_alike and not self._out.is_torn and (sources, dense) == (self._before.sources, self._before.dense):
            return Published(last.commit, last.step, 0, 0, False, is_new=False)
        purges = self._write()
        time = max(now(), last.time)  # clocks may go back
        # Rows of a table that was trained anew, or has gone back, do not follow from those published before.
        is_same_chain = all(self._follows.values()) and self._before.sources and not self._out.is_torn
        chain = (self._before.chain, self._before.began, self._out.sha) if is_same_chain else None
        chain = chain or (secrets.token_hex(16), time, None)
        members = tuple(replace(entry, count=self._counts[entry.name]) for entry in self._entries)
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
        stores, purges, before = list[RecordStore](), self._forgets(), self._before.sources
        for number, names in enumerate(self._pools):
            follow = [name for name in names if self._is_alike and self._follows[name]]
            found = [self._tables[name].changes(before[name]) for name in follow]
            changed = [each for each in found if each is not None]
            if len(changed) < len(names):
                stores.append(self._new_base(names))
            else:
                stores.append(self._out.stores[number])
                for part, (name, each) in enumerate(zip(names, changed, strict=True)):
                    self._append(stores[-1], name, part << PART_BITS, each)
                if purges or _is_due(stores[-1]):
                    relieve(stores[-1], self._rows_of(names), lambda: True)
        self._out.stores = stores
        return purges

    def _forgets(self) -> bool:
        """Return whether rows may have been forgotten since the step before, under whatever names."""
        seeds = {member.name: member.spec["seed"] for member in self._out.manifest.members}
        if any(seeds.get(name) == table.spec.seed and not self._follows[name] for name, table in self._tables.items()):
            return True  # the same table, restored or with other parts: nothing says what happened to its rows
        before = {(one.uuid, one.commit): one for parts in self._before.sources.values() for one in parts}.values()
        commits = {part.table_folder for table in self._tables.values() for part in table.parts}
        return any(forgets(commit, one) for commit in commits for one in before)

    def _new_base(self, names: Sequence[str]) -> RecordStore:
        first = self._tables[names[0]].spec
        parts = len(names) if may_share(first) else None
        made = self._out.manifest.uuid, self._out.next_commit - 1, first.record_bytes
        store = RecordStore(self._out, StoreEntry(*made, self._rows_of(names), 0, parts=parts))

        def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for part, name in enumerate(names):
                self._counts[name] = 0
                for ids, rows in self._tables[name].all_rows():
                    self._counts[name] += len(ids)
                    yield ids + (part << PART_BITS), self._encoded(name, ids, rows)

        self._rows += fill(store, batches(), sum(self._tables[name].most_rows for name in names))
        self._is_base = True
        return store

    def _append(self, store: RecordStore, name: str, first: int, changes: Iterable[ChangedRows]) -> None:
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


def _pools_of(tables: Mapping[str, SourceTable]) -> list[list[str]]:
    """Return the names of the tables of each pool. Tables with one record layout share one, if they can."""
    pools = dict[Any, list[str]]()
    for name, table in tables.items():
        layout = (table.spec.dim, table.spec.dtype) if may_share(table.spec) else name
        pools.setdefault(layout, []).append(name)
    return list(pools.values())


def _entries(pools: Sequence[Sequence[str]], tables: Mapping[str, SourceTable]) -> list[TableEntry]:
    found = list[TableEntry]()
    for number, part, name in ((number, *each) for number, names in enumerate(pools) for each in enumerate(names)):
        spec, of = tables[name].spec, tables[name].parts[0].member
        place = number, part if may_share(spec) else None
        found.append(TableEntry(name, *place, describe_spec(spec), of.steps, of.skipped_steps, 0))
    return found


def _layout(members: Sequence[TableEntry]) -> list[tuple[Any, ...]]:
    """Return what stays the same as long as changes can be appended."""
    fixed = ("dim", "dtype", "seed", "init")
    return [(one.name, one.pool, one.part, *(one.spec[key] for key in fixed)) for one in members]


def _is_due(store: RecordStore) -> bool:
    """Return whether it is time for a new base."""
    logs, base = [*store.delta, *store.logs], sum(segment.file.size for segment in store.base.runs)
    return len(logs) > MOST_LOGS or sum(segment.file.size for segment in logs) > LOG_SHARE * base
