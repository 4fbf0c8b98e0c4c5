"""`RecordPools`: the backends of tables that live together. `RecordRange`: a table's part of a shared backend.

`RamOfTable`, `RamPools`: those in RAM, of one table or of a group.
"""

from __future__ import annotations

import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from embedrock.errors import MemoryBudgetError, counted
from embedrock.initializers import Zeros
from embedrock.kernels.keys import PART_BITS
from embedrock.spec.spec import Spec
from embedrock.storage.backend import Backend
from embedrock.storage.ram_backend import RamBackend, place, take_ram
from embedrock.storage.records import Records
from embedrock.storage.slot_index import MOST_ROWS
from embedrock.store.manifest import MAX_PARTS
from embedrock.store.record_store import keys_of_part
from embedrock.store.segments import damaged
from embedrock.system.arena import Arena
from embedrock.system.interrupts import held_back
from embedrock.system.ram import memory_limit
from embedrock.system.scopes import on_failure
from embedrock.system.sizes import Size, format_bytes, parse_bytes

MOST_NAMED = 8  # tables named in the message for a batch that does not fit
MOVED_BYTES = 8 << 20  # of records, moved between backends at a time


class RecordPools(ABC):
    """The backends of tables that live together, and their factory."""

    _pools: Any = ()  # a table alone in RAM owns its backend, and releases its RAM

    @abstractmethod
    def part(self, spec: Spec, subject: str) -> Backend:
        """Return an empty backend for the records of a table."""

    def release(self, tier: Any, /) -> None:  # noqa: B027  # only its table has the backend of a table alone
        """Delete a table's backend and its records."""

    @property
    def tiers(self) -> list[Any]:
        """The backends of keys."""
        return list(self._pools)

    @property
    def bytes_used(self) -> int:
        """RAM of all backends, in bytes."""
        return sum(tier.bytes_used for tier in self.tiers)

    def __len__(self) -> int:
        return len(self.tiers)

    def has_room(self, new: Sequence[NewRows]) -> bool:
        """Return whether new records of key ranges fit."""
        return all(pool.has_room(rows) for pool, rows in by_pool(new).items())

    def check_room(self, new: Sequence[NewRows]) -> None:
        """Raise `MemoryBudgetError` unless new records fit."""
        for pool, rows in by_pool(new).items():
            pool.check_room(rows)

    def check_ram(self, new: Sequence[NewRows]) -> None:  # noqa: B027  # caches already have their RAM
        """Raise `MemoryBudgetError` if no budget was given and new records find no RAM: see `Backend.check_ram`."""

    def replaced(self, tier: Backend, spec: Spec, fill: Callable[[Backend], None], subject: str) -> Backend:
        """Return a new backend for a table, with the records that `fill` makes in it. It replaces the old one.

        If `fill` raises an error, the old backend stays.
        """
        made = self.part(spec, subject)
        with on_failure(lambda: self.release(made)):
            fill(made)
        self.release(tier)
        return made

    def grown(self, tier: Any, spec: Spec, subject: str) -> Backend:
        """Return a backend of the same records for a table that has more rows. Nothing runs in the background.

        Raises:
            MemoryBudgetError: they do not fit.
        """
        if self._grows(tier, spec):
            return tier

        def fill(made: Backend) -> None:
            made.check_room(tier.count)
            _copy(tier, made)

        return self.replaced(tier, spec, fill, subject)

    def _grows(self, tier: Any, spec: Spec, /) -> bool:
        """Give a table more rows in its backend; return whether it has room for them."""
        return False

    def laid_out(self, tier: Any, spec: Spec, directory: str, subject: str, /) -> Backend | None:
        """Return a backend in RAM for this table alone, "direct" (slots are ids) or "hashed"; None: not possible."""
        return None


class NewRows(NamedTuple):
    """Number of records to make in the backend of a table."""

    part: Backend
    rows: int


def may_share(spec: Spec) -> bool:
    """Return whether a table may share a pool: its ids fit a range, and only common steps move its rows."""
    return spec.rows is not None and spec.rows <= MOST_ROWS and not spec.has_residents


def takes(pool: Backend, spec: Spec) -> bool:
    """Return whether a pool may have the records of a table of `spec`."""
    return pool.is_shared and may_share(spec) and len(pool.parts or ()) < MAX_PARTS and are_alike(spec, pool.spec)


def are_alike(spec: Spec, other: Spec) -> bool:
    """Return whether the records of two tables have one layout."""
    rule = spec.rule
    is_alike = (spec.dim, spec.dtype) == (other.dim, other.dtype)
    return is_alike and (rule is other.rule if rule is None else rule.same_layout(other.rule))


