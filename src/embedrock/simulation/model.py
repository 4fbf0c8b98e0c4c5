"""`simulate`: what a table costs that is shared out over ranks. This docstring is the model.

**Who asks whom** (`embedrock.simulation.traffic`) is counted where it decides: which rank has to serve most. Ids of a
log are cut into steps, and each is given to its owner by the hash that ranks use. For ids by Zipf's law the two million
most popular ones get owners at random, and askers by their chance; the others are spread as Poisson's law has it. All
else is a mean, computed.

**Bytes of a step.** With U different ids in a rank's batch, of which R are with other ranks, D weights of s bytes: ids
and rows, gradients and their ids travel once each, ``R (8 + s D) + R (8 + 4 D)``. Each message has a head besides, some
tens of bytes, which is left out: `BYTES_OF_HEADS` says how much at most. A node sends what its ranks ask of others, and
serve to them.

**Seconds of a step.** Each of these takes its time, and the longest one bounds a step where all overlap, as with
prefetching; where nothing does, a step takes the sum::

    compute    the larger of: work * ranks on a node / its cores, and work + wait,
               where work = alone + per_byte * bytes, and wait is nothing for one rank
    local      bytes between ranks of a node / what its memory or links give, by rank
    network    bytes that leave a node / what its network gives, + 2 messages to each other node * latency / in flight
    disk       seconds for the rows that the rank reads which has most to serve

*alone* is what a step of the batch takes processors in one process by itself: measured, or by `ALONE`, the constants of
a laptop of some years. *per_byte* is what copying, packing and carrying a byte takes them, and
*wait* how long ranks with a core each wait for each other in a step; where ranks share cores, others work meanwhile.
Both are found from the step of two ranks (`calibrated`), or they are `PER_BYTE`, on one machine `PER_BYTE_NEAR`, and
nothing. Rows read from disk are
those asked of a rank that its RAM does not hold, if it keeps the most popular ones, times `WORSE` for a policy that
does not know them.

**Bytes of a table.** A row that was ever stepped has a record: weights and optimizer state. On disk it takes its CRC
and, in logs that wait for compaction, up to `LOGS` times as much again. How many rows have one after so many steps is
computed by Zipf's law; of a log it is not known, and all rows count.

**A commit** writes the rows stepped since the last one, with CRC and id, at what the disk appends; ranks write at once.
**Resharding** reads all records once and writes them once, by as many as there are ranks. **Losing a rank** costs half
of the steps between two commits, the timeout until all know of it, and the start: to open a part, 8 bytes of index for
each row are read.

A part's share of rows is even but for chance: the largest of W parts of n rows has about ``n + sqrt(2 n ln W)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from embedrock.errors import ArgumentError
from embedrock.initializers import Zeros
from embedrock.planner.demand import RULE_NAMES, exchanged_bytes, most_rows
from embedrock.planner.zipf import expected_misses
from embedrock.simulation.traffic import Traffic, of_log, of_zipf
from embedrock.spec import Spec
from embedrock.wording import check_choice

BYTES_OF_HEADS = 512  # of a step, to each other rank, at most
PER_BYTE = 7e-9  # seconds of a core for a byte that is sent, and received, by a socket: docs/scale.md
PER_BYTE_NEAR = 3.6e-9  # as PER_BYTE, where all ranks are on one machine and read each other's memory
WORSE = 1.08  # times the misses of the best cache
SEALED = 12  # bytes of a record in a log besides its own: id and CRC
LOGS = 1.5  # times the bytes of the base, that logs may come to
INDEX = 8  # bytes of a row in the index of files
LOG_STEPS = 8  # of a log, that are counted
# Seconds of a core: of a step, of each id and of a byte of its row, of each different id and of a byte of its record.
ALONE = (1.5e-4, 1e-8, 4e-10, 8e-8, 2e-10)


@dataclass(frozen=True)
class Cluster:
    """The machines.

    Attributes:
        ranks: processes.
        per_node: of them on a machine.
        cores: of a machine, that they have.
        memory: bytes of RAM that a rank has for records.
        local: bytes/s between ranks of a machine, for each.
        network: bytes/s that a machine sends, and receives.
        latency: seconds of a message between machines.
        reads: random reads/s of the disk that a rank has.
        append: bytes/s of long reads and writes of it.
    """

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
    """What is trained.

    Attributes:
        rows: of the table.
        dim: weights in a row.
        lookups: ids of a rank's batch.
        zipf: exponent of their popularity.
        dtype, rule: of the table.
        steps: that were made before.
        commit_every: steps between two commits.
    """

    rows: int
    dim: int
    lookups: int
    zipf: float = 1.05
    dtype: str = "float32"
    rule: str = "adam"
    steps: int = 10**5
    commit_every: int = 1000

    @property
    def spec(self) -> Spec:
        """The table's."""
        return Spec(self.rows, self.dim, self.dtype, RULE_NAMES[self.rule](), Zeros(), 0)


