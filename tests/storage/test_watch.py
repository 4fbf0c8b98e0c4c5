"""The curve of a table that trains, from a sample of its ids, some batches at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import embedrock as er
from embedrock.storage.cache import POLICIES, SlotCache, feed
from embedrock.storage.disk_backend import DiskBackend
from embedrock.storage.online_curve import AT_ONCE, OnlineMissCurve
from embedrock.table.table import rows_of

FEWER = {"lfu": 0.9, "lru": 0.85, "clock": 0.8}  # a window of ids is used at once: then recency is known better
ROWS, BATCH, BATCHES, WARM_UP = 30_000, 30, 3200, 1600


def batches(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    ends = np.cumsum(np.arange(1, ROWS + 1) ** -1.0)
    names = rng.permutation(ROWS)
    return [np.unique(names[np.searchsorted(ends / ends[-1], rng.random(BATCH))]) for _ in range(BATCHES)]


def watched(drawn: list[np.ndarray], here: int, policy: str = "lfu") -> OnlineMissCurve:
    watch = OnlineMissCurve(policy)
    for number, ids in enumerate(drawn):
        if watch.see(ids):
            watch.look(here, ROWS, (number + 1, 0, 0), None)
    return watch


@pytest.mark.parametrize("policy", POLICIES)
def test_it_tells_what_caches_miss(policy: str):
    drawn, here = batches(0), 2400
    curve = watched(drawn, here, policy).curve()
    assert curve is not None
    assert {2400, 4800} <= set(curve.slots.tolist())
    for slots in (2400, 4800):
        cache = SlotCache(slots, policy)
        missed = [len(feed(cache, ids)) for ids in drawn]
        at = curve.slots.tolist().index(slots)
        assert FEWER[policy] < curve.misses[at] / np.mean(missed[WARM_UP:]) < 1.08
    assert (np.diff(curve.misses) < 0).all()
    assert curve.rows == pytest.approx(np.mean([len(ids) for ids in drawn]), rel=0.02)


def test_the_same_ids_tell_the_same():
    drawn = batches(1)[:1200]
    one, other = (watched(drawn, 2400).curve() for _ in range(2))
    assert one is not None
    assert other is not None
    assert np.array_equal(one.misses, other.misses)


def test_little_is_kept():
    watch = watched(batches(2)[:1200], 2400)
    assert 0 < watch._ids.nbytes + sum(level.cache.bytes_used for level in watch._levels) < 1 << 18


def test_of_a_cache_that_holds_few_batches_nothing_is_told_but_of_larger_ones():
    curve = watched(batches(3)[:1600], 10 * BATCH).curve()
    assert curve is not None
    assert curve.slots[0] >= 64 * 25


def test_a_table_that_fits_is_told_what_less_would_do():
    drawn = batches(4)[:1600]
    curve = watched(drawn, ROWS).curve()
    assert curve is not None
    assert curve.slots.tolist() == [ROWS // 8, ROWS // 4][: len(curve.slots)]


def test_what_pays():
    watch = OnlineMissCurve("lfu")
    assert watch.worthwhile(1000, is_full=True) == 2000  # nothing is known, and there is no room
    assert watch.worthwhile(1000, is_full=False) == 1000
    watch = watched(batches(5), 2400)
    assert watch.worthwhile(2400, is_full=True) == 4800
    even = OnlineMissCurve("lfu")
    for number in range(BATCHES):  # of two rows in turn
        if even.see(np.arange(number % 2, 40, 2)):
            even.look(4000, ROWS, (number, 40, 0), None)
    assert even.worthwhile(4000, is_full=False) == 2000


def test_numbers_of_a_table(tmp_path: Path):
    drawn = batches(6)
    with er.Table(ROWS, 4, rule=er.SGD(lr=0.1), path=tmp_path / "t", memory="200KiB", seed=0) as table:
        for ids in drawn[: AT_ONCE - 1]:
            table.update(ids, np.ones((len(ids), 4), np.float32))
        assert not any(name.startswith("missed_") for name in table.stats())
        for ids in drawn[AT_ONCE - 1 :]:
            table.update(ids, np.ones((len(ids), 4), np.float32))
        stats, tier = table.stats(), rows_of(table).tier
        table.commit()
    assert isinstance(tier, DiskBackend)
    assert stats["missed_x4"] < stats["missed_x2"] < stats["missed_x1"]
    assert stats["missed_x1"] == pytest.approx(stats["misses"] / BATCHES, rel=0.1)
    assert 0 < stats["missed_new"] < stats["missed_x4"]
