"""Plans: the kernels against their reference on poisoned memory, and whole plans against a dict."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
from embedrock import kernels
from embedrock.batch import plan as planning
from embedrock.batch.plan import NO_DIRECT, NO_ENTRIES, NO_INDEX, Plan, SlotIndex, make_plan, owned, sources_of
from embedrock.distributed.owners import Shard, owners
from embedrock.errors import ArgumentError
from suites.kernels import AsLaunched

CPU = AsLaunched(kernels.cpu.plan)
INT64 = np.iinfo(np.int64)
WORD = 1 << 64
MULTIPLIERS = (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)
LARGE = planning.SMALL_BATCH + 5_000
ARRAYS = ("ids", "inverse", "starts", "order")


def colliding(n: int) -> np.ndarray:
    """Distinct ids whose hashes, without a seed, are 0, 1, ... n - 1: all in one partition and one bucket."""
    back_1, back_2 = (pow(multiplier, -1, WORD) for multiplier in MULTIPLIERS)
    hashes = np.arange(n, dtype=np.uint64) * np.uint64(back_2)
    return ((hashes ^ (hashes >> np.uint64(32))) * np.uint64(back_1)).view(np.int64)


def one_id_is_most(n: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    return np.where(rng.random(n) < 0.9, -1, rng.integers(INT64.min, INT64.max, n))


def zipf(n: int) -> np.ndarray:
    return np.random.default_rng(2).zipf(1.05, n) * 2_654_435_761 % 4_000_000


BATCHES: dict[str, Callable[[int], np.ndarray]] = {
    "zipf": zipf,
    "distinct": lambda n: np.random.default_rng(3).permutation(n).astype(np.int64),
    "sequential": lambda n: np.arange(n),
    "lowest": lambda n: INT64.min + np.arange(n),
    "highest": lambda n: INT64.max - np.arange(n),
    "around zero": lambda n: np.arange(n) - n // 2,
    "same": lambda n: np.full(n, INT64.min),
    "one id is most": one_id_is_most,
    "few": lambda n: np.arange(n) % 3 - 1,
    "steps of 2**16": lambda n: np.arange(n) << 16,
    "steps of 2**32": lambda n: np.arange(n) << 32,
    "steps of 2**46": lambda n: np.arange(n) << 46,
    "grid": lambda n: (np.arange(n) // 256 << 40) + (np.arange(n) % 256 << 8),
    "steps of the multiplier's inverse": lambda n: (
        np.arange(n, dtype=np.uint64) * np.uint64(pow(MULTIPLIERS[0], -1, WORD))
    ).view(np.int64),
    "bits of floats": lambda n: (np.arange(n) / 8).view(np.int64),
    "colliding": colliding,
}

# Ids that a sentinel, a sign or a 32-bit step would trip over, beside ordinary ones, so that most repeat.
some_ids = st.one_of(
    st.sampled_from([0, -1, 1, INT64.min, INT64.min + 1, INT64.max, 2**31, 2**32, -(2**32)]),
    st.integers(-20, 20),
    st.integers(0, 30).map(lambda k: k << 56 if k < 16 else -(k << 48)),
    st.integers(INT64.min, INT64.max),
)
batches = st.lists(some_ids, max_size=200).map(lambda ids: np.array(ids, np.int64))


@pytest.fixture(autouse=True)
def _same_number_of_threads() -> Iterator[None]:
    threads = kernels.cpu.threads.get_threads()
    yield
    kernels.cpu.threads.set_threads(threads)


# ---------------------------------------------------------------------------------------------------- oracles


def assert_plan_of(plan: Plan, ids: np.ndarray) -> None:
    """The plan, array by array, is what NumPy's sorts say of these ids."""
    flat = ids.reshape(-1)
    assert plan.shape == ids.shape
    assert [getattr(plan, name).dtype for name in ARRAYS] == [np.int64, np.int32, np.int32, np.int32]
    np.testing.assert_array_equal(np.sort(plan.ids), np.unique(flat), "unique ids")
    np.testing.assert_array_equal(plan.ids[plan.inverse], flat, "inverse")
    np.testing.assert_array_equal(plan.order, np.argsort(plan.inverse, kind="stable"), "order")
    sizes = np.bincount(plan.inverse, minlength=plan.ids.size)
    np.testing.assert_array_equal(plan.starts, np.append(0, np.cumsum(sizes)), "starts")


