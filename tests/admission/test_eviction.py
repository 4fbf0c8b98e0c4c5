"""Rows that leave: which, when, who is told, and what is refused."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.admission import copy_on_write as still
from embedrock.admission.usage import ONE_USE, UsageTracker
from embedrock.batch.gradients import RowGradients
from embedrock.store.table_folder import TableFolder
from embedrock.table.stepping import StepRequest, step_all
from embedrock.table.table import rows_of
from on_system import on
from suites.faultfs import FaultFS
from table_files import files_of

DIM = 2
BATCH = 5


def made(max_rows: int | None = None, rule: er.Rule | None = None, **options: Any) -> er.Table:
    policy = er.Eviction(max_rows=max_rows, **options)
    return er.Table(None, DIM, rule=rule or er.SGD(lr=1.0), init=er.Constant(0.5), seed=0, eviction=policy)


def step(table: er.Table, ids: Any) -> None:
    table.update(ids, np.ones((len(ids), DIM), np.float32))


@pytest.mark.parametrize("by", ["use", "recency", "age"])
def test_the_rows_of_least_worth_of_a_sample_leave(by: str):
    told: list[np.ndarray] = []
    table = made(12, by=by, half_life=4, keep=[3], evicted=told.append)
    rng, here = np.random.default_rng(0), set[int]()
    for _ in range(200):
        ids = list(dict.fromkeys((rng.zipf(1.5, BATCH) % 40).tolist()))
        before, worth = here, worth_of(table)
        told.clear()
        step(table, ids)
        left = set(np.concatenate([np.empty(0, np.int64), *told]).tolist())
        here = set(table.export()[0].tolist())
        assert here == (before | set(ids)) - left
        assert not left & {*ids, 3}
        assert len(left) == max(0, len(before | set(ids)) - 12)
        stay = before - left - set(ids) - {3}
        if 4 * len(left) >= len(before) and left and stay:  # the sample is all there is
            assert max(worth[row] for row in left) <= min(worth[row] for row in stay)


def worth_of(table: er.Table) -> dict[int, tuple[int, ...]]:
    """Return how much each row is worth in the next step, as of its use so far."""
    lifecycle = rows_of(table).lifecycle
    assert lifecycle is not None
    assert lifecycle.eviction is not None
    state, half_life, now = lifecycle.state(), lifecycle.eviction.half_life, lifecycle.steps + 1
    ids, last, marks = (state[f"residents_uses_{name}"].tolist() for name in ("ids", "last", "marks"))
    found = {}
    for row, used, mark in zip(ids, last, marks, strict=True):
        faded = mark >> (now // half_life - used // half_life)
        found[row] = {"recency": (used,), "age": (mark,), "use": (faded, used)}[lifecycle.eviction.by]
    return found


def test_uses_fade():
    uses = UsageTracker(er.Eviction(max_rows=9, half_life=3))
    for number in range(1, 7):
        uses.use(np.array([7]), number)
    uses.use(np.array([8]), 12)
    marks = dict(zip(uses.state()["ids"].tolist(), uses.state()["marks"].tolist(), strict=True))
    expected = 0
    for number in range(1, 7):  # halved whenever a third step begins
        expected = (expected >> (number % 3 == 0)) + ONE_USE
    assert marks == {7: expected, 8: ONE_USE}


def test_idle_rows_leave_in_time():
    table, idle = made(idle=16), 16
    step(table, range(200))
    step(table, [1000])
    for number in range(1, 40):
        there = set(table.export()[0].tolist())
        if number <= idle:
            assert set(range(200)) <= there
        if number > idle + idle // 8 + 2:
            assert there == {1000}
        step(table, [1000])


def test_idle_may_be_a_time():
    now = [1000.0]
    uses = UsageTracker(er.Eviction(idle="10s"), clock=lambda: now[0])
    for number in range(1, 41):
        uses.use(np.array([number % 4 + 10 * (number > 20)]), number)
        now[0] += 1
        left = leaving(uses, number + 1)
        uses.pass_by(np.zeros(1, np.int64), left, uses.clock.read)
        if number == 20:
            assert uses.count == 4
    assert uses.count == 4
    assert uses.are_known(np.arange(10, 14)).all()


def seen(uses: UsageTracker, now: list[float], gaps: list[float], first: int = 1) -> list[int]:
    """Make a step of one row of its own after each gap; return the rows that would leave in the next step."""
    for number, gap in enumerate(gaps, first):
        now[0] += gap
        uses.use(np.array([number]), number)
    return sorted(leaving(uses, first + len(gaps)).tolist())


def leaving(uses: UsageTracker, step: int) -> np.ndarray:
    """Return the rows that would leave in a step of no rows at the time of the last step."""
    return uses.victims(np.empty(0, np.int64), np.zeros(1, np.int64), step, uses.clock.read)


@pytest.mark.parametrize("pause", [31 * 86400.0, -86400.0, 86400.0 * 365])
def test_a_pause_of_training_makes_no_row_idle(pause: float):
    now = [1000.0]
    uses = UsageTracker(er.Eviction(idle="30d"), clock=lambda: now[0])
    assert seen(uses, now, [1.0] * 8 + [pause] + [1.0] * 300) == []


def test_a_restart_makes_no_row_idle():
    now, later = [1000.0], [5.0]  # the clock of another process, or after a reboot, begins elsewhere
    uses = UsageTracker(er.Eviction(idle="1h"), clock=lambda: now[0])
    assert seen(uses, now, [60.0] * 50) == []
    resumed = UsageTracker(er.Eviction(idle="1h"), clock=lambda: later[0])
    resumed.load(uses.state(), 50)
    assert seen(resumed, later, [0.0], 51) == []
    assert seen(resumed, later, [60.0] * 14, 52) == [1, 2, 3]  # used an hour of training before, or earlier


def test_steps_that_come_once_an_hour_count_whole():
    now = [1000.0]
    uses = UsageTracker(er.Eviction(idle="2d"), clock=lambda: now[0])
    gone = seen(uses, now, [3600.0] * 60)
    assert gone == list(range(1, len(gone) + 1))
    assert 8 <= len(gone) <= 12  # of 60 hours, those before the last 48, but for the first gaps


def test_a_row_that_comes_back_starts_anew():
    table = made(2, er.Adam(lr=0.1), by="recency")
    fresh = er.Table(None, DIM, rule=er.Adam(lr=0.1), init=er.Constant(0.5), seed=0)
    for ids in ([1], [2], [3], [4]):
        step(table, ids)
    np.testing.assert_array_equal(table.lookup([1]), [[0.5, 0.5]])
    for _ in range(4):
        step(fresh, [9])
    step(table, [1])
    step(fresh, [1])
    np.testing.assert_array_equal(table.lookup([1]), fresh.lookup([1]))  # with no state of its first life


def test_bytes_of_records_may_be_what_is_limited():
    table = made(max_bytes=10 * er.Table(None, DIM, rule=er.SGD(lr=1.0)).spec.record_bytes)
    for first in range(0, 40, 5):
        step(table, range(first, first + 5))
    assert table.stats()["rows_touched"] == 10
    assert table.stats()["evicted"] == 30


def test_ram_does_not_grow_with_ids_that_come_and_go():
    table = made(64)
    for first in range(0, 640, 32):
        step(table, range(first, first + 32))
    before = table.stats()["bytes_used"]
    for first in range(640, 6400, 32):
        step(table, range(first, first + 32))
    assert table.stats()["bytes_used"] == before


def test_those_who_leave_are_written_to_a_file(tmp_path: Path):
    table = made(4, by="recency", evicted=tmp_path / "gone.ids")
    for first in range(0, 20, 2):
        step(table, [first, first + 1])
    assert np.fromfile(tmp_path / "gone.ids", "<i8").tolist() == list(range(16))
    assert table.export()[0].tolist() == [16, 17, 18, 19]


def test_a_table_goes_on_with_another_eviction(tmp_path: Path):
    arguments: dict[str, Any] = {"dim": DIM, "rule": er.SGD(lr=1.0), "seed": 0, "path": tmp_path / "t"}
    with er.Table(None, **arguments) as table:
        step(table, range(20))
        table.commit()
    with er.Table(None, **arguments, eviction=er.Eviction(max_rows=8)) as table:
        assert table.stats()["rows_touched"] == 20
        step(table, [0, 1])
        assert table.stats()["rows_touched"] == 8
        table.commit()
    with er.Table(None, **arguments, eviction=er.Eviction(max_rows=30)) as table:
        step(table, range(50, 70))
        assert table.stats()["rows_touched"] == 28
        assert table.stats()["evicted"] == 12
        table.commit()
    with er.open(tmp_path / "t") as table:
        assert table.spec.eviction is not None
        assert table.spec.eviction.max_rows == 30


def test_a_step_whose_weights_are_changed_afterwards_uses_each_row_once():
    plain, changed = (made(12) for _ in range(2))
    rng = np.random.default_rng(0)
    for _ in range(20):
        ids, grads = rng.integers(0, 40, 8), rng.random((8, DIM)).astype(np.float32)
        for table, change in ((plain, None), (changed, lambda values: values)):
            assert table.rule is not None
            step_all([StepRequest((rows_of(table),), table.rule, RowGradients.sum(table.plan(ids), grads), change)])
    for name, array in plain.state().items():
        np.testing.assert_array_equal(changed.state()[name], array)


def test_what_cannot_be_is_refused():
    for wrong, told in {
        "nothing": ({}, "must have `max_rows`, `max_bytes` or `idle`: got none of them"),
        "max_rows": ({"max_rows": 0}, "`max_rows` of an Eviction must be a whole number of at least 1: got 0"),
        "idle": ({"idle": "soon"}, "`idle` of an Eviction must be steps, or a time such as .*: got 'soon'"),
        "by": ({"max_rows": 1, "by": "luck"}, "`by` must be one of use, recency, age: got 'luck'"),
        "keep": ({"max_rows": 1, "keep": np.arange(70_000)}, "`keep` of an Eviction must be at most 65536 ids: got"),
    }.values():
        with pytest.raises(er.ArgumentError, match=told):
            er.Eviction(**wrong)
    table = made(4, keep=[1, 2])
    step(table, [1, 2, 3])
    before = table.export()
    with pytest.raises(er.ArgumentError, match=r"may have 4 rows .*, and this batch needs 6 at once\. Raise max_rows="):
        step(table, range(6))
    with pytest.raises(er.ArgumentError, match=r"needs 4 at once beside those to `keep`. Raise .* or keep fewer"):
        step(table, range(5, 9))
    for got, wanted in zip(table.export(), before, strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert table.steps == 1


def both(system: FaultFS | None) -> er.Table:
    admission, eviction = er.Admission(2, within=500, sketch="64KiB"), er.Eviction(max_rows=3000, idle=900)
    arguments: dict[str, Any] = {"rule": er.SGD(), "seed": 0, "admission": admission, "eviction": eviction}
    if system is None:
        return er.Table(None, DIM, **arguments)
    return on(system).Table(None, DIM, **arguments, path="/t", keep=1)


def check_equal_residents(table: er.Table, other: er.Table) -> None:
    lifecycle = rows_of(other).lifecycle
    assert lifecycle is not None
    check_state(table, lifecycle.state())


def check_state(table: er.Table, expected: dict[str, np.ndarray]) -> None:
    lifecycle = rows_of(table).lifecycle
    assert lifecycle is not None
    state = lifecycle.state()
    assert state.keys() == expected.keys()
    for name, array in state.items():
        np.testing.assert_array_equal(array, expected[name])


def test_a_commit_writes_what_has_changed_of_who_has_a_record():
    system = FaultFS()
    table, ram, rng = both(system), both(None), np.random.default_rng(0)

    def history_bytes() -> list[int]:
        files = files_of(table).table_folder.manifest.history
        return [part.size for part in files]

    for number in range(30):
        ids = rng.integers(0, 4000, 2000 if number < 8 else 20)
        for each in (table, ram):
            each.update(ids, np.ones((len(ids), DIM)))
        table.commit()
        if number == 15:
            table.close()
            table = both(system)
            check_equal_residents(table, ram)
        if number == 25:
            assert table.forget([ids[0]]) == ram.forget([ids[0]])
    assert ram.stats()["evicted"] > 0
    assert history_bytes()[0] > 90_000
    assert max(history_bytes()[-3:]) < 10_000  # all of it was written again when rows were forgotten
    table.close()
    with on(system).open("/t", mode="r") as again:
        check_equal_residents(again, ram)


def test_a_commit_has_who_had_a_record_when_it_began(monkeypatch: pytest.MonkeyPatch):
    """Rows come, go and are used, and places are given to others, while it is being written."""
    monkeypatch.setattr(still, "PIECE_BYTES", 4096)
    system, rng = FaultFS(), np.random.default_rng(0)
    table, ram = both(system), both(None)
    write, kept = TableFolder.write_history, list[dict[str, np.ndarray]]()

    def write_late(self: TableFolder, arrays: Any) -> Any:
        started.set()
        assert stepped.wait(60)
        return write(self, arrays)

    monkeypatch.setattr(TableFolder, "write_history", write_late)
    for number in range(8):
        started, stepped = threading.Event(), threading.Event()
        if number:
            lifecycle = rows_of(table).lifecycle
            assert lifecycle is not None
            kept.append(lifecycle.state())
            table.commit(wait=False)
            assert started.wait(60)
        for _ in range(2):
            ids = rng.integers(0, 6000, 2500 if number < 5 else 30)
            for each in (table, ram):
                each.update(ids, np.ones((len(ids), DIM)))
        stepped.set()
        if number:
            files_of(table).end_commit()
            with on(system).open("/t", mode="r") as again:
                check_state(again, kept[-1])
    check_equal_residents(table, ram)
    table.commit()
    table.close()


def test_a_commit_that_failed_leaves_nothing_out():
    system = FaultFS()
    table = on(system).Table(None, DIM, rule=er.SGD(), seed=0, path="/t", admission=er.Admission(3))
    ram = er.Table(None, DIM, rule=er.SGD(), seed=0, admission=er.Admission(3))
    for number in range(4):
        for each in (table, ram):
            step(each, range(number, number + 9))
        if number == 2:
            system.capacity = 0
            with pytest.raises(er.CommitError):
                table.commit()
            system.capacity = None
        else:
            table.commit()
    table.close()
    with on(system).open("/t", mode="r") as again:
        check_equal_residents(again, ram)


def test_ids_that_could_not_be_told_are_told_with_the_next_ones(tmp_path: Path):
    told, full = list[int](), [True]

    def note(ids: np.ndarray) -> None:
        if full[0]:
            raise OSError(28, "No space left on device")
        told.extend(ids.tolist())

    table = made(2, by="recency", evicted=note)
    for ids in ([1, 2], [3, 4], [1]):  # 1 and 2 leave, 1 comes back for one of the others
        with contextlib.nullcontext() if ids == [1, 2] else pytest.raises(OSError, match="No space left"):
            step(table, ids)
    full[0] = False
    step(table, [5])
    here = set(table.export()[0].tolist())
    assert sorted(told) == sorted({1, 2, 3, 4, 5} - here)  # each once, none that is there
    assert table.stats()["evicted"] == 4


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"evicted": 5}, "`evicted` of an Eviction must be a function or a file: got 5"),
        (
            {"evicted": "no/such/file"},
            "a file in a folder that there is: got 'no/such/file'. Make '.*/no/such'",
        ),
        ({"max_bytes": 3}, "`max_bytes` of an Eviction must have room for a row, 8 bytes: got 3"),
    ],
    ids=["kind", "folder", "bytes"],
)
def test_what_nothing_could_come_of_is_refused_at_once(options: dict[str, Any], told: str):
    with pytest.raises(er.ArgumentError, match=told):
        made(2, **options)
