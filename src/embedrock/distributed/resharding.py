"""`reshard`: moves the rows of a sharded table on disk to another number of ranks, shard by shard."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier, BrokenBarrierError
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from embedrock.batch.ids import owners
from embedrock.distributed.commits import (
    FILE,
    FOLDER,
    ShardCommit,
    ShardFolders,
    kept_in,
    kept_of,
    known_as,
    last_of,
    layout_of,
    marks_of,
)
from embedrock.distributed.owners import Shard
from embedrock.errors import (
    ArgumentError,
    CorruptTableError,
    HistoryDroppedError,
    TableFileError,
    UnsupportedError,
    counted,
)
from embedrock.io.vfs import OS_SYSTEM, explained_if_full, full_disk
from embedrock.storage.disk_backend import DiskBackend
from embedrock.store import folder as folders
from embedrock.store import manifest as manifests
from embedrock.store.reading import holds_table
from embedrock.store.segments import CRC_BYTES, ID_BYTES
from embedrock.store.table_folder import TableFolder
from embedrock.system import platform
from embedrock.system.arena import cut
from embedrock.system.buffers import buffers
from embedrock.system.scopes import on_failure
from embedrock.table.group import open_table
from embedrock.table.saved import SavedState, load, saved_of
from embedrock.table.table import Table, rows_of

MEMORY = "64MiB"  # of a new shard
BATCH_BYTES = 8 << 20  # of records to read at a time, of all old shards together
# New shards made together, reading their common sources once. They are not large, because a killed run makes them
# again.
AT_ONCE, TOGETHER_BYTES = 4, 64 << 30
OWN = "resharded-"  # prefix of the name that an unnamed commit gets; nothing refers to it
# Names of commits to which a state refers by their number in one shard: state dicts, files of Keras' models, and a
# worker's `TableCheckpoint`.
BOUND = re.compile(r"(state_dict|keras_state)-\d+|worker-\d+-of-\d+-.*")
GONE = ".gone"  # shards that are being removed
SOURCE_MEMORY, LEAST_SOURCE_MEMORY = 64 << 20, 4 << 20  # of the old shards: each of their rows is read once


Item = TypeVar("Item")
Batch = tuple[np.ndarray, np.ndarray]  # ids int64 (n,) and records uint8 (n, record_bytes)


class Resharded(NamedTuple):
    """The result of `reshard`.

    Attributes:
        before, after: number of shards before and after.
        rows: rows with records.
        step: training step of the commit.
        name: name of the commit in each new shard.
    """

    before: int
    after: int
    rows: int
    step: int | None
    name: str


def reshard(path: str, ranks: int, memory: int | str = MEMORY) -> Resharded:
    """Move the rows of a sharded table on disk, with their optimizer state, to another number of ranks.

    Commits with a name move too, because checkpoints may refer to them. Of each commit, the rows that differ from the
    one before move. Rows move in batches. So RAM use is `memory` and some more, whatever the table's size. The old
    shards stay until all new ones are durable. Several new shards are made together, up to 64 GiB of them. After a
    kill, another call continues after the last durable ones.

    Args:
        path: folder of a sharded table. No process may write to it meanwhile.
        ranks: new number of shards.
        memory: RAM for each new shard.

    Raises:
        TableFileError: there is no sharded table.
        TableLockedError: another process writes to it.
        ArgumentError: the shards have no commit in common.
        UnsupportedError: something refers to a commit of one shard alone, or the table has admission or eviction.
        OSError: the disk has no room for the new shards. None is left.
    """
    if ranks < 1:
        raise ArgumentError(f"the number of parts must be at least 1: got {ranks}.")
    before = layout_of(path)
    if before is None:
        raise TableFileError(
            errno.ENOENT, "there is no table in parts here: a folder with SHARDED, as sharded=True makes it", path
        )
    work = Resharding(before, ranks, memory)
    with work.locked():
        work.begin()
        if before.ranks != ranks:
            work.check()
            work.make_all()
        work.publish()
    rows = sum(folders.newest(OS_SYSTEM, part).count for part in work.after.parts)
    return Resharded(before.ranks, ranks, rows, work.common.step, work.name)


class Resharding:
    """A move of a sharded table's rows to another number of ranks. New shards can be made at once.

    Args:
        before: folders of the old shards.
        ranks: new number of shards.
        memory: RAM for each new shard.

    Attributes:
        after: folders of the new shards.
        common: the newest commit that moves.
        name: its name in each new shard.
    """

    common: ShardCommit
    name: str

    def __init__(self, before: ShardFolders, ranks: int, memory: int | str = MEMORY) -> None:
        self.before, self.after, self._memory = before, ShardFolders(before.path, ranks), memory

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the write locks of the old shards."""
        with contextlib.ExitStack() as held:
            for part in self.before.parts:
                held.callback(folders.unlock, OS_SYSTEM, folders.lock(OS_SYSTEM, part, locked=True))
            yield

    def begin(self) -> None:
        """Determine the commits to move.

        Raises:
            CorruptTableError: one of them is damaged.
        """
        self.common = last_of(self.before)
        self.name = self.common.name or self._own_name()
        if self.before.ranks == self.after.ranks:
            return
        for part in self.before.parts:  # a damaged commit may have a name
            for number in manifests.numbers(OS_SYSTEM, part):
                folders.manifest_at(OS_SYSTEM, part, number)
        kept = [each for each in kept_of(self.before) if not str(each.name).startswith(OWN)]
        self._commits = [
            *(each for each in kept if known_as(each) != known_as(self.common)),
            self.common,
        ]
        self._is_kept = known_as(self.common) in {known_as(each) for each in kept}

    def check(self) -> None:
        """Check that nothing is lost and that all new shards fit the disk; remove incomplete new shards.

        Raises:
            UnsupportedError: something refers to a commit of one shard alone.
            OSError: there is too little room.
        """
        for part in self.before.parts:
            for name in (mark.name for mark in kept_in(part).values() if BOUND.fullmatch(str(mark.name))):
                raise UnsupportedError(
                    f"the rows of the table at {self.before.path!r} cannot be shared out anew while a state that was "
                    f"saved refers to commit {name!r} of one part, {os.path.basename(part)}: it could not be loaded "
                    "any more. ert.save on all ranks makes checkpoints that any number of them loads. To give that "
                    f"state up: er.open({part!r}).release({name!r})."
                )
        missing = [rank for rank in range(self.after.ranks) if not self._is_made(rank)]
        self._remove(missing)
        needed = self._needed_bytes * len(missing) // self.after.ranks
        if needed > platform.free_bytes(self.before.path):
            raise self._full_disk(needed)

    @property
    def _needed_bytes(self) -> int:
        """Estimate the size of all new shards: rows of the first commit, and rows that each later one wrote."""
        total = 0
        for rank, part in enumerate(self.before.parts):
            known: set[str] | None = None  # files of the commits before
            for common in self._commits:
                manifest = folders.manifest_at(OS_SYSTEM, part, common.numbers[rank])
                (content,) = manifest.pools
                new = sum(entry.count for entry in content.delta if known is not None and entry.file not in known)
                rows = content.count if known is None else min(content.count, new)
                total += rows * (content.record_bytes + CRC_BYTES + ID_BYTES)
                known = (known or set()) | {entry.file for entry in content.delta}
        return total

    def _full_disk(self, needed: int) -> OSError:
        what = f"the rows could not be shared out over {counted(self.after.ranks, 'part')}"
        remedy = f"Free some. The {counted(self.before.ranks, 'part')} that there were are whole, and no other is left."
        return full_disk(self.after.part(0), what, needed, remedy)

    def _remove(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            shutil.rmtree(self.after.part(rank), ignore_errors=True)

    def undone_on_full_disk(self, ranks: Iterable[int]) -> contextlib.AbstractContextManager[None]:
        """Remove the new shards if the disk is full after all: no later call could continue them."""

        def undo() -> OSError:
            self._remove(ranks)
            return self._full_disk(self._needed_bytes)

        return explained_if_full(undo)

    def _own_name(self) -> str:
        """Return a name that no earlier shards have, so that those do not pass for new ones."""
        of = zip(self.before.parts, self.common.numbers, strict=True)
        newest = [folders.manifest_at(OS_SYSTEM, part, number) for part, number in of]
        made_of = repr([(manifest.uuid, manifest.commit) for manifest in newest]).encode()
        return f"{OWN}{zlib.crc32(made_of):08x}"

    def make(self, *ranks: int) -> None:
        """Make some of the new shards together, except those that are complete already.

        They get all commits, one after the other: see `_fill` and `_follow`.
        """
        missing = [rank for rank in ranks if not self._is_made(rank)]
        if not missing:
            return
        self._remove(missing)
        shards = [Shard(rank, self.after.ranks) for rank in missing]
        olds = [Shard(rank, self.before.ranks) for rank in range(self.before.ranks)]
        sources = [old.rank for old in olds if any(_overlap(old, shard) for shard in shards)]
        memory = max(LEAST_SOURCE_MEMORY, SOURCE_MEMORY // len(sources))
        made, last = list[Table](), list[Table]()
        with contextlib.ExitStack() as opened:
            for common in self._commits:
                tables = [open_table(self.before.part(n), "r", common.numbers[n], memory=memory) for n in sources]
                for table in tables:
                    opened.callback(table.close)
                if not made:
                    made = [opened.enter_context(self._new_part(rank, tables[0])) for rank in missing]
                    for table in made:  # an error may leave it incomplete
                        opened.enter_context(on_failure(rows_of(table).version.commit))
                # Records of commits with one record layout can share a shard.
                if last and _layout(last[0]) == _layout(tables[0]):
                    _follow(last, tables, shards, made)
                else:
                    _fill(tables, shards, made)
                is_last = common is self.common
                for table in made:
                    table.commit(step=common.step, name=self.name if is_last else common.name)
                    if is_last and not self._is_kept:
                        table.release(self.name)
                for table in last:
                    table.close()
                last = tables

    def _new_part(self, rank: int, source: Table) -> Table:
        spec = source.spec
        if spec.has_residents:
            raise UnsupportedError(
                f"the rows of the table at {self.before.path!r} come and go (admission= or eviction=), and each part "
                "decides by itself who has a record: they cannot be shared out anew."
            )
        options: dict[str, Any] = {"seed": spec.seed, "dtype": spec.dtype, "init": spec.init, "memory": self._memory}
        options["frozen"] = spec.frozen
        return Table(spec.rows, spec.dim, path=self.after.part(rank), **options)

    def _is_made(self, rank: int) -> bool:
        """Return whether a new shard is complete: its newest commit was written last."""
        part = self.after.part(rank)
        if not holds_table(OS_SYSTEM, part) or marks_of(part)[-1][:3] != (self.name, *self.common[1:3]):
            return False
        return {known_as(each) for each in self._commits[: None if self._is_kept else -1]} <= kept_in(part).keys()

    def make_all(self) -> None:
        ranks = range(self.after.ranks)
        at_once = min(AT_ONCE, max(1, TOGETHER_BYTES * len(ranks) // max(1, _bytes_of(self.before))))
        with self.undone_on_full_disk(ranks):
            for start in ranks[::at_once]:
                self.make(*ranks[start : start + at_once])

    def publish(self) -> None:
        """Make the new shards the table, once all are complete, and remove the old ones."""
        if self.before.ranks != self.after.ranks:
            self.after.publish()
        _remove_others(self.after)


def _layout(table: Table) -> tuple[Any, ...]:
    return table.spec.rows, table.spec.seed, table.spec.layout


def _fill(tables: Sequence[Table], shards: Sequence[Shard], made: Sequence[Table]) -> None:
    """Fill new shards in one pass over the old shards that overlap them, in the order of the ids.

    Each record is read once and written once, to its final location. Threads read and write concurrently.
    """
    size = max(1, BATCH_BYTES // tables[0].spec.record_bytes // len(tables))
    with ThreadPoolExecutor(len(tables) + len(shards)) as pool:
        streams = [prefetched(pool, _disk(table).record_batches(size)) for table in tables]
        batches = _SharedBatches(merged(streams), shards)
        with on_failure(batches.abort):
            writing = [pool.submit(_write, *each, tables, batches) for each in zip(made, shards, strict=True)]
            errors = [error for each in writing if (error := each.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
            raise error  # the first cause


def _follow(before: Sequence[Table], now: Sequence[Table], shards: Sequence[Shard], made: Sequence[Table]) -> None:
    """Write to new shards, which have the rows of a commit, the rows that differ in a later commit."""
    size, first = max(1, BATCH_BYTES // now[0].spec.record_bytes), rows_of(now[0])
    for rows in map(rows_of, made):
        spec = replace(rows.spec, rule=first.spec.rule)
        rows.install(spec, rows.tier, first.history, first.steps, first.skipped_steps)
    for one, other in zip(before, now, strict=True):
        for ids in _changed(one, other, size):
            of, (had, old), (has, new) = owners(ids, shards[0].ranks), _at(one, ids), _at(other, ids)
            changed, gone = has & ~(had & (old == new).all(axis=1)), had & ~has
            for shard, table in zip(shards, made, strict=True):
                own = of == shard.rank
                with rows_of(table).table_lock.whole():
                    _disk(table).overwrite(ids[own & changed], new[own & changed])
                    _disk(table).discard(ids[own & gone])


def _changed(before: Table, now: Table, size: int) -> Iterator[np.ndarray]:
    """Iterate over the ids of rows that may differ in two commits of a part. Some come twice."""
    one, other = _disk(before), _disk(now)
    both = (cast(TableFolder, each.store.table_folder) for each in (one, other))
    older, newer = sorted(both, key=lambda folder: folder.manifest.commit)  # a rollback may have undone a named commit
    try:
        lists = newer.lists_since(older.manifest.commit, older.sha)
        return cut(newer.changed_ids(older.manifest.commit, lists, [""])[""], size)
    except HistoryDroppedError:  # an older release made one of the commits, perhaps
        return itertools.chain(one.id_batches(size), other.id_batches(size))


def _at(table: Table, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which ids have records, bool (n,), and these records: uint8 (n, record_bytes)."""
    records, slots = _disk(table).read_through(ids)
    found, there = np.zeros((len(ids), records.bytes.shape[1]), np.uint8), slots >= 0
    found[there] = records.bytes[slots[there]]
    return there, found


def _disk(table: Table) -> DiskBackend:
    return cast(DiskBackend, rows_of(table).tier)  # a table alone on disk has no other backend


def _write(made: Table, shard: Shard, sources: Sequence[Table], batches: _SharedBatches) -> None:
    first, rows = saved_of(rows_of(sources[0]), 1), rows_of(made)
    most = sum(rows_of(table).tier.count for table in sources)

    def twice(ids: np.ndarray) -> CorruptTableError:
        return CorruptTableError(
            f"a row of {ids[:4].tolist()} is in two parts of the table that {str(made.path)!r} is made of."
        )

    with on_failure(batches.abort), rows.table_lock.whole():
        rows.spec = rows.spec.with_rule(None)  # otherwise the state of an earlier commit would stay
        own = SavedState({**first.header, "count": most}, first.history, batches.of(shard), ascends=True)
        load(rows, own, twice)


class _SharedBatches:
    """Batches of rows, for threads that each take the rows of one new shard. They wait for the slowest of them."""

    def __init__(self, batches: Iterator[Sequence[Batch]], shards: Sequence[Shard]) -> None:
        self._batches, self._ranks, self._picked = batches, shards[0].ranks, list[tuple[Batch, np.ndarray]]()
        self._barrier = Barrier(len(shards), self._advance)
        self.abort = self._barrier.abort

    def _advance(self) -> None:
        self._picked = [(part, owners(part[0], self._ranks)) for part in next(self._batches, ())]

    def of(self, shard: Shard) -> Iterator[Batch]:
        """Iterate over the rows of a shard.

        Raises:
            BrokenBarrierError: another thread failed.
        """
        self._barrier.wait()
        while self._picked:
            yield _joined([(part, np.flatnonzero(of == shard.rank)) for part, of in self._picked])
            self._barrier.wait()


def merged(streams: Sequence[Iterator[Batch]]) -> Iterator[list[Batch]]:
    """Merge streams of batches, each in the order of ids.

    Each item has the rows up to the id that all streams have reached.

    Example:
        >>> ids = [np.array([1, 5]), np.array([2, 3]), np.array([9])]
        >>> one, two = (iter([(each, each) for each in part]) for part in (ids[:1], ids[1:]))
        >>> [[ids.tolist() for ids, _ in parts] for parts in merged([one, two])]
        [[[1], [2, 3]], [[5], []], [[9]]]
    """
    heads = [(stream, batch) for stream in streams if (batch := next(stream, None)) is not None]
    while heads:
        bound = min(int(ids[-1]) for _, (ids, _) in heads)
        cuts = [int(np.searchsorted(ids, bound, side="right")) for _, (ids, _) in heads]
        yield [(ids[:cut], records[:cut]) for (_, (ids, records)), cut in zip(heads, cuts, strict=True)]
        left = [(stream, (ids[cut:], records[cut:])) for (stream, (ids, records)), cut in zip(heads, cuts, strict=True)]
        refilled = ((stream, batch if len(batch[0]) else next(stream, None)) for stream, batch in left)
        heads = [(stream, batch) for stream, batch in refilled if batch is not None]


def _joined(picked: Sequence[tuple[Batch, np.ndarray]]) -> Batch:
    """Join rows that were picked of several batches into one batch, in the order of their ids."""
    ids = np.concatenate([ids[own] for (ids, _), own in picked])
    order = np.argsort(ids, kind="stable")
    places, start = np.empty(len(ids), np.int64), 0
    places[order] = np.arange(len(ids))
    found = buffers.empty((len(ids), picked[0][0][1].shape[1]), np.uint8)
    for (_, records), own in picked:
        found[places[start : start + len(own)]] = records[own]
        start += len(own)
    return ids[order], found


def prefetched(pool: ThreadPoolExecutor, items: Iterator[Item]) -> Iterator[Item]:
    """Iterate over `items`, none of which is None, while a thread makes the next one."""
    coming = pool.submit(next, items, None)
    while (item := coming.result()) is not None:
        coming = pool.submit(next, items, None)
        yield item


def _overlap(one: Shard, other: Shard) -> bool:
    """Return whether two shards, of different numbers of ranks, can have rows in common: their hash ranges overlap."""
    starts_before_end = one.rank * other.ranks < (other.rank + 1) * one.ranks
    return starts_before_end and other.rank * one.ranks < (one.rank + 1) * other.ranks


def _bytes_of(layout: ShardFolders) -> int:
    files = (os.path.join(at, name) for part in layout.parts for at, _, names in os.walk(part) for name in names)
    return sum(os.path.getsize(file) for file in files)


def _remove_others(layout: ShardFolders) -> None:
    """Remove shards of other numbers of ranks, and their remains."""
    for name in os.listdir(layout.path):
        match, path = FOLDER.fullmatch(name), os.path.join(layout.path, name)
        if match and int(match[2]) != layout.ranks:
            path = os.path.join(layout.path, f"{FILE}.{secrets.token_hex(4)}{GONE}")
            os.replace(os.path.join(layout.path, name), path)  # or an incomplete shard might pass for a complete one
        if path.endswith(GONE):
            shutil.rmtree(path)
