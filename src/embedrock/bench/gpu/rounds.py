"""Interleaved rounds of ``bench gpu``: each contender in a process of its own, of which one computes at a time.

A contender that crashes the device's context takes nobody else with it. As many are alive together as fit into the
host's RAM and the device's memory; the baseline is in every group, so that groups compare.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from statistics import median
from typing import Any, NamedTuple

from embedrock.bench.gpu.contenders import LOOK_AHEAD, GpuContender, Traffic, Trainer
from embedrock.bench.gpu.device import INTERPRETER, Device
from embedrock.bench.gpu.workloads import GpuWorkload
from embedrock.bench.harness.machine import peak_rss_bytes, rss_bytes
from embedrock.bench.harness.processes import Child, ChildError
from embedrock.bench.harness.rounds import Effort
from embedrock.machine.sizes import format_bytes
from embedrock.terminal.progress import say

STARTED_TOGETHER = 4  # processes that make their tables and warm up at a time
WARM_UP_PASSES = 4  # over all batches: rows get records, a cache fills, and counts who is used often
SETTLE_STEPS = 4  # untimed, at the start of a round
PREFETCH = "-prefetch"  # after a contender's name


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class GpuEffort(Effort):
    """How long to measure.

    Args:
        rounds: turns of each contender.
        steps: timed steps of a turn at most; there are as many as there are batches, if that is less.
        seconds: the untimed steps of a contender end after so long.
        threads: of each contender.
        timeout_s: a contender that does not answer for so long is ended.
        toy: run at toy size under Triton's interpreter.
        budget_s: what has not begun after so long is left out.
    """

    rounds: int = 5
    steps: int = 60
    seconds: float = 20.0
    threads: int = field(default_factory=usable_cores)
    timeout_s: float = 150.0
    toy: bool = False
    budget_s: float = 480.0

    def environment(self) -> dict[str, str]:
        """Return the variables of the contenders' processes."""
        return super().environment() | ({INTERPRETER: "1", "CUDA_VISIBLE_DEVICES": ""} if self.toy else {})


class GpuEntry(NamedTuple):
    """A contender and what it works on."""

    contender: GpuContender
    workload: GpuWorkload
    name: str

    @property
    def needs(self) -> tuple[int, int]:
        """RAM of the host, and memory of the device."""
        return self.contender.host_bytes(self.workload), self.contender.device_bytes(self.workload)


@dataclass
class GpuResult:
    """What came of an entry, with or without prefetching.

    Attributes:
        entry: who.
        ahead: it was driven by `prefetch`.
        group: entries of one group were measured in the same rounds; 0 for those that did not run.
        status: "ok", "skipped" (it cannot run here) or "failed".
        reason, details: why not ok, and the traceback.
        rounds_s: seconds of a step, of each round.
        host_s: of them, until the host had given the device all to do.
        counts: of `gpu_contenders.COUNTED`, in a step; empty where nothing counts.
        memory: of its process, in bytes.
    """

    entry: GpuEntry
    ahead: bool = False
    group: int = 0
    status: str = "ok"
    reason: str = ""
    details: str = ""
    rounds_s: list[float] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The entry's name, and how it was driven."""
        return self.entry.name + PREFETCH * self.ahead

    @property
    def median_s(self) -> float:
        """Median over the rounds."""
        return median(self.rounds_s)

    @property
    def traffic(self) -> Traffic | None:
        """Bytes of rows that a step moves over the bus, or None where nobody knows."""
        traffic = self.entry.contender.traffic
        return None if traffic is None else traffic(self.entry.workload, self.counts)

    @property
    def hit_rate(self) -> float | None:
        """Share of a batch's unique rows that were near, or None where there is no cache."""
        if not self.entry.contender.near or not self.counts:
            return None
        return self.counts["hits"] / max(1.0, self.counts["hits"] + self.counts["misses"])


class Turn(NamedTuple):
    """What came of a turn.

    Attributes:
        seconds: of a step.
        host_seconds: of a step, after which the host had given the device all to do: close to `seconds`, the host is
            what takes the time.
        counts: in a step.
        memory: of the process, bytes.
    """

    seconds: float
    host_seconds: float
    counts: dict[str, float]
    memory: dict[str, float]


