"""`reshard`: the rows of a table on disk shared out over another number of ranks, a part at a time."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from embedrock.errors import ArgumentError, CorruptTableError, TableFileError, UnsupportedError
from embedrock.machine.vfs import OS_SYSTEM
from embedrock.shards.commits import Common, last_of
from embedrock.shards.folders import FOLDER, Layout, layout_of
from embedrock.shards.owners import Shard
from embedrock.store import folder as folders
from embedrock.store.nearby import holds_table
from embedrock.table.open import open_table
from embedrock.table.rows import EXPORT_BATCH_ROWS
from embedrock.table.saved import Saved, load, saved_of
from embedrock.table.table import Table, rows_of

SOURCE_MEMORY = "32MiB"  # of the part that is read: its rows go by once


class Resharded(NamedTuple):
    """What `reshard` did.

    Attributes:
        before, after: how many parts there were, and are.
        rows: with records.
        step: of the training, that of the commit.
        name: of the commit that each new part has.
    """

    before: int
    after: int
    rows: int
    step: int | None
    name: str


def reshard(path: str, ranks: int, memory: int | str = "256MiB") -> Resharded:
    """Share the rows of a table on disk out over another number of ranks, with their optimizer state.

    They go over in batches, so RAM is needed for `memory` and some more, whatever the table's size. The parts that
    there were stay until all new ones are durable. Killed and called again, it goes on behind the last part that is.

    Args:
        path: of a table in parts. No process may write to it meanwhile.
        ranks: how many parts there are to be.
        memory: of the table that is written.

    Raises:
        TableFileError: there is no table in parts.
        TableLockedError: somebody writes to it.
        ArgumentError: the parts have no commit in common.
    """
    if ranks < 1:
        raise ArgumentError(f"the number of parts must be at least 1: got {ranks}.")
    before = layout_of(path)
    if before is None:
        raise TableFileError(
            errno.ENOENT, "there is no table in parts here: a folder with SHARDED, as sharded=True makes it", path
        )
    after, common = Layout(path, ranks), last_of(before)
    name = common.name or "resharded"
    held = [folders.lock(OS_SYSTEM, part, locked=True) for part in before.parts]
    try:
        if before.ranks != ranks:
            for rank in range(ranks):
                _make_part(before, after, rank, common, name, memory)
            after.publish()
    finally:
        for lock in held:
            folders.unlock(OS_SYSTEM, lock)
    rows = sum(_count(after.part(rank)) for rank in range(ranks))
    _remove_others(after)
    return Resharded(before.ranks, ranks, rows, common.step, name)


def _make_part(before: Layout, after: Layout, rank: int, common: Common, name: str, memory: int | str) -> None:
    """Make one new part, unless it is there already."""
    folder, shard = after.part(rank), Shard(rank, after.ranks)
    if _is_made(folder, name):
        return
    shutil.rmtree(folder, ignore_errors=True)
    sources = [at for at in range(before.ranks) if _meet(Shard(at, before.ranks), shard)]
    with _source(before, sources[0], common) as first:
        of_first, spec = saved_of(rows_of(first), 1), first.spec
    if spec.has_residents:
        raise UnsupportedError(
            f"the rows of the table at {before.path!r} come and go (admission= or eviction=), and each part decides by "
            "itself who has a record: they cannot be shared out anew."
        )
    count = sum(len(ids) for at in sources for ids in _own_ids(before, at, common, shard))
    options: dict[str, Any] = {"seed": spec.seed, "dtype": spec.dtype, "init": spec.init, "memory": memory}
    with Table(spec.rows, spec.dim, path=folder, **options) as made:
        batches = itertools.chain.from_iterable(_own_records(before, at, common, shard) for at in sources)
        rows = rows_of(made)
        with rows.turn.whole():
            all_own = Saved({**of_first.header, "count": count}, of_first.history, batches)
            load(rows, all_own, lambda ids: _twice(folder, ids))
        made.commit(step=common.step, name=name)


def _is_made(folder: str, name: str) -> bool:
    """Return whether a new part is there as a whole: its one commit of that name is its last act."""
    if not holds_table(OS_SYSTEM, folder):
        return False
    with open_table(folder, mode="r", memory=SOURCE_MEMORY) as table:
        return any(commit["name"] == name for commit in table.commits())


def _meet(one: Shard, other: Shard) -> bool:
    """Return whether two parts, of different numbers of ranks, can have rows in common: they are ranges of hashes."""
    starts_before_end = one.rank * other.ranks < (other.rank + 1) * one.ranks
    return starts_before_end and other.rank * one.ranks < (one.rank + 1) * other.ranks


def _source(layout: Layout, rank: int, common: Common) -> Table:
    return open_table(layout.part(rank), mode="r", at=common.numbers[rank], memory=SOURCE_MEMORY)


def _own_ids(layout: Layout, rank: int, common: Common, shard: Shard) -> Iterator[np.ndarray]:
    with _source(layout, rank, common) as table:
        for ids in rows_of(table).tier.id_batches(EXPORT_BATCH_ROWS):
            yield ids[shard.owns(ids)]


def _own_records(layout: Layout, rank: int, common: Common, shard: Shard) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    with _source(layout, rank, common) as table:
        for ids, records in rows_of(table).tier.record_batches(EXPORT_BATCH_ROWS):
            own = shard.owns(ids)
            yield ids[own], records[own]


def _count(folder: str) -> int:
    with open_table(folder, mode="r", memory=SOURCE_MEMORY) as table:
        return int(table.stats()["rows_touched"])


def _twice(folder: str, ids: np.ndarray) -> CorruptTableError:
    return CorruptTableError(f"a row of {ids[:4].tolist()} is in two parts of the table that {folder!r} is made of.")


def _remove_others(layout: Layout) -> None:
    """Remove what belongs to nothing: parts of other numbers of ranks."""
    for name in os.listdir(layout.path):
        match = FOLDER.fullmatch(name)
        if match and int(match[2]) != layout.ranks:
            shutil.rmtree(os.path.join(layout.path, name))
