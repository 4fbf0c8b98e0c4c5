"""The index of a table in RAM against a dict: tables of a pool that fill, empty, grow and leave."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import embedrock as er
from embedrock.kernels.keys import PART_BITS
from embedrock.storage.slot_index import (
    ENTRY_BYTES,
    FIRST_ENTRIES,
    ID_BYTES,
    SLOT_BYTES,
    SPARSE,
    HashIndex,
    entries_for,
)
from embedrock.table.table import rows_of
from support.slow import examples

ROWS = {0: 3_000, 2: 400, 3: 60_000, 7: 1}  # of the tables of a pool, by number
CAPACITY = 1 << 17


class Model:
    """An index and the dict that it should equal."""

    def __init__(self, seed: int) -> None:
        self.random, self.rows, self.slots = np.random.default_rng(seed), dict(ROWS), dict[int, int]()
        self.index = HashIndex(CAPACITY)
        self.index.rows = self.rows

    def keys(self, count: int) -> np.ndarray:
        """Return different keys of one table."""
        number = int(self.random.choice(list(self.rows)))
        ids = self.random.choice(self.rows[number], min(count, self.rows[number]), replace=False)
        return ids + (number << PART_BITS)

    def insert(self) -> None:
        keys = self.keys(int(self.random.choice([1, 30, 700, 3_000])))
        slots = self.index.find(keys)
        assert slots.tolist() == [self.slots.get(key, -1) for key in keys.tolist()]
        promised = self.index.bytes_with(int(np.count_nonzero(slots < 0)))
        expected = self.index.next_slots(keys[slots < 0])
        got = self.index.insert(keys, slots.copy())
        np.testing.assert_array_equal(got[slots < 0], expected)
        self.slots.update(zip(keys.tolist(), got.tolist(), strict=True))
        assert self.index.bytes_with(0) <= promised

    def remove(self) -> None:
        keys = self.keys(500)
        keys = keys[self.index.find(keys) >= 0]
        self.index.remove(keys)
        for key in keys.tolist():
            del self.slots[key]

    def leave(self) -> None:
        """Remove a whole table, as a pool does: records from the end take the free slots."""
        number = int(self.random.choice(list(self.rows)))
        here = np.array([key >> PART_BITS != number for key in self.slots], bool)
        kept, slots = (np.array([*each], np.int64) for each in (self.slots.keys(), self.slots.values()))
        has_record, count = np.zeros(self.index.used, bool), int(here.sum())
        has_record[slots[here]] = True
        holes, moved = np.flatnonzero(~has_record[:count]), count + np.flatnonzero(has_record[count:])
        new = dict(zip(moved.tolist(), holes.tolist(), strict=True))
        self.index.keep(count, holes, moved)
        both = zip(kept[here].tolist(), slots[here].tolist(), strict=True)
        self.slots = {key: new.get(slot, slot) for key, slot in both}
        self.rows[number] = int(self.random.integers(1, 5_000))

    def grow(self) -> None:
        number = int(self.random.choice(list(self.rows)))
        self.rows[number] = int(self.rows[number] * self.random.choice([2, 1.1]) + 1)

    def check(self) -> None:
        index, known = self.index, np.array([*self.slots], np.int64)
        assert (index.count, index.used - len(index.free)) == (len(self.slots), len(self.slots))
        assert index.find(known).tolist() == [*self.slots.values()]
        listed = dict[int, int]()
        for ids, slots in index.batches(1_000):
            listed.update(zip(ids.tolist(), slots.tolist(), strict=True))
        assert listed == self.slots


@settings(deadline=None, max_examples=examples(40))
@given(seed=st.integers(0, 2**32), steps=st.lists(st.sampled_from(["insert"] * 5 + ["remove", "leave", "grow"])))
def test_the_index_of_a_pool_equals_a_dict(seed: int, steps: list[str]) -> None:
    model = Model(seed)
    for step in ["insert", *steps]:
        getattr(model, step)()
        model.check()


@pytest.mark.parametrize("at_once", [300, 20_000])
def test_tables_most_of_whose_rows_exist_take_4_bytes_a_row(at_once: int) -> None:
    rows = dict.fromkeys(range(6), 20000)
    index, random = HashIndex(CAPACITY), np.random.default_rng(0)
    index.rows = rows
    for number in rows:
        for part in np.array_split(random.permutation(20_000), 20_000 // at_once):
            index.insert(part + (number << PART_BITS))
    index.insert(np.array([5]) + (6 << PART_BITS))
    hashed = index.bytes_with(0) - 120_000 * SLOT_BYTES - 120_001 * ID_BYTES
    assert 0 < hashed <= entries_for(20_000 // SPARSE + at_once) * ENTRY_BYTES
    assert index.find(np.arange(20_000) + (3 << PART_BITS)).min() >= 60_000


def test_sparse_tables_stay_hashed() -> None:
    index = HashIndex(CAPACITY)
    index.rows[0] = 1 << 40
    index.insert(np.arange(10_000) << 20)
    assert index.bytes_with(0) == entries_for(10_000) * ENTRY_BYTES + 10_000 * ID_BYTES


@pytest.mark.parametrize("rows", [None, 100, 1_000, 40_000, 130_000, 1 << 30])
def test_bytes_for_is_the_most_that_an_index_takes_while_it_grows(rows: int | None) -> None:
    count = min(rows or CAPACITY, CAPACITY)
    index, least = HashIndex(CAPACITY), CAPACITY * 100
    index.rows = {} if rows is None else {0: rows}
    for start in range(0, count, 100):
        stop, before = min(start + 100, count), index.bytes_with(0)
        index.insert(np.arange(start, stop))
        after = index.bytes_with(0)
        tables = 0 if after == before + (stop - start) * ID_BYTES else before - start * ID_BYTES  # replaced ones
        least = min(least, HashIndex.bytes_for(stop, rows) - after - tables)
    assert 0 <= least <= 26 * FIRST_ENTRIES


def test_a_table_releases_its_ram_at_once() -> None:
    gc.disable()
    try:
        table = er.Table(100_000, 64, directory="hashed")
        table.assign(np.arange(50_000), np.ones((50_000, 64), np.float32))
        tier = weakref.ref(rows_of(table).tier)
        del table
        assert tier() is None
    finally:
        gc.enable()


def test_members_of_a_group_are_indexed_by_their_own_rows() -> None:
    group = er.Group()
    tables = [group.table(name, rows=rows, dim=4) for name, rows in (("a", 20_000), ("b", 30_000))]
    ids = np.arange(20_000)
    for table in tables:
        table.assign(ids, np.full((20_000, 4), 3.0, np.float32))
    pool: Any = rows_of(tables[0]).tier.pool
    index: HashIndex = pool.directory
    assert index.rows == {0: 20_000, 1: 30_000}
    assert index.bytes_with(0) < 40_000 * ID_BYTES + 50_000 * SLOT_BYTES + (1 << 20)
    tables[0].grow(25_000)
    assert index.rows == {0: 25_000, 1: 30_000}
    tables[0].assign([24_999], np.full((1, 4), 5.0, np.float32))
    group.drop("b")
    assert index.rows == {0: 25_000}
    assert tables[0].lookup([24_999, 5]).tolist() == [[5.0] * 4, [3.0] * 4]


@pytest.mark.parametrize("rows", [None, 1 << 45])
def test_a_table_with_a_direct_address_table_may_grow_without_bound(rows: int | None) -> None:
    group, ids = er.Group(), np.arange(20_000)
    table = group.table("a", rows=50_000, dim=4, eviction=er.Eviction(max_rows=40_000))
    for part in np.array_split(ids, 20):
        table.assign(part, np.repeat(part[:, None], 4, 1).astype(np.float32))
    table.grow(rows)
    others = np.arange(3_000) + (1 << 44) * (1 if rows else -1)
    table.assign(others, np.ones((3_000, 4), np.float32))
    assert table.lookup(ids)[:, 0].tolist() == ids.tolist()
    assert (table.lookup(others) == 1).all()
    assert table.stats()["rows_touched"] == 23_000


def test_rows_of_a_direct_address_table_need_no_room_in_the_hash_table() -> None:
    index = HashIndex(CAPACITY)
    index.rows[0] = 100_000
    for part in np.array_split(np.arange(25_000), 25):
        index.insert(part)
    before = index.bytes_with(0)
    assert index.bytes_with(30_000) == before + 30_000 * ID_BYTES
    index.insert(np.arange(25_000, 55_000))
    assert index.bytes_with(0) == before + 30_000 * ID_BYTES
    index.rows[1] = 100_000
    assert index.bytes_with(30_000) > before + 60_000 * ID_BYTES


def test_negative_keys_are_hashed() -> None:
    index, known = HashIndex(CAPACITY), np.arange(2_000)
    index.rows[0] = 2_000
    for part in np.array_split(known, 4):
        index.insert(part)
    index.rows.clear()
    for number in range(-30, 0):
        index.insert(known + (number << PART_BITS))
        assert index.find(known + (number << PART_BITS)).min() >= 0
    assert index.find(known).tolist() == known.tolist()
