"""`DiskBackend`: records in files, behind a cache in RAM of the rows in use."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np

from embedrock.batch.plan import SlotIndex, make_plan
from embedrock.errors import CacheTooSmallError, counted
from embedrock.kernels.keys import PART_BITS
from embedrock.spec.spec import Spec
from embedrock.storage.advice import consider
from embedrock.storage.backend import Backend, Pin, RamLayout
from embedrock.storage.budget import MemoryBudget
from embedrock.storage.cache import DIRTY, WRITING, FullCache, SlotCache
from embedrock.storage.online_curve import FULL, OnlineMissCurve
from embedrock.storage.ram_layout import claim_of, memory_for, place
from embedrock.storage.records import Records, wrong_last_steps
from embedrock.storage.table_lock import TableLock
from embedrock.store.compaction import fill, relieve
from embedrock.store.manifest import KEYS
from embedrock.store.reading import NAMED
from embedrock.store.record_store import ALL_IDS, LocatedRecords, RecordStore
from embedrock.store.segments import damaged
from embedrock.system.interrupts import held_back
from embedrock.system.scopes import on_failure
from embedrock.system.sizes import format_bytes
from embedrock.system.spans import spanned

LEAST_OVERLAY_BYTES = 1 << 20  # always allowed for the index of rows in logs
MOVED_ROWS = 8192  # moved between caches, or evicted, at a time
NO_KEYS = np.empty(0, np.int64)


class DiskBackend(Backend):
    """Records in the files of a `RecordStore`, behind a cache.

    Callers hold the table lock, except in `bring_ahead`.

    Args:
        policy: of eviction, a name in `embedrock.storage.cache.POLICIES`.
        members: row counts of the tables that have, or had, a range of keys. After changing it, call `grow`.

    Attributes:
        hits, misses: rows that batches found in the cache, and that they did not.
        entered: ids of rows that came into the cache, while `leave` is under way.
    """

    evicts = True
    _is_made = False  # other threads may call it before

    def __init__(
        self,
        spec: Spec,
        store: RecordStore,
        budget: MemoryBudget,
        policy: str,
        table_lock: TableLock,
        subject: str,
        members: Sequence[int] = (),
    ) -> None:
        self.members = members
        self.store, self.table_lock, self.budget, self._policy = store, table_lock, budget, policy
        self.is_shared = store.parts is not None
        self.commit: Any = None  # the part of a running commit: a `CommitWriter`
        self.brought = 0  # rows that calls of bring_ahead read
        self.cache: FullCache | SlotCache = SlotCache(1)  # others may request room before this one has its own
        budget.join(self, claim_of(spec, self.is_shared))
        self.subject = subject
        super().__init__(spec, self._placed(spec, budget.nbytes), subject)
        self.cache = self._new_cache(self.placement)
        self._follow_placement()
        self._users, self._batch = 0, NO_KEYS
        self._pins = weakref.WeakSet[_CachePin]()
        self._count = store.content.count - len(store.withheld)
        self.entered: list[np.ndarray] | None = None
        self._is_known = False  # the batch was counted: a lookup and its step count once
        self.hits = self.misses = self._evictions = self._spilled = self._changes = 0
        self.watch, self._is_made = OnlineMissCurve(policy, self.is_shared), True

    def _placed(self, spec: Spec, nbytes: int) -> RamLayout:
        return place(spec, nbytes, self.subject, self.budget.note, self.is_shared, self.members)

    # ---------------------------------------------------------------- the backend of a table

    @property
    def count(self) -> int:
        return self._count

    @property
    def budget_bytes(self) -> int:
        return self.budget.nbytes

    @property
    def bytes_used(self) -> int:
        if not self._is_made:
            return 0
        cache = self.record_bytes_in(self.cache.used_slots) + self.cache.bytes_used
        return cache + self.store.log_index.nbytes + self.store.base.nbytes

    @property
    def index(self) -> SlotIndex:
        return self.cache.index

    def find(self, ids: np.ndarray) -> np.ndarray:
        return self.cache.find(ids)

    def look_up(self, ids: np.ndarray, positions: np.ndarray, out: np.ndarray) -> np.ndarray:
        slots = self.cache.look_up(ids, self.records.weights, positions, out)
        self.hits += int(np.count_nonzero(slots >= 0))
        return slots

    def begin_batch(self) -> None:
        self.cache.release_current()
        self.adapt()
        self.arena.densify(self.cache.count * self.spec.record_bytes)
        self._is_known = False

    def bring(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        with held_back():  # or a slot might be assigned to a row that was not read
            missing = int(np.count_nonzero(slots < 0))
            if self._is_known and not missing:
                return slots
            if not self._is_known:
                self.cache.release_current()
            while (brought := self._bring(ids, slots)) is None:
                slots = self.cache.find(ids)
            use = self.cache.hold if self._is_known else self.cache.touch  # a batch uses a row once, read and step
            use(brought[brought >= 0])
            self.budget.free()
            self._count_batch(ids, missing)
            if self.parts is not None:
                self._batch = ids.copy()  # loaded keys, until they are stepped. A copy: dropping them ends a batch
            return brought

    def goes_on_with(self, ids: np.ndarray) -> bool:
        return self._is_known and np.array_equal(ids, self._batch)

    def _count_batch(self, ids: np.ndarray, misses: int) -> None:
        if self._is_known:
            return
        self._is_known = True
        self.hits, self.misses = self.hits + len(ids) - misses, self.misses + misses
        if self.watch.see(ids):
            counted = self._changes, self.misses, int(self.store.counts["reads"])
            self.watch.look(self.placement.slots, self.spec.rows, counted, self.cache.epoch_uses)
            if self._changes:  # the table trains
                consider(self)

    def _bring(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray | None:
        """Return slots for all of `ids` that have records; None if the lock was released: `slots` may be stale."""
        missing = (slots < 0).nonzero()[0]
        found = self.store.located(ids[missing])
        if not found.ids.size:
            return slots
        here, cache = slots[slots >= 0], self.cache
        cache.pin(here)
        try:
            if self._make_free(len(found.ids)):
                return None
        finally:
            cache.unpin(here)
        with self._new_rows(found.ids, used=False) as made:  # the whole batch is touched once it is loaded
            self._read(found, self.records.bytes, made)
        slots = slots.copy()
        slots[missing[found.positions]] = made
        return slots

    @spanned("disk")
    def _read(self, found: LocatedRecords, records: np.ndarray, slots: np.ndarray) -> None:
        """Read located records to ``records[slots]``, uint8 (n, record_bytes).

        Raises:
            CorruptTableError: a record is damaged, or impossible.
        """
        self.store.read(found, records, slots)
        self._check_steps(found.ids, records, slots)

    def _check_steps(self, ids: np.ndarray, records: np.ndarray, slots: np.ndarray) -> None:
        """Raise `CorruptTableError` if records that were read are impossible."""
        steps = self.steps_of(ids)
        wrong = wrong_last_steps(self.spec, records, slots, steps)
        if wrong.size:
            named = ", ".join(map(str, ids[wrong[:NAMED]].tolist()))
            expected = f"records that were last stepped in one of its steps, 1 to {np.max(steps)}"
            raise damaged(self.subject, expected, f"{len(wrong)} of another, ids {named}")

    def steps_of(self, ids: np.ndarray) -> int | np.ndarray:
        """Return the number of remembered steps that may have stepped the rows: of all, or of each."""
        parts = {0: self} if self.parts is None else self.parts
        steps = {number: part.history.steps for number, part in parts.items() if part.history is not None}
        if not self.is_shared:
            return max(steps.values(), default=0)
        numbers, inverse = np.unique(ids >> PART_BITS, return_inverse=True)
        return np.array([steps.get(number, 0) for number in numbers.tolist()], np.int64)[inverse]

    @contextmanager
    def _new_rows(self, ids: np.ndarray, used: bool) -> Iterator[np.ndarray]:
        """Assign slots to rows for the caller to fill. On an error they are freed, because they still hold other rows'
        bytes.
        """
        made = self.cache.insert(ids)
        if self.entered is not None:
            self.entered.append(ids)
        try:
            if used:
                self.cache.use(made)
            yield made
        except BaseException:
            self.cache.remove(made)
            self.new_epoch()
            raise

    def make_room(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        slots = self.bring(ids, slots)
        while self._make_free(int(np.count_nonzero(slots < 0))):  # others may have had the table meanwhile
            slots = self.bring(ids, self.cache.find(ids))
        self.budget.hold(functools.partial(memory_for, self.spec, len(ids)))
        return slots

    def has_room(self, rows: int) -> bool:
        return rows <= self.cache.free

    def admit(self, ids: np.ndarray, slots: np.ndarray, fresh: np.ndarray, first_state: np.ndarray) -> np.ndarray:
        missing, slots = slots < 0, slots.copy()
        with self._new_rows(ids[missing], used=True) as made:
            self.records.begin(made, fresh, first_state)
            self.cache.flags[made] = DIRTY
            slots[missing] = made
        self._count += len(made)
        return slots

    def copy_before_write(self, slots: np.ndarray) -> None:
        if self.commit is not None:
            self.commit.save(slots)

    def mark_dirty(self, slots: np.ndarray) -> None:
        self._changes, self._batch = self._changes + 1, NO_KEYS
        self.cache.flags[slots] |= DIRTY
        self.budget.free()

    def id_batches(self, size: int) -> Iterator[np.ndarray]:
        count, found = self._ids(*ALL_IDS, size)
        if count != self._count:  # callers have room for exactly that many
            raise damaged(self.subject, f"`count` {count}, as its files say", self._count)
        return found

    ascending_ids = id_batches

    def ids_within(self, lo: int, hi: int, size: int) -> Iterator[np.ndarray]:
        return self._ids(lo, hi, size)[1]

    def _ids(self, lo: int, hi: int, size: int) -> tuple[int, Iterator[np.ndarray]]:
        return self.store.all_ids(lo, hi, size, (ids for ids, _ in self.cache.batches(MOVED_ROWS)))

    def remove_within(self, lo: int, hi: int, rows: int) -> None:
        """Delete the `rows` records of ids in ``[lo, hi)``, except those in files. Nothing runs in the background."""
        self.cache.release_current()
        for ids, slots in list(self.cache.batches(MOVED_ROWS)):
            self._drop(slots[(ids >= lo) & (ids <= hi - 1)])
        self._count -= rows

    def read_through(self, ids: np.ndarray) -> tuple[Records, np.ndarray]:
        slots, known = self.cache.find(ids), np.empty(len(ids), np.int64)
        found = self.store.located(ids[slots < 0])
        here, below = np.flatnonzero(slots >= 0), np.flatnonzero(slots < 0)[found.positions]
        copies = self._empty(len(here) + len(below))
        copies.bytes[: len(here)] = self.records.bytes[slots[here]]
        self._read(found, copies.bytes, np.arange(len(here), len(copies.bytes)))
        known.fill(-1)
        known[here], known[below] = np.arange(len(here)), np.arange(len(here), len(copies.bytes))
        return copies, known

    def holds(self, ids: np.ndarray) -> np.ndarray:
        held = self.store.locate(ids) >= 0
        rest = (~held).nonzero()[0]
        held[rest] = self.cache.find(ids[rest]) >= 0
        return held

    def discard(self, ids: np.ndarray, is_final: bool = False) -> None:
        slots = self.cache.find(ids)
        here = slots >= 0
        own = slots[here]
        self._write_back(own)
        self.copy_before_write(own)
        is_stored = self.store.locate(ids) >= 0
        is_stored[here] |= (self.cache.flags[own] & WRITING) != 0  # the running commit will store it
        self.store.discard(ids[is_stored])
        if is_final:
            self.records.bytes[own] = 0
        self._drop(own)
        self._count -= len(ids)

    def _drop(self, slots: np.ndarray) -> None:
        """Free the slots of deleted rows."""
        for pin in list(self._pins):
            pin.free(slots)
        self.cache.remove(slots)
        self.new_epoch()

    def leave(self, ids: np.ndarray) -> np.ndarray:
        """Remove unchanged rows from the cache, and return their ids. Later reads take them from the files."""
        slots = self.cache.find(ids)
        here = slots >= 0
        if (own := slots[here]).size:
            self._write_back(own)
            self._drop(own)
        return ids[here]

    def leave_entered(self, ids: np.ndarray) -> np.ndarray:
        """Call `leave` for those of `ids`, ascending, that came into the cache since `entered` was set."""
        late = np.concatenate([ids[:0], *(self.entered or ())])
        places = np.searchsorted(ids, late)
        return self.leave(late[places < np.searchsorted(ids, late, side="right")])

    def follow(self, store: RecordStore) -> None:
        """Read from the files of a later commit. Rows that differ have left the cache."""
        store.counts = self.store.counts
        self.store = store
        self._follow_placement()
        self._count = store.content.count - len(store.withheld)
        self.new_epoch()

    def paste_ascending(self, batches: Iterable[tuple[np.ndarray, np.ndarray]], most: int) -> None:
        self._count = fill(self.store, batches, most)
        self.new_epoch()

    def bulk_insert(self, ids: np.ndarray, records: np.ndarray) -> None:
        while len(ids):
            self.begin_batch()  # sets `batch_rows`
            part, ids = np.split(ids, [self.batch_rows])
            self._make_free(len(part))
            with self._new_rows(part, used=False) as made:
                self.records.bytes[made] = records[: len(part)]
                self.cache.flags[made] = DIRTY
            self._count, records = self._count + len(made), records[len(part) :]

    def overwrite(self, ids: np.ndarray, records: np.ndarray) -> None:
        """Write records of ids, without repeats, whether new or not. No other thread uses the backend."""
        slots = self.cache.find(ids)
        self._count -= int(np.count_nonzero(self.holds(ids)))
        self.cache.remove(slots[slots >= 0])
        self.new_epoch()
        self.bulk_insert(ids, records)

    def stats(self) -> dict[str, float]:
        self.adapt()
        return self.counters()

    def counters(self) -> dict[str, float]:
        """Return the values of `stats` without adapting the cache. Other threads may use the table meanwhile."""
        store = self.store
        return {
            "hits": self.hits,
            "misses": self.misses,
            "evictions": self._evictions,
            "spilled": self._spilled,
            "cache_slots": self.placement.slots,
            "cache_rows": self.cache.count,
            "overlay_rows": store.log_index.count,
            "overlay_bytes": store.log_index.nbytes,
            "commit": store.content.commit,
            "rows_withheld": len(store.withheld),
            "disk_bytes": store.disk_bytes,
            "collections_failed": store.table_folder.collections_failed,
            **store.counts,
            **self.watch.told(self.placement.slots),
        }

    # ---------------------------------------------------------------- the cache

    def _make_free(self, count: int) -> bool:
        """Free slots until `count` are free; return whether rows may have other slots now.

        Rows may have moved if the lock was released meanwhile, or if the cache was resized.
        """
        waited = self.adapt()
        while (needed := count - self.cache.free) > 0:
            if self._may_move and self.budget.grow():
                waited |= self.adapt()
                continue
            crowded = self._crowds(needed)
            victims = self.cache.victims(needed)
            if crowded and self._may_move:
                self._relieve(needed)
            elif len(victims) == needed and not crowded:
                self._evict(victims)
            elif self._may_move:
                in_use = self.cache.count - len(victims)
                least = memory_for(self.spec, in_use + count)
                if not self.budget.need(least, self):
                    self.budget.free()
                    self._refuse(count, in_use, least)
                self.adapt()
                waited = True
            elif self.commit is not None:
                self.commit.wait()  # rows that it has not written yet cannot leave
                waited = True
        return waited

    def _refuse(self, count: int, in_use: int, least: int) -> NoReturn:
        raise CacheTooSmallError(
            f"the cache of {self.subject} holds {counted(self.cache.capacity, 'row')}, and this batch needs "
            f"{count} more while {in_use} are in use by unfinished ones. memory={least} ({format_bytes(least)}; "
            f"now {self.budget}) is enough: raise memory=, or use smaller batches or a smaller depth of prefetch."
        )

    @spanned("spill")
    def _evict(self, victims: np.ndarray) -> None:
        self._write_back(victims)
        dirty = victims[(self.cache.flags[victims] & DIRTY) != 0]
        if dirty.size:
            dirty = dirty[np.argsort(self.cache.ids_in(dirty))]
            self.store.append(self.records.bytes, dirty, self.cache.ids_in(dirty))
        self.cache.remove(victims)
        self._evictions, self._spilled = self._evictions + len(victims), self._spilled + len(dirty)
        self.new_epoch()

    # ---------------------------------------------------------------- its size

    def _new_cache(self, placement: RamLayout) -> FullCache | SlotCache:
        return FullCache(placement.slots) if placement.direct else SlotCache(placement.slots, self._policy)

    def _follow_placement(self) -> None:
        self.store.log_index.most_bytes = max(self.placement.overlay_bytes, LEAST_OVERLAY_BYTES)
        self.store.buffer_bytes = self.placement.buffer_bytes
        self.batch_rows = max(1, self.placement.slots // 4)

    @property
    def _may_move(self) -> bool:
        """Return whether the cache may be resized: a running commit refers to slots."""
        return self.commit is None or self.commit.is_done

    def adapt(self) -> bool:
        """Resize the cache to the budget; return whether rows have moved or left."""
        budget, epoch = self.budget, self.epoch
        if self.placement.budget_bytes == budget.nbytes <= budget.due or not self._may_move:
            return False
        least = self._reduced_to(min(budget.nbytes, budget.due))
        budget.shrink_to(least)
        if least <= budget.nbytes:
            placement = self._placed(self.spec, budget.nbytes)
            if placement.direct and not self.placement.direct and not budget.may_double:
                placement = place(self.spec, budget.nbytes, self.subject, budget.note, is_pool=True)
            if placement != self.placement:
                self._move_to(placement)
        return self.epoch != epoch

    @property
    def wanted_bytes(self) -> int:
        """A budget for the cache size that pays: between half and twice the present one."""
        if not self._is_made:
            return self.budget.nbytes
        slots, cache = self.placement.slots, self.cache
        wanted = self.watch.worthwhile(slots, cache.count >= FULL * cache.capacity and isinstance(cache, SlotCache))
        return self.budget.nbytes if wanted == slots else memory_for(self.spec, wanted)

    def give_up_excess(self, waits: bool) -> None:
        """Release the RAM above the target; `waits`: wait also for a running commit, whose rows cannot leave."""
        if waits and self.commit is not None:
            self.commit.wait()
        self.cache.release_current()
        if self.cache.count or not self._may_move:
            self.adapt()
        else:  # the cache is rebuilt when the table is used
            self.budget.shrink_to(self.budget.due)
            self.new_epoch()

    def _reduced_to(self, nbytes: int) -> int:
        """Evict rows that do not fit `nbytes`; return the bytes of the rows that cannot leave, or `nbytes`."""
        slots = self._placed(self.spec, nbytes).slots
        while (excess := self.cache.count - slots) > 0:
            victims = self.cache.victims(min(excess, MOVED_ROWS))
            if not victims.size:
                return max(nbytes, memory_for(self.spec, self.cache.count))
            if self._crowds(len(victims)):
                self._relieve(len(victims))
            self._evict(victims)
        return nbytes

    def grow(self, spec: Spec) -> None:
        """Become the backend of a table of more rows, or of open ids. Nothing runs in the background.

        The index of more rows takes more of the budget, and leaves less to the cache.

        Raises:
            MemoryBudgetError: the remaining budget is too small. No row has changed.
        """
        before = self.spec
        self.cache.release_current()
        self.budget.join(self, claim_of(spec, self.is_shared))
        try:
            placement = self._placed(spec, self.budget.nbytes)
            self.spec = spec
            if (least := self._reduced_to(self.budget.nbytes)) > self.budget.nbytes:
                raise CacheTooSmallError(
                    f"{self.subject} cannot grow to {spec.rows} rows while {self.cache.count} are held for batches to "
                    f"come: memory={least} ({format_bytes(least)}; now {self.budget}) is enough. Raise memory=, "
                    "or grow when no prefetch is under way."
                )
        except BaseException:
            self.spec = before
            self.budget.join(self, claim_of(before, self.is_shared))
            raise
        if placement != self.placement:
            self._move_to(placement)

    def _move_to(self, placement: RamLayout) -> None:
        """Move all rows to another cache.

        RAM is released on the way. So both caches together take little more than one, unless slots are ids in the new
        one.
        """
        self._move_listeners_out()
        cache, (arena, records) = self._new_cache(placement), self._allocated(placement)
        self.new_epoch()
        done = 0
        try:
            for ids, slots in self.cache.batches(MOVED_ROWS):  # they ascend
                made = cache.enter(ids, self.cache.scores_in(slots))
                cache.flags[made], records.bytes[made] = self.cache.flags[slots], self.records.bytes[slots]
                done = self.arena.give_back(done, (int(slots[-1]) + 1) * self.spec.record_bytes)
        except BaseException as error:
            self.table_lock.failure = error
            raise
        self.cache, self.arena, self.records, self.placement = cache, arena, records, placement
        self._follow_placement()

    def _crowds(self, more: int) -> bool:
        """Return whether the index of rows in logs would exceed its part of the budget."""
        log_index = self.store.log_index
        return log_index.count > 0 and log_index.bytes_with(more) > log_index.most_bytes

    def _relieve(self, more: int) -> None:
        relieve(self.store, KEYS if self.is_shared else self.spec.rows, functools.partial(self._crowds, more))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        with self.table_lock.lock:
            self._users += 1
        try:
            yield
        finally:
            with self.table_lock.lock:
                self._users -= 1
                self.table_lock.notify()

    @property
    def is_idle(self) -> bool:
        """Return whether no other thread works with it."""
        return not self._users and self._may_move

    def becomes_idle(self) -> bool:
        """Return whether it is idle, and flush the running commit."""
        if self.commit is not None:
            self.commit.flush()
        return self.is_idle

    # ---------------------------------------------------------------- ahead of the batch that uses them

    def bring_ahead(self, ids: np.ndarray) -> Pin:
        # The disk is read while other threads use the table. A record that was evicted again meanwhile has moved, and
        # is read again.
        pin = _CachePin(self)
        with held_back(), self.table_lock.ahead():
            self._pins.add(pin)
        with on_failure(pin.release):
            ids = ids if np.all(ids[1:] > ids[:-1]) else make_plan(ids).ids
            while ids.size:
                ids = self._bring_part(ids, pin)
        return pin

    def _bring_part(self, ids: np.ndarray, pin: _CachePin) -> np.ndarray:
        """Load records; return the ids that moved meanwhile."""
        with held_back(), self.table_lock.ahead():
            slots, store = self.cache.find(ids), self.store
            pin.hold(slots[slots >= 0])
            found = store.located(ids[slots < 0])
        staged = np.empty((len(found.ids), self.spec.record_bytes), np.uint8)
        self._read(found, staged, np.arange(len(staged)))
        with held_back(), self.table_lock.ahead():
            self.table_lock.settle_steps()
            self.misses += len(found.ids)  # rows without a record are counted when their batch comes
            self.brought += len(found.ids)
            if len(found.ids) > self.cache.free:
                self.cache.release_current()  # the batch is done, held by its own pin, or loaded again
            self._make_free(len(found.ids))  # first, as others may have the table meanwhile
            slots = self.cache.find(found.ids)
            pin.hold(slots[slots >= 0])
            good = (slots < 0) & (self.store.locate(found.ids) == found.locations) & (self.store is store)
            if good.any():
                taken = slice(None) if good.all() else good  # a mask copies
                with self._new_rows(found.ids[taken], used=False) as made:
                    self.records.bytes[made] = staged[taken]
                pin.hold(made)
            return found.ids[(slots < 0) & ~good]


class _CachePin(Pin):
    """Rows that stay in the cache until `release`. After a resize of the cache they may have to be loaded again."""

    def __init__(self, tier: DiskBackend) -> None:
        self._tier = tier
        self._held: list[tuple[FullCache | SlotCache, np.ndarray]] = []

    def hold(self, slots: np.ndarray) -> None:
        """Pin the rows in `slots`. A pin holds each row once."""
        if slots.size:
            self._tier.cache.pin(slots)
            self._held.append((self._tier.cache, slots))

    def free(self, slots: np.ndarray) -> None:
        """Unpin rows that are about to leave. Caller holds the table lock."""
        for number, (cache, held) in enumerate(self._held):
            if cache is self._tier.cache and (leaving := np.isin(held, slots)).any():
                cache.unpin(held[leaving])
                self._held[number] = cache, held[~leaving]

    def release(self) -> None:
        with held_back(), self._tier.table_lock.ahead():
            for cache, slots in self._held:
                cache.unpin(slots)
            self._held.clear()

    def looked_up(self) -> tuple[int, int] | None:
        if not self._held:
            return None
        with self._tier.table_lock.lock:
            return self._tier.hits, self._tier.misses - self._tier.brought
