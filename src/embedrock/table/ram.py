"""`InRam`: where a table without files lives."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import cast

from embedrock.errors import EmbedrockError, MemoryBudgetError
from embedrock.machine.sizes import Size
from embedrock.process import forks
from embedrock.spec import Spec
from embedrock.table.home import Home
from embedrock.table.rows import Rows
from embedrock.tiers.memory import Memory, place
from embedrock.tiers.tier import Tier


def check_copy(rows: Rows) -> None:
    """See to it that rows in RAM, in a child process, are a copy of those of a whole step.

    Raises:
        EmbedrockError: they are not, as another thread of the parent was at work with them for too long.
    """
    if rows.turn.is_torn:
        raise EmbedrockError(
            f"{rows.subject} cannot be used in process {os.getpid()}: when that was forked, another thread of its "
            f"parent had been at work with the table for over {forks.PATIENCE:g} seconds, and the copy here may be "
            "half changed. Start processes before such calls, or wait for them."
        )


class InRam(Home):
    """Rows that live in RAM, and are saved by `Table.state`.

    Args:
        memory: the most RAM that they may take.
        directory: which finds them: "direct", "hashed" or "auto".
        subject: the table, for error messages.
    """

    reopening = "Make a new Table, or a layer with one, and load what state() or state_dict() returned before."

    def __init__(self, memory: Size | None, directory: str, subject: str) -> None:
        self._memory, self._directory, self.subject = memory, directory, subject

    @property
    def where(self) -> str:
        return "in RAM"

    def empty_tier(self, spec: Spec) -> Memory:
        """Return a tier without records."""
        return Memory(spec, place(spec, self._memory, self._directory, self.subject), self.subject)

    def after_fork(self, rows: Rows) -> None:
        check_copy(rows)

    def replaced(self, rows: Rows, spec: Spec, fill: Callable[[Tier], None]) -> Memory:
        made = self.empty_tier(spec)
        fill(made)
        return made

    def grown(self, rows: Rows, spec: Spec) -> Memory:
        tier = cast(Memory, rows.tier)  # it makes no other
        return tier.grown(spec, place(spec, self._memory, self._directory, self.subject))

    def lay_out_direct(self, rows: Rows) -> Memory | None:
        tier = cast(Memory, rows.tier)  # it makes no other
        if tier.is_direct:
            return tier
        if rows.spec.rows is None or self._directory == "hashed":
            return None
        try:
            placement = place(rows.spec, self._memory, "direct", self.subject)
            made = Memory(rows.spec, placement, self.subject)
        except MemoryBudgetError:
            return None
        made.paste_records(*tier.snapshot())
        rows.replace_tier(made)
        return made

    def lay_out_hashed(self, rows: Rows) -> Memory | None:
        tier = cast(Memory, rows.tier)  # it makes no other
        return None if tier.is_direct else tier
