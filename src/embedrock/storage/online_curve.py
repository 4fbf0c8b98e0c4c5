"""`OnlineMissCurve`: the miss-ratio curve of a table in training, measured on its own batches.

It is the curve of `embedrock.storage.miss_ratio_curve`, at a hundredth of the time of a 2 ms step. Small caches see a
sample of the ids. Each sees half as many as the one before it. So all together take twice the time of the first. A
cache takes ids of many batches at once, half as many as it has slots. A row that repeats among those would be a hit
anyway. So the curve covers only caches that hold some batches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from embedrock.storage.cache import Policy, policy_of
from embedrock.storage.miss_ratio_curve import MissRatioCurve, SampledCache, sample

MOST_SLOTS = 512  # of a small cache
LEAST_BATCHES = 64  # least batches that a cache on the curve holds
AT_ONCE = 32  # batches that are sampled together
AT_ONCE_ROWS = 1 << 16
SMALLER, LARGER = 3, 12  # numbers of halved and doubled sizes; each begins once the one before is full
WARM = 4  # a cache that saw WARM ids per slot is warm, even if it is not full
LEAST_WINDOWS = 8  # least windows of ids behind a value
HORIZON = 1024  # batches, and WARM uses per slot: older counts are halved
RECENT = 512  # batches after which the table's own counts are halved
WORTH = 0.01  # share of a batch's rows: twice the memory pays if it saves this many misses
FULL = 0.95  # share of the slots in use, from which a cache may need more
FACTORS = (0.25, 0.5, 1, 2, 4, 8)  # reported sizes, over the present one


class OnlineMissCurve:
    """Samples the ids of batches while a table is used.

    Args:
        is_pool: it is of the members of a group.

    Attributes:
        looks: calls of `look`.

    Example:
        >>> watch = OnlineMissCurve("lfu")
        >>> watch.see(np.arange(4))
        False
    """

    def __init__(self, policy: str | Policy, is_pool: bool = False) -> None:
        policy = policy_of(policy)
        self._policy, self._is_pool = replace(policy, epochs=policy.epochs[:1]), is_pool  # none is tried
        self._levels, self._sizes = list[_SampledLevel](), list[int]()  # sizes of levels to come
        self._ids, self._rows, self._batches = np.empty(0, np.int64), 0, 0  # waiting for `look`
        self._before, self._epoch = (0, 0, 0), np.nan
        self.looks, self._seen = 0, np.zeros(5)  # batches, rows, changes, misses, reads

    def see(self, ids: np.ndarray) -> bool:
        """Count the ids of the next batch, int64 (n,) without repeats.

        Returns:
            Whether it is time for `look`.
        """
        start, self._rows, self._batches = self._rows, self._rows + len(ids), self._batches + 1
        if self._rows > len(self._ids):
            self._ids = np.concatenate([self._ids[:start], np.empty(2 * self._rows - start, np.int64)])
        self._ids[start : self._rows] = ids  # a copy: holding the ids of a batch keeps it unfinished
        return self._batches == AT_ONCE or self._rows > AT_ONCE_ROWS

    def look(self, slots: int, most: int | None, counted: tuple[int, int, int], epoch: float | None) -> None:
        """Process the waiting batches.

        Args:
            slots: of the present cache.
            most: rows of the table.
            counted: its steps so far, the rows that were not in the cache, and how many of those had a record.
            epoch: best epoch of the cache's policy; None without epochs.
        """
        count, more = self._batches, np.subtract(counted, self._before)
        self.looks += 1
        if self.looks == 1:
            self._sizes = _sizes(slots, most, self._rows / count)
            self._add_level()
        if epoch is not None and epoch != self._epoch:
            self._epoch = epoch
            for level in self._levels:
                level.cache.epoch_uses = epoch
        if self._seen[0] >= 2 * RECENT:
            self._seen /= 2
        self._seen += (count, self._rows, *more)
        self._before = counted
        self._take(self._ids[: self._rows], count)
        self._rows = self._batches = 0

    def _take(self, ids: np.ndarray, batches: int) -> None:
        """Feed the levels: each passes on its ids, and one that becomes warm adds the next one."""
        seen = _SampledIds(ids, batches, self._rows)
        for level in self._levels:
            was_warm, seen = level.is_warm, level.take(seen)
            if seen is None:
                return
            if level.is_warm > was_warm:
                self._add_level()

    def _add_level(self) -> None:
        if self._sizes:
            self._levels.append(_SampledLevel(self._sizes.pop(0), self._policy, MOST_SLOTS, self._is_pool))
            if not np.isnan(self._epoch):
                self._levels[-1].cache.epoch_uses = self._epoch

    def curve(self) -> MissRatioCurve | None:
        """Return the curve so far, per step, or per batch without steps; None: nothing is known yet.

        ``new`` are rows without a record, so that nothing is read for them.
        """
        levels = [level for level in self._levels if level.is_known]
        batches, rows, changes, misses, reads = self._seen.tolist()
        if not levels or not batches:
            return None
        steps = changes or batches
        new = max(0.0, misses - reads) / steps
        found = np.array([np.divide(level.missed(), level.batches) for level in levels]) * batches / steps
        slots = np.array([level.slots for level in levels], np.int64)
        return MissRatioCurve(slots, np.maximum(found[:, 0], new), found[:, 1], rows / steps, new, np.nan, int(batches))

    def curves_of_parts(self) -> dict[int, list[float]]:
        """Return the misses per step of each member of a pool, by its number, for the sizes of `curve`."""
        known = [level for level in self._levels if level.is_known]
        batches, _, changes, *_ = self._seen.tolist()
        if not known or not batches:
            return {}
        numbers = sorted({number for level in known for number in level.of_parts})
        times = batches / (changes or batches)
        return {
            number: [level.of_parts.get(number, 0.0) * level.share / level.batches * times for level in known]
            for number in numbers
        }

    @property
    def missed(self) -> float:
        """Counted misses per step of the present cache; NaN if unknown."""
        batches, _, changes, misses, _ = self._seen.tolist()
        return misses / (changes or batches) if batches else np.nan

    def told(self, slots: int) -> dict[str, float]:
        """Return the misses of larger and smaller caches than one of `slots`, by name, as far as known."""
        curve = self.curve()
        if curve is None:
            return {}
        told = {f"missed_x{factor:g}": self.missed_by(curve, factor * slots, slots) for factor in FACTORS}
        return {**{name: missed for name, missed in told.items() if missed is not None}, "missed_new": curve.new}

    def missed_by(self, curve: MissRatioCurve, slots: float, here: int) -> float | None:
        """Return the misses of a cache of `slots` slots; None: unknown."""
        if curve.slots[0] * 0.99 <= slots <= curve.slots[-1] * 1.01:
            return curve.missed(round(slots))
        return self.missed if slots == here else None

    def worthwhile(self, slots: int, is_full: bool) -> int:
        """Return the number of slots that a cache of `slots` should have: half, as many, or twice."""
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
        batches: number of batches.
        rows: rows of the batches.
    """

    ids: np.ndarray
    batches: int
    rows: int


