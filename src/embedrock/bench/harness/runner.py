"""The runner of all benchmarks: contenders in processes of their own, of which one computes at a time, in rounds.

As many are alive together as fit into memory; the baseline, the first racer, is in every group, so that groups
compare. A contender that fails takes nobody else with it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from embedrock.bench.harness.contenders import Contender, Footprint
from embedrock.bench.harness.effort import Clock, Effort
from embedrock.bench.harness.processes import Child, ChildError
from embedrock.machine.ram import available_bytes
from embedrock.machine.sizes import format_bytes
from embedrock.terminal.progress import say

RAM_SHARE = 0.9  # of the available RAM that the processes alive together may take, by their estimates
PAUSE_S = 0.01  # between turns, so that no thread of the last contender still runs


@dataclass(frozen=True)
class Racer:
    """A contender in a measurement.

    Args:
        contender: who.
        workload: what it works on.
        session: what is made in its process: a class or function that can be imported by name, and its arguments. The
            session has ``warm_up(seconds)`` and ``turn(steps, seconds)``, whose answers are kept as they are, and
            ``use(way)`` if the contender has several ways.
        name: its own, where it is not the contender's.
        fresh: each turn has a process of its own, without warming up.
        package: that it needs.
    """

    contender: Contender
    workload: Any
    session: tuple[Callable[..., object], *tuple[Any, ...]]
    name: str = ""
    fresh: bool = False
    package: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.contender.name)

    @property
    def need(self) -> Footprint:
        """Memory that its process may come to hold."""
        return self.contender.need(self.workload)


@dataclass
class Result:
    """What came of one racer, driven in one way.

    Attributes:
        racer: who, on what.
        way: key of `Contender.ways`.
        group: number of the group of processes that were alive together, from 1; 0 where it never ran.
        status: "ok", "skipped" (it cannot run here) or "failed".
        reason: why it is not "ok".
        details: traceback of a failure.
        first: what its session said of warming up.
        turns: and of each turn.
    """

    racer: Racer
    way: str = ""
    group: int = 0
    status: str = "ok"
    reason: str = ""
    details: str = ""
    first: Any = None
    turns: list[Any] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The racer's name, and how it was driven."""
        return self.racer.name + self.way

    def fail(self, error: ChildError) -> None:
        """Note that it failed, and say so."""
        said = str(error).partition("\n")[0]
        self.status = "skipped" if error.kind == "Unavailable" else "failed"
        self.reason = said if error.kind in ("Unavailable", "Died") else f"{error.kind}: {said}"
        self.details = error.details
        say(f"{self.name}: {self.status}: {self.reason}")


class _Runner:
    """One racer's process, and its results by way.

    A failure ends the process, whose state nobody knows then; for the ways that are left a new one is made.
    """

    def __init__(self, racer: Racer, group: int, effort: Effort, stack: ExitStack) -> None:
        self.results = [Result(racer, way, group) for way in racer.contender.ways]
        self._racer, self._effort, self._stack = racer, effort, stack
        self._child: Child | None = None

    def start(self) -> None:
        """Make the process, and warm up in each way that has not failed."""
        if self._racer.fresh or not self._alive():
            return
        say(f"{self._racer.name}: preparing ({format_bytes(self._racer.need.host)})")
        if self._open():
            for result in self._alive():
                result.first = self._call(result, "warm_up", self._effort.warm_up_s)
                if self._child is None:
                    self.start()
                    return

    def round(self) -> None:
        """Take a turn in each way."""
        for result in self._alive():
            time.sleep(PAUSE_S)
            if self._racer.fresh:
                self._open()
            if result.status == "ok":  # still: a new process may have failed
                turn = self._call(result, "turn", self._effort.steps, self._effort.seconds)
                result.turns += [turn] if result.status == "ok" else []
            if self._racer.fresh:
                self._close()
            elif self._child is None:
                self.start()

    def _alive(self) -> list[Result]:
        return [result for result in self.results if result.status == "ok"]

    def _open(self) -> bool:
        try:
            self._child = self._stack.enter_context(self._effort.child(*self._racer.session))
        except ChildError as error:
            for result in self._alive():
                result.fail(error)
        return self._child is not None

    def _close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def _call(self, result: Result, method: str, *arguments: Any) -> Any:
        """Return the session's answer. Where it fails, the process is ended."""
        assert self._child is not None
        ways = self._racer.contender.ways
        try:
            if len(ways) > 1:
                self._child.call("use", ways[result.way])
            return self._child.call(method, *arguments)
        except ChildError as error:
            self._close()
            result.fail(error)
            return None


