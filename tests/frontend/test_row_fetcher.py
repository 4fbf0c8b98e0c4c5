"""`RowFetcher`: random programs beside the same tables, stepped by `Table.update` on the gradients of rows."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.batch.plan import SMALL_BATCH
from embedrock.errors import ArgumentError, MemoryBudgetError
from embedrock.frontend.row_fetcher import FetchedRows, RowFetcher
from embedrock.storage.backend import Pin
from embedrock.table.prefetch import prefetch
from embedrock.table.table import rows_of
from same_tables import check_same
from slow import slow

ROWS = 90
WAITING, MOST = 4, 5  # batches at most, and lines of ids in each, of up to 3 ids
DAY = 86_400
INIT = er.Normal(std=0.1)

KINDS: dict[str, list[dict[str, Any]]] = {
    "plain": [
        {"rows": ROWS, "dim": 3, "rule": er.Adam(lr=0.1)},
        {"rows": ROWS, "dim": 4, "rule": er.SGD(lr=0.1), "dtype": "bfloat16"},
        {"rows": None, "dim": 3, "rule": er.Adagrad(lr=0.1), "frozen": [0, range(5, 12)]},
    ],
    "dense": [
        {"rows": ROWS, "dim": 3, "rule": er.AdamW(lr=0.1, weight_decay=0.1, dense=True)},
        {"rows": ROWS, "dim": 3, "rule": er.Ftrl(lr=0.1), "dtype": "float16"},
        {"rows": ROWS, "dim": 2, "rule": er.Adam(lr=0.1, dense=True), "frozen": range(4)},
    ],
    "open": [
        {"rows": None, "dim": 3, "rule": er.Adam(lr=0.1), "admission": er.Admission(2, within=6)},
        {"rows": None, "dim": 3, "rule": er.SGD(lr=0.1), "eviction": er.Eviction(max_rows=40, by="recency")},
        {
            "rows": None,
            "dim": 2,
            "rule": er.Adagrad(lr=0.1),
            "admission": er.Admission(2, default="shared"),
            "eviction": er.Eviction(idle="3d"),
        },
    ],
}
KINDS["mixed"] = [KINDS["plain"][0], KINDS["plain"][1], KINDS["open"][2], KINDS["dense"][0]]
ON_DISK: dict[str, list[dict[str, Any]]] = {
    "plain": [*KINDS["plain"], {"rows": ROWS, "dim": 3, "rule": er.Adam(lr=0.1)}],
    "dense": KINDS["dense"],
    "open": KINDS["open"],
}


class Fetcher(RowFetcher):
    """A `RowFetcher` of one array of ids of each table. Its batches keep their rows, and `ids` has their ids."""

    def __init__(self, tables: Sequence[er.Table]) -> None:
        super().__init__({f"t{k}": table for k, table in enumerate(tables)})
        self.ids: dict[FetchedRows, list[np.ndarray]] = {}

    def plan(self, ids: Sequence[Any], missing: Any = None) -> FetchedRows:
        fetched = super().plan([[own] for own in ids], missing)
        self.ids[fetched] = list(map(np.asarray, ids))
        return fetched

    def places(self, fetched: FetchedRows) -> list[np.ndarray]:
        return [own for (own,) in self.positions(fetched)]

    def read(self, fetched: FetchedRows) -> list[np.ndarray]:
        fetched.rows = super().read(fetched)
        return fetched.rows

    def step(self, fetched: FetchedRows, values: Any, grads: Sequence[Any], *args: Any, **options: Any) -> None:
        super().step(fetched, values, [[] if own is None else [own] for own in grads], *args, **options)


class Program:
    """Tables of a `RowFetcher`, twins of theirs in RAM, and what is drawn for both.

    Args:
        folder: of tables on disk; None: in RAM.
        grouped: the tables are of one group, with one lock.
        slots: rows that the cache of a table on disk holds: by default those of all batches that wait, and of one more.
    """

    def __init__(
        self,
        kinds: Sequence[dict[str, Any]],
        seed: int,
        folder: Path | None = None,
        grouped: bool = False,
        slots: int = 3 * (MOST - 1) * (WAITING + 1),
    ) -> None:
        self.rng, self.kinds = np.random.default_rng(seed), kinds
        made = [{"init": INIT, "seed": seed + k, **kind} for k, kind in enumerate(kinds)]
        self.twins = [er.Table(**each) for each in made]
        self.owner: Any = None
        if grouped:
            memory = sum(twin.memory_for(slots) for twin in self.twins)
            self.owner = er.Group() if folder is None else er.Group(path=folder, memory=memory)
            self.tables = [self.owner.table(f"t{k}", **each) for k, each in enumerate(made)]
        else:
            places = [
                {} if folder is None else {"path": folder / str(k), "memory": twin.memory_for(slots)}
                for k, twin in enumerate(self.twins)
            ]
            self.tables = [er.Table(**each, **place) for each, place in zip(made, places, strict=True)]
        self.fetcher = Fetcher(self.tables)
        self.is_on_disk, self.now = folder is not None, 0
        self.commit: Any = None

    # ---------------------------------------------------------------- what is drawn

    def ids(self, most: int = 12) -> list[np.ndarray]:
        """Draw ids of each table, now and then none, with repeats."""
        found = []
        for kind in self.kinds:
            shape = (int(self.rng.integers(0, most)), *[(), (2,), (1, 3)][self.rng.integers(3)])
            ids = self.rng.integers(0, kind["rows"] or ROWS, shape)
            found.append(ids if kind["rows"] or self.rng.random() < 0.5 else ids * 10**15 - 7)
        return found

    def numbers(self, shape: tuple[int, ...]) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(np.float32)

    # ---------------------------------------------------------------- what is done to both

    def check_read(self, fetched: FetchedRows) -> None:
        """Fail unless a batch has the rows that the twins have now, each once, and zeros after them."""
        positions, unique = self.fetcher.places(fetched), fetched.unique
        for twin, ids, own, rows, at in zip(
            self.twins, self.fetcher.ids[fetched], unique, fetched.rows, positions, strict=True
        ):
            assert rows.shape == (self.fetcher.sizes[self.twins.index(twin)], twin.dim)
            assert len(set(own.tolist())) == len(own)
            np.testing.assert_array_equal(rows[: len(own)], twin.lookup(own))
            np.testing.assert_array_equal(rows[at], twin.lookup(ids))
            assert at.dtype == np.int32
            assert not rows[len(own) :].any()

    def step(self, fetched: FetchedRows) -> None:
        """Step both by gradients that are drawn, of rows or of positions, and now and then of some tables only."""
        by_position = bool(self.rng.random() < 0.4)
        due = self.rng.random(len(self.tables)) < 0.8
        self.now += int(self.rng.integers(0, DAY))
        time = self.now + self.rng.integers(0, 100, 3)
        lr = [None if self.rng.random() < 0.5 else 0.03 for _ in self.tables]
        unique, grads = fetched.unique, list[np.ndarray | None]()
        for k, twin in enumerate(self.twins):
            own = self.fetcher.ids[fetched][k] if by_position else unique[k]
            given = self.numbers((*own.shape, twin.dim))
            padded = given if by_position else np.full((fetched.sizes[k], twin.dim), np.nan, np.float32)
            padded[: len(given)] = given
            grads.append(padded if due[k] else None)
            if due[k]:
                twin.update(own, given, lr=lr[k], time=time)
        self.fetcher.step(fetched, fetched.rows, grads, by_position=by_position, lr=lr, time=time)

    def step_later(self, fetched: FetchedRows) -> None:
        """Step both, or fail unless the step is refused, as rows of the batch have changed since it was fetched."""
        unique = fetched.unique
        now = [twin.lookup(own) for twin, own in zip(self.twins, unique, strict=True)]
        if all(np.array_equal(own, then[: len(own)]) for own, then in zip(now, fetched.rows, strict=True)):
            self.step(fetched)
        else:
            with pytest.raises(ArgumentError, match="have changed since this batch was fetched"):
                self.fetcher.step(fetched, fetched.rows, [np.zeros_like(own) for own in fetched.rows])

    def outside(self) -> None:
        """Change both by other means than the fetcher's steps."""
        k = int(self.rng.integers(len(self.tables)))
        verbs = [self.update, self.load_state]
        verbs += [self.assign, self.forget] if not rows_of(self.tables[k]).lags else []
        verbs += [self.grow] if self.kinds[k]["rows"] else []
        verbs += [self.go_back] if self.is_on_disk else []
        verbs[self.rng.integers(len(verbs))](k)

    def update(self, k: int) -> None:
        ids, times = self.ids()[k], self.now + int(self.rng.integers(0, 100))
        grads = self.numbers((*ids.shape, self.twins[k].dim))
        for table in (self.tables[k], self.twins[k]):
            table.update(ids, grads, time=times)

    def assign(self, k: int) -> None:
        ids = np.unique(self.ids()[k])
        values = self.numbers((len(ids), self.twins[k].dim))
        for table in (self.tables[k], self.twins[k]):
            table.assign(ids, values)

    def grow(self, k: int) -> None:
        rows = self.twins[k].rows
        assert rows is not None
        for table in (self.tables[k], self.twins[k]):
            table.grow(rows + 5)

    def forget(self, k: int) -> None:
        ids = self.ids()[k]
        try:
            self.tables[k].forget(ids)
        except ArgumentError:  # a batch was read, and may still be stepped
            return
        self.twins[k].forget(ids)
        self.commit = None  # forgotten rows do not come back

    def load_state(self, k: int) -> None:
        """Make steps that are undone: a version more does not say that rows are others."""
        state = self.twins[k].state()
        self.update(k)
        for table in (self.tables[k], self.twins[k]):
            table.load_state(state)

    def go_back(self, k: int) -> None:
        owners = [self.owner] if self.owner else self.tables
        if self.commit is None:
            self.commit = [owner.commit() for owner in owners], [twin.state() for twin in self.twins]
            return
        (numbers, states), self.commit = self.commit, None
        for owner, number in zip(owners, numbers, strict=True):
            owner.rollback(number)
        for twin, state in zip(self.twins, states, strict=True):
            spec = twin.spec
            if spec.rows is not None and spec.rows != state["rows"]:
                twin.shrink(state["rows"])
            twin.load_state(state)

    # ---------------------------------------------------------------- the end

    def check(self) -> None:
        for table, twin in zip(self.tables, self.twins, strict=True):
            check_same(table, twin)

    def close(self) -> None:
        for each in [self.owner] if self.owner else self.tables:
            if self.is_on_disk:
                each.commit()
            each.close()


