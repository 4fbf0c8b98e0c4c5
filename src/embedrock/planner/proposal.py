"""`plan_tables`: a tier and a ``memory=`` for each table, with the resulting RAM and reads per step."""

from __future__ import annotations

import contextlib
import json
import keyword
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from embedrock.errors import ArgumentError, EmbedrockError
from embedrock.io.probe import random_reads
from embedrock.optimizers import RowwiseAdagrad
from embedrock.planner import peak
from embedrock.planner.demand import (
    FINER,
    UNIT,
    Demand,
    DeviceShare,
    alike,
    curve_of,
    in_groups,
    lasting,
    read_demands,
    split_near,
)
from embedrock.planner.machine import Machine, this_machine
from embedrock.planner.split import SplitOption, split
from embedrock.spec.spec import Spec
from embedrock.storage.backend import RamLayout
from embedrock.storage.miss_ratio_curve import MissRatioCurve
from embedrock.store.segments import CRC_BYTES
from embedrock.system.sizes import Size, format_bytes, parse_bytes

DISK_TIMES = 2.6  # bytes of files over those of all records: a table during compaction, and its log
DEPTH = 2  # batches that prefetch looks ahead
FEW = 16  # batches to estimate the rows of one
WORTHWHILE = 0.05  # least share of a step's reads that smaller records must save
ON_DISK = 1e-3  # rows of a step that a table in RAM is worth: it is in RAM if it fits
GROUP = "tables"  # the name of a group that a plan proposes
GROUPED = "after torch.distributed.init_process_group"


class NoPlanError(EmbedrockError, MemoryError):
    """An error: no plan keeps the limits.

    Attributes:
        needed: sufficient sizes by name of the limit, smallest change first.
    """

    def __init__(self, text: str, needed: dict[str, int]) -> None:
        super().__init__(text)
        self.needed = needed

    def __reduce__(self) -> tuple[type, tuple[str, dict[str, int]]]:
        return type(self), (str(self), self.needed)


