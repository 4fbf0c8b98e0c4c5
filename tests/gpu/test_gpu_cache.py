"""The cache of records in GPU memory: against NumPy, and random programs against a dictionary."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import home_kernels
import numpy as np
import pytest
import torch
from gpu_device import INTERPRETED
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import DEVICE, Poisoned, one, same, search_of, table, tensor, use_blocks_of

from embedrock.kernels.gpu import addresses as homes
from embedrock.kernels.gpu import cache, plan
from embedrock.kernels.gpu.addresses import DeviceTables
from embedrock.kernels.gpu.runtime import RecordForm
from reference import device
from slow import slow

START = 2**22 - 5  # the first stamp: they soon begin anew


def form_of(record_bytes: int) -> RecordForm:
    return RecordForm(record_bytes // 4, "float32", record_bytes, record_bytes // 4, 0)


def empty_slots(far: int, near: int) -> homes.CacheSlots:
    """Return the state of an empty cache, as arrays."""
    return homes.CacheSlots(
        np.full(far, homes.ABSENT, np.int32),
        np.full(near, -1, np.int64),
        np.zeros(near, np.float32),
        np.zeros(near, np.int32),
        np.zeros(near, np.uint8),
        np.zeros(8, np.int64),
    )


class Side:
    """A cache by one set of kernels, with its memory."""

    def __init__(self, kernels: Any, rows: int, near: int, record_bytes: int) -> None:
        self.kernels, self._record_bytes = kernels, record_bytes
        self._poisoned: list[Poisoned] = []
        self.slots = homes.CacheSlots(*(self.put(array) for array in empty_slots(rows, near)))
        self.near = self.put(np.full((near, record_bytes), 0xFF, np.uint8))
        self.far = self.put(np.full((rows, record_bytes), 0xFF, np.uint8))

    def put(self, array: np.ndarray) -> Any:
        return array.copy() if self.kernels is device else tensor(array)

    def address(self, array: Any) -> int:
        return array.ctypes.data if self.kernels is device else array.data_ptr()

    def memory(self) -> device.RecordMemory:
        return device.RecordMemory(self.address(self.near), self.address(self.far), self._record_bytes)

    def homes(self) -> Any:
        where, memory = self.slots.where, self.memory()
        if self.kernels is device:
            return device.RecordAddresses(where, self.slots.dirty, False, len(where), memory)
        return table(form_of(self._record_bytes), memory[:2], where, self.slots[1:])

    def scratch(self, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        """Return poisoned memory, whose guards `check` looks at."""
        self._poisoned.append(Poisoned(shape, dtype))
        inside = self._poisoned[-1].inside
        return inside.cpu().numpy() if self.kernels is device else inside

    def check(self) -> None:
        """Fail where a kernel wrote outside its scratch."""
        while self._poisoned:
            poisoned = self._poisoned.pop()
            poisoned.check(len(poisoned.inside))

    def begin(self, time: homes.BatchTime, keys: np.ndarray, count: int) -> Any:
        """Do the bookkeeping of a batch; return its moves. Without padding, it is as the GPU plans."""
        n, place = len(keys), self.homes()
        moves = self.scratch((n, 3), torch.int64)
        moves[:] = 7
        if self.kernels is device:
            args = time, keys, np.array([count], np.int32), len(self.slots.where)
            device.touch(self.slots, *args)
            device.insert(self.slots, *args, self.memory(), moves, (plan.BLOCK, cache.GROUP))
        else:
            search, given = search_of(moves, time), (tensor(keys), one(count))
            if count == n:  # noted where they are collected
                given = tensor(keys.astype(np.int32)), n
                self.collect(given[0], place, search)
            else:
                cache.touch(place, search, *given)
            cache.insert(place, search, *given)
        self.check()
        return moves

    def collect(self, keys: torch.Tensor, place: DeviceTables, search: cache.VictimSearch) -> None:
        """Plan a batch whose rows arrive."""
        n = len(keys)
        scan, starts, inverse = (self.scratch((size,), torch.int32) for size in (plan.scan_words(n), n + 1, n))
        scan.zero_()
        order, unique = torch.arange(n, device=DEVICE), self.scratch((n,), torch.int64)
        plan.collect(keys, -1, order, scan, (unique, starts, inverse, one(0), one(0)), place, search)
        np.testing.assert_array_equal(unique[: int(inverse[-1]) + 1].cpu(), np.unique(keys.cpu()))

    def locate(self, keys: np.ndarray, count: int) -> np.ndarray:
        places = self.put(np.full(len(keys), -9, np.int64))
        args = self.put(keys), self.put(np.array([count], np.int32)), self.homes(), places
        (device if self.kernels is device else home_kernels).locate(*args)
        assert (to_array(places)[count:] == -9).all()
        return self.relative(to_array(places)[:count])

    def relative(self, places: np.ndarray) -> np.ndarray:
        """Turn addresses into indices of records, near ones first."""
        memory, near = self.memory(), len(self.near)
        first, other = ((places - base) // self._record_bytes for base in memory[:2])
        return np.where(places < 0, places, np.where((first >= 0) & (first < near), first, near + other))

    def places(self, moves: Any) -> np.ndarray:
        """Return moves by indices of records, those of nothing as -1."""
        found = to_array(moves)
        return np.where(found[:, :1] < 0, -1, self.relative(found))

    def settle(self, keys: np.ndarray, count: int, live: int) -> tuple[np.ndarray, np.ndarray]:
        places, new = self.put(np.full(len(keys), -9, np.int64)), self.put(np.full(len(keys), 9, np.uint8))
        counts = self.put(np.array([count], np.int32)), self.put(np.array([live], np.int32))
        kernels = device if self.kernels is device else home_kernels
        kernels.settle_rows(self.put(keys), *counts, self.homes(), places, new)
        assert (to_array(new)[count:] == 9).all()
        assert (to_array(places)[count:] == -9).all()
        return self.relative(to_array(places)[:count]), to_array(new)[:count]

    def records(self) -> Any:
        return [*self.near, *self.far]  # views

    def flush(self) -> None:
        """Write the dirty records back."""
        dirty, size = np.flatnonzero(to_array(self.slots.dirty)), self._record_bytes
        sources = self.address(self.near) + dirty * size
        targets = self.address(self.far) + to_array(self.slots.owner)[dirty] * size
        self.kernels.copy_records(self.put(np.append(sources, -1)), self.put(np.append(targets, -1)), size)
        self.slots.dirty[:] = 0


def to_array(values: Any) -> np.ndarray:
    return values.cpu().numpy() if isinstance(values, torch.Tensor) else values


class Batch(NamedTuple):
    stamp: int
    keys: np.ndarray  # with padding
    size: int  # without it
    near: dict[int, int]  # near slots of its rows, as they were when it began


class World:
    """Both kernels, batches on their way, and what each record must be."""

    def __init__(self, near: int, rows: int, record_bytes: int) -> None:
        self.executors = [Side(kernels, rows, near, record_bytes) for kernels in (cache, device)]
        self._rows, self._near = rows, near
        self._hand, self._stamp, self._bytes = 0, START, record_bytes
        self.batches: deque[Batch] = deque()
        self._moves: deque[list[Any]] = deque()
        self._model: dict[int, int] = {}

    def begin(self, keys: set[int]) -> None:
        self._stamp += 1
        own = np.array(sorted(keys), np.int64)
        padded = np.append(own, [3, 2**40, -(2**40)])  # not to be looked at
        oldest = self.batches[0].stamp if self.batches else self._stamp
        # A half-life of one batch, so that what rows are worth is exact on a GPU too.
        time = homes.BatchTime(self._stamp & homes.AGES, self._stamp - oldest, 1.0, self._hand)
        is_sorted = self._hand % 3 == 0 and len(own) > 0
        positions = np.repeat(own, 1 + np.arange(len(own)) % 3) if is_sorted else padded
        args = time, positions, len(positions) if is_sorted else len(own)
        self._moves.append([executor.begin(*args) for executor in self.executors])
        moves, expected = (
            executor.places(moves) for executor, moves in zip(self.executors, self._moves[-1], strict=True)
        )
        same(moves, expected)
        self._hand = (self._hand + min(self._near, 2 * len(positions))) % self._near
        self.batches.append(Batch(self._stamp, padded, len(keys), self._near_slots(keys)))

    def exchange(self) -> None:
        """Copy what the oldest batch still waits for."""
        if self._moves:
            for executor, moves in zip(self.executors, self._moves.popleft(), strict=True):
                executor.kernels.exchange(moves, self._bytes)

    def look_up(self) -> None:
        """Look at the newest batch's rows."""
        while self._moves:
            self.exchange()
        if self.batches:
            self._look_up(self.batches[-1])

    def _look_up(self, batch: Batch) -> None:
        places, expected = (executor.locate(batch.keys, batch.size) for executor in self.executors)
        np.testing.assert_array_equal(places, expected)
        records = self.executors[0].records()
        for u, key in enumerate(batch.keys[: batch.size].tolist()):
            if key in self._model:
                assert places[u] >= 0
                assert (to_array(records[places[u]]) == self._model[key]).all(), f"row {key}"
            else:
                assert places[u] == -1 - u

    def step(self, live: int) -> None:
        """Step the oldest batch, with which it is finished."""
        if not self.batches:
            return
        while len(self._moves) >= len(self.batches):
            self.exchange()
        batch = self.batches.popleft()
        self._look_up(batch)
        (places, new), expected = (executor.settle(batch.keys, batch.size, live) for executor in self.executors)
        np.testing.assert_array_equal(places, expected[0])
        np.testing.assert_array_equal(new, expected[1])
        for u, key in enumerate(batch.keys[: batch.size].tolist()):
            is_row = 0 <= key < self._rows
            assert (places[u] >= 0) == bool(is_row and live)
            assert new[u] == (is_row and live and key not in self._model)
            if places[u] >= 0:
                self._model[key] = (batch.stamp + key) % 251
                for executor in self.executors:
                    executor.records()[places[u]][:] = self._model[key]

    def forget(self, keys: set[int]) -> None:
        """Let rows leave that no batch uses, as they do where others get their far slots."""
        while self._moves:
            self.exchange()
        keys = {key for key in keys if key in self._model and all(key not in batch.near for batch in self.batches)}
        for executor in self.executors:
            executor.flush()
            executor.kernels.forget(executor.slots, executor.put(np.array(sorted(keys), np.int64)))
        assert set(self._near_slots(keys).values()) <= {-1}

    def _near_slots(self, keys: Any) -> dict[int, int]:
        where = to_array(self.executors[0].slots.where)
        return {key: max(-1, int(where[key])) for key in keys if 0 <= key < self._rows}

    def check(self) -> None:
        for name, got, expected in zip(
            homes.CacheSlots._fields, *(executor.slots for executor in self.executors), strict=True
        ):
            same(got, expected, name)
        where, owner = (to_array(part) for part in self.executors[0].slots[:2])
        taken, cached = np.flatnonzero(owner >= 0), np.flatnonzero(where >= 0)
        np.testing.assert_array_equal(where[owner[taken]], taken)
        np.testing.assert_array_equal(owner[where[cached]], cached)
        for batch in self.batches:
            assert self._near_slots(batch.near) == batch.near, "a row that is in use moved"

    def finish(self) -> None:
        while self.batches:
            self.step(1)
            self.check()
        for executor in self.executors:
            executor.flush()
            for key, value in self._model.items():
                assert (to_array(executor.far[key]) == value).all(), f"row {key}"


