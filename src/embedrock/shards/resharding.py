"""`reshard`: the rows of a table on disk shared out over another number of ranks, a part at a time."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from embedrock.errors import ArgumentError, CorruptTableError, TableFileError, UnsupportedError
from embedrock.machine.vfs import OS_SYSTEM
from embedrock.shards.commits import Common, last_of, marks_of
from embedrock.shards.folders import FILE, FOLDER, Layout, layout_of
from embedrock.shards.owners import Shard
from embedrock.store import folder as folders
from embedrock.store.nearby import holds_table
from embedrock.table.open import open_table
from embedrock.table.rows import EXPORT_BATCH_ROWS
from embedrock.table.saved import Saved, load, saved_of
from embedrock.table.table import Table, rows_of

MEMORY = "64MiB"  # of the part that is written
BATCH_BYTES = 8 << 20  # of records that are read at a time
GONE = ".gone"  # parts that are being removed
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


def reshard(path: str, ranks: int, memory: int | str = MEMORY) -> Resharded:
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
    work = Resharding(before, ranks, memory)
    with work.locked():
        work.begin()
        if before.ranks != ranks:
            for rank in range(ranks):
                work.make(rank)
        work.publish()
    rows = sum(_count(part) for part in work.after.parts)
    return Resharded(before.ranks, ranks, rows, work.common.step, work.name)


class Resharding:
    """The rows of a table that are being shared out over another number of ranks. New parts can be made at once.

    Args:
        before: where they are.
        ranks: how many parts there are to be.
        memory: of each table that is written.

    Attributes:
        after: where they go.
        common: the commit that they are of.
        name: what the commit of each new part is called.
    """

    common: Common
    name: str

    def __init__(self, before: Layout, ranks: int, memory: int | str = MEMORY) -> None:
        self.before, self.after, self._memory = before, Layout(before.path, ranks), memory

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Let nobody write to the parts that there are."""
        with contextlib.ExitStack() as held:
            for part in self.before.parts:
                held.callback(folders.unlock, OS_SYSTEM, folders.lock(OS_SYSTEM, part, locked=True))
            yield

    def begin(self) -> None:
        """Find out which commit it is of."""
        self.common = last_of(self.before)
        self.name = self.common.name or self._own_name()

    def _own_name(self) -> str:
        """Return a name that no parts of an earlier time have, so that they do not pass for new ones."""
        of = zip(self.before.parts, self.common.numbers, strict=True)
        newest = [folders.manifest_at(OS_SYSTEM, part, number) for part, number in of]
        made_of = repr([(manifest.uuid, manifest.commit) for manifest in newest]).encode()
        return f"resharded-{zlib.crc32(made_of):08x}"

    def make(self, rank: int) -> None:
        """Make one of the new parts, unless it is there already."""
        _make_part(self.before, self.after, rank, self.common, self.name, self._memory)

    def publish(self) -> None:
        """Let the new parts be the table, all of which were made, and remove the others."""
        if self.before.ranks != self.after.ranks:
            self.after.publish()
        _remove_others(self.after)


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
    """Return whether a new part is there as a whole: the commit of that name was the last act of its making."""
    if not holds_table(OS_SYSTEM, folder):
        return False
    return marks_of(folder)[-1].name == name


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
        for ids, records in rows_of(table).tier.record_batches(max(1, BATCH_BYTES // table.spec.record_bytes)):
            own = shard.owns(ids)
            yield ids[own], records[own]


def _count(folder: str) -> int:
    with open_table(folder, mode="r", memory=SOURCE_MEMORY) as table:
        return int(table.stats()["rows_touched"])


def _twice(folder: str, ids: np.ndarray) -> CorruptTableError:
    return CorruptTableError(f"a row of {ids[:4].tolist()} is in two parts of the table that {folder!r} is made of.")


def _remove_others(layout: Layout) -> None:
    """Remove what belongs to nothing: parts of other numbers of ranks, and what is left of them."""
    for name in os.listdir(layout.path):
        match, path = FOLDER.fullmatch(name), os.path.join(layout.path, name)
        if match and int(match[2]) != layout.ranks:
            path = os.path.join(layout.path, f"{FILE}.{secrets.token_hex(4)}{GONE}")
            os.replace(os.path.join(layout.path, name), path)  # or half of a part might pass for a whole one
        if path.endswith(GONE):
            shutil.rmtree(path)
