"""`plan`: which tier and how much RAM each table should have, and what a step will take then."""

from __future__ import annotations

import json
import keyword
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import numpy as np

from embedrock.errors import ArgumentError, EmbedrockError
from embedrock.machine.sizes import Size, format_bytes, parse_bytes
from embedrock.machine.vfs import BLOCK
from embedrock.planner import cost, peak
from embedrock.planner.cost import Work
from embedrock.planner.demand import (
    FINER,
    Demand,
    alike,
    curve_of,
    distinct,
    in_groups,
    lasting,
    memories,
    read_demands,
    slots_of,
)
from embedrock.planner.logs import log_then
from embedrock.planner.machine import Machine, load, measure, save
from embedrock.planner.near import GpuStep, Near, gpu_step, split_near
from embedrock.planner.sharing import exchange_seconds, sent_bytes
from embedrock.planner.split import Option, split
from embedrock.rules import RowwiseAdagrad
from embedrock.spec import Spec
from embedrock.store.runs import CRC_BYTES
from embedrock.tiers.curve import Curve
from embedrock.tiers.placing import place

DISK_TIMES = 2.6  # bytes of files for those of all records: a table while it is compacted, and its log
LOGGED = 1.5  # bytes of logs and base that rows are read from, for those of all records
DEPTH = 2  # batches that prefetch looks ahead
FEW = 16  # batches that tell how many rows one has
OVERLAPS = 0.05  # of the time, at least, that waiting for the disk takes where it pays to prefetch
UNIT = 1 << 20  # of ``memory=``
GROUP = "tables"  # the name of a group that a plan proposes
EXCHANGE = "exchange"  # of a step's seconds: with other workers
GROUPED = "after torch.distributed.init_process_group"


class NoPlanError(EmbedrockError, MemoryError):
    """No plan keeps the limits.

    Attributes:
        needed: what does, smallest change first: sizes by the name of the limit.
    """

    def __init__(self, text: str, needed: dict[str, int]) -> None:
        super().__init__(text)
        self.needed = needed


@dataclass(frozen=True)
class TablePlan:
    """What a table should be, or a group of tables, and what a step of it takes.

    Attributes:
        name: of the table or group.
        tier: "RAM" or "disk".
        memory: what to pass as ``memory=``; None for a table in RAM.
        ram_bytes: that it will take, at most.
        ram_then: that it takes after the steps asked for.
        disk_bytes: of files, at most.
        rows_used: different rows of a batch.
        misses: of them, those that are not in the cache.
        reads: of those, the ones that are read from disk: the others have no record yet.
        seconds: of a step, by the terms of the model, and "exchange", with other workers.
        demand: what it is asked for.
        left: rows that leave its cache in a step.
        fold_bytes: RAM to fold its logs, at most, and up to the steps asked for; one table does so at a time.
        sent_bytes: that a worker sends others in a step, and gets from them.
        near: what it has in GPU memory, where there is some to split.
    """

    name: str
    tier: str
    memory: int | None
    ram_bytes: int
    ram_then: int
    disk_bytes: int
    rows_used: float
    misses: float
    reads: float
    seconds: dict[str, float]
    demand: Demand = field(repr=False)
    left: float = 0.0
    fold_bytes: tuple[int, int] = (0, 0)
    sent_bytes: float = 0.0
    near: Near | None = None

    @property
    def code(self) -> str:
        """An expression that makes the table, or the group before it has tables; a layer, where workers share it."""
        files = [] if self.memory is None else [f'path="{self.name}.rock"', f'memory="{self.memory // UNIT}MiB"']
        if self.near is not None and self.near.placement.mode != "host":
            files.append(f'device_memory="{-(-self.near.device_memory // UNIT)}MiB"')
        if self.members:
            return f"er.Group({', '.join(files)})"
        spec = self.demand.spec
        if self.demand.workers > 1:
            dtype = [] if spec.dtype == "float32" else [f"dtype=torch.{spec.dtype}"]
            return f"ert.Embedding({', '.join([f'{self.demand.whole}, {spec.dim}', *dtype, 'sharded=True', *files])})"
        return f"er.Table({', '.join([*_arguments(spec), *files])})"

    @property
    def members(self) -> list[str]:
        """Names of the tables of a group."""
        return [one.name for one in self.demand.members]

    def lines(self, group: str) -> list[str]:
        """Return lines that make it; `group` is what a variable for a group is called."""
        if not self.members:
            return [f"{_identifier(self.name)} = {self.code}"]
        made = [f"{group} = {self.code}"]
        for one in self.demand.members:
            arguments = ", ".join([json.dumps(one.name, ensure_ascii=False), *_arguments(one.spec)])
            made.append(f"{_identifier(one.name)} = {group}.table({arguments})")
        return made


