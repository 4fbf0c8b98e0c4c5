"""`Demand`: a table and the ids of its batches, and its misses per batch by cache size."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from embedrock.distributed.owners import Shard
from embedrock.errors import ArgumentError, check_choice, did_you_mean
from embedrock.initializers import Zeros
from embedrock.kernels.keys import PART_BITS
from embedrock.optimizers import RULES, Rule
from embedrock.planner.split import SplitOption, split
from embedrock.spec.spec import Spec
from embedrock.storage.backend import RamLayout
from embedrock.storage.device_layout import DeviceLayout, choose
from embedrock.storage.device_layout import memory_for as device_memory_for
from embedrock.storage.miss_ratio_curve import CurveSampler, MissRatioCurve
from embedrock.storage.ram_layout import memory_for, most_for, place
from embedrock.storage.record_pools import are_alike, may_share
from embedrock.system.sizes import parse_bytes

EXACT_RANKS = 1 << 15  # ranks with a chance of their own; later ranks share chances in groups ...
GROUPS = 1 << 12  # ... of this part of the ranks before them
SCATTER = 2_654_435_761  # Knuth's multiplicative hash: ids of popular rows lie far apart


@functools.lru_cache(1 << 12)  # a plan repeats the calls for all sizes of a table
def expected_misses(ranks: int, exponent: float, draws: int, slots: int) -> float:
    """Return the mean number of different ranks among `draws` draws, except the `slots` most popular ones.

    This is a lower bound on the misses of a cache of that size. The policy would know every row's popularity, but not
    future batches. With 0 slots it is the number of different ranks.

    Example:
        >>> expected_misses(ranks=100, exponent=1.0, draws=1, slots=0)
        1.0
    """
    if ranks == 1:
        return float(slots < 1)
    edges = _edges(min(slots, ranks), ranks)
    counts = np.diff(edges)
    chances = np.diff(zipf_cdf(edges, ranks, exponent)) / counts
    return float(-(counts * np.expm1(draws * np.log1p(-chances))).sum())


def best_split(laws: Sequence[tuple[int, float, int]], slots: int) -> list[int]:
    """Split `slots` over several laws, so that the most frequent ranks of all get them.

    Args:
        laws: ranks, exponent and draws of each.
        slots: total number of slots.

    Example:
        >>> best_split([(100, 1.0, 30), (100, 1.0, 10)], 41)
        [30, 10]
    """
    low, high = -700.0, 700.0  # logarithms of the frequency of the rarest of them
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(_above(law, middle) for law in laws) > slots else (low, middle)
    return [int(_above(law, high)) for law in laws]


def _above(law: tuple[int, float, int], level: float) -> float:
    """Return the number of ranks of a law whose log frequency is at least `level`."""
    ranks, exponent, draws = law
    whole = np.log(ranks) if exponent == 1 else (float(ranks) ** (1 - exponent) - 1) / (1 - exponent)
    often = np.log(draws) - np.log(max(whole, 1e-300))  # of the first rank
    return float(np.exp(np.clip((often - level) / max(exponent, 1e-3), -700, np.log(ranks))))


def bounded_zipf(uniform: npt.NDArray[np.float64], ranks: int, exponent: float) -> npt.NDArray[np.int64]:
    """Turn uniform numbers into ranks in [0, ranks), rank k about as likely as (k + 1) ** -exponent.

    The continuous power law on [1, ranks], by its inverse distribution function, rounded down.
    """
    if exponent == 1:
        value = float(ranks) ** uniform
    else:
        power = 1 - exponent
        value = ((float(ranks) ** power - 1) * uniform + 1) ** (1 / power)
    return np.minimum(value.astype(np.int64) - 1, ranks - 1)


def scattered(ranks: npt.NDArray[np.int64], rows: int) -> npt.NDArray[np.int64]:
    """Return one id in [0, rows) per rank: ids of popular ranks lie far apart."""
    return ranks * np.int64(SCATTER % rows or 1) % rows if rows < SCATTER else ranks


def _edges(first: int, ranks: int) -> npt.NDArray[np.int64]:
    """Return where groups of ranks of similar chance begin, and where the last one ends."""
    exact = min(ranks, max(first, EXACT_RANKS))
    grouped = np.geomspace(exact, ranks, 2 + int(GROUPS * np.log(ranks / max(exact, 1)))).astype(np.int64)
    edges = np.concatenate([np.arange(first, exact), grouped, [ranks]])
    return edges[np.diff(edges, prepend=-1) > 0]  # edges ascend


def zipf_cdf(values: npt.NDArray[np.int64], ranks: int, exponent: float) -> npt.NDArray[np.float64]:
    """Return the chance of a rank below each value: the inverse of `bounded_zipf`, where the last rank has no mass."""
    values = np.minimum(values + 1.0, ranks)
    if exponent == 1:
        return np.log(values) / np.log(ranks)
    power = 1 - exponent
    return (values**power - 1) / (float(ranks) ** power - 1)


RULE_NAMES = {rule.__name__.lower(): rule for rule in RULES}
FIELDS = ("rows", "dim", "dtype", "rule", "ids", "zipf", "column", "memory", "group")
DIM = 64
IN_RAM = "RAM"  # value of a table's memory
ZIPF = 1.05  # the default without a log and an exponent
OPEN_ROWS = 10**9  # range of ids of a table without a number of rows
MOST_IDS = 2_000_000  # ids to read of one table
COUNTED = 8  # batches of a log whose different ids are counted
MOST_COUNTED = 2  # members of a group that add to that
LEAST_COUNTED = 8  # batches, at least
UNIT = 1 << 20  # of ``memory=``
WINDOW = 400  # warm-up batches before the counted ones, if a table is trained for longer
FINER = 4  # values of ``memory=`` up to a factor of two; misses between two caches are interpolated
FILLED = 0.25  # of the rows seen: caches up to this size are in their final state
USUAL, WORST = 1.08, 1.5  # the policy's misses over the best cache's: default without a filled cache; maximum
MOST_SAMPLED = 1 << 12  # slots of a sampled cache that represents a large one ...
FEW_SIZES, FINELY_SAMPLED = 2, 1 << 14  # ... and of one for few sizes


@dataclass(frozen=True)
class Demand:
    """One table and the ids of its batches, or a group of tables with one record layout and one cache.

    Attributes:
        name: of the table.
        spec: of the table.
        positions: ids of a batch.
        zipf: exponent of the popularity of ids, if `log` is None.
        log: ids of past batches, int64 arrays of any size; it can be iterated several times.
        memory: the user's ``memory=`` of a table on disk, in bytes; 0: the user wants it in RAM; None: a plan decides.
        group: the name of the user's group.
        members: tables of a group, which has the rows and positions of all of them. A group's `zipf` and `log` are not
            used.
        workers: number of workers that shard the table by id, each with its own batches. `spec` is that of one shard.
        whole: rows of all shards; None: those of `spec`.
    """

    name: str
    spec: Spec
    positions: int
    zipf: float = ZIPF
    log: Iterable[np.ndarray] | None = None
    memory: int | None = None
    group: str | None = None
    members: tuple[Demand, ...] = ()
    workers: int = 1
    whole: int | None = None

    @property
    def rows(self) -> int:
        """Rows from which ids are drawn."""
        return self.whole or self.spec.rows or OPEN_ROWS

    @property
    def asked(self) -> int:
        """Ids of the batches of all workers."""
        return self.positions * self.workers

    @property
    def sent_bytes(self) -> float:
        """Bytes that one of several workers sends in a step, for its batch's rows of other owners."""
        if self.workers == 1:
            return 0.0
        if self.log is None:
            different = expected_misses(self.rows, self.zipf, self.positions, 0)
        else:
            some = [len(np.unique(ids)) for ids in islice(cut(self.log, self.positions), COUNTED)]
            different = float(np.mean(some or [0.0]))
        return exchanged_bytes(self.spec, different * (self.workers - 1) / self.workers)

    def for_one_of(self, workers: int) -> Demand:
        """Return the demand of one of several workers that shard the table by id: its shard, used by all."""
        rows = self.spec.rows
        part = None if rows is None else min(rows, math.ceil(most_rows(rows, workers)))
        return replace(self, spec=replace(self.spec, rows=part), workers=workers, whole=rows)

    def placements(self, most: int) -> list[RamLayout]:
        """Return RAM layouts for a table on disk, ascending from two batches to all rows, or `most`."""
        spec, is_pool = self.spec, bool(self.members)
        if self.memory:
            return [place(spec, self.memory, "the table")]
        if not most or self.memory == 0:
            return []
        least, most = memory_for(spec, 2 * self.positions + 1), min(most, most_for(spec, is_pool))
        count = max(0, math.ceil(math.log2(max(most / least, 1)) * FINER))
        sizes = least, *(least * 2 ** (k / FINER) for k in range(count)), max(least, most)
        units = sorted({-(-int(nbytes) // UNIT) for nbytes in sizes})
        return [place(spec, number * UNIT, "the table", is_pool=is_pool) for number in units]

    @property
    def is_drawn(self) -> bool:
        """True if the popularity of each id is known by Zipf's law: there is no log."""
        return all(each.is_drawn for each in self.members) and self.log is None and self.spec.rows is not None

    def batches(self, count: int, seed: int = 0) -> Iterator[np.ndarray]:
        """Yield `count` batches of ids, from the log or drawn. Each is ascending without repeats."""
        if self.members:
            together = [each.batches(count, number) for number, each in enumerate(self.members)]
            for batch in zip(*together, strict=False):
                yield np.concatenate([ids + (number << PART_BITS) for number, ids in enumerate(batch)])
            return
        source = self.drawn(np.random.default_rng(seed)) if self.log is None else cut(self.log, self.asked)
        shard = Shard(0, self.workers, segments=self.spec.segments)
        for ids in islice(source, count):
            rows = np.unique(ids)
            yield rows if self.workers == 1 else rows[shard.owns(rows)]

    def drawn(self, random: np.random.Generator) -> Iterator[np.ndarray]:
        """Yield batches of ids of this popularity, of all workers together, without end."""
        while True:
            yield scattered(bounded_zipf(random.random(self.asked), self.rows, self.zipf), self.rows)


def cut(parts: Iterable[np.ndarray], size: int, rest: bool = False) -> Iterator[np.ndarray]:
    """Cut concatenated arrays into batches of `size`; with `rest`, the last may be smaller."""
    waiting = np.empty(0, np.int64)
    for part in parts:
        waiting = np.concatenate([waiting, np.asarray(part).reshape(-1)])
        while len(waiting) >= size:
            yield waiting[:size]
            waiting = waiting[size:]
    if rest and len(waiting):
        yield waiting


def most_rows(rows: float, workers: int) -> float:
    """Return the expected rows of the largest shard of a table that is sharded by hash.

    Example:
        >>> most_rows(1000, 1), round(most_rows(10**6, 4))
        (1000.0, 250833)
    """
    mean = rows / workers
    return mean + math.sqrt(2 * mean * math.log(workers)) if workers > 1 else mean


def exchanged_bytes(spec: Spec, rows: float) -> float:
    """Return the bytes exchanged for rows of other workers: ids, rows, ids again, and gradients."""
    return rows * (8 + spec.words.itemsize * spec.dim + 8 + 4 * spec.dim)


def curve_of(demand: Demand, sizes: Sequence[int], steps: int | None) -> MissRatioCurve:
    """Return the misses per batch of caches of these sizes, after some steps of training; None: `WINDOW`.

    A log with fewer batches is read once, and its second half counts. For drawn ids, the rows and new rows of a batch
    are computed. Caches miss the new rows, and further rows that the sampled caches find.
    """
    most = FINELY_SAMPLED if len(sizes) <= FEW_SIZES else MOST_SAMPLED
    sampler, steps = CurveSampler(sizes, most=most), steps or WINDOW
    counted = max(LEAST_COUNTED, steps // 8)
    ids_of_all = MOST_IDS * min(MOST_COUNTED, max(1, len(demand.members)))
    total = max(8, min(steps + counted // 2, ids_of_all // max(1, demand.asked)))
    seen = 0
    for ids in demand.batches(total):
        if seen == max(1, total - min(counted, total // 2)):
            sampler.forget_counts()
        sampler.see(ids)
        seen += 1
    if not seen:
        raise ArgumentError(
            f"the log of {demand.name!r} has fewer ids than one batch, {demand.positions}. Give a longer one, or plan "
            "for smaller batches."
        )
    found = sampler.curve()
    if not demand.is_drawn:
        return found
    rows, new = distinct(demand, 1), distinct(demand, steps + 0.5) - distinct(demand, steps - 0.5)
    misses = np.where(found.misses <= found.new, new, np.minimum(found.misses - found.new + new, rows))
    return replace(found, rows=rows, new=new, misses=misses, distinct=distinct(demand, steps))


def distinct(demand: Demand, batches: float) -> float:
    """Return the expected number of different rows in several batches of drawn ids."""
    if demand.members:
        return sum(distinct(each, batches) for each in demand.members)
    return expected_misses(demand.rows, demand.zipf, round(batches * demand.asked), 0) / demand.workers


def lasting(demand: Demand, curve: MissRatioCurve, slots: int) -> float:
    """Return the misses per batch of a cache after long training, once the cache has been full.

    A few hundred batches do not fill a large cache, and logs end. For drawn ids, the misses of the best cache are
    known. The policy's cache is assumed to be as much worse as at the sizes that were filled.
    """
    if not demand.is_drawn or demand.spec.rows is None:
        return curve.missed(slots)
    if slots >= demand.spec.rows:
        return 0.0
    best = [_best(demand, int(each)) for each in curve.slots]
    worse = [
        found / fewest
        for each, found, fewest in zip(curve.slots, curve.misses, best, strict=True)
        if each < curve.distinct * FILLED and fewest > 1
    ]
    return min(curve.rows, _best(demand, slots) * float(np.clip(np.median(worse), 1, WORST) if worse else USUAL))


def _best(demand: Demand, slots: int) -> float:
    if demand.members:
        own = best_split([(each.rows, each.zipf, each.positions) for each in demand.members], slots)
        return sum(_best(each, some) for each, some in zip(demand.members, own, strict=True))
    return expected_misses(demand.rows, demand.zipf, demand.asked, slots * demand.workers) / demand.workers


def in_groups(demands: Sequence[Demand]) -> list[Demand]:
    """Merge the demands of each group into one, in the order in which groups begin.

    Raises:
        ArgumentError: tables of a group differ in record layout, or one of them has its own ``memory``.
    """
    made: dict[tuple[str, str], list[Demand]] = {}
    for one in demands:
        made.setdefault(("table", one.name) if one.group is None else ("group", one.group), []).append(one)
    return [some[0] if kind == "table" else _pooled(name, some) for (kind, name), some in made.items()]


def _pooled(name: str, members: Sequence[Demand]) -> Demand:
    for one in members:
        if not alike(one.spec, members[0].spec):
            raise ArgumentError(
                f"group {name!r} of a plan must have tables of one dim, dtype and rule, with a number of rows, which "
                f"share a cache: {one.name!r} is not as {members[0].name!r}. Name another group for it."
            )
        if one.memory:
            raise ArgumentError(f"table {one.name!r} shares the memory of group {name!r}: leave its own out.")
    in_ram = 0 if any(one.memory == 0 for one in members) else None
    rows, positions = sum(one.spec.rows or 0 for one in members), sum(one.positions for one in members)
    spec = replace(members[0].spec, rows=rows)
    return Demand(name, spec, positions, memory=in_ram, group=name, members=tuple(members))


def alike(spec: Spec, other: Spec) -> bool:
    """Return whether two tables of a group share a cache."""
    return may_share(spec) and may_share(other) and are_alike(spec, other)


def read_demands(tables: Any, batch_size: int, zipf: float | None, logs: Mapping[str, Any]) -> list[Demand]:
    """Return the demands of the tables that a user describes.

    Args:
        tables: by name, each a dict of `FIELDS`, a `Spec`, or a `Table` or layer with a ``spec``.
        batch_size: samples of a batch; a sample has one id of each table, or ``ids``.
        zipf: the exponent of tables without their own.
        logs: ids of past batches, by table.

    Raises:
        ArgumentError: a description is wrong.
    """
    if not isinstance(tables, Mapping) or not tables:
        raise ArgumentError(f"`tables` of er.plan_tables must be a dict of tables by name: got {tables!r}.")
    unknown = [name for name in logs if name not in tables]
    if unknown:
        raise ArgumentError(f"`log` of er.plan_tables has ids of {unknown[0]!r}, and there is no such table.")
    return [_demand(str(name), one, batch_size, zipf, logs.get(name)) for name, one in tables.items()]


def _demand(name: str, given: Any, batch_size: int, zipf: float | None, log: Any) -> Demand:
    if not isinstance(given, Mapping):
        spec = given if isinstance(given, Spec) else getattr(given, "spec", None)
        if not isinstance(spec, Spec):
            raise ArgumentError(f"table {name!r} of er.plan_tables must be a dict, er.Spec or table: got {given!r}.")
        return Demand(name, spec, batch_size, ZIPF if zipf is None else zipf, log)
    for field in given:
        if field not in FIELDS:
            hint = did_you_mean(str(field), FIELDS)
            raise ArgumentError(f"table {name!r} has no {field!r}: what it may have is {', '.join(FIELDS)}.{hint}")
    rows = given.get("rows")
    shape = None if rows == "open" else rows, given.get("dim", DIM), given.get("dtype", "float32")
    spec = Spec(*shape, _rule(given), Zeros(), 0)
    per_sample, own = given.get("ids", 1), given.get("zipf", zipf)
    if isinstance(per_sample, bool) or not isinstance(per_sample, int | float) or per_sample <= 0:
        raise ArgumentError(f"`ids` of table {name!r} must be how many a sample has, above 0: got {per_sample!r}.")
    if own is not None and (isinstance(own, bool) or not isinstance(own, int | float) or not 0 <= own <= 4):
        raise ArgumentError(f"`zipf` of table {name!r} must be an exponent from 0 to 4: got {own!r}.")
    group = given.get("group")
    if group is not None and (not isinstance(group, str) or not group):
        raise ArgumentError(f"`group` of table {name!r} must be the name of a group: got {group!r}.")
    positions, memory = max(1, round(batch_size * per_sample)), _memory(name, given)
    return Demand(name, spec, positions, ZIPF if own is None else own, log, memory, group)


def _memory(name: str, given: Mapping[str, Any]) -> int | None:
    memory = given.get("memory")
    if memory is None or memory == IN_RAM:
        return None if memory is None else 0
    try:
        return parse_bytes(memory)
    except ArgumentError:
        raise ArgumentError(
            f'`memory` of table {name!r} must be "{IN_RAM}", or what it has on disk, such as "512MiB": got {memory!r}.'
        ) from None


def _rule(given: Mapping[str, Any]) -> Rule | None:
    rule = given.get("rule", "adam")
    if rule is None or isinstance(rule, Rule):
        return rule
    check_choice("rule", str(rule).lower(), RULE_NAMES)
    return RULE_NAMES[str(rule).lower()]()


HALVES = 10  # sizes of a GPU cache to compare, each half of the one before it
WAYS = 2  # a missed row comes over the bus, and the changed row that it replaces goes back


class DeviceShare(NamedTuple):
    """The part of a table that is in GPU memory.

    Attributes:
        device_memory: the value of ``device_memory=``.
        placement: layout of the table's rows with that value.
        misses: rows of a step that are not on device, so they come over the bus.
        bus_bytes: bytes over the bus in a step, both ways.
    """

    device_memory: int
    placement: DeviceLayout
    misses: float
    bus_bytes: float


def split_near(demands: Sequence[Demand], rows: Sequence[float], budget: int, steps: int | None) -> list[DeviceShare]:
    """Split a budget of GPU memory over tables in RAM, so that the bus carries least.

    Args:
        demands: of the tables.
        rows: different rows of a batch, of each.
        budget: bytes of GPU memory.
        steps: see `embedrock.planner.proposal.plan`.
    """
    options = [
        [SplitOption(way.placement.bytes, way.bus_bytes, way) for way in _ways(one, used, budget, steps)]
        for one, used in zip(demands, rows, strict=True)
    ]
    return [one.how for one in split(options, budget) or [some[0] for some in options]]


def _ways(demand: Demand, used: float, budget: int, steps: int | None) -> list[DeviceShare]:
    spec, ways = demand.spec, [_near(demand, 0, DeviceLayout("host", 0, 0), used)]
    if spec.rows is None or demand.members:  # rows are unknown in advance; a group has no such budget
        return ways
    sizes = sorted({min(budget, device_memory_for(spec, spec.rows)) >> k for k in range(HALVES)})
    placed = {size: choose(spec, size) for size in sizes if size}
    caches = [placement.near_rows for placement in placed.values() if placement.mode == "cached"]
    curve = curve_of(demand, caches, steps) if caches else None
    for size, placement in placed.items():
        if placement.mode == "device":
            ways.append(_near(demand, size, placement, 0.0))
        elif placement.mode == "cached" and curve is not None:
            room = placement.near_rows
            misses = lasting(demand, curve, room) if steps is None else curve.missed(room)
            ways.append(_near(demand, size, placement, misses))
    return ways


def _near(demand: Demand, size: int, placement: DeviceLayout, misses: float) -> DeviceShare:
    return DeviceShare(size, placement, misses, WAYS * misses * demand.spec.record_bytes)
