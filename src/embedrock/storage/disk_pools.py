"""`DiskPools`: the backends of tables on disk, one for each store of their folder, within one budget."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from embedrock.spec.spec import Spec
from embedrock.storage.backend import Backend
from embedrock.storage.budget import pool_of
from embedrock.storage.disk_backend import DiskBackend
from embedrock.storage.mapped_backend import MappedBackend
from embedrock.storage.ram_layout import check_budget, claim_of
from embedrock.storage.record_pools import RecordPools, RecordRange, may_share, plain, takes
from embedrock.storage.table_lock import TableLock
from embedrock.store.manifest import MAX_PARTS, StoreEntry, TableEntry
from embedrock.store.record_store import RecordStore, keys_of_part
from embedrock.store.table_folder import TableFolder, emptied
from embedrock.system.interrupts import held_back
from embedrock.system.scopes import on_failure
from embedrock.system.sizes import MAP, Size

OF_VOLUME = ("commit", "collections_failed")  # statistics of the folder, equal in each of its backends


class DiskPools(RecordPools):
    """The backends of a group on disk, one for all tables of the same record layout.

    Args:
        memory: most RAM of all of them; None: a share of the default of tables on disk; "auto": as much of the
            machine's free RAM as pays; "map": none, for readers of mapped files.

    Attributes:
        tiers: the backend of each store of the folder.
    """

    def __init__(self, memory: Size | None, policy: str, table_lock: TableLock) -> None:
        self._memory, self._policy, self._table_lock = memory, policy, table_lock
        self._backend = MappedBackend if memory == MAP else DiskBackend
        self._pools: list[DiskBackend] = []

    def open(
        self, table_folder: TableFolder, members: Sequence[tuple[TableEntry, Spec]], subject: str
    ) -> Sequence[Backend]:
        """Make the backends as of the last commit, and return that of each member.

        Args:
            members: with their specs, whose initial values are ignored.
        """
        self.leave()
        self._table_folder, self._subject, self._budgets = table_folder, subject, pool_of(self._memory)
        for number, store in enumerate(table_folder.stores):
            specs = [spec for member, spec in members if member.pool == number]
            layout, rows = plain(specs[0]), [] if store.parts is None else [spec.rows or 0 for spec in specs]
            if store.parts is not None:
                layout = replace(layout, rows=sum(rows))
            self._pools.append(self._pool(layout, number, rows))
        parts = list[RecordRange]()
        for member, spec in members:
            parts.append(RecordRange(spec, self._pools[member.pool], member.part or 0, self, f"table {member.name!r}"))
            _, withheld = table_folder.withheld.get(member.name, ((), ()))
            parts[-1].admitted(member.count - len(withheld))
        return parts

    def follow(self, table_folder: TableFolder, members: Sequence[TableEntry], tiers: Sequence[Any]) -> None:
        """Read from the files of a later commit with the same tables, whose backends are `tiers`."""
        self._table_folder = table_folder
        for pool, store in zip(self._pools, table_folder.stores, strict=True):
            pool.follow(store)
        for member, tier in zip(members, tiers, strict=True):
            if member.part is not None:
                tier.admitted(member.count - tier.count)

    def _pool(self, layout: Spec, number: int, members: list[int]) -> DiskBackend:
        how = self._budgets.share(), self._policy, self._table_lock, self._subject
        made = self._backend(layout, self._table_folder.stores[number], *how, members)
        made.parts = {}
        return made

    def part(self, spec: Spec, subject: str) -> Backend:
        fits = (pool for pool in self._pools if takes(pool, spec) and (pool.store.parts or 0) < MAX_PARTS)
        pool = next(fits, None)
        if pool is None:
            pool = self._new_pool(spec, subject)
        else:
            self.resize(pool, [*pool.members, spec.rows or 0])
        number, store = 0, pool.store
        if store.parts is not None:
            with store.lock:
                number, store.parts = store.parts, store.parts + 1
        return RecordRange(spec, pool, number, self, subject)

    def _new_pool(self, spec: Spec, subject: str) -> DiskBackend:
        layout, is_shared, last = plain(spec), may_share(spec), self._table_folder.manifest
        check_budget(layout, self._budgets.share(), subject, is_shared)
        content = StoreEntry(last.uuid, last.commit, layout.record_bytes, None, 0, parts=0 if is_shared else None)
        store = self._table_folder.add(content)
        with on_failure(lambda: self._table_folder.discard(store)):
            members = [spec.rows or 0] if is_shared else []
            pool = self._pool(layout, self._table_folder.stores.index(store), members)
        self._pools.append(pool)
        return pool

    def resize(self, pool: DiskBackend, members: list[int]) -> None:
        """Make room for members with these row counts in a pool. Nothing runs in the background."""
        before, pool.members = pool.members, members
        with on_failure(lambda: setattr(pool, "members", before)):
            pool.grow(replace(pool.spec, rows=sum(members)))

    def _grows(self, part: Any, spec: Spec, /) -> bool:
        pool = part.pool
        if pool.is_shared and not may_share(spec):
            return False
        if pool.is_shared:
            members = list(pool.members)
            members[members.index(part.spec.rows or 0)] = spec.rows or 0
            self.resize(pool, members)
        else:
            pool.grow(plain(spec))
        part.spec = spec
        return True

    def release(self, part: Any, /) -> None:
        """Delete a key range and its records. The next commit leaves it out, and compaction then frees its space."""
        pool = part.pool
        with held_back():
            count = part.count
            part.drop()
            if pool.is_shared:
                pool.remove_within(*keys_of_part(part.number), count)
                with pool.store.lock:  # the next commit records it
                    pool.store.dropped |= {part.number}
            if not pool.parts:
                self._pools = [each for each in self._pools if each is not pool]
                pool.cache.release_current()
                pool.new_epoch()
                pool.budget.leave()
                self._table_folder.discard(pool.store)

    def place_of(self, part: Any, /) -> tuple[int, int | None]:
        """Return the index of the store with a table's records, and the table's number there; None: all keys are its
        own.
        """
        return self._pools.index(part.pool), part.number if part.pool.is_shared else None

    @property
    def budget_bytes(self) -> int:
        """The largest RAM of all backends now."""
        return self._budgets.given or sum(tier.budget_bytes for tier in self.tiers)

    def leave(self) -> None:
        for tier in self.tiers:
            tier.budget.leave()
        self._pools = []

    @property
    def is_being_shared(self) -> bool:
        """Return whether this thread is dividing the budget now."""
        return any(tier.budget.pool.lock._is_owned() for tier in self.tiers)

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
        self.budget = pool_of(memory, is_alone=True).share()

    def open(
        self, table_folder: TableFolder, members: Sequence[tuple[TableEntry, Spec]], subject: str
    ) -> list[DiskBackend]:
        ((_, spec),) = members
        self._table_folder = table_folder
        return [self._opened(spec, table_folder.stores[0], subject)]

    def _opened(self, spec: Spec, store: RecordStore, subject: str) -> DiskBackend:
        made = self._backend(spec, store, self.budget, self._policy, self._table_lock, subject)
        self._pools = [made]
        return made

    def part(self, spec: Spec, subject: str) -> DiskBackend:
        return self._opened(spec, emptied(self._table_folder.stores[0], spec.record_bytes), subject)

    def replaced(self, tier: Backend, spec: Spec, fill: Callable[[Backend], None], subject: str) -> DiskBackend:
        """Replace the records. The next commit replaces all records in the files."""
        (before,), (old,) = self._pools, self._table_folder.stores
        try:
            made = self.part(spec, subject)
            fill(made)
        except BaseException:
            for pool in self._pools:
                if pool is not before:
                    pool.store.give_up()
            self._pools = [before]
            self.budget.join(before, claim_of(before.spec))
            raise
        self._table_folder.replace(old, made.store)
        return made

    def _grows(self, tier: DiskBackend, spec: Spec, /) -> bool:
        tier.grow(spec)
        return True

    def release(self, tier: DiskBackend, /) -> None:
        """Do nothing: the folder has one table."""

    def place_of(self, tier: Any, /) -> tuple[int, int | None]:
        return 0, None

    def leave(self) -> None:
        self.budget.leave()
        self._pools = []
