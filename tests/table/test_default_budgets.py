"""Tables on disk without `memory=`: together they take no more than one default, and that changes no bit."""

from __future__ import annotations

import gc
import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.errors import CacheTooSmallError, MemoryBudgetError
from embedrock.storage import budget
from embedrock.storage.disk_backend import DiskBackend
from embedrock.table.table import rows_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::embedrock.table.storage.UncommittedWarning"),
]

MIB, DIM = 1 << 20, 16
DEFAULT = 4 * MIB
ROWS, RULE = 10**6, er.Adam(lr=0.1)
Maker = Callable[..., er.Table]


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> budget.SharedBudget:
    """Give tables a default of their own, of `DEFAULT` bytes."""
    pool = budget.SharedBudget()
    monkeypatch.setattr(budget, "POOL", pool)
    monkeypatch.setattr(budget, "memory_limit", lambda: DEFAULT * budget.DEFAULT_SHARE)
    return pool


@pytest.fixture
def made(tmp_path: Path, pool: budget.SharedBudget) -> Iterator[Maker]:
    """Return what makes tables on disk that are closed in the end."""
    tables: list[er.Table] = []

    def make(name: str, rows: int | None = ROWS, dim: int = DIM, **options: Any) -> er.Table:
        tables.append(er.Table(rows, dim, path=tmp_path / f"{name}.rock", rule=RULE, seed=0, **options))
        return tables[-1]

    yield make
    for table in tables:
        table.close()
    assert not pool.shares


def tier_of(table: er.Table) -> DiskBackend:
    tier = rows_of(table).tier
    assert isinstance(tier, DiskBackend)
    return tier


def held(table: er.Table) -> int:
    """Return the bytes that the records and the directory of a table's cache may take, as they were allocated."""
    tier = tier_of(table)
    return len(tier.arena.memory) + type(tier.cache).bytes_for(tier.cache.capacity)


def train(table: er.Table, twin: er.Table, rng: np.random.Generator, count: int) -> None:
    ids = rng.integers(0, ROWS, count)
    grads = rng.standard_normal((count, DIM), dtype=np.float32)
    for each in (table, twin):
        each.update(ids, grads)


def twin_of(table: er.Table) -> er.Table:
    return er.Table(table.rows, DIM, rule=RULE, seed=0)


def assert_same(table: er.Table, twin: er.Table) -> None:
    (ids, weights), (expected_ids, expected) = table.export(), twin.export()
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(weights.view(np.uint32), expected.view(np.uint32))


