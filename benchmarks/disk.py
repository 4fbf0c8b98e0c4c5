"""``disk``: training a table several times larger than RAM, ours beside the usual recipes, and the disk itself.

Unlike in the other benchmarks, implementations run one after another, each from a cold start. Files of all of them
would not fit on one disk, and their reads would share its page cache. Random reads of the disk itself are measured
before and after, so a busy moment of a shared machine shows.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from mmap import PAGESIZE
from operator import call
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.benchmark import ROUNDS, SIZES, Benchmark, Task
from benchmarks.cgroups import peak_bytes
from benchmarks.implementations import LEARNING_RATE, Footprint, Implementation, Timing
from benchmarks.options import DiskOptions
from benchmarks.processes import ChildError
from benchmarks.progress import say
from benchmarks.report import Report, format_times, report_of
from benchmarks.runner import Entry, Result, measure
from benchmarks.targets import Target, each, faster
from benchmarks.workload import Workload
from embedrock.cli.terminal.tables import Field, format_whole
from embedrock.errors import EmbedrockError
from embedrock.io.probe import BlockReader
from embedrock.io.vfs import OS_SYSTEM
from embedrock.system.platform import resident_pages
from embedrock.system.sizes import format_bytes

WORKLOAD = Workload(rows=20_000_000)
# Batches are a stream of different ones.
ARGUMENTS = ("rows", *(name for name in SIZES if name != "batches"), *ROUNDS, "folder", "memory", "limit", "warmup")
WRITE_ROWS = 16_384  # written at a time
BETAS, EPS = (0.9, 0.999), 1e-8  # of Adam, as in PyTorch
ARRAYS = ("weights", "exp_avg", "exp_avg_sq")
TABLE = "table"  # name of the folder
COMMITS = 10
SPARE_BYTES = 300_000_000  # of RAM, beside the table's budget
SPACE = 2.6  # times the bytes of all records that must be free: a table during compaction, and its log
PROBE_S, PROBE_FILES = 1.0, 64
SETTLE_STEPS = 64  # untimed, at the start of a turn
COUNTERS = ("hits", "misses", "reads", "read_requests", "bytes_read", "bytes_written", "evictions", "spilled")
FACTS = ("cache_slots", "overlay_rows", "disk_bytes", "record_bytes", "bytes_used", "budget_bytes")
DEPTHS = {"": 0, "-prefetch-2": 2, "-prefetch-32": 32}  # batches ahead, by `Table.prefetch`

Batch = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Job:
    """A table on disk, the folder of its files, the RAM that our table may take, and untimed steps before the others.

    It is the `TableEntryWords.workload` of this benchmark.
    """

    workload: Workload
    folder: Path
    memory: int
    warmup: int = 0

    def batches(self, first: int, count: int) -> Iterator[Batch]:
        return (self.workload.batch_at(index) for index in range(first, first + count))

    def files(self) -> list[Path]:
        """Return all files of the table, the largest first."""
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        return sorted(files, key=lambda path: path.stat().st_size, reverse=True)


class DiskSession:
    """In an implementation's own process: makes it, steps it through the stream of batches, times it."""

    def __init__(self, job: Job) -> None:
        self.job, self.steps, self._first = job, 0, list[float]()
        self.gradient = job.workload.gradient()

    def step(self, ids: Batch) -> None:
        raise NotImplementedError

    def ahead(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """Return the batches; ours may read their rows ahead."""
        return batches

    def warm_up(self, seconds: float) -> list[float]:
        """Make the untimed steps, once, for at most `seconds`; return the seconds of each."""
        self._first = self._first or self._timed(self.take(self.job.warmup), seconds)
        return self._first

    def turn(self, steps: int, seconds: float) -> Timing:
        self._timed(self.take(SETTLE_STEPS), seconds)
        # Kept as int32: the benchmark itself should hold little beside the table's budget.
        batches = [ids.astype(np.int32) for ids in self.take(steps)]
        times = self._timed((ids.astype(np.int64) for ids in batches), seconds)
        return Timing.now(times, cgroup_peak_bytes=peak_bytes())

    def take(self, count: int) -> Iterator[Batch]:
        """Return the next batches of the stream."""
        self.steps += count
        return self.job.batches(self.steps - count, count)

    def _timed(self, batches: Iterable[Batch], seconds: float) -> list[float]:
        times: list[float] = []
        start = begin = time.perf_counter()
        for ids in self.ahead(batches):
            self.step(ids)
            end = time.perf_counter()
            times.append(end - begin)
            if end - start > seconds:
                break
            begin = end
        return times


# ---------------------------------------------------------------- ours


class Ours(DiskSession):
    """`er.Table` with ``path=`` and ``memory=``."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        import embedrock as er

        self._table: Any = er.open(job.folder / TABLE, memory=job.memory)
        self._depth = 0

    def use(self, way: str) -> None:
        """Look batches ahead by `Table.prefetch`, or do not."""
        self._depth = DEPTHS[way]

    def step(self, ids: Batch) -> None:
        train(self._table, ids, self.gradient)

    def ahead(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        return self._table.prefetch(batches, depth=self._depth) if self._depth else batches

    def turn(self, steps: int, seconds: float) -> Timing:
        disk, before = [self._disk_reads()], self._table.stats()
        steps_s, more = super().turn(steps, seconds)
        stats, made = self._table.stats(), len(steps_s) + SETTLE_STEPS
        counted = {f"{name}_per_step": (stats[name] - before[name]) / made for name in COUNTERS}
        facts = {name: stats[name] for name in FACTS}
        # None: all rows fit.
        facts["best_misses_per_step"] = self.job.workload.expected_misses(int(stats["cache_slots"])) or None
        facts["reads_per_s"] = counted["reads_per_step"] / mean(steps_s)
        facts["disk_reads_per_s"] = mean([*disk, self._disk_reads()])
        if len(steps_s) == steps and self._depth == max(DEPTHS.values()):
            facts["written_over_changed"] = self._amplification(steps)
        return Timing(steps_s, more | counted | facts)

    def _amplification(self, steps: int) -> float:
        """Train with commits, so compaction has its share; return bytes written over bytes of the changed rows."""
        changed, before = 0, self._table.stats()["bytes_written"]
        for interval in range(COMMITS):
            batches = list(self.take(-(-steps // 2)))
            self._timed(batches, np.inf)
            changed += np.unique(np.concatenate(batches)).size
            self._table.commit(step=interval)
        written = self._table.stats()["bytes_written"] - before
        return written / (changed * self._table.spec.record_bytes)

    def _disk_reads(self) -> float:
        """Return the disk's own random reads of 4 KiB a second, of the largest files."""
        files = self.job.files()[:PROBE_FILES]
        reader = BlockReader([path for path in files if path.stat().st_size >= files[0].stat().st_size // 2])
        try:
            return reader.rate(PROBE_S)
        finally:
            reader.close()


def write_table(job: Job) -> None:
    """Make our table with a record of every row, in the order of their ids."""
    import embedrock as er

    workload, random = job.workload, np.random.default_rng(job.workload.seed)
    values = random.standard_normal((WRITE_ROWS, workload.dim), dtype=np.float32)
    where = {"path": job.folder / TABLE, "memory": job.memory, "keep": 1}
    with er.Table(workload.rows, workload.dim, rule=er.Adam(lr=LEARNING_RATE), **where) as table:
        rows = min(WRITE_ROWS, -(-job.memory // (8 * table.spec.record_bytes)))  # has to fit the cache
        for first in range(0, workload.rows, rows):
            ids = np.arange(first, min(first + rows, workload.rows))
            table.assign(ids, values[: len(ids)])
        table.commit()
        table.compact()


def train(table: Any, ids: Batch, gradient: npt.NDArray[np.float32]) -> None:
    """Look up a batch of a table of ours, and step it."""
    plan = table.plan(ids)
    table.read(plan)
    table.apply(plan, gradient)


class Memmap(DiskSession):
    """Three `np.memmap` arrays, fancy indexing, and SparseAdam in NumPy: the usual recipe."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        shape = (job.workload.rows, job.workload.dim)
        self._rows = [np.memmap(job.folder / name, np.float32, "r+", shape=shape) for name in ARRAYS]
        self._made = 0

    def step(self, ids: Batch) -> None:
        unique, inverse = np.unique(ids.ravel(), return_inverse=True)
        weights, exp_avg, exp_avg_sq = (rows[unique] for rows in self._rows)
        weights[inverse].reshape(*ids.shape, -1)  # the input of a model
        order = np.argsort(inverse, kind="stable")
        starts = np.searchsorted(inverse[order], np.arange(len(unique)))
        grads = np.add.reduceat(self.gradient.reshape(len(order), -1)[order], starts)
        for rows, values in zip(self._rows, self._adam(weights, exp_avg, exp_avg_sq, grads), strict=True):
            rows[unique] = values

    def _adam(self, weights: Any, exp_avg: Any, exp_avg_sq: Any, grads: Any) -> tuple[Any, Any, Any]:
        self._made += 1
        one, two = (1 - beta**self._made for beta in BETAS)
        exp_avg += (1 - BETAS[0]) * (grads - exp_avg)
        exp_avg_sq += (1 - BETAS[1]) * (grads * grads - exp_avg_sq)
        weights -= LEARNING_RATE * np.sqrt(two) / one * exp_avg / (np.sqrt(exp_avg_sq) + EPS)
        return weights, exp_avg, exp_avg_sq


def write_arrays(job: Job) -> None:
    """Write one file for weights and for each state, for `Memmap`."""
    workload, random = job.workload, np.random.default_rng(job.workload.seed)
    for name in ARRAYS:
        # Not negative, as the second moments of Adam.
        values = random.random((WRITE_ROWS, workload.dim), dtype=np.float32)
        with (job.folder / name).open("wb") as file:
            for first in range(0, workload.rows, WRITE_ROWS):
                values[: workload.rows - first].tofile(file)


class SpaceError(EmbedrockError, OSError):
    """There is too little free space for the files of a benchmark."""


@contextmanager
def scratch_folder(parent: Path, need_bytes: int) -> Iterator[Path]:
    """Yield a new folder that is removed with all its files.

    Raises:
        SpaceError: fewer than `need_bytes` are free.
    """
    free = shutil.disk_usage(parent).free
    if free < need_bytes:
        raise SpaceError(
            f"the benchmark needs {format_bytes(need_bytes)} of free space in {str(parent)!r}: {format_bytes(free)} "
            "are free. Choose another --folder, or fewer --rows."
        )
    folder = Path(tempfile.mkdtemp(prefix="embedrock-bench-", dir=parent))
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: object) -> None:
    """Exit by way of every `finally`: many gigabytes must not stay behind."""
    raise SystemExit(128 + number)


def forget_pages(paths: Sequence[Path]) -> None:
    """Drop files from the page cache, where they would serve one implementation and be charged to another."""
    for path in paths:
        fd = OS_SYSTEM.open(str(path), os.O_RDONLY)
        try:
            OS_SYSTEM.fdatasync(fd)
            OS_SYSTEM.drop(fd)
        finally:
            OS_SYSTEM.close(fd)


def resident_bytes(paths: Sequence[Path]) -> int:
    """Return the bytes of files that are in the page cache."""
    maps = [np.memmap(path, np.uint8, "r") for path in paths]
    return PAGESIZE * sum(int(np.sum(resident_pages(one.ctypes.data, one.nbytes))) for one in maps)


# ---------------------------------------------------------------- the benchmark


@dataclass(frozen=True)
class DiskImplementation(Implementation):
    """One way to train a table larger than RAM.

    Args:
        write: writes its files, in a process of its own; implementations with the same one share them.
    """

    write: Callable[[Job], None] = write_arrays
    session: Callable[..., Any] = call  # make(job)

    def need(self, workload: Any) -> Footprint:
        return Footprint()  # one runs at a time


IMPLEMENTATIONS = (
    DiskImplementation(
        "ours", "er.Table(path=, memory=), and Table.prefetch", Ours, ways=tuple(DEPTHS), write=write_table
    ),
    DiskImplementation("memmap", "three np.memmap, fancy indexing, SparseAdam in NumPy", Memmap),
)


def measure_disk(task: Task) -> Report:
    """Measure implementations, print a table, and return the outcome."""
    workload, options = task.workload, replace(task.options, rounds=1)
    writers: dict[Any, list[DiskImplementation]] = {}
    for one in task.implementations:
        writers.setdefault(one.write, []).append(one)
    with scratch_folder(options.folder, int(SPACE * len(ARRAYS) * workload.table_bytes)) as folder:
        job = Job(workload, folder, options.memory, options.warmup)
        results = [result for same in writers.values() for result in _measure(same, job, options)]
    baseline = task.implementations[0].name
    report = report_of(results, baseline)
    print(f"\n{format_times(report.results, baseline, _MORE)}\n{options.limit_note()}\n")
    report.compare_with(targets(options))
    return report


def _measure(same: Sequence[DiskImplementation], job: Job, options: DiskOptions) -> list[Result]:
    """Write the files that implementations share, measure each, and remove the files."""
    results: list[Result] = []
    try:
        say(f"writing {format_bytes(len(ARRAYS) * job.workload.table_bytes)}")
        replace(options, limit=0).child(same[0].write, job).close()
        for one in same:
            forget_pages(job.files())
            results += measure([Entry(one, job)], options)
    except ChildError as error:
        results = [Result(Entry(one, job)) for one in same]
        for result in results:
            result.fail(error)
    finally:
        for path in job.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return results


MISSES = {"ours": 1.15, "ours-prefetch-32": 1.0}  # wanted: over those of the best rows kept


def targets(options: DiskOptions) -> list[Target]:
    """Return the targets for this much RAM."""
    found = [faster("ours", "memmap", 10)]
    for name, wanted in MISSES.items():
        keys = ("misses_per_step", "best_misses_per_step")
        share = each(lambda line: line["misses_per_step"] / line["best_misses_per_step"], *keys, name=name)
        best = "misses of {name} over those of the {cache_slots:,.0f} most popular rows kept"
        found.append(Target(best, share, wanted, at_most=True))
    share = each(lambda line: line["reads_per_s"] / line["disk_reads_per_s"], "disk_reads_per_s")
    written = each(lambda line: line["written_over_changed"], "written_over_changed")
    peak = each(lambda line: line["cgroup_peak_bytes"] / 1e6, "cgroup_peak_bytes", "cache_slots")  # ours
    allowed = (options.memory + SPARE_BYTES) / 1e6
    return [
        *found,
        Target("record reads/s of {name} over the disk's own", share, 0.7),
        Target("bytes written over those of changed rows", written, 4, at_most=True),
        Target("RAM and page cache of {name}", peak, allowed, "MB", at_most=True),
    ]


_MORE = (
    Field("misses", "misses_per_step", format_whole),
    Field("reads/s", "reads_per_s", format_whole),
    Field("disk's own", "disk_reads_per_s", format_whole),
    Field("with page cache", "cgroup_peak_bytes", format_bytes),
)

DISK = Benchmark(
    "disk",
    "training a table larger than RAM, page cache counted",
    IMPLEMENTATIONS,
    arguments=ARGUMENTS,
    measure=measure_disk,
    workloads=(WORKLOAD,),
    options=DiskOptions(),
)
