"""`Location`: where a table lives. `ChangeCounter`: how often its rows were changed, and when they were committed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from embedrock.spec.spec import Spec
from embedrock.storage.backend import Backend
from embedrock.storage.record_pools import RecordPools
from embedrock.storage.table_lock import TableLock
from embedrock.table.prepared import JointPreparedSteps

NEVER = 1 << 63  # steps, that no table makes


class ChangeCounter:
    """How often a table was changed, and how often when it was last committed.

    Attributes:
        now: how often.
        of_rows: how often in a way that may have changed a row.
        committed: how often when it was last committed.
    """

    def __init__(self) -> None:
        self.now = self.of_rows = self.committed = 0
        self._begun = -1

    def advance(self, keeps_rows: bool = False) -> None:
        """Note a change; `keeps_rows`: no row is another after it."""
        self.now += 1
        self.of_rows += not keeps_rows

    def commit(self) -> None:
        """Note that a commit has all changes so far."""
        self.committed = self.now

    def begin(self) -> None:
        """Note that a new table needs no commit for what it is now: it can be made again."""
        self._begun = self.now

    @property
    def is_committed(self) -> bool:
        """Whether a commit has all changes."""
        return self.now == self.committed

    @property
    def can_be_lost(self) -> bool:
        """Whether there are changes that nothing brings back."""
        return not self.is_committed and self.now != self._begun


class Location(ABC):
    """Where tables live together: one alone, or the members of a group. In RAM, or in a folder.

    Args:
        pools: make the tiers of the tables.
        is_alone: it is of one table that has no group.
        turn: the one lock of all of them.
        subject: what error messages call a table alone, or the group.

    Attributes:
        pools, is_alone, turn, subject: see above.
        lease: the batch that the tables read together last.
        steps_to_look: after so many steps of a table `look` is called.
        went_back_to: the commit whose content the last one has, where that was a rollback.
    """

    steps_to_look: int = NEVER
    went_back_to: int | None = None

    def __init__(self, pools: RecordPools, is_alone: bool, table_lock: TableLock, subject: str) -> None:
        self.pools, self.is_alone, self.table_lock, self.subject = pools, is_alone, table_lock, subject
        self.prepared_steps = JointPreparedSteps()

    @property
    @abstractmethod
    def where(self) -> str:
        """Where that is, in words."""

    @abstractmethod
    def reopening(self, name: str) -> str:
        """Return how to go on with a table that is closed, a sentence for error messages."""

    def subject_of(self, name: str) -> str:
        """Return what error messages call a table; `name` is "" for one alone."""
        return f"table {name!r}" if name else self.subject

    def named_by(self, layer: str) -> str:
        """Return what error messages call a table whose rows a layer has."""
        return layer

    def empty_tier(self, spec: Spec, subject: str) -> Backend:
        """Return a tier without records."""
        self._make_quiet()
        return self.pools.part(spec, subject)

    def replaced(self, tier: Backend, spec: Spec, fill: Callable[[Backend], None], subject: str) -> Backend:
        """Return a tier that takes the place of a table's, with the records that `fill` makes in it.

        Where that raises an error, the table stays as it is.
        """
        self._make_quiet()
        return self.pools.replaced(tier, spec, fill, subject)

    def grown(self, tier: Backend, spec: Spec, subject: str) -> Backend:
        """Return a tier of the same records for a table that has more rows, or open ids.

        What the caller has to do then cannot fail: the old tier may have no records any more.

        Raises:
            MemoryBudgetError: they do not fit.
        """
        self._make_quiet()
        return self.pools.grown(tier, spec, subject)

    @abstractmethod
    def after_fork(self, subject: str) -> None:
        """Go on in a child process, or raise what keeps a table from being used there."""

    @abstractmethod
    def close_table(self, name: str, tier: Backend) -> None:
        """Give the tier of a closed table back. Only background work still uses it."""

    # ---------------------------------------------------------------- what only tables in folders have

    def wait_for_quiet(self) -> None:  # noqa: B027
        """Wait for what uses rows in the background; others may have the tables meanwhile."""

    @property
    def is_idle(self) -> bool:
        """Whether `wait_for_quiet` need not wait."""
        return True

    def _make_quiet(self) -> None:  # noqa: B027
        """Wait for what uses rows in the background, and end what compacts. Raise where nothing may be changed."""

    def check_writable(self) -> None:  # noqa: B027
        """Raise `ReadOnlyTableError` where nothing may be changed."""

    def bury(self, name: str, version: ChangeCounter, ids: np.ndarray, count: int) -> bool:
        """Note that ids are forgotten, `count` of which had records; return whether the next commit has to say so."""
        return False

    def raise_commit_failure(self) -> None:  # noqa: B027
        """Raise what went wrong with a commit in the background."""

    def look(self) -> None:  # noqa: B027
        """Commit, where that is done by itself and it is time to. Takes the turn by itself."""

    def commit_rest(self) -> None:  # noqa: B027
        """Commit what no commit has, where that is done by itself: the tables are about to be closed."""

    def stats(self) -> dict[str, float]:
        """Return numbers about it."""
        return {}

    def check_in_ram(self, verb: str, name: str) -> None:  # noqa: B027
        """Raise `UnsupportedError` where a table is saved by commits, not by `verb`."""