def play(program: Program, steps: int = 60) -> None:
    """Fetch and step, with batches that wait, while others are stepped and tables change."""
    fetcher, rng = program.fetcher, program.rng
    waiting: list[tuple[FetchedRows, Pin]] = []
    held: list[FetchedRows] = []
    for _ in range(steps):
        draw, pin = rng.random(), Pin()
        if draw < 0.3 and len(waiting) < WAITING:
            planned = fetcher.plan(program.ids(MOST))
            if rng.random() < 0.2:
                program.outside()
            waiting.append((planned, fetcher.bring(lambda planned=planned: planned) if rng.random() < 0.8 else pin))
            continue
        if draw < 0.45:
            program.outside()
            continue
        if waiting and draw < 0.8:
            fetched, pin = waiting.pop(0)
            fetcher.read(fetched)
        else:
            fetched = fetcher.plan(program.ids(MOST))
            fetcher.read(fetched)
        program.check_read(fetched)
        if rng.random() < 0.7:
            program.step(fetched)
        elif rng.random() < 0.5:
            held.append(fetched)
        if held and rng.random() < 0.2:
            program.step_later(held.pop(0))
        pin.release()
    for _, pin in waiting:
        pin.release()
    program.check()
    program.close()


@pytest.mark.parametrize("seed", [0, *slow(*range(1, 12))])
@pytest.mark.parametrize("grouped", [False, True], ids=["alone", "group"])
@pytest.mark.parametrize("kinds", sorted(KINDS))
def test_a_random_program_ends_at_the_bits_of_lookups_and_updates(kinds: str, grouped: bool, seed: int):
    play(Program(KINDS[kinds], seed, grouped=grouped))


