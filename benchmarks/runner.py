"""The runner of all benchmarks: implementations in processes of their own, of which one computes at a time, in rounds.

Processes are alive together as far as they fit into memory. The baseline, the first entry, is in every group, so
groups can be compared. A failure of one implementation leaves the others alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from benchmarks import processes
from benchmarks.implementations import Footprint, Implementation, Sessions
from benchmarks.options import BenchmarkOptions
from benchmarks.processes import ChildError
from benchmarks.progress import say
from embedrock.system.ram import available_bytes
from embedrock.system.sizes import format_bytes

RAM_SHARE = 0.9  # of the available RAM, for all processes alive together, by their estimates
PAUSE_S = 0.01  # between turns, so that no thread of the last implementation still runs


@dataclass(frozen=True)
class Entry:
    """An implementation in a measurement, and its workload."""

    implementation: Implementation
    workload: Any
    before: bool = False  # with the Embedrock of the other checkout

    @property
    def name(self) -> str:
        return self.implementation.name + ("-before" if self.before else "")

    @property
    def need(self) -> Footprint:
        return self.implementation.need(self.workload)


@dataclass
class Result:
    """The outcome of one entry, used in one way.

    Attributes:
        entry: implementation and workload.
        way: one of `Implementation.ways`.
        group: number of the group of processes that were alive together, from 1; 0 if it never ran.
        status: "ok", "skipped" (it cannot run here) or "failed".
        reason: of a status that is not "ok".
        details: traceback of a failure.
        first: the session's answer to `warm_up`.
        turns: and to each `turn`.
    """

    entry: Entry
    way: str = ""
    group: int = 0
    status: str = "ok"
    reason: str = ""
    details: str = ""
    first: Any = None
    turns: list[Any] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.entry.name + self.way

    def fail(self, error: ChildError) -> None:
        """Record a failure, and print it."""
        first_line = str(error).partition("\n")[0]
        self.status = "skipped" if error.kind == "Unavailable" else "failed"
        self.reason = first_line if error.kind in ("Unavailable", "Died") else f"{error.kind}: {first_line}"
        self.details = error.details
        say(f"{self.name}: {self.status}: {self.reason}")


class _Guest(NamedTuple):
    """A session in a process that it shares, called like a process of its own."""

    child: processes.Child
    name: str

    def call(self, method: str, *arguments: Any) -> Any:
        return self.child.call("call", self.name, method, *arguments)

    def close(self) -> None:
        """Leave the process to the others."""


class _Homes:
    """The processes of a group: one for each entry, or one for all with the same Embedrock."""

    def __init__(self, options: BenchmarkOptions, stack: ExitStack) -> None:
        self._options, self._stack = options, stack
        self._shared: dict[bool, processes.Child] = {}

    def of(self, entry: Entry) -> processes.Child | _Guest:
        """Make an entry's session."""
        options = self._options if entry.before else replace(self._options, beside=None)
        session = entry.implementation.session, entry.implementation.make, entry.workload
        if not options.together:
            return self._stack.enter_context(options.child(*session))
        if entry.before not in self._shared:
            self._shared[entry.before] = self._stack.enter_context(options.child(Sessions))
        self._shared[entry.before].call("open", entry.name, *session)
        return _Guest(self._shared[entry.before], entry.name)


