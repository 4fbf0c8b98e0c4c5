"""The benchmarks of tables on disk at toy size: cgroups, the disk's own speed, what is reported, what is left behind.

No speed is asserted here.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentTypeError, Namespace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedrock.bench import cli
from embedrock.bench.disk import commits, contenders, raw, training
from embedrock.bench.disk.contenders import CONTENDERS, DiskContender, DiskSession, Job, Memmap, MemmapRecords
from embedrock.bench.disk.effort import DiskEffort
from embedrock.bench.disk.files import SpaceError, scratch_folder
from embedrock.bench.disk.training import DISK, targets
from embedrock.bench.harness import cgroups
from embedrock.bench.harness.bench import Task
from embedrock.bench.harness.cgroups import MemoryCgroup, NoCgroupError, confined, outside_bytes
from embedrock.bench.harness.processes import ChildError, child_environment
from embedrock.bench.harness.runner import Racer, Result
from embedrock.bench.harness.targets import judge
from embedrock.bench.harness.workload import SCATTER, Workload
from embedrock.machine.probe import write_rate
from embedrock.terminal.arguments import size

MIB = 1 << 20
TINY = Workload(rows=3000, dim=8, batch=64, features=2)
TINY_OPTIONS = ["--rows=3k", "--dim=8", "--batch=64", "--steps=4", "--warmup=3", "--threads=1"]
BY_NAME = {contender.name: contender for contender in CONTENDERS}


@pytest.fixture(autouse=True)
def _short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw, "DEPTHS", (2,))
    monkeypatch.setattr(raw, "PROBE_S", 0.01)
    monkeypatch.setattr(raw.probe, "__defaults__", (0.01,))
    monkeypatch.setattr(raw.again, "__defaults__", (0.01,))


def tiny_effort(folder: Path) -> DiskEffort:
    return DiskEffort(rounds=1, steps=4, threads=1, timeout_s=120, folder=folder, memory=2 * MIB, warmup=3)


# ---------------------------------------------------------------- the stream and its oracle


def test_the_stream_is_endless_and_the_same_each_time():
    first = TINY.batch_at(0)
    assert first.shape == (64, 2)
    assert np.array_equal(first, TINY.batch_at(0))
    assert not np.array_equal(first, TINY.batch_at(10**9))


@pytest.mark.parametrize("zipf", [0.0, 0.5, 1.0, 1.05, 2.0])
@pytest.mark.parametrize("slots", [0, 100, 4999, 5000, 10**6])
def test_expected_misses_are_those_of_the_most_popular_rows_kept(zipf: float, slots: int):
    workload = Workload(rows=5000, batch=100, features=2, zipf=zipf)
    kept = np.arange(min(slots, 5000)) * SCATTER % 5000
    batches = [np.unique(workload.batch_at(index)) for index in range(400)]
    measured = np.mean([np.count_nonzero(~np.isin(ids, kept)) for ids in batches])
    assert workload.expected_misses(slots) == pytest.approx(measured, rel=0.05, abs=0.05)


# ---------------------------------------------------------------- cgroups


class Eater:
    """Takes RAM in a process of its own."""

    def __init__(self) -> None:
        self._meals: list[np.ndarray] = []

    def eat(self, mebibytes: int) -> int:
        self._meals.append(np.ones(mebibytes * MIB // 8))
        return outside_bytes()


needs_cgroups = pytest.mark.skipif(bool(cgroups.why_not()), reason=f"no memory cgroup: {cgroups.why_not()}")


@needs_cgroups
def test_a_cgroup_counts_bounds_and_goes():
    with MemoryCgroup(96 * MIB) as cgroup:
        with confined(96 * MIB, Eater, environment={}, timeout_s=60) as (child, own):
            assert own is not None
            assert child.call("eat", 20) > 0
            assert 20 * MIB <= own.peak_bytes <= 96 * MIB
            assert own.used_bytes >= 20 * MIB
            with pytest.raises(ChildError, match=r"SIGKILL \(out of memory\?\)"):
                child.call("eat", 200)
        assert not own.folder.exists()
        assert cgroup.used_bytes < 20 * MIB
    assert not cgroup.folder.exists()


def fake_cgroups(root: Path, lines: str, files: dict[str, str]) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def make_with_files(names: tuple[str, ...], folder: Path) -> None:
    os.mkdir(folder)
    for name in names:
        (folder / name).write_text("0")


def test_version_2_takes_the_first_group_that_hands_memory_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = {
        "sys/fs/cgroup/cgroup.controllers": "cpu memory",
        "sys/fs/cgroup/user/cgroup.subtree_control": "cpu memory",
        "sys/fs/cgroup/cgroup.subtree_control": "cpu memory",
    }
    fake_cgroups(tmp_path, "0::/user/session\n", files)  # the group itself has no subtree_control: it is refused
    monkeypatch.setattr(Path, "mkdir", partial(make_with_files, ("memory.max", "memory.current", "memory.peak")))
    monkeypatch.setattr(Path, "mkdir", lambda folder: make_with_files(("memory.max", "memory.current"), folder))
    cgroup = MemoryCgroup(5 * MIB, tmp_path)
    assert cgroup.folder.parent == tmp_path / "sys/fs/cgroup/user"
    assert (cgroup.folder / "memory.max").read_text().startswith(str(5 * MIB))
    (cgroup.folder / "memory.current").write_text("123\n")
    assert cgroup.peak_bytes == 123  # an old kernel has no memory.peak
    (cgroup.folder / "memory.peak").write_text("456\n")
    assert cgroup.peak_bytes == 456


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("", "no memory controller of cgroups is mounted"),
        ("4:memory:/mine\n", "No such file or directory"),
        ("0::/mine\n", "no memory controller of cgroups is mounted"),
    ],
)
def test_without_a_cgroup(tmp_path: Path, lines: str, reason: str):
    fake_cgroups(tmp_path, lines, {})
    with pytest.raises(NoCgroupError, match=reason):
        MemoryCgroup(MIB, tmp_path)


def test_children_run_without_a_cgroup_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cgroups, "ROOT", Path("/no/such/root"))
    monkeypatch.setattr(MemoryCgroup.__init__, "__defaults__", (Path("/no/such/root"),))
    with confined(MIB, Eater, environment={}, timeout_s=60) as (child, cgroup):
        assert cgroup is None
        assert child.call("eat", 20) == 0


# ---------------------------------------------------------------- the disk itself


@pytest.mark.parametrize("reader", [raw.own, raw.fio])
def test_readers_read(tmp_path: Path, reader: Any):
    if reader is raw.fio and not raw.shutil.which("fio"):
        pytest.skip("fio is not installed")
    paths = [tmp_path / name for name in ("one", "t:wo")]
    for path in paths:
        path.write_bytes(bytes(4 * MIB))
    assert reader(paths, 2, 0.01) > 0


def test_probe_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(raw.shutil, "which", lambda name: None)
    (tmp_path / "file").write_bytes(bytes(MIB))
    (rate,) = raw.probe([tmp_path / "file"])
    assert (rate.reader, rate.depth) == ("own", 2)
    assert raw.again(rate, [tmp_path / "file"]).reads_per_s > 0


def test_write_rate_leaves_nothing(tmp_path: Path):
    assert write_rate(tmp_path / "file", 3 * MIB) > 0
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- contenders


def test_recipes_are_sparse_adam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    torch = pytest.importorskip("torch")
    job = Job(TINY, tmp_path, MIB)
    monkeypatch.setenv("EMBEDROCK_THREADS", "1")
    trained = {}
    for name in ("memmap", "torch-from-file", "memmap-records"):
        contender = BY_NAME[name]
        assert contender.write is not None
        contender.write(job)
        same_start(job)
        session = contender.session(job)
        assert session.steps(0, 3, 60.0) == 3
        trained[name] = weights_of(job, contender)
    for name in ("torch-from-file", "memmap-records"):
        np.testing.assert_allclose(trained[name], trained["memmap"], rtol=1e-5, atol=1e-6)
    assert not np.array_equal(trained["memmap"], first_weights())
    del torch


def first_weights() -> np.ndarray:
    return np.random.default_rng(1).random((TINY.rows, TINY.dim), dtype=np.float32)


def same_start(job: Job) -> None:
    """Give all files the same weights, and states of zeros."""
    records = np.zeros((TINY.rows, 3, TINY.dim), np.float32)
    records[:, 0] = first_weights()
    for column, name in enumerate(contenders.ARRAYS):
        np.ascontiguousarray(records[:, column]).tofile(job.folder / name)
    records.tofile(job.folder / "records")


def weights_of(job: Job, contender: DiskContender) -> np.ndarray:
    if contender.session is MemmapRecords:
        return np.fromfile(job.folder / "records", np.float32).reshape(TINY.rows, 3, TINY.dim)[:, 0]
    return np.fromfile(job.folder / "weights", np.float32).reshape(TINY.rows, TINY.dim)


def test_memmap_records_keep_states_apart(tmp_path: Path):
    job, states = Job(TINY, tmp_path, MIB), []
    contenders.write_records(job)
    contenders.write_arrays(job)
    same_start(job)
    for session in (Memmap(job), MemmapRecords(job)):
        session.steps(0, 2, 60.0)
    states = [np.fromfile(tmp_path / name, np.float32) for name in contenders.ARRAYS]
    records = np.fromfile(tmp_path / "records", np.float32).reshape(TINY.rows, 3, TINY.dim)
    for column, state in enumerate(states):
        np.testing.assert_array_equal(records[:, column].ravel(), state)


# ---------------------------------------------------------------- bench disk


FEW, ALL = ("ours", "ours-prefetch-32", "memmap-records"), tuple(n for n in BY_NAME if not n.startswith("torch"))


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_disk_with_few_contenders(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    check_disk(FEW, tmp_path, capsys, monkeypatch)


@pytest.mark.slow
def test_disk_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    check_disk(ALL, tmp_path, capsys, monkeypatch)


def check_disk(
    names: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--rows=30k", "--memory=1MiB", f"--contenders={','.join(names)}", "--json=out.json"]
    status = cli.main(["disk", *TINY_OPTIONS, *options])
    output = capsys.readouterr()
    assert status == 0, output.err
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]  # files are removed
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["options"]["memory"] == 1 << 20
    assert str(tmp_path) not in (tmp_path / "out.json").read_text()
    lines = {line["name"]: line for line in found["results"]}
    assert lines.keys() == {*names, "raw-disk"}
    for name in {"ours", "ours-prefetch-2", "ours-prefetch-32"}.intersection(names):
        assert lines[name]["misses_per_step"] > 0
        assert lines[name]["reads_per_s"] > 0
        assert lines[name]["cache_slots"] < 30_000
    assert lines["ours-prefetch-32"]["amplification"]["bytes_written"] > 0
    wanted = {"steps/s of ours", "misses of ours", "bytes written"}
    wanted |= {"step with all rows resident"} if "ours-in-ram" in names else set()
    assert wanted <= {verdict["what"].split(" over ")[0] for verdict in found["verdicts"]}
    for text in ("ours-prefetch-32", "memmap-records", "4 KiB random reads/s", "cgroup"):
        assert text in output.out


@pytest.mark.slow
def test_a_contender_that_fails_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    broken = DiskContender("broken", "cannot be made", BrokenSession, contenders.write_arrays)
    unwritten = DiskContender("unwritten", "has no files", DiskSession, write_nothing)
    effort = tiny_effort(tmp_path)
    bench = dataclasses.replace(DISK, workloads=(TINY,), effort=effort)
    report = training.measure(Task(bench, Namespace(contenders=[broken, unwritten])))
    assert [name for name, _ in report.failures] == ["broken", "unwritten"]
    assert "broken: failed: ArithmeticError: cannot be made" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


class BrokenSession(DiskSession):
    """Fails at once."""

    def __init__(self, job: Job) -> None:
        raise ArithmeticError("cannot be made")


def write_nothing(job: Job) -> dict[str, float]:
    raise OSError("no files today")


def test_too_little_space_is_told_before(tmp_path: Path):
    with pytest.raises(SpaceError, match=r"needs 1024\.0 TiB of free space .* Choose another --folder"):
        scratch_folder(tmp_path, 1 << 50).__enter__()
    assert not list(tmp_path.iterdir())


# `python -m embedrock.bench`, but for what `_short_probes` does in this process.
WITH_SHORT_PROBES = """
from embedrock.bench.cli import main
from embedrock.bench.disk import raw

