"""`SourceTable`: a table of a commit that is published, and what changed in it since another commit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from embedrock.errors import ArgumentError, HistoryDroppedError, UnsupportedError
from embedrock.initializers import FromArray, Initializer, Zeros
from embedrock.io.vfs import System
from embedrock.spec.description import read_spec
from embedrock.spec.spec import Spec
from embedrock.store.manifest import TableEntry
from embedrock.store.publication import SourceEntry
from embedrock.store.table_folder import TableFolder
from embedrock.system.arena import cut
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


class SourceTable(NamedTuple):
    """Table of a commit that is published.

    Attributes:
        table_folder: folder of the commit, open for reading.
        member: the table's entry there.
        trained: its spec.
        spec: spec of the published rows.
        is_listed: lists of changes name all rows that changed. False: a rule moves others, too.
    """

    table_folder: TableFolder
    member: TableEntry
    trained: Spec
    spec: Spec
    is_listed: bool

    @classmethod
    def of(
        cls, table_folder: TableFolder, member: TableEntry, dtype: str | None, init: Initializer | None
    ) -> SourceTable:
        """Return a table of an open commit.

        Raises:
            TableFileError: its initial values are from an array that `init` does not have.
        """
        where = f"{table_folder.folder}{f'#{member.name}' * bool(member.name)}"
        spec = read_spec(member.spec, init, where)
        default = None if spec.admission is None else spec.admission.default
        is_listed = (spec.rule is None or spec.rule.history() is None) and default != "shared"
        init = Zeros() if default == "zeros" or isinstance(spec.init, FromArray) else spec.init
        plain = replace(spec, rule=None, admission=None, eviction=None, init=init, dtype=dtype or spec.dtype)
        return cls(table_folder, member, spec, plain, is_listed)

    @property
    def entry(self) -> SourceEntry:
        """Return its entry in the manifest of a published folder."""
        manifest = self.table_folder.manifest
        return SourceEntry(manifest.uuid, manifest.commit, self.table_folder.sha, self.member.name)

    def follows(self, before: SourceEntry) -> bool:
        """Return whether it is a later state of the commit that was published before."""
        now = self.entry
        if (before.uuid, before.table) != (now.uuid, now.table) or before.commit > now.commit:
            return False
        with contextlib.suppress(HistoryDroppedError):
            self.table_folder.lists_since(before.commit, before.sha256)
            return True
        return False

    def forgets(self, before: SourceEntry) -> bool:
        """Return whether rows may have been forgotten since a commit."""
        if before.uuid != self.entry.uuid or before.commit > self.entry.commit:
            return False  # other rows
        try:
            return any(one.forgets for one in self.table_folder.lists_since(before.commit))
        except HistoryDroppedError:
            return True

    @property
    def _has_array(self) -> bool:
        """Return whether rows without a record read as those of an array."""
        is_first = self.trained.admission is None or self.trained.admission.default == "first"
        return is_first and isinstance(self.trained.init, FromArray)

    @property
    def most_rows(self) -> int:
        """Return the number of published rows, at most."""
        return max(self.member.count, self.spec.rows or 0 if self._has_array or not self.is_listed else 0)

    def all_rows(self) -> Iterator[ChangedRows]:
        """Iterate over all rows to publish, in the order of ids."""
        if self.is_listed and not self._has_array:
            return iter(changes_in(self.table_folder, None, [self.member.name])[self.member.name])
        return self._computed()

    def changes(self, since: int) -> Iterable[ChangedRows] | None:
        """Return the rows that changed since an earlier commit. None: all may have."""
        if not self.is_listed:
            return None
        try:
            found = changes_in(self.table_folder, since, [self.member.name])[self.member.name]
        except HistoryDroppedError:
            return None
        return map(self._with_first_values, found) if self._has_array else found

    def _with_first_values(self, changed: ChangedRows) -> ChangedRows:
        """Return rows that were deleted as rows with their initial values, which the published table does not have."""
        first = np.empty((len(changed.gone), self.spec.dim), np.float32)
        self.trained.init.fill(changed.gone, self.trained.key, first)
        ids, rows = np.concatenate([changed.ids, changed.gone]), np.concatenate([changed.rows, first])
        order = np.argsort(ids)
        return ChangedRows(ids[order], rows[order], _NO_IDS)

    def _computed(self) -> Iterator[ChangedRows]:
        """Iterate over rows as a lookup shows them: all, or those with a record if others have their initial values."""
        folder, name, admission = self.table_folder, self.member.name, self.trained.admission
        is_shared = admission is not None and admission.default == "shared"
        init = self.trained.init if isinstance(self.trained.init, FromArray) and not name else None
        options: dict[str, Any] = {"memory": MEMORY, "system": folder.system, "init": init}
        with open_table(folder.folder, "r", folder.manifest.commit, **options) as opened:
            table = opened if isinstance(opened, Table) else opened._opened(name, NO_OPTIONS, self.trained.init)
            rows = rows_of(table)
            if not (self._has_array or is_shared or table.first_scale != 1.0):
                ids = np.sort(np.concatenate([_NO_IDS, *rows.tier.id_batches(CHUNK_ROWS)]))
            elif self.spec.rows is not None:
                ids = np.arange(self.spec.rows)
            else:
                raise UnsupportedError(
                    f"{folder.folder}{f'#{name}' * bool(name)} cannot be published: training changes rows that have no "
                    "record, and with open ids (rows=None) there is no end of them. Use another rule, or "
                    'Admission(default="first").'
                )
            for part in cut(ids, CHUNK_ROWS):
                yield ChangedRows(part, weights_of(rows, part), _NO_IDS)