class _Runner:
    """One entry's session, and its results by way.

    A failure ends its process, whose state is unknown then. The other ways get a new one.
    """

    def __init__(self, entry: Entry, group: int, options: BenchmarkOptions, homes: _Homes) -> None:
        self.results = [Result(entry, way, group) for way in entry.implementation.ways]
        self._entry, self._options, self._homes = entry, options, homes
        self._child: processes.Child | _Guest | None = None

    def start(self) -> None:
        """Make the process, and warm up in each way that has not failed."""
        if not self._ok():
            return
        say(f"{self._entry.name}: preparing ({format_bytes(self._entry.need.host)})")
        if self._open():
            for result in self._ok():
                result.first = self._call(result, "warm_up", self._options.warm_up_s)
                if self._child is None:
                    self.start()
                    return

    def round(self) -> None:
        for result in self._ok():
            time.sleep(PAUSE_S)
            if result.status == "ok":  # still: a new process may have failed
                turn = self._call(result, "turn", self._options.steps, self._options.seconds)
                result.turns += [turn] if result.status == "ok" else []
            if self._child is None:
                self.start()

    def _ok(self) -> list[Result]:
        return [result for result in self.results if result.status == "ok"]

    def _open(self) -> bool:
        try:
            self._child = self._homes.of(self._entry)
        except ChildError as error:
            for result in self._ok():
                result.fail(error)
        return self._child is not None

    def _call(self, result: Result, method: str, *arguments: Any) -> Any:
        assert self._child is not None
        try:
            if len(self.results) > 1:
                self._child.call("use", result.way)
            return self._child.call(method, *arguments)
        except ChildError as error:
            self._child.close()
            self._child = None
            result.fail(error)
            return None


def measure(
    entries: Sequence[Entry], options: BenchmarkOptions, room: Footprint | None = None, until: float = math.inf
) -> list[Result]:
    """Measure entries in interleaved rounds, in groups whose processes fit into memory together.

    Args:
        entries: with different names; the first is the baseline.
        options: rounds and steps.
        room: memory for all processes alive together; None: of the RAM that is available.
        until: nothing begins after this time (`time.monotonic`).

    Returns:
        A result for each entry and way, by group and in the order of entries; the baseline has one for each group.
    """
    if options.beside is not None:
        ours = (entry for entry in entries if entry.implementation.name.startswith("ours"))
        entries = [*entries, *(replace(entry, before=True) for entry in ours)]
    room = room or Footprint(int(RAM_SHARE * available_bytes()))
    results: list[Result] = []
    groups, misfits = plan_groups(entries, room)
    for number, group in enumerate(groups, start=1):
        say(f"group {number} of {len(groups)}: {', '.join(entry.name for entry in group)}")
        if time.monotonic() > until:
            late = group if number == 1 else [entry for entry in group if entry != entries[0]]
            results += [Result(entry, status="skipped", reason="no time was left") for entry in late]
        else:
            results += _run_group(group, number, options, until)
    results += [Result(entry, status="skipped", reason=entry.need.too_large_for(room)) for entry in misfits]
    order = {entry.name: index for index, entry in enumerate(entries)}
    return sorted(results, key=lambda result: (result.group or len(groups) + 1, order[result.entry.name]))


def plan_groups(entries: Sequence[Entry], room: Footprint) -> tuple[list[list[Entry]], list[Entry]]:
    """Return groups of entries that fit into `room` together, and the entries that do not fit at all.

    The first entry is in every group where it fits.
    """
    misfits = [entry for entry in entries if not entry.need.fits(room)]
    first = [entry for entry in entries[:1] if entry not in misfits]
    groups = [first.copy()] if first else []
    for entry in entries:
        if entry not in misfits and entry not in first:
            _group_for(entry, groups, first, room).append(entry)
    return groups, misfits


def _group_for(entry: Entry, groups: list[list[Entry]], first: list[Entry], room: Footprint) -> list[Entry]:
    """Return the first group that begins with the baseline and has room, or a new one."""
    for group in groups:
        if group[: len(first)] == first and _fit([*group, entry], room):
            return group
    groups.append(first.copy() if _fit([*first, entry], room) else [])
    return groups[-1]


def _fit(group: Sequence[Entry], room: Footprint) -> bool:
    host, device = map(sum, zip(*(entry.need for entry in group), strict=True))
    return Footprint(host, device).fits(room)


def _run_group(group: Sequence[Entry], number: int, options: BenchmarkOptions, until: float) -> list[Result]:
    with ExitStack() as stack:
        homes = _Homes(options, stack)
        runners = [_Runner(entry, number, options, homes) for entry in group]
        _start(runners, options.starters)
        for index in range(options.rounds):
            if index and time.monotonic() > until:
                break
            say(f"round {index + 1} of {options.rounds}", transient=True)
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
