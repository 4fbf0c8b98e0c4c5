"""`Pool`: one tier for the records of several tables. `Part`: the tier that each of these tables sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from embedrock.machine.arena import Arena
from embedrock.spec import Spec
from embedrock.store.manifest import MAX_PARTS, PART_BITS
from embedrock.store.runs import damaged
from embedrock.store.store import keys_of_part
from embedrock.tiers.records import Records
from embedrock.tiers.side import Guest
from embedrock.tiers.tier import Placement, Tier

MOST_ROWS = 1 << PART_BITS  # of a table that shares a pool; see `may_share`
T = TypeVar("T", bound=Tier)


class NewRows(NamedTuple):
    """How many records are to be made in a part."""

    part: Part
    rows: int


class Room(Protocol):
    """The room that pools have together."""

    def has_room(self, new: Sequence[NewRows]) -> bool:
        """Return whether there is room for new records."""
        ...

    def check_room(self, new: Sequence[NewRows]) -> None:
        """Raise `MemoryBudgetError` unless there is."""
        ...

    def check_ram(self, new: Sequence[NewRows]) -> None:
        """Raise it where nobody said how much RAM may be taken, and new records find none: see `Tier.check_ram`."""
        ...


class Pool(Generic[T]):
    """One tier for the records of tables that are laid out alike. Each has a range of its keys: a `Part`.

    Args:
        spec: how the records are laid out.
        tier: of the keys.
        is_shared: whether there may be more than one table.

    Attributes:
        tier: see above.
        is_shared: see above.
        parts: of the tables, by number.
    """

    def __init__(self, spec: Spec, tier: T, is_shared: bool) -> None:
        self.spec, self.tier, self.is_shared = spec, tier, is_shared
        self.parts: dict[int, Part] = {}

    @property
    def dim(self) -> int:
        """Weights in a row."""
        return self.spec.dim

    def takes(self, spec: Spec) -> bool:
        """Return whether a table may have its records here."""
        return self.is_shared and may_share(spec) and self.is_laid_out_as(spec) and len(self.parts) < MAX_PARTS

    def is_laid_out_as(self, spec: Spec) -> bool:
        """Return whether records of a table would be laid out as those here."""
        own, rule = self.spec, spec.rule
        is_alike = (own.dim, own.dtype) == (spec.dim, spec.dtype)
        return is_alike and (rule is own.rule if rule is None else rule.same_layout(own.rule))

    def add(self, spec: Spec, number: int, room: Room, subject: str) -> Part:
        """Return an empty part for a table: that of a number, which no other has."""
        self.parts[number] = Part(spec, self, number << PART_BITS, room, subject)
        return self.parts[number]

    def remove(self, part: Part) -> None:
        """Forget a part."""
        part.count = 0
        del self.parts[part.number]

    @property
    def is_empty(self) -> bool:
        """Whether it has no parts."""
        return not self.parts


def may_share(spec: Spec) -> bool:
    """Return whether a table may share a pool: its ids fit a part, and no step but those of all may move its rows."""
    return spec.rows is not None and spec.rows <= MOST_ROWS and not spec.has_residents


class Part(Tier):
    """The records of one table in a pool.

    Args:
        spec: of the table.
        pool: which has the records.
        base: the key of id 0.
        room: of all pools.
        subject: the table, for error messages.

    Attributes:
        count: how many records it has; whoever makes some for several parts at once tells it.
    """

    def __init__(self, spec: Spec, pool: Pool[Any], base: int, room: Room, subject: str) -> None:
        self.spec, self.pool, self.base, self.subject = spec, pool, base, subject
        self.history = None
        self.room, self._count = room, 0
        self._arena: Arena | None = None

    @property
    def number(self) -> int:
        """Which of its pool's parts it is."""
        return self.base >> PART_BITS

    @property
    def evicts(self) -> bool:
        return self.pool.tier.evicts

    @property
    def batch_rows(self) -> int:
        return self.pool.tier.batch_rows

    @property
    def records(self) -> Records:
        arena = self.pool.tier.arena
        if self._arena is not arena:  # those of a tier that others make room in may move
            self._arena, self._records = arena, Records(self.spec, arena.memory)
        return self._records

    def keys(self, ids: np.ndarray) -> np.ndarray:
        """Return the pool's keys of ids."""
        return ids + self.base if self.base else ids

    @property
    def arena(self) -> Arena:
        return self.pool.tier.arena

    @property
    def placement(self) -> Placement:
        return self.pool.tier.placement

    @property
    def epoch(self) -> int:
        return self.pool.tier.epoch

    def new_epoch(self) -> None:
        self.pool.tier.new_epoch()

    @property
    def count(self) -> int:
        return self._count if self.pool.is_shared else self.pool.tier.count

    @count.setter
    def count(self, count: int) -> None:
        self._count = count

    def find(self, ids: np.ndarray) -> np.ndarray:
        return self.pool.tier.find(self.keys(ids))

    def begin_batch(self) -> None:
        self.pool.tier.begin_batch()

    def look_up(self, ids: np.ndarray, positions: np.ndarray, out: np.ndarray) -> np.ndarray:
        return self.pool.tier.look_up(self.keys(ids), positions, out)

    def bring(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        return self.pool.tier.bring(self.keys(ids), slots)

    def reach(self, ids: np.ndarray) -> tuple[Records, np.ndarray]:
        return self.pool.tier.reach(self.keys(ids))

    def make_room(self, ids: np.ndarray, slots: np.ndarray, leaving: int = 0) -> np.ndarray:
        self.check_room(max(0, int(np.count_nonzero(slots < 0)) - leaving))
        return self.pool.tier.make_room(self.keys(ids), slots, leaving)

    def preserve(self, slots: np.ndarray) -> None:
        self.pool.tier.preserve(slots)

    def changing(self, slots: np.ndarray) -> None:
        self.pool.tier.changing(slots)

    def beneath(self, ids: np.ndarray) -> tuple[Tier, np.ndarray]:
        return self.pool.tier, self.keys(ids)

    def let_in(self, guest: Guest) -> None:
        self.pool.tier.let_in(guest)

    def let_out(self, guest: Guest) -> None:
        self.pool.tier.let_out(guest)

    @property
    def resident_rows(self) -> int:
        return self.pool.tier.resident_rows

    def stats(self) -> dict[str, float]:
        return self.pool.tier.stats()

    def check_room(self, more: int) -> None:
        self.room.check_room([NewRows(self, more)])

    def check_ram(self, more: int) -> None:
        self.room.check_ram([NewRows(self, more)])

    def has_room(self, rows: int) -> bool:
        return self.room.has_room([NewRows(self, rows)])

    def admit(self, ids: np.ndarray, slots: np.ndarray, fresh: np.ndarray, first_state: np.ndarray) -> np.ndarray:
        slots = self.pool.tier.admit(self.keys(ids), slots, fresh, first_state)
        self.count += len(fresh)
        return slots

    def paste_records(self, ids: np.ndarray, records: np.ndarray) -> None:
        self.pool.tier.paste_records(self.keys(ids), records)
        self.count += len(ids)

    def holds(self, ids: np.ndarray) -> np.ndarray:
        return self.pool.tier.holds(self.keys(ids))

    def discard(self, ids: np.ndarray, is_final: bool = False) -> None:
        if self.evicts or not self.pool.is_shared:
            self.pool.tier.discard(self.keys(ids), is_final)
        else:  # so that the records of a pool stay dense
            self.pool.tier.remove(self.keys(ids))
        self.count -= len(ids)

    def key_batches(self, size: int) -> Iterator[np.ndarray]:
        """Go through the keys of all rows that have records, at most `size` at a time."""
        if self.pool.is_shared:
            return self.pool.tier.ids_within(*keys_of_part(self.number), size)
        return self.pool.tier.id_batches(size)

    def id_batches(self, size: int) -> Iterator[np.ndarray]:
        for keys in self.key_batches(size):
            ids, rows = keys - self.base, self.spec.rows
            # A table alone is told by its commit's ranges; those of a pool are of all of its members.
            if rows is not None and len(ids) and (ids.min() < 0 or ids.max() >= rows):
                raise damaged(f"the pool of {self.subject}", f"ids in [0, {rows})", f"{ids.min()} to {ids.max()}")
            yield ids

    @property
    def used_slots(self) -> int:
        return self.pool.tier.used_slots

    @property
    def budget_bytes(self) -> int:
        return self.pool.tier.budget_bytes

    @property
    def bytes_used(self) -> int:
        """RAM that the pool takes, in proportion to the records that the table has of its."""
        return round(self.pool.tier.bytes_used * self.count / max(1, self.pool.tier.count))
