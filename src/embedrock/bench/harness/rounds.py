"""Interleaved rounds: who runs together with whom, and what came of it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from embedrock.bench.harness.machine import peak_rss_bytes, rss_bytes
from embedrock.bench.harness.processes import Child, ChildError
from embedrock.bench.harness.workload import Workload
from embedrock.bench.step.contenders import Contender
from embedrock.machine.ram import available_bytes
from embedrock.machine.sizes import format_bytes
from embedrock.terminal.progress import say

RAM_SHARE = 0.9  # of the available RAM that the processes alive together may take, by their estimates
SETTLE_STEPS = 3  # untimed steps at the start of a round: the others have used the caches meanwhile
SETTLE_BELOW_S = 0.05  # slower contenders outgrow every cache anyway
FIRST_STEPS = 2  # steps that load or compile what they need
WARM_UP_ROUNDS = 5  # times `Effort.seconds` that the pass over all batches before the first round may take
PAUSE_S = 0.01  # between turns, so that no thread of the last contender still runs


class Session:
    """In a contender's own process: makes it, steps it, times it."""

    def __init__(self, contender: Contender, workload: Workload) -> None:
        self._step = contender.make(workload)
        self._batches = workload.batches
        self._count = 0
        self._last_s = 0.0

    def warm_up(self, seconds: float) -> list[float]:
        """Work through all batches, or as many as fit into `seconds`; return the seconds of each step.

        The first steps, in which kernels are compiled if this is the first run ever, do not count.
        """
        first = min(FIRST_STEPS, self._batches)
        return self._timed_steps(first, math.inf) + self._timed_steps(self._batches - first, seconds)

    def round(self, steps: int, seconds: float) -> list[float]:
        """Return the seconds of each of `steps` steps, or of as many as fit into `seconds`."""
        if self._last_s < SETTLE_BELOW_S:
            self._timed_steps(SETTLE_STEPS, seconds)
        return self._timed_steps(steps, seconds)

    def ram(self) -> tuple[int, int]:
        """Return the RAM that this process holds, and the most that it held, in bytes."""
        return rss_bytes(), peak_rss_bytes()

    def _timed_steps(self, steps: int, seconds: float) -> list[float]:
        times: list[float] = []
        while len(times) < steps and sum(times) < seconds:
            index = self._count % self._batches
            start = time.perf_counter()
            self._step(index)
            self._last_s = time.perf_counter() - start
            self._count += 1
            times.append(self._last_s)
        return times


class Entry(NamedTuple):
    """A contender, what it works on, and who steps it in its own process: `Session`, or a class with its methods."""

    contender: Contender
    workload: Workload
    session: type = Session

    @property
    def name(self) -> str:
        """The contender's name."""
        return self.contender.name

    @property
    def need_bytes(self) -> int:
        """RAM that its process may come to hold."""
        return self.contender.need_bytes(self.workload)


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Args:
        rounds: turns of each contender.
        steps: timed steps in a turn.
        seconds: a turn ends early once it took this long (it has one timed step at least).
        threads: threads of each contender.
        timeout_s: a contender that does not answer for so long is ended.
    """

    rounds: int = 7
    steps: int = 30
    seconds: float = 2.0
    threads: int = 2
    timeout_s: float = 600.0

    def environment(self) -> dict[str, str]:
        """Return the variables that thread pools read when a child's libraries load.

        OpenMP threads that spin while they wait go on spinning in another contender's turn, and where they
        have no core to themselves they cost torch and FBGEMM many times their own time: FBGEMM's rowwise
        Adagrad (SUM) took 70 ms on 2 cores, and 1.5 ms with threads that sleep. So they sleep; an
        OMP_WAIT_POLICY of the caller's own is left alone.
        """
        threads = dict.fromkeys(("EMBEDROCK_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.threads))
        return {**threads, "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive")}


@dataclass
class Result:
    """What came of one entry.

    Attributes:
        entry: who, on what.
        group: number of the group of processes that were alive together, from 1; 0 where it never ran.
        status: "ok", "skipped" or "failed".
        reason: why it is not "ok".
        details: traceback of a failure.
        first_s: seconds of each step of the first pass over the batches, in which rows are touched first.
        rounds_s: seconds of the timed steps, by round.
        rss_bytes: RAM that its process held after the last round.
        peak_bytes: the most RAM that its process held.
    """

    entry: Entry
    group: int = 0
    status: str = "ok"
    reason: str = ""
    details: str = ""
    first_s: list[float] = field(default_factory=list)
    rounds_s: list[list[float]] = field(default_factory=list)
    rss_bytes: int = 0
    peak_bytes: int = 0

    @property
    def name(self) -> str:
        """The contender's name."""
        return self.entry.name

    @property
    def steps_s(self) -> list[float]:
        """Seconds of all timed steps."""
        return [seconds for round_s in self.rounds_s for seconds in round_s]

    @property
    def median_s(self) -> float:
        """Median over all timed steps."""
        return median(self.steps_s)


