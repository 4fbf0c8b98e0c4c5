"""`RowChanges`: the rows of a table that changed since an earlier commit, read in bounded chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from embedrock.batch.plan import counting
from embedrock.errors import ArgumentError, ClosedTableError, UnsupportedError, counted
from embedrock.initializers import Zeros
from embedrock.spec.description import read_spec
from embedrock.spec.spec import Spec
from embedrock.storage.records import Records
from embedrock.store.change_lists import ChangedIds
from embedrock.store.manifest import TableEntry
from embedrock.store.record_store import ALL_IDS, keys_of_part
from embedrock.store.table_folder import TableFolder
from embedrock.system.arena import cut

CHUNK_ROWS = 16_384  # their arrays are small enough to be used again: fresh memory took a quarter of the time


class ChangedRows(NamedTuple):
    """Chunk of changed rows.

    Attributes:
        ids: ids of rows with a record, int64 (n,), ascending.
        rows: their weights, float32 (n, dim).
        gone: ids without a record, int64 (m,), ascending. These rows have their first values.
    """

    ids: np.ndarray
    rows: np.ndarray
    gone: np.ndarray


class RowChanges:
    """Rows of a table that differ between two commits. Iterating reads them as of the later one.

    Each row that differs is in it once. A few rows that do not differ may be, too. Any thread may iterate.

    Attributes:
        since: number of the earlier commit. None: all rows with a record are in it.
        commit: number of the later commit.
        ids: ids of the rows, int64 (n,), ascending. None: of all rows with a record.

    Example:
        >>> import tempfile, embedrock as er
        >>> table = er.Table(rows=100, dim=2, path=tempfile.mkdtemp() + "/t", rule=er.SGD(lr=1.0), init=er.Zeros())
        >>> since = table.commit()
        >>> table.update([7], [[1.0, 1.0]])
        >>> commit = table.commit()
        >>> [(ids.tolist(), rows.tolist(), gone.tolist()) for ids, rows, gone in table.changes(since)]
        [([7], [[-1.0, -1.0]], [])]
        >>> table.close()
    """

    def __init__(
        self, table_folder: TableFolder, member: TableEntry, spec: Spec, since: int | None, ids: np.ndarray | None
    ) -> None:
        self._folder, self._spec = table_folder, spec
        table_folder.readers.add(self)
        self._store = table_folder.stores[member.pool]
        self._lo, self._end = ALL_IDS if member.part is None else keys_of_part(member.part)
        self._first = self._lo if member.part is not None else 0
        self.since, self.commit, self.ids = since, table_folder.manifest.commit, ids

    def __bool__(self) -> bool:
        """Return whether any row may differ."""
        return self.ids is None or len(self.ids) > 0

    def __repr__(self) -> str:
        rows = "all rows" if self.ids is None else counted(len(self.ids), "row")
        return f"RowChanges({rows} of commit {self.commit} since {self.since})"

    def __iter__(self) -> Iterator[ChangedRows]:
        for ids in self._parts():
            found = self._store.located(ids + self._first)
            if len(found.ids) and not found.runs:
                raise ClosedTableError(
                    f"changes of {self._folder.folder} cannot be read: commit {self.commit} was closed meanwhile. "
                    "Read them before the table is closed, or the block of a subscriber's step ends."
                )
            records = Records(self._spec, np.empty(len(found.ids) * self._spec.record_bytes, np.uint8))
            rows, slots = np.empty((len(found.ids), self._spec.dim), np.float32), np.arange(len(found.ids))
            self._store.read(found, records.bytes, slots)
            records.read(slots, counting(len(slots)), rows[:0], rows)
            yield ChangedRows(ids[found.positions], rows, np.delete(ids, found.positions))

    def _parts(self) -> Iterator[np.ndarray]:
        if self.ids is not None:
            return cut(self.ids, CHUNK_ROWS)
        return (keys - self._first for keys in self._store.all_ids(self._lo, self._end, CHUNK_ROWS)[1])


def changes_in(
    table_folder: TableFolder, since: int | None, names: list[str] | None = None, ids: ChangedIds | None = None
) -> dict[str, RowChanges]:
    """Return the changes of the members of a folder by name, as of its opened commit. None: all members.

    `ids` has the changed ids of each member, if they are known.

    Raises:
        ArgumentError: there was no commit `since`, or a member has no commit yet.
        HistoryDroppedError: nothing says any more what changed since.
        UnsupportedError: a table's rule moves rows without a gradient.
    """
    last, where = table_folder.manifest.commit, table_folder.folder
    if since is not None and not 0 <= since <= last:
        raise ArgumentError(f"`since` must be a commit of {where}, 0 to {last}, or None for all rows: got {since}.")
    members = {member.name: member for member in table_folder.manifest.members}
    specs = dict[str, Spec]()
    for name in members if names is None else names:
        if name not in members:
            raise ArgumentError(f"no commit of {where} has table {name!r} yet. Call commit() before changes().")
        spec = specs[name] = read_spec({**members[name].spec, "init": Zeros().describe()}, None, where)
        if spec.rule is not None and spec.rule.history() is not None:
            raise UnsupportedError(
                f"changes of {where}{f'#{name}' * bool(name)} cannot be listed: {spec.rule} also moves rows without a "
                "gradient, so that each step may change every row. Read all rows: "
                f'er.open({where!r}, mode="r") and its export_batches().'
            )
    if ids is None:
        ids = {} if since is None else table_folder.changed_ids(since, table_folder.lists_since(since), specs)
    return {name: RowChanges(table_folder, members[name], spec, since, ids.get(name)) for name, spec in specs.items()}
