"""What a table costs that many ranks share: rows, bytes, balance, traffic, time of a step, commits, losses.

    python tools/scale.py                                                  10^12 rows over 8 to 4,096 ranks
    python tools/scale.py --log day1.parquet day2.parquet --column ids     counts the ids of a log
    python tools/scale.py --measured shards.json                           compares itself with `benchmarks shards`

This docstring is the model; docs/scale.md has its comparison with measurements.

**Traffic.** Ids of a log are cut into steps, and the hash that ranks use gives each id to its owner. For ids by Zipf's
law the two million most popular ones get owners at random, and askers by their chance; the others are spread as
Poisson's law has it. All else is a mean, computed.

**Bytes of a step.** With U different ids in a rank's batch, of which R are with other ranks, D weights of s bytes: ids
and rows, gradients and their ids travel once each, ``R (8 + s D) + R (8 + 4 D)``. Each message has a head besides, some
tens of bytes, which is left out: `BYTES_OF_HEADS` says how much at most. A node sends what its ranks ask of others, and
serve to them.

**Seconds of a step.** Each of these takes its time. The longest one bounds a step where all overlap, as with
prefetching; where nothing does, a step takes the sum::

    compute    the larger of: work * ranks on a node / its cores, and work + wait,
               where work = alone + per_byte * bytes, and wait is nothing for one rank
    local      bytes between ranks of a node / what its memory or links give, by rank
    network    bytes that leave a node / what its network gives, + 2 messages to each other node * latency / in flight
    disk       seconds for the rows that the rank reads which has most to serve

*alone* is the time of processors for a step of the batch in one process by itself: measured (``--alone-ms``), or by
`ALONE`, the constants of a laptop of some years. *per_byte* is their time to copy, pack and carry a byte, and *wait*
how long ranks with a core each wait for each other in a step; where ranks share cores, others work meanwhile. Both are
found from the step of two ranks (`calibrated`), or they are `PER_BYTE`, on one machine `PER_BYTE_NEAR`, and nothing. A
rank reads the rows asked of it that its RAM does not hold, if it keeps the most popular ones, times `WORSE` for a
policy that does not know them.

**Bytes of a table.** A row that was ever stepped has a record: weights and optimizer state. On disk it takes its CRC
and, in logs that wait for compaction, up to `LOGS` times as much again. Zipf's law says how many rows have one after
the steps made; of a log it is not known, and all rows count.

**A commit** writes the rows stepped since the last one, with CRC and id, at what the disk appends; ranks write at once.
**Resharding** reads all records once and writes them once, by as many processes as there are ranks. **Losing a rank**
costs half of the steps between two commits, the timeout until all know of it, and the start: to open a part, 8 bytes
of index for each row are read.

A part's share of rows is even but for chance: the largest of W parts of n rows has about ``n + sqrt(2 n ln W)``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import embedrock as er
from embedrock.cli.columns import IDS, TextColumn
from embedrock.distributed.owners import owners
from embedrock.planner.demand import SCATTER, bounded_zipf, cut, exchanged_bytes, expected_misses, most_rows, zipf_cdf

NAMES = "SGD", "Momentum", "Adagrad", "RowwiseAdagrad", "RMSprop", "Adam", "AdamW", "Ftrl", "RowwiseRMSprop"
RULES: dict[str, Any] = {name.lower(): getattr(er, name) for name in NAMES}
RANKS = (8, 64, 256, 1024, 4096)
# Seconds of a core: of a step, of each id and of a byte of its row, of each different id and of a byte of its record.
ALONE = 1.5e-4, 1e-8, 4e-10, 8e-8, 2e-10
PER_BYTE = 7e-9  # seconds of a core for a byte that is sent, and received, by a socket
PER_BYTE_NEAR = 3.6e-9  # the same of ranks on one machine, which read each other's memory
BYTES_OF_HEADS = 512  # of a step, to each other rank, at most
WORSE = 1.08  # times the misses of the best cache
SEALED = 12  # bytes of a record in a log besides its own: id and CRC
LOGS = 1.5  # times the bytes of the base, that logs may come to
INDEX = 8  # bytes of a row in the index of files
LOG_STEPS = 8  # steps of a log that are counted
DISCRETE = 1 << 21  # most popular ids, whose owners and askers are drawn one by one


@dataclass(frozen=True)
class Cluster:
    """The machines: processes (ranks), bytes/s, seconds."""

    ranks: int
    per_node: int = 8
    cores: int = 64
    memory: float = 64 * 2**30
    local: float = 10e9
    network: float = 12.5e9
    latency: float = 20e-6
    reads: float = 85e3
    append: float = 1e9


@dataclass(frozen=True)
class Load:
    """The table, a rank's batch, the exponent of Zipf's law, and the steps made before."""

    rows: int
    dim: int
    lookups: int
    zipf: float = 1.05
    dtype: str = "float32"
    rule: str = "adam"
    steps: int = 10**5
    commit_every: int = 1000

    @property
    def spec(self) -> er.Spec:
        """The table's."""
        return er.Spec(self.rows, self.dim, self.dtype, RULES[self.rule](), er.Zeros(), 0)

    def distinct(self, draws: int) -> float:
        """Return how many different rows some draws touch."""
        return expected_misses(self.rows, self.zipf, draws, 0)