class Compute(NamedTuple):
    """What processors need.

    Attributes:
        alone: seconds of a core for a step of the same batch in one process by itself.
        per_byte: seconds of a core for each byte that a rank sends; None: by where the ranks are.
        wait: seconds of a step in which ranks that have a core each wait for each other.
    """

    alone: float
    per_byte: float | None = None
    wait: float = 0.0

    def seconds(self, sent: float, cluster: Cluster) -> float:
        """Return those of a step that sends so many bytes from each rank."""
        there = PER_BYTE_NEAR if cluster.ranks <= cluster.per_node else PER_BYTE
        work = self.alone + (there if self.per_byte is None else self.per_byte) * sent
        crowd = min(cluster.ranks, cluster.per_node) / cluster.cores
        return max(work * crowd, work + (self.wait if sent else 0.0))


@dataclass(frozen=True)
class Simulation:
    """What a table costs. Bytes and seconds; of a rank where nothing else is said.

    Attributes:
        records: rows with records, of all ranks.
        rows_mean, rows_most: records of a rank, and of the one with most.
        table_bytes: of records, of all ranks.
        ram_bytes: of a rank's that fit its RAM.
        disk_bytes: of a rank's files, 0 where its RAM has all.
        unique: different ids of a batch.
        served_most: rows that the rank with most to serve serves in a step.
        balance: that, over the mean.
        misses: rows that it reads from disk.
        bytes_sent: in a step.
        bytes_between_nodes: of those.
        bytes_of_node: that a machine sends to others in a step.
        seconds: of a step, by what they are spent on.
        bound: which of these is longest.
        step_overlapped, step_in_turn: seconds of a step, at best and at worst.
        commit_seconds, reshard_seconds: see `embedrock.simulation.model`.
        loss_seconds: what it costs to lose a rank.
    """

    records: float
    rows_mean: float
    rows_most: float
    table_bytes: float
    ram_bytes: float
    disk_bytes: float
    unique: float
    served_most: float
    balance: float
    misses: float
    bytes_sent: float
    bytes_between_nodes: float
    bytes_of_node: float
    seconds: dict[str, float]
    bound: str
    step_overlapped: float
    step_in_turn: float
    commit_seconds: float
    reshard_seconds: float
    loss_seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return asdict(self)