@dataclass(frozen=True)
class TablePlan:
    """The proposal for a table, or for a group of tables.

    Attributes:
        name: of the table or group.
        tier: "RAM" or "disk".
        memory: the value of ``memory=``; None for a table in RAM.
        ram_bytes: RAM at most.
        ram_then: RAM after the given steps.
        disk_bytes: of files, at most.
        rows_used: different rows of a batch.
        misses: of these, rows that are not in the cache.
        reads: of the misses, rows to read from disk: the others have no record yet.
        demand: the table and its ids.
        left: rows that leave the cache in a step.
        fold_bytes: RAM to merge its logs: maximum, and up to the given steps. One table at a time merges.
        near: its part of GPU memory; None without ``device_memory=``.
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
    demand: Demand = field(repr=False)
    left: float = 0.0
    fold_bytes: tuple[int, int] = (0, 0)
    near: DeviceShare | None = None

    @property
    def sent_bytes(self) -> float:
        """Bytes that a worker sends others in a step, and gets from them."""
        return self.demand.sent_bytes

    @property
    def members(self) -> list[str]:
        """Names of the tables of a group."""
        return [one.name for one in self.demand.members]

    @property
    def code(self) -> str:
        """Expression that makes the table, or the group without its tables; a layer, if workers share it."""
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

    def lines(self, group: str) -> list[str]:
        """Return lines that make the table or group; `group` is the variable of a group."""
        if not self.members:
            return [f"{_identifier(self.name)} = {self.code}"]
        made = [f"{group} = {self.code}"]
        for one in self.demand.members:
            arguments = ", ".join([json.dumps(one.name, ensure_ascii=False), *_arguments(one.spec)])
            made.append(f"{_identifier(one.name)} = {group}.table({arguments})")
        return made

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        own = {name: value for name, value in vars(self).items() if name != "demand"}
        if self.near is not None:
            own["near"] = self.near._asdict() | {"placement": self.near.placement._asdict()}
        more = {name: getattr(self, name) for name in ("sent_bytes", "members", "code")}
        return own | more | {"positions": self.demand.positions}


@dataclass(frozen=True)
class Smaller:
    """The reads of a step with smaller records, which change the results of training.

    Attributes:
        change: of tables: an argument of `er.Table`.
        record_bytes: of all tables' rows, one of each: with the change, and without.
        reads: rows that a step reads with the change.
    """

    change: str
    record_bytes: tuple[int, int]
    reads: float

    def __str__(self) -> str:
        part = self.record_bytes[0] / self.record_bytes[1]
        return f"{self.change}: {self.reads:,.0f} reads, records of {part:.0%} of the bytes"


@dataclass(frozen=True)
class Proposal:
    """The result of `plan_tables`.

    Attributes:
        tables: each table, or group.
        peak_bytes: RAM of the process, at most.
        peak_then: RAM of the process at most, up to the given steps.
        faster: the RAM that halves the reads of a step; None: nothing is read, or no amount of RAM does.
        smaller: the reads of a step with smaller records, if they are fewer.
        workers: processes that share the tables; all numbers are of one of them.
        reads_per_s: random reads a second of the disk; None: nothing is read, or the disk could not be probed.
    """

    tables: tuple[TablePlan, ...]
    peak_bytes: int
    peak_then: int
    faster: str | None = None
    smaller: tuple[Smaller, ...] = ()
    workers: int = 1
    reads_per_s: float | None = None

    @property
    def reads(self) -> float:
        """Rows that a step reads from disk."""
        return sum(one.reads for one in self.tables)

    @property
    def bound_s(self) -> float | None:
        """Least seconds of a step, for its reads; None: the disk could not be probed."""
        if not self.reads:
            return 0.0
        return None if self.reads_per_s is None else self.reads / self.reads_per_s

    @property
    def depth(self) -> int:
        """Batches to look ahead by prefetch; 0: nothing is read."""
        return DEPTH if self.reads else 0

    @property
    def sent_bytes(self) -> float:
        """Bytes that a worker sends others in a step."""
        return sum(one.sent_bytes for one in self.tables)

    @property
    def code(self) -> str:
        """Lines that make the tables."""
        taken = {_identifier(name) for one in self.tables for name in one.members or [one.name]}
        lines = [line for one in self.tables for line in one.lines(_free(_identifier(one.name), taken))]
        ahead = f"# prefetch(..., depth={self.depth}) reads rows while others are trained on"
        head = ["import embedrock as er", ""]
        if self.workers > 1:
            note = f"# in each of {self.workers} processes, {GROUPED}"
            head = ["import torch", "import embedrock.torch as ert", "", note]
        return "\n".join([*head, *lines, *([ahead] if self.depth else [])])

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        own = {name: getattr(self, name) for name in ("reads", "bound_s", "depth", "sent_bytes", "code")}
        smaller = [vars(one) | {"record_bytes": [*one.record_bytes]} for one in self.smaller]
        return vars(self) | own | {"smaller": smaller, "tables": [one.to_json() for one in self.tables]}


def _identifier(name: str) -> str:
    made = "".join(letter if letter.isalnum() else "_" for letter in name)
    return made if made.isidentifier() and not keyword.iskeyword(made) else f"t_{made}"


def _free(name: str, taken: set[str]) -> str:
    return name if name not in taken else _free(f"{name}_group", taken)


def _arguments(spec: Spec) -> list[str]:
    parts = [f"rows={spec.rows}", f"dim={spec.dim}"]
    parts += [] if spec.rule is None else [f"rule=er.{type(spec.rule).__name__}()"]
    return parts + ([] if spec.dtype == "float32" else [f'dtype="{spec.dtype}"'])


def plan_tables(
    tables: Mapping[str, Any],
    batch_size: int,
    *,
    memory: Size | None = None,
    disk: Size | None = None,
    zipf: float | None = None,
    log: Mapping[str, Any] | None = None,
    workers: int = 1,
    steps: int | None = None,
    alone: bool = False,
    machine: Machine | None = None,
    device_memory: Size | None = None,
    folder: str | os.PathLike[str] = ".",
) -> Proposal:
    """Propose a tier and a ``memory=`` for each table, so that a training step reads as few rows as possible.

    Args:
        tables: by name, each a dict. Keys are ``rows`` (None for open ids), ``dim`` (64), ``rule`` ("adam"), ``dtype``
            ("float32"), ``ids`` of a sample (1), ``zipf``, ``memory`` and ``group``. Or each is an `er.Spec`, a table,
            or a layer with a spec.
        batch_size: samples of a batch.
        memory: RAM for the whole process, including Python and libraries; None: all available RAM.
        disk: room for files; None: no limit.
        zipf: exponent of the popularity of ids, for tables that have neither their own nor a log.
        log: ids of the past, by table: an array, or an iterable of arrays.
        workers: processes that share each table by id, each with batches of that size; results are of one of them.
        steps: number of steps before the step whose reads are counted. None: enough that each missed row is read, with
            caches as a few hundred batches have filled them.
        alone: whether each table without a ``group`` has its own files and memory. Otherwise tables on disk with one
            record layout are one group, and share its cache.
        machine: the machine to plan for; None: this one, which takes some seconds to measure.
        device_memory: GPU memory to split over tables in RAM, which keeps their rows. Tables on disk get none.
        folder: folder of tables on disk. The disk is probed for at most 3 seconds if tables read from it.

    Raises:
        ArgumentError: an argument is wrong.
        NoPlanError: nothing keeps the limits; the error names sufficient limits.

    Example:
        >>> import embedrock as er
        >>> from embedrock.planner.machine import EXAMPLE
        >>> tables = {"user": {"rows": 10**6, "dim": 16}, "item": {"rows": 1000, "dim": 16}}
        >>> proposed = er.plan_tables(tables, 256, memory="260MiB", machine=EXAMPLE)
        >>> [table.tier for table in proposed.tables]
        ['disk', 'RAM']
    """
    for name, value in (("batch_size", batch_size), ("workers", workers), ("steps", 1 if steps is None else steps)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(f"`{name}` of er.plan_tables must be a whole number above 0: got {value!r}.")
    if not os.path.isdir(folder):
        raise ArgumentError(f"`folder` of er.plan_tables must be a folder that exists: got {str(folder)!r}.")
    logs = {name: _KeptLog(one) if isinstance(one, Iterator) else one for name, one in (log or {}).items()}
    logs = {name: [one] if isinstance(one, np.ndarray) else one for name, one in logs.items()}
    demands = read_demands(tables, batch_size, zipf, logs)
    near = None if device_memory is None else parse_bytes(device_memory, "device_memory")
    files = None if disk is None else parse_bytes(disk, "disk")
    ram = None if memory is None else parse_bytes(memory)
    if workers > 1:
        demands, alone = _of_one_worker(demands, workers), True
    machine = machine or this_machine()
    limit = machine.ram_bytes if ram is None else min(ram, machine.ram_bytes)
    planner = _Planner(machine.base_bytes, limit, files, steps, alone)
    found = planner.best(demands)
    found = replace(found, smaller=tuple(planner.smaller(demands, found.reads)), workers=workers)
    if found.reads:
        with contextlib.suppress(OSError):  # read-only, or full: a plan has no bound then
            found = replace(found, reads_per_s=machine.reads_per_s or random_reads(folder))
    if near is None:
        return found
    in_ram = [one for one in found.tables if one.tier == "RAM"]
    parts = iter(split_near([one.demand for one in in_ram], [one.rows_used for one in in_ram], near, steps))
    placed = [replace(one, near=next(parts)) if one.tier == "RAM" else one for one in found.tables]
    return replace(found, tables=tuple(placed))


class _KeptLog:
    """The parts of an iterator, kept for further iterations."""

    def __init__(self, source: Iterator[np.ndarray]) -> None:
        self._source, self._parts = source, list[np.ndarray]()

    def __iter__(self) -> Iterator[np.ndarray]:
        yield from self._parts
        for part in self._source:
            self._parts.append(part)
            yield part


def _of_one_worker(demands: Sequence[Demand], workers: int) -> list[Demand]:
    for one in demands:
        if one.group is not None:
            raise ArgumentError(
                f"table {one.name!r} of er.plan_tables is in group {one.group!r}, and workers share tables, no groups "
                f"yet: leave `group` out, or plan for one worker instead of {workers}."
            )
    return [one.for_one_of(workers) for one in demands]


# ---------------------------------------------------------------- all tables


@dataclass(frozen=True)
class _Planner:
    """Finder of the best proposal within limits.

    Attributes:
        base_bytes: RAM of a process without tables.
        limit: RAM of the process.
        files: bytes of files; None: no limit.
        steps, alone: see `plan_tables`.
        curves: curves of tables, keyed without the size of a record, which does not change them.
    """

    base_bytes: int
    limit: int
    files: int | None
    steps: int | None
    alone: bool
    curves: dict[Any, MissRatioCurve] = field(default_factory=dict)

    def best(self, demands: Sequence[Demand]) -> Proposal:
        """Return the proposal that reads least. Tables on disk are grouped if that keeps the limits."""
        found = self._proposed(demands)
        grouped = demands if self.alone else _grouped(demands, found)
        if grouped is demands:
            return found
        try:
            return self._proposed(grouped)
        except NoPlanError:  # a group's batch is processed at once, which takes more RAM than a table's
            return found

    def smaller(self, demands: Sequence[Demand], reads: float) -> Iterator[Smaller]:
        """Yield the changes that make records smaller and save reads, each with the best proposal for it."""
        lean = RowwiseAdagrad()
        changes: dict[str, Callable[[Spec], Spec]] = {
            'dtype="bfloat16"': lambda spec: replace(spec, dtype="bfloat16"),
            "rule=er.RowwiseAdagrad()": lambda spec: spec if spec.rule is None else spec.with_rule(lean),
        }
        for change, made in changes.items() if reads else ():
            leaner = [
                replace(one, spec=min(one.spec, made(one.spec), key=lambda spec: spec.record_bytes)) for one in demands
            ]
            now, then = (sum(one.spec.record_bytes for one in some) for some in (demands, leaner))
            if then < now and (left := self.best(leaner).reads) < (1 - WORTHWHILE) * reads:
                yield Smaller(change, (then, now), left)

    def _proposed(self, demands: Sequence[Demand]) -> Proposal:
        units = in_groups(demands)
        ways = self._ways(units)
        every = [way for some in ways for way in some]
        used, fold = [some[0].rows_used for some in ways], max(way.fold_bytes[0] for way in every)
        fixed = fold + peak.besides(self.base_bytes, units, used, any(way.tier == "disk" for way in every))
        chosen = _chosen(ways, self.limit - fixed) or self._refuse_memory(ways, fixed)
        self._check_files(sum(way.disk_bytes for way in chosen))
        most, then = (fixed + sum(getattr(way, name) for way in chosen) for name in ("ram_bytes", "ram_then"))
        then += max(way.fold_bytes[1] for way in chosen) - fold
        if any(way.tier == "disk" for way in every) and not any(way.left for way in chosen):
            then -= peak.SPILL_BYTES
        return Proposal(tuple(chosen), most, then, self._faster(ways, fixed, sum(way.reads for way in chosen)))

    def _faster(self, ways: Sequence[Sequence[TablePlan]], fixed: int, reads: float) -> str | None:
        """Return the RAM that halves the reads of a step; None if no amount does."""
        for times in (1.25, 1.5, 2, 3, 4, 6, 8, 16, 32, 64) if reads else ():
            chosen = _chosen(ways, int(self.limit * times) - fixed)
            if chosen is not None and sum(way.reads for way in chosen) <= reads / 2:
                return f"--memory {-(-(fixed + sum(way.ram_bytes for way in chosen)) // UNIT)}MiB"
        return None

    def _refuse_memory(self, ways: Sequence[Sequence[TablePlan]], fixed: int) -> NoReturn:
        least = fixed + sum(min(way.ram_bytes for way in some) for some in ways)
        raise NoPlanError(
            f"the tables do not fit {format_bytes(self.limit)} of RAM, not even on disk: the process takes "
            f"{format_bytes(fixed)} besides them, and each cache must hold two batches. "
            f"--memory {-(-least // UNIT)}MiB is enough; or use smaller batches.",
            {"memory": least},
        )

    def _check_files(self, needed: int) -> None:
        if self.files is not None and needed > self.files:
            raise NoPlanError(
                f"the tables that do not fit {format_bytes(self.limit)} of RAM need {format_bytes(needed)} of files: "
                f"{format_bytes(self.files)} may be used. --disk {needed} is enough; or use a smaller dim, dtype or "
                "rule.",
                {"disk": needed},
            )

    def _ways(self, demands: Sequence[Demand]) -> list[list[TablePlan]]:
        """Return the options for each table. Only tables that do not fit together have options on disk."""
        in_ram = [math.inf if one.spec.rows is None else peak.in_ram(one, one.spec.rows) for one in demands]
        room = self.limit - peak.besides(self.base_bytes, demands, [one.positions for one in demands], False)
        all_fit = sum(in_ram) <= room
        small_fit = sum(ram for ram in in_ram if ram <= peak.FITS_BYTES) <= room // 2
        return [
            self._ways_of(one, 0 if all_fit or (small_fit and ram <= peak.FITS_BYTES) else self.limit)
            for one, ram in zip(demands, in_ram, strict=True)
        ]

    def _ways_of(self, demand: Demand, most: int) -> list[TablePlan]:
        """Return the options for a table: RAM if it fits, and disk with at most `most` bytes of RAM."""
        placements, is_known = demand.placements(most), demand.spec.rows is not None or demand.log is not None
        curve = self._curve(demand, [one.slots for one in placements])
        ways = [_on_disk(demand, curve, self.steps, one) for one in placements]
        if is_known and not demand.memory:
            most, then = (peak.in_ram(demand, rows) for rows in _rows(demand, curve, self.steps))
            ways.insert(0, TablePlan(demand.name, "RAM", None, most, then, 0, curve.rows, 0.0, 0.0, demand))
        return ways

    def _curve(self, demand: Demand, slots: Sequence[int]) -> MissRatioCurve:
        spec, names = demand.spec, tuple(one.name for one in demand.members)
        key = (spec.rows, spec.dim, demand.positions, demand.zipf, id(demand.log), demand.memory, names, bool(slots))
        if key not in self.curves:
            steps = self.steps if slots else self.steps or FEW
            self.curves[key] = curve_of(demand, [*slots[::FINER], *slots[-1:]], steps)
        return self.curves[key]


def _grouped(demands: Sequence[Demand], found: Proposal) -> Sequence[Demand]:
    """Merge the demands of tables that a proposal has alone on disk and that share a record layout."""
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


def _chosen(ways: Sequence[Sequence[TablePlan]], budget: int) -> list[TablePlan] | None:
    """Choose an option for each table; the cost is the rows that a step moves between RAM and disk."""
    options = [
        [SplitOption(way.ram_bytes, way.reads + way.left + ON_DISK * (way.tier == "disk"), way) for way in some]
        for some in ways
    ]
    found = split(options, budget)
    return None if found is None else [one.how for one in found]


# ---------------------------------------------------------------- one table


def _rows(demand: Demand, curve: MissRatioCurve, steps: int | None) -> tuple[float, float]:
    """Return the maximum rows of a table, and its rows after some steps."""
    most = curve.distinct if demand.spec.rows is None else float(demand.spec.rows)
    return most, most if steps is None else curve.distinct


def _on_disk(demand: Demand, curve: MissRatioCurve, steps: int | None, placement: RamLayout) -> TablePlan:
    spec, slots, (most_rows, rows) = demand.spec, placement.slots, _rows(demand, curve, steps)
    if steps is None:
        misses = left = lasting(demand, curve, slots)
        new, logged = 0.0, math.inf
    else:
        is_whole = spec.rows is not None and slots >= spec.rows  # no row leaves then
        misses, left = curve.new if is_whole else curve.missed(slots), curve.left(slots)
        new, logged = curve.new, curve.had_left(slots)
    most = peak.most_on_disk(placement)
    then = most if steps is None else peak.on_disk(spec, placement, rows, logged)
    ram, batch = (max(most, then), then), (curve.rows, misses, max(0.0, misses - new))
    files = int(most_rows * (spec.record_bytes + CRC_BYTES) * DISK_TIMES)
    folds = peak.folding(placement, most_rows, math.inf), peak.folding(placement, rows, logged)
    return TablePlan(demand.name, "disk", placement.budget_bytes, *ram, files, *batch, demand, left, folds)
