"""The benchmarks at toy size: who takes part, what is reported, and that nothing hangs or is left behind.

No speed is asserted here.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from embedrock.bench import cli
from embedrock.bench.harness import options, runner
from embedrock.bench.harness.bench import Bench, Task
from embedrock.bench.harness.comparison import Step, Timing, format_times, report_of
from embedrock.bench.harness.contenders import Footprint, Unavailable
from embedrock.bench.harness.effort import Effort
from embedrock.bench.harness.machine import machine_facts
from embedrock.bench.harness.processes import Child, ChildError, child_environment
from embedrock.bench.harness.report import Report, spread
from embedrock.bench.harness.runner import Racer, Result, measure, plan_groups
from embedrock.bench.harness.targets import Race, Target, Verdict, faster, format_verdicts, judge
from embedrock.bench.harness.workload import SCATTER, Workload, bounded_zipf
from embedrock.bench.step import benches, contenders, open_ids
from embedrock.bench.step.contenders import StepContender
from embedrock.machine.ram import available_bytes, memory_limit, peak_rss_bytes, rss_bytes
from embedrock.terminal.arguments import count

TINY = Workload(rows=1000, dim=8, batch=16, features=2, batches=3)
SHORT = Effort(rounds=2, steps=2, seconds=5.0, threads=1, timeout_s=120.0)
TINY_OPTIONS = [
    "--rows=1000",
    "--dim=8",
    "--batch=16",
    "--features=2",
    "--batches=3",
    "--rounds=2",
    "--steps=2",
    "--threads=1",
]
GIB = 1 << 30


# ---------------------------------------------------------------- toy contenders (they are imported in children)


def make_quick(workload: Workload) -> Step:
    return lambda index: index


def make_sleeper(workload: Workload, seconds: float) -> Step:
    return lambda index: time.sleep(seconds)


def make_writer(workload: Workload, path: Path, name: str) -> Step:
    def step(index: int) -> None:
        with path.open("a") as log:
            log.write(f"begin {name}\n")
        time.sleep(0.01)
        with path.open("a") as log:
            log.write(f"end {name}\n")

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


def toy(name: str, make: Callable[[Workload], Step] = make_quick, tables: float = 0) -> StepContender:
    return StepContender(name, f"toy {name}", make, tables)


def bare(name: str, tables: float) -> StepContender:
    """Return a contender that needs RAM for its tables only."""
    return StepContender(name, f"bare {name}", make_quick, tables, process_bytes=0)


def toys(*contenders: StepContender) -> list[Racer]:
    return [contender.racer(TINY) for contender in contenders]


# ---------------------------------------------------------------- workload


@pytest.mark.parametrize("zipf", [0.0, 0.5, 1.0, 1.05, 3.0])
def test_ids_are_in_range_and_the_same_each_time(zipf):
    workload = Workload(rows=1000, batch=64, features=3, zipf=zipf, batches=4)
    batches = workload.ids()
    assert [ids.shape for ids in batches] == [(64, 3)] * 4
    assert all(ids.dtype == np.int64 and ids.min() >= 0 and ids.max() < 1000 for ids in batches)
    assert all(np.array_equal(a, b) for a, b in zip(batches, workload.ids(), strict=True))
    assert not np.array_equal(batches[0], batches[1])


def test_zipf_follows_its_law():
    uniform = (np.arange(1_000_000) + 0.5) / 1_000_000
    for exponent in (0.0, 0.5, 1.0, 1.05, 2.0):
        counts = np.bincount(bounded_zipf(uniform, 50, exponent), minlength=50)
        edges = np.arange(1, 52, dtype=np.float64).clip(max=50)
        mass = np.log(edges) if exponent == 1 else edges ** (1 - exponent) / (1 - exponent)
        expected = np.diff(mass) / (mass[-1] - mass[0])
        np.testing.assert_allclose(counts / 1_000_000, expected, atol=2e-6)


def test_uniform_numbers_at_the_ends_stay_in_range():
    ends = np.array([0.0, np.nextafter(1.0, 0.0)])
    for exponent in (0.0, 1.0, 1.05):
        for ranks in (1, 2, 10**9):
            ids = bounded_zipf(ends, ranks, exponent)
            assert ids[0] == 0
            assert 0 <= ids[1] < ranks


def test_equal_ranks_give_equal_numbers_of_unique_ids_at_every_size():
    unique = {
        rows: Workload(rows=rows, batch=2000, batches=2, ranks=1000).unique_ids()
        for rows in (1000, 100_000, SCATTER - 1)
    }
    assert len(set(unique.values())) == 1


def test_gradient_has_the_shape_of_the_output():
    gradient = TINY.gradient()
    assert gradient.shape == (16, 2, 8)
    assert gradient.dtype == np.float32
    assert np.array_equal(gradient, TINY.gradient())


def test_touched_rows_counts_ids_of_all_batches():
    assert TINY.touched_rows() == len({int(i) for ids in TINY.ids() for i in ids.ravel()})


# ---------------------------------------------------------------- machine


def fake_root(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable: 8388608 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
CGROUPS = {
    "no cgroup": ({}, 8),
    "v2, no limit": (
        {"proc/self/cgroup": "0::/a", f"{V2}/a/memory.max": "max", f"{V2}/a/memory.current": "1"},
        8,
    ),
    "v2, limit of a parent": (
        {
            "proc/self/cgroup": "0::/a/b",
            f"{V2}/a/memory.max": str(3 * GIB),
            f"{V2}/a/memory.current": str(GIB),
        },
        2,
    ),
    "v2, page cache can go": (
        {
            "proc/self/cgroup": "0::/",
            f"{V2}/memory.max": str(5 * GIB),
            f"{V2}/memory.current": str(4 * GIB),
            f"{V2}/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
        },
        3,
    ),
    "v1": (
        {
            "proc/self/cgroup": "9:name=systemd:/x\n4:cpu,memory:/x/y\n0::/",
            f"{V1}/x/y/memory.limit_in_bytes": str(2**63 - 4096),
            f"{V1}/x/y/memory.usage_in_bytes": "5",
            f"{V1}/memory.limit_in_bytes": str(6 * GIB),
            f"{V1}/memory.usage_in_bytes": str(2 * GIB),
        },
        4,
    ),
    "over its limit": (
        {"proc/self/cgroup": "0::/", f"{V2}/memory.max": "5", f"{V2}/memory.current": "9"},
        0,
    ),
}


@pytest.mark.parametrize("name", CGROUPS)
def test_available_ram_respects_every_cgroup(tmp_path, name):
    files, gigabytes = CGROUPS[name]
    assert available_bytes(fake_root(tmp_path, files)) == gigabytes * GIB


LIMITS = {"v2, limit of a parent": 3, "v2, page cache can go": 5, "v1": 6}  # GiB


@pytest.mark.parametrize("name", LIMITS)
def test_the_ram_of_a_process_is_no_more_than_any_of_its_cgroups_allows(tmp_path, monkeypatch, name):
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 8 * GIB // 4096}.__getitem__)
    assert memory_limit(tmp_path) == 8 * GIB
    assert memory_limit(fake_root(tmp_path, CGROUPS[name][0])) == LIMITS[name] * GIB


def test_available_ram_without_proc(tmp_path):
    assert available_bytes(tmp_path) > 0


def test_machine_facts_are_json():
    facts = json.loads(json.dumps(machine_facts()))
    assert facts["cores"] >= 1
    assert facts["packages"]["numpy"] == np.__version__
    assert facts["cpu"]


def test_ram_of_this_process():
    before_bytes = rss_bytes()
    block = np.ones(50_000_000 // 8)
    assert 40_000_000 < rss_bytes() - before_bytes < 100_000_000
    assert peak_rss_bytes() >= block.nbytes


# ---------------------------------------------------------------- processes


class Echo:
    def __init__(self, text: str) -> None:
        if text == "bad":
            raise ValueError("a bad text")
        self.text = text

    def both(self, other: str) -> str:
        return self.text + other

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def process(self) -> int:
        return os.getpid()

    def exit(self, status: int) -> None:
        os.write(1, b"last words\n")
        os._exit(status)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def echo(text: str = "a", timeout_s: float = 60.0, **environment: str) -> Child:
    return Child(Echo, text, environment=environment, timeout_s=timeout_s)


def is_alive(process: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    status = Path(f"/proc/{process}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(processes: Sequence[int], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_alive, processes))


def test_child_answers_calls_in_its_own_environment():
    with echo(EMBEDROCK_THREADS="3") as child:
        assert child.call("both", "b") == "ab"
        assert child.call("variable", "EMBEDROCK_THREADS") == "3"
        process = child.call("process")
        assert process != os.getpid()
    assert wait_until_gone([process])
    child.close()


def test_child_that_cannot_be_made():
    with pytest.raises(ChildError, match="a bad text") as raised:
        echo("bad")
    assert raised.value.kind == "ValueError"
    assert "Echo" in raised.value.details or "__init__" in raised.value.details


def test_child_stays_usable_after_an_error():
    with echo() as child:
        with pytest.raises(ChildError, match="no attribute 'missing'") as raised:
            child.call("missing")
        assert raised.value.kind == "AttributeError"
        assert child.call("both", "b") == "ab"


def test_child_that_dies_says_how():
    with echo() as child:
        with pytest.raises(ChildError, match="exit status 3") as raised:
            child.call("exit", 3)
        assert raised.value.kind == "Died"
        assert raised.value.details == "last words"


def test_child_that_does_not_answer():
    with echo(timeout_s=30.0) as child:
        child._timeout_s = 0.2
        process = child._process.pid
        with pytest.raises(ChildError, match=r"no answer within 0\.2 s"):
            child.call("sleep", 60)
    assert wait_until_gone([process])


PARENT = """
import test_bench, sys, time
child = test_bench.echo()
print(child.call("process"), flush=True)
child.call("sleep", 600)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_child_ends_with_its_parent(how):
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environment(), text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.send_signal(how)
    assert wait_until_gone([child])


