"""`SourceTable`: a table that is published, from commits of its parts, and what changed in it since earlier ones."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from embedrock.distributed.owners import Shard
from embedrock.distributed.resharding import merged
from embedrock.errors import ArgumentError, CorruptTableError, HistoryDroppedError, UnsupportedError
from embedrock.initializers import FromArray, Given, Initializer, Zeros
from embedrock.io.vfs import SYSTEM, System
from embedrock.spec.description import read_spec
from embedrock.spec.spec import Spec
from embedrock.store.manifest import TableEntry
from embedrock.store.publication import SourceEntry
from embedrock.store.table_folder import TableFolder
from embedrock.system.scopes import set_within
from embedrock.table.changed_rows import CHUNK_ROWS, ChangedRows, changes_in
from embedrock.table.group import NO_OPTIONS, open_table
from embedrock.table.reading import weights_of
from embedrock.table.table import Table, rows_of

MEMORY = "16MiB"  # of a table whose rows are computed
_NO_IDS = np.empty(0, np.int64)


@contextlib.contextmanager
def opened_commit(path: str, at: int | None, system: System) -> Iterator[TableFolder]:
    """Context manager that has a commit open for reading. None: the last one."""
    with contextlib.closing(TableFolder.open(system, path, at, write=False, locked=False)) as found:
        if not found.manifest.commit:
            raise ArgumentError(f"{path} has no commit to publish yet. Call commit() first.")
        yield found


class SourcePart(NamedTuple):
    """Table of a commit that is published, or the part of it that one rank has.

    Attributes:
        table_folder: folder of the commit, open for reading.
        member: the table's entry there.
        shard: its rank, and the number of parts.
    """

    table_folder: TableFolder
    member: TableEntry
    shard: Shard

    @property
    def entry(self) -> SourceEntry:
        """Return its entry in the manifest of a published folder."""
        manifest = self.table_folder.manifest
        return SourceEntry(manifest.uuid, manifest.commit, self.table_folder.sha, self.member.name)

    @property
    def where(self) -> str:
        return f"{self.table_folder.folder}{f'#{self.member.name}' * bool(self.member.name)}"

    def follows(self, before: SourceEntry) -> bool:
        """Return whether it is a later state of the commit that was published before."""
        now = self.entry
        if (before.uuid, before.table) != (now.uuid, now.table) or before.commit > now.commit:
            return False
        with contextlib.suppress(HistoryDroppedError):
            self.table_folder.lists_since(before.commit, before.sha256)
            return True
        return False

    def changes(self, since: int | None) -> Iterable[ChangedRows]:
        """Return the rows that changed since an earlier commit. None: all rows with a record."""
        found = changes_in(self.table_folder, since, [self.member.name])[self.member.name]
        return map(self._owned, found) if self.shard.ranks > 1 else found

    def _owned(self, changed: ChangedRows) -> ChangedRows:
        if not self.shard.owns(np.concatenate([changed.ids, changed.gone])).all():
            raise CorruptTableError(f"{self.where} has rows that another part of the table must have.")
        return changed


def forgets(commit: TableFolder, before: SourceEntry) -> bool:
    """Return whether rows may have been forgotten since another commit."""
    if before.uuid != commit.manifest.uuid or before.commit > commit.manifest.commit:
        return False  # other rows
    try:
        return any(one.forgets for one in commit.lists_since(before.commit))
    except HistoryDroppedError:
        return True


class SourceTable(NamedTuple):
    """Table that is published.

    Attributes:
        parts: its parts, by rank; one, if it is not sharded.
        trained: its spec.
        spec: spec of the published rows.
        is_listed: lists of changes name all rows that changed. False: a rule moves others, too.
    """

    parts: Sequence[SourcePart]
    trained: Spec
    spec: Spec
    is_listed: bool

    @classmethod
    def of(
        cls, commits: Sequence[tuple[TableFolder, TableEntry]], dtype: str | None, init: Initializer | None
    ) -> SourceTable:
        """Return a table of open commits of its parts.

        Raises:
            TableFileError: its initial values are from an array that `init` does not have.
        """
        first = SourcePart(*commits[0], Shard(0, len(commits)))
        spec = read_spec(first.member.spec, init, first.where)
        shards = [first.shard._replace(rank=rank, segments=spec.segments) for rank in range(len(commits))]
        parts = [SourcePart(*commit, shard) for commit, shard in zip(commits, shards, strict=True)]
        default = None if spec.admission is None else spec.admission.default
        is_listed = (spec.rule is None or spec.rule.history() is None) and default != "shared"
        init = Zeros() if default == "zeros" or isinstance(spec.init, FromArray) else spec.init
        plain = replace(
            spec, rule=None, admission=None, eviction=None, segments=1, init=init, dtype=dtype or spec.dtype
        )
        return cls(parts, spec, plain, is_listed)

    @property
    def entries(self) -> list[SourceEntry]:
        """Return its entries in the manifest of a published folder."""
        return [part.entry for part in self.parts]

    def follows(self, before: Sequence[SourceEntry]) -> bool:
        """Return whether it is a later state of the commits that were published before."""
        return len(before) == len(self.parts) and all(map(SourcePart.follows, self.parts, before))

    @property
    def _has_array(self) -> bool:
        """Return whether rows without a record read as those of an array."""
        is_first = self.trained.admission is None or self.trained.admission.default == "first"
        return is_first and isinstance(self.trained.init, FromArray)

    @property
    def most_rows(self) -> int:
        """Return the number of published rows, at most."""
        has_all = self._has_array or not self.is_listed
        return max(sum(part.member.count for part in self.parts), self.spec.rows or 0 if has_all else 0)

    def all_rows(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Iterate over the ids and weights of all rows to publish, in the order of ids."""
        is_computed = self._has_array or not self.is_listed
        parts = [self._computed(part) if is_computed else part.changes(None) for part in self.parts]
        for picked in merged([((ids, rows) for ids, rows, _ in part if len(ids)) for part in parts]):
            ids, rows = map(np.concatenate, zip(*picked, strict=True))
            order = np.argsort(ids)
            yield ids[order], rows[order]

    def changes(self, since: Sequence[SourceEntry]) -> Iterable[ChangedRows] | None:
        """Return the rows that changed since earlier commits of its parts. None: all may have."""
        if not self.is_listed:
            return None
        try:
            found = [part.changes(before.commit) for part, before in zip(self.parts, since, strict=True)]
        except HistoryDroppedError:
            return None
        changed = itertools.chain.from_iterable(found)
        return map(self._with_first_values, changed) if self._has_array else changed

    def _with_first_values(self, changed: ChangedRows) -> ChangedRows:
        """Return rows that were deleted as rows with their initial values, which the published table does not have."""
        first = np.empty((len(changed.gone), self.spec.dim), np.float32)
        self.trained.init.fill(changed.gone, self.trained.key, first)
        ids, rows = np.concatenate([changed.ids, changed.gone]), np.concatenate([changed.rows, first])
        order = np.argsort(ids)
        return ChangedRows(ids[order], rows[order], _NO_IDS)

    def _computed(self, part: SourcePart) -> Iterator[ChangedRows]:
        """Iterate over rows as a lookup shows them: all, or those with a record if others have their initial values."""
        folder, name, admission = part.table_folder, part.member.name, self.trained.admission
        is_shared = admission is not None and admission.default == "shared"
        init = self.trained.init if isinstance(self.trained.init, Given) and not name else None
        with set_within(SYSTEM, folder.system):
            opened = open_table(folder.folder, "r", folder.manifest.commit, memory=MEMORY, init=init)
        with opened:
            table = opened if isinstance(opened, Table) else opened._opened(name, NO_OPTIONS, self.trained.init)
            if not (self._has_array or is_shared or table.first_scale != 1.0):
                for ids, weights in table.export_batches(CHUNK_ROWS):
                    yield ChangedRows(ids, weights, _NO_IDS)
                return
            if self.spec.rows is None:
                raise UnsupportedError(
                    f"{part.where} cannot be published: training changes rows that have no record, and with open ids "
                    '(rows=None) there is no end of them. Use another rule, or Admission(default="first").'
                )
            for at in range(0, self.spec.rows, CHUNK_ROWS):
                ids = np.arange(at, min(at + CHUNK_ROWS, self.spec.rows))
                own = ids[part.shard.owns(ids)]
                yield ChangedRows(own, weights_of(rows_of(table), own), _NO_IDS)