@dataclass(frozen=True)
class Smaller:
    """What a step takes where records are smaller, which changes results.

    Attributes:
        change: of tables: an argument of `er.Table`.
        record_bytes: of all tables' rows, one of each: with the change, and as they are.
        step_s: seconds of a step then, by the bytes of the records.
    """

    change: str
    record_bytes: tuple[int, int]
    step_s: float

    def __str__(self) -> str:
        part = self.record_bytes[0] / self.record_bytes[1]
        return f"{self.change}: {self.step_s * 1e3:.3g} ms, records of {part:.0%} of the bytes"


@dataclass(frozen=True)
class Proposal:
    """What `plan` proposes.

    Attributes:
        tables: each.
        step_s: seconds of a step, the dense model included.
        dense_s: of the dense model.
        depth: batches to look ahead by prefetch; 0: it does not pay.
        bound: what takes most of the time.
        peak_bytes: RAM of the process, at most.
        peak_then: its RAM at most up to the steps asked for.
        faster: what would make a step twice as fast; None: no amount of RAM.
        smaller: what a step takes with smaller records, where that is less; not what it does to the model's results.
        machine_time: when the machine was measured, seconds since 1970.
        workers: processes that share the tables; what is told is of one of them.
        gpu: seconds of a step of the tables in RAM on a GPU; None: there is none, or nobody measured it.
        gpu_step_s: seconds of a step with these tables on the GPU, and all else as in `step_s`; None: likewise.
    """

    tables: tuple[TablePlan, ...]
    step_s: float
    dense_s: float
    depth: int
    bound: str
    peak_bytes: int
    peak_then: int
    faster: str | None
    machine_time: float
    smaller: tuple[Smaller, ...] = ()
    workers: int = 1
    gpu: GpuStep | None = None
    gpu_step_s: float | None = None

    @property
    def sent_bytes(self) -> float:
        """Bytes that a worker sends others in a step."""
        return sum(one.sent_bytes for one in self.tables)

    @property
    def alone_s(self) -> float:
        """Seconds of a step without prefetch."""
        return sum(sum(one.seconds.values()) for one in self.tables) + self.dense_s

    @property
    def code(self) -> str:
        """Lines that make the tables."""
        taken = {_identifier(name) for one in self.tables for name in one.members or [one.name]}
        lines = [line for one in self.tables for line in one.lines(_free(_identifier(one.name), taken))]
        ahead = f"# prefetch(..., depth={self.depth}) reads rows while others are trained on"
        head = ["import embedrock as er", ""]
        if self.workers > 1:
            head = [
                "import torch",
                "import embedrock.torch as ert",
                "",
                f"# in each of {self.workers} processes, {GROUPED}",
            ]
        return "\n".join([*head, *lines, *([ahead] if self.depth else [])])

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        told = {name: value for name, value in vars(self).items() if name != "tables"}
        told["gpu"] = None if self.gpu is None else self.gpu._asdict()
        told["smaller"] = [vars(one) | {"record_bytes": [*one.record_bytes]} for one in self.smaller]
        tables = []
        for one in self.tables:
            fields = {name: value for name, value in vars(one).items() if name != "demand"}
            if one.near is not None:
                own_near = one.near._asdict() | {"placement": one.near.placement._asdict()}
                fields["near"] = own_near
            own = {"positions": one.demand.positions, "members": one.members, "code": one.code}
            tables.append(fields | own)
        return told | {"tables": tables, "code": self.code}


def _identifier(name: str) -> str:
    made = "".join(letter if letter.isalnum() else "_" for letter in name)
    return made if made.isidentifier() and not keyword.iskeyword(made) else f"t_{made}"


def _free(name: str, taken: set[str]) -> str:
    """Return a name that is not taken, which begins with `name`."""
    return name if name not in taken else _free(f"{name}_group", taken)


