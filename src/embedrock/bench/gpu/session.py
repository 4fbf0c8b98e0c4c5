"""What ``bench gpu`` makes in a contender's own process: it warms up and takes turns, with prefetching or without."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from statistics import median
from typing import Any, NamedTuple

from embedrock.bench.gpu.contenders import LOOK_AHEAD, GpuContender, Traffic, Trainer
from embedrock.bench.gpu.device import INTERPRETER, Device
from embedrock.bench.gpu.workloads import GpuWorkload
from embedrock.bench.harness.effort import Effort
from embedrock.bench.harness.runner import Racer, Result
from embedrock.machine.ram import peak_rss_bytes, rss_bytes
from embedrock.process.platform import usable_cores

STARTED_TOGETHER = 4  # processes that make their tables and warm up at a time
WARM_UP_PASSES = 4  # over all batches: rows get records, a cache fills, and counts who is used often
SETTLE_STEPS = 4  # untimed, at the start of a turn


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

    @property
    def warm_up_s(self) -> float:
        """Seconds after which a contender's untimed steps end."""
        return self.seconds

    @property
    def starters(self) -> int:
        """How many contenders are made and warm up at a time."""
        return min(STARTED_TOGETHER, usable_cores())

    def environment(self) -> dict[str, str]:
        """Return the variables of the contenders' processes."""
        return super().environment() | ({INTERPRETER: "1", "CUDA_VISIBLE_DEVICES": ""} if self.toy else {})


class GpuTiming(NamedTuple):
    """What came of a turn.

    Attributes:
        seconds: of a step.
        host_seconds: of a step, after which the host had given the device all to do: close to `seconds`, the host is
            what takes the time.
        counts: of `contenders.COUNTED`, in a step; empty where nothing counts.
        memory: of the process, bytes.
    """

    seconds: float
    host_seconds: float
    counts: dict[str, float]
    memory: dict[str, float]


class GpuSession:
    """Makes a contender, steps it, times it."""

    def __init__(self, contender: GpuContender, workload: GpuWorkload, device: Device) -> None:
        self._device, self._batches, self._ahead = device, workload.batches, False
        self._trainer = Trainer(workload, contender.make(workload, device), device)

    def use(self, ahead: bool) -> None:
        """Look ahead by `prefetch` from now on, or do not."""
        self._ahead = ahead

    def warm_up(self, seconds: float) -> None:
        """Work through all batches some times, or for so long, once at least."""
        end = time.perf_counter() + seconds
        for _ in range(WARM_UP_PASSES):
            for _ in self._trainer.run(self._batches, self._ahead):
                pass
            self._device.synchronize()
            if time.perf_counter() > end:
                break

    def turn(self, steps: int, seconds: float) -> GpuTiming:
        """Make steps, as many as there are batches at most, however long they take."""
        timed, untimed = min(steps, self._batches), min(SETTLE_STEPS, self._batches)
        run = self._trainer.run(untimed + timed + LOOK_AHEAD, self._ahead)  # something is ahead while it is timed
        for _ in islice(run, untimed):
            pass
        before = self._trainer.counts()
        self._device.synchronize()
        start = time.perf_counter()
        for _ in islice(run, timed):
            pass
        host_s = time.perf_counter() - start
        self._device.synchronize()
        taken_s = time.perf_counter() - start
        after = self._trainer.counts()
        for _ in run:
            pass
        counts = {name: (after[name] - before[name]) / timed for name in after}
        return GpuTiming(taken_s / timed, host_s / timed, counts, self._memory())

    def _memory(self) -> dict[str, float]:
        return {
            "rss_bytes": rss_bytes(),
            "peak_rss_bytes": peak_rss_bytes(),
            "peak_device_bytes": self._device.peak_bytes(),
            **self._trainer.near(),
        }


def racer_of(contender: GpuContender, workload: GpuWorkload, device: Device, name: str = "") -> Racer:
    """Return a contender as it takes part."""
    return Racer(contender, workload, (GpuSession, contender, workload, device), name, package=contender.package)


# ---------------------------------------------------------------- what came of it


def rounds_s(result: Result) -> list[float]:
    """Return the seconds of a step, of each round."""
    return [turn.seconds for turn in result.turns]


def median_s(result: Result) -> float:
    """Return their median."""
    return median(rounds_s(result))


def counts(result: Result) -> dict[str, float]:
    """Return the means over the rounds."""
    turns = [turn.counts for turn in result.turns]
    return {name: sum(turn[name] for turn in turns) / len(turns) for name in turns[0]}


def traffic(result: Result) -> Traffic | None:
    """Return the bytes of rows that a step moves over the bus, or None where nobody knows."""
    contender: Any = result.racer.contender
    return None if contender.traffic is None else contender.traffic(result.racer.workload, counts(result))


def hit_rate(result: Result) -> float | None:
    """Return the share of a batch's unique rows that were near, or None where there is no cache."""
    contender: Any = result.racer.contender
    found: Mapping[str, float] = counts(result)
    if not contender.near or not found:
        return None
    return found["hits"] / max(1.0, found["hits"] + found["misses"])
