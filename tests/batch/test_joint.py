"""A joint plan has of each table what its own plan is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import embedrock as er
from embedrock.batch import plan as planning
from embedrock.batch.gradients import RowGradients, as_one
from embedrock.batch.plan import NO_DIRECT, Plan, bounds_of, make_plan, plan_of_rows, plan_tables, sources_of
from embedrock.storage.slot_index import HashIndex
from slow import examples

ids_of_tables = st.lists(st.lists(st.integers(-3, 9) | st.sampled_from((-(2**63), 2**63 - 1)), max_size=12), max_size=6)


def planned(ids: list[np.ndarray], low: int = -(2**63), high: int = 2**63 - 1, **options: Any) -> Plan | None:
    """The plan of tables, whose ids are those of two features each."""
    features = [part for each in ids for part in np.split(each, [len(each) // 3])]
    tables = np.array([[2 * k, 2 * k + 2, low, high, k << 40] for k in range(len(ids))], np.int64).reshape(-1, 5)
    return plan_tables(sources_of(features), tables, bounds_of([len(each) for each in ids]), **options)


@pytest.mark.parametrize("threads", [1, 3])
@settings(max_examples=examples(50))
@given(tables=ids_of_tables, small=st.sampled_from((1, 4, 1 << 16)))
def test_each_table_finds_its_own_plan(threads: int, tables: list[list[int]], small: int) -> None:
    er.set_threads(threads)
    ids = [np.array(each, np.int64) for each in tables]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "SMALL_BATCH", small)
        patch.setattr(planning, "PARTITION_IDS", 1)  # at least two partitions
        patch.setattr(planning, "WORKER_IDS", 2)
        plan, alone = planned(ids), [make_plan(each) for each in ids]
    assert plan is not None
    assert plan.positions.tolist() == np.cumsum([0, *map(len, ids)]).tolist()
    for k, own in enumerate(alone):
        rows, start, stop = plan.of(k), plan.positions[k], plan.positions[k + 1]
        np.testing.assert_array_equal(plan.ids[rows], own.ids)
        np.testing.assert_array_equal(plan.inverse[start:stop] - rows.start, own.inverse)
        np.testing.assert_array_equal(plan.starts[rows.start : rows.stop + 1] - start, own.starts)
        np.testing.assert_array_equal(plan.order[start:stop] - start, own.order)


def test_large_batches_are_cut_as_alone() -> None:
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 50_000, size) for size in (70_000, 10, 66_000)]
    plan = planned(ids)
    assert plan is not None
    for k, each in enumerate(ids):
        np.testing.assert_array_equal(plan.ids[plan.of(k)], make_plan(each).ids)


def test_rows_planned_once_each() -> None:
    ids = np.arange(5000)
    plan = plan_of_rows(ids, np.where(ids % 2, ids, -1), 3)
    assert (plan.shape, plan.missing, plan.epoch) == ((5000,), 2500, 3)
    np.testing.assert_array_equal(plan.ids[plan.inverse], ids)
    assert plan.starts.tolist() == list(range(5001))


def test_gradients_of_tables_are_parts_of_one_array() -> None:
    ids, slots, values = np.array([4, 9, 2, 4, 7]), np.array([0, 1, -1, 3, 4]), np.float32(np.arange(15)).reshape(5, 3)
    plan = plan_of_rows(ids, slots, 7, np.array([0, 2, 2, 5]))
    whole = RowGradients(plan, values, 6.0, [1.0, 2.0, 3.0])
    parts = [whole.of(table) for table in range(3)]
    assert [part.square_norm for part in parts] == [1.0, 2.0, 3.0]
    assert [part.has_width(3) for part in parts] == [True] * 3
    assert not parts[0].has_width(4)
    assert as_one(parts) is whole
    last = as_one(parts[1:])
    assert (last.plan.rows.tolist(), last.plan.slots.tolist(), last.plan.ids.tolist()) == (
        [0, 0, 3],
        [-1, 3, 4],
        [2, 4, 7],
    )
    assert (last.squares, last.of(1).square_norm) == ([2.0, 3.0], 3.0)
    assert np.shares_memory(last.values, values)
    assert "plan" not in vars(parts[2])  # nobody has asked for it
    np.testing.assert_array_equal(parts[2].values, values[2:])
    plan = parts[2].plan
    assert (plan.ids.tolist(), plan.missing, plan.epoch, plan.rows.tolist()) == ([2, 4, 7], 1, 7, [0, 3])
    assert plan is parts[2].plan
    alone = RowGradients(plan, parts[2].values, 3.0)
    assert alone.of(0) is alone
    assert as_one([alone]) is alone
    with pytest.raises(AttributeError, match="RowGradients has no attribute 'rows'"):
        whole.of(2).rows  # noqa: B018


def test_gradients_that_were_not_summed_together_are_concatenated() -> None:
    ids, slots, values = np.array([4, 9, 2, 4, 7]), np.array([0, 1, -1, 3, 4]), np.float32(np.arange(15)).reshape(5, 3)
    whole = RowGradients(plan_of_rows(ids, slots, 7, np.array([0, 2, 2, 5])), values, 6.0, [1.0, 2.0, 3.0])
    parts = [whole.of(table) for table in range(3)]
    for others in (parts[::-1], [parts[0], parts[2]], [parts[0], parts[1].scaled(2.0), parts[2]]):
        one = as_one(others)
        np.testing.assert_array_equal(one.plan.ids, np.concatenate([part.plan.ids for part in others]))
        np.testing.assert_array_equal(one.values, np.concatenate([part.values for part in others]))
        assert one.plan.rows.tolist() == np.cumsum([0, *(len(part.plan.ids) for part in others)]).tolist()
        assert (one.plan.missing, one.plan.epoch) == (1, 7)
    again = as_one([whole, parts[0]])
    assert (again.plan.rows.tolist(), again.plan.ids.tolist()) == ([0, 2, 2, 5, 7], [4, 9, 2, 4, 7, 4, 9])


def test_too_many_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MAX_IDS", 5)
    with pytest.raises(er.ArgumentError, match="`ids` of one batch must be at most 5: got 6"):
        planned([np.arange(3), np.arange(3)])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("size", [10, 30_000, 70_000])
def test_slots_are_found_and_ids_outside_are_refused(threads: int, size: int) -> None:
    er.set_threads(threads)
    ids, index = [np.random.default_rng(k).integers(0, 20_000, size) for k in range(2)], HashIndex(1 << 20)
    keys = np.concatenate([np.unique(each) + (k << 40) for k, each in enumerate(ids)])
    index.insert(keys[keys % 3 > 0])
    plan = planned(ids, 0, 19_999, index=index.index, epoch=7)
    assert plan is not None
    found = index.find(plan.ids + np.repeat([0, 1 << 40], np.diff(plan.rows)))
    np.testing.assert_array_equal(plan.slots, found)
    assert (plan.missing, plan.epoch, plan.shape) == (np.count_nonzero(found < 0), 7, (2 * size,))
    assert not any(each.flags.writeable for each in (plan.ids, plan.slots, plan.inverse, plan.starts, plan.order))
    assert plan.nbytes >= 12 * 2 * size
    ids[1][-1] = 20_000
    assert planned(ids, 0, 19_999, index=(NO_DIRECT, index.index[1])) is None
