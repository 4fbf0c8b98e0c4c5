"""`Disk`: records in files, behind a cache of records in RAM that holds the rows in use."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn, Protocol

import numpy as np

from embedrock.batch.plan import make_plan
from embedrock.errors import ArgumentError, CacheTooSmallError, MemoryBudgetError
from embedrock.machine.ram import memory_limit
from embedrock.machine.sizes import format_bytes, parse_bytes
from embedrock.process.interrupts import held_back
from embedrock.spec import Spec
from embedrock.store.compaction import relieve
from embedrock.store.manifest import MAX_RECORD_BYTES
from embedrock.store.reading import NAMED
from embedrock.store.runs import damaged
from embedrock.store.store import Located, Store
from embedrock.tiers.cache import DIRTY, Cache, Whole
from embedrock.tiers.records import Records, wrong_last_steps
from embedrock.tiers.tier import Placement, Ticket, Tier
from embedrock.tiers.turn import Turn

DEFAULT_SHARE = 2  # of the machine's RAM, one part in so many, where no budget is given
BUFFER_BYTES = 16 << 20  # staging of reads and commits, at most
INDEX_SHARE = 4  # one part in so many of the budget, at most, is kept for the index of compacted rows
# A compaction rewrites nearly all of a large table, so there should be room for many rows before one is made: it is
# room for 8 million with a budget of 1 GiB.
OVERLAY_SIXTEENTHS = 3  # of the budget, at most, are kept for the overlay ...
OVERLAY_ROW_BYTES = 24  # ... and no more than all rows need ...
LEAST_OVERLAY_BYTES = 1 << 20  # ... but it may always take so much
BUFFER_SHARE = 16  # one part in so many of the budget, at most, is kept for buffers


def place(spec: Spec, memory: int | str | None, subject: str) -> Placement:
    """Decide how a table of `spec` uses `memory` (None: half of the machine's RAM).

    Raises:
        ArgumentError: a row is too large for a file.
        MemoryBudgetError: it holds no cache that is of use.
    """
    if spec.record_bytes >= MAX_RECORD_BYTES:
        raise ArgumentError(
            f"a row of {subject} takes {spec.record_bytes} bytes, and on disk it must take less than "
            f"{format_bytes(MAX_RECORD_BYTES)}. Use a smaller `dim`, or a rule with less state."
        )
    budget = memory_limit() // DEFAULT_SHARE if memory is None else parse_bytes(memory)
    overlay, buffers = budget * OVERLAY_SIXTEENTHS // 16, min(BUFFER_BYTES, budget // BUFFER_SHARE)
    if spec.rows is not None:
        overlay = min(overlay, spec.rows * OVERLAY_ROW_BYTES)
    rows, index = spec.rows, min(_index_bytes(spec), budget // INDEX_SHARE)
    room = budget - overlay - buffers - index
    if rows is not None and rows * spec.record_bytes + Whole.bytes_for(rows) <= room:
        return Placement(budget, rows, True, overlay)
    slots = _slots_in(room, spec.record_bytes)
    if slots < 1:
        raise MemoryBudgetError(
            f"a row of {subject} takes {spec.record_bytes} bytes, and its cache must hold one: "
            f"memory={format_bytes(budget)}. Raise memory= to {memory_for(spec, 1)} bytes or more."
        )
    return Placement(budget, slots, False, overlay)


def _slots_in(nbytes: int, record_bytes: int) -> int:
    """Return how many records a cache of `nbytes` holds, directory included."""
    low, high = 0, max(0, nbytes) // record_bytes + 1
    while high - low > 1:
        middle = (low + high) // 2
        fits = middle * record_bytes + Cache.bytes_for(middle) <= nbytes
        low, high = (middle, high) if fits else (low, middle)
    return low


def memory_for(spec: Spec, slots: int) -> int:
    """Return a budget in bytes whose cache holds at least so many rows."""
    used = slots * spec.record_bytes + Cache.bytes_for(slots)
    rest = 1 - OVERLAY_SIXTEENTHS / 16 - 1 / BUFFER_SHARE
    return math.ceil(min((used + _index_bytes(spec)) / rest, used / (rest - 1 / INDEX_SHARE))) + 16


def _index_bytes(spec: Spec) -> int:
    """Return the most RAM that tells which rows lie in base chunks: a bit for each row, and ranks."""
    return 0 if spec.rows is None else spec.rows // 8 + spec.rows // 128


class CommitUnderWay(Protocol):
    """What a tier has to know of a commit: see `Commit`, which has more.

    Attributes:
        is_done: it has ended, well or not.
    """

    is_done: bool

    def save(self, slots: np.ndarray) -> None:
        """Write those rows that are part of it, which are about to change."""
        ...

    def hurry(self) -> None:
        """Make it end soon."""
        ...

    def wait(self) -> None:
        """Return once it has ended."""
        ...


class Disk(Tier):
    """Records in the files of a `Store`, behind a cache.

    All but `bring_ahead` is called by a thread that has the table for itself.

    Args:
        spec: of the table.
        store: its files.
        placement: how it uses RAM.
        policy: of eviction, a name in `embedrock.tiers.cache.POLICIES`.
        turn: who has the table.
        subject: the table, for error messages.
    """

    evicts = True

    def __init__(
        self,
        spec: Spec,
        store: Store,
        placement: Placement,
        policy: str,
        turn: Turn,
        subject: str,
    ) -> None:
        super().__init__(spec, placement, subject)
        self.store, self.turn = store, turn
        store.overlay_bytes = max(placement.overlay_bytes, LEAST_OVERLAY_BYTES)
        self.cache = Whole(placement.slots) if placement.direct else Cache(placement.slots, policy)
        self.commit: CommitUnderWay | None = None
        self.brings = 0  # calls of bring_ahead under way
        self._users = 0
        self.batch_rows = max(1, placement.slots // 4)
        self._count = store.manifest.count
        self._is_known = False  # the batch: it was counted, as a lookup and the step after it are one
        self._hits = self._misses = self._evictions = self._spilled = 0

    # ---------------------------------------------------------------- what a table asks of a tier

    @property
    def count(self) -> int:
        return self._count

    @property
    def resident_rows(self) -> int:
        return self.cache.count

    @property
    def bytes_used(self) -> int:
        cache = self.record_bytes_in(self.cache.used_slots) + self.cache.bytes_used
        return cache + self.store.overlay.nbytes + self.store.base.nbytes

    def find(self, ids: np.ndarray) -> np.ndarray:
        return self.cache.find(ids)

    def look_up(self, ids: np.ndarray, positions: np.ndarray, out: np.ndarray) -> np.ndarray:
        slots = self.cache.look_up(ids, self.records.weights, positions, out)
        self._hits += int(np.count_nonzero(slots >= 0))
        return slots

    def begin_batch(self) -> None:
        super().begin_batch()
        self._is_known = False

    def bring(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        with held_back():  # or a slot might be taken for a row that was not read
            missing = int(np.count_nonzero(slots < 0))
            if self._is_known and not missing:
                return slots
            if not self._is_known:
                self.cache.release_current()
            while (brought := self._bring(ids, slots)) is None:
                slots = self.cache.find(ids)
            self.cache.touch(brought[brought >= 0])
            self._count_batch(len(ids) - missing, missing)
            return brought

    def _count_batch(self, hits: int, misses: int) -> None:
        if not self._is_known:
            self._is_known = True
            self._hits, self._misses = self._hits + hits, self._misses + misses

    def _bring(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray | None:
        """Return slots for all of `ids` that have records; None if others had the table, and `slots` may be old."""
        missing = np.flatnonzero(slots < 0)
        found = self.store.located(ids[missing])
        if not found.ids.size:
            return slots
        here = slots[slots >= 0]
        self.cache.pin(here)
        try:
            if self._make_free(len(found.ids)):
                return None
        finally:
            self.cache.unpin(here)
        slots = slots.copy()
        slots[missing[found.positions]] = self._fill(found)
        return slots

    def _fill(self, found: Located) -> np.ndarray:
        """Read what was found into free slots, and return them."""
        with self._new_rows(found.ids, used=False) as made:  # the whole batch is touched once it is there
            self._read(found, self.records.bytes, made)
        return made

    def _read(self, found: Located, records: np.ndarray, slots: np.ndarray) -> None:
        """Read what was found to ``records[slots]``, uint8 (n, record_bytes).

        Raises:
            CorruptTableError: a record is not what was written, or nothing that can have been written.
        """
        self.store.read(found, records, slots)
        steps = 0 if self.history is None else self.history.steps
        wrong = wrong_last_steps(self.spec, records, slots, steps)
        if wrong.size:
            named = ", ".join(map(str, found.ids[wrong[:NAMED]].tolist()))
            expected = f"records that were last stepped in one of its {steps} steps"
            raise damaged(self.subject, expected, f"{len(wrong)} of another, ids {named}")

    @contextmanager
    def _new_rows(self, ids: np.ndarray, used: bool) -> Iterator[np.ndarray]:
        """Give rows slots to fill in records; taken back where that fails, as other rows' bytes are there still."""
        made = self.cache.insert(ids, used)
        try:
            yield made
        except BaseException:
            self.cache.remove(made)
            self.new_epoch()
            raise

    def make_room(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        slots = self.bring(ids, slots)
        while self._make_free(int(np.count_nonzero(slots < 0))):  # others may have had the table meanwhile
            slots = self.bring(ids, self.cache.find(ids))
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

    def preserve(self, slots: np.ndarray) -> None:
        if self.commit is not None:
            self.commit.save(slots)

    def changing(self, slots: np.ndarray) -> None:
        self.cache.flags[slots] |= DIRTY

    def id_batches(self, size: int) -> Iterator[np.ndarray]:
        with self.store.lock:  # or a commit or a compaction might move rows from one to another meanwhile
            resident = [ids[self.store.locate(ids) < 0] for ids, _ in self.cache.batches(size)]
            base, rest = self.store.base, np.concatenate([self.store.ids_above_base(), *resident])
        if base.count + len(rest) != self._count:  # those who go through them have made room for so many
            raise damaged(self.subject, f"`count` {base.count + len(rest)}, as its files say", self._count)
        rest.sort()  # the same order every time, and that of the files
        below = (
            base.ids_of(number, start, start + size)
            for number, chunk in enumerate(base.chunks)
            for start in range(0, chunk.count, size)
        )
        return itertools.chain(below, (rest[start : start + size] for start in range(0, len(rest), size)))

    def reach(self, ids: np.ndarray) -> tuple[Records, np.ndarray]:
        slots, known = self.cache.find(ids), np.empty(len(ids), np.int64)
        found = self.store.located(ids[slots < 0])
        here, below = np.flatnonzero(slots >= 0), np.flatnonzero(slots < 0)[found.positions]
        copies = Records(self.spec, np.empty((len(here) + len(below)) * self.spec.record_bytes, np.uint8))
        copies.bytes[: len(here)] = self.records.bytes[slots[here]]
        self._read(found, copies.bytes, np.arange(len(here), len(copies.bytes)))
        known.fill(-1)
        known[here], known[below] = np.arange(len(here)), np.arange(len(here), len(copies.bytes))
        return copies, known

    def stats(self) -> dict[str, float]:
        store = self.store
        return {
            "hits": self._hits,
            "misses": self._misses,
            "evictions": self._evictions,
            "spilled": self._spilled,
            "cache_slots": self.placement.slots,
            "cache_rows": self.cache.count,
            "overlay_rows": store.overlay.count,
            "overlay_bytes": store.overlay.nbytes,
            "commit": store.manifest.commit,
            "disk_bytes": store.disk_bytes,
            **store.counts,
        }

    # ---------------------------------------------------------------- the cache

    def _make_free(self, count: int) -> bool:
        """See to it that `count` slots are free; return whether others may have had the table meanwhile."""
        waited = False
        while (needed := count - self.cache.free) > 0:
            crowded = self._crowds(needed)
            victims = self.cache.victims(needed)
            if crowded and (self.commit is None or self.commit.is_done):
                relieve(self.store, self.spec.rows, functools.partial(self._crowds, needed))
            elif len(victims) == needed and not crowded:
                self._evict(victims)
            elif self.commit is None or self.commit.is_done:
                self._refuse(count)
            else:
                self.commit.wait()  # rows that it has not written yet cannot leave
                waited = True
        return waited

    def _refuse(self, count: int) -> NoReturn:
        least = memory_for(self.spec, self.cache.capacity - self.cache.free + count)
        raise CacheTooSmallError(
            f"the cache of {self.subject} holds {self.cache.capacity} rows, and this batch needs {count} more while "
            f"{self.cache.capacity - self.cache.free} are in use by unfinished ones. memory={format_bytes(least)} "
            f"({least} bytes; now {format_bytes(self.placement.budget_bytes)}) is enough: raise memory=, or use "
            "smaller batches or a smaller depth of prefetch."
        )

    def _evict(self, victims: np.ndarray) -> None:
        dirty = victims[(self.cache.flags[victims] & DIRTY) != 0]
        if dirty.size:
            dirty = dirty[np.argsort(self.cache.ids_in(dirty))]
            self.store.append(self.records.bytes, dirty, self.cache.ids_in(dirty))
        self.cache.remove(victims)
        self._evictions, self._spilled = self._evictions + len(victims), self._spilled + len(dirty)
        self.new_epoch()

    def _crowds(self, more: int) -> bool:
        """Return whether the index of rows in logs would take more than its part of the budget."""
        overlay = self.store.overlay
        return overlay.count > 0 and overlay.bytes_with(more) > self.store.overlay_bytes

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep files and rows as they are although others may have the table."""
        with self.turn.lock:
            self._users += 1
        try:
            yield
        finally:
            with self.turn.lock:
                self._users -= 1
                self.turn.notify()

    @property
    def is_quiet(self) -> bool:
        """Whether nobody else is at work with it."""
        return not self.brings and not self._users and (self.commit is None or self.commit.is_done)

    def becomes_quiet(self) -> bool:
        """Return whether it is quiet, and hurry what keeps it from that."""
        if self.commit is not None:
            self.commit.hurry()
        return self.is_quiet

    # ---------------------------------------------------------------- ahead of the batch that uses them

    def bring_ahead(self, ids: np.ndarray) -> Ticket:
        """Bring up the records of a later batch, and hold them until its ticket is released.

        The disk is read while others go on with the table. A record that was evicted anew meanwhile has moved, and
        is read again.
        """
        ticket = _Pins(self)
        try:
            ids = make_plan(ids).ids
            while ids.size:
                ids = self._bring_part(ids, ticket)
        except BaseException:
            ticket.release()
            raise
        finally:
            with self.turn.lock:
                self.brings -= 1
                self.turn.notify()
        return ticket

    def begin_bring(self) -> None:
        self.brings += 1

    def _bring_part(self, ids: np.ndarray, ticket: _Pins) -> np.ndarray:
        """Bring up what can be; return the ids that moved meanwhile."""
        with held_back(), self.turn.lock:
            slots = self.cache.find(ids)
            ticket.hold(slots[slots >= 0])
            found = self.store.located(ids[slots < 0])
        staged = np.empty((len(found.ids), self.spec.record_bytes), np.uint8)
        self._read(found, staged, np.arange(len(staged)))
        with self.turn.whole():
            self._misses += len(found.ids)  # rows without a record are counted when their batch comes
            if len(found.ids) > self.cache.free:
                self.cache.release_current()  # it is done, or bound by its own ticket, or brought again
            self._make_free(len(found.ids))  # first, as others may have the table meanwhile
            slots = self.cache.find(found.ids)
            ticket.hold(slots[slots >= 0])
            good = (slots < 0) & (self.store.locate(found.ids) == found.locations)
            if good.any():
                with self._new_rows(found.ids[good], used=False) as made:
                    self.records.bytes[made] = staged[good]
                ticket.hold(made)
            return found.ids[(slots < 0) & ~good]

    def release(self, held: list[np.ndarray]) -> None:
        """Let the rows of a ticket go."""
        with held_back(), self.turn.lock:
            for slots in held:
                self.cache.unpin(slots)
            held.clear()


class _Pins(Ticket):
    """Rows that stay in the cache until it is released."""

    def __init__(self, tier: Disk) -> None:
        self._tier = tier
        self._slots: list[np.ndarray] = []

    def hold(self, slots: np.ndarray) -> None:
        """Keep the rows in `slots`, each of which is held once by a ticket."""
        if slots.size:
            self._tier.cache.pin(slots)
            self._slots.append(slots)

    def release(self) -> None:
        self._tier.release(self._slots)
