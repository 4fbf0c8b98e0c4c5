"""``embedrock simulate``: what a table costs that many ranks share."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from embedrock.bench.harness.workload import Workload
from embedrock.bench.shards.ranks import ids_of_ranks
from embedrock.cli import curves
from embedrock.cli.columns import IDS, Column
from embedrock.cli.formats import fail
from embedrock.cli.formats._packed import text_of
from embedrock.cli.imports import OPEN
from embedrock.errors import ArgumentError, EmbedrockError
from embedrock.machine.sizes import format_bytes
from embedrock.planner.demand import RULE_NAMES
from embedrock.simulation import Cluster, Compute, Load, Simulation, calibrated, simulate
from embedrock.spec import STORAGES
from embedrock.terminal.arguments import count, number, size
from embedrock.terminal.tables import format_count, format_facts, format_number, format_table

RANKS = (8, 64, 256, 1024, 4096)
ALONE, SHARDED = "ours-alone", "ours-sharded-"  # in the JSON of `embedrock bench shards`
MEASURED = "JSON of `embedrock bench shards`"
LOADS = (
    ("rows", count, "of the table"),
    ("dim", count, "weights in a row"),
    ("lookups", count, "ids of a rank's batch"),
    ("zipf", number, "exponent of their popularity"),
    ("steps", count, "that were made before"),
    ("commit-every", count, "steps between two commits"),
)
CLUSTERS = (
    ("per-node", count, "ranks of a machine"),
    ("cores", count, "of a machine"),
    ("memory", size, "RAM that a rank has for records"),
    ("local", size, "bytes/s between ranks of a machine"),
    ("network", size, "bytes/s that a machine sends"),
    ("latency", number, "seconds of a message between machines"),
    ("reads", number, "random reads/s of a rank's disk"),
    ("append", size, "bytes/s of long reads and writes of it"),
)
FIRST = Load(rows=10**12, dim=64, lookups=8192 * 26)


def add_parser(subparsers: Any) -> None:
    """Add the command to `subparsers`. Parsed arguments have ``run(arguments) -> exit status``."""
    text = "what a table costs that many ranks share: rows, bytes, balance, traffic, time of a step, commits, losses"
    more = "The model is the docstring of embedrock.simulation.model; docs/scale.md has what it was compared with."
    parser: ArgumentParser = subparsers.add_parser("simulate", help=text, description=f"{text.capitalize()}. {more}")
    parser.add_argument("--ranks", type=count, nargs="+", default=RANKS, metavar="N", help=f"(default: {RANKS})")
    for given, shown in ((LOADS, FIRST), (CLUSTERS, Cluster(1))):
        for name, kind, what in given:
            default = getattr(shown, name.replace("-", "_"))
            parser.add_argument(f"--{name}", type=kind, default=default, help=f"{what} (default: {default:g})")
    parser.add_argument("--dtype", choices=STORAGES, default=FIRST.dtype, help="of the weights (default: float32)")
    parser.add_argument("--rule", choices=RULE_NAMES, default=FIRST.rule, help="(default: adam)")
    parser.add_argument("--log", type=Path, nargs="+", metavar="FILE", help="Parquet, Arrow, CSV or TSV of ids")
    parser.add_argument("--column", default="ids", metavar="NAME", help="of the log (default: ids)")
    measured = (
        "JSON of `embedrock bench shards`: what its steps of 1 and 2 ranks need, its load, and more ranks compared"
    )
    parser.add_argument("--measured", type=Path, metavar="FILE", help=measured)
    alone = "of a step of one process by itself, measured (default: that of a laptop of some years)"
    parser.add_argument("--alone-ms", type=number, metavar="MS", help=alone)
    parser.add_argument("--two-ms", type=number, metavar="MS", help="of a step of two ranks on this machine, measured")
    parser.add_argument("--timeout", type=number, default=120.0, metavar="S", help="until a lost rank is known of")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run, parser=parser)


def _run(arguments: Namespace) -> int:
    if arguments.measured is not None:
        return _compare(arguments)
    fields = {name.replace("-", "_"): getattr(arguments, name.replace("-", "_")) for name, _, _ in LOADS}
    load = Load(**fields, dtype=arguments.dtype, rule=arguments.rule)
    own = {name.replace("-", "_"): getattr(arguments, name.replace("-", "_")) for name, _, _ in CLUSTERS}
    cluster = Cluster(ranks=1, **own)
    if arguments.two_ms is not None and arguments.alone_ms is None:
        arguments.parser.error("--two-ms goes with --alone-ms: what it takes more is what ranks cost")
    compute = _compute(arguments, load)
    found = {
        ranks: simulate(
            load,
            replace(cluster, ranks=ranks),
            log=_log(arguments),
            compute=compute,
            timeout=arguments.timeout,
        )
        for ranks in arguments.ranks
    }
    if arguments.json:
        told = {"load": asdict(load), "cluster": own, "ranks": {ranks: one.to_json() for ranks, one in found.items()}}
        print(json.dumps(told, indent=1))
    else:
        print(_text(load, found))
    return 0


def _compare(arguments: Namespace) -> int:
    """Print what was measured of ranks of this machine beside what is simulated by the steps of one and of two."""
    try:
        found = compared(json.loads(text_of(arguments.measured, MEASURED, (".json",))))
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, EmbedrockError):
            raise
        fail(
            arguments.measured,
            MEASURED,
            f"{type(error).__name__}: {error}",
            "Make it by embedrock bench shards --json.",
        )
    print(
        json.dumps(found, indent=1) if arguments.json else format_table(tuple(found[0]), [_shown(one) for one in found])
    )
    return 0


def _shown(line: dict[str, float]) -> tuple[str, ...]:
    return tuple(f"{value:,.0f}" if name.endswith("bytes") else format_number(value) for name, value in line.items())


def compared(document: dict[str, Any]) -> list[dict[str, float]]:
    """Return for each number of ranks in the JSON of `embedrock bench shards` what was measured, and what is simulated.

    Raises:
        ArgumentError: steps of one process, or of two, are not in it.
    """
    cores = document["machine"]["cores"]
    lines = {line["name"]: line for line in document["results"] if line["status"] == "ok"}
    missing = [name for name in (ALONE, f"{SHARDED}2") if name not in lines]
    if missing:
        raise ArgumentError(f"the measurements must have {' and '.join(missing)}: got {', '.join(lines) or 'none'}.")
    alone, two = lines[ALONE], lines[f"{SHARDED}2"]
    workload = Workload(**alone["workload"])
    load = Load(workload.rows, workload.dim, workload.lookups, workload.zipf)
    compute = calibrated(
        alone["cpu_ms"] / 1e3, two["median_ms"] / 1e3, load, cores, ids_of_ranks(workload, 2), two["cpu_ms"] / 1e3
    )
    found = []
    for line in (line for name, line in lines.items() if name.startswith(SHARDED) and line["ranks"] > 1):
        ranks = line["ranks"]
        told = simulate(load, Cluster(ranks, ranks, cores), log=ids_of_ranks(workload, ranks), compute=compute)
        found.append(
            {
                "ranks": ranks,
                "measured ms": line["median_ms"],
                "simulated ms": told.seconds["compute"] * 1e3,
                "off %": (told.seconds["compute"] * 1e3 / line["median_ms"] - 1) * 100,
                "measured bytes": line["sent_bytes"],
                "simulated bytes": told.bytes_sent,
            }
        )
    return found


def _compute(arguments: Namespace, load: Load) -> Compute | None:
    if arguments.alone_ms is None:
        return None
    if arguments.two_ms is None:
        return Compute(arguments.alone_ms / 1e3)
    return calibrated(arguments.alone_ms / 1e3, arguments.two_ms / 1e3, load, arguments.cores, _log(arguments))


def _log(arguments: Namespace) -> Iterator[np.ndarray] | None:
    if arguments.log is None:
        return None
    columns = [Column(path, arguments.column, IDS) for path in arguments.log]
    return curves.batches(columns, Namespace(batch_size=1 << 16, skip_nulls=True, rows=OPEN))


def _text(load: Load, found: dict[int, Simulation]) -> str:
    first = next(iter(found.values()))
    facts = {
        "table": f"{format_count(load.rows, 'row')} of {load.dim} {load.dtype}, {load.rule}, "
        f"{format_bytes(load.spec.record_bytes)}",
        "a batch": f"{format_count(load.lookups, 'id')} of a rank, {first.unique:,.0f} different",
        "after": f"{format_count(load.steps, 'step')}; a commit each {load.commit_every:,}",
    }
    names = ("ranks", "records", "bytes", "a rank", "on disk", "sent", "to nodes", "balance", "misses", "bound", "ms")
    names += ("at worst", "commit s", "reshard s", "a loss s")
    rows = [
        (
            f"{ranks:,}",
            f"{one.records:.2g}",
            format_bytes(one.table_bytes),
            format_bytes(one.rows_most * load.spec.record_bytes),
            format_bytes(one.disk_bytes),
            format_bytes(one.bytes_sent),
            format_bytes(one.bytes_between_nodes),
            f"{one.balance:.3f}",
            f"{one.misses:,.0f}",
            one.bound,
            format_number(one.step_overlapped * 1e3),
            format_number(one.step_in_turn * 1e3),
            format_number(one.commit_seconds),
            format_number(one.reshard_seconds),
            format_number(one.loss_seconds),
        )
        for ranks, one in found.items()
    ]
    return f"{format_facts(facts)}\n\n{format_table(names, rows)}"