class Compute(NamedTuple):
    """The time of processors.

    Attributes:
        alone: seconds of a core for a step of the same batch in one process by itself.
        per_byte: seconds of a core for each byte that a rank sends; None: by where the ranks are.
        wait: seconds of a step in which ranks that have a core each wait for each other.
    """

    alone: float
    per_byte: float | None = None
    wait: float = 0.0

    def seconds(self, sent: float, cluster: Cluster) -> float:
        """Return those of a step that sends a number of bytes from each rank."""
        there = PER_BYTE_NEAR if cluster.ranks <= cluster.per_node else PER_BYTE
        work = self.alone + (there if self.per_byte is None else self.per_byte) * sent
        crowd = min(cluster.ranks, cluster.per_node) / cluster.cores
        return max(work * crowd, work + (self.wait if sent else 0.0))


class Traffic(NamedTuple):
    """Rows that ranks ask for in a step, on average over steps.

    Attributes:
        unique: different ids of a rank's batch.
        asked: rows asked of each rank, by all with itself: float64 (ranks,).
        owned: different rows asked of a rank, which its step changes.
        remote: rows that a rank asks others for.
        beyond: of those, rows that come from another node.
    """

    unique: float
    asked: np.ndarray
    owned: float
    remote: float
    beyond: float

    @property
    def balance(self) -> float:
        """The most rows that a rank serves, over their mean."""
        return float(self.asked.max() / self.asked.mean())


@dataclass(frozen=True)
class Simulation:
    """The costs of a table: rows, bytes and seconds, of a rank where nothing else is said.

    Attributes:
        records: rows with records, of all ranks.
        rows_mean, rows_most: records of a rank, and of the one with most.
        table_bytes: of records, of all ranks.
        ram_bytes, disk_bytes: of a rank's records in RAM, and of its files; 0 where its RAM has all.
        unique: different ids of a batch.
        balance: rows served by the rank with most, over their mean.
        misses: rows that this rank reads from disk in a step.
        bytes_sent, bytes_between_nodes: of a step, to others and to other nodes.
        seconds: of a step, by cause; `bound` is the longest one.
        step_overlapped, step_in_turn: seconds of a step, at best and at worst.
        commit_seconds, reshard_seconds, loss_seconds: of a commit, of resharding, of losing a rank.
    """

    records: float
    rows_mean: float
    rows_most: float
    table_bytes: float
    ram_bytes: float
    disk_bytes: float
    unique: float
    balance: float
    misses: float
    bytes_sent: float
    bytes_between_nodes: float
    seconds: dict[str, float]
    bound: str
    step_overlapped: float
    step_in_turn: float
    commit_seconds: float
    reshard_seconds: float
    loss_seconds: float


