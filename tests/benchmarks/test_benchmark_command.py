"""``python -m benchmarks``: each benchmark at a tiny size, and its options. No speed is asserted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_benchmark_processes import wait_until_gone
from test_benchmark_runner import TINY, make_broken, toy

from benchmarks import __main__ as command
from benchmarks import runner, serving
from benchmarks.benchmark import Benchmark, Task, chosen
from benchmarks.implementations import Implementation
from benchmarks.processes import child_environment
from benchmarks.step import STEP
from benchmarks.targets import Race

ROUNDS = ["--rounds=2", "--steps=2", "--threads=1"]
TABLE = ["--rows=1000", "--dim=8", "--batch=16", "--batches=3", *ROUNDS]
DISK = ["--dim=8", "--batch=64", "--threads=1", "--memory=1MiB"]


def run(tmp_path: Path, *words: str, status: int = 0) -> dict[str, Any]:
    file = tmp_path / "found.json"
    assert command.main([*words, f"--json={file}"]) == status
    return json.loads(file.read_text())


def lines_of(document: dict[str, Any]) -> dict[str, Any]:
    assert document["schema"] == 2
    assert {"command", "benchmark", "options", "machine", "targets", "failures"} <= set(document)
    for line in document["results"]:
        assert line.get("status", "ok") == "ok", line["reason"]
        if "steps" in line and "rounds_ms" in line:
            assert line["least_ms"] <= line["quartiles_ms"][0] <= line["median_ms"] <= line["quartiles_ms"][1]
            assert 0 < line["rss_bytes"] <= line["peak_bytes"]
    return {line["name"]: line for line in document["results"]}


def targets_of(document: dict[str, Any]) -> set[str]:
    return {target["what"] for target in document["targets"]}


# ---------------------------------------------------------------- in RAM


@pytest.mark.usefixtures("in_process")
def test_step_is_the_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    names = ["torch-sparse-adam", "ours-adam"]
    document = run(tmp_path, *TABLE, f"--contenders={','.join(names)}")  # the option's name in release 0.1
    lines = lines_of(document)
    assert list(lines) == names
    assert all(line["steps"] == 4 and len(line["rounds_ms"]) == 2 for line in lines.values())
    assert document["benchmark"] == "step"
    assert document["options"]["threads"] == 1
    assert lines["ours-adam"]["workload"]["rows"] == 1000
    assert targets_of(document) == {"ours-adam faster than torch-sparse-adam"}
    output = capsys.readouterr()
    assert "1,000 x 8 float32, batch 16 x 2 = 32 lookups, Zipf(1.05)" in output.out
    assert "ours-adam: preparing" in output.err


@pytest.mark.usefixtures("in_process")
def test_lookup_and_rows(tmp_path: Path):
    assert list(lines_of(run(tmp_path, "lookup", *TABLE))) == ["ours", "ours-first-values", "torch"]
    lines = lines_of(run(tmp_path, "rows", *TABLE[1:], "--rows=1000,100000"))
    assert [(line["workload"]["rows"], line["workload"]["ranks"]) for line in lines.values()] == [
        (1000, 1000),
        (100_000, 1000),
    ]


@pytest.mark.usefixtures("in_process")
def test_ids_and_update(tmp_path: Path):
    document = run(tmp_path, "ids", "--rows=1000", "--dim=8", "--batches=3", *ROUNDS)
    lines = document["results"]
    assert [line["workload"]["batch"] for line in lines[::3]] == [64, 1024, 16_384]
    assert all(line["calls"] > 0 and line["least_ratio"] > 0 for line in lines)
    assert len(document["targets"]) == 3
    document = run(tmp_path, "update", *TABLE[:-1], f"--beside={tmp_path}")  # in this process: the same Embedrock
    assert set(lines_of(document)) == {"ours-table", "ours-group", "ours-table-before", "ours-group-before"}
    assert "least time of ours-group over before" in targets_of(document)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(("name", "more"), [("groups", ["27-tables"]), ("dlrm", [])])
def test_many_tables(name: str, more: list[str], tmp_path: Path):
    sizes = ["--max-rows=50", "--max-bag=2", "--dim=4", "--batch=8", "--batches=2", *ROUNDS]
    names = ["ours-rowwise-adagrad", "ours-adam-side-by-side", "torch-sparse-adam", *more]
    assert list(lines_of(run(tmp_path, name, *sizes, f"--implementations={','.join(names)}"))) == names


@pytest.mark.usefixtures("in_process")
def test_create(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    document = run(tmp_path, "create", "--rows=1M", "--dim=8", "--touch=1000", "--runs=1", "--threads=1")
    created, touched = lines_of(document).values()
    assert created["seconds"] > 0
    assert (touched["touched"], touched["record_bytes"]) == (1000, 96)
    assert len(document["targets"]) == 3
    assert "creating the table" in capsys.readouterr().out


def test_shards_of_one_rank(tmp_path: Path):
    document = run(tmp_path, "shards", *TABLE, "--features=2", "--implementations=ours-sharded-1")
    (one,) = lines_of(document).values()
    assert one["cpu_ms"] > 0
    assert "sent_bytes" not in one  # nothing is shared


@pytest.mark.slow
def test_shards_of_two_ranks(tmp_path: Path):
    names = "ours-alone,ours-sharded-2"
    document = run(tmp_path, "shards", *TABLE, "--features=2", f"--implementations={names}")
    alone, two = lines_of(document).values()
    assert two["sent_bytes"] == pytest.approx(two["formula_bytes"], rel=0.3)
    assert "sent_bytes" not in alone
    assert "bytes of ours-sharded-2 off their formula" in targets_of(document)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["step", "lookup", "shards"])
def test_every_implementation_in_processes_of_their_own(name: str, tmp_path: Path):
    document = run(tmp_path, name, *TABLE)
    assert not document["failures"]
    assert all(line["status"] == "ok" or "does not import" in line["reason"] for line in document["results"])


# ---------------------------------------------------------------- Keras


@pytest.mark.slow  # a process that imports TensorFlow
def test_keras(tmp_path: Path):
    pytest.importorskip("tensorflow")
    names = "ours-adam,keras-adam,ours-mirrored"
    document = run(tmp_path, "keras", *TABLE, "--features=1", f"--implementations={names}")
    assert list(lines_of(document)) == names.split(",")
    assert "1,000 rows: time of ours-mirrored over that of ours-adam" in targets_of(document)


# ---------------------------------------------------------------- on disk


@pytest.mark.usefixtures("in_process")
@pytest.mark.filterwarnings("ignore:.*is closed with changes since")  # its process would have ended
def test_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("benchmarks.disk.PROBE_S", 0.01)
    monkeypatch.setattr("benchmarks.disk.SETTLE_STEPS", 2)
    document = run(tmp_path, "disk", *DISK, "--rows=30k", "--steps=4", "--warmup=3", "--implementations=ours,memmap")
    lines = lines_of(document)
    assert list(lines) == ["ours", "ours-prefetch-2", "ours-prefetch-32", "memmap"]
    for name in list(lines)[:3]:
        assert min(lines[name][key] for key in ("misses_per_step", "reads_per_s", "disk_reads_per_s")) > 0
        assert lines[name]["cache_slots"] < 30_000
    assert {"ours faster than memmap", "bytes written over those of changed rows"} <= targets_of(document)
    assert "cgroup" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]  # files are removed


@pytest.mark.usefixtures("in_process")
@pytest.mark.filterwarnings("ignore:.*is closed with changes since")
def test_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    document = run(tmp_path, "commit", *DISK, "--rows=100k", "--memory=16MiB", "--sizes=100,3000", "--rounds=1")
    small, large, background = lines_of(document).values()
    assert small["rows"] * small["record_bytes"] <= small["bytes_written"] < large["bytes_written"]
    assert background["rows"] == 3000
    assert "rate of a commit of 3,000 rows, over the disk's own" in targets_of(document)
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


@pytest.mark.usefixtures("in_process")
@pytest.mark.filterwarnings("ignore:.*is closed with changes since")
def test_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("benchmarks.stream.STEPS_A_COMMIT", 20)
    sizes = ["--rows=10k", "--lookups=16k", "--most-rows=500", "--dim=4", "--batch=200"]
    document = run(tmp_path, "stream", *sizes, "--threads=1", "--memory=1MiB")
    (line,) = lines_of(document).values()
    assert line["rows"] <= 500 + 200
    assert line["evicted"] > 0
    assert len(document["targets"]) == 4


# ---------------------------------------------------------------- options, failures, interruption


def test_help_names_every_benchmark_and_implementation(capsys: pytest.CaptureFixture[str]):
    for words in (["--help"], ["step", "--help"]):
        with pytest.raises(SystemExit) as ended:
            command.main(words)
        assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(one.name in text for one in (*command.BENCHMARKS, *STEP.implementations))


BAD = {
    "step --rows 0": "must be a positive whole number",
    "step --rows 3G": "at most 2,654,435,760 rows",
    "step --zipf nan": "got 'nan'",
    "step --seconds 0": "must be a number",
    "step --implementations ours-adm": "no implementation is called 'ours-adm': choose from ours-adam",
    "step --json /no/such/folder/x.json": "must be a file in a folder that exists",
    "rows --rows 1M,x": "got 'x'",
    "create --touch 0": "must be a positive whole number",
    "disk --memory much": "must be a size such as",
    "disk --folder no/such": "must be a folder that exists: got 'no/such'",
    "disk --batches 3": "unrecognized arguments: --batches 3",
    "commit --sizes 0": "must be a positive whole number",
    "gpu --parts forum,disk": "must be of forum, cache: got 'disk'",
    "fly": "invalid choice: 'fly'",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_options_are_refused_before_anything_runs(line: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        command.main(line.split())
    assert ended.value.code == 2
    assert BAD[line] in capsys.readouterr().err


def test_names_are_unique_and_targets_name_them():
    for benchmark in command.BENCHMARKS:
        names = [one.name + way for one in benchmark.implementations for way in one.ways]
        assert len(set(names)) == len(names)
        races = [target.measure for target in benchmark.targets if isinstance(target.measure, Race)]
        known = {*names, "ours-c10-wide"}
        assert not names or all({*race.fast, *race.slow} <= known for race in races)


def test_implementations_keep_the_order_given():
    ours = [one.name for one in STEP.implementations if one.name.startswith("ours")]
    some = chosen(STEP.implementations, "torch-sparse-sgd,ours-*,ours-adam")
    assert [one.name for one in some] == ["torch-sparse-sgd", *ours]


def test_defaults_are_the_documented_workload():
    arguments = command._parser().parse_args(["disk", "--rows=20M"])
    workload = Task(arguments.benchmark, arguments).workload
    assert (workload.rows, workload.dim, workload.lookups, workload.zipf) == (20_000_000, 64, 16_384, 1.05)


def test_the_command_line_imports_no_framework():
    code = "import sys, benchmarks.__main__; print([n for n in ('torch', 'numba', 'keras') if n in sys.modules])"
    output = subprocess.run(
        [sys.executable, "-c", code], env=child_environment(), capture_output=True, text=True, check=True
    )
    assert output.stdout == "[]\n"


def test_an_implementation_that_does_not_fit_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "available_bytes", lambda: 2 << 30)
    document = run(tmp_path, "step", "--rows=100M", "--implementations=torch-sparse-adam", "--batches=1")
    (line,) = document["results"]
    assert (line["status"], line["reason"]) == ("skipped", "needs 72.0 GiB of RAM, 1.8 GiB may be used")


@pytest.mark.slow
def test_fbgemm_that_does_not_import_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "fbgemm_gpu").mkdir()
    (tmp_path / "fbgemm_gpu" / "__init__.py").write_text("raise OSError('undefined symbol: x')")
    monkeypatch.syspath_prepend(tmp_path)
    (line,) = run(tmp_path, "step", *TABLE, "--implementations=fbgemm-rowwise-sum")["results"]
    assert line["status"] == "skipped"
    assert line["reason"].startswith("fbgemm_gpu does not import: undefined symbol: x. pip install")


def toys(*implementations: Implementation) -> tuple[Benchmark, ...]:
    return (Benchmark("toy", "toys", implementations, workloads=(TINY,), arguments=("rounds", "steps")),)


@pytest.mark.usefixtures("in_process")
def test_a_failure_is_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(command, "BENCHMARKS", toys(toy("good"), toy("broken", make_broken)))
    document = run(tmp_path, "toy", "--rounds=1", "--steps=1", status=1)
    assert [line["status"] for line in document["results"]] == ["ok", "failed"]
    assert document["failures"][0]["name"] == "broken"
    output = capsys.readouterr()
    assert "broken: failed: ValueError: cannot be made" in output.out
    assert "Traceback" in output.err


INTERRUPTED = """
import sys, test_benchmark_command as tests
from functools import partial
from test_benchmark_runner import make_sleeper, toy
tests.command.BENCHMARKS = tests.toys(toy("good"), toy("slow", partial(make_sleeper, seconds=600)))
sys.exit(tests.command.main(["toy"]))
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_ctrl_c_leaves_nothing_behind():
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        env=child_environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as program:
        assert program.stderr is not None
        assert any("slow: preparing" in line for line in program.stderr)
        children = children_of(program.pid, 2)
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


@pytest.mark.usefixtures("in_process")
def test_serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving, "MANY", 2000)
    monkeypatch.setattr(serving, "REFRESH_S", 0.01)
    words = ["--rows=4000", "--dim=8", "--batch=64", "--rounds=2", "--steps=50", "--threads=1", f"--folder={tmp_path}"]
    document = run(tmp_path, "serving", *words)
    lines = lines_of(document)
    assert {line["side"] for line in lines.values()} == {"cache", "map"}
    assert len({line["row"] for line in lines.values()}) == len(serving.ROWS) + 1  # two sizes of `refresh`
    assert all(line["least_p50"] <= line["p50"] <= line["p99_9"] for line in lines.values() if "p50" in line)
    assert len(targets_of(document)) == 41
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