# ---------------------------------------------------------------- the runner


def test_groups_fit_and_begin_with_the_baseline():
    one = Workload(rows=1 << 20, dim=256, batches=0)  # its weights take 1 GiB
    sizes = {"base": 1, "a": 2, "b": 4, "c": 6, "huge": 50, "e": 2, "alone": 8.5, "f": 2}
    racers = [bare(name, size).racer(one) for name, size in sizes.items()]
    room = Footprint(9 * GIB)
    groups, misfits = plan_groups(racers, room)
    names = [[racer.name for racer in group] for group in groups]
    assert names == [["base", "a", "b", "e"], ["base", "c", "f"], ["alone"]]
    assert [racer.name for racer in misfits] == ["huge"]
    (skipped,) = measure(misfits, SHORT, room)
    assert (skipped.name, skipped.status) == ("huge", "skipped")
    assert skipped.reason == "needs 50.0 GiB of RAM, 9.0 GiB may be used"


def test_groups_without_a_baseline_that_fits():
    one = Workload(rows=1 << 20, dim=256, batches=0)
    racers = [bare(name, size).racer(one) for name, size in {"base": 5, "a": 2, "b": 2, "c": 1}.items()]
    groups, misfits = plan_groups(racers, Footprint(4 * GIB))
    assert [[racer.name for racer in group] for group in groups] == [["a", "b"], ["c"]]
    assert [racer.name for racer in misfits] == ["base"]


