"""`MemberRegistry`: a location that knows its tables by name. `RamLocation`: that of tables without files."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from embedrock.admission.lifecycle import RowLifecycle
from embedrock.errors import EmbedrockError
from embedrock.optimizers import StepHistory
from embedrock.storage.backend import Backend
from embedrock.storage.record_pools import RecordPools, RecordRange
from embedrock.storage.table_lock import TableLock
from embedrock.store.manifest import HistoryFile
from embedrock.system import forks
from embedrock.system.interrupts import held_back
from embedrock.table.location import Location
from embedrock.table.rows import TableState


@dataclass
class ClosedMember:
    """A member that is not open: as the last commit has it, or as it was closed.

    Attributes:
        tier: its records.
        spec: its description.
        steps, skipped_steps: counts of made and skipped steps.
        files: history files in the last commit; None: the commit does not have them.
        history, lifecycle: step history and row lifecycle, if known.
    """

    tier: Backend
    spec: dict[str, Any]
    steps: int
    skipped_steps: int
    files: tuple[HistoryFile, ...] | None
    history: StepHistory | None = None
    lifecycle: RowLifecycle | None = None


class MemberRegistry(Location):
    """A location that knows its tables by name. It has weak references to the rows of open tables.

    Attributes:
        listener: weak reference to a function that gets the names of closed members.
    """

    def __init__(self, pools: RecordPools, is_alone: bool, table_lock: TableLock, subject: str) -> None:
        super().__init__(pools, is_alone, table_lock, subject)
        self._members: dict[str, weakref.ref[TableState] | ClosedMember] = {}
        self.listener: Callable[[], Callable[[str], None] | None] = lambda: None

    def enter(self, name: str, rows: TableState) -> None:
        """Register the rows of an open member."""
        self._members[name] = weakref.ref(rows)

    def get(self, name: str) -> TableState | ClosedMember | None:
        """Return a member: its rows, if it is open."""
        found = self._members.get(name)
        return found() if isinstance(found, weakref.ref) else found

    @property
    def names(self) -> list[str]:
        """The names of all members, in the order of their registration."""
        return list(self._members)

    def items(self) -> list[tuple[str, TableState | ClosedMember]]:
        """Return all members, by name."""
        return [(name, member) for name in self._members if (member := self.get(name)) is not None]

    def open_rows(self) -> list[TableState]:
        """Return the rows of members that are open."""
        return [member for _, member in self.items() if isinstance(member, TableState)]

    @property
    def is_there(self) -> bool:
        """Return whether all open members are still referenced."""
        known = [each() for each in self._members.values() if isinstance(each, weakref.ref)]
        return all(rows is not None and not rows.is_closed for rows in known)

    def _tell_of(self, name: str) -> None:
        if (note := self.listener()) is not None:
            note(name)

    def drop(self, name: str) -> None:
        """Close a member, and release its memory."""
        member = self.get(name)
        if isinstance(member, TableState):
            member.close()

    def rename(self, name: str, new: str) -> None:
        """Give an open member another name."""
        self._members = {new if each == name else each: member for each, member in self._members.items()}
        rows = self.get(new)
        if isinstance(rows, TableState):
            rows.name = new
            rows.name_by(f"table {new!r}")

    def close(self) -> None:
        """Close all members."""
        for rows in self.open_rows():
            rows.close()


class RamLocation(MemberRegistry):
    """Tables that live in RAM, and are saved by `Table.state`."""

    @property
    def where(self) -> str:
        return "in RAM" if self.is_alone else "in RAM, in a group"

    def reopening(self, name: str) -> str:
        made = f"it anew by group.table({name!r}, ...)," if name else "a new Table, or a layer with one,"
        return f"Make {made} and load what state() or state_dict() returned before."

    def after_fork(self, subject: str) -> None:
        """Raise `EmbedrockError` in a child process unless its rows are a copy after a whole step."""
        if self.table_lock.is_torn:
            raise EmbedrockError(
                f"{subject} cannot be used in process {os.getpid()}: when that was forked, another thread of its "
                f"parent had been at work with the table for over {forks.PATIENCE:g} seconds, and the copy here may be "
                "half changed. Start processes before such calls, or wait for them."
            )

    def close_table(self, name: str, tier: Backend) -> None:
        with held_back():
            self.pools.release(tier)
            self._members.pop(name, None)
            self._tell_of(name)


def part_of(rows: TableState) -> RecordRange:
    """Return the key range of a member's records."""
    tier = rows.tier
    assert isinstance(tier, RecordRange)  # members have no other kind
    return tier