def assert_same(plan: Plan, other: Plan) -> None:
    assert plan.shape == other.shape
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(plan, name), getattr(other, name), name)


@pytest.mark.parametrize("name", ARRAYS)
def test_the_oracles_see_one_wrong_element(name):
    ids = np.array([5, 7, 5, 9])
    plan = make_plan(ids)
    wrong = getattr(plan, name).copy()
    wrong[1] = wrong[0]
    bad = dataclasses.replace(plan, **{name: wrong})
    with pytest.raises(AssertionError):
        assert_plan_of(bad, ids)
    with pytest.raises(AssertionError):
        assert_same(bad, plan)


# ------------------------------------------------------------------------------- kernels, on poisoned memory


class Memory:
    """Arrays full of garbage, with a margin on either side that nobody may write to."""

    MARGIN = 16

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._lent: list[tuple[np.ndarray, np.ndarray]] = []

    def array(self, size: int, dtype: type) -> np.ndarray:
        nbytes = (size + 2 * self.MARGIN) * np.dtype(dtype).itemsize
        whole = np.frombuffer(bytearray(self._rng.bytes(nbytes)), dtype)
        self._lent.append((whole, whole.copy()))
        return whole[self.MARGIN : self.MARGIN + size]

    def copy(self, values: np.ndarray) -> np.ndarray:
        array = self.array(values.size, values.dtype.type)
        array[:] = values
        return array

    def check(self) -> None:
        for whole, before in self._lent:
            np.testing.assert_array_equal(whole[: self.MARGIN], before[: self.MARGIN])
            np.testing.assert_array_equal(whole[-self.MARGIN :], before[-self.MARGIN :])


def reference_call(name, count, *args):
    return getattr(reference.plan, name)(*args)


def cpu_call(name, count, *args):
    """Every item of the outer range as a part of its own, last part first: no part may need another."""
    for item in reversed(range(count)):
        getattr(CPU, name)(*args, item, item + 1)


def plan_whole(module, ids, memory, seed=0):
    n = ids.size
    table = memory.array(planning.table_size(n), np.int32)
    unique, inverse, order = (memory.array(n, dtype) for dtype in (np.int64, np.int32, np.int32))
    count = module.dedupe(sources_of([memory.copy(ids)]), seed, table, unique, inverse)
    starts = memory.array(count + 1, np.int32)
    module.segments(inverse, count, starts, order)
    memory.check()
    return Plan(ids.shape, unique[:count].copy(), inverse, starts, order)