def test_a_table_too_large_for_a_direct_directory_needs_ram_for_touched_rows_only():
    huge = Workload(rows=10**9)
    ours = next(contender for contender in contenders.STEP if contender.name == "ours-adam")
    records = huge.touched_rows() * 64 * 4 * 3
    assert records < ours.need(huge).host < 2 * records + 2 * contenders.PROCESS_BYTES


def test_rounds_are_interleaved_and_one_computes_at_a_time(tmp_path):
    log = tmp_path / "log"
    names = ("a", "b", "c")
    racers = toys(*(toy(name, partial(make_writer, path=log, name=name)) for name in names))
    effort = Effort(rounds=3, steps=2, seconds=5, threads=1, timeout_s=60)
    results = measure(racers, effort)
    assert [result.name for result in results] == ["a", "b", "c"]
    lines = log.read_text().split("\n")[:-1]
    assert lines[::2] == [line.replace("end", "begin") for line in lines[1::2]]
    turns = "".join(line.split()[1] for line in lines[::2])
    warm_up, a_round = "aaabbbccc", "aaaaabbbbbccccc"  # 3 batches; 3 untimed and 2 timed steps
    assert turns == warm_up + 3 * a_round
    assert [[len(turn.steps_s) for turn in result.turns] for result in results] == [[2, 2, 2]] * 3
    assert all(len(result.first) == 3 and result.turns[-1].rss_bytes > 0 for result in results)


