"""``bench gpu``: rows in host memory trained at the GPU's speed, beside plain PyTorch and FBGEMM.

First what the bus and the GPU's memory give; then the forum's workload and the published cache workload. Without a
GPU all of it runs at toy size under Triton's interpreter, and its times mean nothing.
"""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from embedrock.bench.gpu import workloads
from embedrock.bench.gpu.contenders import CONTENDERS, OURS_A, SPARSE, WIDE, WIDER, GpuContender
from embedrock.bench.gpu.device import Device, Probe
from embedrock.bench.gpu.limits import Limits
from embedrock.bench.gpu.report import KERNELS, RACES, format_steps, judge_workload, summary
from embedrock.bench.gpu.session import GpuEffort, racer_of
from embedrock.bench.gpu.workloads import GpuWorkload
from embedrock.bench.harness.bench import Bench, Task
from embedrock.bench.harness.contenders import Footprint
from embedrock.bench.harness.effort import Clock
from embedrock.bench.harness.options import parts
from embedrock.bench.harness.processes import ChildError
from embedrock.bench.harness.report import Report, failures
from embedrock.bench.harness.runner import Racer, measure
from embedrock.bench.harness.targets import format_verdicts, judge
from embedrock.errors import EmbedrockError, UnsupportedError
from embedrock.machine.ram import available_bytes
from embedrock.machine.sizes import format_bytes
from embedrock.terminal.tables import format_number, format_table

HOST_SHARE, DEVICE_SHARE = 0.85, 0.9  # of what is free, that the processes alive together may take
BASELINES = {"forum": SPARSE.name, "cache": OURS_A.name}
PARTS = ("limits", *BASELINES)  # of the benchmark


def run(task: Task) -> Report:
    """Measure, print tables and targets, and return all that was found.

    Raises:
        UnsupportedError: there is no GPU, and no run at toy size was asked for.
    """
    effort, chosen = task.effort, task.arguments.parts
    clock = Clock(effort.budget_s)
    device, facts = _find_device(effort)
    bench = GpuRunner(device, facts, effort, clock)
    print(_title(device, facts), flush=True)
    report = Report(results=[{"name": "device", **facts}])
    if "limits" in chosen:
        report.add(bench.measure_limits())
    for workload in bench.workloads(chosen):
        report.add(bench.measure_workload(workload, task.contenders))
    return report


def _find_device(effort: GpuEffort) -> tuple[Device, dict[str, Any]]:
    try:
        with effort.child(Probe) as probe:
            return probe.call("find", effort.toy)
    except ChildError as error:
        kind = UnsupportedError if error.kind in ("UnsupportedError", "Unavailable") else EmbedrockError
        raise kind(str(error)) from error


def _title(device: Device, facts: dict[str, Any]) -> str:
    versions = f"torch {facts['torch']}, triton {facts['triton']}"
    if device.is_gpu:
        return f"{facts['gpu']}, {format_bytes(facts['memory_bytes'])}, {versions}\n"
    return f"TOY SIZE on CPU tensors under Triton's interpreter: times mean nothing. {versions}\n"


class GpuRunner:
    """Measures on one device."""

    def __init__(self, device: Device, facts: dict[str, Any], effort: GpuEffort, clock: Clock) -> None:
        self._device, self._effort, self._clock = device, effort, clock
        self._free_bytes = available_bytes(), int(facts["free_bytes"])
        self._limits: dict[str, float] = {}

    def workloads(self, parts: Sequence[str]) -> Iterator[GpuWorkload]:
        """Yield the workloads among `parts`."""
        toy = not self._device.is_gpu
        if "forum" in parts:
            yield workloads.forum(toy)
        if "cache" in parts:
            yield workloads.cache(toy, *self._free_bytes)

    # ------------------------------------------------------------ limits

    def measure_limits(self) -> Report:
        """Measure what the bus and the GPU's memory give, and our kernels there."""
        report = Report()
        for name in ("bus", "in_place", "near"):
            try:
                with self._effort.child(Limits, self._device) as child:
                    found: dict[str, float] = child.call(name)
            except ChildError as error:
                report.fail(f"limits, {name}", error)
                continue
            self._limits |= found
            report.results.append({"name": f"limits, {name}", "unit": "GB/s", **found})
            rows = [[key, format_number(rate)] for key, rate in found.items()]
            print(f"{format_table((f'limits, {name}', 'GB/s'), rows)}\n", flush=True)
        report.verdicts = judge(KERNELS, [{"name": "limits", **self._limits}])
        _print_verdicts(report)
        return report

    # ------------------------------------------------------------ workloads

    def measure_workload(self, workload: GpuWorkload, chosen: Sequence[GpuContender]) -> Report:
        """Measure contenders on a workload; print their table and targets."""
        print(workload.describe(), flush=True)
        racers = _racers(workload, chosen, self._device)
        if not racers:
            print("nobody takes part\n", flush=True)
            return Report()
        host, device = self._free_bytes
        room = Footprint(int(HOST_SHARE * host), int(DEVICE_SHARE * device))
        results = measure(racers, self._effort, room, self._clock)
        baseline = racers[0].name
        lines = [summary(result, baseline, results, self._limits) for result in results]
        print(f"{format_steps(lines, baseline)}\n", flush=True)
        verdicts, missing = judge_workload(workload.name, lines)
        report = Report(lines, verdicts, failures(results))
        _print_verdicts(report)
        if missing:
            print("\n".join(["not judged, for want of numbers:", *missing, ""]), flush=True)
        return report


def _print_verdicts(report: Report) -> None:
    if report.verdicts:
        print(f"{format_verdicts(report.verdicts)}\n", flush=True)


def _racers(workload: GpuWorkload, chosen: Sequence[GpuContender], device: Device) -> list[Racer]:
    """Return who takes part, the baseline first."""
    racers = [racer_of(one, workload, device) for one in chosen if workload.name in one.workloads]
    if workload.name == "forum":
        wide = workload.with_dim(WIDER * workload.dim)
        racers += [racer_of(one, wide, device, f"{one.name}-wide") for one in chosen if one.name == WIDE]
    return sorted(racers, key=lambda racer: racer.name != BASELINES[workload.name])


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--toy",
        action="store_true",
        default=argparse.SUPPRESS,
        help="at toy size on CPU tensors, under Triton's interpreter (also with TRITON_INTERPRET=1)",
    )
    parser.add_argument(
        "--parts", type=partial(parts, PARTS), default=list(PARTS), metavar="A,B", help=f"of {', '.join(PARTS)}"
    )


GPU = Bench(
    "gpu",
    "training on a GPU, rows in its memory and in host RAM, against what the bus gives",
    run,
    ("threads", "rounds", "steps", "timeout_s", "seconds", "budget_s"),
    CONTENDERS,
    tuple(target for races in RACES.values() for target in races),
    (),
    GpuEffort(),
    {"seconds": "the untimed steps of a contender end after this time"},
    _add_options,
)