def plan_by_partitions(call, ids, memory, chunks, partitions, workers, index=NO_INDEX):
    """The steps of the plan of a large batch, with any number of chunks, partitions and workers."""
    n, copied = ids.size, memory.copy(ids)
    sources = sources_of(np.split(copied, [n // 3, n // 3, n // 2]))  # of a table of several features
    counts = memory.array(chunks * partitions, np.int64).reshape(chunks, partitions)
    call("count_partitions", chunks, sources, counts)
    ends = np.cumsum(counts.T).reshape(partitions, chunks).T
    bounds = np.append(0, ends[-1])
    keys, positions = memory.array(n, np.int64), memory.array(n, np.int32)
    call("partition", chunks, sources, ends - counts, keys, positions)

    size = planning.table_size(int(np.diff(bounds).max()))
    tables = memory.array(workers * size, np.int32).reshape(workers, size)
    local, starts = memory.array(n, np.int32), memory.array(n + partitions, np.int32)
    order, uniques = memory.array(n, np.int32), memory.array(2 * partitions, np.int64).reshape(2, partitions)
    slots = memory.array(n if index is not NO_INDEX else 0, np.int64)
    parts = np.array([[p, p + 1, INT64.min, INT64.max, 0] for p in range(partitions)])
    sources, found = sources_of(np.split(keys, bounds[1:-1])), (local, starts, order, uniques)
    call("group", workers, sources, parts, positions, bounds, *index, 7, tables, keys, slots, *found)

    bases = np.append(0, np.cumsum(uniques[0]))
    unique, inverse = memory.array(bases[-1], np.int64), memory.array(n, np.int32)
    all_slots = memory.array(bases[-1] if index is not NO_INDEX else 0, np.int64)
    all_starts = memory.array(bases[-1] + 1, np.int32)
    all_starts[-1] = n
    made = inverse, unique, all_slots, all_starts
    call("collect", n, keys, slots, positions, bounds, bases, local, starts, *made)
    memory.check()
    return Plan(ids.shape, unique, inverse, all_starts, order, all_slots, int(uniques[1].sum()))


@given(batches, st.integers(0, INT64.max), st.integers(0, 2**32))
def test_whole_kernels_equal_their_reference(ids, seed, poison):
    fast = plan_whole(CPU, ids, Memory(poison), seed)
    assert_plan_of(fast, ids)
    assert_same(fast, plan_whole(reference.plan, ids, Memory(poison + 1), seed))
    assert list(dict.fromkeys(ids.tolist())) == fast.ids.tolist(), "the order of first occurrence"


def moved_by_owner(module, plan, ranks, bits, memory):
    old = [memory.copy(each) for each in (plan.ids, plan.inverse, plan.starts, plan.order)]
    order, bounds = memory.array(plan.ids.size, np.int32), memory.array(ranks + 1, np.int64)
    is_grouped = module.by_owner(old[0], ranks, bits, order, bounds)
    new = [memory.array(each.size, each.dtype) for each in old]
    module.move_rows(order, memory.array(plan.ids.size, np.int32), *old, *new)
    memory.check()
    return is_grouped, [array.tolist() for array in (order, bounds, *new)]


@given(batches, st.integers(1, 6), st.sampled_from([8, 12, 32]), st.integers(0, 2**32))
def test_ids_of_one_owner_are_moved_together(ids, ranks, bits, poison):
    plan = make_plan(ids.reshape(-1))
    found = moved_by_owner(CPU, plan, ranks, bits, Memory(poison))
    assert found == moved_by_owner(reference.plan, plan, ranks, bits, Memory(poison + 1))
    _, bounds, moved, *_ = (np.array(each, np.int64) for each in found[1])
    for rank in range(ranks):
        own = moved[bounds[rank] : bounds[rank + 1]]
        assert own.tolist() == plan.ids[owners(plan.ids, ranks, bits) == rank].tolist(), "in their order"
        assert own.tolist() == plan.ids[owned(plan.ids, rank, ranks, bits)].tolist(), "by either kernel"


def test_plans_by_owner_are_plans_of_small_and_large_batches():
    rng = np.random.default_rng(3)
    for n in (0, 7, LARGE):
        ids = rng.integers(-50, 50_000, n).reshape(n // 7, 7) if n % 7 == 0 else rng.integers(-50, 50_000, n)
        plan = Shard(0, 3).plan(ids)
        assert_plan_of(plan, ids)
        assert np.diff(owners(plan.ids, 3)).min(initial=0) >= 0
        assert plan.split.counts == np.bincount(owners(plan.ids, 3), minlength=3).tolist()


@given(batches, st.integers(1, 5), st.integers(1, 6), st.integers(1, 9), st.booleans(), st.integers(0, 2**32))
def test_partition_kernels_equal_their_reference(ids, chunks, log_partitions, workers, is_indexed, poison):
    index = index_of(np.arange(-20, 31)) if is_indexed else NO_INDEX
    fast = plan_by_partitions(cpu_call, ids, Memory(poison), chunks, 2**log_partitions, workers, index)
    assert_plan_of(fast, ids)
    plain = plan_by_partitions(reference_call, ids, Memory(poison + 1), 1, 2**log_partitions, 1, index)
    assert_same(fast, plain)
    expected = [reference.directory.slot_of(*index, key) for key in fast.ids.tolist()] if is_indexed else []
    assert fast.slots.tolist() == plain.slots.tolist() == expected
    assert fast.missing == plain.missing == np.count_nonzero(fast.slots < 0)


def planned_at_once(module, ids, tables, index, poison, seed=3):
    """Call `plan_tables` on poisoned memory; return its result, and the block that it wrote as arrays."""
    memory, n = Memory(poison), sum(map(len, ids))
    block, begin = memory.array(len(tables) + 1 + 2 * n + (3 * n + 2) // 2, np.int64), len(tables) + 1
    hashes = memory.array(planning.table_size(n), np.int32)
    copies = [memory.copy(each) for each in ids]
    count, missing = module.plan_tables(sources_of(copies), tables, *index, seed, hashes, block)
    memory.check()
    if count < 0:
        return count, missing
    found, small = (
        np.split(block[:-1], [begin, begin + count, begin + n, begin + n + count])[:4],
        block[begin + 2 * n :],
    )
    rows, unique, _, slots = (each.tolist() for each in found)
    small = small.view(np.int32)[: 2 * n + count + 1].tolist()
    return count, missing, rows, unique, slots if index is not NO_INDEX else None, small


@given(st.lists(batches, max_size=5), st.integers(0, 3), st.booleans(), st.integers(0, 2**32))
def test_batches_of_tables_planned_at_once_equal_their_reference(ids, kind, are_bounded, poison):
    """Tables of one or two sources each, with and without an index, and with ids outside of their range."""
    low, high = (-20, 2**32) if are_bounded else (INT64.min, INT64.max)
    firsts = [*range(0, len(ids), 2), len(ids)]
    tables = np.array([[*pair, low, high, 0] for pair in itertools.pairwise(firsts)], np.int64)
    tables = tables.reshape(-1, 5)
    bits, slots = np.frombuffer(bytes(range(8)), np.uint8).copy(), np.arange(16, dtype=np.int32) % 5
    direct = np.array([[bits.ctypes.data, 64, 1]]), np.array([[slots.ctypes.data, 16, 32]])
    hashed = index_of(np.arange(-20, 31))
    index = [NO_INDEX, hashed, (direct[0], NO_ENTRIES), (direct[1], hashed[1])][kind]
    if kind == 2:  # a bitmap has ids in its range only
        ids, tables[:, 2:4] = [each % 32 for each in ids], (0, 31)
    fast = planned_at_once(CPU, ids, tables, index, poison)
    assert fast == planned_at_once(reference.plan, ids, tables, index, poison + 1, seed=4)
    assert (fast[0] < 0) == any(((each < low) | (each > high)).any() for each in ids)


def test_dedupe_in_place():
    ids = zipf(3_000)
    keys, inverse, table = ids.copy(), np.empty(ids.size, np.int32), np.empty(8_192, np.int32)
    count = CPU.dedupe(sources_of([keys]), 1, table, keys, inverse)
    assert_plan_of(dataclasses.replace(make_plan(ids), ids=keys[:count], inverse=inverse), ids)


def test_dedupe_grows_its_table():
    ids = BATCHES["distinct"](CPU.FIRST_TABLE + 3)
    expected = plan_whole(reference.plan, ids, Memory(1))
    assert_same(plan_whole(CPU, ids, Memory(0)), expected)


def longest_cluster(ids, seed):
    """Return the longest run of taken entries that `dedupe` leaves in its table: a bound on its probes."""
    n = ids.size
    table = np.empty(planning.table_size(n), np.int32)
    CPU.dedupe(sources_of([ids]), seed, table, np.empty(n, np.int64), np.empty(n, np.int32))
    free = np.flatnonzero(table < 0)
    return int(np.diff(free, prepend=-1, append=table.size).max()) - 1


@pytest.mark.parametrize("name", sorted(BATCHES.keys() - {"colliding"}))
def test_no_seed_lets_regular_ids_cluster(name):
    ids = BATCHES[name](30_000)
    assert max(longest_cluster(ids, seed) for seed in (0, 1, -1, 2**62 + 12345)) < 100


def test_ids_made_to_collide_do_so_for_their_own_seed_only():
    ids = colliding(3_000)
    assert longest_cluster(ids, 0) == ids.size
    assert_plan_of(plan_whole(CPU, ids, Memory(0), seed=0), ids)
    assert longest_cluster(colliding(30_000), planning.SEED) < 100


# ------------------------------------------------------------------------------------------------ whole plans


@given(batches)
def test_a_plan_is_what_a_dict_says(ids):
    plan = make_plan(ids)
    positions: dict[int, list[int]] = {}
    for position, key in enumerate(ids.tolist()):
        positions.setdefault(key, []).append(position)
    segments = np.split(plan.order, plan.starts[1:-1]) if ids.size else []
    assert [segment.tolist() for segment in segments] == list(positions.values())
    assert plan.ids.tolist() == list(positions)
    assert_plan_of(plan, ids)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("n", [1_000, LARGE])
def test_ids_of_every_kind(name, n):
    ids = BATCHES[name](n)
    assert ids.dtype == np.int64
    assert_plan_of(make_plan(ids), ids)


@pytest.mark.parametrize("n", [*range(4), planning.SMALL_BATCH - 1, planning.SMALL_BATCH, planning.SMALL_BATCH + 1])
def test_sizes_around_the_threshold(n):
    assert_plan_of(make_plan(zipf(n)), zipf(n))


@pytest.mark.parametrize("name", ["zipf", "distinct", "same", "one id is most", "colliding"])
def test_threads_do_not_change_a_bit(name):
    ids = BATCHES[name](LARGE)
    partitions = 1 << (LARGE // planning.PARTITION_IDS).bit_length()
    expected = plan_by_partitions(reference_call, ids, Memory(0), 1, partitions, 1)
    for threads in range(1, 9):
        kernels.cpu.threads.set_threads(threads)
        assert_same(make_plan(ids), expected)


@pytest.mark.parametrize("n", [3_000, LARGE])
def test_what_scratch_held_does_not_matter(n):
    expected = make_plan(zipf(n))
    rng = np.random.default_rng(0)
    for _ in range(3):
        for buffer in planning._scratch._kept.values():
            buffer.view(np.uint8)[:] = np.frombuffer(rng.bytes(buffer.nbytes), np.uint8)
        assert_same(make_plan(zipf(n)), expected)


def test_scratch_is_kept_up_to_a_bound(monkeypatch):
    monkeypatch.setattr(planning, "_scratch", planning._Scratch())
    monkeypatch.setattr(planning, "KEEP_BYTES", 8 * LARGE - 1)
    assert_plan_of(make_plan(zipf(LARGE)), zipf(LARGE))
    assert "keys" not in planning._scratch._kept
    assert planning._scratch._kept["local"].size == LARGE


@pytest.mark.parametrize("n", [100, LARGE])
def test_a_plan_owns_its_arrays_and_cannot_be_changed(n):
    ids = zipf(n)
    plan, expected = make_plan(ids), ids.copy()
    ids[:] = -5
    make_plan(ids)
    assert_plan_of(plan, expected)
    for name in ARRAYS:
        assert not getattr(plan, name).flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        plan.ids[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.epoch = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_slots_are_read_only_too():
    plan = dataclasses.replace(make_plan(np.array([3, 3, 8])), slots=np.array([0, 1]), epoch=4)
    assert plan.slots is not None
    assert not plan.slots.flags.writeable
    assert plan.epoch == 4


@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 3, 4), (0, 5), (5, 0), (1, 1)])
def test_shapes(shape):
    ids = np.random.default_rng(0).integers(0, 5, shape)
    assert_plan_of(make_plan(np.asarray(ids)), np.asarray(ids))


@pytest.mark.parametrize("n", [30, LARGE])
def test_ids_in_any_memory(n):
    ids = zipf(n)
    frozen = ids.copy()
    frozen.flags.writeable = False
    unaligned = np.frombuffer(b"x" + ids.tobytes(), np.int64, offset=1)
    strided = np.repeat(ids, 3)[::3]
    backwards = ids[::-1].copy()[::-1]
    fortran = np.asfortranarray(ids.reshape(2, -1))
    assert not unaligned.flags.aligned
    for same in (frozen, unaligned, strided, backwards):
        assert_same(make_plan(same), make_plan(ids))
    assert_same(make_plan(fortran), make_plan(ids.reshape(2, -1)))
    assert ids.flags.writeable


def test_more_ids_than_int32_positions_are_refused():
    ids = np.broadcast_to(np.int64(3), (2, 2**30))
    with pytest.raises(ArgumentError, match=r"at most 2,147,483,647: got 2,147,483,648 .*Split the batch"):
        make_plan(ids)


def test_plans_made_at_the_same_time():
    sizes = [LARGE, 5_000, LARGE + 11, 200] * 3
    expected = [make_plan(zipf(n)) for n in sizes]
    kernels.cpu.threads.set_threads(3)
    with ThreadPoolExecutor(4) as pool:
        for plan, other in zip(pool.map(lambda n: make_plan(zipf(n)), sizes), expected, strict=True):
            assert_same(plan, other)


# ------------------------------------------------------------------------------------------------ merged plans


def find_slots(ids: np.ndarray) -> np.ndarray:
    return np.where(ids % 3 == 0, -1, ids + 100)


def index_of(ids: np.ndarray) -> SlotIndex:
    """An index that has the slots of `find_slots`, of some ids."""
    entries, known = np.zeros((256, 2), np.int64), ids[ids % 3 != 0]
    reference.directory.set_values(NO_DIRECT, entries, known, find_slots(known))
    return NO_DIRECT, entries


def draw_plans(count: int, epoch: int = 5) -> list[planning.Plan]:
    rng, index = np.random.default_rng(count), index_of(np.arange(50))
    return [make_plan(rng.integers(0, 50, 40), index, epoch) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 5, planning.MAX_PARTS + 1])
def test_merged_plans_are_plans_of_their_rows(count):
    plans = draw_plans(count)
    merged, ids = planning.merge_plans(plans), np.concatenate([plan.ids for plan in plans])
    assert_plan_of(merged, ids)
    assert merged.slots.tolist() == find_slots(merged.ids).tolist()
    assert merged.missing == np.count_nonzero(merged.slots < 0)
    assert merged.epoch == 5


def test_slots_of_another_epoch_are_left_out():
    merged = planning.merge_plans([*draw_plans(2), *draw_plans(1, epoch=6)])
    assert (merged.epoch, merged.slots.size, merged.missing) == (-1, 0, 0)


def test_a_merged_plan_knows_which_rows_each_batch_has():
    plans = draw_plans(5)
    inner = planning.merge_plans(plans[1:4])
    merged = planning.merge_plans([plans[0], inner, plans[4]])
    found = list(merged.batches(merged.ids))
    assert [plan for plan, _ in found] == plans
    assert all(np.array_equal(plan.ids, rows) for plan, rows in found)
    first, slots = next(inner.batches(inner.slots))
    assert (first, slots.tolist()) == (plans[1], plans[1].slots.tolist())


def test_many_merges_do_not_keep_all_batches():
    merged = draw_plans(1)[0]
    for plan in draw_plans(3 * planning.MAX_PARTS):
        merged = planning.merge_plans([merged, plan])
    assert planning._count(merged) <= planning.MAX_PARTS


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0), (2, 3, 4)])
def test_sources_are_addresses_and_numbers_of_ids(shape: tuple[int, ...]) -> None:
    ids = [np.ones(shape, np.int64), np.broadcast_to(np.int64(7), (1,)), np.arange(9)[4:]]
    assert sources_of(ids).tolist() == [[each.__array_interface__["data"][0], each.size] for each in ids]
    assert sources_of([]).shape == (0, 2)
