"""`OnlineMissCurve`: the miss-ratio curve of a table while it trains: the misses of caches of other sizes, for the same
batches.

It is the curve of `embedrock.storage.miss_ratio_curve`, for a hundredth of the time of a step of 2 ms. Small caches see
a sample of the ids. Each sees half as many as the one before it, so all together take twice the time of the first. A
cache takes
half as many ids at a time as it has slots, of many batches: a row that comes again among those would be a hit anyway.
So the curve covers only caches that hold some batches.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from embedrock.storage.cache import Policy, policy_of
from embedrock.storage.miss_ratio_curve import MissRatioCurve, SampledCache, sample

MOST_SLOTS = 512  # of a small cache
LEAST_BATCHES = 64  # that a cache holds of which something is told
AT_ONCE = 32  # batches that are sampled together
AT_ONCE_ROWS = 1 << 16
SMALLER, LARGER = 3, 12  # sizes: so often half, and twice, the one there is; each begins once the one before is full
WARM = 4  # times its slots, of ids that a cache has seen once it is not filled any more: nothing more comes
LEAST_WINDOWS = 8  # looks at ids that tell something
HORIZON = 1024  # batches, and the uses of `WARM` times the slots: what is twice as long ago counts half
RECENT = 512  # batches: as long ago counts half of what the table itself has done
WORTH = 0.01  # of the rows of a batch: so many misses fewer make twice the memory worth it
FULL = 0.95  # of the slots: the cache may be in need of more
FACTORS = (0.25, 0.5, 1, 2, 4, 8)  # sizes that are told, over the one there is


class UsageCounts(NamedTuple):
    """What a table has done: numbers that only grow.

    Attributes:
        changes: of its rows: steps.
        misses: rows that were not in the cache.
        reads: of them, those that had a record.
    """

    changes: int
    misses: int
    reads: int


class OnlineMissCurve:
    """Sees the ids of batches while a table is used.

    Args:
        policy: of the cache.
        is_pool: of the members of a group.

    Attributes:
        looks: calls of `look`.

    Example:
        >>> watch = OnlineMissCurve("lfu")
        >>> watch.see(np.arange(4))
        False
    """

    def __init__(self, policy: str | Policy, is_pool: bool = False) -> None:
        self._policy, self._is_pool = policy_of(policy).settled, is_pool
        self._levels, self._sizes = list[_SampledLevel](), list[int]()  # sizes of levels that have not begun yet
        self._ids, self._rows, self._batches = np.empty(0, np.int64), 0, 0  # that wait for `look`
        self._before, self._epoch = UsageCounts(0, 0, 0), np.nan
        self.looks, self._seen = 0, np.zeros(5)  # batches, rows, changes, misses, reads

    @property
    def bytes_used(self) -> int:
        """RAM that it takes now."""
        return self._ids.nbytes + sum(level.sampled.cache.bytes_used for level in self._levels)

    def see(self, ids: np.ndarray) -> bool:
        """Take the ids of the next batch, int64 (n,) without repeats.

        Returns:
            Whether it is time for `look`.
        """
        start, self._rows, self._batches = self._rows, self._rows + len(ids), self._batches + 1
        if self._rows > len(self._ids):
            self._make_room(start)
        self._ids[start : self._rows] = ids  # a copy, as a batch is unfinished as long as somebody has its ids
        return self._batches == AT_ONCE or self._rows > AT_ONCE_ROWS

    def _make_room(self, kept: int) -> None:
        ids = np.empty(2 * self._rows, np.int64)
        ids[:kept] = self._ids[:kept]
        self._ids = ids

    def look(self, slots: int, most: int | None, counted: UsageCounts, epoch: float | None) -> None:
        """Look at the batches that were seen.

        Args:
            slots: of the cache that there is.
            most: rows of the table.
            counted: what it has done.
            epoch: of the cache's policy, as it found out which one is best; None: it has none.
        """
        count, more = self._batches, np.subtract(counted, self._before)
        self.looks += 1
        if self.looks == 1:
            self._sizes = _sizes(slots, most, self._rows / count)
            self._add_level()
        if epoch is not None and epoch != self._epoch:
            self._follow(epoch)
        if self._seen[0] >= 2 * RECENT:
            self._seen /= 2
        self._seen += (count, self._rows, *more)
        self._before = counted
        self._take(self._ids[: self._rows], count)
        self._rows = self._batches = 0

    def _take(self, ids: np.ndarray, batches: int) -> None:
        """Feed the levels: each passes on what it has seen, and one that begins to count adds the next one."""
        seen = _SampledIds(ids, batches, self._rows)
        for level in self._levels:
            was_warm, seen = level.is_warm, level.take(seen)
            if seen is None:
                return
            if level.is_warm > was_warm:
                self._add_level()

    def _add_level(self) -> None:
        if self._sizes:
            self._levels.append(
                _SampledLevel(SampledCache(self._sizes.pop(0), self._policy, MOST_SLOTS, self._is_pool))
            )
            if not np.isnan(self._epoch):
                self._levels[-1].sampled.cache.epoch_uses = self._epoch

    def _follow(self, epoch: float) -> None:
        self._epoch = epoch
        for level in self._levels:
            level.sampled.cache.epoch_uses = epoch

    def curve(self) -> MissRatioCurve | None:
        """Return what is known by now, of a step, or of a batch where none is stepped; None: nothing yet.

        ``new`` are rows that have no record, so that nothing is read for them.
        """
        levels = [level for level in self._levels if level.is_known]
        batches, rows, changes, misses, reads = self._seen.tolist()
        if not levels or not batches:
            return None
        steps = changes or batches
        new = max(0.0, misses - reads) / steps
        found = np.array([level.missed_of_batch() for level in levels]) * batches / steps
        slots = np.array([level.sampled.slots for level in levels], np.int64)
        return MissRatioCurve(slots, np.maximum(found[:, 0], new), found[:, 1], rows / steps, new, np.nan, int(batches))

    def curves_of_parts(self) -> dict[int, list[float]]:
        """Return the rows a step that are missed of each member of a pool, by its number, for the sizes of `curve`."""
        known = [level for level in self._levels if level.is_known]
        batches, _, changes, *_ = self._seen.tolist()
        if not known or not batches:
            return {}
        numbers = sorted({number for level in known for number in level.sampled.of_parts})
        times = batches / (changes or batches)
        return {number: [level.missed_of(number) * times for level in known] for number in numbers}

    @property
    def missed(self) -> float:
        """Rows a step that the cache that there is misses, as counted; NaN where nothing is known."""
        batches, _, changes, misses, _ = self._seen.tolist()
        return misses / (changes or batches) if batches else np.nan

    def told(self, slots: int) -> dict[str, float]:
        """Return rows missed by caches so much larger or smaller than one of `slots`, by name, as far as known."""
        curve = self.curve()
        if curve is None:
            return {}
        told = {f"missed_x{factor:g}": self.missed_by(curve, factor * slots, slots) for factor in FACTORS}
        return {**{name: missed for name, missed in told.items() if missed is not None}, "missed_new": curve.new}

    def missed_by(self, curve: MissRatioCurve, slots: float, here: int) -> float | None:
        """Return the rows that a cache of so many slots misses; None: nobody knows."""
        if curve.slots[0] * 0.99 <= slots <= curve.slots[-1] * 1.01:
            return curve.missed(round(slots))
        return self.missed if slots == here else None

    def worthwhile(self, slots: int, is_full: bool) -> int:
        """Return how many slots a cache of `slots` should have instead: half, as many, or twice."""
        curve = self.curve()
        here, rows = self.missed, self._seen[1] / max(1, self._seen[2] or self._seen[0])
        twice = half = None
        if curve is not None:
            here = self.missed_by(curve, slots, slots) or here
            twice, half = (self.missed_by(curve, factor * slots, slots) for factor in (2, 0.5))
        if is_full and (twice is None or here - twice > WORTH * rows):
            return 2 * slots
        return slots // 2 if half is not None and half - here < WORTH / 2 * rows else slots


class _SampledIds(NamedTuple):
    """Ids of some batches, as a level takes them.

    Attributes:
        ids: a sample; they may repeat.
        batches: that they are of.
        rows: of the batches.
    """

    ids: np.ndarray
    batches: int
    rows: int


class _SampledLevel:
    """A small cache of a watch.

    Args:
        sampled: the cache.

    Attributes:
        is_warm: whether its misses count.
    """

    def __init__(self, sampled: SampledCache) -> None:
        self.sampled, self.is_warm = sampled, False
        self._waiting, self._count = list[_SampledIds](), 0
        self._windows, self._batches, self._rows, self._ids = 0, 0.0, 0.0, 0

    def take(self, seen: _SampledIds) -> _SampledIds | None:
        """Take a sample of what was seen; return all that waited, once that is enough to look at."""
        ids = sample(seen.ids, self.sampled.share).copy()
        self._waiting.append(seen._replace(ids=ids))
        self._count += len(ids)
        if 2 * self._count < self.sampled.cache.capacity:
            return None
        ids, batches, rows = zip(*self._waiting, strict=True)
        self._waiting, self._count = [], 0
        found = _SampledIds(np.concatenate(ids), sum(batches), sum(rows))
        self._look(found)
        return found

    def _look(self, seen: _SampledIds) -> None:
        _use(self.sampled, np.sort(seen.ids))
        self._ids += len(seen.ids)
        if self.is_warm:
            self._count_in(seen.batches, seen.rows)
        elif not self.sampled.cache.free or self._ids > WARM * self.sampled.cache.capacity:
            self.is_warm = True
            self.sampled.forget()

    def _count_in(self, batches: int, rows: int) -> None:
        self._windows, self._batches, self._rows = self._windows + 1, self._batches + batches, self._rows + rows
        if self._batches > 2 * HORIZON and self._rows > 2 * WARM * self.sampled.slots:
            self.sampled.forget(0.5)
            self._batches, self._rows = self._batches / 2, self._rows / 2

    @property
    def is_known(self) -> bool:
        """Whether enough was looked at."""
        return self._windows >= LEAST_WINDOWS

    def missed_of_batch(self) -> tuple[float, float]:
        """Return the rows of a batch that are missed, and so far off that may be, 19 of 20 times."""
        missed, error = self.sampled.missed()
        return missed / self._batches, error / self._batches

    def missed_of(self, number: int) -> float:
        """Return the rows of a batch that are missed of a member of a pool."""
        return self.sampled.of_parts.get(number, 0.0) * self.sampled.share / self._batches


def _use(sampled: SampledCache, ids: np.ndarray) -> None:
    """Use ids (ascending) in a cache, each as often as it is there."""
    comes_again = np.zeros(len(ids), bool)
    comes_again[1:] = ids[1:] == ids[:-1]
    sampled.see(ids[~comes_again])
    slots = sampled.cache.find(ids[comes_again])
    sampled.cache.touch(slots[slots >= 0])


def _sizes(slots: int, most: int | None, rows: float) -> list[int]:
    """Return sizes of caches, ascending: that of a table's, halves and doubles of it."""
    sizes = [round(slots * 2.0**power) for power in range(-SMALLER, LARGER + 1)]
    return [size for size in sizes if size >= LEAST_BATCHES * rows and (most is None or size < most)]