@pytest.mark.parametrize("seed", [0, *slow(*range(1, 12))])
@pytest.mark.parametrize("grouped", [False, True], ids=["alone", "group"])
@pytest.mark.parametrize("kinds", sorted(ON_DISK))
def test_a_random_program_on_disk(kinds: str, grouped: bool, seed: int, tmp_path: Path):
    play(Program(ON_DISK[kinds], seed, tmp_path, grouped))


# ---------------------------------------------------------------- beside another thread


def read_ahead(fetcher: Fetcher, items: Sequence[list[np.ndarray]], depth: int) -> Iterator[FetchedRows]:
    """Read batches, which another thread plans and brings."""
    plans = [functools.cache(lambda ids=ids: fetcher.plan(ids)) for ids in items]
    for plan in prefetch(plans, {fetcher: lambda plan: plan}, depth):
        fetched = plan()
        fetcher.read(fetched)
        yield fetched


@pytest.mark.parametrize("seed", [0, *slow(*range(1, 8))])
@pytest.mark.parametrize("depth", [1, 5, *slow(2), 21])
@pytest.mark.parametrize("kinds", [*slow("dense"), "open", "plain"])
def test_batches_brought_by_another_thread_during_steps(kinds: str, depth: int, seed: int, tmp_path: Path):
    program = Program(ON_DISK[kinds], seed, tmp_path, grouped=seed % 2 == 1, slots=3 * (MOST - 1) * (depth + 2))
    for fetched in read_ahead(program.fetcher, [program.ids(MOST) for _ in range(50)], depth):
        program.check_read(fetched)
        program.step(fetched)
        if program.rng.random() < 0.1:
            program.outside()
    program.check()
    program.close()