def simulate(
    load: Load,
    cluster: Cluster,
    *,
    log: Iterable[np.ndarray] | None = None,
    compute: Compute | None = None,
    timeout: float = 120.0,
) -> Simulation:
    """Return what a table costs that is shared out over ranks: see `embedrock.simulation.model`.

    Args:
        load: what is trained.
        cluster: the machines.
        log: ids, int64 arrays of any size, which take the place of Zipf's law; of several ranks in turn.
        compute: what processors need; None: by the constants `ALONE`.
        timeout: seconds until all know that a rank is lost.

    Raises:
        ArgumentError: something that cannot be.

    Example:
        >>> from embedrock.simulation import Cluster, Load, simulate
        >>> found = simulate(Load(rows=10**9, dim=64, lookups=8192), Cluster(ranks=16))
        >>> found.bound in found.seconds, 1.0 <= found.balance < 1.2
        (True, True)
    """
    _check(load, cluster)
    nodes = math.ceil(cluster.ranks / cluster.per_node)
    traffic = (
        of_zipf(load.rows, load.zipf, load.lookups, cluster.ranks, cluster.per_node)
        if log is None
        else of_log(log, load.lookups, cluster.ranks, cluster.per_node, LOG_STEPS)
    )
    spec, sent = load.spec, exchanged_bytes(load.spec, traffic.remote)
    records = float(load.rows) if log is not None else _distinct(load, load.steps * load.lookups * cluster.ranks)
    mean = records / cluster.ranks
    most = most_rows(records, cluster.ranks)
    slots = cluster.memory / spec.record_bytes
    misses = _misses(load, cluster, traffic, mean, slots)
    beyond = exchanged_bytes(spec, traffic.beyond)
    own = compute or Compute(_alone(load, traffic))
    seconds = {
        "compute": own.seconds(sent, cluster),
        "local": (sent - beyond) / cluster.local,
        "network": beyond * min(cluster.ranks, cluster.per_node) / cluster.network + 4 * cluster.latency * (nodes > 1),
        "disk": misses / cluster.reads,
    }
    step = max(seconds.values())
    on_disk = 0.0 if slots >= most else most * (spec.record_bytes + SEALED) * (1 + LOGS)
    changed = min(mean, _distinct(load, load.commit_every * load.lookups * cluster.ranks) / cluster.ranks)
    opening = most * INDEX / cluster.append
    return Simulation(
        records,
        mean,
        most,
        records * spec.record_bytes,
        min(slots, most) * spec.record_bytes,
        on_disk,
        traffic.unique,
        float(traffic.asked.max()),
        traffic.balance,
        misses,
        sent,
        beyond,
        beyond * min(cluster.ranks, cluster.per_node),
        seconds,
        max(seconds, key=lambda name: seconds[name]),
        step,
        sum(seconds.values()),
        changed * (spec.record_bytes + SEALED) / cluster.append,
        2 * most * (spec.record_bytes + SEALED) / cluster.append,
        load.commit_every / 2 * step + timeout + opening,
    )


def calibrated(
    alone: float,
    two: float,
    load: Load,
    cores: int,
    log: Iterable[np.ndarray] | None = None,
    work: float | None = None,
) -> Compute:
    """Return what processors need, of steps that were measured on one machine.

    Args:
        alone: seconds of a step of one process, of processors if `work` is given.
        two: seconds of a step of two ranks, each with such a batch.
        load: what was trained.
        cores: of the machine.
        log: the ids of it.
        work: seconds of processors that a step took each of the two; None: all that they have.
    """
    crowd = max(1.0, 2 / cores)
    work = two / crowd if work is None else work
    traffic = of_zipf(load.rows, load.zipf, load.lookups, 2, 2) if log is None else of_log(log, load.lookups, 2, 2, 8)
    per_byte = max(0.0, work - alone) / exchanged_bytes(load.spec, traffic.remote)
    return Compute(alone, per_byte, max(0.0, two - work * crowd))


def _distinct(load: Load, draws: int) -> float:
    return expected_misses(load.rows, load.zipf, draws, 0)


def _alone(load: Load, traffic: Traffic) -> float:
    """Return the seconds of a core for a step in one process by itself."""
    values, records = load.lookups * load.dim * 4, traffic.unique * load.spec.record_bytes
    return float(np.dot(ALONE, (1, load.lookups, values, traffic.unique, records)))


def _misses(load: Load, cluster: Cluster, traffic: Traffic, mean: float, slots: float) -> float:
    """Return how many rows the rank with most to serve reads from disk in a step."""
    if slots >= mean:
        return 0.0
    held = int(min(load.rows, slots * cluster.ranks))
    missed = expected_misses(load.rows, load.zipf, load.lookups * cluster.ranks, held) / cluster.ranks
    return min(traffic.owned, missed * WORSE) * traffic.balance


def _check(load: Load, cluster: Cluster) -> None:
    check_choice("rule", load.rule, RULE_NAMES)
    wanted: Mapping[str, float] = {
        **{name: getattr(load, name) for name in ("rows", "dim", "lookups", "commit_every")},
        **asdict(cluster),
    }
    for name, value in wanted.items():
        if not value > 0:
            raise ArgumentError(f"`{name}` of a simulation must be above 0: got {value!r}.")
    if cluster.ranks > 1 << 16 or load.rows > 10**15:
        raise ArgumentError(
            f"a simulation goes up to 65,536 ranks and 10^15 rows: got {cluster.ranks} and {load.rows}."
        )
