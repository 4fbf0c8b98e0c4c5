"""``bench gpu``: rows in host memory trained at the GPU's speed, beside plain PyTorch and FBGEMM.

First what the bus and the GPU's memory give; then the forum's workload and the published cache workload. Without a
GPU all of it runs at toy size under Triton's interpreter, and its times mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from embedrock.bench.gpu import workloads as gpu_workloads
from embedrock.bench.gpu.contenders import OURS_A, SPARSE, WIDE, WIDER, GpuContender
from embedrock.bench.gpu.device import Device, Probe
from embedrock.bench.gpu.limits import Limits
from embedrock.bench.gpu.report import format_lines, judge, judge_limits, summary
from embedrock.bench.gpu.rounds import Clock, GpuEffort, GpuEntry, GpuResult, measure
from embedrock.bench.gpu.workloads import GpuWorkload
from embedrock.bench.harness.processes import Child, ChildError
from embedrock.bench.harness.report import Report, Verdict, format_verdicts
from embedrock.errors import EmbedrockError, UnsupportedError
from embedrock.machine.ram import available_bytes
from embedrock.machine.sizes import format_bytes
from embedrock.terminal.tables import format_number, format_table

HOST_SHARE, DEVICE_SHARE = 0.85, 0.9  # of what is free, that the processes alive together may take
BASELINES = {"forum": SPARSE.name, "cache": OURS_A.name}
PARTS = ("limits", *BASELINES)  # of the benchmark


def run(parts: Sequence[str], chosen: Sequence[GpuContender], effort: GpuEffort) -> Report:
    """Measure, print tables and targets, and return all that was found.

    Args:
        parts: of `PARTS`.
        chosen: contenders.
        effort: how long.

    Raises:
        UnsupportedError: there is no GPU, and no run at toy size was asked for.
    """
    clock = Clock(effort.budget_s)
    device, facts = _find_device(effort)
    bench = GpuBench(device, facts, effort, clock)
    print(_title(device, facts), flush=True)
    report = Report(results=[{"name": "device", **facts}])
    if "limits" in parts:
        report.add(bench.measure_limits())
    for workload in bench.workloads(parts):
        report.add(bench.measure_workload(workload, chosen))
    return report


def _find_device(effort: GpuEffort) -> tuple[Device, dict[str, Any]]:
    try:
        with _child(Probe, effort) as probe:
            return probe.call("find", effort.toy)
    except ChildError as error:
        kind = UnsupportedError if error.kind in ("UnsupportedError", "Unavailable") else EmbedrockError
        raise kind(str(error)) from error


def _child(factory: Callable[..., object], effort: GpuEffort, *args: Any) -> Child:
    return Child(factory, *args, environment=effort.environment(), timeout_s=effort.timeout_s)


def _title(device: Device, facts: dict[str, Any]) -> str:
    versions = f"torch {facts['torch']}, triton {facts['triton']}"
    if device.is_gpu:
        return f"{facts['gpu']}, {format_bytes(facts['memory_bytes'])}, {versions}\n"
    return f"TOY SIZE on CPU tensors under Triton's interpreter: times mean nothing. {versions}\n"


class GpuBench:
    """Measures on one device."""

    def __init__(self, device: Device, facts: dict[str, Any], effort: GpuEffort, clock: Clock) -> None:
        self._device, self._effort, self._clock = device, effort, clock
        self._free_bytes = available_bytes(), int(facts["free_bytes"])
        self._limits: dict[str, float] = {}

    def workloads(self, parts: Sequence[str]) -> Iterator[GpuWorkload]:
        """Yield the workloads among `parts`."""
        toy = not self._device.is_gpu
        if "forum" in parts:
            yield gpu_workloads.forum(toy)
        if "cache" in parts:
            yield gpu_workloads.cache(toy, *self._free_bytes)

    # ------------------------------------------------------------ limits

    def measure_limits(self) -> Report:
        """Measure what the bus and the GPU's memory give, and our kernels there."""
        report = Report()
        for name in ("bus", "in_place", "near"):
            try:
                with _child(Limits, self._effort, self._device) as child:
                    found: dict[str, float] = child.call(name)
            except ChildError as error:
                print(f"limits, {name}: failed: {error.kind}: {error}\n", flush=True)
                report.failures.append((f"limits, {name}", error.details))
                continue
            self._limits |= found
            report.results.append({"name": f"limits, {name}", "unit": "GB/s", **found})
            rows = [[key, format_number(rate)] for key, rate in found.items()]
            print(f"{format_table((f'limits, {name}', 'GB/s'), rows)}\n", flush=True)
        report.verdicts = judge_limits(self._limits)
        _print_verdicts(report.verdicts)
        return report

    # ------------------------------------------------------------ workloads

    def measure_workload(self, workload: GpuWorkload, chosen: Sequence[GpuContender]) -> Report:
        """Measure contenders on a workload; print their table and targets."""
        print(workload.describe(), flush=True)
        entries = _entries(workload, chosen)
        if not entries:
            print("nobody takes part\n", flush=True)
            return Report()
        host, device = self._free_bytes
        room = int(HOST_SHARE * host), int(DEVICE_SHARE * device)
        results = measure(entries, room, self._device, self._effort, self._clock)
        baseline = entries[0].name
        lines = [summary(result, baseline, results, self._limits) for result in results]
        print(f"{format_lines(lines, baseline)}\n", flush=True)
        verdicts, missing = judge(workload, baseline, results, self._limits)
        _print_verdicts(verdicts)
        if missing:
            print("\n".join(["not judged, for want of numbers:", *missing, ""]), flush=True)
        return Report(lines, verdicts, _failures(results))


def _failures(results: Sequence[GpuResult]) -> list[tuple[str, str]]:
    """Return who failed, and how; those that failed alike together."""
    names: dict[str, list[str]] = {}
    for result in results:
        if result.status == "failed":
            names.setdefault(result.details, []).append(result.name)
    return [(", ".join(alike), details) for details, alike in names.items()]


def _entries(workload: GpuWorkload, chosen: Sequence[GpuContender]) -> list[GpuEntry]:
    """Return who takes part, the baseline first."""
    entries = [GpuEntry(one, workload, one.name) for one in chosen if workload.name in one.workloads]
    if workload.name == "forum":
        wide = workload.with_dim(WIDER * workload.dim)
        entries += [GpuEntry(one, wide, f"{one.name}-wide") for one in chosen if one.name == WIDE]
    return sorted(entries, key=lambda entry: entry.name != BASELINES[workload.name])


def _print_verdicts(verdicts: Sequence[Verdict]) -> None:
    if verdicts:
        print(f"{format_verdicts(verdicts)}\n", flush=True)