def test_rounds_are_boxed_in_time():
    racers = toys(toy("slow", partial(make_sleeper, seconds=0.06)))
    effort = Effort(rounds=1, steps=1000, seconds=0.15, threads=1, timeout_s=60)
    (result,) = measure(racers, effort)
    (turn,) = result.turns
    assert 1 <= len(turn.steps_s) <= 3
    assert median(turn.steps_s) >= 0.06


def test_a_failing_contender_is_reported_and_the_others_go_on():
    makes = [make_unavailable, make_broken, make_breaking, make_dying]
    racers = toys(toy("good"), *(toy(make.__name__, make) for make in makes))
    results = {result.name: result for result in measure(racers, SHORT)}
    assert {name: (result.status, result.reason) for name, result in results.items()} == {
        "good": ("ok", ""),
        "make_unavailable": ("skipped", "no such package here"),
        "make_broken": ("failed", "ValueError: cannot be made"),
        "make_breaking": ("failed", "ArithmeticError: step 0 is wrong"),
        "make_dying": ("failed", "its process ended with signal SIGKILL (out of memory?)"),
    }
    assert "make_broken" in results["make_broken"].details
    assert results["make_dying"].details == "last words"


@pytest.mark.slow
def test_a_hanging_contender_is_ended():
    racers = toys(toy("good"), toy("hangs", partial(make_sleeper, seconds=600)))
    results = measure(racers, Impatient(rounds=1, steps=1, seconds=5, threads=1, timeout_s=60))
    assert [result.status for result in results] == ["ok", "failed"]
    assert results[1].reason == "TimeoutError: no answer within 5 s"


class Impatient(Effort):
    """Waits for contenders to start, and then no longer than 5 s for an answer."""

    def child(self, factory: Callable[..., object], *args: Any) -> Child:
        child = super().child(factory, *args)
        child._timeout_s = 5
        return child


def test_threads_that_wait_sleep_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert Effort(threads=3).environment() == {
        "EMBEDROCK_THREADS": "3",
        "OMP_NUM_THREADS": "3",
        "MKL_NUM_THREADS": "3",
        "OMP_WAIT_POLICY": "passive",
    }
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert Effort().environment()["OMP_WAIT_POLICY"] == "active"


# ---------------------------------------------------------------- report


def result(name: str, group: int, *rounds_ms: Sequence[float], workload: Workload = TINY) -> Result:
    turns = [Timing([milliseconds / 1e3 for milliseconds in times], 1, 1) for times in rounds_ms]
    return Result(toy(name).racer(workload), group=group, first=[0.5, 0.3, 0.1, 0.2], turns=turns)


def judged(results: Sequence[Result], baseline: str, targets: Sequence[Target]) -> list[Verdict]:
    return judge(targets, report_of(results, baseline).results)


def test_ratios_are_taken_over_the_baseline_of_the_same_rounds():
    results = [
        result("base", 1, [1, 1], [2, 2]),
        result("a", 1, [10, 10], [40, 40]),
        result("base", 2, [3, 3]),
        result("b", 2, [6, 6]),
    ]
    a, b = (report_of(results, "base").results[index] for index in (1, 3))
    assert a["median_ms"] == pytest.approx(25)
    assert a["ratio"] == pytest.approx(25 / 1.5)
    assert a["ratio_range"] == pytest.approx([10, 20])
    assert (a["first_step_ms"], a["first_pass_ms"]) == pytest.approx((500, 150))
    assert b["ratio"] == pytest.approx(2)


def test_targets_compare_through_the_baseline_where_contenders_never_met():
    results = [
        result("base", 1, [1]),
        result("fast", 1, [2]),
        result("base", 2, [3]),
        result("slow", 2, [30]),
    ]
    verdicts = judged(results, "base", [faster("fast", "slow", 6), faster("base", "slow", 11)])
    assert [verdict.measured for verdict in verdicts] == pytest.approx([5, 10])
    assert [verdict.reached for verdict in verdicts] == [False, False]


def test_targets_are_judged_only_for_their_size_and_for_who_was_measured():
    results = [result("fast", 1, [125]), result("slow", 1, [1000])]
    targets = [
        faster("fast", "slow", 7),
        faster("fast", "slow", 7, rows=TINY.rows + 1),
        faster("fast", "slow", 7, lookups=TINY.lookups + 1),
        faster("fast", "absent", 7),
        faster("slow", "fast", 7, at_most=True),
    ]
    verdicts = judged(results, "fast", targets)
    assert verdicts == [
        Verdict("fast faster than slow", 8.0, 7, "x"),
        Verdict("time of slow over that of fast", 8.0, 7, "x", at_most=True),
    ]
    assert [verdict.reached for verdict in verdicts] == [True, False]


