"""Time of the event: rows leave as they did when the events happened, however fast a log is replayed."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.table.options import checked_every
from embedrock.table.table import rows_of
from slow import slow

DAY, IDLE = 86_400, 30
START = int(np.datetime64("2025-01-01", "s").astype(np.int64))
DAYS = 365


def made(idle: Any = "30 days", **options: Any) -> er.Table:
    options = {"rule": er.SGD(lr=1.0), "init": er.Zeros(), "seed": 0, **options}
    return er.Table(None, 1, eviction=er.Eviction(idle=idle), **options)


def step(table: er.Table, ids: Any, at: Any = None) -> None:
    table.update(ids, np.ones((len(ids), 1), np.float32), time=at)


def at_day(day: float) -> float:
    return START + day * DAY


def there(table: er.Table) -> list[int]:
    return table.export()[0].tolist()


def clock_of(table: er.Table) -> float:
    lifecycle = rows_of(table).lifecycle
    assert lifecycle is not None
    assert lifecycle.usage is not None
    return lifecycle.usage.clock.read.now


# -------------------------------------------------------------------- a year replayed

ORDERS = ("sorted", "shuffled within steps", "late")


def year(steps: int, order: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Iterate over steps of a year's events: ids and times. Most ids live for some days, and a few always."""
    rng, count = np.random.default_rng(steps), max(2 * steps, 6000)
    times = np.sort(rng.uniform(0, DAYS, count))
    ids = np.where(rng.random(count) < 0.1, rng.integers(0, 100, count), 1000 + (4 * times).astype(int))
    ids = np.where(rng.random(count) < 0.3, ids + rng.integers(0, 40, count), ids)
    seconds = (START + times * DAY).astype(np.int64)
    if order == "late":  # one in twenty comes up to ten days late
        arrives = times + np.where(rng.random(count) < 0.05, rng.uniform(0, 10, count), 0)
        ids, seconds = ids[np.argsort(arrives)], seconds[np.argsort(arrives)]
    for own in np.array_split(np.arange(count), steps):
        own = rng.permutation(own) if order == "shuffled within steps" else own
        yield ids[own], seconds[own]


RATES = [(steps, order) for steps in (50, 300) for order in ORDERS]
SLOW_RATES = [(steps, order) for steps in (20_000, 100_000) for order in ORDERS]


@pytest.mark.parametrize(("steps", "order"), [*RATES, (5_000, "late"), *slow(*SLOW_RATES)])
def test_a_year_evicts_as_a_dict_says_whatever_the_number_of_steps(steps: int, order: str):
    told: list[np.ndarray] = []
    eviction = er.Eviction(idle="30d", evicted=told.append)
    table = er.Table(None, 1, rule=er.SGD(lr=1.0), init=er.Zeros(), eviction=eviction)
    used, clock, gaps = np.full(1000 + 4 * DAYS + 40, np.inf), 0, [0, 0]  # the clock at the last use of each row
    for ids, seconds in year(steps, order):
        told.clear()
        step(table, ids, seconds)
        before, clock = clock, max(clock, int(seconds.max()))
        gaps = [gaps[1], clock - before if before else 0]
        used[ids] = clock
        for left in told:
            assert np.isfinite(used[left]).all()
            assert (clock - used[left] >= IDLE * DAY).all()  # not before it was idle
            used[left] = np.inf
        latest = IDLE * DAY * (1 + 1 / 8 + 1 / 64) + sum(gaps)
        assert (clock - used <= latest).all()
    assert there(table) == np.flatnonzero(np.isfinite(used)).tolist()
    assert clock_of(table) == clock
    assert table.stats()["evicted"] > 800