def _arguments(spec: Spec) -> list[str]:
    """Return the arguments that describe a table."""
    parts = [f"rows={spec.rows}", f"dim={spec.dim}"]
    parts += [] if spec.rule is None else [f"rule=er.{type(spec.rule).__name__}()"]
    return parts + ([] if spec.dtype == "float32" else [f'dtype="{spec.dtype}"'])


def plan(
    tables: Mapping[str, Any],
    batch_size: int,
    *,
    memory: Size | None = None,
    disk: Size | None = None,
    zipf: float | None = None,
    log: Mapping[str, Any] | None = None,
    dense_s: float = 0.0,
    workers: int = 1,
    steps: int | None = None,
    alone: bool = False,
    machine: Machine | None = None,
    device_memory: Size | None = None,
) -> Proposal:
    """Propose which tier and how much RAM each table should have, and tell what a training step takes then.

    Args:
        tables: by name, each a dict of ``rows`` (None for open ids), ``dim`` (64), ``rule`` ("adam"), ``dtype``
            ("float32"), ``ids`` of a sample (1), ``zipf``, ``memory`` and ``group``; or an `er.Spec`, a table, or a
            layer that has one.
        batch_size: samples of a batch.
        memory: RAM for the whole process, of which Python and libraries take their part; None: all there is.
        disk: room for files; None: no limit.
        zipf: exponent of the popularity of ids, of tables that neither say theirs nor have a log.
        log: ids of the past, by table: an array, or an iterable of arrays.
        dense_s: seconds of a step of the rest of the model, where they are known.
        workers: processes that share each table by id, each with batches of that size; what is told is of one of them.
        steps: how long the tables have been trained when the step that is told is made. None: long, so that each row
            that is missed is read; with caches as a few hundred batches have filled them.
        alone: whether each table that names no ``group`` has its own files and memory. Otherwise those on disk that
            are laid out alike are one group, whose cache they share.
        machine: what to reckon with; None: what `embedrock machine` measured, or measures now.
        device_memory: of a GPU, to be split over tables in RAM, whose rows it then keeps. What crosses the bus is
            told and, where a GPU was measured, a step on it. Tables on disk get none: give them one yourself.

    Raises:
        ArgumentError: something that cannot be.
        NoPlanError: nothing keeps the limits; it says what would.
        MachineFileError: what was measured cannot be read.

    Example:
        >>> import embedrock as er
        >>> from embedrock.planner.machine import EXAMPLE
        >>> tables = {"user": {"rows": 10**6, "dim": 16}, "item": {"rows": 1000, "dim": 16}}
        >>> proposed = er.plan(tables, 256, memory="260MiB", machine=EXAMPLE, steps=20)
        >>> [table.tier for table in proposed.tables]
        ['disk', 'RAM']
    """
    for name, value in (("batch_size", batch_size), ("workers", workers), ("steps", 1 if steps is None else steps)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(f"`{name}` of er.plan must be a whole number above 0: got {value!r}.")
    if not 0 <= dense_s < math.inf:
        raise ArgumentError(f"`dense_s` of er.plan must be seconds, 0 or more: got {dense_s!r}.")
    logs = {name: _repeatable(one) for name, one in (log or {}).items()}
    demands = read_demands(tables, batch_size, zipf, logs)
    if workers > 1:
        demands, alone = _of_one_worker(demands, workers), True
    known = machine or _measured()
    limit = min(known.ram_bytes, parse_bytes(memory) if memory is not None else known.ram_bytes)
    near = None if device_memory is None else parse_bytes(device_memory, "device_memory")
    files, curves = None if disk is None else parse_bytes(disk, "disk"), dict[Any, Curve]()

    def proposed(demands: Sequence[Demand]) -> Proposal:
        units = in_groups(demands)
        return _Search(units, _all_ways(units, known, limit, steps, curves), known, dense_s).propose(limit, files)

    def best(demands: Sequence[Demand]) -> Proposal:
        found = proposed(demands)
        grouped = demands if alone else _grouped(demands, found)
        if grouped is demands:
            return found
        try:
            return proposed(grouped)
        except NoPlanError:  # a batch of a group is used at once, which takes more RAM than that of a table
            return found

    found = best(demands)
    found = replace(found, smaller=tuple(_smaller(demands, found.step_s, best)), workers=workers)
    return found if near is None else _with_near(found, near, steps, known)


def _with_near(found: Proposal, budget: int, steps: int | None, machine: Machine) -> Proposal:
    """Return a proposal with a part of so much GPU memory for each table in RAM."""
    in_ram = [one for one in found.tables if one.tier == "RAM"]
    parts = iter(split_near([one.demand for one in in_ram], [one.rows_used for one in in_ram], budget, steps))
    tables = tuple(replace(one, near=next(parts)) if one.tier == "RAM" else one for one in found.tables)
    found = replace(found, tables=tables)
    if not machine.gpus or not in_ram:
        return found
    there = [(one.demand, one.rows_used, one.near) for one in tables if one.near is not None]
    taken, on_cpu = gpu_step(there, machine.gpus[0]), sum(sum(one.seconds.values()) for one in in_ram)
    return replace(found, gpu=taken, gpu_step_s=found.step_s - on_cpu + taken.total)


def _smaller(demands: Sequence[Demand], step: float, best: Callable[[Sequence[Demand]], Proposal]) -> Iterator[Smaller]:
    """Go through the changes that make records smaller and a step faster, by what is best for tables then."""
    lean = RowwiseAdagrad()
    changes: dict[str, Callable[[Spec], Spec]] = {
        'dtype="bfloat16"': lambda spec: replace(spec, dtype="bfloat16"),
        "rule=er.RowwiseAdagrad()": lambda spec: spec if spec.rule is None else spec.with_rule(lean),
    }
    for change, made in changes.items():
        leaner = [replace(one, spec=_leaner(one.spec, made(one.spec))) for one in demands]
        now, then = (sum(one.spec.record_bytes for one in some) for some in (demands, leaner))
        if then < now and (taken := best(leaner).step_s) < (1 - OVERLAPS) * step:
            yield Smaller(change, (then, now), taken)


def _leaner(spec: Spec, other: Spec) -> Spec:
    return other if other.record_bytes < spec.record_bytes else spec


def _grouped(demands: Sequence[Demand], found: Proposal) -> Sequence[Demand]:
    """Return the demands with a group for those that a proposal has alone on disk, where some are laid out alike."""
    on_disk = [one.demand for one in found.tables if one.tier == "disk" and one.demand.group is None]
    layouts: list[list[Demand]] = []
    for one in on_disk:
        if one.memory is None and one.spec.rows is not None:
            like = next((some for some in layouts if alike(some[0].spec, one.spec)), None)
            layouts.append([one]) if like is None else like.append(one)
    several = [some for some in layouts if len(some) > 1]
    taken = {one.group for one in demands} | {one.name for one in found.tables if one.tier == "disk"}
    names: dict[str, str] = {}
    for some in several:
        spec = some[0].spec
        name = _free(GROUP if len(several) == 1 else f"{GROUP}_{spec.dim}", {*map(str, taken)})
        taken.add(name)
        names |= {one.name: name for one in some}
    return [replace(one, group=names.get(one.name, one.group)) for one in demands] if names else demands


class _Kept:
    """What an iterator gave, for whoever goes through it again."""

    def __init__(self, source: Iterator[np.ndarray]) -> None:
        self._source, self._parts = source, list[np.ndarray]()

    def __iter__(self) -> Iterator[np.ndarray]:
        yield from self._parts
        for part in self._source:
            self._parts.append(part)
            yield part


def _repeatable(log: Any) -> Iterable[np.ndarray]:
    if isinstance(log, np.ndarray):
        return [log]
    return _Kept(log) if isinstance(log, Iterator) else log


def _of_one_worker(demands: Sequence[Demand], workers: int) -> list[Demand]:
    """Return what one of several processes is asked for."""
    for one in demands:
        if one.group is not None:
            raise ArgumentError(
                f"table {one.name!r} of er.plan is in group {one.group!r}, and workers share tables, no groups yet: "
                f"leave `group` out, or plan for one worker instead of {workers}."
            )
    return [one.for_one_of(workers) for one in demands]


def _measured() -> Machine:
    known = load()
    if known is None:
        save(known := measure("."))
    return known


def fixed_bytes(demands: Sequence[Demand], machine: Machine, used: Sequence[float], any_on_disk: bool) -> int:
    """Return the RAM that a process takes besides its tables: Python, libraries, and what a batch needs.

    Args:
        demands: of the tables.
        machine: what a process takes without tables.
        used: different rows of a batch, for each.
        any_on_disk: whether one of the tables is.
    """
    batches = [peak.Batch(one.spec, one.positions, rows) for one, rows in zip(demands, used, strict=True)]
    return peak.besides(machine.base_bytes, batches, any_on_disk)


# ---------------------------------------------------------------- one table


def _all_ways(
    demands: Sequence[Demand], machine: Machine, limit: int, steps: int | None, curves: dict[Any, Curve]
) -> list[list[TablePlan]]:
    """Return the ways for each table to be. Only where tables do not fit together is any of them looked at on disk.

    Args:
        demands, machine, limit, steps: see `plan`.
        curves: that were made before; those made are added. They are the same whatever the bytes of a record.
    """
    in_ram = [_in_ram(one) for one in demands]
    needed = fixed_bytes(demands, machine, [one.positions for one in demands], False)
    all_fit = None not in in_ram and needed + sum(filter(None, in_ram)) <= limit
    small = {ram for ram in in_ram if ram is not None and ram <= peak.FITS_BYTES}
    small_fit = sum(ram for ram in in_ram if ram in small) <= (limit - needed) // 2
    made = []
    for one, ram in zip(demands, in_ram, strict=True):
        stays = all_fit or (small_fit and ram in small)
        slots = _slots(one, 0 if stays else limit)
        names = tuple(each.name for each in one.members)
        key = (one.spec.rows, one.spec.dim, one.positions, one.zipf, id(one.log), one.memory, names, bool(slots))
        if key not in curves:
            rooms = [*slots.values()]
            curves[key] = curve_of(one, [*rooms[::FINER], *rooms[-1:]], steps if rooms else steps or FEW)
        made.append(_Ways(one, machine, curves[key], steps, Step.of(demands)).ways(slots))
    return made


class Step(NamedTuple):
    """What a step has of all tables.

    Attributes:
        tables: how many.
        batch_bytes: of the values of a batch.
    """

    tables: int
    batch_bytes: float

    @classmethod
    def of(cls, demands: Sequence[Demand]) -> Step:
        """Return what a step of some tables has."""
        return cls(len(demands), sum(one.positions * one.spec.dim * 4 for one in demands))


def _in_ram(demand: Demand) -> int | None:
    """Return the RAM that a table takes there at most; None where nobody knows how many rows there will be."""
    return None if demand.spec.rows is None else _ram_of(demand, demand.spec.rows)


def _ram_of(demand: Demand, rows: float) -> int:
    """Return the RAM that it takes there with so many rows."""
    return (peak.in_group if demand.members else peak.in_ram)(demand.spec, rows)


def _slots(demand: Demand, most: int) -> dict[int, int]:
    """Return rows in the cache by ``memory=`` on disk; none up to `most` of 0."""
    is_pool = bool(demand.members)
    if demand.memory:
        return {demand.memory: slots_of(demand.spec, demand.memory)}
    if not most or demand.memory == 0:
        return {}
    sizes = {-(-nbytes // UNIT) * UNIT for nbytes in memories(demand.spec, demand.positions, most, is_pool=is_pool)}
    return {memory: slots_of(demand.spec, memory, is_pool) for memory in sorted(sizes)}


@dataclass(frozen=True)
class _Ways:
    """What each way for a table to be takes.

    Attributes:
        demand: what it is asked for.
        machine: what to reckon with.
        curve: of its caches.
        steps: see `plan`.
        step: what it has of all tables.
    """

    demand: Demand
    machine: Machine
    curve: Curve
    steps: int | None
    step: Step

    def ways(self, slots: Mapping[int, int]) -> list[TablePlan]:
        """Return the ways: in RAM where it may be, and on disk with several values of ``memory=``, of rows in cache."""
        in_ram = not self.demand.memory and (self.demand.spec.rows is not None or self.demand.log is not None)
        made = [self._in_ram()] if in_ram else []  # else nobody knows how many rows there will be
        return [*made, *(self._on_disk(memory, room) for memory, room in slots.items())]

    @property
    def _most(self) -> float:
        """Rows that it may have."""
        rows = self.demand.spec.rows
        return self.curve.distinct if rows is None else float(rows)

    @property
    def _rows(self) -> float:
        """Rows that it has after the steps asked for."""
        return self._most if self.steps is None else self.curve.distinct

    @property
    def _work(self) -> Work:
        spec, new = self.demand.spec, 0.0 if self.steps is None else self.curve.new
        return Work(self.demand.positions, self.curve.rows, spec.dim, spec.record_bytes, new, **self.step._asdict())

    def _in_ram(self) -> TablePlan:
        work = self._work
        work = work._replace(grown_bytes=peak.grown(self.demand.spec, None, self._rows, work.new))
        ram = _ram_of(self.demand, self._most), _ram_of(self.demand, self._rows)
        return self._told(work, None, ram)

    def _on_disk(self, memory: int, room: int) -> TablePlan:
        spec, curve, work, is_pool = self.demand.spec, self.curve, self._work, bool(self.demand.members)
        is_whole = spec.rows is not None and room >= spec.rows  # no row leaves then
        if self.steps is None:
            misses = left = lasting(self.demand, curve, room)
            logged = math.inf
        else:
            misses, left = curve.new if is_whole else curve.missed(room), curve.left(room)
            logged = curve.had_left(room)
        is_direct = is_whole and not is_pool  # and no slot is looked for
        folds = [peak.folding(spec, memory, *one, is_pool) for one in ((self._most, math.inf), (self._rows, logged))]
        most_fold, fold = (0, 0) if is_direct else folds
        stride = spec.record_bytes + CRC_BYTES
        is_compacted = self.steps is None or fold > 0
        stored = self._rows * LOGGED if self.steps is None else min(logged, self._rows - room) if fold else logged
        work = work._replace(
            on_disk=not is_direct,
            reads=max(0.0, misses - work.new),
            spilled=left,
            file_bytes=max(stored * stride, 1.0),
            run_bytes=cost.run_bytes(self._rows, spec.record_bytes) if is_compacted else max(stored * stride, 1.0),
            is_written=not is_compacted,
            grown_bytes=peak.grown(spec, memory, self._rows, work.new, left),
            slots=room,
        )
        if self.steps is not None and fold:
            work = self._with_log(work, self.steps, room, memory)
        most = peak.most_on_disk(spec, memory, is_pool)
        then = most if self.steps is None else peak.on_disk(spec, memory, self._rows, logged, is_pool)
        way = self._told(work, memory, (max(most, then), then))
        return replace(
            way,
            misses=misses,
            disk_bytes=int(self._most * stride * DISK_TIMES),
            left=left,
            fold_bytes=(most_fold, fold),
        )

    def _with_log(self, work: Work, steps: int, room: int, memory: int) -> Work:
        """Return the work of a table whose logs are folded, with what it reads from the log that is left."""
        placement = place(self.demand.spec, memory, "the table", is_pool=bool(self.demand.members))
        folded, stride = peak.indexed_rows(placement), work.record_bytes + CRC_BYTES
        log = log_then(self._seen, steps, room, folded, work.reads)
        work = work._replace(cold=max(0.0, 1 - log.base_reads * BLOCK / (folded * stride)))  # each read brings a page
        if not log.share:
            return work
        nbytes = log.steps * work.spilled * stride
        return work._replace(log_reads=log.share * work.reads, log_bytes=nbytes, is_written=log.is_written)

    def _seen(self, batches: float) -> float:
        """Return how many different rows so many batches have; by Heaps' law, where all that is known is a log."""
        if self.demand.is_drawn or not self.steps:
            return distinct(self.demand, batches)
        exponent = min(1.0, self.curve.new * self.steps / self.curve.distinct)
        return self.curve.distinct * (batches / self.steps) ** exponent

    def _told(self, work: Work, memory: int | None, ram: tuple[int, int]) -> TablePlan:
        seconds = cost.seconds_of(work, self.machine.disk, self.machine.constants)
        tier, sent = "RAM" if memory is None else "disk", sent_bytes(self.demand)
        if sent:
            seconds[EXCHANGE] = exchange_seconds(sent, self.machine.network)
        told = TablePlan(self.demand.name, tier, memory, *ram, 0, work.rows, 0.0, work.reads, seconds, self.demand)
        return replace(told, sent_bytes=sent)


# ---------------------------------------------------------------- all of them


@dataclass(frozen=True)
class _Search:
    """Looks for the ways in which tables fit together.

    Attributes:
        demands: of the tables.
        ways: of each.
        machine: what to reckon with.
        dense_s: of a step of the dense model.
    """

    demands: Sequence[Demand]
    ways: Sequence[Sequence[TablePlan]]
    machine: Machine
    dense_s: float

    @property
    def _fixed_bytes(self) -> int:
        used = [ways[0].rows_used for ways in self.ways]
        return fixed_bytes(self.demands, self.machine, used, self._any_on_disk) + self._fold_bytes

    @property
    def _fold_bytes(self) -> int:
        return max(one.fold_bytes[0] for ways in self.ways for one in ways)

    @property
    def _any_on_disk(self) -> bool:
        return any(one.tier == "disk" for ways in self.ways for one in ways)

    def propose(self, limit: int, disk: int | None) -> Proposal:
        """Return what keeps the limits and takes the least time."""
        chosen = self._chosen(limit)
        if chosen is None:
            self._refuse_memory(limit)
        needed = sum(one.disk_bytes for one in chosen)
        if disk is not None and needed > disk:
            raise NoPlanError(
                f"the tables that do not fit {format_bytes(limit)} of RAM need {format_bytes(needed)} of files: "
                f"{format_bytes(disk)} may be used. --disk {needed} is enough; or use a smaller dim, dtype or rule.",
                {"disk": needed},
            )
        step, depth, bound = self._step(chosen)
        most = self._fixed_bytes + sum(one.ram_bytes for one in chosen)
        then = self._fixed_bytes + sum(one.ram_then for one in chosen)
        then += max(one.fold_bytes[1] for one in chosen) - self._fold_bytes
        if self._any_on_disk and not any(one.left for one in chosen):
            then -= peak.SPILL_BYTES
        faster = self._faster(step, limit)
        return Proposal(tuple(chosen), step, self.dense_s, depth, bound, most, then, faster, self.machine.time)

    def _chosen(self, limit: int) -> list[TablePlan] | None:
        options = [[Option(way.ram_bytes, sum(way.seconds.values()), way) for way in ways] for ways in self.ways]
        found = split(options, limit - self._fixed_bytes)
        return None if found is None else [one.how for one in found]

    def _refuse_memory(self, limit: int) -> NoReturn:
        least = self._fixed_bytes + sum(min(way.ram_bytes for way in ways) for ways in self.ways)
        raise NoPlanError(
            f"the tables do not fit {format_bytes(limit)} of RAM, not even on disk: the process takes "
            f"{format_bytes(self._fixed_bytes)} besides them, and each cache must hold two batches. "
            f"--memory {-(-least // UNIT)}MiB is enough; or use smaller batches.",
            {"memory": least},
        )

    def _step(self, chosen: Sequence[TablePlan]) -> tuple[float, int, str]:
        """Return the seconds of a step, how far to look ahead, and what takes most of the time."""
        parts = dict.fromkeys(KINDS.values(), 0.0)
        for one in chosen:
            for term, taken in one.seconds.items():
                parts[KINDS[term]] += taken
        parts["the dense model"] = self.dense_s
        bound = max(parts, key=lambda name: parts[name])
        total, waiting = sum(parts.values()), parts["waiting for the disk"]
        depth = DEPTH if waiting > OVERLAPS * total else 0
        return (max(waiting, total - waiting) if depth else total), depth, bound

    def _faster(self, step: float, limit: int) -> str | None:
        """Return how much RAM makes a step twice as fast; None where no amount does."""
        for times in (1.25, 1.5, 2, 3, 4, 6, 8, 16, 32, 64):
            chosen = self._chosen(int(limit * times))
            if chosen is not None and self._step(chosen)[0] <= step / 2:
                more = self._fixed_bytes + sum(one.ram_bytes for one in chosen)
                return f"--memory {-(-more // UNIT)}MiB"
        return None


KINDS = dict.fromkeys(cost.TERMS, "bringing rows into caches") | {EXCHANGE: "talking to other workers"}
for _kind, _names in {
    "calls": ("first", "next", "first_disk", "next_disk"),
    "moving rows": ("position", "position_byte", "cold_byte", "row", "row_byte"),
    "waiting for the disk": ("read_call", "reader", "cached_request", "disk_read", "written_read"),
}.items():
    KINDS |= dict.fromkeys(_names, _kind)
