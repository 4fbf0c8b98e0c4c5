"""`InGroup`: where a table of a group lives, in RAM. `InFolder`: in the folder of a group on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import numpy as np

from embedrock.errors import MemoryBudgetError
from embedrock.process.interrupts import held_back
from embedrock.spec import Spec
from embedrock.table.files import refuse_state
from embedrock.table.home import Home
from embedrock.table.ram import check_copy
from embedrock.table.rows import Rows
from embedrock.tiers.memory import Memory
from embedrock.tiers.part import Part, may_share
from embedrock.tiers.tier import Tier
from embedrock.tiers.turn import Turn

if TYPE_CHECKING:
    from embedrock.table.group import Group
    from embedrock.table.group_files import GroupFiles
    from embedrock.tiers.pools import Pools

MOVED_BYTES = 8 << 20  # of records, at a time


def part_of(rows: Rows) -> Part:
    """Return the part of its pool where a member's records are."""
    tier = rows.tier
    assert isinstance(tier, Part)  # members have no other
    return tier


def _copy(part: Part, made: Tier) -> None:
    """Make the records of a part in another tier, which is laid out alike."""
    for ids, records in part.record_batches(max(1, MOVED_BYTES // part.spec.record_bytes)):
        made.paste_records(ids, records)


class InGroup(Home):
    """Rows that live in the pools of a group in RAM, and are saved by `Table.state`.

    Args:
        group: whose.
        name: of the table in it.

    Attributes:
        is_dropped: the group has the table no more, or is about to let it go.
    """

    is_dropped = False

    def __init__(self, group: Group, name: str) -> None:
        self.group, self.name, self.subject = group, name, f"table {name!r}"

    @property
    def reopening(self) -> str:  # type: ignore[override]
        """How to go on with a table that is closed."""
        return (
            f"Make it anew by group.table({self.name!r}, ...), and load what state() or state_dict() returned before."
        )

    @property
    def where(self) -> str:
        return "in RAM, in a group"

    def rename(self, rows: Rows, name: str) -> None:
        """Go by another name in the group."""
        is_own, self.name = rows.subject == self.subject, name
        if is_own:  # not that of a layer
            rows.name_by(f"table {name!r}")

    def unfinished(self, rows: Rows) -> np.ndarray:
        """Return the ids that it has in a batch of the group which may still be stepped."""
        return self.group.lease.unfinished(rows)

    def turn(self) -> Turn:
        return self.group.turn

    def empty_tier(self, spec: Spec) -> Part:
        """Return a tier without records."""
        return self.group.pools.part(spec, self.subject)

    def replaced(self, rows: Rows, spec: Spec, fill: Callable[[Tier], None]) -> Part:
        made, pools = self.empty_tier(spec), self.group.pools
        try:
            fill(made)
        except BaseException:
            pools.release(made)
            raise
        pools.release(part_of(rows))
        return made

    def grown(self, rows: Rows, spec: Spec) -> Part:
        part = part_of(rows)
        if self._grows(part, spec):
            return part

        def fill(made: Tier) -> None:
            made.check_room(part.count)
            _copy(part, made)

        return self.replaced(rows, spec, fill)

    def lay_out_direct(self, rows: Rows) -> Memory | None:
        part = part_of(rows)
        if part.is_direct:
            return part.pool.tier
        return None if rows.spec.rows is None or rows.residents is not None else self._moved_out(rows, "direct")

    def lay_out_hashed(self, rows: Rows) -> Memory | None:
        part = part_of(rows)
        if part.pool.is_shared:
            return self._moved_out(rows, "hashed")
        return None if part.is_direct else part.pool.tier

    def _moved_out(self, rows: Rows, directory: str) -> Memory | None:
        """Move rows to a pool of their own; return its tier, None where the group has no memory for it."""
        part = part_of(rows)
        pools = cast("Pools", self.group.pools)  # those of a group on disk have another home
        try:
            made = pools.part_alone(rows.spec, directory, part.count, self.subject)
        except MemoryBudgetError:
            return None
        _copy(part, made)
        made.history = rows.history
        pools.release(part)
        rows.replace_tier(made)
        return made.pool.tier

    def _grows(self, part: Part, spec: Spec) -> bool:
        """Let a table have more rows where it is; return whether it can."""
        # In its own range, or all keys are its own; records in slots that are ids have no room for more.
        can = (may_share(spec) or not part.pool.is_shared) and not part.is_direct
        if can:
            part.spec = spec
        return can

    def after_fork(self, rows: Rows) -> None:
        check_copy(rows)

    def close(self, rows: Rows, tier: Tier) -> None:
        assert isinstance(tier, Part)  # it makes no other
        with held_back():
            self.group.pools.release(tier)
            self.group.forget(rows, self.name, tier)


class InFolder(InGroup):
    """Rows that live in the files of a group.

    Args:
        group: whose.
        name: of the table in it.
        files: of the group.
    """

    def __init__(self, group: Group, name: str, files: GroupFiles) -> None:
        super().__init__(group, name)
        self.files = files

    @property
    def reopening(self) -> str:
        path = self.files.opening.path
        if self.is_dropped:
            return (
                f"It was dropped from the group at {path!r}: make it anew by group.table({self.name!r}, ...), or go "
                "back to a commit that has it, group.rollback(...)."
            )
        return f"Open the group again, er.open({path!r}), or make it anew by group.table({self.name!r}, ...)."

    @property
    def where(self) -> str:
        return f"in the group on disk at {self.files.opening.path!r}{'' if self.files.writes else ' (read only)'}"

    @property
    def went_back_to(self) -> int | None:  # type: ignore[override]
        """The commit whose content the last one has, where that was a rollback."""
        return self.files.went_back_to

    @property
    def steps_to_look(self) -> int:  # type: ignore[override]
        """After so many steps of a table `look` is called."""
        return self.files.steps_to_look

    def look(self, rows: Rows) -> None:
        self.files.look(None)

    def empty_tier(self, spec: Spec) -> Part:
        self.files.check_writable()
        self.files.wait_for_quiet(None)
        self.files.stop_compaction()
        return super().empty_tier(spec)

    def lay_out_direct(self, rows: Rows) -> Memory | None:
        return None

    def lay_out_hashed(self, rows: Rows) -> Memory | None:
        return None

    def bury(self, rows: Rows, ids: np.ndarray, count: int) -> bool:
        return self.files.forget(self.name, rows, ids, count)

    def be_quiet(self, rows: Rows) -> None:
        self.files.wait_for_quiet(None)

    def is_quiet(self, rows: Rows) -> bool:
        return all(tier.is_quiet for tier in self.files.pools.tiers)

    def _grows(self, part: Part, spec: Spec) -> bool:
        self.files.stop_compaction()
        return self.files.pools.grow(part, spec)

    def check_writable(self) -> None:
        self.files.check_writable()

    def raise_commit_failure(self, rows: Rows) -> None:
        self.files.raise_commit_failure(None)

    def after_fork(self, rows: Rows) -> None:
        self.files.begin_child()

    def check_in_ram(self, verb: str) -> None:
        refuse_state(verb, f"table {self.name!r} of the group at {self.files.opening.path!r}")

    def stats(self) -> dict[str, float]:
        return {"compactions_failed": self.files.upkeep.failed}

    def close(self, rows: Rows, tier: Tier) -> None:
        """Close a member alone: its rows stay in the files, and in the next commits."""
        assert isinstance(tier, Part)  # it makes no other
        self.group.forget(rows, self.name, tier)
