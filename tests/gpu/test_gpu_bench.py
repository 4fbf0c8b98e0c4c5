"""``bench gpu`` at toy size: the workloads, who is measured together, what is reported, and that it runs end to end.

No speed is asserted here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_device import INTERPRETED

from embedrock.bench import cli
from embedrock.bench.gpu import contenders, report, training, workloads
from embedrock.bench.gpu.contenders import CONTENDERS, GpuContender, Parts, Traffic, Trainer
from embedrock.bench.gpu.device import INTERPRETER, Device
from embedrock.bench.gpu.limits import Limits
from embedrock.bench.gpu.session import GpuEffort, GpuTiming, hit_rate, racer_of, rounds_s
from embedrock.bench.gpu.workloads import GpuWorkload
from embedrock.bench.harness.contenders import Footprint, Unavailable
from embedrock.bench.harness.effort import Clock
from embedrock.bench.harness.runner import Racer, Result, measure, plan_groups
from embedrock.bench.harness.targets import judge
from embedrock.device import attach
from embedrock.errors import UnsupportedError

GIB = 1 << 30
ROOM = Footprint(1 << 50, 1 << 50)
CPU = Device("cpu")
FORUM, CACHE = workloads.forum(toy=True), workloads.cache(True, 0, 0)
SHORT = GpuEffort(rounds=1, steps=1, seconds=0.001, threads=1, timeout_s=120.0, toy=True)
BY_NAME = {contender.name: contender for contender in CONTENDERS}


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.setenv("EMBEDROCK_THREADS", "1")  # as in a contender's process
    yield
    torch.set_num_threads(threads)


# ---------------------------------------------------------------- toy contenders (they are made in children)


def make_zeros(workload: GpuWorkload, device: Device, log: Path | None = None, name: str = "") -> Parts:
    shape = workload.batch, workload.dim

    def look_up(batch: contenders.Batch) -> list[Any]:
        if log is not None:
            with log.open("a") as file:
                file.write(f"{name}\n")
        return [torch.zeros(shape, requires_grad=True) for _ in batch.ids]

    return Parts(look_up, ())


def make_broken(workload: GpuWorkload, device: Device) -> Parts:
    raise ValueError("cannot be made")


class NoLayer:
    """Counts as a layer of ours does, and cannot look ahead."""

    @property
    def table(self) -> NoLayer:
        return self

    def stats(self) -> dict[str, float]:
        names = (*contenders.COUNTED, "bytes", "slots")
        return {f"device_{name}": 1.0 for name in names}


def make_without_prefetch(workload: GpuWorkload, device: Device) -> Parts:
    return make_zeros(workload, device)._replace(layers=(NoLayer(),))


def racer(name: str, make: Callable[..., Parts] = make_zeros, workload: GpuWorkload = FORUM, **options: Any) -> Racer:
    package = options.pop("package", None)
    return racer_of(GpuContender(name, f"toy {name}", make, package=package, **options), workload, CPU)


def result(name: str, seconds: float, group: int = 1, workload: GpuWorkload = FORUM, **options: Any) -> Result:
    counts = options.pop("counts", dict.fromkeys(contenders.COUNTED, 0.0))
    turn = GpuTiming(seconds, seconds, counts, {})
    one = racer_of(BY_NAME.get(name, BY_NAME["ours-c10"]), workload, CPU, name)
    return Result(one, group=group, turns=[turn], **options)


# ---------------------------------------------------------------- workloads


@pytest.mark.parametrize("workload", [FORUM, CACHE], ids=["forum", "cache"])
def test_ids_lie_in_their_tables_and_what_they_touch_is_counted(workload: GpuWorkload):
    ids = workload.ids()
    assert ids.shape == (workload.batches, len(workload.tables), workload.batch)
    by_table = [ids[:, k] for k in range(len(workload.tables))]
    assert all(one.min() >= 0 and one.max() < table.rows for one, table in zip(by_table, workload.tables, strict=True))
    assert workload.touched == tuple(len(np.unique(one)) for one in by_table)
    assert workload.unique == np.mean([sum(len(np.unique(one)) for one in batch) for batch in ids])
    assert not np.array_equal(by_table[0], by_table[1])


def test_the_real_workloads_are_those_of_the_thread_and_of_the_publication():
    forum = workloads.forum(toy=False)
    assert [table.rows for table in forum.tables] == [10_000_000, 1_000_000]
    assert (forum.dim, forum.batch, forum.batches, forum.tables[0].zipf) == (64, 8192, 60, 1.05)
    assert forum.record_bytes == 768
    cache = workloads.cache(False, 120 * GIB, 139 * GIB)
    assert (cache.lookups, cache.dim, len(cache.tables)) == (1_048_570, 128, 10)
    assert cache.rows * cache.record_bytes <= workloads.HOST_SHARE * 120 * GIB
    assert cache.rows * cache.record_bytes > 0.99 * workloads.HOST_SHARE * 120 * GIB
    assert workloads.cache(False, GIB, GIB).tables[0].rows == workloads.CACHE_BATCH
    assert workloads.cache(False, 9**99, 9**99).tables[0].rows == workloads.MAX_CACHE_ROWS


def test_wider_rows_have_the_same_ids():
    wide = FORUM.with_dim(32)
    assert wide.record_bytes == 4 * FORUM.record_bytes
    assert np.array_equal(wide.ids(), FORUM.ids())


# ---------------------------------------------------------------- what moves


def test_bytes_on_the_bus():
    counts = {"hits": 5.0, "misses": 7.0, "fetched": 6.0, "evictions": 4.0, "written_back": 3.0, "bypassed": 1.0}
    weights, record, unique = FORUM.weight_bytes, FORUM.record_bytes, FORUM.unique
    assert (weights, record) == (32, 96)
    assert contenders.nothing_moves(FORUM, {}) == Traffic(0, 0)
    assert contenders.rows_move(FORUM, {}) == Traffic(16 * weights, 16 * weights)
    assert contenders.records_move(FORUM, {}) == Traffic(unique * (weights + record), unique * record)
    assert contenders.misses_move(FORUM, counts) == Traffic(weights + 7 * record, 4 * record)
    assert hit_rate(result("ours-c10", 1.0, counts=counts)) == 5 / 12
    assert hit_rate(result("ours-b", 1.0, counts=counts)) is None


@pytest.mark.skipif(not INTERPRETED, reason="rows of a toy are on CPU tensors, which only the interpreter takes")
def test_another_placement_than_the_one_that_is_named_is_not_measured(monkeypatch: pytest.MonkeyPatch):
    for near, where in ((None, "all rows"), (0.0, "rows used in RAM"), (0.5, "cached")):
        parts = contenders.our_parts(FORUM, CPU, near)
        assert all(where in repr(layer.table.side) for layer in parts.layers)
    monkeypatch.setattr(attach, "available_bytes", lambda: 0)  # so that the host plans
    with pytest.raises(
        Unavailable, match=r"^rows were to be so: .* cached .*\. But they are .*planned by the host: is"
    ):
        contenders.our_parts(FORUM, CPU, 0.5)


# ---------------------------------------------------------------- groups


def test_groups_fit_both_memories_and_begin_with_the_baseline(monkeypatch: pytest.MonkeyPatch):
    for name in ("HOST_PROCESS_BYTES", "DEVICE_PROCESS_BYTES", "ACTIVATIONS"):
        monkeypatch.setattr(contenders, name, 0)
    sizes = {"base": (0, 1), "a": (2, 2), "b": (1, 0), "c": (2, 0), "d": (0, 3), "huge": (9, 0), "wide": (0, 9)}
    racers = [racer(name, host_tables=host, device_tables=device) for name, (host, device) in sizes.items()]
    groups, misfits = plan_groups(racers, Footprint(3 * FORUM.table_bytes, 4 * FORUM.table_bytes))
    assert [[one.name for one in group] for group in groups] == [["base", "a", "b"], ["base", "c", "d"]]
    assert [one.name for one in misfits] == ["huge", "wide"]


def test_a_cache_takes_memory_of_the_device():
    cached = racer("x", near=0.5).need.device - racer("x").need.device
    assert cached == sum(FORUM.touched) * FORUM.record_bytes // 2


def test_groups_without_a_baseline_that_fits():
    racers = [racer("base", host_tables=10**9), racer("a"), racer("b")]
    groups, misfits = plan_groups(racers, Footprint(1 << 40, 1 << 40))
    assert [[one.name for one in group] for group in groups] == [["a", "b"]]
    assert [one.name for one in misfits] == ["base"]
    assert plan_groups([], ROOM) == ([], [])


def test_who_is_too_large_or_not_installed_is_named():
    racers = [racer("large", host_tables=10**9), racer("foreign", package="no_such_package")]
    results = measure(racers, SHORT, Footprint(1 << 40, 1 << 40), Clock(60))
    assert {one.name: one.status for one in results} == {"large": "skipped", "foreign": "skipped"}
    reasons = {one.name: one.reason for one in results}
    assert reasons["foreign"] == "no_such_package is not installed"
    assert reasons["large"].endswith("of GPU memory; 1.0 TiB and 1.0 TiB may be used")


# ---------------------------------------------------------------- rounds


@pytest.mark.slow  # a test of the command goes through rounds too, and tests/bench has those of the runner that fails
def test_rounds_are_interleaved_and_failures_are_reported(tmp_path: Path):
    log = tmp_path / "log"
    good = [racer(name, partial(make_zeros, log=log, name=name)) for name in ("a", "b")]
    bad = [racer("broken", make_broken), racer("half", make_without_prefetch, looks_ahead=True)]
    results = {one.name: one for one in measure([*good, *bad], replace(SHORT, rounds=2), ROOM, Clock(600))}
    assert {name: one.status for name, one in results.items()} == {
        "a": "ok",
        "b": "ok",
        "broken": "failed",
        "half": "ok",
        "half-prefetch": "failed",
    }
    assert results["broken"].reason == "ValueError: cannot be made"
    assert "make_broken" in results["broken"].details
    assert [len(rounds_s(results[name])) for name in ("a", "b", "half")] == [2, 2, 2]
    assert results["half"].turns[-1].memory["near_bytes"] == 1
    turns = log.read_text().split()
    a_turn = FORUM.batches + SHORT.steps + contenders.LOOK_AHEAD
    assert turns[-4 * a_turn :] == (["a"] * a_turn + ["b"] * a_turn) * 2
    assert all(one.turns[-1].memory["peak_rss_bytes"] > 0 for one in results.values() if one.status == "ok")


def test_nothing_begins_when_the_time_is_over():
    results = measure([racer("a"), racer("b")], SHORT, ROOM, Clock(-1))
    assert [(one.name, one.status, one.reason) for one in results] == [
        ("a", "skipped", "no time was left"),
        ("b", "skipped", "no time was left"),
    ]


def test_steps_go_round_the_batches_and_train():
    workload = replace(FORUM, tables=FORUM.tables[:1])
    parts = contenders.nn_parts(workload, CPU, on_host=False, sparse=True)
    layer = parts.look_up.args[0][0]  # pyright: ignore[reportFunctionMemberAccess]
    before = layer.weight.detach().clone()
    trainer = Trainer(workload, parts, CPU)
    assert len(list(trainer.run(3, ahead=False))) == 3
    changed = (layer.weight != before).any(dim=1).nonzero()[:, 0].tolist()
    assert changed == np.unique(workload.ids()).tolist()
    assert trainer.counts() == {}


# ---------------------------------------------------------------- verdicts


def lines_of(results: list[Result], baseline: str, **limits: float) -> list[dict[str, Any]]:
    return [report.summary(one, baseline, results, limits) for one in results]


def judged(results: list[Result], workload: GpuWorkload = FORUM, **limits: float) -> dict[str, tuple[float, bool]]:
    baseline = training.BASELINES[workload.name]
    verdicts, _ = report.judge_workload(workload.name, lines_of(results, baseline, **limits))
    return {verdict.what.partition(": ")[2]: (verdict.measured, verdict.reached) for verdict in verdicts}


def test_the_fastest_that_qualifies_is_judged_across_groups():
    results = [
        result("torch-sparse-gpu", 4.0),
        result("ours-b", 5.0),
        result("torch-sparse-gpu", 2.0, group=2),  # the machine was twice as fast then
        result("ours-c20", 1.0, group=2),
        result("ours-c80", 0.1, group=2, status="failed"),
        result("torch-sparse-cpu", 6.0),
        result("ours-a", 2.5),
    ]
    assert judged(results) == {
        "ours-c20, faster than torch-sparse-gpu": (2.0, True),
        "ours-c20, faster than torch-sparse-cpu": (3.0, False),
        "ours-a, faster than torch-sparse-gpu": (1.6, False),
        "ours-c20, a step": (1000.0, False),
        "ours-a, a step": (2500.0, False),
    }


def test_what_has_to_prefetch_is_judged_so_and_what_is_missing_is_named():
    results = [
        result("ours-a", 1.0, workload=CACHE),
        result("ours-c100", 1.25, workload=CACHE),
        result("ours-c80", 1.5, workload=CACHE),
        result("ours-c80", 2.5, workload=CACHE, way=contenders.PREFETCH),
    ]
    assert judged(results, CACHE) == {
        "ours-c100, time over that of ours-a": (1.25, True),
        "ours-c80-prefetch, time over that of ours-a": (2.5, False),
        "ours-a, a step": (1000.0, False),
    }
    assert judged([result("ours-a", 0.0019, workload=CACHE)], CACHE) == {"ours-a, a step": (pytest.approx(1.9), True)}
    _, missing = report.judge_workload("cache", lines_of(results, "ours-a"))
    assert missing == ["cache, 20% cached: ours-c20-prefetch, time over that of ours-a", "mode b: share of the bus"]


def test_shares_of_the_limits():
    direct = result("ours-b", 1e-6, workload=CACHE)
    moved = CACHE.unique * (CACHE.weight_bytes + CACHE.record_bytes) / 1e3  # GB/s
    limits = {"copies_both_ways": moved, f"kernel_both_ways_{CACHE.record_bytes}": 2 * moved}
    shares = judged([direct], CACHE, **limits)
    assert shares == {
        "share of the bus, as copies have it": (pytest.approx(1.0), True),
        "share of the bus, as kernels have it": (pytest.approx(0.5), False),
    }
    kernels = judge(report.KERNELS, [{"name": "limits", "copies": 100.0, "step": 45.0, "gather": 44.0}])
    assert [verdict.reached for verdict in kernels] == [True, False]
    assert judge(report.KERNELS, [{"name": "limits"}]) == []


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize("name", ["bus", "in_place", "near"])
def test_limits_are_measured(name: str):
    found = getattr(Limits(CPU), name)()
    assert found
    assert all(rate > 0 for rate in found.values())


def test_the_kernel_on_host_memory_touches_what_it_is_told():
    from embedrock.bench.gpu.kernels import touch

    records = torch.zeros(9, 24)
    touch(records, torch.tensor([1, 4, 8], dtype=torch.int32), writes=False)
    assert not records.any()
    touch(records, torch.tensor([1, 4, 8], dtype=torch.int32), writes=True)
    assert records.sum(dim=1).tolist() == [0, 24, 0, 0, 24, 0, 0, 0, 24]


# ---------------------------------------------------------------- the command


@pytest.mark.usefixtures("in_process")
def test_without_a_gpu_the_command_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.delenv(INTERPRETER, raising=False)
    with pytest.raises(UnsupportedError, match="needs a CUDA device, and torch finds none") as raised:
        cli.main(["gpu", "--parts=limits"])
    assert "bench gpu --toy" in str(raised.value)


def test_parts_that_are_not_there(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cli.main(["gpu", "--parts=limits,disk"])
    assert "must be of limits, forum, cache: got 'disk'" in capsys.readouterr().err


def run_toy(path: Path, *options: str) -> dict[str, Any]:
    common = ["--rounds=1", "--steps=1", "--threads=1", "--seconds=0.001", f"--json={path}"]
    assert cli.main(["gpu", "--toy", *common, *options]) == 0
    return json.loads(path.read_text())


@pytest.mark.skipif(not INTERPRETED, reason="rows of a toy are on CPU tensors, which only the interpreter takes")
@pytest.mark.usefixtures("in_process")
def test_the_command_runs_at_toy_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    document = run_toy(tmp_path / "gpu.json", "--parts=forum", "--contenders=torch-sparse-gpu,ours-c20")
    lines = {line["name"]: line for line in document["results"]}
    assert lines["device"]["device"] == "cpu"
    assert {name for name in lines if name != "device"} == {"torch-sparse-gpu", "ours-c20", "ours-c20-prefetch"}
    cached = lines["ours-c20-prefetch"]
    assert 0 <= cached["hit_rate"] <= 1
    assert cached["counts"]["misses"] > 0
    assert cached["in_bytes"] > 0
    assert cached["near_bytes"] > 0
    printed = capsys.readouterr().out
    assert "TOY SIZE" in printed
    assert "ours-c20" in printed
    assert "not judged" in printed


@pytest.mark.slow
def test_the_whole_command_runs_at_toy_size(tmp_path: Path):
    document = run_toy(tmp_path / "gpu.json", "--contenders=ours-*,torch-*")
    assert not document["failures"]
    assert all(line.get("status", "ok") == "ok" for line in document["results"])
    races, times = (sum(map(len, targets.values())) for targets in (report.RACES, report.TIMES))
    assert (
        len(document["verdicts"]) == races + times + len(report.KERNELS) + 1
    )  # the share of the bus, as copies have it