def simulate(
    load: Load,
    cluster: Cluster,
    *,
    log: Iterable[np.ndarray] | None = None,
    compute: Compute | None = None,
    timeout: float = 120.0,
) -> Simulation:
    """Return the costs of a table that ranks share.

    Args:
        load: the training.
        cluster: the machines.
        log: ids, int64 arrays of any size, in place of Zipf's law; of several ranks in turn.
        compute: the time of processors; None: by `ALONE`.
        timeout: seconds until all know that a rank is lost.

    Raises:
        ArgumentError: a number out of range.

    Example:
        >>> found = simulate(Load(rows=10**9, dim=64, lookups=8192), Cluster(ranks=16))
        >>> found.bound in found.seconds, 1.0 <= found.balance < 1.2
        (True, True)
    """
    check(load, cluster)
    traffic = traffic_of(load, cluster.ranks, cluster.per_node, log)
    sent, beyond = (exchanged_bytes(load.spec, rows) for rows in (traffic.remote, traffic.beyond))
    record, drawn = load.spec.record_bytes, load.lookups * cluster.ranks
    records = float(load.rows) if log is not None else load.distinct(load.steps * drawn)
    mean, most = records / cluster.ranks, most_rows(records, cluster.ranks)
    slots = cluster.memory / record
    misses = misses_of(load, cluster, traffic, slots) if slots < mean else 0.0
    of_node = beyond * min(cluster.ranks, cluster.per_node)
    seconds = {
        "compute": (compute or alone(load, traffic)).seconds(sent, cluster),
        "local": (sent - beyond) / cluster.local,
        "network": of_node / cluster.network + 4 * cluster.latency * (cluster.ranks > cluster.per_node),
        "disk": misses / cluster.reads,
    }
    step = max(seconds.values())
    changed = min(mean, load.distinct(load.commit_every * drawn) / cluster.ranks)
    return Simulation(
        records=records,
        rows_mean=mean,
        rows_most=most,
        table_bytes=records * record,
        ram_bytes=min(slots, most) * record,
        disk_bytes=0.0 if slots >= most else most * (record + SEALED) * (1 + LOGS),
        unique=traffic.unique,
        balance=traffic.balance,
        misses=misses,
        bytes_sent=sent,
        bytes_between_nodes=beyond,
        seconds=seconds,
        bound=max(seconds, key=lambda name: seconds[name]),
        step_overlapped=step,
        step_in_turn=sum(seconds.values()),
        commit_seconds=changed * (record + SEALED) / cluster.append,
        reshard_seconds=2 * most * (record + SEALED) / cluster.append,
        loss_seconds=load.commit_every / 2 * step + timeout + most * INDEX / cluster.append,
    )


def calibrated(
    alone: float, two: float, load: Load, cores: int, log: Iterable[np.ndarray] | None = None, work: float | None = None
) -> Compute:
    """Return the time of processors, of steps that were measured on one machine.

    Args:
        alone: seconds of a step of one process, of processors if `work` is given.
        two: seconds of a step of two ranks, each with such a batch.
        load: the training.
        cores: of the machine.
        log: the ids of it.
        work: seconds of processors that a step took each of the two; None: all that they have.
    """
    crowd = max(1.0, 2 / cores)
    work = two / crowd if work is None else work
    per_byte = max(0.0, work - alone) / exchanged_bytes(load.spec, traffic_of(load, 2, 2, log).remote)
    return Compute(alone, per_byte, max(0.0, two - work * crowd))


def alone(load: Load, traffic: Traffic) -> Compute:
    """Return the time of processors by `ALONE`."""
    values, records = load.lookups * load.dim * 4, traffic.unique * load.spec.record_bytes
    return Compute(float(np.dot(ALONE, (1, load.lookups, values, traffic.unique, records))))


def misses_of(load: Load, cluster: Cluster, traffic: Traffic, slots: float) -> float:
    """Return how many rows the rank with most to serve reads from disk in a step."""
    held = int(min(load.rows, slots * cluster.ranks))
    missed = expected_misses(load.rows, load.zipf, load.lookups * cluster.ranks, held) / cluster.ranks
    return min(traffic.owned, missed * WORSE) * traffic.balance


def check(load: Load, cluster: Cluster) -> None:
    """Refuse numbers that are out of range."""
    wanted = {name: getattr(load, name) for name in ("rows", "dim", "lookups", "commit_every")} | asdict(cluster)
    for name, value in wanted.items():
        if not value > 0:
            raise er.ArgumentError(f"`{name}` of a simulation must be above 0: got {value!r}.")
    if cluster.ranks > 1 << 16 or load.rows > 10**15:
        raise er.ArgumentError(
            f"a simulation goes up to 65,536 ranks and 10^15 rows: got {cluster.ranks} and {load.rows}."
        )


# ---------------------------------------------------------------- traffic


def traffic_of(load: Load, ranks: int, per_node: int, log: Iterable[np.ndarray] | None) -> Traffic:
    """Return the traffic of ids of a log, or of Zipf's law."""
    return of_zipf(load, ranks, per_node) if log is None else of_log(log, load.lookups, ranks, per_node, LOG_STEPS)


def of_zipf(load: Load, ranks: int, per_node: int) -> Traffic:
    """Return the traffic of ids by Zipf's law, each popular one with an owner by a hash, as all its askers ask it."""
    unique, owned = load.distinct(load.lookups), load.distinct(load.lookups * ranks) / ranks
    popular = min(load.rows, DISCRETE)
    cdf = zipf_cdf(np.arange(popular + 1), max(load.rows, 2), load.zipf)
    chances = -np.expm1(load.lookups * np.log1p(-np.clip(np.diff(cdf), 0, 1 - 1e-12)))
    draw = np.random.default_rng(0)
    asked = np.bincount(draw.integers(ranks, size=popular), draw.binomial(ranks, chances), ranks).astype(float)
    asked += draw.poisson(max(0.0, unique - float(chances.sum())), ranks)  # the others are asked of one rank each
    return Traffic(unique, asked, owned, unique * (ranks - 1) / ranks, unique * max(0, ranks - per_node) / ranks)


