"""``bench groups-disk``: rows that a group on disk reads, against fixed splits of its budget; its making and commits.

Splits are searched for. Misses of each table by its RAM are known from a simulation of the very batches
(`CurveSampler`), so RAM goes to the table that gains most of each byte (`planner.split`). The split is then run, what
its tables read corrects their curves, and so on for some rounds. Splits by the ids that tables are asked for, and even
ones, are run, too. Nobody who has to choose before training knows as much.
"""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from embedrock.bench.disk.effort import DiskEffort
from embedrock.bench.disk.files import scratch_folder
from embedrock.bench.harness.bench import Bench, Task
from embedrock.bench.harness.contenders import LEARNING_RATE
from embedrock.bench.harness.many_tables import CARDINALITIES, ManyTables
from embedrock.bench.harness.processes import ChildError
from embedrock.bench.harness.report import Report
from embedrock.bench.harness.targets import Found, Line, Target, each
from embedrock.machine.sizes import format_bytes
from embedrock.machine.vfs import OSSystem
from embedrock.planner.split import SplitOption, split
from embedrock.spec import Spec
from embedrock.terminal.progress import say
from embedrock.terminal.tables import Field, format_lines, format_number
from embedrock.tiers.curve import CurveSampler
from embedrock.tiers.placing import memory_for, most_for, place

GROUP = "one budget"
FULL_DIM, FULL_MEMORY, DIRTY_ROWS = 128, 4 << 30, 20_000  # of the group whose commit is measured
SEARCHES = 3  # splits that are run, each with what the one before has read
FINER = 3  # sizes of a cache from one to twice as much, whose misses are found out
READ, OPEN_S, WRITTEN = 1.0, 1.0, 1.1
SIZES = ("dim", "batch", "zipf", "seed", "max_rows", "max_bag")


@dataclass(frozen=True)
class Job:
    """A model's tables on disk, and a stream of batches.

    Args:
        workload: the tables and their ids.
        folder: where the files are.
        memory: RAM of all tables together, bytes.
        warmup, steps: batches before those that count, and those that count.
    """

    workload: ManyTables
    folder: Path
    memory: int
    warmup: int
    steps: int

    @property
    def specs(self) -> list[Spec]:
        """What each table is."""
        import embedrock as er

        kind: Any = {"dtype": "float32", "init": er.Uniform(-0.01, 0.01), "rule": er.Adam(lr=LEARNING_RATE)}
        sizes = enumerate(self.workload.rows)
        return [Spec(rows, self.workload.dim, seed=number, **kind) for number, rows in sizes]


class Training:
    """In a process of its own: tables that are trained on a stream, each with its own RAM or all with one budget.

    Args:
        job: what.
        shares: RAM of each table; None: they are one group.
    """

    def __init__(self, job: Job, shares: Sequence[int] | None) -> None:
        import embedrock as er

        self._job, workload = job, job.workload
        specs = {f"t{number}": spec for number, spec in enumerate(job.specs)}
        kinds = {name: {"rule": spec.rule, "init": spec.init, "seed": spec.seed} for name, spec in specs.items()}
        self._group: Any = er.Group(path=job.folder / "model.rock", memory=job.memory) if shares is None else None
        self._tables: list[Any] = []
        for number, (name, spec) in enumerate(specs.items()):
            if shares is None:
                self._group.table(name, spec.rows, spec.dim, **kinds[name])
            else:
                where = {"path": job.folder / f"{name}.rock", "memory": shares[number]}
                self._tables.append(er.Table(spec.rows, spec.dim, **where, **kinds[name]))
        self._told = self._tables or [self._group]
        self._grads = [np.full((workload.batch, bag, workload.dim), 0.01, np.float32) for bag in workload.bags]

    def run(self) -> dict[str, Any]:
        """Train; return rows read a step, of each table where each has its own RAM, and seconds."""
        for index in range(self._job.warmup):
            self._step(index)
        before, start = self._reads(), time.perf_counter()
        for index in range(self._job.warmup, self._job.warmup + self._job.steps):
            self._step(index)
        reads = [after - then for after, then in zip(self._reads(), before, strict=True)]
        seconds = time.perf_counter() - start
        for each_one in self._told:
            each_one.commit()
            each_one.close()
        per_step = [read / self._job.steps for read in reads]
        return {"reads": per_step, "read": sum(per_step), "step_ms": seconds / self._job.steps * 1e3}

    def _step(self, index: int) -> None:
        batch = self._job.workload.batch_at(index)
        if self._group is None:
            for table, ids, grads in zip(self._tables, batch, self._grads, strict=True):
                table.lookup(ids)
                table.update(ids, grads)
            return
        of_members = dict(zip(self._group, batch, strict=True))
        self._group.lookup(of_members)
        self._group.update(of_members, dict(zip(self._group, self._grads, strict=True)))

    def _reads(self) -> list[float]:
        return [one.stats()["reads"] for one in self._told]


# ---------------------------------------------------------------- the search