ROWS = 12
BEGIN = st.tuples(st.just("begin"), st.sets(st.integers(-2, ROWS + 1), max_size=8))
FORGET = st.tuples(st.just("forget"), st.sets(st.integers(0, ROWS - 1), max_size=8))
OTHER = st.sampled_from([("exchange",), ("look_up",), ("step", 1), ("step", 1), ("step", 0)])


@settings(max_examples=6)
@given(
    near=st.integers(1, 24),
    lanes=st.sampled_from([plan.BLOCK, *([4, 8] if INTERPRETED else [])]),
    record_bytes=st.sampled_from([4, 8, 48]),
    program=st.lists(BEGIN | OTHER | FORGET, max_size=14),
)
def test_random_programs(near: int, lanes: int, record_bytes: int, program: list[Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        use_blocks_of(lanes, patch)
        world = World(near, ROWS, record_bytes)
        for name, *args in program:
            getattr(world, name)(*args)
            world.check()
        world.finish()


@pytest.mark.parametrize("near", [3, *slow(8)])
def test_a_long_program(near: int) -> None:
    rng, world = np.random.default_rng(near), World(near, ROWS, 16)
    for _ in range(25):
        world.begin(set(rng.integers(0, ROWS, rng.integers(1, 7)).tolist()))
        world.look_up()
        while len(world.batches) > rng.integers(0, 4):
            world.step(int(rng.random() < 0.4))
        if rng.random() < 0.2:
            world.forget(set(rng.integers(0, ROWS, 4).tolist()))
        world.check()
    world.finish()
    near_rows, far, absent, fetched, put_out, back = world.executors[0].slots.tallies.tolist()[:6]
    assert far > fetched > put_out > back > 0
    assert min(near_rows, absent) > 0


@pytest.mark.parametrize("wanted", [1, 60, 1000, 2 * plan.BLOCK - 1])
def test_who_leaves(wanted: int) -> None:
    """Free slots are taken first, then those worth least; rows that batches in flight use stay."""
    near, n, parts = 3 * plan.BLOCK + 7, 2 * plan.BLOCK, 2
    side = Side(cache, near + n, near, 4)
    rng, time = np.random.default_rng(0), homes.BatchTime(1000, 2, 1 / 10.0, 77)
    owner, used = np.arange(near), rng.integers(900, 1001, near).astype(np.int32)
    owner[::50] = -1
    score = np.float32(1) + rng.random(near, np.float32) * 100
    for state, values in zip(side.slots[1:4], (owner, score, used), strict=True):
        state.copy_(tensor(values))
    side.slots.where.fill_(homes.FAR)
    side.slots.where[:near] = torch.arange(near, dtype=torch.int32)
    worth = np.maximum(score * 0.5 ** ((1000 - used) / 10), 1 / 16)  # all below share a bin
    held = (used >= 998) & (owner >= 0)

    keys = np.append(near + np.arange(wanted), np.full(n - wanted, 2**40))
    slots = side.places(side.begin(time, keys, n - 1))[:, 0]
    dealt = np.arange(near) // cache.GROUP % parts  # in turns
    assert len(np.unique(slots[slots >= 0])) == (slots >= 0).sum()
    for part in range(parts):
        mine, searched = slots[dealt[:n] == part], (77 + np.flatnonzero(dealt == part)) % near
        asked, may_leave = (dealt[:wanted] == part).sum(), searched[~held[searched]]
        slot = mine[mine >= 0]
        assert len(slot) == min(asked, len(may_leave))
        assert (mine[: len(slot)] == slot).all()  # the first rows get them
        assert np.isin(slot, may_leave).all()
        assert (np.diff((slot - 77) % near) > 0).all()  # in the order of the window
        stay = np.setdiff1d(may_leave, slot)
        if (owner[slot] >= 0).any():
            assert (owner[stay] >= 0).all()
            assert worth[slot[owner[slot] >= 0]].max() <= worth[stay].min(initial=np.inf) * 1.13  # a bin


def test_addresses_beyond_2_to_the_32() -> None:
    far = torch.empty((2**32 // 16 + 9, 16), dtype=torch.uint8, device=DEVICE)  # little of it is ever touched
    near = tensor(np.arange(32, dtype=np.uint8).reshape(2, 16))
    high, low = len(far) - 1, len(far) - 1 - 2**28
    far[high], far[low] = 7, 8
    at = [near.data_ptr() + 16, *(far.data_ptr() + 16 * row for row in (high - 1, high))]
    cache.exchange(tensor(np.array([at, [-1, 0, 0]])), 16)
    assert near[1].tolist() == [7] * 16
    assert far[high - 1].tolist() == list(range(16, 32))
    assert (far[low] == 8).all()
    places = tensor(np.array([5, 5]))
    everywhere = table(form_of(16), (near.data_ptr(), far.data_ptr()))
    home_kernels.locate(tensor(np.array([high, low])), one(2), everywhere, places)
    assert (places - far.data_ptr()).tolist() == [high * 16, low * 16]