# ---------------------------------------------------------------- in a contender's own process


class GpuSession:
    """Makes a contender, steps it, times it."""

    def __init__(self, entry: GpuEntry, device: Device) -> None:
        self._device, self._batches = device, entry.workload.batches
        self._trainer = Trainer(entry.workload, entry.contender.make(entry.workload, device), device)

    def warm_up(self, ahead: bool, seconds: float) -> bool:
        """Work through all batches some times, or for so long, once at least; return that it is done."""
        end = time.perf_counter() + seconds
        for _ in range(WARM_UP_PASSES):
            for _ in self._trainer.run(self._batches, ahead):
                pass
            self._device.synchronize()
            if time.perf_counter() > end:
                break
        return True

    def round(self, ahead: bool, steps: int) -> Turn:
        """Make steps, as many as there are batches at most."""
        timed, untimed = min(steps, self._batches), min(SETTLE_STEPS, self._batches)
        run = self._trainer.run(untimed + timed + LOOK_AHEAD, ahead)  # while it is timed, there is something ahead
        for _ in islice(run, untimed):
            pass
        before = self._trainer.counts()
        self._device.synchronize()
        start = time.perf_counter()
        for _ in islice(run, timed):
            pass
        host_seconds = time.perf_counter() - start
        self._device.synchronize()
        seconds = time.perf_counter() - start
        after = self._trainer.counts()
        for _ in run:
            pass
        counts = {name: (after[name] - before[name]) / timed for name in after}
        return Turn(seconds / timed, host_seconds / timed, counts, self._memory())

    def _memory(self) -> dict[str, float]:
        return {
            "rss_bytes": rss_bytes(),
            "peak_rss_bytes": peak_rss_bytes(),
            "peak_device_bytes": self._device.peak_bytes(),
            **self._trainer.near(),
        }


# ---------------------------------------------------------------- in the parent


class _Runner:
    """One contender's process, and its results by how it is driven (`True`: with prefetching).

    A failure ends the process, as it may have broken its device's context; what else there is to measure starts anew.
    """

    def __init__(self, entry: GpuEntry, group: int, device: Device, effort: GpuEffort, stack: ExitStack) -> None:
        ways = (False, True) if entry.contender.looks_ahead else (False,)
        self.results = {way: GpuResult(entry, way, group) for way in ways}
        self._entry, self._device, self._effort, self._stack = entry, device, effort, stack
        self._child: Child | None = None

    def start(self) -> None:
        """Make the process, and warm up each way that has not failed."""
        if not self._ways():
            return
        try:
            environment, timeout_s = self._effort.environment(), self._effort.timeout_s
            child = Child(GpuSession, self._entry, self._device, environment=environment, timeout_s=timeout_s)
        except ChildError as error:
            for way in self._ways():
                self._fail(way, error)
            return
        self._child = self._stack.enter_context(child)
        for way in self._ways():
            if not self._call(way, "warm_up", way, self._effort.seconds):
                self.start()
                return

    def round(self) -> None:
        """Have a turn."""
        for way in self._ways():
            if self.results[way].status == "ok":  # still: starting anew may have failed
                self._turn(way)

    def _turn(self, way: bool) -> None:
        turn: Turn | None = self._call(way, "round", way, self._effort.steps)
        if turn is None:
            self.start()
            return
        result = self.results[way]
        result.rounds_s.append(turn.seconds)
        result.host_s.append(turn.host_seconds)
        result.counts, result.memory = _mean(result.counts, turn.counts, len(result.rounds_s)), turn.memory

    def _ways(self) -> list[bool]:
        return [way for way, result in self.results.items() if result.status == "ok"]

    def _call(self, way: bool, method: str, *arguments: Any) -> Any:
        """Return the process's answer, or None if it failed."""
        assert self._child is not None
        try:
            return self._child.call(method, *arguments)
        except ChildError as error:
            self._child.close()
            self._child = None
            self._fail(way, error)
            return None

    def _fail(self, way: bool, error: ChildError) -> None:
        result, said = self.results[way], str(error).partition("\n")[0]
        result.status = "skipped" if error.kind == "Unavailable" else "failed"
        result.reason = said if error.kind in ("Unavailable", "Died") else f"{error.kind}: {said}"
        result.details = error.details
        say(f"{result.name}: {result.status}: {result.reason}")


