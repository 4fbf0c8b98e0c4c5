"""`Location`: where tables live. `ChangeCounter`: counts changes of rows and commits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from embedrock.spec.spec import Spec
from embedrock.storage.backend import Backend
from embedrock.storage.record_pools import RecordPools
from embedrock.storage.table_lock import TableLock
from embedrock.table.prepared import JointPreparedSteps

NEVER = 1 << 63  # more steps than any table makes


class ChangeCounter:
    """Counter of a table's changes, with its value at the last commit.

    Attributes:
        now: number of changes.
        of_rows: number of changes that may have changed a row.
        committed: `now` at the last commit.
    """

    def __init__(self) -> None:
        self.now = self.of_rows = self.committed = 0
        self._begun = -1

    def advance(self, keeps_rows: bool = False) -> None:
        """Count a change; `keeps_rows`: it changes no row."""
        self.now += 1
        self.of_rows += not keeps_rows

    def commit(self) -> None:
        """Mark all changes as committed."""
        self.committed = self.now

    def begin(self) -> None:
        """Mark the state of a new table as committed: it can be made again."""
        self._begun = self.now

    @property
    def is_committed(self) -> bool:
        """Return whether all changes are committed."""
        return self.now == self.committed

    @property
    def can_be_lost(self) -> bool:
        """Return whether there are changes that cannot be made again."""
        return not self.is_committed and self.now != self._begun


class Location(ABC):
    """The place of a table alone, or of the members of a group: in RAM, or in a folder.

    Args:
        pools: factory of the tables' backends.
        is_alone: it is of one table without a group.
        table_lock: the common lock of the tables.
        subject: name of the table or group in error messages.

    Attributes:
        pools, is_alone, table_lock, subject: see above.
        prepared_steps: the last batch that the tables read together.
        steps_to_look: steps of a table between calls of `look`.
        went_back_to: the commit whose content the last one has, if that was a rollback.
    """

    steps_to_look: int = NEVER
    went_back_to: int | None = None

    def __init__(self, pools: RecordPools, is_alone: bool, table_lock: TableLock, subject: str) -> None:
        self.pools, self.is_alone, self.table_lock, self.subject = pools, is_alone, table_lock, subject
        self.prepared_steps = JointPreparedSteps()

    @property
    @abstractmethod
    def where(self) -> str:
        """The place in words."""

    @abstractmethod
    def reopening(self, name: str) -> str:
        """Return a sentence for error messages that says how to reopen a closed table."""

    def subject_of(self, name: str) -> str:
        """Return the name of a table in error messages; `name` is "" for one alone."""
        return f"table {name!r}" if name else self.subject

    def named_by(self, layer: str) -> str:
        """Return the name in error messages of a table whose rows a layer has."""
        return layer

    def empty_tier(self, spec: Spec, subject: str) -> Backend:
        """Return a backend without records."""
        self._make_quiet()
        return self.pools.part(spec, subject)

    def replaced(self, tier: Backend, spec: Spec, fill: Callable[[Backend], None], subject: str) -> Backend:
        """Return a new backend of a table, with the records that `fill` makes in it.

        If `fill` raises an error, the table stays as it is.
        """
        self._make_quiet()
        return self.pools.replaced(tier, spec, fill, subject)

    def grown(self, tier: Backend, spec: Spec, subject: str) -> Backend:
        """Return a backend of the same records for a table that has more rows, or open ids.

        The caller's next steps must not fail: the old backend may have lost its records.

        Raises:
            MemoryBudgetError: they do not fit.
        """
        self._make_quiet()
        return self.pools.grown(tier, spec, subject)

    @abstractmethod
    def after_fork(self, subject: str) -> None:
        """Continue in a child process, or raise why a table cannot be used there."""

    @abstractmethod
    def close_table(self, name: str, tier: Backend) -> None:
        """Release the backend of a closed table. Only background work still uses it."""

    # ---------------------------------------------------------------- what only tables in folders have

    def wait_for_quiet(self) -> None:  # noqa: B027
        """Wait for background work on rows. The table lock may be released meanwhile."""

    @property
    def is_idle(self) -> bool:
        """Return whether `wait_for_quiet` need not wait."""
        return True

    def _make_quiet(self) -> None:  # noqa: B027
        """Wait for background work on rows, and end compaction. Raise where nothing may change."""

    def check_writable(self) -> None:  # noqa: B027
        """Raise `ReadOnlyTableError` where nothing may change."""

    def bury(self, name: str, version: ChangeCounter, ids: np.ndarray, count: int) -> bool:
        """Record deleted ids, `count` of which had records; return whether the next commit must contain them."""
        return False

    def raise_commit_failure(self) -> None:  # noqa: B027
        """Raise the error of a background commit, if any."""

    def look(self) -> None:  # noqa: B027
        """Start an automatic commit if it is due. Takes the table lock."""

    def commit_rest(self) -> None:  # noqa: B027
        """Commit the remaining changes if commits are automatic: the tables are about to be closed."""

    def stats(self) -> dict[str, float]:
        """Return its statistics."""
        return {}

    def check_in_ram(self, verb: str, name: str) -> None:  # noqa: B027
        """Raise `UnsupportedError` if a table is saved by commits, and not by `verb`."""
