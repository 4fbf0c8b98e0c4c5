"""`Home`: where a table lives. `Version`: how often its rows were changed, and how often when they were committed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from embedrock.spec import Spec
from embedrock.table.lease import NOBODY
from embedrock.tiers.memory import Memory
from embedrock.tiers.tier import Tier
from embedrock.tiers.turn import Turn

if TYPE_CHECKING:
    from embedrock.table.rows import Rows


NEVER = 1 << 63  # steps, that no table makes


class Version:
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


class Home(ABC):
    """Where a table lives: it makes the tiers, and knows what else there is to a change.

    Attributes:
        subject: what error messages call the table.
        reopening: how to go on with a table that is closed, a sentence for error messages.
        group: the `Group` whose member the table is.
        went_back_to: the commit whose content the last one has, where that was a rollback.
        steps_to_look: after so many steps of a table `look` is called.
    """

    subject: str
    reopening: str
    group: Any = None
    went_back_to: int | None = None
    steps_to_look: int = NEVER

    def turn(self) -> Turn:
        """Return who has the table: one turn for all tables that are stepped together."""
        return Turn()

    def named_by(self, layer: str) -> str:
        """Return what error messages call the table from now on, whose rows a layer has."""
        self.subject = layer
        return self.subject

    @property
    @abstractmethod
    def where(self) -> str:
        """Where that is, in words."""

    def unfinished(self, rows: Rows) -> np.ndarray:
        """Return the ids of a batch that was read with other tables, and may still be stepped."""
        return NOBODY

    @abstractmethod
    def replaced(self, rows: Rows, spec: Spec, fill: Callable[[Tier], None]) -> Tier:
        """Return a tier that takes the place of the one that there is, with the records that `fill` makes in it.

        Where that raises an error, the table stays as it is.
        """

    def be_quiet(self, rows: Rows) -> None:  # noqa: B027
        """Wait for what uses the rows in the background, and let others have the table meanwhile."""

    def is_quiet(self, rows: Rows) -> bool:
        """Return whether `be_quiet` need not wait."""
        return True

    @abstractmethod
    def grown(self, rows: Rows, spec: Spec) -> Tier:
        """Return a tier of the same records for a table that has more rows, or open ids. It is quiet.

        What the caller has to do then cannot fail: the tier that there was may have no records any more.

        Raises:
            MemoryBudgetError: they do not fit.
        """

    def lay_out_direct(self, rows: Rows) -> Memory | None:
        """Make the slot of a row its id, where that can be done in RAM; return the tier then."""
        return None

    def lay_out_hashed(self, rows: Rows) -> Memory | None:
        """Give rows a hashed tier in RAM that has no others, where that can be done; return it then."""
        return None

    def check_writable(self) -> None:  # noqa: B027  # a table in RAM always is, and has nothing to do here
        """Raise `ReadOnlyTableError` where the table may not be changed."""

    def bury(self, rows: Rows, ids: np.ndarray, count: int) -> bool:
        """Note that ids are forgotten, `count` of which had records; return whether the next commit has to say so."""
        return False

    def raise_commit_failure(self, rows: Rows) -> None:  # noqa: B027
        """Raise what went wrong with a commit in the background."""

    def look(self, rows: Rows) -> None:  # noqa: B027
        """Commit, where the table does so by itself and it is time to. Takes the turn by itself."""

    def commit_rest(self, rows: Rows) -> None:  # noqa: B027
        """Commit what no commit has, where the table commits by itself: it is about to be closed."""

    @abstractmethod
    def after_fork(self, rows: Rows) -> None:
        """Go on in a child process, or raise what keeps the table from being used there."""

    def close(self, rows: Rows, tier: Tier) -> None:  # noqa: B027
        """Close what is open beside the tier, which nobody uses any more but what runs in the background."""

    def stats(self) -> dict[str, float]:
        """Return numbers about it."""
        return {}

    def check_in_ram(self, verb: str) -> None:  # noqa: B027
        """Raise `UnsupportedError` where a table is saved by commits, not by `verb`."""
