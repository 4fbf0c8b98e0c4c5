"""`MissRatioCurve`: rows of a batch that a cache misses, by its size. `CurveSampler` measures it from batches.

For each size, a small cache with the same policy sees a fixed sample of the ids, by their hash. The method is that of
Waldspurger, Saemundsson, Ahmad and Park, "Cache modeling and optimization using miniature simulations", USENIX ATC
2017. So it takes the same RAM for any number of rows, and covers each policy of `SlotCache`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from embedrock import kernels
from embedrock.kernels.keys import PART_BITS
from embedrock.storage.cache import Policy, SlotCache, feed
from embedrock.storage.slot_index import HashIndex
from embedrock.system.arena import cut

MOST_SLOTS = 1 << 14  # of a small cache; up to this size all ids are seen
MOST_SEEN = 1 << 20  # remembered ids, which show new ones
GROUPS = 16  # of ids with separate miss counts, whose variance gives the error
CONFIDENCE = 2.13  # standard errors of a 95 % interval with 15 degrees of freedom
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class MissRatioCurve:
    """Rows of a batch that are not in a cache, by its size.

    Attributes:
        slots: int64 (sizes,), ascending: rows that a cache holds.
        misses: float64 (sizes,), rows per batch that it misses.
        errors: float64 (sizes,), 95 % error bounds of `misses`, from sampling.
        rows: unique rows per batch, on average.
        new: rows per batch that no batch used before. Each cache misses them. In a new table they have no record, so
            nothing is read for them.
        distinct: rows used at all.
        batches: number of counted batches.
        evicted: float64 (sizes,), rows per batch that a cache evicts.
        before: float64 (sizes,), rows that it evicted before the counted batches.
    """

    slots: np.ndarray
    misses: np.ndarray
    errors: np.ndarray
    rows: float
    new: float
    distinct: float
    batches: int
    evicted: np.ndarray = field(default_factory=lambda: np.zeros(0))
    before: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def missed(self, slots: int) -> float:
        """Return the rows per batch that a cache of `slots` slots misses, by linear interpolation.

        Example:
            >>> ends = np.array([1, 3]), np.array([8.0, 4.0]), np.zeros(2)
            >>> MissRatioCurve(*ends, rows=9.0, new=0.0, distinct=100.0, batches=1).missed(2)
            6.0
        """
        return float(np.interp(slots, self.slots, self.misses))

    def left(self, slots: int) -> float:
        """Return the rows per batch that a cache of `slots` slots evicts, by linear interpolation."""
        return float(np.interp(slots, self.slots, self.evicted))

    def had_left(self, slots: int) -> float:
        """Return the rows that a cache of `slots` slots evicted up to the middle of the counted batches."""
        return float(np.interp(slots, self.slots, self.before)) + self.left(slots) * self.batches / 2


class CurveSampler:
    """Simulates caches of several sizes on the ids of batches.

    Args:
        sizes: slots of the caches, in any order.
        policy: a name of `POLICIES`, or another policy.
        most: most slots of a small cache: more are slower and more exact.

    Example:
        >>> sampler = CurveSampler([2, 8])
        >>> for ids in ([0, 1], [2, 3], [4, 5], [0, 1]):
        ...     sampler.see(np.array(ids))
        >>> sampler.curve().misses.tolist()
        [2.0, 1.5]
    """

    def __init__(self, sizes: Sequence[int], policy: str | Policy = "lfu", most: int = MOST_SLOTS) -> None:
        self._sampled = [SampledCache(size, policy, most) for size in sorted(set(sizes))]
        self._seen = _SeenIds()
        self.forget_counts()

    def forget_counts(self) -> None:
        """Reset the counts, as after warming up. The caches keep their rows."""
        self._batches, self._rows, self._new = 0, 0, 0.0
        for sampled in self._sampled:
            sampled.misses[:], sampled.before, sampled.evicted = 0, sampled.before + sampled.evicted, 0

    def see(self, ids: np.ndarray) -> None:
        """Count the ids of the next batch.

        Args:
            ids: int64 (n,), ascending, without repeats.
        """
        self._batches, self._rows = self._batches + 1, self._rows + len(ids)
        self._new += self._seen.count_new(ids)
        share, some = 1, ids
        for sampled in self._sampled:  # larger caches see a subset of the ids
            if sampled.share != share:
                share, some = sampled.share, sample(some, sampled.share)
            sampled.see(some)

    def curve(self) -> MissRatioCurve:
        """Return the curve since the last `forget_counts`."""
        batches = max(self._batches, 1)
        slots, new = np.array([sampled.slots for sampled in self._sampled], np.int64), self._new / batches
        found = np.array([sampled.missed() for sampled in self._sampled]).reshape(-1, 2) / batches
        holds_all = slots >= self._seen.distinct  # then the ids need no sample
        return MissRatioCurve(
            slots,
            np.where(holds_all, new, np.maximum(found[:, 0], new)),
            np.where(holds_all, 0.0, found[:, 1]),
            self._rows / batches,
            new,
            self._seen.distinct,
            self._batches,
            np.array([sampled.evicted * sampled.share for sampled in self._sampled], np.float64) / batches,
            np.array([sampled.before * sampled.share for sampled in self._sampled], np.float64),
        )


class SampledCache:
    """A small cache that simulates a larger one: it sees one id in `share`, and has `share` times fewer slots.

    Args:
        slots: of the larger one.
        policy: of both.
        most: most slots of its own.
        is_pool: ids are keys of a pool, whose members' misses are counted separately.

    Attributes:
        of_parts: of a pool, sampled misses of each member, by its number.
    """

    def __init__(self, slots: int, policy: str | Policy, most: int, is_pool: bool = False) -> None:
        self.slots, self.share = slots, 1
        while slots > most * self.share:
            self.share *= 2
        self.cache, self.evicted, self.before = SlotCache(max(1, round(slots / self.share)), policy), 0, 0
        self.misses = np.zeros(GROUPS, np.float64)
        self.of_parts, self._is_pool = dict[int, float](), is_pool

    def see(self, ids: np.ndarray) -> None:
        """Use a sample of the ids of a batch, ascending, without repeats."""
        for part in cut(ids, self.cache.capacity):  # a table would refuse a larger batch, but its curve goes on
            before = self.cache.count
            missing = feed(self.cache, part)
            self.evicted += before + len(missing) - self.cache.count
            groups = (missing.view(np.uint64) * GOLDEN) >> np.uint64(60)
            self.misses += np.bincount(groups.astype(np.int64), minlength=GROUPS)
            if self._is_pool:
                numbers, counts = np.unique(missing >> PART_BITS, return_counts=True)
                for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
                    self.of_parts[number] = self.of_parts.get(number, 0.0) + count

    def forget(self, share: float = 1.0) -> None:
        """Drop this share of the counted misses."""
        self.misses *= 1 - share
        self.of_parts = {number: count * (1 - share) for number, count in self.of_parts.items()} if share < 1 else {}

    def missed(self) -> tuple[float, float]:
        """Return the misses of the larger cache, and their 95 % error bound."""
        spread = np.sqrt(GROUPS * self.misses.var(ddof=1) * (1 - 1 / self.share))
        return float(self.misses.sum() * self.share), float(CONFIDENCE * spread * self.share)


class _SeenIds:
    """The ids seen so far: all of them at first, later a sample."""

    def __init__(self) -> None:
        self._share, self._ids = 1, HashIndex(MOST_SEEN)

    @property
    def distinct(self) -> float:
        return float(self._ids.count * self._share)

    def count_new(self, ids: np.ndarray) -> float:
        """Add ids (ascending, without repeats), and return how many of them are new."""
        some = sample(ids, self._share)
        new = some[self._ids.find(some) < 0]
        while self._ids.count + len(new) > MOST_SEEN:
            self._share, kept = 2 * self._share, HashIndex(MOST_SEEN)
            for seen, _ in self._ids.batches(1 << 16):
                kept.insert(sample(seen, self._share))
            self._ids, new = kept, sample(new, self._share)
        self._ids.insert(new)
        return float(len(new) * self._share)


def sample(ids: np.ndarray, share: int) -> np.ndarray:
    """Return about one in `share` of the ids, in their order. The choice is fixed.

    A sample of twice the share is a subset of it.
    """
    if share == 1 or not len(ids):
        return ids
    some = np.empty(len(ids), np.int64)
    return some[: kernels.cpu.launch(kernels.cpu.cache.thin_out, ids, share, some)]