@pytest.mark.parametrize(("order", "on_disk"), [(ORDERS[0], False), ("late", True), *slow((ORDERS[0], True))])
def test_a_run_that_goes_on_elsewhere_evicts_the_same_rows(order: str, on_disk: bool, tmp_path: Path):
    table, go_on = made(), made(path=tmp_path / "t", memory="8KiB") if on_disk else made()
    for number, (ids, seconds) in enumerate(year(300, order)):
        if number in (7, 150, 151):
            go_on = resumed(go_on)
        for each in (table, go_on):
            step(each, ids, seconds)
    for got, wanted in zip(go_on.export(), table.export(), strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert go_on.stats()["evicted"] == table.stats()["evicted"] > 500
    end(go_on)


def resumed(table: er.Table) -> er.Table:
    """Return the table as another process has it."""
    if table.path is None:
        again = made()
        again.load_state(table.state())
        return again
    path = table.path
    end(table)
    return er.open(path)


def end(table: er.Table) -> None:
    if table.path is not None:
        table.commit()
    table.close()


def test_order_inside_of_a_step_makes_no_difference():
    tables = made(), made()
    for ids, seconds in year(50, "sorted"):
        for table, way in zip(tables, (slice(None), slice(None, None, -1)), strict=True):
            step(table, np.unique(ids), seconds[way])
    assert there(tables[0]) == there(tables[1])


# -------------------------------------------------------------------- one clock, which never goes back


def test_late_events_lose_nothing_and_use_their_rows_now():
    table = made()
    step(table, [1, 2], at_day(0))
    step(table, [3], at_day(29))
    step(table, [1], at_day(2))  # late by 27 days
    step(table, [3], at_day(40))
    assert there(table) == [1, 3]


def test_older_files_replayed_later_age_nothing_and_are_told_once(capsys: pytest.CaptureFixture[str], caplog: Any):
    table = made()
    step(table, [1], at_day(100))
    for day in (0, 50, 60):
        step(table, [2], at_day(day))
    assert clock_of(table) == at_day(100)
    assert there(table) == [1, 2]
    said = caplog.text + capsys.readouterr().err
    assert said.count("events until 2025-01-01T00:00:00 come after one of 2025-04-11T00:00:00") == 1
    assert said.count("This is said once.") == 1


def test_a_step_may_jump_as_a_whole():
    table = made()
    step(table, [1], at_day(0))
    step(table, [2, 3], [at_day(200), at_day(201)])
    assert there(table) == [2, 3]


def test_live_training_goes_on_after_a_replay():
    table = made()
    step(table, [1], np.datetime64("now") - np.timedelta64(60, "D"))
    with pytest.raises(
        er.ArgumentError, match=r"a step of the table must have time=, as the steps before: .* Got none"
    ):
        step(table, [2])
    assert there(table) == [1]
    step(table, [2], time.time())
    assert there(table) == [2]


def test_the_first_step_with_a_time_leaves_rows_their_age():
    table = made("1h")
    for _ in range(3):
        step(table, [1])  # training
    step(table, [2], at_day(0))
    assert there(table) == [1, 2]
    step(table, [2], at_day(0) + 3000)
    assert there(table) == [1, 2]
    step(table, [2], at_day(0) + 3700)
    assert there(table) == [2]


def test_without_a_time_a_pause_counts_as_little_as_a_step():
    table = made("1h")
    step(table, [1])
    lifecycle = rows_of(table).lifecycle
    assert lifecycle is not None
    assert lifecycle.usage is not None
    lifecycle.usage.clock._machine = lambda: time.monotonic() + 1e6
    step(table, [2])
    assert there(table) == [1, 2]
    assert clock_of(table) <= 60


def test_empty_batches_may_be_without_a_time():
    table = made()
    step(table, [1], at_day(0))
    step(table, [], [])
    step(table, [])
    assert clock_of(table) == at_day(0)


def test_a_step_decided_for_one_time_is_decided_anew_for_another():
    table = made()
    step(table, [1, 2], at_day(0))
    plan = table.plan([2])
    grads = table.sum(plan, np.ones((1, 1), np.float32))
    table.check_step(grads, at_day(40))  # 1 would leave
    table.step(grads, time=at_day(1))
    assert there(table) == [1, 2]
    table.check_step(grads, at_day(2))
    table.apply(table.plan([2]), np.ones((1, 1), np.float32), time=at_day(40))
    assert there(table) == [2]


def test_a_group_has_one_time_a_call_and_one_clock_a_table():
    group = er.Group()
    plain = {"rule": er.SGD(lr=1.0), "seed": 0}
    for name, eviction in (("a", er.Eviction(idle="30d")), ("b", er.Eviction(idle="60d")), ("c", None)):
        group.table(name, None, 1, eviction=eviction, **plain)
    ones = {name: np.ones((1, 1), np.float32) for name in group}
    group.update({name: [1] for name in group}, ones, time=at_day(0))
    group.update({name: [2] for name in group}, ones, time=np.array([[at_day(40)], [at_day(39)]]))
    assert [there(group[name]) for name in "abc"] == [[2], [1, 2], [1, 2]]
    group.update({"b": [3]}, {"b": ones["b"]}, time=at_day(61))
    assert [there(group[name]) for name in "ab"] == [[2], [2, 3]]
    assert clock_of(group["a"]) == at_day(40)
    with pytest.raises(er.ArgumentError, match=r"`time` of the group must be at most `idle` \(2592000 s\)"):
        group.update({name: [4] for name in group}, ones, time=[at_day(70), at_day(70), at_day(70), at_day(101)])
    assert [there(group[name]) for name in "abc"] == [[2], [2, 3], [1, 2]]


# -------------------------------------------------------------------- what users pass

SECOND = at_day(1)
ZONE = datetime.timezone(datetime.timedelta(hours=2))
FORMS = {
    "int": int(SECOND),
    "float": SECOND + 0.7,
    "list": [SECOND - 5, SECOND],
    "any shape": np.array([[[SECOND], [SECOND - 9]]], np.int32),
    "unsigned": np.array([SECOND], np.uint64),
    "datetime64": np.datetime64("2025-01-02"),
    "nanoseconds": np.array(["2025-01-01T03", "2025-01-02"], "datetime64[ns]"),
    "datetime": datetime.datetime(2025, 1, 2),  # without a zone, UTC
    "zone": datetime.datetime(2025, 1, 2, 2, tzinfo=ZONE),
    "datetimes": [datetime.datetime(2025, 1, 2, 2, tzinfo=ZONE), datetime.datetime(2025, 1, 1)],
    "date": datetime.date(2025, 1, 2),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_times_may_have_any_form(form: Any):
    table = made()
    step(table, [1], form)
    assert clock_of(table) == SECOND


def test_times_may_be_of_pandas():
    pandas = pytest.importorskip("pandas")
    stamps = pandas.to_datetime(["2025-01-02", "2025-01-01"])
    for form in (pandas.Timestamp("2025-01-02"), stamps, stamps.to_series(), stamps.tz_localize("UTC")):
        table = made()
        step(table, [1], form)
        assert clock_of(table) == SECOND


NOW = time.time()
WRONG = {
    "milliseconds": (START * 1000, r"seconds since 1970, .* got 1735689600000\. .* milliseconds, pass time / 1000\."),
    "nanoseconds": ([START, START * 10**9], r"got 1735689600000000000 at \[1\] .*are nanoseconds, pass time / 10000"),
    "future": ([NOW + 2 * DAY], r"at most a day after this machine's clock .* Leave out events of the future\."),
    "spike": ([at_day(20)] * 3 + [at_day(51)], r"at most `idle` \(2592000 s\) after the median of its batch "
              r"\(2025-01-21T00:00:00\): got 2025-02-21T00:00:00 at \[3\]"),
    "negative": ([START, -1], r"at least 0, in seconds since 1970: got -1.0 at \[1\]"),
    "nan": ([START, np.nan], r"must be finite .* got nan at \[1\]"),
    "inf": (np.inf, r"must be finite and at least 0, in seconds since 1970: got inf\."),
    "nat": (np.array(["NaT", "2025"], "datetime64[s]"), r"must be finite .* got nan at \[0\]"),
    "text": ("2025-01-01", r"seconds since 1970, or dates .* got dtype <U10\. .*pandas\.to_datetime"),
    "bool": (True, r"or dates such as datetime64: got dtype bool"),
    "none": ([None, START], r"or dates such as datetime64: got dtype object"),
}  # fmt: skip


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize(("wrong", "match"), WRONG.values(), ids=WRONG)
def test_absurd_times_are_refused_and_nothing_changes(wrong: Any, match: str, on_disk: bool, tmp_path: Path):
    table = made(path=tmp_path / "t") if on_disk else made()
    step(table, [1, 2], at_day(0))
    before, lifecycle = table.export(), rows_of(table).lifecycle
    assert lifecycle is not None
    state = lifecycle.state()
    plan = table.plan([2, 3])
    with pytest.raises(er.ArgumentError, match=match):
        step(table, [2, 3], wrong)
    with pytest.raises(er.ArgumentError, match=match):
        table.apply(plan, np.ones((2, 1), np.float32), time=wrong)
    with pytest.raises(er.ArgumentError, match=match):
        table.step(table.sum(plan, np.ones((2, 1), np.float32)), time=wrong)
    for got, wanted in zip(table.export(), before, strict=True):
        np.testing.assert_array_equal(got, wanted)
    for name, array in lifecycle.state().items():
        np.testing.assert_array_equal(array, state[name])
    assert (table.steps, clock_of(table)) == (1, at_day(0))
    step(table, [2, 3], at_day(1))
    end(table)


@pytest.mark.parametrize("eviction", [None, er.Eviction(idle=3)])
def test_other_tables_check_a_time_and_do_not_use_it(eviction: er.Eviction | None):
    table = er.Table(None, 1, rule=er.SGD(lr=1.0), eviction=eviction)
    step(table, [1], at_day(0))
    step(table, [2], at_day(99))
    step(table, [3])
    assert there(table) == [1, 2, 3]
    with pytest.raises(er.ArgumentError, match="milliseconds"):
        step(table, [4], START * 1000)
    assert there(table) == [1, 2, 3]


# -------------------------------------------------------------------- durations

DURATIONS = ["30d", "30 days", "30 day", "720 hours", "43200min", "43200 minutes", "2592000 seconds", " 2592000s ",
             datetime.timedelta(days=30), np.timedelta64(30, "D"), np.timedelta64(720, "h")]  # fmt: skip


@pytest.mark.parametrize("idle", DURATIONS, ids=str)
def test_idle_may_be_a_time_of_any_form(idle: Any, tmp_path: Path):
    eviction = er.Eviction(idle=idle)
    assert eviction.idle_seconds() == 30 * DAY
    assert er.Eviction(**eviction.describe()).idle_seconds() == 30 * DAY
    with made(idle, path=tmp_path / "t") as table:
        step(table, [1], at_day(0))
        table.commit()
    with er.open(tmp_path / "t") as table:
        step(table, [2], at_day(31))
        assert there(table) == [2]
        table.commit()
    assert checked_every(idle, "w") is not None


@pytest.mark.parametrize("wrong", ["30 fortnights", "soon", "0d", np.timedelta64("NaT"), datetime.timedelta(0), 2.5])
def test_what_is_no_time_is_refused(wrong: Any):
    with pytest.raises(er.ArgumentError, match=r"`idle` of an Eviction"):
        er.Eviction(idle=wrong)
