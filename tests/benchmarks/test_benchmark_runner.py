"""The runner: groups that fit into memory, interleaved rounds, failures, ratios and targets. No speed is asserted."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import pytest

from benchmarks.implementations import (
    PROCESS_BYTES,
    Footprint,
    Implementation,
    Step,
    Timing,
    Unavailable,
    python_calls,
)
from benchmarks.options import BenchmarkOptions
from benchmarks.report import format_times, report_of, spread
from benchmarks.runner import Entry, Result, measure, plan_groups
from benchmarks.step import STEP
from benchmarks.targets import Target, TargetResult, at_most, compare_with, faster, format_targets
from benchmarks.workload import Workload

TINY = Workload(rows=1000, dim=8, batch=16, features=2, batches=3)
SHORT = BenchmarkOptions(rounds=2, steps=2, seconds=5.0, threads=1, timeout_s=120.0)
GIB = 1 << 30
REPOSITORY = Path(__file__).resolve().parents[2]


# ---------------------------------------------------------------- toys (they are imported in children)


def make_quick(workload: Workload) -> Step:
    return lambda index: index


def make_sleeper(workload: Workload, seconds: float) -> Step:
    return lambda index: time.sleep(seconds)


def make_writer(workload: Workload, path: Path, name: str) -> Step:
    def step(index: int) -> None:
        with path.open("a") as log:
            log.write(name)

    return step


def make_unavailable(workload: Workload) -> Step:
    raise Unavailable("no such package here")


def make_broken(workload: Workload) -> Step:
    raise ValueError("cannot be made")


def make_breaking(workload: Workload) -> Step:
    def step(index: int) -> None:
        raise ArithmeticError(f"step {index} is wrong")

    return step


def make_dying(workload: Workload) -> Step:
    def step(index: int) -> None:
        os.write(1, b"last words\n")
        os.kill(os.getpid(), signal.SIGKILL)

    return step


def toy(name: str, make: Callable[[Workload], Step] = make_quick, tables: float = 0) -> Implementation:
    return Implementation(name, f"toy {name}", make, tables, process_bytes=0)


def entries(sizes: dict[str, float], workload: Workload = TINY) -> list[Entry]:
    return [Entry(toy(name, tables=size), workload) for name, size in sizes.items()]


# ---------------------------------------------------------------- groups


def names_of(groups: Sequence[Sequence[Entry]]) -> list[list[str]]:
    return [[entry.name for entry in group] for group in groups]


def test_groups_fit_and_begin_with_the_baseline():
    one = Workload(rows=1 << 20, dim=256, batches=0)  # its weights take 1 GiB
    sizes = {"base": 1, "a": 2, "b": 4, "c": 6, "huge": 50, "e": 2, "alone": 8.5, "f": 2}
    room = Footprint(9 * GIB)
    groups, misfits = plan_groups(entries(sizes, one), room)
    assert names_of(groups) == [["base", "a", "b", "e"], ["base", "c", "f"], ["alone"]]
    (skipped,) = measure(misfits, SHORT, room)
    assert (skipped.name, skipped.status) == ("huge", "skipped")
    assert skipped.reason == "needs 50.0 GiB of RAM, 9.0 GiB may be used"


def test_groups_without_a_baseline_that_fits():
    one = Workload(rows=1 << 20, dim=256, batches=0)
    groups, misfits = plan_groups(entries({"base": 5, "a": 2, "b": 2, "c": 1}, one), Footprint(4 * GIB))
    assert names_of(groups) == [["a", "b"], ["c"]]
    assert names_of([misfits]) == [["base"]]
    assert plan_groups([], Footprint(GIB)) == ([], [])


def test_a_table_too_large_for_a_dense_index_needs_ram_for_touched_rows_only():
    huge = Workload(rows=10**9)
    records = huge.touched_rows() * 64 * 4 * 3
    assert records < STEP.implementations[0].need(huge).host < 2 * records + 2 * PROCESS_BYTES


# ---------------------------------------------------------------- rounds


def test_rounds_are_interleaved_and_one_computes_at_a_time(tmp_path: Path):
    log = tmp_path / "log"
    writers = [Entry(toy(name, partial(make_writer, path=log, name=name)), TINY) for name in "abc"]
    results = measure(writers, replace(SHORT, rounds=3))
    assert [result.name for result in results] == ["a", "b", "c"]
    # 3 batches, and a step whose calls are counted; 3 untimed and 2 timed steps.
    warm_up, a_round = "aaaabbbbcccc", "aaaaabbbbbccccc"
    assert log.read_text() == warm_up + 3 * a_round
    assert [[len(turn.steps_s) for turn in result.turns] for result in results] == [[2, 2, 2]] * 3
    assert all(len(result.first) == 3 and result.turns[-1].more["rss_bytes"] > 0 for result in results)


def make_teller(workload: Workload, path: Path) -> Step:
    import embedrock

    def step(index: int) -> None:
        with path.open("a") as log:
            log.write(f"{os.getpid()} {Path(embedrock.__file__).parents[2]}\n")

    return step


def test_implementations_share_a_process_and_an_older_checkout_has_its_own(tmp_path: Path):
    log, older = tmp_path / "log", tmp_path / "older"
    older.mkdir()
    (older / "src").symlink_to(REPOSITORY / "src", target_is_directory=True)
    tellers = [Entry(toy(name, partial(make_teller, path=log)), TINY) for name in ("ours", "torch")]
    results = measure(tellers, replace(SHORT, together=True, beside=older))
    assert [(one.name, one.status) for one in results] == [(n, "ok") for n in ("ours", "torch", "ours-before")]
    processes = {tuple(line.split()) for line in log.read_text().splitlines()}
    assert sorted(path for _, path in processes) == sorted([str(REPOSITORY), str(older)])


def test_calls_from_python_are_counted():
    calls = python_calls(lambda: [len(text) for text in ("a", "b")])
    assert 4 <= calls <= 5  # the function, `len` twice, the end of the count, and before Python 3.12 the list's own
    assert sys.getprofile() is None


@pytest.mark.usefixtures("in_process")
def test_turns_are_limited_in_time():
    slow = Entry(toy("slow", partial(make_sleeper, seconds=0.06)), TINY)
    (result,) = measure([slow], replace(SHORT, rounds=1, steps=1000, seconds=0.15))
    assert 1 <= len(result.turns[0].steps_s) <= 3
    assert median(result.turns[0].steps_s) >= 0.06


def test_nothing_begins_when_the_time_is_over():
    results = measure(entries({"a": 0, "b": 0}), SHORT, until=time.monotonic() - 1)
    assert [(one.name, one.status, one.reason) for one in results] == [
        ("a", "skipped", "no time was left"),
        ("b", "skipped", "no time was left"),
    ]


def test_a_process_that_dies_leaves_the_others_alone():
    good, dead = measure([Entry(toy("good"), TINY), Entry(toy("dying", make_dying), TINY)], SHORT)
    assert (good.status, len(good.turns)) == ("ok", 2)
    assert (dead.status, dead.reason) == ("failed", "its process ended with signal SIGKILL (out of memory?)")
    assert dead.details == "last words"


@pytest.mark.usefixtures("in_process")
def test_a_failure_is_reported_and_the_others_go_on():
    makes = [make_unavailable, make_broken, make_breaking]
    some = [Entry(toy("good"), TINY), *(Entry(toy(make.__name__, make), TINY) for make in makes)]
    results = {result.name: result for result in measure(some, SHORT)}
    assert {name: (result.status, result.reason) for name, result in results.items()} == {
        "good": ("ok", ""),
        "make_unavailable": ("skipped", "no such package here"),
        "make_broken": ("failed", "ValueError: cannot be made"),
        "make_breaking": ("failed", "ArithmeticError: step 0 is wrong"),
    }
    assert "make_broken" in results["make_broken"].details


class TwoWays:
    """A session that fails in one of its ways."""

    def __init__(self, make: Callable[[Workload], Step], workload: Workload) -> None:
        self.way = ""

    def use(self, way: str) -> None:
        self.way = way

    def warm_up(self, seconds: float) -> list[float]:
        if self.way:
            raise ArithmeticError(f"not {self.way}")
        return [0.1]

    def turn(self, steps: int, seconds: float) -> Timing:
        return Timing([0.1], {})


@pytest.mark.usefixtures("in_process")
def test_a_way_that_fails_leaves_the_others_alone():
    both = Entry(replace(toy("both"), session=TwoWays, ways=("", "-ahead")), TINY)
    good, bad = measure([both], SHORT)
    assert (good.name, good.status, len(good.turns)) == ("both", "ok", 2)
    assert (bad.name, bad.status, bad.reason) == ("both-ahead", "failed", "ArithmeticError: not -ahead")


def test_threads_that_wait_sleep_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert BenchmarkOptions(threads=3).environment() == {
        "EMBEDROCK_THREADS": "3",
        "OMP_NUM_THREADS": "3",
        "MKL_NUM_THREADS": "3",
        "OMP_WAIT_POLICY": "passive",
    }
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert BenchmarkOptions().environment()["OMP_WAIT_POLICY"] == "active"


# ---------------------------------------------------------------- report


def result(name: str, group: int, *rounds_ms: Sequence[float], **more: float) -> Result:
    turns = [Timing([milliseconds / 1e3 for milliseconds in times], {**more}) for times in rounds_ms]
    return Result(Entry(toy(name), TINY), group=group, first=[0.5, 0.3, 0.1, 0.2], turns=turns)


def test_ratios_are_taken_over_the_baseline_of_the_same_rounds():
    results = [
        result("base", 1, [1, 1], [2, 2]),
        result("a", 1, [10, 10], [40, 40], hits=3.0),
        result("base", 2, [3, 3]),
        result("b", 2, [6, 6]),
    ]
    a, b = (report_of(results, "base").results[index] for index in (1, 3))
    assert (a["median_ms"], a["least_ms"], a["hits"]) == pytest.approx((25, 10, 3))
    assert a["ratio"] == pytest.approx(25 / 1.5)
    assert a["ratio_range"] == pytest.approx([10, 20])
    assert a["first_pass_ms"] == pytest.approx(150)
    assert b["ratio"] == pytest.approx(2)


def measured(results: Sequence[Result], baseline: str, *targets: Target) -> list[TargetResult]:
    return compare_with(targets, report_of(results, baseline).results)


def test_targets_compare_through_the_baseline_where_implementations_never_met():
    results = [result("base", 1, [1]), result("fast", 1, [2]), result("base", 2, [3]), result("slow", 2, [30])]
    found = measured(results, "base", faster("fast", "slow", 6), faster("base", "slow", 11))
    assert [one.measured for one in found] == pytest.approx([5, 10])
    assert [one.met for one in found] == [False, False]


def test_targets_count_only_for_their_size_and_for_those_measured():
    results = [result("fast", 1, [125]), result("slow", 1, [1000])]
    wanted = faster("fast", "slow", 7), faster("fast", "slow", 7, rows=1001), faster("fast", "absent", 7)
    found = measured(results, "fast", *wanted, faster("slow", "fast", 7, at_most=True))
    assert found == [
        TargetResult("fast faster than slow", 8.0, 7, "x"),
        TargetResult("time of slow over that of fast", 8.0, 7, "x", at_most=True),
    ]
    assert [one.met for one in found] == [True, False]


def test_least_times_are_compared_with_the_fastest_of_some():
    results = [result("ours", 1, [5, 4]), result("slow", 1, [9, 8]), result("best", 1, [50, 5])]
    (found,) = measured(results, "ours", at_most("ours", ["slow", "best"], 0.75, batch=16))
    assert found == TargetResult("least time of ours over that of best, batch 16", 0.8, 0.75, "x", at_most=True)
    assert measured(results, "ours", at_most("ours", ["slow", "best"], 0.75, batch=17)) == []


def test_the_table_shows_all_and_the_reasons_of_those_missing():
    skipped = Result(Entry(toy("big"), TINY), status="skipped", reason="needs 50 GiB of RAM")
    results = [result("base", 1, [1.5]), result("other", 1, [300]), skipped]
    lines = format_times(report_of(results, "base").results, "base").splitlines()
    assert lines[2].split()[:2] == ["base", "1.5"]
    assert lines[3].split()[:2] == ["other", "300"]
    assert "200x" in lines[3]
    assert lines[-1] == "big: skipped: needs 50 GiB of RAM"
    assert format_times(report_of([skipped], "big").results, "big").startswith("nothing was measured\nbig: skipped")


def test_the_table_of_targets_shows_both_directions():
    some = [TargetResult("speed", 8, 7, "x"), TargetResult("time", 0.5, 0.2, "s", at_most=True)]
    text = format_targets(some)
    assert [line.split("  ")[-1].strip() for line in text.splitlines()[2:]] == ["met", "MISSED"]
    assert "at least 7 x" in text
    assert "at most 0.2 s" in text
    assert format_targets([]) == ""


def test_spread_of_one_and_of_many():
    assert spread([3.0]) == (3.0, 3.0, 3.0)
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)