class _Runner:
    """In the parent: one contender's process and its result. A failure ends this contender alone."""

    def __init__(self, entry: Entry, group: int, effort: Effort, stack: ExitStack) -> None:
        self.result = Result(entry, group)
        self._effort = effort
        self._stack = stack
        self._child: Child | None = None

    def start(self) -> None:
        say(f"{self.result.name}: preparing ({format_bytes(self.result.entry.need_bytes)})")
        try:
            effort, (contender, workload, session) = self._effort, self.result.entry
            environment = effort.environment()
            child = Child(session, contender, workload, environment=environment, timeout_s=effort.timeout_s)
            self._child = self._stack.enter_context(child)
            self.result.first_s = child.call("warm_up", WARM_UP_ROUNDS * effort.seconds)
        except ChildError as error:
            self._fail(error)

    def round(self) -> None:
        if self._child is None:
            return
        time.sleep(PAUSE_S)
        try:
            self.result.rounds_s.append(self._child.call("round", self._effort.steps, self._effort.seconds))
            self.result.rss_bytes, self.result.peak_bytes = self._child.call("ram")
        except ChildError as error:
            self._fail(error)

    def _fail(self, error: ChildError) -> None:
        self.result.status = "skipped" if error.kind == "Unavailable" else "failed"
        said = str(error).partition("\n")[0]
        self.result.reason = said if error.kind in ("Unavailable", "Died") else f"{error.kind}: {said}"
        self.result.details = error.details
        if self._child is not None:
            self._child.close()
            self._child = None
        say(f"{self.result.name}: {self.result.status}: {self.result.reason}")


def measure(entries: Sequence[Entry], baseline: str, effort: Effort) -> list[Result]:
    """Measure all entries, in groups whose processes fit into RAM together.

    Args:
        entries: with different names.
        baseline: name of the entry that takes part in every group where it fits, so that groups compare.
        effort: how long.

    Returns:
        A result for each entry, in their order; the baseline has one for each group.
    """
    groups, results = plan_groups(entries, baseline, int(RAM_SHARE * available_bytes()))
    for number, group in enumerate(groups, start=1):
        say(f"group {number} of {len(groups)}: {', '.join(entry.name for entry in group)}")
        results += _run_group(group, number, effort)
    order = {entry.name: index for index, entry in enumerate(entries)}
    return sorted(results, key=lambda result: (result.group or len(groups) + 1, order[result.name]))


def plan_groups(entries: Sequence[Entry], baseline: str, budget_bytes: int) -> tuple[list[list[Entry]], list[Result]]:
    """Return groups that fit into `budget_bytes` each, and the results of entries that fit into none."""
    fits = [entry for entry in entries if entry.need_bytes <= budget_bytes]
    first = [entry for entry in fits if entry.name == baseline]
    groups = [first.copy()] if first else []
    for entry in fits:
        if entry.name != baseline:
            _group_for(entry, groups, first, budget_bytes).append(entry)
    return groups, [_does_not_fit(entry, budget_bytes) for entry in entries if entry not in fits]


def _group_for(entry: Entry, groups: list[list[Entry]], first: list[Entry], budget_bytes: int) -> list[Entry]:
    """Return the first group that begins with the baseline and has room, or a new one."""
    for group in groups:
        if group[: len(first)] == first and _need(group) + entry.need_bytes <= budget_bytes:
            return group
    groups.append(first.copy() if _need(first) + entry.need_bytes <= budget_bytes else [])
    return groups[-1]


def _need(group: list[Entry]) -> int:
    return sum(entry.need_bytes for entry in group)


def _does_not_fit(entry: Entry, budget_bytes: int) -> Result:
    need, budget = format_bytes(entry.need_bytes), format_bytes(budget_bytes)
    return Result(entry, status="skipped", reason=f"needs {need} of RAM, {budget} may be used")


def _run_group(group: list[Entry], number: int, effort: Effort) -> list[Result]:
    with ExitStack() as stack:
        runners = [_Runner(entry, number, effort, stack) for entry in group]
        for runner in runners:
            runner.start()
        for index in range(effort.rounds):
            say(f"round {index + 1} of {effort.rounds}", transient=True)
            for runner in runners:
                runner.round()
        say("", transient=True)
        return [runner.result for runner in runners]
