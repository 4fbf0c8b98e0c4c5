"""The benchmark ``gpu`` at toy size: workloads, groups, placements, and that it runs. No speed is asserted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_device import INTERPRETED
from touch import touch

from benchmarks import __main__ as command
from benchmarks import gpu, gpu_run
from benchmarks.gpu import IMPLEMENTATIONS, INTERPRETER, Device, GpuWorkload, Trainer
from benchmarks.implementations import Footprint, Unavailable
from benchmarks.runner import plan_groups
from embedrock.device import attach

GIB = 1 << 30
CPU = Device("cpu")
FORUM, CACHE = gpu.forum(toy=True), gpu.cache(True, 0, 0)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.setenv("EMBEDROCK_THREADS", "1")  # as in an implementation's process
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("workload", [FORUM, CACHE], ids=["forum", "cache"])
def test_ids_lie_in_their_tables_and_the_working_set_is_counted(workload: GpuWorkload):
    ids = np.array(workload.ids())[..., 0]
    assert ids.shape == (workload.batches, len(workload.rows), workload.batch)
    assert all(ids[:, k].min() >= 0 and ids[:, k].max() < rows for k, rows in enumerate(workload.rows))
    assert workload.touched == tuple(len(np.unique(ids[:, k])) for k in range(len(workload.rows)))


def test_the_real_workloads_are_those_of_the_thread_and_of_the_publication():
    forum = gpu.forum(toy=False)
    assert forum.rows == (10_000_000, 1_000_000)
    assert (forum.dim, forum.batch, forum.batches, forum.zipf, forum.record_bytes) == (64, 8192, 60, 1.05, 768)
    cache = gpu.cache(False, 120 * GIB, 139 * GIB)
    assert (cache.lookups, cache.dim, len(cache.rows)) == (1_048_570, 128, 10)
    assert 0.99 < sum(cache.rows) * cache.record_bytes / (gpu.HOST_SHARE * 120 * GIB) <= 1
    assert gpu.cache(False, GIB, GIB).rows[0] == gpu.CACHE_BATCH
    assert gpu.cache(False, 9**99, 9**99).rows[0] == gpu.MAX_CACHE_ROWS


def test_groups_fit_both_memories_and_begin_with_the_baseline():
    entries = gpu_run.entries_of(FORUM, IMPLEMENTATIONS, CPU)
    names = [entry.name for entry in entries]
    assert names[0] == gpu_run.BASELINES["forum"]
    assert "ours-c10-wide" in names
    assert "fbgemm-uvm-caching100" not in names
    need = entries[0].need
    groups, misfits = plan_groups(entries, Footprint(3 * need.host + GIB // 2, 2 * need.device + GIB // 2))
    assert all(group[0] is entries[0] and len(group) == 2 for group in groups)
    assert not misfits


@pytest.mark.skipif(not INTERPRETED, reason="rows of a toy are on CPU tensors, which only the interpreter takes")
def test_another_placement_than_the_one_that_is_named_is_not_measured(monkeypatch: pytest.MonkeyPatch):
    for near, where in ((None, "all rows"), (0.0, "rows used in RAM"), (0.5, "cached")):
        parts = gpu.our_parts(FORUM, CPU, near)
        assert all(where in repr(layer.table.executor) for layer in parts.layers)
    monkeypatch.setattr(attach, "available_bytes", lambda: 0)  # so that the host plans
    with pytest.raises(Unavailable, match=r"^rows were to be so: .* cached .*\. But they are .*planned by the host"):
        gpu.our_parts(FORUM, CPU, 0.5)


def test_steps_go_round_the_batches_and_train():
    parts = gpu.nn_parts(FORUM, CPU, on_host=False, sparse=True)
    layer = parts.look_up.args[0][0]  # pyright: ignore[reportFunctionMemberAccess]
    before = layer.weight.detach().clone()
    trainer = Trainer(FORUM, parts, CPU)
    assert len(list(trainer.run(3, ahead=False))) == 3
    changed = (layer.weight != before).any(dim=1).nonzero()[:, 0].tolist()
    assert changed == np.unique(np.array(FORUM.ids())[:, 0]).tolist()
    assert trainer.stats() == {}


def test_the_kernel_on_host_memory_touches_its_rows_only():
    records, rows = torch.zeros(9, 24), torch.tensor([1, 4, 8], dtype=torch.int32)
    touch(records, rows, writes=False)
    assert not records.any()
    touch(records, rows, writes=True)
    assert records.sum(dim=1).tolist() == [0, 24, 0, 0, 24, 0, 0, 0, 24]


@pytest.mark.usefixtures("in_process")
def test_without_a_gpu_the_command_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.delenv(INTERPRETER, raising=False)
    assert command.main(["gpu"]) == 1
    error = capsys.readouterr().err
    assert "needs a CUDA device, and torch finds none" in error
    assert "python -m benchmarks gpu --toy" in error


@pytest.mark.skipif(not INTERPRETED, reason="rows of a toy are on CPU tensors, which only the interpreter takes")
@pytest.mark.usefixtures("in_process")
def test_the_command_runs_at_toy_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, names = tmp_path / "gpu.json", "torch-sparse-gpu,ours-c20"
    options = ["--rounds=1", "--steps=1", "--threads=1", "--seconds=0.001", f"--json={file}"]
    assert command.main(["gpu", "--toy", *options, "--parts=forum", f"--implementations={names}"]) == 0
    lines = {line["name"]: line for line in json.loads(file.read_text())["results"]}
    assert list(lines) == ["device", "torch-sparse-gpu", "ours-c20", "ours-c20-prefetch"]
    assert lines["device"]["device"] == "cpu"
    assert lines["ours-c20-prefetch"]["device_misses"] > 0
    assert lines["ours-c20-prefetch"]["device_bytes"] > 0
    assert "TOY SIZE" in capsys.readouterr().out
