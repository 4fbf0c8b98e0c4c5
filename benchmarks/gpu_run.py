"""``gpu``: rows in host memory and in GPU memory trained on a GPU, beside plain PyTorch and FBGEMM.

The workloads are a forum thread's and the published cache workload. Without a GPU all of it runs at toy size under
Triton's interpreter, and its times mean nothing.
"""

from __future__ import annotations

import time
from argparse import ArgumentTypeError
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from benchmarks import gpu
from benchmarks.benchmark import Benchmark, Option, Task
from benchmarks.gpu import IMPLEMENTATIONS, PREFETCH, Device, GpuImplementation, GpuWorkload
from benchmarks.implementations import Footprint
from benchmarks.options import BenchmarkOptions
from benchmarks.processes import ChildError
from benchmarks.report import Report, compare
from benchmarks.runner import Entry
from benchmarks.targets import Found, Line, Race, Target
from embedrock.cli.terminal.tables import Field, format_number, format_whole
from embedrock.errors import UnsupportedError
from embedrock.system.platform import usable_cores
from embedrock.system.ram import available_bytes
from embedrock.system.sizes import format_bytes

HOST_SHARE, DEVICE_SHARE = 0.85, 0.9  # of free memory, for all processes alive together
STARTED_TOGETHER = 4  # processes that make their tables and warm up at the same time
BASELINES = {"forum": "torch-sparse-gpu", "cache": "ours-a"}
WIDE, WIDER = "ours-c10", 4  # on the forum workload also with rows this many times as wide
WAYS = ("", PREFETCH)


@dataclass(frozen=True)
class GpuOptions(BenchmarkOptions):
    """How long to measure; `steps` is at most the number of batches.

    Args:
        toy: run at toy size under Triton's interpreter.
        budget_s: nothing begins after this time.
    """

    rounds: int = 5
    steps: int = 60
    seconds: float = 20.0
    threads: int = field(default_factory=usable_cores)
    timeout_s: float = 150.0
    toy: bool = False
    budget_s: float = 480.0

    @property
    def warm_up_s(self) -> float:
        return self.seconds

    @property
    def starters(self) -> int:
        return min(STARTED_TOGETHER, usable_cores())

    def environment(self) -> dict[str, str]:
        return super().environment() | ({gpu.INTERPRETER: "1", "CUDA_VISIBLE_DEVICES": ""} if self.toy else {})


def measure(task: Task) -> Report:
    """Measure, print tables and targets, and return the outcome.

    Raises:
        UnsupportedError: there is no GPU, and the user did not choose toy size.
    """
    options, until = task.options, time.monotonic() + task.options.budget_s
    device, facts = _find_device(options)
    print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    if not device.is_gpu:
        print("TOY SIZE on CPU tensors under Triton's interpreter: times mean nothing", flush=True)
    report = Report(results=[{"name": "device", **facts}])
    free = Footprint(available_bytes(), int(facts["free_bytes"]))
    room = Footprint(int(HOST_SHARE * free.host), int(DEVICE_SHARE * free.device))
    workloads = {"forum": partial(gpu.forum, not device.is_gpu), "cache": partial(gpu.cache, not device.is_gpu, *free)}
    for name in task.arguments.parts:
        workload = workloads[name]()
        print(workload.describe(), flush=True)
        if entries := entries_of(workload, task.implementations, device):
            report.add(compare(entries, TARGETS[name], options, _MORE, room=room, until=until))
    return report


def _find_device(options: GpuOptions) -> tuple[Device, dict[str, Any]]:
    try:
        with options.child(gpu.Probe) as probe:
            return probe.call("find", options.toy)
    except ChildError as error:
        raise UnsupportedError(str(error)) from error


