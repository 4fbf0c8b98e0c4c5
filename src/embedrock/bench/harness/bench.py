"""A benchmark as the command line knows it, and what a user asked it for."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from embedrock.bench.harness.contenders import Contender
from embedrock.bench.harness.effort import Effort
from embedrock.bench.harness.report import Report
from embedrock.bench.harness.targets import Target
from embedrock.bench.harness.workload import Workload

SIZES = ("dim", "batch", "features", "zipf", "batches", "seed")  # options: fields of `Workload`, but for the rows
EFFORT = ("threads", "rounds", "steps", "seconds", "timeout_s")  # and of `Effort`


@dataclass(frozen=True)
class Bench:
    """A benchmark: a row of the table of benchmarks.

    Args:
        name: of its command.
        help: what it measures.
        measure: measures, prints, and returns what was found.
        options: that it takes, see `options.OPTIONS`: fields of its workloads and of its effort, which have defaults.
        contenders: who may take part.
        targets: what should come out.
        workloads: what they work on, one after another, unless the user says otherwise: `Workload`s, or `ManyTables`.
        effort: how long it measures, unless the user says otherwise.
        texts: what is said of some options instead of what is said elsewhere.
        add_options: adds options of its own.
    """

    name: str
    help: str
    measure: Callable[[Task], Report]
    options: tuple[str, ...]
    contenders: tuple[Contender, ...] = ()
    targets: tuple[Target, ...] = ()
    workloads: tuple[Any, ...] = (Workload(),)
    effort: Effort = field(default_factory=Effort)
    texts: dict[str, str] = field(default_factory=dict)
    add_options: Callable[[ArgumentParser], object] = lambda parser: None


@dataclass(frozen=True)
class Task:
    """What a user asked for.

    Args:
        bench: of which benchmark.
        arguments: of the command line; what was not given is not there.
    """

    bench: Bench
    arguments: Namespace

    @property
    def contenders(self) -> list[Any]:
        """Who takes part, in this order."""
        return self.arguments.contenders

    @property
    def workloads(self) -> list[Any]:
        """What they work on, one after another."""
        return list(dict.fromkeys(self._given(workload) for workload in self.bench.workloads))

    @property
    def workload(self) -> Any:
        """What they work on, where it is one."""
        return self.workloads[0]

    @property
    def effort(self) -> Any:
        """How long to measure: of the class of the benchmark's own."""
        return self._given(self.bench.effort)

    def _given(self, defaults: Any) -> Any:
        names = [one.name for one in fields(defaults) if hasattr(self.arguments, one.name)]
        return replace(defaults, **{name: getattr(self.arguments, name) for name in names})
