"""`DiskPools`: the backends of tables on disk, one for each store of their folder, within one budget."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from embedrock.initializers import Zeros
from embedrock.spec.spec import Spec
from embedrock.storage.backend import Backend, RamLayout
from embedrock.storage.budget import budget_of, pool_of
from embedrock.storage.disk_backend import DiskBackend
from embedrock.storage.ram_layout import check_budget, claim_of, place
from embedrock.storage.record_pools import NewRows, RecordPool, RecordPools, RecordRange, by_pool, may_share
from embedrock.storage.table_lock import TableLock
from embedrock.store.manifest import MAX_PARTS, PART_BITS, StoreEntry, TableEntry
from embedrock.store.record_store import RecordStore, keys_of_part
from embedrock.store.table_folder import TableFolder, emptied
from embedrock.system.interrupts import held_back
from embedrock.system.sizes import Size

OF_VOLUME = ("commit", "collections_failed")  # statistics of the folder, equal in each of its backends


class PoolBackend(DiskBackend):
    """The backend of a pool on disk.

    Args:
        members: row counts of the tables that have, or had, a range of keys. After changing it, call `grow`.

    Attributes:
        members: see above.
        parts: key ranges of the pool, by number.
    """

    parts: dict[int, RecordRange]

    def __init__(self, members: list[int], *how: Any) -> None:
        self.members = members
        super().__init__(*how)

    def _placed(self, spec: Spec, nbytes: int) -> RamLayout:
        return place(spec, nbytes, self.subject, self.budget.note, self._is_pool, self.members)

    _batch = np.empty(0, np.int64)  # loaded keys, until they are stepped

    def goes_on_with(self, ids: np.ndarray) -> bool:
        return self._is_known and np.array_equal(ids, self._batch)

    def bring(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        brought = super().bring(ids, slots)
        self._batch = ids.copy()  # a copy: dropping the ids of a batch ends it elsewhere
        return brought

    def mark_dirty(self, slots: np.ndarray) -> None:
        self._batch = PoolBackend._batch
        super().mark_dirty(slots)

    def steps_of(self, ids: np.ndarray) -> int | np.ndarray:
        steps = {number: part.history.steps for number, part in self.parts.items() if part.history is not None}
        if not self._is_pool:
            return max(steps.values(), default=0)
        numbers, inverse = np.unique(ids >> PART_BITS, return_inverse=True)
        return np.array([steps.get(number, 0) for number in numbers.tolist()], np.int64)[inverse]


class DiskPools(RecordPools):
    """The backends of tables on disk.

    Args:
        memory: most RAM of all of them; None: a share of the default of tables on disk; "auto": as much of the
            machine's free RAM as pays.
        policy: of eviction.
        table_lock: lock of the tables.
    """

    def __init__(self, memory: Size | None, policy: str, table_lock: TableLock) -> None:
        self._memory, self._policy, self._table_lock = memory, policy, table_lock

    @abstractmethod
    def open(
        self, table_folder: TableFolder, members: Sequence[tuple[TableEntry, Spec]], subject: str
    ) -> Sequence[Backend]:
        """Make the backends as of the last commit, and return that of each member.

        Args:
            table_folder: the files.
            members: with their specs, whose initial values are ignored.
            subject: table or group, for error messages.
        """

    @property
    @abstractmethod
    def tiers(self) -> Sequence[DiskBackend]:
        """The backend of each store of the folder."""

    @abstractmethod
    def place_of(self, tier: Any, /) -> tuple[int, int | None]:
        """Return the index of the store with a table's records, and the table's number there; None: all keys are its
        own.
        """

    def check(self, spec: Spec, subject: str) -> None:
        """Raise `MemoryBudgetError` if the budget is too small for a table alone of this spec."""

    def leave(self) -> None:
        """Release all RAM."""
        for tier in self.tiers:
            tier.budget.leave()

    @property
    def is_being_shared(self) -> bool:
        """Return whether this thread is dividing the budget now."""
        return any(tier.budget.is_being_shared for tier in self.tiers)

    def stats(self) -> dict[str, float]:
        """Return statistics summed over all backends, if each of them has them."""
        found, told = dict[str, float](), [tier.stats() for tier in self.tiers]
        for name, value in itertools.chain.from_iterable(each.items() for each in told):
            if all(name in each for each in told):  # a value known for only some pools has no sum
                found[name] = value + (found.get(name, 0) if name not in OF_VOLUME else 0)
        return found


class DiskOfTable(DiskPools):
    """The backend of a table alone on disk, whose keys are its ids."""

    def __init__(self, memory: Size | None, policy: str, table_lock: TableLock) -> None:
        super().__init__(memory, policy, table_lock)
        self.budget, self._tiers = budget_of(memory), list[DiskBackend]()

    @property
    def tiers(self) -> list[DiskBackend]:
        return self._tiers

    def open(
        self, table_folder: TableFolder, members: Sequence[tuple[TableEntry, Spec]], subject: str
    ) -> list[DiskBackend]:
        ((_, spec),) = members
        self._table_folder = table_folder
        return [self._opened(spec, table_folder.stores[0], subject)]

    def _opened(self, spec: Spec, store: RecordStore, subject: str) -> DiskBackend:
        made = DiskBackend(spec, store, self.budget, self._policy, self._table_lock, subject)
        self._tiers = [made]
        return made

    def part(self, spec: Spec, subject: str) -> DiskBackend:
        return self._opened(spec, emptied(self._table_folder.stores[0], spec.record_bytes), subject)

    def replaced(self, tier: Backend, spec: Spec, fill: Callable[[Backend], None], subject: str) -> DiskBackend:
        """Replace the records. The next commit replaces all records in the files."""
        (before,), (old,) = self.tiers, self._table_folder.stores
        try:
            made = self.part(spec, subject)
            fill(made)
        except BaseException:
            for made in self.tiers:
                if made is not before:
                    made.store.give_up()
            self._tiers = [before]
            self.budget.join(before, claim_of(before.spec))
            raise
        self._table_folder.replace(old, made.store)
        return made

    def _grows(self, tier: DiskBackend, spec: Spec) -> bool:
        tier.grow(spec)
        return True

    def release(self, tier: DiskBackend) -> None:
        """Do nothing: the folder has one table."""

    def check(self, spec: Spec, subject: str) -> None:
        check_budget(spec, self.budget, subject)

    def place_of(self, tier: DiskBackend) -> tuple[int, None]:
        return 0, None

    def leave(self) -> None:
        self.budget.leave()
        self._tiers = []


class DiskOfGroup(DiskPools):
    """The backends of a group on disk, one for all tables of the same record layout."""

    def __init__(self, memory: Size | None, policy: str, table_lock: TableLock) -> None:
        super().__init__(memory, policy, table_lock)
        self._pools: list[RecordPool[PoolBackend]] = []

    def open(
        self, table_folder: TableFolder, members: Sequence[tuple[TableEntry, Spec]], subject: str
    ) -> list[RecordRange]:
        self.leave()
        self._table_folder, self._subject, self._budgets = table_folder, subject, pool_of(self._memory)
        for number, store in enumerate(table_folder.stores):
            specs = [spec for member, spec in members if member.pool == number]
            layout, rows = _layout(specs[0]), [] if store.parts is None else [spec.rows or 0 for spec in specs]
            if store.parts is not None:
                layout = replace(layout, rows=sum(rows))
            self._pools.append(self._pool(layout, store.content, number, rows))
        return [self._known(member, spec) for member, spec in members]

    def _known(self, member: TableEntry, spec: Spec) -> RecordRange:
        part = self._pools[member.pool].add(spec, member.part or 0, self, f"table {member.name!r}")
        _, withheld = self._table_folder.withheld.get(member.name, ((), ()))
        part.count = member.count - len(withheld)
        return part

    def _pool(self, layout: Spec, content: StoreEntry, number: int, members: list[int]) -> RecordPool[PoolBackend]:
        store = self._table_folder.stores[number]
        tier = PoolBackend(members, layout, store, self._budgets.share(), self._policy, self._table_lock, self._subject)
        pool = RecordPool(layout, tier, is_shared=content.parts is not None)
        tier.parts = pool.parts
        return pool

    def part(self, spec: Spec, subject: str) -> RecordRange:
        """Return an empty key range for a table, in the pool of its record layout."""
        pool = next(
            (pool for pool in self._pools if pool.takes(spec) and (pool.tier.store.parts or 0) < MAX_PARTS), None
        )
        if pool is None:
            pool = self._new_pool(spec, subject)
        else:
            self.resize(pool, [*pool.tier.members, spec.rows or 0])
        number, store = 0, pool.tier.store
        if store.parts is not None:
            with store.lock:
                number, store.parts = store.parts, store.parts + 1
        return pool.add(spec, number, self, subject)

    def _new_pool(self, spec: Spec, subject: str) -> RecordPool[PoolBackend]:
        layout, is_shared = _layout(spec), may_share(spec)
        check_budget(layout, self._budgets.share(), subject, is_shared)
        last = self._table_folder.manifest
        parts = 0 if is_shared else None
        content = StoreEntry(last.uuid, last.commit, layout.record_bytes, None, 0, parts=parts)
        store = self._table_folder.add(content)
        try:
            members = [spec.rows or 0] if is_shared else []
            pool = self._pool(layout, content, self._table_folder.stores.index(store), members)
        except BaseException:
            self._table_folder.discard(store)
            raise
        self._pools.append(pool)
        return pool

    def resize(self, pool: RecordPool[PoolBackend], members: list[int]) -> None:
        """Make room for members with these row counts in a pool. Nothing runs in the background."""
        tier, before = pool.tier, pool.tier.members
        tier.members = members
        try:
            tier.grow(replace(tier.spec, rows=sum(members)))
        except BaseException:
            tier.members = before
            raise

    def _grows(self, part: RecordRange, spec: Spec) -> bool:
        pool = part.pool
        if pool.is_shared and not may_share(spec):
            return False
        if pool.is_shared:
            members = list(pool.tier.members)
            members[members.index(part.spec.rows or 0)] = spec.rows or 0
            self.resize(pool, members)
        else:
            pool.tier.grow(_layout(spec))
        part.spec = spec
        return True

    def release(self, part: RecordRange) -> None:
        """Delete a key range and its records. The next commit leaves it out, and compaction then frees its space."""
        pool = part.pool
        with held_back():
            count = part.count
            pool.remove(part)
            if pool.is_shared:
                pool.tier.remove_within(*keys_of_part(part.number), count)
                with pool.tier.store.lock:  # the next commit records it
                    pool.tier.store.dropped |= {part.number}
            if not pool.parts:
                self._pools = [each for each in self._pools if each is not pool]
                pool.tier.cache.release_current()
                pool.tier.new_epoch()
                pool.tier.budget.leave()
                self._table_folder.discard(pool.tier.store)

    def leave(self) -> None:
        super().leave()
        self._pools = []

    @property
    def tiers(self) -> list[PoolBackend]:
        return [pool.tier for pool in self._pools]

    def place_of(self, part: RecordRange) -> tuple[int, int | None]:
        number = next(number for number, pool in enumerate(self._pools) if pool is part.pool)
        return number, part.number if part.pool.is_shared else None

    @property
    def budget_bytes(self) -> int:
        """The largest RAM of all backends now."""
        return self._budgets.total if self._budgets.is_given else sum(tier.budget_bytes for tier in self.tiers)

    def has_room(self, new: Sequence[NewRows]) -> bool:
        return all(pool.tier.has_room(rows) for pool, rows in by_pool(new).items())


def _layout(spec: Spec) -> Spec:
    return replace(spec, init=Zeros(), seed=0)
