"""Numbers about tables for logs: what front ends show of them, and what they call it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from embedrock.table.table import Table

COME_AND_GONE = ("admitted", "evicted", "gradients_dropped", "gradients_shared")


class _Counts(NamedTuple):
    """Rows that were asked for since a table was opened, by whether they were in its cache."""

    hits: float
    misses: float


class TableNumbers:
    """Numbers about tables, as logs show them: ``"<name>/<what>"``.

    - ``rows``: rows that were ever stepped, and so are stored;
    - ``ram_bytes``: RAM that they take now (for a table on disk, its cache and its index);

    for a table whose rows come and go,

    - ``admitted``, ``evicted``: rows that got a record, and that lost it, so far;
    - ``gradients_dropped``: of rows that had no record yet;
    - ``gradients_shared``: of such rows, where they train a shared one;

    and for a table on disk,

    - ``disk_bytes``: its files;
    - ``hit_rate``: how many of the rows that were asked for since the last time were in the cache; left out where none
      were asked for;
    - ``commit_age_s``: seconds since its last commit.
    """

    def __init__(self) -> None:
        self._counted: weakref.WeakKeyDictionary[Table, _Counts] = weakref.WeakKeyDictionary()

    def begin(self, tables: Iterable[Table]) -> None:
        """Count what is asked for from now on."""
        for table in tables:
            self._counted[table] = _counts(table.stats())

    def of(self, tables: Mapping[str, Table]) -> dict[str, float]:
        """Return the numbers of tables, by their names."""
        return {
            f"{name}/{what}": float(value)
            for name, table in tables.items()
            for what, value in self._of_one(table).items()
        }

    def _of_one(self, table: Table) -> dict[str, float]:
        stats = table.stats()
        numbers = {"rows": stats["rows_touched"], "ram_bytes": stats["bytes_used"]}
        numbers |= {what: stats[what] for what in COME_AND_GONE if what in stats}
        if not table.is_on_disk:
            return numbers
        before, now = self._counted.get(table, _Counts(0, 0)), _counts(stats)
        self._counted[table] = now
        hits, misses = now.hits - before.hits, now.misses - before.misses
        if hits + misses:
            numbers["hit_rate"] = hits / (hits + misses)
        return {**numbers, "disk_bytes": stats["disk_bytes"], "commit_age_s": _age_s(table)}


def _counts(stats: dict[str, float]) -> _Counts:
    return _Counts(stats.get("hits", 0), stats.get("misses", 0))


def _age_s(table: Table) -> float:
    """Return the seconds since a table's last commit."""
    made = datetime.fromisoformat(table.commits()[-1]["time"])
    return max(0.0, (datetime.now(UTC) - made).total_seconds())