@pytest.mark.parametrize("is_on_disk", [False, True], ids=["RAM", "disk"])
def test_a_batch_has_no_half_of_another_threads_change(is_on_disk: bool, tmp_path: Path):
    alike: dict[str, Any] = {"rule": er.SGD(lr=0.0), "init": er.Zeros()}
    every = np.arange(ROWS)
    tables = [er.Table(ROWS, 2, **alike, **({"path": tmp_path / n} if is_on_disk else {})) for n in "ab"]
    fetcher, rng, is_over = Fetcher(tables), np.random.default_rng(0), threading.Event()

    def change() -> None:
        for number in itertools.count():
            for table in tables:
                table.assign(every, np.full((ROWS, 2), number, np.float32))
            if is_over.is_set():
                return

    change_once = threading.Thread(target=change)
    change_once.start()
    try:
        for fetched in read_ahead(fetcher, [[rng.integers(0, ROWS, 40)] * 2 for _ in range(200)], 3):
            for unique, rows in zip(fetched.unique, fetched.rows, strict=True):
                assert len(set(rows[: len(unique)].ravel().tolist())) == 1
    finally:
        is_over.set()
        change_once.join()
    for table in tables:
        if is_on_disk:
            table.commit()
        table.close()


# ---------------------------------------------------------------- what is read again


def pair(**options: Any) -> tuple[list[er.Table], Fetcher]:
    given: dict[str, Any] = {"rows": 10, "dim": 2, "rule": er.SGD(lr=1.0), "init": er.Zeros(), **options}
    tables = [er.Table(**given) for _ in "ab"]
    return tables, Fetcher(tables)


def waiting(fetcher: Fetcher, *ids: Any) -> FetchedRows:
    fetched = fetcher.plan(list(ids))
    fetcher.bring(lambda: fetched).release()
    return fetched


def fetched_now(fetcher: Fetcher, *ids: Any) -> FetchedRows:
    fetched = fetcher.plan(list(ids))
    fetcher.read(fetched)
    return fetched


def step(fetcher: Fetcher, fetched: FetchedRows, grads: Sequence[np.ndarray | None] | None = None) -> None:
    fetcher.step(fetched, fetched.rows, grads or [np.ones((size, 2), np.float32) for size in fetched.sizes])


def test_a_refused_step_is_no_step():
    tables, fetcher = pair(rows=None, rule=er.Adam(), memory="1MiB", directory="hashed")
    beside, large = fetched_now(fetcher, [1], [2]), fetched_now(fetcher, list(range(100_000)), [1])
    with pytest.raises(MemoryBudgetError):
        step(fetcher, large)
    assert [table.steps for table in tables] == [0, 0]
    assert fetcher.stats()["steps"] == 0
    step(fetcher, beside)
    assert [table.steps for table in tables] == [1, 1]


def test_two_fetchers_of_the_same_tables_see_each_others_steps():
    (first, second), one = pair()
    other = Fetcher([first, second])
    fetched = waiting(one, [1, 2], [3])
    step(one, fetched_now(one, [1], [4]))
    step(other, fetched_now(other, [2], [3]))
    one.read(fetched)
    assert fetched.rows[0][:2].tolist() == [[-1, -1], [-1, -1]]
    assert fetched.rows[1][:1].tolist() == [[-1, -1]]


def test_a_snapshot_that_was_refreshed_is_read_again(tmp_path: Path):
    writer = er.Table(10, 2, rule=er.SGD(lr=1.0), init=er.Zeros(), path=tmp_path / "table")
    writer.commit()
    snapshot = er.open(tmp_path / "table", mode="r")
    fetcher = Fetcher([snapshot])
    fetched = waiting(fetcher, [1, 2])
    writer.update([2], np.ones((1, 2), np.float32))
    writer.commit()
    assert snapshot.refresh()
    fetcher.read(fetched)
    assert fetched.rows[0][:2].tolist() == [[0, 0], [-1, -1]]
    snapshot.close()
    writer.close()