def _memories(spec: Spec, rows: int, most: int) -> list[int]:
    least, most = memory_for(spec, 2 * rows + 1), min(most, most_for(spec))
    count = max(0, int(np.ceil(np.log2(max(most / least, 1)) * FINER)))
    return sorted({least, *(int(least * 2 ** (k / FINER)) for k in range(count)), max(least, most)})


def options_of(job: Job) -> list[list[SplitOption]]:
    """Return what each table misses a step by the RAM that it may have, found out by the batches of the job."""
    uses = [len(np.unique(ids)) for ids in job.workload.batch_at(0)]
    ways = [_memories(spec, rows, job.memory) for spec, rows in zip(job.specs, uses, strict=True)]
    placed = zip(job.specs, ways, strict=True)
    slots = [[place(spec, memory, "the table").slots for memory in some] for spec, some in placed]
    samplers = [CurveSampler(sizes) for sizes in slots]
    for index in range(job.warmup + job.steps):
        if index == job.warmup:
            for sampler in samplers:
                sampler.forget_counts()
        for sampler, ids in zip(samplers, job.workload.batch_at(index), strict=True):
            sampler.see(np.unique(ids))
    curves = [sampler.curve() for sampler in samplers]
    return [
        [SplitOption(memory, curve.missed(size) - curve.new) for memory, size in zip(some, sizes, strict=True)]
        for curve, some, sizes in zip(curves, ways, slots, strict=True)
    ]


def corrected(
    options: Sequence[Sequence[SplitOption]], chosen: Sequence[SplitOption], reads: Sequence[float]
) -> list[list[SplitOption]]:
    """Return options whose costs are as much larger as tables have read more than was thought."""
    factors = [(read + 1) / (one.cost + 1) for read, one in zip(reads, chosen, strict=True)]
    return [
        [one._replace(cost=one.cost * factor) for one in some] for some, factor in zip(options, factors, strict=True)
    ]


def by_weight(options: Sequence[Sequence[SplitOption]], weights: Sequence[float], memory: int) -> list[int]:
    """Return RAM by weights, but for each table what a batch needs and no more than it can use."""
    low, high = 0.0, float(memory)
    least, most = [some[0].nbytes for some in options], [some[-1].nbytes for some in options]
    for _ in range(50):
        level = (low + high) / 2
        given = np.clip(np.array(weights) * level, least, most)
        low, high = (level, high) if given.sum() <= memory else (low, level)
    return [int(share) for share in np.clip(np.array(weights) * low, least, most)]


# ---------------------------------------------------------------- a commit