class RecordRange(Backend):
    """The records of one table in a pool. Batches are planned, read and stepped by keys in the pool itself.

    Args:
        pool: backend of the records, with those of other tables if it is shared.
        number: of the range. No other one of the pool has it.
        room: pools whose room is checked.
    """

    arena: Any = property(operator.attrgetter("pool.arena"))
    budget_bytes: Any = property(operator.attrgetter("pool.budget_bytes"))
    epoch: Any = property(operator.attrgetter("pool.epoch"))
    placement: Any = property(operator.attrgetter("pool.placement"))
    used_slots: Any = property(operator.attrgetter("pool.used_slots"))

    pool: Any = None

    def __init__(self, spec: Spec, pool: Any, number: int, room: RecordPools, subject: str) -> None:
        self.spec, self.pool, self.number, self.subject = spec, pool, number, subject
        self.base = number << PART_BITS
        pool.parts[number] = self
        self.history = None
        self.room, self._count = room, 0
        self.evicts, self.new_epoch, self.begin_batch = pool.evicts, pool.new_epoch, pool.begin_batch
        self.copy_before_write, self.mark_dirty, self.stats = pool.copy_before_write, pool.mark_dirty, pool.stats
        self.add_listener, self.remove_listener = pool.add_listener, pool.remove_listener
        self._arena: Arena | None = None

    def drop(self) -> None:
        """Leave the pool, which keeps the records."""
        self._count = 0
        del self.pool.parts[self.number]

    @property
    def records(self) -> Records:
        arena = self.pool.arena
        if self._arena is not arena:  # a shared backend's records may move
            self._arena, self._records = arena, Records(self.spec, arena.memory)
        return self._records

    @property
    def count(self) -> int:
        return self._count if self.pool.is_shared else self.pool.count

    def admitted(self, rows: int) -> None:
        self._count += rows

    def find(self, ids: np.ndarray) -> np.ndarray:
        return self.pool.find(self.keys(ids))

    def bring(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        return self.pool.bring(self.keys(ids), slots)

    def read_through(self, ids: np.ndarray) -> tuple[Records, np.ndarray]:
        return self.pool.read_through(self.keys(ids))

    def check_room(self, more: int) -> None:
        if more:
            self.room.check_room([NewRows(self, more)])

    def check_ram(self, more: int) -> None:
        self.room.check_ram([NewRows(self, more)])

    def has_room(self, rows: int) -> bool:
        return self.room.has_room([NewRows(self, rows)])

    def bulk_insert(self, ids: np.ndarray, records: np.ndarray) -> None:
        self.pool.bulk_insert(self.keys(ids), records)
        self.admitted(len(ids))

    def holds(self, ids: np.ndarray) -> np.ndarray:
        return self.pool.holds(self.keys(ids))

    def discard(self, ids: np.ndarray, is_final: bool = False) -> None:
        if self.evicts or not self.pool.is_shared:
            self.pool.discard(self.keys(ids), is_final)
        else:  # keeps the records of a pool dense
            self.pool.remove(self.keys(ids))
        self.admitted(-len(ids))

    def key_batches(self, size: int) -> Iterator[np.ndarray]:
        """Iterate over the keys of all rows that have records, at most `size` at a time."""
        if self.pool.is_shared:
            return self.pool.ids_within(*keys_of_part(self.number), size)
        return self.pool.id_batches(size)

    def id_batches(self, size: int) -> Iterator[np.ndarray]:
        for keys in self.key_batches(size):
            ids, rows = keys - self.base, self.spec.rows
            # The commit checks the ranges of a table alone. Those of a pool cover all of its members.
            if rows is not None and len(ids) and (ids.min() < 0 or ids.max() >= rows):
                raise damaged(f"the pool of {self.subject}", f"ids in [0, {rows})", f"{ids.min()} to {ids.max()}")
            yield ids

    @property
    def bytes_used(self) -> int:
        """The pool's RAM, in proportion to the table's share of its records."""
        return round(self.pool.bytes_used * self.count / max(1, self.pool.count))


def _copy(tier: Backend, made: Backend) -> None:
    for ids, records in tier.record_batches(max(1, MOVED_BYTES // tier.spec.record_bytes)):
        made.bulk_insert(ids, records)


class RamOfTable(RecordPools):
    """The RAM of a table alone.

    Args:
        memory: most RAM of records and index.
        directory: kind of index: "direct", "hashed" or "auto".
    """

    def __init__(self, memory: Size | None, directory: str) -> None:
        self._memory, self._directory = memory, directory

    def part(self, spec: Spec, subject: str) -> RamBackend:
        return RamBackend(spec, place(spec, self._memory, self._directory, subject), subject)

    def grown(self, tier: RamBackend, spec: Spec, subject: str) -> RamBackend:
        return tier.grown(spec, place(spec, self._memory, self._directory, subject))

    def laid_out(self, tier: RamBackend, spec: Spec, directory: str, subject: str) -> RamBackend | None:
        if tier.is_direct == (directory == "direct"):
            return tier
        if directory == "hashed" or spec.rows is None or self._directory == "hashed":
            return None
        try:
            made = RamBackend(spec, place(spec, self._memory, "direct", subject), subject)
        except MemoryBudgetError:
            return None
        made.bulk_insert(*tier.snapshot())
        return made


class RamPools(RecordPools):
    """The backends of a group in RAM, within one budget. Tables of the same record layout share one.

    Args:
        memory: most RAM of all of them; None: the RAM that this process may use.
        subject: the group, for error messages.

    Attributes:
        budget_bytes: most RAM of all backends.
    """

    def __init__(self, memory: Size | None, subject: str) -> None:
        self.budget_bytes = memory_limit() if memory is None else parse_bytes(memory)
        self._is_told, self._subject = memory is not None, subject
        self._pools: list[RamBackend] = []

    def part(self, spec: Spec, subject: str) -> RecordRange:
        pool = next((pool for pool in self._pools if takes(pool, spec)), None)
        if pool is None:
            pool = self._made(spec, "hashed", may_share(spec), subject)
            self._pools.append(pool)
        number = next(number for number in itertools.count() if number not in (pool.parts or ()))
        pool.set_rows(number, spec.rows)
        return RecordRange(spec, pool, number, self, subject)

    def _grows(self, part: RecordRange, spec: Spec) -> bool:
        # It may grow in its own range, or if all keys are its own. Slots that are ids have no room for more.
        can = (may_share(spec) or not part.pool.is_shared) and not part.is_direct
        if can:
            part.spec = spec
            part.pool.set_rows(part.number, spec.rows)
        return can

    def laid_out(self, part: RecordRange, spec: Spec, directory: str, subject: str) -> RecordRange | None:
        is_direct = directory == "direct"
        if part.is_direct or (not is_direct and not part.pool.is_shared):
            return part if part.is_direct == is_direct else None
        if is_direct and (spec.rows is None or spec.has_residents):
            return None
        try:
            pool = self._made(spec, directory, False, subject)
        except MemoryBudgetError:
            return None
        if self._bytes_asked([], pool.bytes_with(part.count)) > self.budget_bytes:
            return None
        self._pools.append(pool)
        pool.set_rows(0, spec.rows)
        made = RecordRange(spec, pool, 0, self, subject)
        _copy(part, made)
        self.release(part)
        return made

    def _made(self, spec: Spec, directory: str, is_shared: bool, subject: str) -> RamBackend:
        layout = spec if directory == "direct" else replace(plain(spec), rows=None)
        made = RamBackend(layout, place(layout, self.budget_bytes, directory, subject), self._subject)
        made.is_shared, made.parts = is_shared, {}
        return made

    def release(self, part: RecordRange) -> None:
        """Delete a key range and its records, and release their RAM. Ctrl-C waits: other tables' records move."""
        with held_back():
            if part.count and part.pool.is_shared:
                part.pool.remove(np.concatenate(list(part.key_batches(part.count))))
            part.drop()
            part.pool.set_rows(part.number, None)
            self._pools = [pool for pool in self._pools if pool.parts]

    def has_room(self, new: Sequence[NewRows]) -> bool:
        return not any(each.rows for each in new) or self._bytes_with(new) <= self.budget_bytes

    def check_room(self, new: Sequence[NewRows]) -> None:
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
        more = by_pool(new)
        if more and not self._is_told:
            needed = sum(pool.bytes_for(count) for pool, count in more.items())
            remedy = "Touch fewer rows, drop a table, use a smaller dim, dtype or rule state, or pass memory= to"
            take_ram(needed, self._touched(new), f"{remedy} er.Group to say how much its tables")

    def _bytes_asked(self, new: Sequence[NewRows], beside: int = 0) -> int:
        """Return the RAM for new records and `beside` bytes.

        If that is too much, devices first release the promised room that they do not use.
        """
        needed = self._bytes_with(new) + beside
        if needed > self.budget_bytes:
            for pool in self._pools:
                pool.give_room_back()
            needed = self._bytes_with(new) + beside
        return needed

    def _bytes_with(self, new: Sequence[NewRows]) -> int:
        more = by_pool(new)
        return sum(pool.bytes_with(more.get(pool, 0)) for pool in self._pools)

    def _touched(self, new: Sequence[NewRows]) -> str:
        rows = counted(sum(pool.count for pool in self._pools), "row")
        named = largest([each for each in new if each.rows])
        return f"{self._subject} has {rows} in RAM and this batch touches new ones, {named}"


def plain(spec: Spec) -> Spec:
    """Return the spec of a pool of tables like `spec`, whose initial values are their own."""
    return replace(spec, init=Zeros(), seed=0)


def largest(counts: Sequence[tuple[Any, int]]) -> str:
    """Return the tables, or parts, with most bytes of records, each given with its number of records."""
    sized = [(rows * part.spec.record_bytes, rows, part.subject) for part, rows in counts]
    sized.sort(key=operator.itemgetter(0), reverse=True)
    named = [f"{rows:,} of {subject} ({format_bytes(nbytes)})" for nbytes, rows, subject in sized[:MOST_NAMED]]
    if (more := len(sized) - MOST_NAMED) > 0:
        named.append(f"others of {counted(more, 'table')}")
    return ", ".join(named)


def by_pool(new: Sequence[NewRows]) -> dict[Any, int]:
    """Return the number of records to make in each pool that gets any."""
    more: dict[Any, int] = {}
    for part, count in new:
        if count:
            more[part.pool] = more.get(part.pool, 0) + count
    return more