def test_spread_of_one_and_of_many():
    assert spread([3.0]) == (3.0, 3.0, 3.0)
    low, middle, high = spread([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (low, middle, high) == (2.0, 3.0, 4.0)
    assert middle == median([1.0, 2.0, 3.0, 4.0, 5.0])


def test_the_table_shows_everyone_and_why_someone_is_missing():
    skipped = Result(toy("big").racer(TINY), status="skipped", reason="needs 50 GiB of RAM")
    results = [result("base", 1, [1.5]), result("other", 1, [300]), skipped]
    lines = format_times(report_of(results, "base").results, "base").splitlines()
    assert lines[0].split()[:2] == ["contender", "ms"]
    assert lines[2].split()[:2] == ["base", "1.5"]
    assert lines[3].split()[:2] == ["other", "300"]
    assert "200x" in lines[3]
    assert lines[-1] == "big: skipped: needs 50 GiB of RAM"


def test_the_table_without_any_measurement():
    skipped = Result(toy("big").racer(TINY), status="skipped", reason="why")
    text = format_times(report_of([skipped], "big").results, "big")
    assert text == "nothing was measured\nbig: skipped: why"


def test_verdicts_show_both_directions():
    text = format_verdicts([Verdict("speed", 8, 7, "x"), Verdict("time", 0.5, 0.2, "s", at_most=True)])
    assert [line.split("  ")[-1].strip() for line in text.splitlines()[2:]] == ["reached", "NOT reached"]
    assert "at least 7 x" in text
    assert "at most 0.2 s" in text


# ---------------------------------------------------------------- command line


def test_a_sketch_counts_within_its_bounds(capsys):
    found: Any = open_ids._counted(200_000)
    assert found["sketch_bytes"] / found["ids"] < 5.37
    assert 0 < found["wrong_share"] < 0.01
    assert "200,000 ids, 2 times each" in capsys.readouterr().out


def test_help_names_every_benchmark_and_contender(capsys):
    for arguments in (["--help"], ["step", "--help"]):
        with pytest.raises(SystemExit) as exit_:
            cli.main(arguments)
        assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("step", "lookup", "plan", "rows", "create", "all"))
    assert all(contender.name in text for contender in contenders.STEP)


BAD_OPTIONS = {
    "step --rows 0": "must be a positive whole number",
    "step --rows 1.5": "must be a positive whole number",
    "step --rows many": "got 'many'",
    "step --rows 3G": "at most 2,654,435,760 rows",
    "step --zipf -1": "must be a number of at least 0",
    "step --zipf nan": "got 'nan'",
    "step --seconds 0": "must be a number",
    "step --rounds -3": "got '-3'",
    "step --contenders ours-adm": "no contender is called 'ours-adm': choose from ours-adam",
    "step --json /no/such/folder/x.json": "must be a file in a folder that exists",
    "rows --rows 1M,x": "got 'x'",
    "create --touch 0": "must be a positive whole number",
    "fly": "invalid choice: 'fly'",
    "": "required: BENCHMARK",
}


@pytest.mark.parametrize("line", BAD_OPTIONS)
def test_bad_options_are_refused_before_anything_runs(line, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(line.split())
    assert exit_.value.code == 2
    assert BAD_OPTIONS[line] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8192", 8192), ("4M", 4_000_000), ("1e9", 10**9), ("2_5k", 25_000), ("1.5m", 1_500_000)],
)
def test_counts_are_written_as_people_do(text, expected):
    assert count(text) == expected


def test_contenders_keep_the_order_given():
    chosen = options.chosen(contenders.STEP, "torch-sparse-sgd,ours-*,ours-adam")
    ours = [contender.name for contender in contenders.STEP if contender.name.startswith("ours")]
    assert [contender.name for contender in chosen] == ["torch-sparse-sgd", *ours]


def test_contenders_have_unique_names_and_targets_name_them():
    for bench in cli.BENCHES:
        names = [contender.name for contender in bench.contenders]
        assert len(set(names)) == len(names)
    for bench in (benches.STEP, benches.LOOKUP, benches.UNIQUE):
        names = [contender.name for contender in bench.contenders]
        races = [target.measure for target in bench.targets]
        assert races
        assert all(isinstance(race, Race) and {*race.fast, *race.slow} <= {*names} for race in races)


def test_bench_is_a_subcommand_of_the_program():
    parser = argparse.ArgumentParser("embedrock")
    cli.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["bench", "step", "--contenders", "torch-sparse-sgd", "--rows", "10M"])
    assert (arguments.rows, arguments.contenders[0].name) == (10_000_000, "torch-sparse-sgd")
    assert callable(arguments.run)


