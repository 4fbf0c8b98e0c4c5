"""The launchers of the cache and of planning, with tensors as a table has them."""

from __future__ import annotations

import itertools

import torch
from examples_rows import KEYS, ONE, forms
from tensors import search_of, table

from embedrock.kernels.gpu import addresses as homes
from embedrock.kernels.gpu import cache, plan
from embedrock.kernels.gpu.runtime import RecordForm
from embedrock.optimizers import Adam

N, NEAR, FAR = 100, 64, 1000


def example_plan() -> None:
    scan, fault = torch.zeros(plan.scan_words(N), dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    order, count = torch.arange(N), torch.empty(1, dtype=torch.int32)
    unique, starts, inverse = torch.empty(N, dtype=torch.int64), torch.empty(N + 1, dtype=torch.int32), order.int()
    made = unique, starts, inverse, count, starts[:2]
    limits = 1, 16, 17, 2**31, 2**62  # what Triton compiles kernels anew for
    for dtype, limit in itertools.product((torch.int32, torch.int64), limits):
        keys = torch.arange(N, dtype=dtype)
        plan.check(keys, limit, fault)
        plan.collect(keys, FAR, order, scan, made, checked=(limit, fault))


def example_cache() -> None:
    keys, count = torch.arange(N), torch.full((1,), N, dtype=torch.int32)
    slots = homes.CacheSlots(
        torch.full((FAR,), -1, dtype=torch.int32),
        torch.full((NEAR,), -1),
        torch.zeros(NEAR),
        torch.zeros(NEAR, dtype=torch.int32),
        torch.zeros(NEAR, dtype=torch.uint8),
        torch.zeros(8, dtype=torch.int64),
    )
    tables = table(RecordForm(64, "float32", 768, 64, 128), (2**40, 2**41), slots.where, slots[1:])
    search_together(1, forms(Adam())[0], 0)
    moves = torch.zeros((N, 3), dtype=torch.int64)
    search = search_of(moves, homes.BatchTime(100, 1, 1 / 30.0, 5))
    for some, number in ((keys, count), (keys, N), (keys.int(), N)):
        cache.touch(tables, search, some, number)
        cache.insert(tables, search, some, number)
        counts, starts = torch.empty(plan.blocks(N), dtype=torch.int32), torch.empty(N + 1, dtype=torch.int32)
        plan.collect(some, FAR, keys, counts, (keys, starts, counts, counts, starts[:2]), tables, search)
        cache.forget(slots, some.long())
    places = torch.zeros(N, dtype=torch.int64)
    for record_bytes in (4, 8, 16, 96, 768, 12288):
        cache.exchange(moves, record_bytes)
        cache.copy_records(places, places, record_bytes)


def search_together(count: int, form: RecordForm, start: int) -> None:
    """Search the caches of several tables; `start`: where words begin."""
    words, some = torch.zeros(99, dtype=torch.int64), torch.zeros(9, dtype=torch.int32)
    entries = torch.zeros(count, homes.WORDS, dtype=torch.int64)
    tables = homes.DeviceTables(entries, "cached", "normal", form)
    moves = torch.zeros((len(KEYS), 3), dtype=torch.int64)
    search = cache.VictimSearch(moves, count, words[start:], some[start:])
    cache.touch(tables, search, KEYS, ONE)
    arrays = KEYS, some, (KEYS, some, some, some, some)
    plan.collect(KEYS.int(), 0, *arrays, tables, search)
    for ids in (KEYS, KEYS.int()):
        plan.collect(KEYS.int(), 0, *arrays, tables, search, (ids, some[start:]))
    for keys in (KEYS, KEYS.int()):
        cache.insert(tables, search, keys, len(keys))


def example_caches_of_tables() -> None:
    for count, form, start in itertools.product((1, 3), forms(Adam())[:2], (0, 1)):
        search_together(count, form, start)