def of_log(log: Iterable[np.ndarray], lookups: int, ranks: int, per_node: int, steps: int) -> Traffic:
    """Return the traffic of the first steps of a log, whose ids ranks take in turn: counted.

    Raises:
        ArgumentError: it has fewer ids than one step.
    """
    counts, owned, done = np.zeros((ranks, ranks)), 0, 0
    for _, step in zip(range(steps), cut(log, lookups * ranks), strict=False):
        for rank, ids in enumerate(step.reshape(ranks, lookups)):
            counts[rank] += np.bincount(owners(np.unique(ids), ranks), minlength=ranks)
        owned, done = owned + len(np.unique(step)), done + 1
    if not done:
        raise er.ArgumentError(f"`log` must have the ids of a step, {lookups} for each of {ranks} ranks: it has fewer.")
    counts /= done
    nodes = np.arange(ranks) // per_node
    beyond = float(counts[nodes[:, None] != nodes].sum()) / ranks
    remote = float(counts.sum() - np.trace(counts)) / ranks
    return Traffic(float(counts.sum()) / ranks, counts.sum(0), owned / done / ranks, remote, beyond)


def read_ids(files: Sequence[Path], column: str) -> Iterator[np.ndarray]:
    """Go through the ids of a column of Parquet, Arrow, CSV or TSV files."""
    for file in files:
        for _, values in TextColumn(file, column, IDS).batches():
            yield values.drop_null().to_numpy(zero_copy_only=False)


# ---------------------------------------------------------------- the command


def compared(document: dict[str, Any]) -> list[dict[str, float]]:
    """Return for each number of ranks in the JSON of `benchmarks shards`: measured, and simulated by one rank and two.

    Raises:
        ArgumentError: steps of one process, or of two, are not in it.
    """
    lines = {line["name"]: line for line in document["results"] if line["status"] == "ok"}
    missing = [name for name in ("ours-alone", "ours-sharded-2") if name not in lines]
    if missing:
        raise er.ArgumentError(f"the measurements must have {' and '.join(missing)}: got {', '.join(lines) or 'none'}.")
    one, two, cores = lines["ours-alone"], lines["ours-sharded-2"], document["machine"]["cores"]
    workload = {"rows": 4_000_000, "dim": 64, "batch": 8192, "features": 2, "zipf": 1.05, "batches": 60, "seed": 0}
    workload |= one["workload"]
    load = Load(workload["rows"], workload["dim"], workload["batch"] * workload["features"], workload["zipf"])
    alone_s, two_s, work_s = (ms / 1e3 for ms in (one["cpu_ms"], two["median_ms"], two["cpu_ms"]))
    compute = calibrated(alone_s, two_s, load, cores, measured_ids(workload, 2), work_s)
    found = []
    measured = {int(name.rpartition("-")[2]): line for name, line in lines.items() if name.startswith("ours-sharded-")}
    for ranks, line in ((ranks, line) for ranks, line in measured.items() if ranks > 1):
        told = simulate(load, Cluster(ranks, ranks, cores), log=measured_ids(workload, ranks), compute=compute)
        simulated = told.seconds["compute"] * 1e3
        found.append(
            {
                "ranks": ranks,
                "measured ms": line["median_ms"],
                "simulated ms": simulated,
                "off %": (simulated / line["median_ms"] - 1) * 100,
                "measured bytes": line["sent_bytes"],
                "simulated bytes": told.bytes_sent,
            }
        )
    return found


def measured_ids(workload: dict[str, Any], ranks: int) -> Iterator[np.ndarray]:
    """Go through the ids of `benchmarks shards`, in the order of steps, then of ranks."""
    draw, size = np.random.default_rng(workload["seed"]), workload["batch"] * workload["features"]
    for _ in range(workload["batches"]):
        ids = bounded_zipf(draw.random(size), workload.get("ranks") or workload["rows"], workload["zipf"])
        yield from ((ids * SCATTER % workload["rows"] + rank * 7919) % workload["rows"] for rank in range(ranks))