def test_the_command_line_imports_no_framework():
    code = "import sys, embedrock.bench.cli; print([n for n in ('torch', 'numba') if n in sys.modules])"
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=True)
    assert output.stdout == "[]\n"


def run_json(tmp_path: Path, *arguments: str, status: int = 0) -> dict:
    path = tmp_path / "found.json"
    assert cli.main([*arguments, f"--json={path}"]) == status
    return json.loads(path.read_text())


def check_lines(document: dict, names: Sequence[str]) -> None:
    assert [line["name"] for line in document["results"]] == list(names)
    assert document["schema"] == 1
    assert {"command", "benchmark", "options", "machine", "verdicts", "failures"} <= set(document)
    for line in document["results"]:
        assert line["status"] == "ok", line["reason"]
        assert line["least_ms"] <= line["quartiles_ms"][0] <= line["median_ms"] <= line["quartiles_ms"][1]
        assert line["steps"] == 4
        assert len(line["rounds_ms"]) == 2
        assert line["ratio_range"][0] <= line["ratio_range"][1]
        assert 0 < line["rss_bytes"] <= line["peak_bytes"]


@pytest.mark.usefixtures("in_process")
def test_step_with_one_contender_of_each_kind(tmp_path, capsys):
    pytest.importorskip("torch")
    names = ["torch-sparse-adam", "ours-adam"]
    document = run_json(tmp_path, "step", *TINY_OPTIONS, f"--contenders={','.join(names)}")
    check_lines(document, names)
    assert document["options"]["threads"] == 1
    assert document["results"][0]["workload"]["rows"] == 1000
    assert [verdict["what"] for verdict in document["verdicts"]] == ["ours-adam faster than torch-sparse-adam"]
    output = capsys.readouterr()
    assert "1,000 x 8 float32, batch 16 x 2 = 32 lookups, Zipf(1.05)" in output.out
    assert "ours-adam: preparing" in output.err


@pytest.mark.slow
def test_step_with_all_contenders(tmp_path):
    pytest.importorskip("fbgemm_gpu")
    names = [contender.name for contender in contenders.STEP]
    check_lines(run_json(tmp_path, "step", *TINY_OPTIONS), names)


@pytest.mark.slow
def test_fbgemm_that_does_not_import_is_skipped(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    package = tmp_path / "fbgemm_gpu"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('undefined symbol: x')")
    monkeypatch.syspath_prepend(tmp_path)
    document = run_json(tmp_path, "step", *TINY_OPTIONS, "--contenders=fbgemm-rowwise-sum")
    (line,) = document["results"]
    assert line["status"] == "skipped"
    assert line["reason"].startswith("fbgemm_gpu does not import: undefined symbol: x. pip install")
    assert document["failures"] == []
    assert "fbgemm-rowwise-sum: skipped: fbgemm_gpu does not import" in capsys.readouterr().out


def test_what_does_not_fit_is_skipped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "available_bytes", lambda: 2 * GIB)
    document = run_json(tmp_path, "step", "--rows=100M", "--contenders=torch-sparse-adam", "--batches=1")
    assert document["results"][0]["status"] == "skipped"
    assert "torch-sparse-adam: skipped: needs 72.0 GiB of RAM, 1.8 GiB may be used" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("bench", ["lookup", "unique"])
def test_in_processes_of_their_own(bench, tmp_path):
    pytest.importorskip("torch")
    names = [contender.name for contender in (contenders.LOOKUP if bench == "lookup" else contenders.UNIQUE)]
    check_lines(run_json(tmp_path, bench, *TINY_OPTIONS), names)


@pytest.mark.usefixtures("in_process")
def test_lookup(tmp_path):
    pytest.importorskip("torch")
    names = [contender.name for contender in contenders.LOOKUP[:2]]
    check_lines(run_json(tmp_path, "lookup", *TINY_OPTIONS, f"--contenders={','.join(names)}"), names)