raw.DEPTHS, raw.probe.__defaults__ = (2,), (0.01,)
raise SystemExit(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_leaves_no_files(tmp_path: Path, number: int):
    options = ["--rows=200k", "--steps=100000", "--seconds=100", "--contenders=memmap"]
    command = [sys.executable, "-c", WITH_SHORT_PROBES, "disk", *options]
    with subprocess.Popen(command, cwd=tmp_path, env=child_environment(), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("steps to warm up" in line or "filling" in line for line in process.stderr)
        time.sleep(0.1)
        process.send_signal(number)
        process.communicate(timeout=300)
    assert process.returncode == 128 + number
    assert not list(tmp_path.iterdir())


def measured(name: str, **line: Any) -> dict[str, Any]:
    base = {"steps_per_s": 1.0, "raw_reads_per_s": None, "peak_bytes": None}
    return training.summary(Result(Racer(BY_NAME[name], TINY, (dict,)), turns=[{**base, **line}]))


def test_verdicts_say_what_was_measured_against_what():
    effort = DiskEffort(memory=100_000_000)
    counted = {"cache_slots": 1000.0, "misses_per_step": 2 * TINY.expected_misses(1000), "reads_per_s": 60.0}
    lines = [
        measured("ours", steps_per_s=30.0, resident={"step_s": 2.0}, **counted),
        measured("ours-in-ram", resident={"step_s": 1.0}, peak_bytes=900_000_000),
        measured("ours-prefetch-32", peak_bytes=500_000_000, raw_reads_per_s=100.0, **counted),
        measured("ours-prefetch-2", overlap={"prefetch_s": 1.0, "dense_s": 2.0, "together_s": 2.2}, **counted),
        measured("memmap", steps_per_s=2.0, peak_bytes=900_000_000),
    ]
    verdicts = judge(targets(effort), lines)
    found = {verdict.what: (round(verdict.measured, 6), verdict.wanted, verdict.reached) for verdict in verdicts}
    assert found["steps/s of ours over memmap"] == (15, 10, True)
    assert found["misses of ours over those of the 1,000 most popular rows kept"] == (2, 1.15, False)
    assert found["step with all rows resident over that in RAM"] == (2, 1.3, False)
    assert found["record reads/s of ours-prefetch-32 over the disk's own"] == (0.6, 0.7, False)
    assert found["RAM and page cache of ours-prefetch-32"] == (500, 400, False)
    assert found["ours-prefetch-2 with a dense model over the larger of the two alone"] == (1.1, 1.2, True)
    assert [what for what in found if what.startswith("RAM")] == ["RAM and page cache of ours-prefetch-32"]


def test_a_cache_for_all_rows_has_no_best_misses():
    line = measured("ours", cache_slots=float(TINY.rows), misses_per_step=0.0)
    assert line["best_misses_per_step"] is None
    assert not [one for one in judge(targets(DiskEffort()), [line]) if one.what.startswith("misses")]


# ---------------------------------------------------------------- bench commit


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
@pytest.mark.filterwarnings("ignore:.*is closed with changes since commit")  # as in a process of its own
def test_commit_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commits, "SPARSE_BYTES", 2 * 10**9)
    monkeypatch.setattr(commits, "LOG_ROWS", 50_000)
    options = ["--memory=16MiB", "--sizes=100,3000", "--rounds=1", "--json=out.json"]
    status = cli.main(["commit", *TINY_OPTIONS, "--rows=100k", *options])
    output = capsys.readouterr()
    assert status == 0, output.err
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    lines = {line["name"]: line for line in json.loads((tmp_path / "out.json").read_text())["results"]}
    small, large = lines["commit of 100 rows"], lines["commit of 3,000 rows"]
    assert small["rows"] * small["record_bytes"] <= small["bytes_written"] < large["bytes_written"]
    assert lines["commit in the background"]["rows"] == 3000
    assert lines["open a sparse table"]["disk_bytes"] == pytest.approx(2e9, rel=0.1)
    assert lines["open logs"]["overlay_rows"] == 50_000
    for text in ("commit of 3,000 rows", "the call took", "RAM of a row not compacted", "extra RAM of a commit"):
        assert text in output.out


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["disk", "--memory", "much"], "argument --memory: must be a size such as \"512MiB\": got 'much'"),
        (["disk", "--folder", "no/such"], "argument --folder: must be a folder that exists: got 'no/such'"),
        (["disk", "--contenders", "theirs"], "no contender is called 'theirs': choose from ours, ours-prefetch-2"),
        (["disk", "--batches", "3"], "unrecognized arguments: --batches 3"),
        (["commit", "--sizes", "0"], "argument --sizes: must be a positive whole number"),
    ],
)
def test_bad_options(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str):
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert message in capsys.readouterr().err


def test_defaults_are_the_documented_workload():
    arguments: Namespace = cli._parser().parse_args(["disk"])
    workload = Task(DISK, arguments).workload
    assert (workload.rows, workload.dim, workload.lookups, workload.zipf) == (20_000_000, 64, 16_384, 1.05)
    assert (DiskEffort().memory, DiskEffort().limit) == (1 << 30, 2 << 30)
    assert size("1KiB") == 1024
    with pytest.raises(ArgumentTypeError):
        size("much")
