"""Benchmarks on disk: cgroups, recipes that are SparseAdam, scratch folders that go, targets. No speed is asserted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks import cgroups
from benchmarks.cgroups import MemoryCgroup, NoCgroupError, confined
from benchmarks.disk import ARRAYS, BETAS, EPS, Job, Memmap, SpaceError, scratch_folder, targets, write_arrays
from benchmarks.implementations import LEARNING_RATE
from benchmarks.options import DiskOptions
from benchmarks.processes import ChildError, child_environment
from benchmarks.targets import compare_with
from benchmarks.workload import Workload
from embedrock.io.probe import write_rate

MIB = 1 << 20
TINY = Workload(rows=3000, dim=8, batch=64, features=2)

# ---------------------------------------------------------------- cgroups


class Eater:
    """Takes RAM in a process of its own."""

    def __init__(self) -> None:
        self._meals: list[np.ndarray] = []

    def eat(self, mebibytes: int) -> int | None:
        self._meals.append(np.ones(mebibytes * MIB // 8))
        return cgroups.peak_bytes()


@pytest.mark.skipif(bool(cgroups.why_not()), reason=f"no memory cgroup: {cgroups.why_not()}")
def test_a_cgroup_counts_limits_and_goes():
    before = set(MemoryCgroup(None).folder.parent.glob("embedrock-*"))
    with confined(96 * MIB, Eater, environment={}, timeout_s=60) as child:
        assert child.call("eat", 20) > 20 * MIB
        with pytest.raises(ChildError, match=r"SIGKILL \(out of memory\?\)"):
            child.call("eat", 200)
    for folder in before:
        folder.rmdir()
    assert not set(next(iter(before)).parent.glob(f"embedrock-{os.getpid()}-*"))


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
    folders = {"sys/fs/cgroup/user/cgroup.subtree_control": "cpu memory", "sys/fs/cgroup/user/session/x": ""}
    fake_cgroups(tmp_path, "0::/user/session\n", folders)
    refused = tmp_path / "sys/fs/cgroup/user/session"

    def mkdir(folder: Path) -> None:
        if folder.parent == refused:
            raise OSError(16, "Device or resource busy")
        make_with_files(("memory.max", "memory.current"), folder)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    cgroup = MemoryCgroup(5 * MIB, tmp_path)
    assert cgroup.folder.parent == tmp_path / "sys/fs/cgroup/user"
    assert (cgroup.folder / "memory.max").read_text().startswith(str(5 * MIB))
    (cgroup.folder / "memory.current").write_text("123\n")
    monkeypatch.setattr(cgroups, "_files", cgroup.files)
    assert cgroups.peak_bytes() == 123  # an old kernel has no memory.peak
    (cgroup.folder / "memory.peak").write_text("456\n")
    assert cgroups.peak_bytes() == 456


def test_without_a_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(NoCgroupError, match="no memory controller of cgroups is mounted"):
        MemoryCgroup(MIB, tmp_path)
    fake_cgroups(tmp_path, "4:memory:/mine\n", {})
    with pytest.raises(NoCgroupError, match="No such file or directory"):
        MemoryCgroup(MIB, tmp_path)
    monkeypatch.setattr(MemoryCgroup.__init__, "__defaults__", (tmp_path,))
    with confined(MIB, Eater, environment={}, timeout_s=60) as child:
        assert child.call("eat", 20) is None


# ---------------------------------------------------------------- implementations


def test_the_recipe_is_sparse_adam(tmp_path: Path):
    torch = pytest.importorskip("torch")
    job = Job(TINY, tmp_path, MIB, warmup=3)
    write_arrays(job)
    first = np.random.default_rng(1).random((TINY.rows, TINY.dim), dtype=np.float32)
    for name, values in zip(ARRAYS, (first, 0 * first, 0 * first), strict=True):
        values.tofile(tmp_path / name)
    session = Memmap(job)
    assert len(session.warm_up(60.0)) == 3
    layer = torch.nn.Embedding.from_pretrained(torch.from_numpy(first.copy()), freeze=False, sparse=True)
    optimizer = torch.optim.SparseAdam(layer.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPS)
    for ids in job.batches(0, 3):
        optimizer.zero_grad()
        layer(torch.from_numpy(ids)).backward(torch.from_numpy(session.gradient))
        optimizer.step()
    trained = np.fromfile(tmp_path / "weights", np.float32).reshape(first.shape)
    np.testing.assert_allclose(trained, layer.weight.detach().numpy(), rtol=1e-5, atol=1e-6)
    assert not np.array_equal(trained, first)


def test_targets_say_what_was_measured_against_what():
    counted = {"cache_slots": 1000.0, "misses_per_step": 20.0, "best_misses_per_step": 10.0, "disk_reads_per_s": 100.0}
    lines = [
        {
            "name": "ours",
            "median_ms": 2.0,
            "ratio": 1.0,
            "group": 1,
            "cgroup_peak_bytes": 500_000_000,
            "reads_per_s": 60.0,
            **counted,
        },
        {"name": "memmap", "median_ms": 30.0, "ratio": 15.0, "group": 1, "cgroup_peak_bytes": 900_000_000},
    ]
    results = compare_with(targets(DiskOptions(memory=100_000_000)), lines)
    found = {one.what: (round(one.measured, 6), one.wanted, one.met) for one in results}
    assert found == {
        "ours faster than memmap": (15, 10, True),
        "misses of ours over those of the 1,000 most popular rows kept": (2, 1.15, False),
        "record reads/s of ours over the disk's own": (0.6, 0.7, False),
        "RAM and page cache of ours": (500, 400, False),
    }


# ---------------------------------------------------------------- files


def test_write_rate_leaves_nothing(tmp_path: Path):
    assert write_rate(tmp_path / "file", 3 * MIB) > 0
    assert not list(tmp_path.iterdir())


def test_too_little_space_is_an_error_before(tmp_path: Path):
    with pytest.raises(SpaceError, match=r"needs 1024\.0 TiB of free space .* Choose another --folder"):
        scratch_folder(tmp_path, 1 << 50).__enter__()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_leaves_no_files(tmp_path: Path, number: int):
    options = ["--rows=200k", "--steps=100000", "--seconds=100", "--implementations=memmap"]
    command = [sys.executable, "-m", "benchmarks", "disk", *options]
    with subprocess.Popen(command, cwd=tmp_path, env=child_environment(), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("memmap: preparing" in line for line in process.stderr)
        time.sleep(0.1)
        process.send_signal(number)
        process.communicate(timeout=300)
    assert process.returncode == 128 + number
    assert not list(tmp_path.iterdir())
