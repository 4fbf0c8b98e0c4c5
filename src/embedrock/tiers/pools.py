"""`Pools`: the tiers of a group of tables in RAM, within one budget. Tables that are laid out alike share one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from embedrock.errors import MemoryBudgetError
from embedrock.initializers import Zeros
from embedrock.machine.ram import memory_limit
from embedrock.machine.sizes import Size, format_bytes, parse_bytes
from embedrock.process.interrupts import held_back
from embedrock.spec import Spec
from embedrock.tiers.memory import Memory, place, take_ram
from embedrock.tiers.part import NewRows, Part, Pool, may_share
from embedrock.wording import counted

MOST_NAMED = 8  # tables in a message that a batch does not fit


class Pools:
    """The tiers of a group of tables in RAM.

    Args:
        memory: the most RAM that all of them may take together; None: what this process may use.
        subject: the group, for error messages.

    Attributes:
        budget_bytes: the most RAM that they may take.
    """

    def __init__(self, memory: Size | None, subject: str) -> None:
        self.budget_bytes = memory_limit() if memory is None else parse_bytes(memory)
        self._is_told, self._subject = memory is not None, subject
        self._pools: list[Pool[Memory]] = []

    def part(self, spec: Spec, subject: str) -> Part:
        """Return an empty part for the records of a table, in the pool of those that are laid out alike."""
        pool = next((pool for pool in self._pools if pool.takes(spec)), None)
        if pool is None:
            pool = self._made(replace(spec, rows=None, init=Zeros(), seed=0), "hashed", may_share(spec), subject)
            self._pools.append(pool)
        number = next(number for number in itertools.count() if number not in pool.parts)
        return pool.add(spec, number, self, subject)

    def part_alone(self, spec: Spec, directory: str, rows: int, subject: str) -> Part:
        """Return an empty part in a pool of its own, with room for so many rows: all, where its slots are their ids.

        Args:
            spec: of the table.
            directory: "direct", so that slots are ids, or "hashed".
            rows: see above.
            subject: the table, for error messages.

        Raises:
            MemoryBudgetError: they do not fit the budget.
        """
        layout = spec if directory == "direct" else replace(spec, rows=None, init=Zeros(), seed=0)
        pool = self._made(layout, directory, False, subject)
        needed = pool.tier.bytes_with(rows)
        if self._bytes_asked([], needed) > self.budget_bytes:
            raise MemoryBudgetError(
                f"rows of {subject} need {format_bytes(needed)}, which are not left of the budget of "
                f"{format_bytes(self.budget_bytes)} for all tables of the group. Raise memory= of er.Group."
            )
        self._pools.append(pool)
        return pool.add(spec, 0, self, subject)

    def _made(self, layout: Spec, directory: str, is_shared: bool, subject: str) -> Pool[Memory]:
        tier = Memory(layout, place(layout, self.budget_bytes, directory, subject), self._subject)
        return Pool(layout, tier, is_shared)

    def release(self, part: Part) -> None:
        """Forget a part and its records, and give their RAM back. Ctrl-C waits: other tables' records move."""
        with held_back():
            if part.count and part.pool.is_shared:
                part.pool.tier.remove(np.concatenate(list(part.key_batches(part.count))))
            part.pool.remove(part)
            self._pools = [pool for pool in self._pools if not pool.is_empty]

    @property
    def tiers(self) -> list[Memory]:
        """The tier of each pool."""
        return [pool.tier for pool in self._pools]

    def __len__(self) -> int:
        return len(self._pools)

    @property
    def bytes_used(self) -> int:
        """RAM that records and directories take."""
        return sum(pool.tier.bytes_used for pool in self._pools)

    def has_room(self, new: Sequence[NewRows]) -> bool:
        """Return whether new records fit the budget."""
        return not any(each.rows for each in new) or self._bytes_with(new) <= self.budget_bytes

    def check_room(self, new: Sequence[NewRows]) -> None:
        """Raise `MemoryBudgetError` unless new records fit the budget, and the RAM that is left."""
        if not any(each.rows for each in new):
            return
        needed = self._bytes_asked(new)
        if needed > self.budget_bytes:
            raise MemoryBudgetError(
                f"{self._touched(new)}: {format_bytes(needed)} ({needed} bytes) needed, budget "
                f"{format_bytes(self.budget_bytes)} for all tables of the group. Raise memory= of er.Group, touch "
                "fewer rows, drop a table, or use a smaller dim, dtype or rule state."
            )
        self.check_ram(new)

    def check_ram(self, new: Sequence[NewRows]) -> None:
        """Raise `MemoryBudgetError` where nobody said how much RAM may be taken, and new records find none."""
        more = by_pool(new)
        if more and not self._is_told:
            needed = sum(pool.tier.bytes_for(count) for pool, count in more.items())
            remedy = "Touch fewer rows, drop a table, use a smaller dim, dtype or rule state, or pass memory= to"
            take_ram(needed, self._touched(new), f"{remedy} er.Group to say how much its tables")

    def _bytes_asked(self, new: Sequence[NewRows], beside: int = 0) -> int:
        """Return the RAM for new records, and for so many bytes `beside`.

        If that is too much, it is what remains without the room that devices were promised, and do not use.
        """
        needed = self._bytes_with(new) + beside
        if needed > self.budget_bytes:
            for tier in self.tiers:
                tier.give_room_back()
            needed = self._bytes_with(new) + beside
        return needed

    def _bytes_with(self, new: Sequence[NewRows]) -> int:
        more = by_pool(new)
        return sum(pool.tier.bytes_with(more.get(pool, 0)) for pool in self._pools)

    def _touched(self, new: Sequence[NewRows]) -> str:
        rows = counted(sum(pool.tier.count for pool in self._pools), "row")
        most = sorted((each for each in new if each.rows), key=_bytes, reverse=True)
        named = [f"{each.rows:,} of {each.part.subject} ({format_bytes(_bytes(each))})" for each in most[:MOST_NAMED]]
        if (more := len(most) - MOST_NAMED) > 0:
            named.append(f"others of {counted(more, 'table')}")
        return f"{self._subject} has {rows} in RAM and this batch touches new ones, {', '.join(named)}"


def _bytes(new: NewRows) -> int:
    return new.rows * new.part.spec.record_bytes


def by_pool(new: Sequence[NewRows]) -> dict[Pool[Any], int]:
    """Return how many records are to be made in each pool, of those where there are any."""
    more: dict[Pool[Any], int] = {}
    for part, count in new:
        if count:
            more[part.pool] = more.get(part.pool, 0) + count
    return more
