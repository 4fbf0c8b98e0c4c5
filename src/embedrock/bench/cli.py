"""Command line: ``embedrock bench``, and the name of one of `BENCHES`, or all."""

from __future__ import annotations

import argparse
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from embedrock.bench.disk.commits import COMMIT
from embedrock.bench.disk.compaction import COMPACTION
from embedrock.bench.disk.groups import GROUPS_DISK
from embedrock.bench.disk.live import LIVE
from embedrock.bench.disk.stream import STREAM
from embedrock.bench.disk.training import DISK
from embedrock.bench.disk.vocabulary import VOCABULARY
from embedrock.bench.gpu.training import GPU
from embedrock.bench.harness.bench import EFFORT, Bench, Task
from embedrock.bench.harness.machine import machine_facts
from embedrock.bench.harness.options import add_options
from embedrock.bench.harness.report import Report, write_json
from embedrock.bench.harness.targets import format_verdicts
from embedrock.bench.keras.fit import KERAS
from embedrock.bench.keras.tf_data import TF_DATA
from embedrock.bench.shards.benches import SHARDS
from embedrock.bench.step.benches import LOOKUP, STEP, TABLE_SIZES, UNIQUE
from embedrock.bench.step.create import CREATE
from embedrock.bench.step.hashing import HASH_IDS
from embedrock.bench.step.open_ids import OPEN_IDS
from embedrock.bench.tables.benches import DLRM, GROUPS
from embedrock.terminal.arguments import writable_file

DESCRIPTION = """
Measure Embedrock beside PyTorch and FBGEMM. Each contender lives in its own process, one computes at a time,
and their rounds are interleaved. Those not installed or too large for the RAM are left out, with the reason.
"""
INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it

# To add a benchmark: a folder that has a `Bench`, and a row here.
BENCHES = (
    STEP,
    LOOKUP,
    UNIQUE,
    TABLE_SIZES,
    CREATE,
    OPEN_IDS,
    HASH_IDS,
    DLRM,
    GROUPS,
    SHARDS,
    DISK,
    COMMIT,
    COMPACTION,
    STREAM,
    GROUPS_DISK,
    LIVE,
    VOCABULARY,
    KERAS,
    TF_DATA,
    GPU,
)

# What `bench all` runs: every line of docs/measured.md for tables in RAM.
LINES = (
    ("step",),
    ("step", "--rows=10M", "--contenders=ours-adam,torch-dense-adam"),
    ("lookup",),
    ("unique",),
    ("rows",),
    ("create",),
)


def add_parser(subparsers: argparse._SubParsersAction[ArgumentParser]) -> None:
    """Add the ``bench`` command to `subparsers`. Parsed arguments have ``run(arguments) -> exit status``."""
    text = "measure speed beside PyTorch and FBGEMM"
    _add_benches(subparsers.add_parser("bench", help=text, description=DESCRIPTION))


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m embedrock.bench``; return 0, or 1 if a contender failed, or 130 after Ctrl-C."""
    arguments = _parser().parse_args(argv)
    return arguments.run(arguments)


def _parser() -> ArgumentParser:
    parser = ArgumentParser("python -m embedrock.bench", description=DESCRIPTION)
    _add_benches(parser)
    return parser


def _add_benches(parser: ArgumentParser) -> None:
    commands = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    for bench in (*BENCHES, ALL):
        _add(commands, bench)


def _add(commands: Any, bench: Bench) -> None:
    names = "".join(f"\n  {one.name:24}{one.label}" for one in bench.contenders)
    parser = commands.add_parser(
        bench.name,
        help=bench.help,
        description=f"Measure {bench.help}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=names and f"contenders:{names}",
    )
    parser.add_argument("--json", type=writable_file, metavar="FILE", help="write all numbers to FILE")
    add_options(parser, bench)
    parser.set_defaults(run=_run, bench=bench)


def _run(arguments: Namespace) -> int:
    task, machine = Task(arguments.bench, arguments), machine_facts()
    try:
        report = task.bench.measure(task)
    except KeyboardInterrupt:
        print("\ninterrupted; nothing is written", file=sys.stderr)
        return INTERRUPTED
    if arguments.json is not None:
        options = asdict(task.effort) | {"environment": task.effort.environment()}
        options.pop("folder", None)  # of this machine
        write_json(arguments.json, report, {"benchmark": task.bench.name, "options": options, "machine": machine})
    for name, details in report.failures:
        print(f"\n{name} failed:\n{details}", file=sys.stderr)
    return 1 if report.failures else 0


def _measure_all(task: Task) -> Report:
    report = Report()
    given = {name: value for name, value in vars(task.arguments).items() if name in EFFORT}
    for line in LINES:
        print(f"== bench {shlex.join(line)}")
        one = _parser().parse_args(line, Namespace(**given))
        report.add(one.bench.measure(Task(one.bench, one)))
    print(f"== all targets\n{format_verdicts(report.verdicts)}")
    return report


ALL = Bench("all", "all of these: every line of docs/measured.md for tables in RAM", _measure_all, EFFORT)
