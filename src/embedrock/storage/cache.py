"""`SlotCache`: a bounded number of slots in RAM, and which rows leave them when others come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from embedrock import kernels
from embedrock.batch.id_table import ENTRY_BYTES, FIRST_ENTRIES, IdTable, entries_for
from embedrock.errors import check_choice
from embedrock.storage.slot_index import ID_BYTES, DenseIndex
from embedrock.system.arena import PAGE, cut, reserve

DIRTY, FROZEN, WRITING = 1, 2, 4  # flags of a slot, set by the backend; the last two prevent eviction
FULLEST = 0.8  # largest share of the hash table's entries in use
SLOT_BYTES = ID_BYTES + 1 + 2 + 1  # id, flags, pins, score
SCORES = 256
BUCKET_BYTES = 64  # of evicted rows' scores, see the kernels
SCAN_SLOTS = 1 << 16  # scanned at a time
TRIAL_SLOTS, TRIED = 1 << 14, 8  # size of a trial cache of a policy's epochs, and that over the ids fed to it at a time
NO_SLOTS = np.empty(0, np.int64)
DOUBT = 0.08  # an epoch must miss less than the one before it by this share: lost scores take time to come back


@dataclass(frozen=True)
class Policy:
    """An eviction policy as data. Every slot has a score from 0 to 255; a clock hand evicts rows of low score.

    Args:
        rises: uint8 (256,), the score after a use, by the score before it.
        chances: int64 (256,), how often, in 2**32 uses, the score rises by one more.
        epochs: uses per slot after which all scores fall by one. Of several lengths, the one that misses least on
            sampled ids is used, at first the first one. Empty: scores never fall.
        loss: what a row loses when the hand passes it: 0 or 1.
        candidates: least share of the slots whose scores are low enough for the hand.
        ghost_bytes: bytes per slot for the scores of evicted rows.
    """

    rises: np.ndarray
    chances: np.ndarray
    epochs: tuple[float, ...] = ()
    loss: int = 0
    candidates: float = 0.0
    ghost_bytes: int = 0


def _same(score: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full(SCORES, score, np.uint8), np.zeros(SCORES, np.int64)


def _logarithmic(one: int, octave: int) -> tuple[np.ndarray, np.ndarray]:
    """Count on a logarithmic scale: score `one` is one use, and each `octave` above it doubles the uses."""
    uses = 2.0 ** ((np.arange(SCORES) - one) / octave)
    uses[0] = 0
    after = np.minimum(one + octave * np.log2(uses + 1), SCORES - 1)
    rises = after.astype(np.uint8)
    return rises, ((after - rises) * 2**32).astype(np.int64)


POLICIES = {
    # Least recently used, to a sixteenth of the capacity in uses.
    "lru": Policy(*_same(SCORES - 1), epochs=(1 / 16,), candidates=1 / 64),
    # One bit: the row was used since the hand passed it.
    "clock": Policy(*_same(1), loss=1),
    # Least frequently used. Scores are logarithms of use counts: falling by one loses a fixed share of the count.
    # Long epochs separate rows that are used about equally often. Short ones suit rows whose use changes quickly.
    "lfu": Policy(*_logarithmic(12, 4), epochs=(6, 1.5, 1 / 4), candidates=1 / 64, ghost_bytes=4),
}


class SlotCache(IdTable):
    """Slots of the rows in use: finds them, assigns them and chooses the rows to evict. It holds no records.

    Ids are int64 arrays that the table has checked; slots are int64 arrays. The cache's behavior is a function of the
    calls so far. It has no lock: callers hold the table lock.

    Args:
        capacity: number of slots.
        policy: a name of `POLICIES`, or another policy.

    Attributes:
        flags: uint8 (capacity,), set by the backend: DIRTY, FROZEN, WRITING; 0 for a new row.
        count: rows that have a slot.
        used_slots: number of slots, from the first on, that have or had rows.
        epoch_uses: the epoch in use: uses per slot after which all scores fall by one.

    Example:
        >>> cache = SlotCache(2)
        >>> slots = cache.insert(np.array([7, 9]))
        >>> cache.touch(slots[:1])
        >>> cache.ids_in(cache.victims(2)).tolist()
        [9]
    """

    def __init__(self, capacity: int, policy: str | Policy = "lfu") -> None:
        self.capacity, self.count = capacity, 0
        self._policy = policy_of(policy)
        subject = "the directory of a cache"
        self._most_entries = entries_for(capacity, 2, FULLEST)
        super().__init__(min(FIRST_ENTRIES, self._most_entries))
        self._ids = reserve(capacity * ID_BYTES, subject).view(np.int64)
        self.flags, self._scores = reserve(capacity, subject), reserve(capacity, subject)
        self._pins = reserve(capacity * 2, subject).view(np.uint16)
        buckets = _buckets_for(capacity, self._policy)
        self._ghosts = reserve(buckets * BUCKET_BYTES, subject).view(np.uint16).reshape(buckets, BUCKET_BYTES // 2)
        self._histogram, self._candidates = np.zeros(SCORES, np.int64), self._policy.candidates
        self._first_free, self.used_slots, self._hand = -1, 0, 0
        self._random, self._touches, self._epoch = np.uint64(0), 0, 0
        self._trials = _PolicyTrials(capacity, self._policy)
        self.epoch_uses = self._policy.epochs[0] if self._policy.epochs else np.inf
        self._current, self._has_forgotten = NO_SLOTS, False

    @staticmethod
    def bytes_for(capacity: int, policy: str | Policy = "lfu") -> int:
        """Return the bytes of a full cache of `capacity` slots, records not included."""
        policy = policy_of(policy)
        ghosts = _buckets_for(capacity, policy) * BUCKET_BYTES
        trials = sum(SlotCache.bytes_for(*trial) for trial in _trials(capacity, policy))
        return entries_for(capacity, 2, FULLEST) * ENTRY_BYTES + capacity * SLOT_BYTES + ghosts + trials

    @property
    def bytes_used(self) -> int:
        """RAM in use now, records not included."""
        ghosts = self._ghosts.nbytes if self._has_forgotten else 0
        own = self._entries.nbytes + self.used_slots * SLOT_BYTES + ghosts
        return own + sum(cache.bytes_used for cache in self._trials.caches)

    @property
    def free(self) -> int:
        """The number of slots without a row."""
        return self.capacity - self.count

    def ids_in(self, slots: np.ndarray) -> np.ndarray:
        """Return the ids of the rows in slots; meaningless for free ones."""
        return self._ids[slots]

    def insert(self, ids: np.ndarray) -> np.ndarray:
        """Return new slots for ids (without repeats) that have none; at most `free` of them. Pin or `use` them next."""
        levels = np.zeros(len(ids), np.uint8)
        if len(self._ghosts):
            kernels.cpu.launch(kernels.cpu.cache.recall, self._ghosts, ids, self._epoch, levels)
        return self.enter(ids, levels)

    def scores_in(self, slots: np.ndarray) -> np.ndarray:
        """Return the scores of the rows in slots, uint8: what they are worth to keep."""
        return self._scores[slots]

    def enter(self, ids: np.ndarray, levels: np.ndarray) -> np.ndarray:
        """Assign new slots to ids (without repeats) that have none, with their scores, and return them."""
        assert len(ids) <= self.free
        self._grow(self.count + len(ids))
        cpu, launch, slots = kernels.cpu.cache, kernels.cpu.launch, np.empty(len(ids), np.int64)
        self._first_free, self.used_slots = cpu.take_slots(
            self._ids, self._pins, self._first_free, self.used_slots, slots
        )
        launch(kernels.cpu.directory.set_values, *self.index, ids, slots)
        self._ids[slots] = ids
        cpu.score(self._scores, self._histogram, slots, levels)
        self.flags[slots] = 0
        self.count += len(ids)
        return slots

    def _grow(self, count: int) -> None:
        """Make the hash table large enough for `count` rows.

        It is never fuller than that of a full cache. So it grows for the last time when half of the rows are there.
        While it grows, both tables together take less than a full cache.
        """
        entries = len(self._entries)
        while count * self._most_entries > self.capacity * entries:
            entries *= 2
        if entries > len(self._entries):
            self._rehash(entries)

    def remove(self, slots: np.ndarray) -> None:
        """Free slots (without repeats) that hold rows without pins. Rows of the current batch are allowed."""
        cpu, launch = kernels.cpu.cache, kernels.cpu.launch
        if self._pins[slots].any():
            mine = np.isin(self._current, slots)
            self.unpin(self._current[mine])
            self._current = self._current[~mine]
            assert not self._pins[slots].any()
        levels, ids = np.empty(len(slots), np.uint8), self._ids[slots]
        launch(cpu.forget, self._scores, self._histogram, slots, levels)
        if len(self._ghosts):
            launch(cpu.remember, self._ghosts, ids, levels, self._epoch)
            self._has_forgotten |= len(slots) > 0
        launch(cpu.erase, *self.index, ids)
        self._first_free = launch(cpu.give_slots, self._ids, self._pins, self._first_free, slots)
        self.flags[slots] = 0  # a free slot must not look like a dirty row
        self.count -= len(slots)

    def touch(self, slots: np.ndarray) -> None:
        """Record that a new batch uses these rows. They stay until the next touch, or `release_current`."""
        self.release_current()
        self.use(slots)

    def hold(self, slots: np.ndarray) -> None:
        """Pin the rows of the current batch in their new slots. It counts as no other use of them."""
        self.release_current()
        self.pin(slots)
        self._current = slots

    def release_current(self) -> None:
        """Allow eviction of the current batch's rows."""
        current, self._current = self._current, NO_SLOTS
        self.unpin(current)

    def use(self, slots: np.ndarray) -> None:
        """Record that the current batch uses further rows: see `touch`."""
        current = np.concatenate([self._current, slots])
        self.pin(slots)
        self._current = current
        self.count_uses(slots)

    def count_uses(self, slots: np.ndarray) -> None:
        """Record uses of rows, which need not stay."""
        cpu, policy = kernels.cpu.cache, self._policy
        args = self._scores, self._pins, self._histogram, slots, policy.rises, policy.chances, self._random
        self._random = np.uint64(kernels.cpu.launch(cpu.touch, *args))
        self._touches += len(slots)
        self.epoch_uses = self._trials.best(self._ids, slots) or self.epoch_uses
        if self._touches >= self.epoch_uses * self.capacity:
            self._touches, self._epoch = 0, self._epoch + 1
            cpu.age(self._scores[: self.used_slots], self._histogram)

    def pin(self, slots: np.ndarray) -> None:
        """Keep rows until they are unpinned as often as they were pinned."""
        kernels.cpu.launch(kernels.cpu.cache.pin, self._scores, self._pins, self._histogram, slots, 1)

    def unpin(self, slots: np.ndarray) -> None:
        """Remove one pin of each row."""
        kernels.cpu.launch(kernels.cpu.cache.pin, self._scores, self._pins, self._histogram, slots, -1)

    def victims(self, count: int) -> np.ndarray:
        """Return `count` slots whose rows should leave first, or fewer where no more may leave.

        No victim is pinned, frozen, being written, or used by the current batch. Victims stay as they are. Remove or
        pin them before the next call, which may otherwise return them again.
        """
        slots, found, threshold = np.empty(count, np.int64), 0, -1
        while found < count and threshold < SCORES - 1:
            threshold = self._threshold(threshold + 1, count - found)
            args = self._scores, self._pins, self.flags, self.used_slots, self._hand, threshold, self._policy.loss
            self._hand, more = kernels.cpu.cache.sweep(*args, self._histogram, slots[found:])
            found += more
            self._candidates = max(self._candidates * 0.98, self._policy.candidates)
            if found < count:  # the histogram ignores flags: those of a commit can protect most low scores
                self._candidates = min(self._candidates * 4 + 0.01, 1.0)
        self.unpin(slots[:found])
        return slots[:found]

    def _threshold(self, least: int, count: int) -> int:
        if self._policy.loss and least == 0:
            return 0  # the hand lowers what it passes, and takes it when it comes round again
        enough = max(count, int(self._candidates * self.count))
        return max(least, min(int(np.searchsorted(np.cumsum(self._histogram), enough)), SCORES - 1))

    def batches(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Iterate over all (ids, slots), at most `size` at a time. Meanwhile no row may come or leave."""
        for start in range(0, self.used_slots, SCAN_SLOTS):
            pins = self._pins[start : min(start + SCAN_SLOTS, self.used_slots)]
            slots = np.flatnonzero(pins != kernels.cpu.cache.FREE) + start
            yield from ((self._ids[part], part) for part in cut(slots, size))


class _PolicyTrials:
    """Small caches that try all epochs of a policy on sampled ids. The one that misses least wins."""

    def __init__(self, capacity: int, policy: Policy) -> None:
        self._policy = policy
        self.caches = [SlotCache(*trial) for trial in _trials(capacity, policy)]
        if self.caches:
            slots = self.caches[0].capacity
            self._share, self._misses = -(-capacity // slots), np.zeros(len(self.caches))  # they see one id in `_share`
            self._ids, self._waiting, self._seen = np.empty(slots // TRIED, np.int64), 0, 0

    def best(self, slot_ids: np.ndarray, slots: np.ndarray) -> float | None:
        """Try used ids; return the best epoch if it may have changed."""
        done, best = 0, None
        while self.caches and done < len(slots):
            args = slot_ids, slots[done:], self._share, self._ids[self._waiting :]
            seen, more = kernels.cpu.launch(kernels.cpu.cache.sample, *args)
            done, self._waiting = done + seen, self._waiting + more
            if self._waiting == len(self._ids):
                ids, self._waiting = np.unique(self._ids), 0
                self._misses += [len(feed(cache, ids)) for cache in self.caches]
                self._seen += len(ids)
                if self._seen >= self.caches[0].capacity:
                    doubts = 1 + DOUBT * np.arange(len(self._misses))
                    best = self._policy.epochs[int(np.argmin(self._misses * doubts))]
                    self._misses, self._seen = self._misses * 0.75, 0
        return best


def feed(cache: SlotCache, ids: np.ndarray) -> np.ndarray:
    """Use the ids of a batch (sorted, without repeats, at most its capacity), and return the missing ones."""
    slots = cache.find(ids)
    missing = ids[slots < 0]
    cache.touch(slots[slots >= 0])
    cache.remove(cache.victims(max(0, len(missing) - cache.free)))
    cache.use(cache.insert(missing))
    return missing


def _trials(capacity: int, policy: Policy) -> list[tuple[int, Policy]]:
    slots = min(capacity // 8, TRIAL_SLOTS)
    if len(policy.epochs) < 2 or slots < 64:
        return []
    return [(slots, replace(policy, epochs=(epoch,))) for epoch in policy.epochs]


class FullCache(DenseIndex):
    """A `SlotCache` for a table that fits its budget: slots are ids, and no row has to leave."""

    epoch_uses: float | None = None  # uses are not counted

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.capacity = self.used_slots = rows
        self.flags = reserve(rows, "the directory of a cache", scattered=True)

    @staticmethod
    def bytes_for(rows: int) -> int:
        """Return its bytes, records not included."""
        return DenseIndex.bytes_for(rows) + rows

    @property
    def bytes_used(self) -> int:
        return self.bits.nbytes + min(self.count * PAGE, self.flags.nbytes)

    @property
    def free(self) -> int:
        """The number of slots without a row."""
        return self.capacity - self.count

    def ids_in(self, slots: np.ndarray) -> np.ndarray:
        return slots

    def insert(self, ids: np.ndarray, slots: np.ndarray | None = None) -> np.ndarray:
        slots = super().insert(ids, slots)
        self.flags[slots] = 0
        return slots

    def remove(self, ids: np.ndarray) -> None:
        super().remove(ids)
        self.flags[ids] = 0

    def enter(self, ids: np.ndarray, levels: np.ndarray) -> np.ndarray:
        return self.insert(ids)

    def scores_in(self, slots: np.ndarray) -> np.ndarray:
        """Return zeros: this cache counts no uses."""
        return np.zeros(len(slots), np.uint8)

    def victims(self, count: int) -> np.ndarray:
        """Return `count` slots whose rows leave first, should another cache replace this one."""
        return next((slots for _, slots in self.batches(count)), NO_SLOTS)

    def touch(self, slots: np.ndarray) -> None:
        """Do nothing: there is nothing to choose."""

    use = hold = pin = unpin = count_uses = touch

    def release_current(self) -> None: ...


def policy_of(policy: str | Policy) -> Policy:
    """Return a policy by its name."""
    if isinstance(policy, Policy):
        return policy
    check_choice("policy", policy, POLICIES)
    return POLICIES[policy]


def _buckets_for(capacity: int, policy: Policy) -> int:
    return -(-capacity * policy.ghost_bytes // BUCKET_BYTES)