@pytest.mark.usefixtures("in_process")
def test_unique(tmp_path):
    pytest.importorskip("torch")
    names = [contender.name for contender in contenders.UNIQUE]
    check_lines(run_json(tmp_path, "unique", *TINY_OPTIONS), names)


def test_unique_measures_both_sizes_unless_told():
    workloads = Task(benches.UNIQUE, cli._parser().parse_args(["unique", "--rows=1000"])).workloads
    assert [(one.rows, one.lookups) for one in workloads] == [(1000, 26 * 65_536), (1000, 16_384)]


def test_rows_compares_sizes_whose_hot_rows_are_as_many(monkeypatch: pytest.MonkeyPatch):
    met = []
    monkeypatch.setattr(benches, "compare", lambda racers, *_: met.extend(racers) or Report())
    benches.compare_rows(Task(benches.TABLE_SIZES, cli._parser().parse_args(["rows", "--rows=1000,100000"])))
    assert [(one.workload.rows, one.workload.ranks) for one in met] == [(1000, 1000), (100_000, 1000)]


@pytest.mark.slow
def test_rows(tmp_path):
    pytest.importorskip("torch")
    options = [option for option in TINY_OPTIONS if not option.startswith("--rows")]
    document = run_json(tmp_path, "rows", "--rows=1000,100000", *options)
    check_lines(document, ["1,000 rows", "100,000 rows"])
    assert [line["workload"]["ranks"] for line in document["results"]] == [1000, 1000]


def test_create(tmp_path, capsys):
    document = run_json(tmp_path, "create", "--rows=1M", "--dim=8", "--touch=1000", "--runs=1", "--threads=1")
    created, touched, imported = document["results"]
    assert [line["name"] for line in document["results"]] == ["create", "touch", "import"]
    assert created["seconds"] > 0
    assert (touched["touched"], touched["record_bytes"]) == (1000, 96)
    assert imported["frameworks"] == 0
    assert len(document["verdicts"]) == 5
    assert "creating the table" in capsys.readouterr().out


def test_all_runs_every_line_and_joins_the_targets(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    monkeypatch.setattr(
        cli,
        "LINES",
        (
            ("unique", *TINY_OPTIONS, "--contenders=numpy-unique"),
            ("create", "--rows=1000", "--dim=8", "--touch=10", "--runs=1"),
        ),
    )
    document = run_json(tmp_path, "all", "--timeout=100")
    assert [line["name"] for line in document["results"]] == ["numpy-unique", "create", "touch", "import"]
    assert "== all targets" in capsys.readouterr().out
    assert document["options"]["timeout_s"] == 100


def test_all_has_only_lines_that_parse():
    for line in cli.LINES:
        assert callable(cli._parser().parse_args(line).bench.measure)


def toy_bench(*contenders: StepContender) -> Bench:
    options = ("rounds", "steps")
    return Bench("toy", "toys", benches.compare_contenders, options, contenders, workloads=(TINY,))


def test_a_failure_is_the_exit_status(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "BENCHES", (toy_bench(toy("good"), toy("broken", make_broken)),))
    document = run_json(tmp_path, "toy", "--rounds=1", "--steps=1", status=1)
    assert [line["status"] for line in document["results"]] == ["ok", "failed"]
    assert document["failures"][0]["name"] == "broken"
    output = capsys.readouterr()
    assert "broken: failed: ValueError: cannot be made" in output.out
    assert "Traceback" in output.err


INTERRUPTED = """
import sys, test_bench
from functools import partial
from embedrock.bench import cli
slow = test_bench.toy("slow", partial(test_bench.make_sleeper, seconds=600))
cli.BENCHES = (test_bench.toy_bench(test_bench.toy("good"), slow),)
sys.exit(cli.main(["toy"]))
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_ctrl_c_leaves_nothing_behind():
    command = [sys.executable, "-c", INTERRUPTED]
    with subprocess.Popen(
        command, env=child_environment(), stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as program:
        assert program.stderr is not None
        assert any("slow: preparing" in line for line in program.stderr)
        children = list(children_of(program.pid, 2))
        os.killpg(program.pid, signal.SIGINT)
        errors = program.stderr.read()
    assert program.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert wait_until_gone(children)


def children_of(process: int, count: int) -> list[int]:
    """Wait until a process has `count` children, and return them."""
    listing = Path(f"/proc/{process}/task/{process}/children")
    deadline = time.monotonic() + 30
    while len(found := [int(child) for child in listing.read_text().split()]) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found