def test_a_batch_that_waits_is_refused_once_its_rows_are_gone():
    (first, second), fetcher = pair()
    shrunk, closed = waiting(fetcher, [1, 9], [2]), waiting(fetcher, [1], [2])
    first.shrink(5)
    with pytest.raises(er.IdError, match=r"must lie in \[0, 5\): got 9"):
        fetcher.read(shrunk)
    second.close()
    with pytest.raises(er.ClosedTableError, match="is closed"):
        fetcher.read(closed)


# ---------------------------------------------------------------- large batches, missing rows, room


@pytest.mark.parametrize("by_position", [False, True], ids=["rows", "positions"])
def test_large_batches_are_in_the_order_of_their_plan(by_position: bool):
    kinds = [KINDS["plain"][0] | {"rows": 200_000}, KINDS["open"][2]]
    program, rng = Program(kinds, 3, grouped=True), np.random.default_rng(3)
    fetcher = program.fetcher
    for n in (SMALL_BATCH + 1, 3 * SMALL_BATCH):
        ids = [rng.integers(0, 200_000, n), rng.integers(0, 40_000, n)]
        fetched = fetcher.plan(ids)
        fetcher.bring(lambda fetched=fetched: fetched).release()
        program.step(fetched_now(fetcher, *[own[:50] for own in ids]))
        fetcher.read(fetched)
        program.check_read(fetched)
        program.rng = np.random.default_rng(1 if by_position else 0)
        program.step(fetched)
    program.check()


def test_rows_are_in_the_cache_before_they_are_read(tmp_path: Path):
    rows, size = 8192, 64
    with er.Table(rows, 4, rule=er.SGD(), path=tmp_path / "table", memory="96KiB") as table:
        for ids in np.split(np.arange(rows), rows // size):  # the first rows leave the cache
            table.update(ids, np.ones((size, 4), np.float32))
        table.commit()
        fetcher, reads = Fetcher([table]), [int(table.stats()["reads"])]
        planned = fetcher.plan([np.arange(size)])
        pin = fetcher.bring(lambda: planned)
        reads.append(int(table.stats()["reads"]))
        fetcher.read(planned)
        pin.release()
        assert reads[0] < reads[1] == table.stats()["reads"]


@pytest.mark.parametrize("missing", ["first", "zeros", [1.0, 2.0]], ids=str)
def test_rows_that_are_not_there_have_the_value_of_missing(missing: Any):
    tables, fetcher = pair(rows=None, init=er.Normal())
    for table in tables:
        table.update([1, 2], np.ones((2, 2), np.float32))
    fetched, later = fetcher.plan([[2, 7], [7, 7]], missing), fetcher.plan([[2, 7], [1, 8]], missing)
    fetcher.read(fetched)
    fetcher.bring(lambda: later).release()
    tables[0].update([7], np.ones((1, 2), np.float32))
    fetcher.read(later)
    assert fetched.rows[1][0].tolist() == tables[1].lookup([7], missing=missing)[0].tolist()
    assert np.array_equal(later.rows[0][:2], tables[0].lookup([2, 7]))
    assert np.array_equal(later.rows[1][:2], tables[1].lookup([1, 8], missing=missing))


def test_no_row_is_an_error_where_missing_demands_one():
    _, fetcher = pair(rows=None)
    fetched = fetcher.plan([[1], [2]], "raise")
    with pytest.raises(er.IdError, match=r"must have rows, as missing='raise' demands: 1 id without one, \[1\]"):
        fetcher.read(fetched)


@pytest.mark.parametrize("grouped", [False, True], ids=["alone", "group"])
def test_room_is_that_of_all_tables_that_share_memory(grouped: bool, tmp_path: Path):
    program = Program(ON_DISK["plain"], 0, tmp_path, grouped)
    planned = [program.fetcher.plan([np.arange(k, k + 20)] * 4) for k in (0, 10)]
    rows, memory = program.fetcher.room_for([lambda each=each: each for each in planned])
    own = [table.memory_for(30) for table in program.tables]
    assert rows == 4 * 30
    if grouped:
        assert memory == program.owner.room_for([dict.fromkeys(program.tables, np.arange(30))])[1] > max(own)
    else:
        assert memory == max(own)
