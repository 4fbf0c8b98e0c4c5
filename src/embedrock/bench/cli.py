"""Command line: ``embedrock bench``, and step, lookup, plan, rows, create, disk, commit, keras, tf-data, gpu or all."""

from __future__ import annotations

import argparse
import shlex
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeVar

from embedrock.bench.disk import commits as commit
from embedrock.bench.disk import training as disk
from embedrock.bench.disk.contenders import CONTENDERS as DISK_CONTENDERS
from embedrock.bench.disk.contenders import DiskContender
from embedrock.bench.disk.training import DiskEffort
from embedrock.bench.gpu import training as gpu
from embedrock.bench.gpu.contenders import CONTENDERS as GPU_CONTENDERS
from embedrock.bench.gpu.contenders import GpuContender
from embedrock.bench.gpu.rounds import GpuEffort
from embedrock.bench.harness.machine import machine_facts
from embedrock.bench.harness.report import Report, format_verdicts, write_json
from embedrock.bench.harness.rounds import Effort
from embedrock.bench.harness.workload import MAX_ROWS, Workload
from embedrock.bench.keras import fit as keras_fit
from embedrock.bench.keras import tf_data
from embedrock.bench.keras.contenders import FIT, LAYER
from embedrock.bench.keras.fit import KERAS_ROWS, KERAS_WORKLOAD, KerasEffort
from embedrock.bench.keras.tf_data import TfDataEffort
from embedrock.bench.step import create
from embedrock.bench.step.comparisons import COMPARISONS, ROWS, Comparison, compare, compare_rows
from embedrock.bench.step.contenders import Contender
from embedrock.terminal.arguments import count, folder, number, size, writable_file

DESCRIPTION = """
Measure Embedrock beside PyTorch and FBGEMM. Each contender lives in its own process, one computes at a time,
and their rounds are interleaved. Those not installed or too large for the RAM are left out, with the reason.
"""
INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it
CREATE_ROWS, TOUCHED_ROWS, RUNS = 10**9, 10**6, 5
COMMIT_ROWS = (10_000, 100_000, 1_000_000)

# What `bench all` runs: every line of the README's table of speeds.
ALL = (
    ("step",),
    ("step", "--rows=10M", "--contenders=ours-adam,torch-dense-adam"),
    ("lookup",),
    ("plan",),
    ("rows",),
    ("create",),
)

DISK_WORKLOAD = Workload(rows=20_000_000)

Measure = Callable[[Namespace], Report]
Named = TypeVar("Named", Contender, DiskContender, GpuContender)


