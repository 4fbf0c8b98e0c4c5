"""Commits that write all rows where most have changed, so that no older file is needed and nothing is to be folded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.store.compaction import compact
from embedrock.table import upkeep
from embedrock.table.upkeep import BackgroundCompaction
from on_system import on
from same_tables import check_same
from suites.faultfs import FaultFS
from table_files import files_of, store_of

DIM, MOST, BATCH = 30, 60, 40


@pytest.fixture(autouse=True)
def due(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return the compactions that were due after a commit; none is made, as it could be under way at the next one."""
    found: list[object] = []
    monkeypatch.setattr(upkeep, "LEAST_COMPACTED_BYTES", 1)
    monkeypatch.setattr(BackgroundCompaction, "compact", lambda _, goals: found.append(goals))
    return found


def pair(system: FaultFS, **options: Any) -> tuple[er.Table, er.Table]:
    options = {"rule": er.Adam(lr=0.1), "seed": 0, "eviction": er.Eviction(max_rows=MOST), **options}
    return on(system).Table(None, DIM, path="/t", keep=1, **options), er.Table(None, DIM, **options)


def step(tables: tuple[er.Table, ...], number: int) -> None:
    """Step rows of which a quarter is new, and as many are evicted."""
    ids = (np.arange(BATCH) + number * BATCH // 4) * 10**12
    for table in tables:
        table.update(ids, np.full((BATCH, DIM), 1.0 + number, np.float32))


def counts_of(table: er.Table) -> tuple[int, int]:
    """Return how many files of each kind the last commit has: of its base, and logs."""
    (content,) = files_of(table).table_folder.manifest.pools
    return len(content.base), len(content.delta)


def test_a_commit_of_most_rows_needs_no_older_file(due: list[object]):
    system = FaultFS()
    table, ram = pair(system)
    files = []
    for number in range(12):
        if number == 3:  # rows have left by now
            due.clear()
        step((table, ram), number)
        table.commit()
        files.append(counts_of(table))
    assert files[3:] == [(0, 1)] * 9
    assert due == []
    table.close()
    again = on(system).open("/t")
    check_same(again, ram)
    assert again.verify().problems == []
    step((again, ram), 12)
    check_same(again, ram)
    again.commit()
    again.close()


def test_a_base_that_no_commit_has_goes_with_the_older_files():
    system = FaultFS()
    table, ram = pair(system)
    for number in range(3):
        step((table, ram), number)
        table.commit()
    compact(store_of(table), None, lambda: False)
    assert system.listdir("/t/base") != []
    step((table, ram), 3)
    table.commit()
    assert counts_of(table) == (0, 1)
    assert [name for folder in system.listdir("/t/base") for name in system.listdir(f"/t/base/{folder}")] == []
    check_same(table, ram)
    table.close()


def test_rows_that_leave_while_it_is_written_stay_away():
    system = FaultFS()
    table, ram = pair(system)
    for number in range(20):
        step((table, ram), number)
        table.commit(wait=False)
        if number % 3 == 0:
            forgotten = [number * BATCH // 4 * 10**12]
            assert table.forget(forgotten) == ram.forget(forgotten) == 1
    table.commit()
    check_same(table, ram)
    table.compact()
    table.close()
    with on(system).open("/t") as again:
        check_same(again, ram)


def test_what_a_commit_places_late_stands_behind_what_is_newer():
    """A row that it has on its way may be forgotten, come back, and leave for the next log before it is placed."""
    table, _ = pair(FaultFS())
    table.update([7, 8], np.ones((2, DIM), np.float32))
    table.commit()
    store, ids = store_of(table), np.array([7, 8])
    late = store.locate(ids)
    store.discard(ids)
    store.append(np.zeros((1, table.spec.record_bytes), np.uint8), np.array([0]), ids[:1])
    newer = int(store.locate(ids[:1])[0])
    store.place(ids, late)
    assert newer > late[0]
    assert store.locate(ids).tolist() == [newer, -1]
    store.give_up()
    del table, store


def test_one_that_fails_leaves_all_as_it_was():
    system = FaultFS()
    table, ram = pair(system)
    for number in range(5):
        step((table, ram), number)
        table.commit()
    kept, files = store_of(table).content, counts_of(table)
    step((table, ram), 5)
    system.capacity = 0
    with pytest.raises(er.CommitError, match="the disk is full"):
        table.commit()
    system.capacity = None
    assert (store_of(table).content, counts_of(table)) == (kept, files)
    table.compact()  # others may fold again
    check_same(table, ram)
    step((table, ram), 6)
    table.commit()
    table.close()
    with on(system).open("/t") as again:
        check_same(again, ram)


def test_where_few_rows_have_changed_only_these_are_written():
    table, ram = pair(FaultFS())
    for number in range(6):
        step((table, ram), number)
        table.commit()
    before = table.stats()["bytes_written"]
    for each in (table, ram):
        each.update([5 * BATCH // 4 * 10**12], np.ones((1, DIM), np.float32))
    table.commit()
    assert table.stats()["bytes_written"] - before == ram.spec.record_bytes + 4
    table.close()