def measure(
    racers: Sequence[Racer], effort: Effort, room: Footprint | None = None, clock: Clock | None = None
) -> list[Result]:
    """Measure racers in interleaved rounds, in groups whose processes fit into memory together.

    Args:
        racers: with different names; the first is the baseline.
        effort: how long.
        room: memory that the processes alive together may take; None: of the RAM that is available.
        clock: ends it early.

    Returns:
        A result for each racer and way, by group and in the order of racers; the baseline has one for each group.
    """
    room = room or Footprint(int(RAM_SHARE * available_bytes()))
    clock = clock or Clock(math.inf)
    # Found out before groups are made, or who cannot take part would have room kept.
    missing = [racer for racer in racers if racer.package is not None and find_spec(racer.package) is None]
    results = [_skipped(racer, f"{racer.package} is not installed") for racer in missing]
    groups, misfits = plan_groups([racer for racer in racers if racer not in missing], room)
    for number, group in enumerate(groups, start=1):
        say(f"group {number} of {len(groups)}: {', '.join(racer.name for racer in group)}")
        if clock.is_over:
            results += [_skipped(racer, "no time was left") for racer in group if number == 1 or racer != racers[0]]
        else:
            results += _run_group(group, number, effort, clock)
    results += [_skipped(racer, racer.need.too_large_for(room)) for racer in misfits]
    order = {racer.name: index for index, racer in enumerate(racers)}
    return sorted(results, key=lambda result: (result.group or len(groups) + 1, order[result.racer.name]))


def plan_groups(racers: Sequence[Racer], room: Footprint) -> tuple[list[list[Racer]], list[Racer]]:
    """Return groups of racers that fit into `room` together, and the racers that do not fit at all.

    The first racer is in every group where it fits.
    """
    misfits = [racer for racer in racers if not racer.need.fits(room)]
    first = [racer for racer in racers[:1] if racer not in misfits]
    groups = [first.copy()] if first else []
    for racer in racers:
        if racer not in misfits and racer not in first:
            _group_for(racer, groups, first, room).append(racer)
    return groups, misfits


def _group_for(racer: Racer, groups: list[list[Racer]], first: list[Racer], room: Footprint) -> list[Racer]:
    """Return the first group that begins with the baseline and has room, or a new one."""
    for group in groups:
        if group[: len(first)] == first and _fit([*group, racer], room):
            return group
    groups.append(first.copy() if _fit([*first, racer], room) else [])
    return groups[-1]


def _fit(group: Sequence[Racer], room: Footprint) -> bool:
    need = Footprint()
    for racer in group:
        need = need.plus(racer.need)
    return need.fits(room)


def _skipped(racer: Racer, reason: str) -> Result:
    return Result(racer, status="skipped", reason=reason)


def _run_group(group: Sequence[Racer], number: int, effort: Effort, clock: Clock) -> list[Result]:
    with ExitStack() as stack:
        runners = [_Runner(racer, number, effort, stack) for racer in group]
        _start(runners, effort.starters)
        for index in _rounds(effort.rounds, clock):
            say(f"round {index + 1} of {effort.rounds}", transient=True)
            for runner in runners:
                runner.round()
        say("", transient=True)
        return [result for runner in runners for result in runner.results]


def _start(runners: Sequence[_Runner], at_a_time: int) -> None:
    if at_a_time == 1:  # not in a thread, where Ctrl-C would wait for its end
        for runner in runners:
            runner.start()
    else:
        with ThreadPoolExecutor(at_a_time) as pool:
            list(pool.map(_Runner.start, runners))


def _rounds(count: int, clock: Clock) -> Iterator[int]:
    """Count rounds; there is one in any case."""
    for index in range(count):
        if index and clock.is_over:
            return
        yield index
