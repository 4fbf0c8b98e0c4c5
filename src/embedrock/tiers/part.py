"""`Pool`: one tier for the records of several tables. `Part`: the tier that each of these tables sees."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from embedrock.machine.arena import Arena
from embedrock.spec import Spec
from embedrock.tiers.memory import Memory
from embedrock.tiers.records import Records
from embedrock.tiers.tier import Placement, Tier

# Keys of a pool: each part has a range of 2**44, so that a table may grow in its own, and there may be 2**19 tables.
PART_BITS = 44
MOST_ROWS = 1 << PART_BITS  # of a table that shares a pool; a larger one, or one with open ids, has a pool alone
MOST_PARTS = 1 << (63 - PART_BITS)
SCANNED_ROWS = 1 << 16  # of a pool, looked through at a time for those of a part


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


class Pool:
    """One tier for the records of tables that are laid out alike. Each has a range of its keys: a `Part`.

    Args:
        spec: how the records are laid out.
        tier: empty.
        is_shared: whether there may be more than one table.

    Attributes:
        tier: of the keys.
    """

    def __init__(self, spec: Spec, tier: Memory, is_shared: bool) -> None:
        self._spec, self.tier, self._is_shared = spec, tier, is_shared
        self._parts: dict[int, Part] = {}

    @property
    def dim(self) -> int:
        """Weights in a row."""
        return self._spec.dim

    def takes(self, spec: Spec) -> bool:
        """Return whether a table may have its records here."""
        return self._is_shared and may_share(spec) and self.is_laid_out_as(spec) and len(self._parts) < MOST_PARTS

    def is_laid_out_as(self, spec: Spec) -> bool:
        """Return whether records of a table would be laid out as those here."""
        own, rule = self._spec, spec.rule
        is_alike = (own.dim, own.dtype) == (spec.dim, spec.dtype)
        return is_alike and (rule is own.rule if rule is None else rule.same_layout(own.rule))

    def add(self, spec: Spec, room: Room, subject: str) -> Part:
        """Return a new, empty part for a table."""
        number = next(number for number in itertools.count() if number not in self._parts)
        self._parts[number] = Part(spec, self, number << PART_BITS, room, subject)
        return self._parts[number]

    def release(self, part: Part) -> None:
        """Forget a part and its records, and give their RAM back."""
        if part.count:
            self.tier.remove(np.concatenate(list(part.key_batches(part.count))))
        part.count = 0
        del self._parts[part.base >> PART_BITS]

    @property
    def is_empty(self) -> bool:
        """Whether it has no parts."""
        return not self._parts


def may_share(spec: Spec) -> bool:
    """Return whether the ids of a table fit a part of a pool."""
    return spec.rows is not None and spec.rows <= MOST_ROWS


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

    def __init__(self, spec: Spec, pool: Pool, base: int, room: Room, subject: str) -> None:
        self.spec, self.pool, self.base, self.subject = spec, pool, base, subject
        self.records = Records(spec, pool.tier.arena.memory)
        self.history = None
        self.room, self._count = room, 0

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
        return self._count

    @count.setter
    def count(self, count: int) -> None:
        self._count = count

    def find(self, ids: np.ndarray) -> np.ndarray:
        return self.pool.tier.find(self.keys(ids))

    def begin_batch(self) -> None:
        self.pool.tier.begin_batch()

    def look_up(self, ids: np.ndarray, positions: np.ndarray, out: np.ndarray) -> np.ndarray:
        return self.pool.tier.look_up(self.keys(ids), positions, out)

    def check_room(self, more: int) -> None:
        self.room.check_room([NewRows(self, more)])

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
        self.pool.tier.remove(self.keys(ids))
        self.count -= len(ids)

    def key_batches(self, size: int) -> Iterator[np.ndarray]:
        """Go through the keys of all rows that have records, at most `size` at a time."""
        left = self.count
        for keys in self.pool.tier.id_batches(max(size, SCANNED_ROWS)):
            if not left:
                return
            own = keys[(keys >> PART_BITS) == self.base >> PART_BITS] if may_share(self.spec) else keys
            left -= len(own)
            for start in range(0, len(own), size):
                yield own[start : start + size]

    def id_batches(self, size: int) -> Iterator[np.ndarray]:
        return (keys - self.base for keys in self.key_batches(size))

    @property
    def used_slots(self) -> int:
        return self.pool.tier.used_slots

    @property
    def bytes_used(self) -> int:
        return self.record_bytes_in(self.count) + round(self.pool.tier.directory.bytes_with(0) * self._share)

    @property
    def _share(self) -> float:
        """Which part of the pool's records are the table's."""
        return self.count / max(1, self.pool.tier.count)
