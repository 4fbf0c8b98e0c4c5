"""The cache: its directory against a dict, who leaves and who stays, and its kernels against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import embedrock as er
import reference
from embedrock import kernels
from embedrock.batch.plan import NO_DIRECT
from embedrock.kernels.cpu import runtime
from embedrock.planner.demand import SCATTER, bounded_zipf
from embedrock.storage.cache import DIRTY, FROZEN, POLICIES, WRITING, FullCache, SlotCache
from embedrock.storage.slot_index import DenseIndex
from slow import examples

REFERENCE = reference.cache


def array(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def use(cache: SlotCache | FullCache, ids: np.ndarray) -> np.ndarray:
    """Use ids in a batch (without repeats), as a table does; return those that leave for it."""
    slots = cache.find(ids)
    missing = ids[slots < 0]
    cache.touch(slots[slots >= 0])
    leaving = cache.victims(max(0, len(missing) - cache.free))
    left = cache.ids_in(leaving).copy()
    cache.remove(leaving)
    cache.use(cache.insert(missing))
    return left


def content(cache: SlotCache) -> dict[str, Any]:
    """Everything that a cache knows."""
    parts = {name: value for name, value in vars(cache).items() if name not in ("_policy", "_trials")}
    trials = {name: value for name, value in vars(cache._trials).items() if name not in ("_policy", "caches")}
    return parts | trials


def assert_same(first: SlotCache, second: SlotCache) -> None:
    for name, value in content(first).items():
        np.testing.assert_array_equal(value, content(second)[name], err_msg=name)
    for trials in zip(first._trials.caches, second._trials.caches, strict=True):
        assert_same(*trials)


# ---------------------------------------------------------------- against a dict


class CacheMachine(RuleBasedStateMachine):
    """A cache of few slots against a dict: ids from a small range collide, come back and wrap around."""

    policy = "lfu"

    @initialize(capacity=st.integers(1, 40), spread=st.sampled_from([1, 2**40 + 7]))
    def begin(self, capacity: int, spread: int) -> None:
        self.cache, self.spread = SlotCache(capacity, self.policy), spread
        self.slots: dict[int, int] = {}
        self.pins: dict[int, int] = {}
        self.current: set[int] = set()

    ids = st.lists(st.integers(-30, 60), max_size=25, unique=True)

    def _array(self, ids: list[int]) -> np.ndarray:
        return np.array(ids, np.int64) * self.spread

    def _slots(self, ids: set[int] | list[int]) -> np.ndarray:
        return np.array([self.slots[i] for i in ids], np.int64)

    def _may_leave(self, row: int) -> bool:
        protected = self.cache.flags[self.slots[row]] & (FROZEN | WRITING)
        return not protected and row not in self.current and not self.pins.get(row)

    @rule(ids=ids)
    def find(self, ids: list[int]) -> None:
        repeated = ids + ids[::2]
        expected = [self.slots.get(i, -1) for i in repeated]
        assert self.cache.find(self._array(repeated)).tolist() == expected

    @rule(ids=ids)
    def look_up(self, ids: list[int]) -> None:
        weights = np.arange(1, self.cache.capacity + 1, dtype=np.float32)[:, None]
        out = np.full((len(ids), 1), np.nan, np.float32)
        slots = self.cache.look_up(self._array(ids), weights, np.arange(len(ids), dtype=np.int32), out)
        assert slots.tolist() == [self.slots.get(i, -1) for i in ids]
        assert out.ravel().tolist() == [s + 1 for s in slots.tolist()]

    @rule(ids=ids, used=st.booleans())
    def insert(self, ids: list[int], used: bool) -> None:
        new = [i for i in ids if i not in self.slots][: self.cache.free]
        slots = self.cache.insert(self._array(new))
        if used:
            self.cache.use(slots)
        assert not self.cache.flags[slots].any()
        assert (self.cache.ids_in(slots) == self._array(new)).all()
        self.slots.update(zip(new, slots.tolist(), strict=True))
        if used:
            self.current.update(new)

    @rule(ids=ids)
    def touch(self, ids: list[int]) -> None:
        here = [i for i in ids if i in self.slots]
        self.cache.touch(self._slots(here))
        self.current = set(here)

    @rule()
    def release_current(self) -> None:
        self.cache.release_current()
        self.current = set()

    @rule(ids=ids)
    def pin(self, ids: list[int]) -> None:
        here = [i for i in ids if i in self.slots]
        here += here[::3]
        self.cache.pin(self._slots(here))
        for i in here:
            self.pins[i] = self.pins.get(i, 0) + 1

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(sorted(self.pins)), unique=True))
        self.cache.unpin(self._slots(some))
        for i in some:
            self.pins[i] -= 1
        self.pins = {i: n for i, n in self.pins.items() if n}

    @rule(ids=ids, flag=st.sampled_from([0, DIRTY, FROZEN, WRITING, DIRTY | FROZEN]))
    def flag(self, ids: list[int], flag: int) -> None:
        self.cache.flags[self._slots([i for i in ids if i in self.slots])] = flag

    @rule(count=st.integers(0, 45), remove=st.booleans())
    def victims(self, count: int, remove: bool) -> None:
        may = {self.slots[i] for i in self.slots if self._may_leave(i)}
        slots = self.cache.victims(count)
        assert len(set(slots.tolist())) == len(slots) == min(count, len(may))
        assert set(slots.tolist()) <= may
        if remove:
            gone = [i for i, slot in self.slots.items() if slot in slots]
            self.cache.remove(slots)
            for i in gone:
                del self.slots[i]

    @rule(ids=ids)
    def remove(self, ids: list[int]) -> None:
        here = [i for i in ids if i in self.slots and not self.pins.get(i)]
        self.cache.remove(self._slots(here))
        self.current -= set(here)
        for i in here:
            del self.slots[i]

    @invariant()
    def counts(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert self.cache.count == len(self.slots)
        assert self.cache.free == self.cache.capacity - self.cache.count
        scores = [self.cache._scores[s] for i, s in self.slots.items() if i not in self.current and i not in self.pins]
        assert self.cache._histogram.tolist() == np.bincount(scores, minlength=256).tolist()

    @invariant()
    def rows(self) -> None:
        if not hasattr(self, "cache"):
            return
        parts = list(self.cache.batches(7))
        assert all(len(ids) == len(slots) <= 7 for ids, slots in parts)
        pairs = [(int(i) // self.spread, int(s)) for ids, slots in parts for i, s in zip(ids, slots, strict=True)]
        assert dict(pairs) == self.slots
        assert len(pairs) == len(self.slots)

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.find(list(range(-30, 61)))


@pytest.mark.parametrize("policy", POLICIES)
def test_agrees_with_a_dict(policy: str) -> None:
    machine = type("Machine", (CacheMachine,), {"policy": policy})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
    )


def launch_or_call(function: Any, *args: Any) -> Any:
    """Launch a kernel. What stands in for one takes the same arguments."""
    return runtime.launch(function, *args) if hasattr(function, "launch") else function(*args)


def test_the_dict_notices_a_wrong_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave_a_hole(direct: np.ndarray, entries: np.ndarray, ids: np.ndarray) -> None:
        for i in ids:
            entries[entries[:, 0] == i] = 0

    monkeypatch.setattr(kernels.cpu.cache, "erase", leave_a_hole)
    monkeypatch.setattr(kernels.cpu, "launch", launch_or_call)
    quiet = settings(
        max_examples=300, deadline=None, database=None, report_multiple_bugs=False, phases=[Phase.generate]
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(CacheMachine, settings=quiet)


# ---------------------------------------------------------------- who leaves


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_calls_have_the_same_victims(policy: str) -> None:
    first, second, random = SlotCache(50, policy), SlotCache(50, policy), np.random.default_rng(1)
    for _ in range(400):
        ids = np.unique((random.random(20) ** 3 * 300).astype(np.int64))
        np.testing.assert_array_equal(use(first, ids), use(second, ids))
    assert_same(first, second)


@pytest.mark.parametrize("policy", POLICIES)
def test_works_when_a_batch_fills_it(policy: str) -> None:
    cache = SlotCache(10, policy)
    for start in range(0, 100, 5):
        ids = np.arange(start, start + 10)
        use(cache, ids)
        assert (cache.find(ids) >= 0).all()
    assert cache.victims(1).size == 0
    cache.release_current()
    assert sorted(cache.victims(99).tolist()) == list(range(10))


def test_lru_evicts_what_was_used_least_recently() -> None:
    cache = SlotCache(160, "lru")
    for start in range(0, 160, 10):
        use(cache, np.arange(start, start + 10))
    use(cache, np.arange(10))
    left = [use(cache, np.arange(1000 + start, 1010 + start)).tolist() for start in range(0, 150, 10)]
    assert np.sort(left).tolist() == np.arange(10, 160).reshape(-1, 10).tolist()


def test_clock_gives_a_second_chance() -> None:
    cache = SlotCache(6, "clock")
    for i in range(6):
        use(cache, array(i))
    use(cache, array(100))  # all had been used, but for the current one: the hand clears their bits and takes the first
    use(cache, array(1))
    assert use(cache, array(101)).tolist() == [2]


def test_lfu_keeps_rows_in_use_through_a_scan() -> None:
    cache, hot = SlotCache(200), np.arange(100)
    for _ in range(8):
        use(cache, hot)
    for start in range(1000, 4200, 80):
        use(cache, np.arange(start, start + 80))
    assert (cache.find(hot) >= 0).all()


def test_lfu_knows_rows_again_that_had_left() -> None:
    cache, known = SlotCache(200), array(7)
    for _ in range(4):
        use(cache, known)
    score = cache._scores[cache.find(known)]
    cache.release_current()
    cache.remove(cache.find(known))
    for start in range(1000, 1400, 100):
        use(cache, np.arange(start, start + 100))
    use(cache, known)
    assert cache._scores[cache.find(known)] > score


def test_lfu_lets_go_of_what_was_hot_long_ago() -> None:
    cache, old = SlotCache(100), np.arange(90)
    for _ in range(30):
        use(cache, old)
    for step in range(2000):
        use(cache, np.arange(1000 + step % 2, 1090, 2))
    assert (cache.find(np.arange(1000, 1090)) >= 0).all()


def misses_over_the_oracle(policy: str) -> float:
    """Of a cache for a fifteenth of the rows, in steady state: against keeping the most popular ones."""
    rows, slots, draws, cache, random = 30_000, 2_000, 400, SlotCache(2_000, policy), np.random.default_rng(0)
    misses, hot = np.zeros(2), np.zeros(rows, bool)
    hot[np.arange(slots) * SCATTER % rows] = True
    for step in range(1500):
        ids = np.unique(bounded_zipf(random.random(draws), rows, 1.05) * SCATTER % rows)
        if step >= 1000:
            misses += np.count_nonzero(cache.find(ids) < 0), np.count_nonzero(~hot[ids])
        use(cache, ids)
    return misses[0] / misses[1]


def test_lfu_misses_little_more_than_the_oracle() -> None:
    assert misses_over_the_oracle("lfu") < 1.12 < 1.25 < min(map(misses_over_the_oracle, ("lru", "clock")))


def misses_of_rows_that_come_and_go(policy: str) -> int:
    """Each of 1,400 rows is in use for 100 steps, and never again."""
    cache, random, misses = SlotCache(2000, policy), np.random.default_rng(0), 0
    for step in range(1200):
        ids = np.unique(step * 14 + random.integers(0, 1400, 100))
        misses += int(np.count_nonzero(cache.find(ids) < 0)) if step >= 600 else 0
        use(cache, ids)
    return misses


def test_lfu_finds_out_that_rows_come_and_go() -> None:
    least = misses_of_rows_that_come_and_go("lru")
    assert misses_of_rows_that_come_and_go("lfu") < 1.1 * least


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(er.ArgumentError, match="`policy` must be one of lru, clock, lfu: got 'belady'"):
        SlotCache(10, "belady")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("capacity", [1, 800, 100_000, 1_300_000])
def test_its_bytes_are_counted(policy: str, capacity: int) -> None:
    def arrays(cache: SlotCache) -> int:
        cache._grow(cache.capacity)
        own = sum(value.nbytes for value in vars(cache).values() if isinstance(value, np.ndarray))
        return own - 256 * 8 + sum(map(arrays, cache._trials.caches))

    assert arrays(SlotCache(capacity, policy)) == SlotCache.bytes_for(capacity, policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_it_takes_follows_its_rows(policy: str) -> None:
    cache, used = SlotCache(10**6, policy), []
    for start in range(0, 30_000, 1_000):
        use(cache, np.arange(start, start + 1_000) * 1_000_003)
        used.append(cache.bytes_used)
    assert used[0] < 1_000 * 150
    assert used == sorted(used)
    assert used[-1] < 30_000 * 150 < SlotCache.bytes_for(10**6, policy) / 10
    ids = np.arange(30_000) * 1_000_003
    assert (cache.ids_in(cache.find(ids)) == ids).all()


@pytest.mark.parametrize("capacity", [1, 7, 800, 1_025, 5_000])
def test_a_full_cache_takes_what_was_said(capacity: int) -> None:
    cache = SlotCache(capacity, "clock")
    cache.insert(np.arange(capacity))
    assert cache.bytes_used == SlotCache.bytes_for(capacity, "clock")
    use(cache, np.arange(capacity, 2 * capacity))
    assert (cache.find(np.arange(capacity)) < 0).all()
    assert cache.bytes_used == SlotCache.bytes_for(capacity, "clock")


# ---------------------------------------------------------------- a table that fits


def test_whole() -> None:
    cache = FullCache(100)
    slots = cache.insert(array(5, 99, 0))
    assert slots.tolist() == [5, 99, 0] == cache.ids_in(slots).tolist()
    cache.flags[slots] = DIRTY
    cache.touch(slots)
    cache.release_current()
    cache.pin(slots)
    cache.unpin(slots)
    assert cache.victims(2).tolist() == [0, 5]
    assert (cache.count, cache.free, cache.capacity) == (3, 97, 100)
    cache.remove(array(99))
    assert cache.find(array(0, 1, 5, 99)).tolist() == [0, -1, 5, -1]
    out = np.empty((2, 1), np.float32)
    cache.look_up(array(5, 99), np.ones((100, 1), np.float32), np.arange(2, dtype=np.int32), out)
    assert out.ravel().tolist() == [1, 0]
    assert [ids.tolist() for ids, _ in cache.batches(1)] == [[0], [5]]
    assert not cache.flags[cache.insert(array(99))].any()


def test_whole_has_the_interface_of_a_cache() -> None:
    names, of_whole, of_index = (set(dir(made)) for made in (SlotCache(1), FullCache(1), DenseIndex(1)))
    assert {n for n in names if not n.startswith("_")} == {
        n for n in of_whole - (of_index - names) if not n.startswith("_")
    }


# ---------------------------------------------------------------- kernels against the reference


@pytest.mark.parametrize("policy", POLICIES)
def test_kernels_do_what_the_reference_does(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = [np.random.default_rng(k).permutation(300)[: k % 30] - 100 for k in range(250)]
    pinned = [k % 7 for k in range(250)]
    caches = []
    monkeypatch.setattr(kernels.cpu, "launch", launch_or_call)
    for backend in (kernels.cpu.cache, REFERENCE):
        monkeypatch.setattr(kernels.cpu, "cache", backend)
        cache = SlotCache(60, policy)
        for ids, few in zip(trace, pinned, strict=True):
            use(cache, ids)
            slots = cache.find(ids)[:few]
            cache.pin(slots)
            cache.flags[slots] = FROZEN
            use(cache, ids[: len(ids) // 2] + 1)
            cache.unpin(slots)
            if few == 0:
                cache.flags[:] = 0
        caches.append(cache)
    assert_same(*caches)


@pytest.mark.parametrize("size", [2, 16, 256])
def test_erase(size: int) -> None:
    random = np.random.default_rng(size)
    for _ in range(30):
        ids = random.integers(-(2**63), 2**63 - 1, size - 1)
        expected = np.zeros((size, 2), np.int64)
        reference.directory.set_values(NO_DIRECT, expected, ids, random.permutation(len(ids)))
        got, gone = expected.copy(), ids[: random.integers(0, size)]
        hashed = REFERENCE.erase(NO_DIRECT, expected, gone)
        assert kernels.cpu.launch(kernels.cpu.cache.erase, NO_DIRECT, got, gone) == hashed == len(gone)
        np.testing.assert_array_equal(got, expected)
        anew = np.zeros_like(expected)
        kept = expected[expected[:, 1] > 0]
        reference.directory.set_values(NO_DIRECT, anew, kept[:, 0], kept[:, 1] - 1)
        assert set(map(tuple, anew.tolist())) == set(map(tuple, expected.tolist()))
        slots = np.empty(size - 1, np.int64)
        kernels.cpu.launch(kernels.cpu.directory.find, NO_DIRECT, got, ids, slots)
        assert (slots >= 0).tolist() == [False] * len(gone) + [True] * (size - 1 - len(gone))


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), buckets=st.integers(1, 3), epoch=st.integers(0, 2**17))
def test_ghosts(seed: int, buckets: int, epoch: int) -> None:
    random = np.random.default_rng(seed)
    expected = random.integers(0, 2**16, (buckets, 32), np.uint16)
    expected[:, 0] = (epoch - random.integers(0, 40, buckets)) & 0xFFFF
    got = expected.copy()
    for step in range(3):
        ids, levels = random.integers(0, 60, 40), random.integers(0, 256, 40, np.uint8)
        REFERENCE.remember(expected, ids, levels, epoch + step)
        kernels.cpu.launch(kernels.cpu.cache.remember, got, ids, levels, epoch + step)
        np.testing.assert_array_equal(got, expected)
        wanted, found = np.full(40, 255, np.uint8), np.full(40, 255, np.uint8)
        REFERENCE.recall(expected, ids, epoch + step, wanted)
        kernels.cpu.launch(kernels.cpu.cache.recall, got, ids, epoch + step, found)
        np.testing.assert_array_equal(found, wanted)
        np.testing.assert_array_equal(got, expected)


def test_ghosts_age_and_are_recalled_once() -> None:
    ghosts, cpu, launch = np.zeros((4, 32), np.uint16), kernels.cpu.cache, kernels.cpu.launch
    ids, levels = array(3, 4, 5), np.array([20, 2, 200], np.uint8)
    launch(cpu.remember, ghosts, ids, levels, 65_534)
    found = np.empty(3, np.uint8)
    launch(cpu.recall, ghosts, ids, 65_537, found)
    assert found.tolist() == [17, 0, 28]
    launch(cpu.recall, ghosts, ids, 65_537, found)
    assert found.tolist() == [0, 0, 0]


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), used=st.integers(1, 300), count=st.integers(0, 50), threshold=st.integers(0, 255))
def test_sweep(seed: int, used: int, count: int, threshold: int) -> None:
    random = np.random.default_rng(seed)
    states = []
    hand, loss = int(random.integers(0, used)), int(random.integers(0, 2))
    scores, flags = random.integers(0, 256, 310, np.uint8), random.integers(0, 8, 310, np.uint8)
    pins = (random.integers(0, 3, 310) * (random.random(310) < 0.3)).astype(np.uint16)
    for backend in (REFERENCE, kernels.cpu.cache):
        state = scores.copy(), pins.copy(), flags, np.bincount(scores, minlength=256), np.full(count, -1)
        head = *state[:3], used, hand, threshold, loss
        states.append((*state, backend.sweep(*head, *state[3:])))
    for got, expected in zip(*states, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("share", [1, 3, 50])
@pytest.mark.parametrize("room", [5, 300])
def test_sample(share: int, room: int) -> None:
    random = np.random.default_rng(share)
    slot_ids, slots = random.integers(-(2**63), 2**63 - 1, 500), random.permutation(300)
    expected, got = np.full(room, -1), np.full(room, -1)
    result = REFERENCE.sample(slot_ids, slots, share, expected)
    assert kernels.cpu.launch(kernels.cpu.cache.sample, slot_ids, slots, share, got) == result
    np.testing.assert_array_equal(got, expected)
    assert abs(result[1] - min(room, 300 / share)) <= 6


def test_ageing() -> None:
    scores = np.repeat(np.arange(256, dtype=np.uint8), 3)
    histogram = np.bincount(scores, minlength=256)
    expected, counts = scores.copy(), histogram.copy()
    REFERENCE.age(expected, counts)
    kernels.cpu.cache.age(scores, histogram)
    np.testing.assert_array_equal(scores, expected)
    np.testing.assert_array_equal(histogram, counts)
    np.testing.assert_array_equal(histogram, np.bincount(scores, minlength=256))


@pytest.mark.parametrize("cache", [SlotCache(4), FullCache(4)], ids=["cache", "whole"])
def test_a_free_slot_has_no_flags(cache: SlotCache | FullCache):
    # A commit once wrote free slots whose rows had been dirty, under numbers that were no ids.
    slots = cache.insert(np.array([1, 2, 3]))
    cache.flags[slots] = DIRTY
    cache.release_current()
    cache.remove(slots[1:])
    assert np.flatnonzero(cache.flags & DIRTY).tolist() == slots[:1].tolist()