class _SampledLevel(SampledCache):
    """One small cache of an `OnlineMissCurve`.

    Attributes:
        batches: those whose misses count, weighted.
        is_warm: its misses count.
    """

    def __init__(self, slots: int, policy: Policy, most: int, is_pool: bool) -> None:
        super().__init__(slots, policy, most, is_pool)
        self.is_warm = False
        self._waiting, self._count = list[_SampledIds](), 0
        self._windows, self.batches, self._rows, self._ids = 0, 0.0, 0.0, 0

    def take(self, seen: _SampledIds) -> _SampledIds | None:
        """Add a sample of the ids; return all waiting ones once they are enough to process."""
        ids = sample(seen.ids, self.share).copy()
        self._waiting.append(seen._replace(ids=ids))
        self._count += len(ids)
        if 2 * self._count < self.cache.capacity:
            return None
        ids, batches, rows = zip(*self._waiting, strict=True)
        self._waiting, self._count = [], 0
        found = _SampledIds(np.concatenate(ids), sum(batches), sum(rows))
        self._look(found)
        return found

    def _look(self, seen: _SampledIds) -> None:
        ids = np.sort(seen.ids)
        comes_again = np.zeros(len(ids), bool)
        comes_again[1:] = ids[1:] == ids[:-1]
        self.see(ids[~comes_again])
        slots = self.cache.find(ids[comes_again])
        self.cache.touch(slots[slots >= 0])
        self._ids += len(seen.ids)
        if self.is_warm:
            self._count_in(seen.batches, seen.rows)
        elif not self.cache.free or self._ids > WARM * self.cache.capacity:
            self.is_warm = True
            self.forget()

    def _count_in(self, batches: int, rows: int) -> None:
        self._windows, self.batches, self._rows = self._windows + 1, self.batches + batches, self._rows + rows
        if self.batches > 2 * HORIZON and self._rows > 2 * WARM * self.slots:
            self.forget(0.5)
            self.batches, self._rows = self.batches / 2, self._rows / 2

    @property
    def is_known(self) -> bool:
        return self._windows >= LEAST_WINDOWS


def _sizes(slots: int, most: int | None, rows: float) -> list[int]:
    """Return cache sizes, ascending: that of a table's cache, and halves and doubles of it."""
    sizes = [round(slots * 2.0**power) for power in range(-SMALLER, LARGER + 1)]
    return [size for size in sizes if size >= LEAST_BATCHES * rows and (most is None or size < most)]