def add_parser(subparsers: argparse._SubParsersAction[ArgumentParser]) -> None:
    """Add the ``bench`` command to `subparsers`. Parsed arguments have ``run(arguments) -> exit status``."""
    _add_benchmarks(
        subparsers.add_parser("bench", help="measure speed beside PyTorch and FBGEMM", description=DESCRIPTION)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m embedrock.bench``; return 0, or 1 if a contender failed, or 130 after Ctrl-C."""
    arguments = _parser().parse_args(argv)
    return arguments.run(arguments)


def _parser() -> ArgumentParser:
    parser = ArgumentParser("python -m embedrock.bench", description=DESCRIPTION)
    _add_benchmarks(parser)
    return parser


# ---------------------------------------------------------------- the benchmarks


def _add_benchmarks(parser: ArgumentParser) -> None:
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    for job in COMPARISONS:
        _add_comparison(benchmarks, job)
    _add_rows(benchmarks)
    _add_create(benchmarks)
    _add_disk(benchmarks)
    _add_commit(benchmarks)
    _add_keras(benchmarks)
    _add_tf_data(benchmarks)
    _add_gpu(benchmarks)
    everything = _add(benchmarks, "all", "all of these: every line of the README's table of speeds", _measure_all)
    _add_options(everything, EFFORT_OPTIONS)


def _add_comparison(benchmarks: Any, job: Comparison) -> None:
    names = "\n".join(f"  {contender.name:24}{contender.label}" for contender in job.contenders)
    parser = _add(benchmarks, job.name, job.help, partial(_measure_comparison, job), epilog=f"contenders:\n{names}")
    _add_options(parser, ROWS_OPTION | WORKLOAD_OPTIONS | EFFORT_OPTIONS, (*job.workloads, Effort()))
    _add_contenders(parser, job.contenders, first=True)


def _add_rows(benchmarks: Any) -> None:
    parser = _add(benchmarks, "rows", "our Adam step on tables of several sizes, same ids", _measure_rows)
    parser.add_argument("--rows", dest="sizes", type=_sizes, default=list(ROWS), metavar="N,N,...", help="table sizes")
    _add_options(parser, WORKLOAD_OPTIONS | EFFORT_OPTIONS)


def _add_create(benchmarks: Any) -> None:
    parser = _add(benchmarks, "create", "creation, RAM and import time of a table of a billion rows", _measure_create)
    options = {name: EFFORT_OPTIONS[name] for name in ("threads", "timeout_s")}
    _add_options(
        parser, ROWS_OPTION | {"dim": WORKLOAD_OPTIONS["dim"]} | options, (Workload(rows=CREATE_ROWS), Effort())
    )
    parser.add_argument("--touch", type=count, default=TOUCHED_ROWS, metavar="N", help="rows trained after creation")
    parser.add_argument("--runs", type=count, default=RUNS, metavar="N", help="processes; medians over them")


def _add_disk(benchmarks: Any) -> None:
    names = "\n".join(f"  {contender.name:24}{contender.label}" for contender in DISK_CONTENDERS)
    text = "training a table larger than RAM, page cache counted"
    parser = _add(benchmarks, "disk", text, _measure_disk, epilog=f"contenders:\n{names}")
    _add_disk_options(parser)
    _add_contenders(parser, DISK_CONTENDERS)


def _add_commit(benchmarks: Any) -> None:
    parser = _add(benchmarks, "commit", "commits, training beside them, and opening", _measure_commit)
    _add_disk_options(parser)
    parser.add_argument("--sizes", type=_sizes, default=list(COMMIT_ROWS), metavar="N,N,...", help="rows of a commit")


def _add_keras(benchmarks: Any) -> None:
    contenders = (*FIT, *LAYER)
    names = "\n".join(f"  {contender.name:24}{contender.label}" for contender in contenders)
    text = "training by Keras' fit, and our layer alone in Keras and in PyTorch"
    parser = _add(benchmarks, "keras", text, _measure_keras, epilog=f"contenders:\n{names}")
    parser.add_argument(
        "--rows", dest="sizes", type=_sizes, default=list(KERAS_ROWS), metavar="N,N,...", help="table sizes"
    )
    _add_options(parser, WORKLOAD_OPTIONS | EFFORT_OPTIONS, (KERAS_WORKLOAD, KerasEffort()))
    _add_contenders(parser, contenders, first=True)
    parser.set_defaults(effort=KerasEffort)


def _add_tf_data(benchmarks: Any) -> None:
    text = "ways to read ids into tf.data, and what erk.prefetch does for a table on disk"
    parser = _add(benchmarks, "tf-data", text, _measure_tf_data)
    options = {name: EFFORT_OPTIONS[name] for name in ("threads", "rounds", "steps", "timeout_s")}
    options["folder"] = DISK_OPTIONS["folder"]
    _add_options(parser, ROWS_OPTION | WORKLOAD_OPTIONS | options, (tf_data.WORKLOAD, TfDataEffort()))
    parser.set_defaults(effort=TfDataEffort)


def _add_gpu(benchmarks: Any) -> None:
    names = "\n".join(f"  {contender.name:24}{contender.label}" for contender in GPU_CONTENDERS)
    text = "training on a GPU, rows in its memory and in host RAM, against what the bus gives"
    parser = _add(benchmarks, "gpu", text, _measure_gpu, epilog=f"contenders:\n{names}")
    options = {name: EFFORT_OPTIONS[name] for name in ("threads", "rounds", "steps", "timeout_s")}
    _add_options(parser, options | GPU_OPTIONS, (GpuEffort(),))
    parser.add_argument(
        "--toy",
        action="store_true",
        default=argparse.SUPPRESS,
        help="at toy size on CPU tensors, under Triton's interpreter (also with TRITON_INTERPRET=1)",
    )
    parser.add_argument(
        "--parts", type=_gpu_parts, default=list(gpu.PARTS), metavar="A,B", help=f"of {', '.join(gpu.PARTS)}"
    )
    _add_contenders(parser, GPU_CONTENDERS)
    parser.set_defaults(effort=GpuEffort)


def _add_contenders(parser: ArgumentParser, contenders: Sequence[Any], first: bool = False) -> None:
    ratios = "; ratios are over the first one's time" if first else ""
    parser.add_argument(
        "--contenders",
        type=partial(_contenders, contenders),
        default=list(contenders),
        metavar="A,B,...",
        help=f"names or patterns such as 'ours-*' (default: all){ratios}",
    )


def _add_disk_options(parser: ArgumentParser) -> None:
    workload = {name: option for name, option in WORKLOAD_OPTIONS.items() if name != "batches"}
    _add_options(parser, ROWS_OPTION | workload | EFFORT_OPTIONS | DISK_OPTIONS, (DISK_WORKLOAD, DiskEffort()))
    parser.set_defaults(effort=DiskEffort)


def _add(benchmarks: Any, name: str, text: str, measure: Measure, **options: Any) -> ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = benchmarks.add_parser(name, help=text, description=f"Measure {text}.", formatter_class=raw, **options)
    parser.add_argument("--json", type=writable_file, metavar="FILE", help="write all numbers to FILE")
    parser.set_defaults(run=_run, measure=measure, benchmark=name, effort=Effort)
    return parser


def _measure_comparison(job: Comparison, arguments: Namespace) -> Report:
    given = _given(arguments, Workload)
    workloads = list(dict.fromkeys(replace(workload, **given) for workload in job.workloads))
    chosen: list[Contender] = arguments.contenders
    return compare(job, chosen, workloads, chosen[0].name, Effort(**_given(arguments, Effort)))


def _measure_rows(arguments: Namespace) -> Report:
    return compare_rows(arguments.sizes, Workload(**_given(arguments, Workload)), Effort(**_given(arguments, Effort)))


def _measure_create(arguments: Namespace) -> Report:
    table = {"rows": CREATE_ROWS, "dim": Workload.dim} | _given(arguments, Workload)
    effort = Effort(**_given(arguments, Effort))
    return create.run(**table, touch=arguments.touch, runs=arguments.runs, effort=effort)


def _measure_disk(arguments: Namespace) -> Report:
    return disk.run(_disk_workload(arguments), arguments.contenders, DiskEffort(**_given(arguments, DiskEffort)))


def _measure_commit(arguments: Namespace) -> Report:
    return commit.run(_disk_workload(arguments), arguments.sizes, DiskEffort(**_given(arguments, DiskEffort)))


def _measure_keras(arguments: Namespace) -> Report:
    workload = replace(KERAS_WORKLOAD, **_given(arguments, Workload))
    return keras_fit.run(workload, arguments.sizes, arguments.contenders, KerasEffort(**_given(arguments, KerasEffort)))


def _measure_tf_data(arguments: Namespace) -> Report:
    workload = replace(tf_data.WORKLOAD, **_given(arguments, Workload))
    return tf_data.run(workload, TfDataEffort(**_given(arguments, TfDataEffort)))


def _measure_gpu(arguments: Namespace) -> Report:
    return gpu.run(arguments.parts, arguments.contenders, GpuEffort(**_given(arguments, GpuEffort)))


def _disk_workload(arguments: Namespace) -> Workload:
    return replace(DISK_WORKLOAD, **_given(arguments, Workload))


def _measure_all(arguments: Namespace) -> Report:
    report = Report()
    for line in ALL:
        print(f"== bench {shlex.join(line)}")
        one = _parser().parse_args(line, Namespace(**_given(arguments, Effort)))
        report.add(one.measure(one))
    print(f"== all targets\n{format_verdicts(report.verdicts)}")
    return report


def _run(arguments: Namespace) -> int:
    machine = machine_facts()
    try:
        report = arguments.measure(arguments)
    except KeyboardInterrupt:
        print("\ninterrupted; nothing is written", file=sys.stderr)
        return INTERRUPTED
    if arguments.json is not None:
        effort = arguments.effort(**_given(arguments, arguments.effort))
        options = asdict(effort) | {"environment": effort.environment()}
        options.pop("folder", None)  # of this machine
        write_json(arguments.json, report, {"benchmark": arguments.benchmark, "options": options, "machine": machine})
    for name, details in report.failures:
        print(f"\n{name} failed:\n{details}", file=sys.stderr)
    return 1 if report.failures else 0


def _given(arguments: Namespace, kind: type) -> dict[str, Any]:
    """Return the options the user gave that are fields of a dataclass; its defaults serve for the others."""
    return {field.name: getattr(arguments, field.name) for field in fields(kind) if hasattr(arguments, field.name)}


# ---------------------------------------------------------------- the options


def _rows(text: str) -> int:
    rows = count(text)
    if rows > MAX_ROWS:
        raise ArgumentTypeError(f"ids are scattered in 64 bits, for at most {MAX_ROWS:,} rows: got {text!r}")
    return rows


def _sizes(text: str) -> list[int]:
    return [_rows(part) for part in text.split(",")]


def _contenders(contenders: Sequence[Named], text: str) -> list[Named]:
    chosen: dict[str, Named] = {}
    for pattern in text.split(","):
        found = {one.name: one for one in contenders if fnmatchcase(one.name, pattern)}
        if not found:
            names = ", ".join(one.name for one in contenders)
            raise ArgumentTypeError(f"no contender is called {pattern!r}: choose from {names}")
        chosen |= found
    return list(chosen.values())


def _gpu_parts(text: str) -> list[str]:
    chosen = text.split(",")
    if wrong := [part for part in chosen if part not in gpu.PARTS]:
        raise ArgumentTypeError(f"must be of {', '.join(gpu.PARTS)}: got {wrong[0]!r}")
    return chosen


seconds = partial(number, least=1e-9)

ROWS_OPTION: dict[str, tuple[Callable[[str], Any], str]] = {"rows": (_rows, "rows of the table, such as 4M")}
WORKLOAD_OPTIONS: dict[str, tuple[Callable[[str], Any], str]] = {
    "dim": (count, "columns of a row"),
    "batch": (count, "samples in a batch"),
    "features": (count, "ids of each sample"),
    "zipf": (number, "exponent of the ids' popularity, 0: uniform"),
    "batches": (count, "different batches"),
    "seed": (int, "of ids and gradients"),
}
EFFORT_OPTIONS: dict[str, tuple[Callable[[str], Any], str]] = {
    "threads": (count, "threads of each contender"),
    "rounds": (count, "turns of each contender"),
    "steps": (count, "timed steps in a turn"),
    "seconds": (seconds, "a turn ends after this time"),
    "timeout_s": (seconds, "seconds after which a silent contender is ended"),
}
DISK_OPTIONS: dict[str, tuple[Callable[[str], Any], str]] = {
    "folder": (folder, "where a folder for the files is made, and removed at the end"),
    "memory": (size, "RAM that our table may take"),
    "limit": (size, "of RAM and page cache of each contender's process together"),
    "warmup": (count, "untimed steps before, which fill the cache"),
}
GPU_OPTIONS: dict[str, tuple[Callable[[str], Any], str]] = {
    "seconds": (seconds, "the untimed steps of a contender end after this time"),
    "budget_s": (seconds, "seconds after which nothing more is begun"),
}


def _add_options(
    parser: ArgumentParser,
    options: dict[str, tuple[Callable[[str], Any], str]],
    sources: Sequence[object] = (Workload(), Effort()),
) -> None:
    """Add options without defaults: an option not given is absent, and the dataclass's value holds."""
    for name, (read, text) in options.items():
        values = dict.fromkeys(getattr(one, name) for one in sources if hasattr(one, name))
        parser.add_argument(
            "--" + name.removesuffix("_s"),
            dest=name,
            type=read,
            default=argparse.SUPPRESS,
            metavar="N",
            help=f"{text} (default: {', '.join(map(str, values))})",
        )
