"""Frozen rows: no step changes them, and all other rows step as if their gradients had been left out by hand."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.errors import ArgumentError, IdError, IdTypeError, NonFiniteGradientError, UnsupportedError
from embedrock.spec.frozen import MOST_RANGES, FrozenRows
from same_tables import RULES
from slow import slow

ROWS, DIM, BATCH = 50, 4, 20
FROZEN: Any = [3, range(10, 20)]
RANGES = [[3, 4], [10, 20]]
EVERY = np.arange(ROWS)
STAYS = np.isin(EVERY, [3, *range(10, 20)])
LOW, HIGH = -(2**63), 2**63
MOVES_ALL = [er.AdamW(dense=True), er.Ftrl(dense=True)]
KINDS: dict[str, dict[str, Any]] = {
    "direct": {"directory": "direct"},
    "hashed": {"directory": "hashed"},
    "open ids": {"rows": None},
    "16 bits": {"dtype": "bfloat16"},
    "on disk": {"memory": "24KiB"},
    "member": {},
    "member on disk": {"memory": "96KiB"},
}


def ranges_of(table: er.Table) -> list[list[int]]:
    return [] if table.spec.frozen is None else table.spec.frozen.ranges


def made(kind: str, folder: Path, frozen: Any, rule: er.Rule) -> er.Table:
    """Return a table of a kind, in RAM, on disk or in a group."""
    options: dict[str, Any] = {"rule": rule, "seed": 1, "frozen": frozen, "rows": ROWS, **KINDS[kind]}
    path, memory = str(folder) if "on disk" in kind else None, options.pop("memory", None)
    if "member" not in kind:
        return er.Table(dim=DIM, path=path, memory=memory, **options)
    return er.Group(path=path, memory=memory).table("rows", dim=DIM, **options)


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(step)
    return rng.integers(0, ROWS, BATCH), rng.standard_normal((BATCH, DIM)).astype(np.float32)


def step_both(table: er.Table, other: er.Table, steps: range) -> None:
    """Step a table, and another one that gets no gradients of frozen rows."""
    for step in steps:
        ids, grads = batch(step)
        kept = ~STAYS[ids]
        for each, own, of_own in ((table, ids, grads), (other, ids[kept], grads[kept])):
            if each.group is not None and step % 2:
                each.group.update({"rows": own}, {"rows": of_own})
            else:
                each.update(own, of_own)
            each.lookup(EVERY[:BATCH])


def check_same_rows(table: er.Table, other: er.Table, first: np.ndarray) -> None:
    now = table.lookup(EVERY)
    np.testing.assert_array_equal(now, other.lookup(EVERY))
    np.testing.assert_array_equal(now[STAYS], first[STAYS])
    assert (now[~STAYS] != first[~STAYS]).any()
    np.testing.assert_array_equal(table.export()[0], other.export()[0])  # no step makes a record of a frozen row


# -------------------------------------------------------------------- the argument


@pytest.mark.parametrize(
    ("given", "ranges"),
    [
        (5, [[5, 6]]),
        (np.uint64(5), [[5, 6]]),
        (range(3), [[0, 3]]),
        (range(0), []),
        ([], []),
        (range(0, 9, 4), [[0, 1], [4, 5], [8, 9]]),
        (range(9, 0, -1), [[1, 10]]),
        (np.array([[3, 1], [2, 9]]), [[1, 4], [9, 10]]),
        (np.arange(10**6), [[0, 10**6]]),
        ([7, range(5), 5, range(2, 4)], [[0, 6], [7, 8]]),
        ((1, 2, range(10**18)), [[0, 10**18]]),
        ([HIGH - 1, LOW, range(-5, -3)], [[LOW, LOW + 1], [-5, -3], [HIGH - 1, HIGH]]),
        (range(LOW, HIGH), [[LOW, HIGH]]),
    ],
)
def test_ids_and_ranges_become_ranges(given: Any, ranges: list[list[int]]):
    frozen = FrozenRows.of(given)
    assert frozen is not None
    assert frozen.ranges == ranges
    assert bool(frozen) == bool(ranges)
    ends = [end for pair in ranges for end in pair]
    ids = [each for end in ends for each in (end - 1, end, end + 1) if LOW <= each < HIGH]
    inside = [any(start <= each < stop for start, stop in ranges) for each in ids]
    assert frozen.has(np.array(ids, np.int64)).tolist() == inside
    assert FrozenRows.of(frozen) is frozen
    assert FrozenRows(**json.loads(json.dumps(frozen.describe()))).ranges == ranges


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (True, ArgumentError, r"must be the ids of rows that stay as they are: got True.*requires_grad_\(False\)"),
        (0.5, IdTypeError, "`frozen` must be integers"),
        (["a"], IdTypeError, "`frozen` must be integers"),
        (range(HIGH, HIGH + 2), ArgumentError, "ranges of int64"),
        (range(0, 4 * MOST_RANGES, 2), ArgumentError, "at most 65,536 ids and ranges of ids: got 65,537"),
        (np.arange(0, 4 * MOST_RANGES, 2), ArgumentError, "at most 65,536 ids and ranges of ids: got 131,072"),
        ([3, range(8, 51)], ArgumentError, r"ids in \[0, 50\), which the table has: got range\(8, 51\)\. Leave out"),
        (-1, ArgumentError, r"ids in \[0, 50\).*got range\(-1, 0\)"),
    ],
)
def test_other_arguments_are_refused(given: Any, error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        er.Table(ROWS, DIM, frozen=given)
    with pytest.raises(error, match=text):
        er.Group().table("rows", ROWS, DIM, frozen=given)


@pytest.mark.parametrize("ranges", [[[3, 3]], [[5, 4]], [[1, 3], [2, 4]], [[1, 2.0]], [[0, True]], [[0, 2**64]]])
def test_forged_ranges_are_refused(ranges: Any):
    with pytest.raises(ArgumentError, match=r"ranges of int64 that ascend: got \[\["):
        FrozenRows(ranges)


def test_a_large_range_takes_no_room():
    table = er.Table(None, DIM, rule=er.SGD(lr=1.0), frozen=range(10**15), seed=0)
    before = table.lookup([5, -5])
    table.update([5, -5], np.ones((2, DIM), np.float32))
    np.testing.assert_array_equal(table.lookup([5, -5]), before - np.array([[0], [1]], np.float32))
    assert table.stats()["rows_touched"] == 1


# -------------------------------------------------------------------- steps


@pytest.mark.parametrize("rule", [rule for rule in RULES if not rule.MOVES_ALL or rule.history() is None], ids=str)
@pytest.mark.parametrize("kind", ["direct", *slow(*(kind for kind in KINDS if kind != "direct"))])
def test_other_rows_have_the_bits_of_steps_without_frozen_ones(kind: str, rule: er.Rule, tmp_path: Path):
    check_steps(kind, rule, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_rows_stay_wherever_rows_live(kind: str, tmp_path: Path):
    check_steps(kind, er.AdamW(lr=0.1, weight_decay=0.5), tmp_path)


def check_steps(kind: str, rule: er.Rule, folder: Path) -> None:
    table, other = (made(kind, folder / name, frozen, rule) for name, frozen in (("a", FROZEN), ("b", None)))
    first = table.lookup(EVERY)
    step_both(table, other, range(12))
    check_same_rows(table, other, first)
    if not table.is_on_disk:
        mine, its = table.state(), other.state()
        orders = [np.argsort(state["ids"]) for state in (mine, its)]
        np.testing.assert_array_equal(mine["records"][orders[0]], its["records"][orders[1]])
    step_both(table, other, range(12, 16))
    check_same_rows(table, other, first)
    assert table.steps == 16
    for each in (table, other):
        whole: Any = each if each.group is None else each.group
        if each.is_on_disk:
            whole.commit()
        whole.close()


def test_a_batch_of_frozen_rows_alone_counts_as_a_step():
    table = er.Table(ROWS, DIM, rule=er.Adam(lr=0.1), frozen=FROZEN, seed=0)
    before = table.lookup([3, 11])
    table.update([3, 11], np.ones((2, DIM), np.float32))
    np.testing.assert_array_equal(table.lookup([3, 11]), before)
    assert (table.steps, table.stats()["rows_touched"]) == (1, 0)


def test_gradients_of_frozen_rows_are_no_part_of_sums_and_their_errors():
    table = er.Table(ROWS, DIM, rule=er.SGD(lr=0.1), frozen=FROZEN, seed=0)
    grads = np.ones((3, DIM), np.float32)
    grads[0] = np.nan
    summed = table.sum(table.plan([3, 4, 4]), grads)
    assert summed.plan.ids.tolist() == [4]
    assert summed.norm == 2 * DIM**0.5
    table.update([3, 4, 4], grads)  # NaN of a frozen row alone
    stays = table.lookup([3])
    table.step(er.RowGradients.sum(table.plan([3, 4]), np.ones((2, DIM), np.float32)))  # sums made elsewhere
    np.testing.assert_array_equal(table.lookup([3]), stays)
    assert table.export()[0].tolist() == [4]
    before = table.lookup(EVERY)
    with pytest.raises(NonFiniteGradientError, match=r"in 1 of 2 rows, first ids \[5\]"):
        table.update([5, 3, 4], grads)
    np.testing.assert_array_equal(table.lookup(EVERY), before)


@pytest.mark.parametrize("rows", [ROWS, None])
def test_a_table_that_shrinks_keeps_the_frozen_rows_it_still_has(rows: int | None, tmp_path: Path):
    frozen = [3, range(8, 12)] if rows else [-5, 3, range(8, 12)]
    with er.Table(rows, DIM, rule=er.SGD(lr=0.1), frozen=frozen, path=tmp_path / "t", seed=0) as table:
        before, first = table.lookup(EVERY[:10]), table.commit(name="first")
        assert table.shrink(10) == 0
        table.update(EVERY[:10], np.ones((10, DIM), np.float32))
        assert (table.lookup(EVERY[:10]) == before).all(1).nonzero()[0].tolist() == [3, 8, 9]
        small = table.commit(name="small")
        table.rollback(first)
        assert table.spec.frozen is not None
        assert table.spec.frozen.has(np.array([-5, 3, 11])).tolist() == [rows is None, True, True]
    with er.open(tmp_path / "t", mode="r", at=small) as reader:
        assert reader.spec.frozen is not None
        assert reader.spec.frozen.ranges == [[3, 4], [8, 10]]


# -------------------------------------------------------------------- dense rules


@pytest.mark.parametrize("rule", MOVES_ALL, ids=str)
def test_rules_that_move_every_row_are_refused(rule: er.Rule):
    told = r"`frozen` rows cannot stay under .*dense=True.*moves every row in each step\. Leave dense=True out"
    with pytest.raises(UnsupportedError, match=told):
        er.Table(ROWS, DIM, rule=rule, frozen=FROZEN)
    table = er.Table(ROWS, DIM, frozen=FROZEN)
    with pytest.raises(UnsupportedError, match=f"the table: {told}"):
        table.set_rule(rule)
    assert table.rule is None


@pytest.mark.parametrize("rule", [er.Adam(lr=0.1, dense=True), er.Momentum(lr=0.1, dense=True)], ids=str)
def test_a_dense_rule_may_freeze_no_rows_that_it_stepped(rule: er.Rule, tmp_path: Path):
    path = tmp_path / "table"
    with er.Table(ROWS, DIM, rule=rule, path=path, frozen=FROZEN) as table:
        table.update(*batch(0))
        table.commit()
    told = (
        r"`frozen` of .* cannot have more rows after 1 step by .*dense=True.*goes on moving rows that it has stepped\. "
        r"Leave frozen= out.*set_rule\(None, reset_state=True\)"
    )
    with pytest.raises(UnsupportedError, match=told):
        er.Table(ROWS, DIM, rule=rule, path=path, frozen=range(10, 21))
    with er.Table(ROWS, DIM, rule=rule, path=path, frozen=range(10, 13)) as table:  # fewer: they were not stepped
        before = table.lookup(EVERY)
        table.update([3, 11, 4], np.ones((3, DIM), np.float32))
        moved = (table.lookup(EVERY) != before).any(1)
        assert moved[3]
        assert not moved[10:13].any()
        table.commit()
    with er.open(path) as table:  # the remedy
        table.set_rule(None, reset_state=True)
        table.commit()
    with er.Table(ROWS, DIM, rule=rule, path=path, frozen=range(10, 21)) as table:
        before = table.lookup(EVERY)
        for step in range(3):
            table.update(*batch(step))
        np.testing.assert_array_equal(table.lookup(EVERY)[10:21], before[10:21])
        table.commit()


def test_a_state_of_a_dense_rule_is_loaded_into_a_table_that_freezes_no_more():
    rule = er.Momentum(lr=0.1, dense=True)
    source = er.Table(ROWS, DIM, rule=rule, frozen=FROZEN)
    source.update(*batch(0))
    other = er.Table(ROWS, DIM, rule=rule, frozen=range(10, 21))
    with pytest.raises(UnsupportedError, match="cannot have more rows after 1 step"):
        other.load_state(source.state())
    assert other.steps == 0
    er.Table(ROWS, DIM, rule=rule, frozen=3).load_state(source)


# -------------------------------------------------------------------- rows that come and go


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("by", ["use", "recency", "age"])
def test_no_eviction_deletes_them(by: str, on_disk: bool, tmp_path: Path):
    kept, eviction = [5, 101], er.Eviction(max_rows=6, idle=3, by=by)
    tables = [
        er.Table(None, 2, rule=er.SGD(lr=1.0), seed=0, eviction=eviction, frozen=frozen,
                 path=tmp_path / str(frozen) if on_disk else None)
        for frozen in ([5, range(100, 103)], None)
    ]  # fmt: skip
    for table in tables:
        table.assign(kept, np.ones((2, 2)))
        for step in range(20):
            table.update(np.random.default_rng(step).integers(6, 50, 4), np.ones((4, 2), np.float32))
    frozen, other = tables
    np.testing.assert_array_equal(frozen.lookup(kept), np.ones((2, 2)))
    assert set(kept) <= set(frozen.export()[0].tolist())
    assert set(kept).isdisjoint(other.export()[0].tolist())
    assert len(frozen) <= 6
    for table in tables if on_disk else ():
        table.commit()
        table.close()
    for own, stay in ((None, kept), (101, [101])) if on_disk else ():
        with er.Table(None, 2, path=frozen.path, frozen=own) as again:
            for step in range(20):
                again.update(np.random.default_rng(step).integers(6, 50, 4), np.ones((4, 2), np.float32))
            assert [row for row in kept if row in again.export()[0]] == stay
            np.testing.assert_array_equal(again.lookup(stay), np.ones((len(stay), 2)))
            again.commit()


def test_evictions_and_counts_are_those_without_gradients_of_frozen_rows():
    policies: dict[str, Any] = {"admission": er.Admission(2), "eviction": er.Eviction(max_rows=12)}
    table, other = (er.Table(ROWS, DIM, rule=er.SGD(lr=0.1), seed=1, frozen=f, **policies) for f in (FROZEN, None))
    first = table.lookup(EVERY)
    step_both(table, other, range(30))
    check_same_rows(table, other, first)
    assert {name: table.stats()[name] for name in ("admitted", "evicted", "gradients_dropped", "pending")} == {
        name: other.stats()[name] for name in ("admitted", "evicted", "gradients_dropped", "pending")
    }


def test_a_default_row_that_trains_is_refused():
    with pytest.raises(UnsupportedError, match=r"read as the default row, which trains.*Choose another default="):
        er.Table(ROWS, DIM, frozen=FROZEN, admission=er.Admission(2, default="shared"))


# -------------------------------------------------------------------- explicit changes, and readers


def test_explicit_changes_stay_allowed():
    table = er.Table(ROWS, DIM, rule=er.SGD(lr=0.1), frozen=FROZEN, seed=0)
    first = table.lookup([3])
    table.assign([3], np.full((1, DIM), 7.0))
    table.update([3], np.ones((1, DIM), np.float32))
    np.testing.assert_array_equal(table.lookup([3]), np.full((1, DIM), 7.0, np.float32))
    assert table.forget([3]) == 1
    np.testing.assert_array_equal(table.lookup([3]), first)


def test_a_frozen_row_is_there_as_no_step_makes_its_record():
    table = er.Table(None, DIM, frozen=[3, range(10, 20)], seed=0)
    table.assign([4, 11], np.ones((2, DIM)))
    ids = [3, 4, 5, 11, 12]
    assert table.contains(ids).tolist() == [True, True, False, True, True]
    expected = table.lookup(ids)
    expected[2] = 0.0
    np.testing.assert_array_equal(table.lookup(ids, missing="zeros"), expected)
    table.lookup([3, 12], missing="raise")
    with pytest.raises(IdError, match=r"1 id without one, \[5\]"):
        table.lookup(ids, missing="raise")


# -------------------------------------------------------------------- saved with the table


@pytest.mark.parametrize("in_group", [False, True])
def test_an_opened_table_keeps_its_frozen_rows_or_gets_others(in_group: bool, tmp_path: Path):
    path = tmp_path / "table"

    def opened(**given: Any) -> er.Table:
        if in_group:
            return er.Group(path=path).table("rows", ROWS, DIM, **given)
        return er.Table(ROWS, DIM, path=path, **given)

    def closed(table: er.Table) -> None:
        whole: Any = table.group if in_group else table
        whole.commit()
        whole.close()

    closed(opened(rule=er.SGD(lr=1.0), seed=0))
    given = FROZEN, None, 7, [], None
    for frozen, ranges in zip(given, (RANGES, RANGES, [[7, 8]], [], []), strict=True):
        table = opened(frozen=frozen)
        assert ranges_of(table) == ranges
        before = table.lookup(EVERY)
        table.update(EVERY, np.ones((ROWS, DIM), np.float32))
        stays = (table.lookup(EVERY) == before).all(1)
        assert np.flatnonzero(stays).tolist() == [row for own in ranges for row in range(*own)]
        closed(table)
        manifest = max((path / "manifest").glob("*.json")).read_text()
        assert ('"format":9' in manifest) == ('"frozen":{"ranges":' in manifest) == bool(ranges)
    closed(opened(frozen=9))  # no row changes, and the commit has it
    with er.open(path, mode="r") as reader:
        assert ranges_of(reader["rows"] if isinstance(reader, er.Group) else reader) == [[9, 10]]
    if in_group:
        return
    with er.open(path) as table:
        table.rollback(6)
        assert ranges_of(table) == []
    with pytest.raises(er.ReadOnlyTableError, match=r'`frozen` is for training.*opened with mode="r"'):
        er.Table(ROWS, DIM, path=path, mode="r", frozen=3)


def test_a_state_has_them_and_a_table_with_its_own_keeps_these():
    source = er.Table(ROWS, DIM, rule=er.SGD(lr=1.0), frozen=FROZEN, seed=0)
    for state in (source.state(), source):
        for own, ranges in ((None, RANGES), (7, [[7, 8]]), ([], [])):
            table = er.Table(ROWS, DIM, rule=er.SGD(lr=1.0), frozen=own)
            table.load_state(state)
            assert ranges_of(table) == ranges
            before = table.lookup(EVERY)
            table.update(EVERY, np.ones((ROWS, DIM), np.float32))
            assert (table.lookup(EVERY) == before).all(1).sum() == sum(stop - start for start, stop in ranges)
    assert ranges_of(copy.deepcopy(source)) == RANGES


@pytest.mark.parametrize("frozen", [5, [[1, 2]], {"ranges": [[2, 1]]}, {"ranges": 5}, {"other": 1}])
def test_a_damaged_state_is_refused(frozen: Any):
    table = er.Table(ROWS, DIM, seed=0)
    state = er.Table(ROWS, DIM, seed=1).state()
    with pytest.raises(ArgumentError, match="a state for the table is damaged, load another one: "):
        table.load_state({**state, "frozen": frozen})
    assert table.spec.seed == 0


def test_a_member_gets_others_while_it_is_open():
    group = er.Group()
    table = group.table("rows", ROWS, DIM, rule=er.SGD(lr=1.0))
    ids, grads = {"rows": [3, 7]}, {"rows": np.ones((2, DIM), np.float32)}
    for given, stays in ((None, [False, False]), (FROZEN, [True, False]), (7, [False, True]), ([], [False, False])):
        assert group.table("rows", ROWS, DIM, frozen=given) is table
        before = table.lookup([3, 7])
        group.update(ids, grads)
        assert (table.lookup([3, 7]) == before).all(1).tolist() == stays


def test_more_rows_leave_them_as_they_are():
    table = er.Table(ROWS, DIM, rule=er.SGD(lr=1.0), frozen=FROZEN)
    table.grow(None)
    before = table.lookup([3, -1])
    table.update([3, -1], np.ones((2, DIM), np.float32))
    assert (table.lookup([3, -1]) == before).all(1).tolist() == [True, False]