class Counting(OSSystem):
    """The system, and how many files were synced, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.synced, self._paths = collections.Counter[str](), dict[int, str]()
        self.written = 0

    def open(self, path: str, flags: int) -> int:
        fd = super().open(path, flags)
        self._paths[fd] = path
        return fd

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        done = super().pwrite(fd, data, offset)
        self.written += done
        return done

    def fdatasync(self, fd: int) -> None:
        super().fdatasync(fd)
        self.synced[self._paths.get(fd, "")] += 1


class FullSize:
    """In a process of its own: a group of MLPerf's tables, with Adam 314 GB."""

    def __init__(self, job: Job) -> None:
        import embedrock as er

        self._path, self._rule = job.folder / "full.rock", er.Adam(lr=LEARNING_RATE)
        with er.Group(path=job.folder / "small.rock", memory=1 << 20) as small:  # loads what the first one needs
            small.table("t", 10, FULL_DIM, rule=self._rule).update([1], np.ones((1, FULL_DIM), np.float32))
            small.commit()

    def run(self) -> dict[str, float]:
        """Make it, step some rows of each table, commit, and open it again."""
        import embedrock as er

        system, start = Counting(), time.perf_counter()
        group: Any = er.Group(path=self._path, memory=FULL_MEMORY, system=system)
        for number, rows in enumerate(CARDINALITIES):
            group.table(f"t{number}", rows, FULL_DIM, rule=self._rule)
        made_s = time.perf_counter() - start
        group.commit()
        counts = [min(rows, DIRTY_ROWS // len(CARDINALITIES)) for rows in CARDINALITIES]
        ids = {f"t{k}": np.arange(count) for k, count in enumerate(counts)}
        group.update(ids, {name: np.ones((len(rows), FULL_DIM), np.float32) for name, rows in ids.items()})
        group["t0"].stats()  # waits for the step
        system.synced.clear()
        system.written, start = 0, time.perf_counter()
        group.commit()
        commit_s, dirty = time.perf_counter() - start, sum(counts) * group["t0"].spec.record_bytes
        group.close()
        syncs, written, start = dict(system.synced), system.written, time.perf_counter()
        with er.open(self._path, memory=FULL_MEMORY) as again:
            opened_s = time.perf_counter() - start
            tables = len([again[name] for name in again])
        sizes = {"tables": tables, "table_bytes": sum(CARDINALITIES) * FULL_DIM * 12}
        return {
            **sizes,
            "made_s": made_s,
            "opened_s": opened_s,
            "commit_s": commit_s,
            "bytes_over_dirty": written / dirty,
            "files_synced": len(syncs),
            "syncs_a_file": max(syncs.values(), default=0),
        }


# ---------------------------------------------------------------- the benchmark


def measure(task: Task) -> Report:
    """Run all, and print what came of it."""
    effort, report = task.effort, Report()
    with scratch_folder(effort.folder, 8 << 30) as folder:
        job = Job(task.workload, folder, effort.memory, effort.warmup, effort.steps)
        print(_describe(job))
        try:
            report.results += _race(job, effort)
            report.results.append({"name": "full size", "status": "ok", **_alone(FullSize, job, effort, "full")})
        except ChildError as error:
            report.fail("groups-disk", error)
    print(_told(report.results))
    report.judge(TARGETS)
    return report


def _race(job: Job, effort: DiskEffort) -> list[dict[str, Any]]:
    lines = [{"name": GROUP, "status": "ok", **_alone(Training, job, effort, "group", None)}]
    say(f"{GROUP}: {lines[0]['read']:,.0f} rows a step; the curves of all tables")
    options = options_of(job)
    ids = [float(bag) for bag in job.workload.bags]
    for name, weights in (("by ids", ids), ("even", [1.0] * len(ids))):
        shares = by_weight(options, weights, job.memory)
        lines.append({"name": name, "status": "ok", **_alone(Training, job, effort, name, shares)})
    for search in range(SEARCHES):
        chosen = split(options, job.memory)
        if chosen is None:
            break
        found = _alone(Training, job, effort, f"searched{search}", [one.nbytes for one in chosen])
        lines.append({"name": f"searched, {search + 1}", "status": "ok", **found})
        options = corrected(options, chosen, found["reads"])
    return lines


def _alone(kind: Callable[..., Any], job: Job, effort: DiskEffort, name: str, *args: Any) -> dict[str, Any]:
    """Return what a session's `run` returns, in a process and a folder of its own."""
    folder = job.folder / name
    os.mkdir(folder)
    with effort.confined(kind, replace(job, folder=folder), *args) as (child, _):
        return child.call("run")


def _describe(job: Job) -> str:
    workload = job.workload
    return (
        f"{len(workload.rows)} tables, {sum(workload.rows):,} rows x {workload.dim}, Adam, behind "
        f"{format_bytes(job.memory)}; batches of {workload.batch:,} x {sum(workload.bags)} ids, "
        f"{job.warmup:,} before {job.steps:,} that count"
    )


def _told(lines: Sequence[dict[str, Any]]) -> str:
    trained = [line for line in lines if "read" in line]
    fields = (
        Field("RAM", lambda line: line["name"]),
        Field("rows read a step", lambda line: format_number(line["read"])),
        Field("ms a step", lambda line: format_number(line["step_ms"])),
    )
    table = format_lines(fields, trained) if trained else ""
    full = next((line for line in lines if line["name"] == "full size"), None)
    if full is None:
        return f"\n{table}\n"
    size = f"{full['tables']:.0f} tables, {full['table_bytes'] / 1e9:.0f} GB with Adam: made in {full['made_s']:.3f} s"
    commit = f"opened in {full['opened_s']:.3f} s; a commit wrote {full['files_synced']:.0f} files"
    return f"\n{table}\n{size}, {commit}, in {full['commit_s'] * 1e3:.0f} ms\n"


def _over_best_split(lines: Sequence[Line]) -> list[Found]:
    """Return what one budget reads over what the best split does."""
    found = {line["name"]: line["read"] for line in lines if "read" in line}
    if GROUP not in found or len(found) < 2:
        return []
    best = min((name for name in found if name != GROUP), key=lambda name: found[name])
    return [(found[GROUP] / found[best], {"best": best})] if found[best] else []  # all rows may fit the RAM


def _full(what: str, key: str, wanted: float, unit: str = "x") -> Target:
    return Target(f"a group of 314 GB: {what}", each(lambda line: line[key], key), wanted, unit, at_most=True)


TARGETS = (
    Target("rows read a step, one budget over the best split ({best})", _over_best_split, READ, at_most=True),
    _full("made", "made_s", OPEN_S, "s"),
    _full("opened", "opened_s", OPEN_S, "s"),
    _full("bytes of a commit over those that changed", "bytes_over_dirty", WRITTEN),
    _full("fdatasync of a file in a commit", "syncs_a_file", 1, "calls"),
)

GROUPS_DISK = Bench(
    "groups-disk",
    "26 tables on disk within one budget, against splits of it; commits of a group of 314 GB",
    measure,
    (*SIZES, "threads", "timeout_s", "folder", "memory", "limit", "steps", "warmup"),
    workloads=(ManyTables(dim=8, batch=128, max_rows=1_000_000),),
    effort=DiskEffort(memory=16 << 20, limit=1 << 30, steps=100, warmup=200),
)
