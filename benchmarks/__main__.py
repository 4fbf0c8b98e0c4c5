"""``python -m benchmarks NAME``: the command line of all benchmarks. Without a name: `step`."""

from __future__ import annotations

import argparse
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.benchmark import Benchmark, Task, add_options
from benchmarks.commits import COMMIT
from benchmarks.create import CREATE
from benchmarks.disk import DISK
from benchmarks.gpu_run import GPU
from benchmarks.jax_step import JAX
from benchmarks.keras_fit import KERAS
from benchmarks.processes import ChildError
from benchmarks.published import PUBLISHED
from benchmarks.report import Report, machine_facts, write_json
from benchmarks.serving import SERVING
from benchmarks.shards import SHARDS
from benchmarks.step import IDS, LOOKUP, POLICIES, STEP, TABLE_SIZES, UPDATE
from benchmarks.stream import STREAM
from benchmarks.tables import DLRM, GROUPS
from embedrock.cli.terminal.arguments import writable_file
from embedrock.errors import EmbedrockError

DESCRIPTION = """
Measure Embedrock beside PyTorch, Keras and FBGEMM. Each implementation lives in its own process, one computes at a
time, and their rounds are interleaved. Those not installed or too large for the RAM are left out, with the reason.
"""
FAILED, INTERRUPTED = 1, 130  # exit statuses; the second as shells have it after Ctrl-C
DEFAULT = "step"

# To add a benchmark: a file with a `Benchmark`, and a row here.
BENCHMARKS = (
    STEP,
    IDS,
    LOOKUP,
    UPDATE,
    POLICIES,
    TABLE_SIZES,
    CREATE,
    DLRM,
    GROUPS,
    SHARDS,
    DISK,
    COMMIT,
    SERVING,
    PUBLISHED,
    STREAM,
    KERAS,
    JAX,
    GPU,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m benchmarks``; return 0, 1 if an implementation failed, or 130 after Ctrl-C."""
    words = sys.argv[1:] if argv is None else list(argv)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        words.insert(0, DEFAULT)
    arguments = _parser().parse_args(words)
    try:
        return _run(Task(arguments.benchmark, arguments))
    except EmbedrockError as error:
        print(f"benchmarks: error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("\ninterrupted; nothing is written", file=sys.stderr)
        return INTERRUPTED


def _parser() -> ArgumentParser:
    parser = ArgumentParser("python -m benchmarks", description=DESCRIPTION)
    commands = parser.add_subparsers(title="benchmarks", metavar="NAME", required=True)
    for benchmark in BENCHMARKS:
        _add(commands, benchmark)
    return parser


def _add(commands: Any, benchmark: Benchmark) -> None:
    names = "".join(f"\n  {one.name:24}{one.label}" for one in benchmark.implementations)
    parser = commands.add_parser(
        benchmark.name,
        help=benchmark.help,
        description=f"Measure {benchmark.help}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=names and f"implementations:{names}",
    )
    parser.add_argument("--json", type=writable_file, metavar="FILE", help="write all numbers to FILE")
    add_options(parser, benchmark)
    parser.set_defaults(benchmark=benchmark)


def _run(task: Task) -> int:
    machine = machine_facts()
    try:
        report = task.benchmark.measure(task)
    except ChildError as error:
        print(f"{task.benchmark.name}: failed: {error.kind}: {error}", flush=True)
        report = Report(failures=[(task.benchmark.name, error.details)])
    if task.arguments.json is not None:
        options = asdict(task.options) | {"environment": task.options.environment()}
        options.pop("folder", None)  # of this machine
        circumstances = {"benchmark": task.benchmark.name, "options": options, "machine": machine}
        write_json(task.arguments.json, report, circumstances)
    for name, details in report.failures:
        print(f"\n{name} failed:\n{details}", file=sys.stderr)
    return FAILED if report.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
