"""Tables that get more rows, or open ids: they are the ones that had been made so, and were trained the same."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import embedrock as er
from embedrock.initializers import FromBfloat16
from embedrock.store import compaction
from embedrock.table.table import rows_of
from same_tables import LAGGING, RULES, check_same
from slow import slow
from table_files import store_of

ROWS, MORE, DIM, BATCH = 700, 3000, 6, 40
FAST = er.Adam(lr=0.1), *(rule for rule in LAGGING if isinstance(rule, er.AdamW))


class Home(NamedTuple):
    """Where a table lives, and how it finds its rows."""

    name: str
    options: dict[str, Any]
    is_on_disk: bool = False


HOMES = (
    Home("direct", {"directory": "direct"}),
    Home("hashed", {"directory": "hashed"}),
    Home("on disk, whole", {}, True),
    Home("on disk, whole no longer", {"memory": "260KiB"}, True),
    Home("on disk, cached", {"memory": "100KiB"}, True),
)
in_each_home = pytest.mark.parametrize("location", HOMES, ids=lambda location: location.name)


def make(location: Home, folder: Path, rows: int | None = ROWS, **options: Any) -> er.Table:
    where = {"path": folder / "table"} if location.is_on_disk else {}
    given: dict[str, Any] = {"seed": 7, "init": er.Normal(std=0.1), **location.options, **where, **options}
    return er.Table(rows, DIM, **given)


class Twins:
    """A table that will grow, and one that has been made so; both are stepped alike."""

    def __init__(self, table: er.Table, rows: int | None) -> None:
        spec = table.spec
        self.table = table
        self.made = er.Table(rows, DIM, rule=spec.rule, init=spec.init, seed=spec.seed, dtype=spec.dtype)
        self._rng = np.random.default_rng(0)

    def train(self, below: int, steps: int = 8) -> None:
        for _ in range(steps):
            ids, grads = self._rng.integers(0, below, BATCH), self._rng.standard_normal((BATCH, DIM))
            for table in (self.table, self.made):
                table.update(ids, grads.astype(np.float32))

    def close(self) -> None:
        if self.table.is_on_disk:
            self.table.commit()
        self.table.close()

    def check(self) -> None:
        check_same(self.table, self.made)
        ids = np.arange(MORE)
        np.testing.assert_array_equal(self.table.lookup(ids), self.made.lookup(ids))


@in_each_home
@pytest.mark.parametrize("rows", [MORE, None])
@pytest.mark.parametrize("rule", [*FAST, *slow(*(rule for rule in RULES if rule not in FAST))], ids=repr)
def test_a_grown_table_is_the_one_that_was_made_so(location: Home, rows: int | None, rule: er.Rule, tmp_path: Path):
    if location.options.get("directory") == "direct" and rows is None:
        location = Home("auto", {})
    twins = Twins(make(location, tmp_path, rule=rule), rows)
    twins.train(ROWS)
    if location.is_on_disk:
        twins.table.commit()
        twins.train(ROWS)
    before = twins.table.lookup(np.arange(ROWS))
    twins.table.grow(rows)
    assert twins.table.rows == rows
    np.testing.assert_array_equal(twins.table.lookup(np.arange(ROWS)), before)
    twins.check()
    twins.train(MORE)
    twins.check()
    twins.close()


@pytest.mark.parametrize(
    "location", [location for location in HOMES if location.is_on_disk], ids=lambda location: location.name
)
@pytest.mark.parametrize("rows", [MORE, None])
def test_growing_is_durable_with_the_next_commit(location: Home, rows: int | None, tmp_path: Path):
    twins = Twins(make(location, tmp_path, rule=FAST[0]), rows)
    twins.train(ROWS)
    first = twins.table.commit(name="before")
    early = copy.deepcopy(twins.made)
    twins.table.grow(rows)
    assert twins.table.uncommitted
    with pytest.warns(er.UncommittedWarning):
        twins.table.close()
    path = tmp_path / "table"
    twins.table = er.open(path)
    assert twins.table.rows == ROWS
    twins.table.grow(rows)
    twins.train(MORE)
    twins.table.commit()
    twins.table.compact()
    twins.check()
    assert twins.table.verify().problems == []
    twins.table.close()
    with er.open(path, mode="r", at=first) as reader:
        assert reader.rows == ROWS
        np.testing.assert_array_equal(reader.lookup(np.arange(ROWS)), early.lookup(np.arange(ROWS)))
        with pytest.raises(er.ReadOnlyTableError):
            reader.grow(rows)
    with er.Table(rows, DIM, path=path) as table:
        twins.table = table
        twins.check()
        twins.train(MORE)
        twins.check()
        table.rollback(first)  # and back to the rows of that commit
        assert table.rows == ROWS
        with pytest.raises(er.IdError):
            table.lookup([ROWS])


def test_growing_writes_what_changed_and_nothing_else(tmp_path: Path):
    with er.Table(10**5, 16, path=tmp_path / "t", rule=er.SGD(), memory="2MiB", seed=0) as table:
        table.assign(np.arange(8000), np.ones((8000, 16)))
        table.commit()
        table.compact()
        table.assign([3, 4], np.zeros((2, 16)))
        before = table.stats()
        for rows in (10**6, 10**9, None):
            table.grow(rows)
            table.commit()
        after = table.stats()
        assert after["bytes_written"] - before["bytes_written"] == 2 * (16 * 4 + 4)
        assert after["cache_rows"] >= 0.7 * before["cache_rows"]  # the index of 10**9 rows takes its part of the budget
        np.testing.assert_array_equal(table.lookup([3, 5]), [[0.0] * 16, [1.0] * 16])


@pytest.mark.parametrize("how", ["compact", "relieve"])
def test_a_compaction_before_the_commit_is_that_of_the_rows_of_before(how: str, tmp_path: Path):
    """A commit has the ids of its own rows only, or it cannot be opened."""
    with er.Table(ROWS, DIM, path=tmp_path / "t", seed=0) as table:
        table.assign(np.arange(200, ROWS), np.ones((ROWS - 200, DIM)))
        table.commit()
        table.grow(MORE)
        store = store_of(table)
        if how == "relieve":
            compaction.relieve(store, MORE, lambda: True)
        assert (table.compact(), store.base_is_ahead) == ((2, False) if how == "compact" else (1, True))
        with er.open(tmp_path / "t", mode="r") as reader:
            assert (reader.rows, reader.stats()["rows_touched"]) == (ROWS, ROWS - 200)
        table.commit()
    with er.open(tmp_path / "t") as table:
        assert (table.rows, table.stats()["rows_touched"], table.verify().problems) == (MORE, ROWS - 200, [])


def test_rows_that_move_in_ram_are_hardly_there_twice():
    table = er.Table(200_000, 64, rule=er.SGD(), directory="hashed", seed=0)
    ids = np.random.default_rng(0).permutation(200_000)[:100_000]
    table.assign(ids, np.ones((len(ids), 64)))
    before = rows_of(table).tier
    table.grow(10**6)
    after = rows_of(table).tier
    assert after is not before
    assert before.arena.resident_bytes < 3 << 20 < 24 << 20 < after.arena.resident_bytes
    assert (table.lookup(ids) == 1).all()


@in_each_home
def test_plans_gradients_and_tickets_of_before(location: Home, tmp_path: Path):
    twins = Twins(make(location, tmp_path, rule=FAST[0]), MORE)
    twins.train(ROWS)
    ids, ones = np.arange(0, 60, 2), np.ones((30, DIM), np.float32)
    plan, pin = twins.table.plan(ids), twins.table.bring(np.arange(50, 90))
    twins.table.read(plan)
    gradients = twins.table.sum(plan, ones)
    twins.table.check_step(gradients)
    twins.table.grow(MORE)
    np.testing.assert_array_equal(twins.table.read(plan), twins.made.lookup(ids))
    twins.table.step(gradients)
    twins.made.update(ids, ones)
    pin.release()
    twins.train(MORE)
    twins.check()
    twins.close()


# ---------------------------------------------------------------- what is refused, and changes nothing


@in_each_home
@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (ROWS - 1, r"`rows` of .* can only grow: got 699, and it has 700\. For fewer, call shrink\(699\)"),
        (0, r"`rows` must be a whole number from 1"),
        (True, r"`rows` must be a whole number from 1"),
        ("1000", r"`rows` must be a whole number from 1 .*got '1000'"),
        (2**63, r"`rows` must be a whole number from 1"),
    ],
)
def test_what_is_no_larger_table_is_refused(location: Home, rows: Any, problem: str, tmp_path: Path):
    with make(location, tmp_path, rule=FAST[0]) as table:
        table.grow(ROWS)  # as many as there are: nothing happens, as in a cell of a notebook that is run again
        with pytest.raises(er.ArgumentError, match=problem):
            table.grow(rows)
        assert (table.rows, table.uncommitted) == (ROWS, False)


def test_open_ids_stay_open():
    table = er.Table(None, DIM)
    table.grow(None)
    with pytest.raises(er.ArgumentError, match=r"got 5, and it takes any int64 as an id"):
        table.grow(5)


def test_a_table_that_would_not_fit_stays_as_it_is(tmp_path: Path):
    direct = er.Table(1000, 64, rule=er.SGD(), directory="direct", memory="1MiB", seed=0)
    direct.update([5], np.ones((1, 64)))
    expected = direct.lookup(np.arange(1000))
    with pytest.raises(er.MemoryBudgetError, match='Pass directory="hashed"'):
        direct.grow(10**6)
    with pytest.raises(er.ArgumentError, match=r"open ids .*which only a hashed directory can hold"):
        direct.grow(None)
    assert direct.rows == 1000
    np.testing.assert_array_equal(direct.lookup(np.arange(1000)), expected)
    with er.Table(1, 64, path=tmp_path / "t", memory=er.Table(1, 64).memory_for(1), seed=0) as table:
        with pytest.raises(er.MemoryBudgetError, match="Raise memory="):
            table.grow(10**9)
        assert (table.rows, table.uncommitted) == (1, False)


def test_first_values_of_an_array_come_from_a_larger_one(tmp_path: Path):
    rng = np.random.default_rng(0)
    array = rng.standard_normal((MORE, DIM)).astype(np.float32)
    expected, both = array.copy(), list[dict[str, Any]](({}, {"path": tmp_path / "t"}))
    expected[3] -= 1
    for options in both:
        with er.Table(ROWS, DIM, init=er.FromArray(array[:ROWS]), rule=er.SGD(lr=1), **options) as table:
            table.update([3], np.ones((1, DIM)))
            with pytest.raises(er.ArgumentError, match=rf"array of {ROWS} rows: got no other one for {MORE} rows"):
                table.grow(MORE)
            other = array.copy()
            other[5] += 1
            for wrong in (er.FromArray(other), er.FromArray(array[:-1]), FromBfloat16(np.ones((MORE, DIM), np.int16))):
                with pytest.raises(er.ArgumentError, match=rf"of which the first {ROWS} are those of the old one"):
                    table.grow(MORE, wrong)
            assert table.rows == ROWS
            table.grow(MORE, er.FromArray(array))
            np.testing.assert_array_equal(table.lookup(np.arange(MORE)), expected)
            if options:
                table.commit()
    with er.open(tmp_path / "t", init=er.FromArray(array)) as table:
        np.testing.assert_array_equal(table.lookup(np.arange(MORE)), expected)
    with pytest.raises(er.ArgumentError, match=r"stays Normal\(mean=0.0, std=1.0\) when it grows"):
        er.Table(ROWS, DIM).grow(MORE, er.FromArray(array))


def test_what_is_asked_of_a_table_of_fewer_rows_says_how_it_grows(tmp_path: Path):
    er.Table(ROWS, DIM, path=tmp_path / "t").close()
    with pytest.raises(er.TableFileError, match=rf"rows differ.*er.open\(path\) and table.grow\({MORE}\)"):
        er.Table(MORE, DIM, path=tmp_path / "t")
    with pytest.raises(er.TableFileError) as error:
        er.Table(ROWS - 1, DIM, path=tmp_path / "t")
    assert "grow" not in str(error.value)


def test_a_member_whose_rows_leave_counts_them_still_when_its_ids_become_open(tmp_path: Path):
    group = er.Group(path=tmp_path / "g", memory="1MiB")
    table = group.table("a", ROWS, DIM, rule=er.SGD(lr=0.1), eviction=er.Eviction(max_rows=BATCH))
    assert table.stats()["direct"]
    for ids in (np.arange(BATCH), np.arange(9, BATCH)):
        table.update(ids, np.ones((len(ids), DIM)))
    table.grow(None)
    assert table.stats()["rows_touched"] == len(table.export()[0]) == BATCH
    table.update([10**12], np.ones((1, DIM)))
    assert table.stats()["rows_touched"] == len(table.export()[0]) == BATCH
    group.commit()
    group.close()


def test_a_state_of_before_says_how_it_is_loaded():
    early, late = (er.Table(rows, DIM, rule=FAST[0], seed=seed) for rows, seed in ((ROWS, 1), (MORE, 2)))
    early.update([5], np.ones((1, DIM)))
    state = early.state()
    late.update([7], np.ones((1, DIM)))
    before = late.lookup(np.arange(MORE))
    with pytest.raises(er.ArgumentError, match=rf"must have rows {MORE}: got {ROWS}\..*Pass grow=True .*table.load_st"):
        late.load_state(state)
    np.testing.assert_array_equal(late.lookup(np.arange(MORE)), before)
    late.load_state(state, grow=True)
    made = er.Table(ROWS, DIM, rule=FAST[0], seed=2)
    made.load_state(state)
    made.grow(MORE)
    early.grow(MORE)
    for table in (made, late):
        check_same(table, early)
        np.testing.assert_array_equal(table.lookup(np.arange(MORE)), early.lookup(np.arange(MORE)))


# ---------------------------------------------------------------- states of fewer rows, and of more


@in_each_home
@pytest.mark.parametrize("rows", [MORE, None])
@pytest.mark.parametrize("rule", [*FAST, *slow(*(rule for rule in RULES if rule not in FAST))], ids=repr)
def test_a_state_of_fewer_rows_is_that_of_a_table_that_grew(
    location: Home, rows: int | None, rule: er.Rule, tmp_path: Path
):
    """It goes on as if all rows had been there from the start; whether it comes as a dict or as a table."""
    if location.options.get("directory") == "direct" and rows is None:
        location = Home("auto", {})
    twins = Twins(er.Table(ROWS, DIM, rule=rule, init=er.Normal(std=0.1), seed=3), rows)
    twins.train(ROWS)
    saved = twins.table
    for state in (saved.state(), saved):
        folder = tmp_path / type(state).__name__
        folder.mkdir()
        twins.table = make(location, folder, rows, rule=rule)
        twins.table.update([2, ROWS + 1], np.ones((2, DIM)))  # all rows begin anew
        twins.table.load_state(state, grow=True)
        assert twins.table.rows == rows
        twins.check()
        twins.close() if state is not saved else None
    twins.train(MORE)
    twins.check()
    twins.close()


def comes_and_goes(rows: int | None, **options: Any) -> er.Table:
    policies = {"admission": er.Admission(min_count=3), "eviction": er.Eviction(max_rows=60)}
    return er.Table(rows, DIM, rule=er.SGD(lr=0.1), seed=1, **policies, **options)


def update_at_random(tables: list[er.Table], below: int, seed: int, kept: int | None = None) -> None:
    """Step all tables by the same batches; those after the first without ids from `kept` on."""
    rng = np.random.default_rng(seed)
    for _ in range(30):
        ids = np.concatenate([[0], rng.integers(1, below, BATCH)])
        grads = rng.standard_normal((len(ids), DIM)).astype(np.float32)
        for table in tables:
            stay = ids < (below if kept is None or table is tables[0] else kept)
            table.update(ids[stay], grads[stay])


@pytest.mark.parametrize("on_disk", [False, True])
def test_counts_and_uses_of_ids_are_kept(on_disk: bool, tmp_path: Path):
    tables = [comes_and_goes(200), comes_and_goes(MORE)]
    update_at_random(tables, 200, 0)
    large = comes_and_goes(MORE, **({"path": tmp_path / "t"} if on_disk else {}))
    large.load_state(tables[0].state(), grow=True)
    update_at_random([large, tables[1]], MORE, 1)
    check_same(large, tables[1])
    counts = [{name: t.stats()[name] for name in ("admitted", "evicted", "pending")} for t in (large, tables[1])]
    assert counts[0] == counts[1]
    if on_disk:
        large.commit()
    large.close()


def test_a_larger_array_of_first_values_begins_with_the_old_one():
    array = np.random.default_rng(0).standard_normal((MORE, DIM)).astype(np.float32)
    small, large = (er.Table(rows, DIM, init=er.FromArray(array[:rows]), rule=er.SGD(lr=1)) for rows in (ROWS, MORE))
    small.update([3], np.ones((1, DIM)))
    large.load_state(small.state(), grow=True)
    array[3] -= 1
    np.testing.assert_array_equal(large.lookup(np.arange(MORE)), array)
    other = er.Table(MORE, DIM, init=er.FromArray(array + 1), rule=er.SGD(lr=1))
    with pytest.raises(er.ArgumentError, match=r"first values .* of digest"):
        other.load_state(small.state(), grow=True)


def test_rows_of_other_sizes_are_no_fewer_rows():
    state = er.Table(ROWS, DIM, seed=1).state()
    for other in (er.Table(MORE, DIM + 1), er.Table(MORE, DIM, dtype="float16"), er.Table(MORE, DIM, init=er.Zeros())):
        with pytest.raises(er.ArgumentError, match=r"must have (dim|dtype|init)"):
            other.load_state(state, grow=True)
    damaged = er.Table(ROWS, DIM, seed=1).state()
    damaged |= {"ids": np.array([ROWS]), "records": np.zeros((1, damaged["records"].shape[1]), np.uint8)}
    with pytest.raises(er.IdError, match=rf"\[0, {ROWS}\)"):  # no row of the table that was saved
        er.Table(MORE, DIM).load_state(damaged, grow=True)


@pytest.mark.parametrize("grow", [False, True])
@pytest.mark.parametrize("as_table", [False, True])
@pytest.mark.parametrize("saved", [MORE, None])
def test_rows_that_do_not_fit_are_counted_and_cut_on_purpose(saved: int | None, as_table: bool, grow: bool):
    large, small = (er.Table(rows, DIM, rule=FAST[0], seed=seed) for rows, seed in ((saved, 1), (ROWS, 2)))
    large.update([5, ROWS, MORE - 1], np.ones((3, DIM)))
    small.update([7], np.ones((1, DIM)))
    state, before = large if as_table else large.state(), small.lookup(np.arange(ROWS))
    with pytest.raises(er.ArgumentError) as error:
        small.load_state(state, grow=grow)
    assert f"must have rows {ROWS}: got {saved}" in str(error.value)
    line = rf"first call grow\({saved}\)\. 2 rows with records would not fit: shrink\({ROWS}\) cuts them off once"
    assert re.search(line, str(error.value))
    np.testing.assert_array_equal(small.lookup(np.arange(ROWS)), before)
    small.grow(saved)
    small.load_state(state)
    assert small.shrink(ROWS) == 2
    expected = er.Table(ROWS, DIM, rule=FAST[0], seed=1)
    expected.update([5], np.ones((1, DIM)))
    check_same(small, expected)
    np.testing.assert_array_equal(small.lookup(np.arange(ROWS)), expected.lookup(np.arange(ROWS)))


# ---------------------------------------------------------------- tables that shrink


@in_each_home
@pytest.mark.parametrize("rule", [*FAST, *slow(*(rule for rule in RULES if rule not in FAST))], ids=repr)
def test_a_table_that_shrank_is_the_one_that_was_made_so(location: Home, rule: er.Rule, tmp_path: Path):
    table, few, first = make(location, tmp_path, MORE, rule=rule), 500, 0
    made = er.Table(few, DIM, rule=rule, init=er.Normal(std=0.1), seed=7)
    update_at_random([table, made], MORE, 0, kept=few)
    if location.is_on_disk:
        first = table.commit(name="before")
        update_at_random([table, made], MORE, 1, kept=few)
    count = int((table.export()[0] >= few).sum())
    plan = table.plan([few])
    assert count > 0
    assert table.shrink(few) == count
    assert table.shrink(few) == 0  # as a cell that is run again
    assert table.rows == few
    check_same(table, made)
    np.testing.assert_array_equal(table.lookup(np.arange(few)), made.lookup(np.arange(few)))
    for ask in (lambda: table.lookup([few]), lambda: table.apply(plan, np.ones((1, DIM)))):
        with pytest.raises(er.IdError, match=rf"\[0, {few}\)"):
            ask()
    update_at_random([table, made], few, 2)
    check_same(table, made)
    for each in (table, made):
        each.grow(MORE)
    np.testing.assert_array_equal(table.lookup(np.arange(MORE)), made.lookup(np.arange(MORE)))
    if location.is_on_disk:
        assert table.shrink(few) == 0
        table.commit()
        table.compact()
        table.close()
        table = er.open(tmp_path / "table")
        assert (table.rows, table.verify().problems) == (few, [])
        check_same(table, made)
        with er.open(tmp_path / "table", mode="r", at=first) as reader:
            assert (reader.rows, MORE - 1 in reader.export()[0] or reader.export()[0].max() >= few) == (MORE, True)
        table.rollback(first)
        assert table.rows == MORE
    table.close()


def test_a_shrunken_table_forgets_what_it_counted():
    tables = [comes_and_goes(MORE), comes_and_goes(200)]
    update_at_random(tables, MORE, 0, kept=200)
    tables[0].shrink(200)
    assert tables[0].stats()["pending"] == tables[1].stats()["pending"]
    for table in tables:
        table.grow(MORE)
    for table in tables:
        table.update([MORE - 1], np.ones((1, DIM)))
        table.update([MORE - 1], np.ones((1, DIM)))
        assert MORE - 1 not in table.export()[0]


def test_members_of_a_group_shrink_alone(tmp_path: Path):
    for path in (None, tmp_path / "g"):
        group = er.Group(path=path)
        a, b = (group.table(name, ROWS, DIM, rule=er.SGD(lr=0.1), seed=1) for name in "ab")
        group.update({"a": np.arange(ROWS), "b": np.arange(ROWS)}, {n: np.ones((ROWS, DIM)) for n in "ab"})
        before = b.lookup(np.arange(ROWS))
        if path:
            group.commit()
        assert a.shrink(100) == ROWS - 100
        np.testing.assert_array_equal(a.lookup(np.arange(100)), before[:100])
        np.testing.assert_array_equal(b.lookup(np.arange(ROWS)), before)
        if path:
            group.commit()
            group.close()
            with er.open(tmp_path / "g", kind=er.Group) as again:
                assert (again["a"].rows, again["b"].rows) == (100, ROWS)
                np.testing.assert_array_equal(again["a"].lookup(np.arange(100)), before[:100])
                np.testing.assert_array_equal(again["b"].lookup(np.arange(ROWS)), before)


def test_a_reader_follows_a_table_that_shrinks(tmp_path: Path):
    with er.Table(ROWS, DIM, path=tmp_path / "t", rule=er.SGD(lr=1), seed=0) as table:
        table.update(np.arange(ROWS), np.ones((ROWS, DIM)))
        first = table.commit()
        with er.open(tmp_path / "t", mode="r") as reader:
            table.shrink(100)
            table.update([5], np.ones((1, DIM)))
            table.commit()
            assert reader.refresh()
            assert reader.rows == 100
            np.testing.assert_array_equal(reader.lookup(np.arange(100)), table.lookup(np.arange(100)))
        with pytest.raises(er.HistoryDroppedError):
            list(table.changes(first))


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (ROWS + 1, r"`rows` .* must shrink: got 701, and it has 700\. Call grow\(701\)"),
        (0, "whole number from 1"),
        (None, "whole"),
    ],
)
def test_what_is_no_smaller_table_is_refused(rows: Any, problem: str):
    table = er.Table(ROWS, DIM)
    with pytest.raises(er.ArgumentError, match=problem):
        table.shrink(rows)
    assert table.rows == ROWS


def test_an_array_of_first_values_is_cut(tmp_path: Path):
    array = np.random.default_rng(0).standard_normal((ROWS, DIM)).astype(np.float32)
    table = er.Table(ROWS, DIM, init=er.FromArray(array), path=tmp_path / "t")
    table.assign([ROWS - 1], np.ones((1, DIM)))
    assert table.shrink(100) == 1
    table.commit()
    table.close()
    with er.open(tmp_path / "t", init=er.FromArray(array[:100])) as again:
        np.testing.assert_array_equal(again.lookup(np.arange(100)), array[:100])


def test_rows_of_a_published_table_stay(tmp_path: Path):
    safetensors = pytest.importorskip("safetensors.numpy")
    safetensors.save_file({"rows": np.ones((ROWS, DIM), np.float32)}, tmp_path / "model.safetensors")
    table = er.Table(ROWS, DIM, init=er.FromSafetensors(tmp_path, "rows"))
    with pytest.raises(er.ArgumentError, match="cannot shrink: its rows are those of FromSafetensors"):
        table.shrink(10)
    state = table.state()
    with pytest.raises(er.ArgumentError) as error:
        er.Table(MORE, DIM).load_state(state, grow=True)
    assert "must have init" in str(error.value)