def test_tables_opened_one_after_the_other_share_one_default(made: Maker, pool: budget.SharedBudget):
    rng, tables, twins = np.random.default_rng(0), list[er.Table](), list[er.Table]()
    for number in range(6):
        tables.append(made(f"t{number}"))
        twins.append(twin_of(tables[-1]))
        for table, twin in zip(tables, twins, strict=True):
            train(table, twin, rng, 500)
            assert sum(each.stats()["budget_bytes"] for each in tables) <= DEFAULT
            # Those of the others that were not used since may still be allocated larger: their pages are gone.
            assert held(table) <= DEFAULT // len(tables)
    for _ in range(8):
        for table, twin in zip(tables, twins, strict=True):
            train(table, twin, rng, 1000)
    assert sum(map(held, tables)) <= DEFAULT
    shares = {table.stats()["budget_bytes"] for table in tables}
    assert shares == {DEFAULT // 6}, "an even share, also of the first one, and of the last"
    for table, twin in zip(tables, twins, strict=True):
        assert table.stats()["evictions"] > 0
        assert_same(table, twin)
        assert "KiB of 682.7 KiB" in repr(table)


def test_who_is_not_used_any_more_makes_room_with_all_its_rows(made: Maker):
    rng, first = np.random.default_rng(0), made("first")
    twin = twin_of(first)
    for _ in range(12):
        train(first, twin, rng, 1000)
    rows = tier_of(first).cache.count
    second, third = made("second"), made("third")
    assert held(first) <= DEFAULT // 2
    assert 0 < tier_of(first).cache.count < rows
    for table in (second, third):
        train(table, twin_of(table), rng, 2000)
    assert sum(map(held, (first, second, third))) <= DEFAULT
    assert_same(first, twin)


def test_the_most_used_rows_stay_when_a_cache_is_made_smaller_or_larger(made: Maker):
    first, hot = made("first"), np.arange(500)
    twin = twin_of(first)
    for start in range(1000, 12_000, 1000):
        for each in (first, twin):
            each.update(np.concatenate([hot, np.arange(start, start + 1000)]), np.ones((1500, DIM), np.float32))
    second = made("second")
    assert (tier_of(first).cache.find(hot) >= 0).all()
    second.close()
    for start in range(20_000, 32_000, 1000):
        for each in (first, twin):
            each.update(np.concatenate([hot, np.arange(start, start + 1000)]), np.ones((1500, DIM), np.float32))
    assert held(first) > DEFAULT // 2, "a table that is closed gives its share back"
    assert (tier_of(first).cache.find(hot) >= 0).all()
    assert_same(first, twin)


def test_small_tables_are_kept_whole_and_large_ones_have_the_rest(made: Maker):
    small = [made(f"s{number}", rows=100) for number in range(5)]
    large = made("large")
    assert all(table.stats()["direct"] for table in small)
    assert large.stats()["budget_bytes"] > 0.9 * DEFAULT
    others = [made(f"l{number}", rows=None) for number in range(12)]
    assert all(table.stats()["direct"] for table in small)
    assert sum(table.stats()["budget_bytes"] for table in (*small, large, *others)) <= DEFAULT


def test_a_table_that_was_whole_goes_on_in_a_cache(made: Maker):
    rng, table = np.random.default_rng(0), made("whole", rows=10_000)
    twin = twin_of(table)
    for _ in range(5):
        ids = rng.integers(0, 10_000, 3000)
        for each in (table, twin):
            each.update(ids, np.ones((3000, DIM), np.float32))
    assert table.stats()["direct"]
    others = [made(f"o{number}", rows=None) for number in range(3)]
    table.lookup([1])
    assert not table.stats()["direct"]
    assert held(table) <= DEFAULT // 4
    assert_same(table, twin)
    for other in others:
        other.close()
    for _ in range(5):
        ids = rng.integers(0, 10_000, 3000)
        for each in (table, twin):
            each.update(ids, np.ones((3000, DIM), np.float32))
    assert table.stats()["direct"]
    assert_same(table, twin)


def test_a_batch_that_needs_more_than_its_share_gets_it_from_the_others(made: Maker):
    rng, tables = np.random.default_rng(0), [made(f"t{number}") for number in range(4)]
    twins = [twin_of(table) for table in tables]
    for table, twin in zip(tables, twins, strict=True):
        train(table, twin, rng, 2500)
    train(tables[0], twins[0], rng, 7000)
    assert held(tables[0]) > DEFAULT // 3
    assert sum(map(held, tables)) <= DEFAULT
    for table, twin in zip(tables, twins, strict=True):
        train(table, twin, rng, 1000)
        assert_same(table, twin)
    before = tables[1].stats()["steps"]
    with pytest.raises(CacheTooSmallError, match=r"of the 4\.0 MiB that it has with 3 other tables without") as e:
        tables[1].update(np.arange(30_000), np.ones((30_000, DIM), np.float32))
    assert "is enough: raise memory=" in str(e.value)
    assert tables[1].stats()["steps"] == before
    assert_same(tables[1], twins[1])


def test_a_budget_that_was_given_is_its_own(made: Maker):
    own, shared = made("own", memory="3MiB"), made("shared")
    assert own.stats()["budget_bytes"] == 3 * MIB
    assert shared.stats()["budget_bytes"] == DEFAULT


def test_tables_that_come_later_leave_room_for_a_row_to_those_that_are_there(made: Maker):
    wide = made("wide", rows=100, dim=20_000)
    twin = er.Table(100, 20_000, rule=RULE, seed=0)
    others = [made(f"t{number}") for number in range(20)]
    for ids in ([1], [1, 99], [5]):
        for table in (wide, twin):
            table.update(ids[:1], np.ones((1, 20_000), np.float32))
            table.lookup(ids[-1:])
    wide.commit()
    assert_same(wide, twin)
    assert sum(table.stats()["budget_bytes"] for table in (wide, *others)) <= DEFAULT


def test_rows_in_use_that_fill_a_cache_over_its_share_are_no_reason_to_look_again(made: Maker):
    """A batch began anew for ever, with Ctrl-C held back."""
    first, second = made("first", rows=24_000), made("second")
    for start in range(0, 24_000, 1000):
        first.update(np.arange(start, start + 1000), np.ones((1000, DIM), np.float32))
    tier = tier_of(first)
    pin = first.bring(np.arange(8000, 8000 + tier.placement.slots - 8))
    third = made("third")
    assert tier.budget.nbytes > tier.budget.due
    with rows_of(first).table_lock.alone():
        tier.cache.release_current()
        tier.adapt()
        assert not tier.adapt()
    twin = twin_of(first)
    twin.update(np.arange(4), np.ones((4, DIM), np.float32))
    np.testing.assert_array_equal(first.lookup(np.arange(4)), twin.lookup(np.arange(4)))
    pin.release()
    first.lookup([5])
    assert sum(table.stats()["budget_bytes"] for table in (first, second, third)) <= DEFAULT


def test_a_table_that_is_rolled_back_while_another_waits_for_its_room(made: Maker):
    """The rows that it had before must not leave its old cache for its files."""
    first, ids = made("first"), np.arange(8000)
    twin, parts, ones = twin_of(first), np.split(ids, 8), np.ones((1000, DIM), np.float32)
    for part in parts:
        first.update(part, ones)
        twin.update(part, ones)
    commit = first.commit()
    for part in parts:
        first.update(part, ones)
    table_lock, opening = rows_of(first).table_lock, threading.Thread(target=made, args=("second",))
    with table_lock.lock:
        opening.start()
        while table_lock._next.acquire(blocking=False):
            table_lock._next.release()
            time.sleep(0.001)
        first.rollback(commit)
    opening.join()
    assert_same(first, twin)


def test_a_state_that_is_refused_after_the_default_became_less(made: Maker, monkeypatch: pytest.MonkeyPatch):
    rng, table = np.random.default_rng(0), made("first")
    twin = twin_of(table)
    for _ in range(12):
        train(table, twin, rng, 1000)
    state = twin.state()
    state["ids"] = np.zeros_like(state["ids"])
    monkeypatch.setattr(budget, "memory_limit", lambda: DEFAULT)
    with pytest.raises(er.ArgumentError, match="not repeat"):
        table.load_state(state)
    train(table, twin, rng, 1000)
    assert held(table) <= DEFAULT // 2
    assert_same(table, twin)


@pytest.mark.parametrize("how", ["set_rule", "load_state"])
def test_a_cache_of_another_size_while_it_is_filled_anew(how: str, made: Maker, monkeypatch: pytest.MonkeyPatch):
    rng, table, others = np.random.default_rng(0), made("first"), [made("second"), made("third")]
    twin, calls, begin = twin_of(table), list[DiskBackend](), DiskBackend.begin_batch
    for _ in range(12):
        train(table, twin, rng, 1000)

    def begin_and_close(tier: DiskBackend) -> None:
        calls.append(tier)
        if len(calls) in (3, 5):
            others.pop().close()
        begin(tier)

    monkeypatch.setattr(DiskBackend, "begin_batch", begin_and_close)
    if how == "set_rule":
        for each in (table, twin):
            each.set_rule(er.Adagrad(lr=0.1), reset_state=True)
    else:
        table.load_state(twin)
    assert len(calls) > 5
    assert table.stats()["rows_touched"] == twin.stats()["rows_touched"]
    assert_same(table, twin)


def test_a_table_that_is_collected_in_the_midst_of_sharing_is_closed_by_another_thread(made: Maker, tmp_path: Path):
    kept = made("kept")
    lost = er.Table(ROWS, DIM, path=tmp_path / "lost.rock")
    lost.commit()
    pool = budget.POOL
    with pool.lock:
        del lost
        gc.collect()
        closing = next(thread for thread in threading.enumerate() if thread.name == "close-embedrock")
        assert len(pool.shares) == 2
    closing.join()
    assert len(pool.shares) == 1
    assert kept.stats()["budget_bytes"] <= DEFAULT


def test_no_room_for_one_row_more(made: Maker, pool: budget.SharedBudget, tmp_path: Path):
    assert [made(f"t{number}", rows=None) for number in range(8)]
    wide = tmp_path / "wide.rock"
    with pytest.raises(MemoryBudgetError, match=r"wide.rock' takes .*=455\.1 KiB, its share of the 4\.0 MiB.*3200160"):
        er.Table(None, 200_000, path=wide, rule=RULE)
    assert not wide.exists()
    assert len(pool.shares) == 8


@pytest.mark.parametrize("wait", [True, False])
def test_room_is_made_beside_commits_and_prefetching(wait: bool, made: Maker):
    rng, first = np.random.default_rng(0), made("first")
    twin = twin_of(first)
    batches = [rng.integers(0, ROWS, 600) for _ in range(24)]
    others = list[er.Table]()
    for number, ids in enumerate(first.prefetch(batches, depth=2)):
        for each in (first, twin):
            each.lookup(ids)
            each.update(ids, np.ones((600, DIM), np.float32))
        if number % 3 == 0:
            first.commit(wait=wait)
        if number % 6 == 2:
            others.append(made(f"o{number}"))
            train(others[-1], twin_of(others[-1]), rng, 500)
        if number == 20:
            others.pop().close()
    assert_same(first, twin)
    first.commit()
    with er.open(first.path or "", mode="r") as snapshot:
        assert_same(snapshot, twin)


def test_tables_that_need_room_at_the_same_time_do_not_wait_for_each_other(made: Maker):
    tables = [made(f"t{number}") for number in range(3)]
    twins = [twin_of(table) for table in tables]
    errors: list[BaseException] = []

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        try:
            for step in range(30):
                train(tables[number], twins[number], rng, 800 + 60 * step)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert not errors
    for table, twin in zip(tables, twins, strict=True):
        assert_same(table, twin)
    assert sum(table.stats()["budget_bytes"] for table in tables) <= DEFAULT


def test_a_table_that_is_opened_while_another_is_being_opened(made: Maker, monkeypatch: pytest.MonkeyPatch):
    calls, within, new_cache = list[DiskBackend](), list[er.Table](), DiskBackend._new_cache

    def open_within(tier: DiskBackend, placement: Any) -> Any:
        calls.append(tier)
        if len(calls) == 1:
            within.append(made("second"))
        return new_cache(tier, placement)

    monkeypatch.setattr(DiskBackend, "_new_cache", open_within)
    first, (second,) = made("first"), within
    rng = np.random.default_rng(0)
    for table in (first, second):
        train(table, twin_of(table), rng, 1000)
    assert {table.stats()["budget_bytes"] for table in (first, second)} == {DEFAULT // 2}
    assert held(first) + held(second) <= DEFAULT


class Guest:
    """Who knows the records of a tier by their address, and has none that are newer."""

    def __init__(self, tier: DiskBackend) -> None:
        self._tier, self.left = tier, list[int]()

    def leave(self, slots: np.ndarray) -> None:
        """Go on: it looks at no slot."""

    def move_out(self) -> None:
        """Note the address that it is told to forget."""
        self.left.append(self._tier.records.bytes.ctypes.data)

    def give_room_back(self) -> None:
        """Do nothing: it was promised none."""


def test_who_knows_records_by_address_is_told_before_they_move(made: Maker):
    first = made("first")
    twin, rng = twin_of(first), np.random.default_rng(0)
    train(first, twin, rng, 3)
    listener = Guest(tier_of(first))
    tier_of(first).add_listener(listener)
    address = tier_of(first).records.bytes.ctypes.data
    made("second")
    train(first, twin, rng, 3)
    assert listener.left[0] == address != tier_of(first).records.bytes.ctypes.data
    assert held(first) <= DEFAULT // 2
    assert_same(first, twin)


def _read_in_child(table: er.Table, path: str, expected: np.ndarray, results: Any) -> None:
    same = bool((table.lookup(np.arange(500)) == expected).all())
    with er.open(path, mode="r") as other:
        same &= bool((other.lookup(np.arange(500)) == expected).all())
        results.put((same, len(budget.POOL.shares), sum(share.nbytes for share in budget.POOL.shares)))


def test_a_child_has_a_default_of_its_own(made: Maker):
    writer = made("first")
    writer.update(np.arange(500), np.ones((500, DIM), np.float32))
    writer.commit()
    with er.open(writer.path or "", mode="r") as reader:
        expected, context = reader.lookup(np.arange(500)), multiprocessing.get_context("fork")
        results = context.SimpleQueue()
        child = context.Process(target=_read_in_child, args=(reader, writer.path, expected, results))
        child.start()
        same, shares, taken = results.get()
        child.join()
        assert same
        assert shares == 2, "the reader that it was given and its own, not the parent's writer"
        assert taken <= DEFAULT
        writer.update(np.arange(600), np.ones((600, DIM), np.float32))


RESIDENT = """
import os, sys, warnings
import numpy as np, embedrock as er
from embedrock.storage import budget
budget.memory_limit = lambda: 128 << 20                             # so the default is 64 MiB
warnings.simplefilter("ignore", er.UncommittedWarning)
rng, tables = np.random.default_rng(0), []

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def train(count, rows=500):
    for _ in range(count):
        for table in tables:
            table.update(rng.integers(0, 10**7, rows), np.ones((rows, 16), np.float32))

for number in range(26):
    tables.append(er.Table(10**7, 16, path=f"{sys.argv[1]}/{number}.rock", rule=er.Adam(lr=0.1)))
    if number == 0:
        train(2)                                                    # what is compiled on the way
        before = rss()
        train(300)                                                  # it has all the room
        print(rss() - before)
train(16)
print(rss() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/statm")
def test_the_system_counts_no_more_than_the_default(tmp_path: Path):
    command = [sys.executable, "-c", RESIDENT, str(tmp_path)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    one, all_of_them = map(int, output.split())
    assert 20 * MIB < one < 64 * MIB
    assert all_of_them < 70 * MIB, "and what 26 tables take besides: threads' buffers, files, Python objects"