def entries_of(workload: GpuWorkload, chosen: Sequence[GpuImplementation], device: Device) -> list[Entry]:
    """Return the entries of a workload, the baseline first."""
    here = [replace(one, session=partial(gpu.GpuSession, device=device)) for one in chosen]
    entries = [Entry(one, workload) for one in here if workload.name in one.workloads]
    if workload.name == "forum":
        wide = replace(workload, dim=WIDER * workload.dim)
        entries += [Entry(replace(one, name=f"{one.name}-wide"), wide) for one in here if one.name == WIDE]
    return sorted(entries, key=lambda entry: entry.name != BASELINES[workload.name])


# ---------------------------------------------------------------- targets

FROM_HOST = ("ours-b", "ours-c100", "ours-c80", "ours-c20", "ours-c10")


def _race(what: str, fast: Sequence[str], slow: str, factor: float, at_most: bool = False, ways: Any = WAYS) -> Target:
    relation = "time over that of" if at_most else "faster than"
    race = Race(tuple(fast), (slow,), ways, at_most)
    return Target(f"{what}: {{fast}}, {relation} {{slow}}", race, factor, at_most=at_most)


def _time(what: str, names: Sequence[str], most_ms: float) -> Target:
    """Return the target for the fastest of some implementations: a ratio is met as well if both are slow."""

    def fastest(lines: Sequence[Line]) -> Iterator[Found]:
        wanted = {name + way for name in names for way in WAYS}
        best = min((line for line in lines if line["name"] in wanted), key=lambda line: line["median_ms"], default=None)
        if best is not None:
            yield best["median_ms"], best

    return Target(f"{what}, on an H200: {{name}}, a step", fastest, most_ms, " ms", at_most=True)


TARGETS = {
    "forum": (
        _race("forum, rows in host RAM", FROM_HOST, "torch-sparse-gpu", 1),
        _race("forum, rows in host RAM", FROM_HOST, "torch-sparse-cpu", 3.6),
        _race("forum, rows in GPU memory", ["ours-a"], "torch-sparse-gpu", 2),
        _race(f"forum, rows {WIDER} times as wide", [f"{WIDE}-wide"], WIDE, 1.5, at_most=True),
        _time("forum, rows in host RAM", FROM_HOST, 1e3 / 330),
        _time("forum, rows in GPU memory", ["ours-a"], 1e3 / 660),
    ),
    "cache": (
        _race("cache, 100% cached", ["ours-c100"], "ours-a", 1.5, at_most=True),
        _race("cache, 80% cached", ["ours-c80"], "ours-a", 2, at_most=True, ways=(PREFETCH,)),
        _race("cache, 20% cached", ["ours-c20"], "ours-a", 4, at_most=True, ways=(PREFETCH,)),
        _time("cache, rows in GPU memory", ["ours-a"], 2.0),
    ),
}


def _hit_rate(line: Line) -> float | None:
    """Return the share of a batch's unique rows that were in GPU memory; None without a cache."""
    found = line.get("device_hits", 0.0) + line.get("device_misses", 0.0)
    return line["device_hits"] / found if found else None


# `make gpu ARGS="--steps rates"` measures what the bus gives.
_MORE = (
    Field("host", "host_ms", format_number),
    Field("hits", _hit_rate, "{:.1%}".format),
    Field("fetched", "device_fetched", format_whole),
    Field("written back", "device_written_back", format_whole),
    Field("GPU memory", "device_bytes", format_bytes),
)


def _parts(text: str) -> list[str]:
    chosen = text.split(",")
    if wrong := [part for part in chosen if part not in BASELINES]:
        raise ArgumentTypeError(f"must be of {', '.join(BASELINES)}: got {wrong[0]!r}")
    return chosen


GPU = Benchmark(
    "gpu",
    "training on a GPU, rows in its memory and in host RAM",
    IMPLEMENTATIONS,
    (*TARGETS["forum"], *TARGETS["cache"]),
    (),
    GpuOptions(),
    ("threads", "rounds", "steps", "timeout_s", "seconds", "budget_s", "toy"),
    measure,
    (Option("--parts", "parts", _parts, tuple(BASELINES), "workloads"),),
)
