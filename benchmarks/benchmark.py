"""A benchmark as the command line knows it: its implementations, workloads, targets and options."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

from benchmarks.implementations import Implementation
from benchmarks.options import BenchmarkOptions
from benchmarks.report import Report, compare
from benchmarks.runner import Entry
from benchmarks.targets import Target
from benchmarks.workload import MAX_ROWS, Workload
from embedrock.cli.terminal.arguments import count, folder, number, size
from embedrock.cli.terminal.tables import Field

SIZES = ("dim", "batch", "features", "zipf", "batches", "seed")  # options: fields of `Workload`, but for the rows
ROUNDS = ("threads", "rounds", "steps", "seconds", "timeout_s", "together", "beside")  # and of `BenchmarkOptions`


class Option(NamedTuple):
    """An option of one benchmark, which `Task.arguments` has as `name`."""

    flag: str
    name: str
    read: Callable[[str], Any]
    default: Any
    text: str


@dataclass(frozen=True)
class Benchmark:
    """A row of the table of benchmarks.

    Args:
        name: of its command.
        help: one line about it.
        implementations: who may take part.
        targets: numbers that it should reach.
        workloads: one after another, unless the user changes them; with an option "sizes", of each number of rows.
        options: how long it measures, unless the user changes it.
        arguments: names of its options, see `OPTIONS`: fields of its workloads and of `options`.
        measure: measures, prints, and returns the outcome.
        own: options of its own.
        fields: further columns of its table.
    """

    name: str
    help: str
    implementations: tuple[Implementation, ...] = ()
    targets: tuple[Target, ...] = ()
    workloads: tuple[Any, ...] = (Workload(),)
    options: BenchmarkOptions = field(default_factory=BenchmarkOptions)
    arguments: tuple[str, ...] = ("rows", *SIZES, *ROUNDS)
    measure: Callable[[Task], Report] = lambda task: compare_implementations(task)
    own: tuple[Option, ...] = ()
    fields: Sequence[Field] = ()


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
        given = [self._given(workload) for workload in self.benchmark.workloads]
        sizes = getattr(self.arguments, "sizes", ())
        return [replace(one, rows=rows) for one in given for rows in sizes] or list(dict.fromkeys(given))

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
    report, benchmark = Report(), task.benchmark
    for workload in task.workloads:
        print(workload.describe())
        entries = [Entry(one, workload) for one in task.implementations]
        report.add(compare(entries, benchmark.targets, task.options, benchmark.fields))
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
    "toy": (bool, "at toy size on CPU tensors, under Triton's interpreter, as with TRITON_INTERPRET=1"),
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
    for flag, name, read, default, text in benchmark.own:
        told = ",".join(map(str, default)) if isinstance(default, tuple) else default
        help_text = f"{text} (default: {told})"
        parser.add_argument(flag, dest=name, type=read, default=default, metavar="N", help=help_text)


def several_rows(text: str) -> list[int]:
    """Read several numbers of rows, each once."""
    return list(dict.fromkeys(map(rows, text.split(","))))
