"""A benchmark as the command line knows it: its implementations, workloads, targets and options."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from benchmarks.implementations import Implementation
from benchmarks.options import BenchmarkOptions
from benchmarks.report import Report, compare
from benchmarks.runner import Entry
from benchmarks.targets import Target
from benchmarks.workload import MAX_ROWS, Workload
from embedrock.cli.terminal.arguments import count, folder, number, size

SIZES = ("dim", "batch", "features", "zipf", "batches", "seed")  # options: fields of `Workload`, but for the rows
ROUNDS = ("threads", "rounds", "steps", "seconds", "timeout_s", "together", "beside")  # and of `BenchmarkOptions`


@dataclass(frozen=True)
class Benchmark:
    """A row of the table of benchmarks.

    Args:
        name: of its command.
        help: one line about it.
        measure: measures, prints, and returns the outcome.
        arguments: names of its options, see `OPTIONS`: fields of its workloads and of `options`.
        implementations: who may take part.
        targets: numbers that it should reach.
        workloads: one after another, unless the user changes them: `Workload`, or `ManyTables`.
        options: how long it measures, unless the user changes it.
        add_options: adds options of its own.
    """

    name: str
    help: str
    measure: Callable[[Task], Report]
    arguments: tuple[str, ...]
    implementations: tuple[Implementation, ...] = ()
    targets: tuple[Target, ...] = ()
    workloads: tuple[Any, ...] = (Workload(),)
    options: BenchmarkOptions = field(default_factory=BenchmarkOptions)
    add_options: Callable[[ArgumentParser], object] = lambda parser: None


@dataclass(frozen=True)
class Task:
    """A benchmark, and the arguments of the command line; an argument that was not given is absent."""

    benchmark: Benchmark
    arguments: Namespace

    @property
    def implementations(self) -> list[Any]:
        return self.arguments.implementations

    @property
    def workloads(self) -> list[Any]:
        return list(dict.fromkeys(self._given(workload) for workload in self.benchmark.workloads))

    @property
    def workload(self) -> Any:
        return self.workloads[0]

    @property
    def options(self) -> Any:
        return self._given(self.benchmark.options)

    def _given(self, defaults: Any) -> Any:
        names = [one.name for one in fields(defaults) if hasattr(self.arguments, one.name)]
        return replace(defaults, **{name: getattr(self.arguments, name) for name in names})


def compare_implementations(task: Task) -> Report:
    """Measure implementations on each workload, print a table for each, and return the outcome."""
    report = Report()
    for workload in task.workloads:
        print(workload.describe())
        entries = [Entry(one, workload) for one in task.implementations]
        report.add(compare(entries, task.benchmark.targets, task.options))
    return report


# ---------------------------------------------------------------- options


def rows(text: str) -> int:
    """Read the number of rows of a table."""
    value = count(text)
    if value > MAX_ROWS:
        raise ArgumentTypeError(f"ids are scattered in 64 bits, for at most {MAX_ROWS:,} rows: got {text!r}")
    return value


def chosen(implementations: Sequence[Implementation], text: str) -> list[Implementation]:
    """Read names of implementations, or patterns; they keep the order given."""
    found: dict[str, Implementation] = {}
    for pattern in text.split(","):
        fitting = {one.name: one for one in implementations if fnmatchcase(one.name, pattern)}
        if not fitting:
            names = ", ".join(one.name for one in implementations)
            raise ArgumentTypeError(f"no implementation is called {pattern!r}: choose from {names}")
        found |= fitting
    return list(found.values())


_seconds = partial(number, least=1e-9)

OPTIONS: dict[str, tuple[Callable[[str], Any], str]] = {
    "rows": (rows, "rows of the table, such as 4M"),
    "dim": (count, "columns of a row"),
    "batch": (count, "samples in a batch"),
    "features": (count, "ids of each sample"),
    "max_rows": (rows, "the most rows of a table"),
    "max_bag": (count, "the most ids of a bag"),
    "zipf": (number, "exponent of the ids' popularity, 0: uniform"),
    "batches": (count, "different batches"),
    "seed": (int, "of ids and gradients"),
    "threads": (count, "threads of each implementation"),
    "rounds": (count, "turns of each implementation"),
    "steps": (count, "timed steps in a turn"),
    "seconds": (_seconds, "a turn ends after this time"),
    "timeout_s": (_seconds, "seconds after which a silent implementation is ended"),
    "folder": (folder, "where a folder for the files is made, and removed at the end"),
    "memory": (size, "RAM that our table may take"),
    "limit": (size, "of RAM and page cache of each implementation's process together"),
    "warmup": (count, "untimed steps before, which fill the cache"),
    "together": (bool, "all implementations of a group take turns in one process"),
    "beside": (folder, "a checkout, with whose Embedrock ours are measured, too, as NAME-before"),
    "budget_s": (_seconds, "seconds after which nothing more begins"),
}


def add_options(parser: ArgumentParser, benchmark: Benchmark) -> None:
    """Add a benchmark's options, without defaults: one not given is absent, and the value of its dataclass holds."""
    for name in benchmark.arguments:
        read, text = OPTIONS[name]
        known = (*benchmark.workloads, benchmark.options)
        values = dict.fromkeys(getattr(one, name) for one in known if hasattr(one, name))
        told = f"{text} (default: {', '.join(map(str, values))})"
        how: dict[str, Any] = {"action": "store_true"} if read is bool else {"type": read, "metavar": "N"}
        flag = "--" + name.removesuffix("_s").replace("_", "-")
        parser.add_argument(flag, dest=name, default=argparse.SUPPRESS, help=told, **how)
    if benchmark.implementations:
        parser.add_argument(
            "--implementations",
            "--contenders",  # its name in release 0.1
            type=partial(chosen, benchmark.implementations),
            default=list(benchmark.implementations),
            metavar="A,B,...",
            help="names or patterns such as 'ours-*' (default: all); ratios are over the first one's time",
        )
    benchmark.add_options(parser)


def add_several_rows(parser: ArgumentParser, sizes: Sequence[int], option: str = "--rows") -> None:
    """Add an option for several numbers of rows."""
    text = f"numbers of rows (default: {','.join(map(str, sizes))})"
    parser.add_argument(
        option,
        dest="sizes",
        type=lambda text: [rows(part) for part in text.split(",")],
        default=list(sizes),
        metavar="N,N,...",
        help=text,
    )