def text_of(load: Load, found: dict[int, Simulation]) -> str:
    """Return the table that people read."""
    columns: dict[str, Callable[[Simulation], str]] = {
        "records": lambda one: f"{one.records:.2g}",
        "bytes": lambda one: size_text(one.table_bytes),
        "a rank": lambda one: size_text(one.rows_most * load.spec.record_bytes),
        "on disk": lambda one: size_text(one.disk_bytes),
        "sent": lambda one: size_text(one.bytes_sent),
        "to nodes": lambda one: size_text(one.bytes_between_nodes),
        "balance": lambda one: f"{one.balance:.3f}",
        "misses": lambda one: f"{one.misses:,.0f}",
        "bound": lambda one: one.bound,
        "ms": lambda one: f"{one.step_overlapped * 1e3:.3g}",
        "at worst": lambda one: f"{one.step_in_turn * 1e3:.3g}",
        "commit s": lambda one: f"{one.commit_seconds:.3g}",
        "reshard s": lambda one: f"{one.reshard_seconds:,.0f}",
        "a loss s": lambda one: f"{one.loss_seconds:,.0f}",
    }
    rows = [[f"{ranks:,}", *(cell(one) for cell in columns.values())] for ranks, one in found.items()]
    return table_text(["ranks", *columns], rows)


def table_text(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in (head, *rows))


def size_text(nbytes: float) -> str:
    """Return a number of bytes for people."""
    power = min(4, int(math.log(max(nbytes, 1), 1024)))
    return f"{nbytes / 1024**power:.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def parse(words: Sequence[str] | None) -> Namespace:
    """Read the command line. Each field of `Load` and `Cluster` is an option."""
    form = argparse.RawDescriptionHelpFormatter
    parser = ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, metavar="N", help=f"(default: {RANKS})")
    for name, default in {**asdict(Load(10**12, 64, 8192 * 26)), **asdict(Cluster(1))}.items():
        if name != "ranks":
            choices = {"dtype": ("float32", "bfloat16", "float16"), "rule": tuple(RULES)}.get(name)
            kind = (lambda text: int(float(text))) if isinstance(default, int) else type(default)
            text = f"(default: {default:g})" if choices is None else f"(default: {default})"
            parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, choices=choices, help=text)
    parser.add_argument("--log", type=Path, nargs="+", metavar="FILE", help="Parquet, Arrow, CSV or TSV of ids")
    parser.add_argument("--column", default="ids", metavar="NAME", help="of the log (default: ids)")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="JSON of `benchmarks shards` to compare with")
    parser.add_argument("--alone-ms", type=float, metavar="MS", help="of a step of one process, measured")
    parser.add_argument("--two-ms", type=float, metavar="MS", help="of a step of two ranks on one machine, measured")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="until a lost rank is known of")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(words)
    if options.two_ms is not None and options.alone_ms is None:
        parser.error("--two-ms goes with --alone-ms")
    return options


def log_of(options: Namespace) -> Iterator[np.ndarray] | None:
    """Return the ids of the files that were named."""
    return read_ids(options.log, options.column) if options.log else None


def compute_of(options: Namespace, load: Load) -> Compute | None:
    """Return the time of processors by the steps that were measured."""
    if options.alone_ms is None:
        return None
    if options.two_ms is None:
        return Compute(options.alone_ms / 1e3)
    return calibrated(options.alone_ms / 1e3, options.two_ms / 1e3, load, options.cores, log_of(options))


def main(words: Sequence[str] | None = None) -> None:
    """Print the costs for each number of ranks, or the comparison with measurements."""
    options = parse(words)
    if options.measured:
        found = compared(json.loads(options.measured.read_text()))
        rows = [[f"{value:,.4g}" for value in line.values()] for line in found]
        print(json.dumps(found, indent=1) if options.json else table_text(list(found[0]), rows))
        return
    load = Load(**{name: getattr(options, name) for name in Load.__dataclass_fields__})
    own = {name: getattr(options, name) for name in Cluster.__dataclass_fields__ if name != "ranks"}

    how: dict[str, Any] = {"compute": compute_of(options, load), "timeout": options.timeout}
    simulated = {ranks: simulate(load, Cluster(ranks, **own), log=log_of(options), **how) for ranks in options.ranks}
    if options.json:
        ranks = {ranks: asdict(one) for ranks, one in simulated.items()}
        print(json.dumps({"load": asdict(load), "cluster": own, "ranks": ranks}, indent=1))
    else:
        print(text_of(load, simulated))


if __name__ == "__main__":
    try:
        main()
    except (er.EmbedrockError, OSError) as error:
        sys.exit(f"error: {error}")
