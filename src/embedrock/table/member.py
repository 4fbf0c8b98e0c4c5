"""`InGroup`: where a table of a group lives, in RAM."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from embedrock.process.interrupts import held_back
from embedrock.spec import Spec
from embedrock.table.home import Home
from embedrock.table.ram import check_copy
from embedrock.table.rows import Rows
from embedrock.tiers.part import Part, may_share
from embedrock.tiers.tier import Tier
from embedrock.tiers.turn import Turn

if TYPE_CHECKING:
    from embedrock.table.group import Group

MOVED_BYTES = 8 << 20  # of records, at a time


def part_of(rows: Rows) -> Part:
    """Return the part of its pool where a member's records are."""
    tier = rows.tier
    assert isinstance(tier, Part)  # members have no other
    return tier


class InGroup(Home):
    """Rows that live in the pools of a group, and are saved by `Table.state`.

    Args:
        group: whose.
        name: of the table in it.
    """

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
        if may_share(spec):  # in its own range
            part.spec = spec
            return part
        made, pools = self.empty_tier(spec), self.group.pools
        try:
            made.check_room(part.count)
            for ids, records in part.record_batches(max(1, MOVED_BYTES // spec.record_bytes)):
                made.paste_records(ids, records)
        except BaseException:
            pools.release(made)
            raise
        pools.release(part)
        return made

    def after_fork(self, rows: Rows) -> None:
        check_copy(rows)

    def close(self, rows: Rows, tier: Tier) -> None:
        assert isinstance(tier, Part)  # it makes no other
        with held_back():
            self.group.pools.release(tier)
            self.group.forget(self.name)