def _mean(before: dict[str, float], new: dict[str, float], count: int) -> dict[str, float]:
    return {name: before.get(name, 0.0) + (value - before.get(name, 0.0)) / count for name, value in new.items()}


class Clock:
    """The time that the whole benchmark may take."""

    def __init__(self, budget_s: float) -> None:
        self._end = time.monotonic() + budget_s

    @property
    def is_over(self) -> bool:
        """Whether nothing more should begin."""
        return time.monotonic() > self._end


def measure(
    entries: Sequence[GpuEntry], room: tuple[int, int], device: Device, effort: GpuEffort, clock: Clock
) -> list[GpuResult]:
    """Measure entries, the first of which is the baseline.

    Args:
        entries: with different names.
        room: RAM of the host and memory of the device that the processes alive together may take.
        device: what to measure on.
        effort: how long.
        clock: ends it early.

    Returns:
        A result for each entry and way; the baseline has one for each group.
    """
    # Found out before groups are made, or who cannot take part would have room kept.
    missing = [entry for entry in entries if not _is_installed(entry.contender.package)]
    results = [_skipped(entry, f"{entry.contender.package} is not installed") for entry in missing]
    groups, misfits = plan_groups([entry for entry in entries if entry not in missing], room)
    for number, group in enumerate(groups, start=1):
        say(f"group {number} of {len(groups)}: {', '.join(entry.name for entry in group)}")
        if clock.is_over:
            results += [_skipped(entry, "no time was left") for entry in group if number == 1 or entry != entries[0]]
        else:
            results += _run_group(group, number, device, effort, clock)
    return results + [_skipped(entry, _too_large(entry, room)) for entry in misfits]


def _is_installed(package: str | None) -> bool:
    return package is None or find_spec(package) is not None


def plan_groups(entries: Sequence[GpuEntry], room: tuple[int, int]) -> tuple[list[list[GpuEntry]], list[GpuEntry]]:
    """Return groups of entries that fit into `room` together, and the entries that do not fit at all.

    The first entry is in every group, if it fits.
    """
    misfits = [entry for entry in entries if not _fits([entry], room)]
    first = [entry for entry in entries[:1] if entry not in misfits]
    groups = [first.copy()] if first else []
    for entry in entries:
        if entry in misfits or entry in first:
            continue
        group = next((group for group in groups if _fits([*group, entry], room)), None)
        if group is None:
            group = first.copy() if _fits([*first, entry], room) else []
            groups.append(group)
        group.append(entry)
    return groups, misfits


def _fits(group: Sequence[GpuEntry], room: tuple[int, int]) -> bool:
    needs = zip(*(entry.needs for entry in group), strict=True)
    return all(sum(each) <= limit for each, limit in zip(needs, room, strict=True))


def _too_large(entry: GpuEntry, room: tuple[int, int]) -> str:
    host, device = map(format_bytes, entry.needs)
    room_host, room_device = map(format_bytes, room)
    return f"needs {host} of RAM and {device} of GPU memory; {room_host} and {room_device} may be used"


def _skipped(entry: GpuEntry, reason: str) -> GpuResult:
    return GpuResult(entry, status="skipped", reason=reason)


def _run_group(
    group: Sequence[GpuEntry], number: int, device: Device, effort: GpuEffort, clock: Clock
) -> list[GpuResult]:
    with ExitStack() as stack:
        runners = [_Runner(entry, number, device, effort, stack) for entry in group]
        with ThreadPoolExecutor(min(STARTED_TOGETHER, usable_cores())) as starting:
            list(starting.map(_Runner.start, runners))
        for index in _rounds(effort.rounds, clock):
            say(f"round {index + 1} of {effort.rounds}")
            for runner in runners:
                runner.round()
        return [result for runner in runners for result in runner.results.values()]


def _rounds(count: int, clock: Clock) -> Iterator[int]:
    """Count rounds; there is one in any case."""
    for index in range(count):
        if index and clock.is_over:
            return
        yield index
