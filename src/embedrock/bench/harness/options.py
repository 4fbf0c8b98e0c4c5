"""The options that benchmarks share."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from embedrock.bench.harness.bench import Bench
from embedrock.bench.harness.contenders import Contender
from embedrock.bench.harness.workload import MAX_ROWS
from embedrock.terminal.arguments import count, folder, number, size


def rows(text: str) -> int:
    """Read how many rows a table has."""
    value = count(text)
    if value > MAX_ROWS:
        raise ArgumentTypeError(f"ids are scattered in 64 bits, for at most {MAX_ROWS:,} rows: got {text!r}")
    return value


def several_rows(text: str) -> list[int]:
    """Read several numbers of rows."""
    return [rows(part) for part in text.split(",")]


def parts(known: Sequence[str], text: str) -> list[str]:
    """Read some of the parts that are known."""
    chosen = text.split(",")
    if wrong := [part for part in chosen if part not in known]:
        raise ArgumentTypeError(f"must be of {', '.join(known)}: got {wrong[0]!r}")
    return chosen


def chosen(contenders: Sequence[Contender], text: str) -> list[Contender]:
    """Read names of contenders, or patterns; they keep the order given."""
    found: dict[str, Contender] = {}
    for pattern in text.split(","):
        fitting = {one.name: one for one in contenders if fnmatchcase(one.name, pattern)}
        if not fitting:
            names = ", ".join(one.name for one in contenders)
            raise ArgumentTypeError(f"no contender is called {pattern!r}: choose from {names}")
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
    "threads": (count, "threads of each contender"),
    "rounds": (count, "turns of each contender"),
    "steps": (count, "timed steps in a turn"),
    "seconds": (_seconds, "a turn ends after this time"),
    "timeout_s": (_seconds, "seconds after which a silent contender is ended"),
    "folder": (folder, "where a folder for the files is made, and removed at the end"),
    "memory": (size, "RAM that our table may take"),
    "limit": (size, "of RAM and page cache of each contender's process together"),
    "warmup": (count, "untimed steps before, which fill the cache"),
    "budget_s": (_seconds, "seconds after which nothing more is begun"),
}


def add_options(parser: ArgumentParser, bench: Bench) -> None:
    """Add a benchmark's options, without defaults: one not given is absent, and the value of its dataclass holds."""
    for name in bench.options:
        read, text = OPTIONS[name]
        values = dict.fromkeys(getattr(one, name) for one in (*bench.workloads, bench.effort) if hasattr(one, name))
        parser.add_argument(
            "--" + name.removesuffix("_s").replace("_", "-"),
            dest=name,
            type=read,
            default=argparse.SUPPRESS,
            metavar="N",
            help=f"{bench.texts.get(name, text)} (default: {', '.join(map(str, values))})",
        )
    if bench.contenders:
        parser.add_argument(
            "--contenders",
            type=partial(chosen, bench.contenders),
            default=list(bench.contenders),
            metavar="A,B,...",
            help=bench.texts.get("contenders", "names or patterns such as 'ours-*' (default: all)"),
        )
    bench.add_options(parser)
