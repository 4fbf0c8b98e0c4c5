"""Who takes part in `bench disk`: tables larger than RAM, each kept and stepped in its own way.

A contender is a row of `CONTENDERS`: how its files are written before, and the class of the session that trains on
them in a process of its own. Nothing heavier than NumPy is imported before.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from embedrock.bench.harness.cgroups import outside_bytes
from embedrock.bench.harness.contenders import LEARNING_RATE, Contender, import_torch
from embedrock.bench.harness.workload import Workload
from embedrock.machine.ram import peak_rss_bytes

WRITE_ROWS = 16_384  # written at a time, when files are prepared
BETAS, EPS = (0.9, 0.999), 1e-8  # of Adam, as in PyTorch
ARRAYS = ("weights", "exp_avg", "exp_avg_sq")
RECORD_COLUMNS = len(ARRAYS)  # of the width of a row
TABLE = "table"  # name of the folder
DENSE_SIZE = 768  # of the square matrices of a dense model
RESIDENT_BATCHES = 8
COMMITS = 10
WARM_UP_DEPTH = 2  # batches that are looked ahead while our cache fills
COUNTERS = ("hits", "misses", "reads", "read_requests", "bytes_read", "bytes_written", "evictions", "spilled")

Batches = Iterable[npt.NDArray[np.int64]]


@dataclass(frozen=True)
class Job:
    """A table on disk, and how much RAM there is for it.

    Args:
        workload: the table and its ids.
        folder: where its files are.
        memory: the most RAM that our table may take, bytes.
    """

    workload: Workload
    folder: Path
    memory: int

    def batches(self, first: int, count: int) -> Iterator[npt.NDArray[np.int64]]:
        """Return batches of the endless stream."""
        return (self.workload.batch_at(index) for index in range(first, first + count))


class DiskSession:
    """In a contender's own process: makes it, steps it through the stream of batches, times it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._gradient = job.workload.gradient()

    def step(self, ids: npt.NDArray[np.int64]) -> None:
        """Look up a batch, and train it."""
        raise NotImplementedError

    def use(self, *how: int) -> None:
        """Train in this way from now on."""

    def steps(self, first: int, count: int, seconds: float) -> int:
        """Make untimed steps, for at most so long; return how many."""
        return len(self._timed(self.job.batches(first, count), self.step, seconds))

    def measure(self, first: int, steps: int, seconds: float) -> dict[str, Any]:
        """Return the seconds of each step, for at most `seconds` together, and what was counted in them."""
        # Kept as int32: what the benchmark itself holds should be small beside the table's budget.
        batches = [ids.astype(np.int32) for ids in self.job.batches(first, steps)]
        before = self.counters()
        times = self._timed((ids.astype(np.int64) for ids in batches), self.step, seconds)
        after = self.counters()
        return {"steps_s": times, "counted": {name: after[name] - before[name] for name in before}, **self.facts()}

    def counters(self) -> dict[str, float]:
        """Return numbers that only grow."""
        return {}

    def facts(self) -> dict[str, float]:
        """Return numbers that describe the contender now."""
        return {}

    def ram(self) -> tuple[int, int]:
        """Return the most RAM that this process held, and what of it was there before it entered its cgroup."""
        return peak_rss_bytes(), outside_bytes()

    def close(self) -> None:
        """Give files back, before the process ends."""

    def _ahead(self, batches: Batches) -> Batches:
        return batches

    def _timed(self, batches: Batches, step: Callable[[Any], object], seconds: float) -> list[float]:
        times: list[float] = []
        start = begin = time.perf_counter()
        for ids in self._ahead(batches):
            step(ids)
            end = time.perf_counter()
            times.append(end - begin)
            if end - start > seconds:
                break
            begin = end
        return times


# ---------------------------------------------------------------- ours


class TableSession(DiskSession):
    """A table of ours."""

    table: Any

    def step(self, ids: npt.NDArray[np.int64]) -> None:
        train(self.table, ids, self._gradient)

    def resident(self, first: int, steps: int) -> dict[str, float]:
        """Return the median seconds of a step on a few batches that come again and again, so that they are in RAM."""
        batches = list(self.job.batches(first, RESIDENT_BATCHES))
        times: list[float] = []
        for turn in range(1 + -(-steps // RESIDENT_BATCHES)):
            for ids in batches:
                start = time.perf_counter()
                self.step(ids)
                self.table.stats()  # waits until the step is made
                if turn:  # in the first one, rows are read and made
                    times.append(time.perf_counter() - start)
        return {"step_s": median(times)}


class Ours(TableSession):
    """`er.Table` with ``path=`` and ``memory=``."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        import embedrock as er

        self.table = er.open(job.folder / TABLE, memory=job.memory)
        self._depth = WARM_UP_DEPTH

    def use(self, *how: int) -> None:
        """Look so many batches ahead by `Table.prefetch`; 0: not at all."""
        (self._depth,) = how

    def counters(self) -> dict[str, float]:
        stats = self.table.stats()
        return {name: stats[name] for name in (*COUNTERS, "read_seconds")}

    def facts(self) -> dict[str, float]:
        stats = self.table.stats()
        names = ("cache_slots", "overlay_rows", "disk_bytes", "record_bytes", "bytes_used", "budget_bytes")
        return {name: stats[name] for name in names}

    def close(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the last steps are committed by nobody
            self.table.close()

    def overlap(self, first: int, steps: int) -> dict[str, float]:
        """Return the seconds of a step with prefetch alone, of a dense model alone, and of the two together."""
        alone = self._mean_s(first, steps, self.step)
        dense = Dense(alone)
        dense_s = dense.mean_s(steps)

        def both(ids: npt.NDArray[np.int64]) -> None:
            self.step(ids)
            dense()

        together = self._mean_s(first + steps, steps, both)
        # Either alone once more: the machine may have become slower or faster meanwhile.
        alone = (alone + self._mean_s(first + 2 * steps, steps, self.step)) / 2
        return {"prefetch_s": alone, "dense_s": (dense_s + dense.mean_s(steps)) / 2, "together_s": together}

    def amplification(self, first: int, steps: int) -> dict[str, float]:
        """Train for five times as many steps, and commit ten times, so that compaction has its share.

        Returns:
            Bytes written, compaction included, bytes of the distinct rows that each interval changed, and seconds.
        """
        every = -(-steps // 2)
        changed, before, start = 0, self.counters()["bytes_written"], time.perf_counter()
        for interval in range(COMMITS):
            seen: list[npt.NDArray[np.int64]] = []
            for ids in self._ahead(self.job.batches(first + interval * every, every)):
                self.step(ids)
                seen.append(np.unique(ids))
            changed += np.unique(np.concatenate(seen)).size
            self.table.commit(step=interval)
        return {
            "bytes_written": self.counters()["bytes_written"] - before,
            "bytes_changed": changed * self.table.spec.record_bytes,
            "seconds": time.perf_counter() - start,
            "overlay_rows_left": self.facts()["overlay_rows"],
        }

    def _ahead(self, batches: Batches) -> Batches:
        return self.table.prefetch(batches, depth=self._depth) if self._depth else batches

    def _mean_s(self, first: int, steps: int, step: Callable[[Any], object]) -> float:
        times = self._timed(list(self.job.batches(first, steps)), step, np.inf)
        return float(np.mean(times[len(times) // 5 :]))  # the first ones fill the window


class OursInRam(TableSession):
    """`er.Table` without a path: what the disk costs."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        import embedrock as er

        self.table = er.Table(job.workload.rows, job.workload.dim, rule=er.Adam(lr=LEARNING_RATE))


def write_table(job: Job) -> dict[str, float]:
    """Make our table with a record of every row, in the order of their ids; return what that took."""
    import embedrock as er

    workload, random = job.workload, np.random.default_rng(job.workload.seed)
    values = random.standard_normal((WRITE_ROWS, workload.dim), dtype=np.float32)
    start = time.perf_counter()
    where = {"path": job.folder / TABLE, "memory": job.memory, "keep": 1}
    with er.Table(workload.rows, workload.dim, rule=er.Adam(lr=LEARNING_RATE), **where) as table:
        rows = min(WRITE_ROWS, -(-job.memory // (8 * table.spec.record_bytes)))  # has to fit the cache
        for first in range(0, workload.rows, rows):
            ids = np.arange(first, min(first + rows, workload.rows))
            table.assign(ids, values[: len(ids)])
        table.commit()
        table.compact()
        return {"seconds": time.perf_counter() - start, "disk_bytes": table.stats()["disk_bytes"]}


def train(table: Any, ids: npt.NDArray[np.int64], gradient: npt.NDArray[np.float32]) -> None:
    """Look up a batch of a table of ours, and step it."""
    plan = table.plan(ids)
    table.read(plan)
    table.apply(plan, gradient)


class Dense:
    """Matrix products that take about `seconds` together: the rest of a model."""

    def __init__(self, seconds: float) -> None:
        random = np.random.default_rng(0)
        self._a, self._b = random.standard_normal((2, DENSE_SIZE, DENSE_SIZE), dtype=np.float32)
        self._out = np.empty_like(self._a)
        self._products = 20
        self._products = max(1, round(20 * seconds / min(self.mean_s(1) for _ in range(5))))

    def __call__(self) -> None:
        for _ in range(self._products):
            np.matmul(self._a, self._b, out=self._out)

    def mean_s(self, times: int) -> float:
        """Return the mean seconds of a call."""
        start = time.perf_counter()
        for _ in range(times):
            self()
        return (time.perf_counter() - start) / times


# ---------------------------------------------------------------- np.memmap


class Memmap(DiskSession):
    """Three `np.memmap` arrays, fancy indexing, and SparseAdam in NumPy: the usual recipe."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._rows = self._open()
        self._steps = 0

    def _open(self) -> list[np.ndarray]:
        shape = (self.job.workload.rows, self.job.workload.dim)
        return [np.memmap(self.job.folder / name, np.float32, "r+", shape=shape) for name in ARRAYS]

    def step(self, ids: npt.NDArray[np.int64]) -> None:
        unique, inverse = np.unique(ids.ravel(), return_inverse=True)
        weights, exp_avg, exp_avg_sq = self._read(unique)
        weights[inverse].reshape(*ids.shape, -1)  # what a model is given
        order = np.argsort(inverse, kind="stable")
        starts = np.searchsorted(inverse[order], np.arange(len(unique)))
        grads = np.add.reduceat(self._gradient.reshape(len(order), -1)[order], starts)
        self._write(unique, self._adam(weights, exp_avg, exp_avg_sq, grads))

    def _adam(self, weights: Any, exp_avg: Any, exp_avg_sq: Any, grads: Any) -> tuple[Any, Any, Any]:
        self._steps += 1
        one, two = (1 - beta**self._steps for beta in BETAS)
        exp_avg += (1 - BETAS[0]) * (grads - exp_avg)
        exp_avg_sq += (1 - BETAS[1]) * (grads * grads - exp_avg_sq)
        weights -= LEARNING_RATE * np.sqrt(two) / one * exp_avg / (np.sqrt(exp_avg_sq) + EPS)
        return weights, exp_avg, exp_avg_sq

    def _read(self, unique: npt.NDArray[np.int64]) -> tuple[Any, ...]:
        return tuple(rows[unique] for rows in self._rows)

    def _write(self, unique: npt.NDArray[np.int64], values: tuple[Any, ...]) -> None:
        for rows, value in zip(self._rows, values, strict=True):
            rows[unique] = value


class MemmapRecords(Memmap):
    """The same with a row's weights and state side by side in one `np.memmap`: a third of the pages."""

    def _open(self) -> list[np.ndarray]:
        shape = (self.job.workload.rows, RECORD_COLUMNS, self.job.workload.dim)
        return [np.memmap(self.job.folder / "records", np.float32, "r+", shape=shape)]

    def _read(self, unique: npt.NDArray[np.int64]) -> tuple[Any, ...]:
        records = self._rows[0][unique]
        return tuple(records[:, column] for column in range(RECORD_COLUMNS))

    def _write(self, unique: npt.NDArray[np.int64], values: tuple[Any, ...]) -> None:
        self._rows[0][unique] = values[0].base  # all three are views of one array


def write_arrays(job: Job) -> dict[str, float]:
    """Write one file for weights and for each state, for `Memmap` and `TorchFile`."""
    return _write_files(job, dict.fromkeys(ARRAYS, job.workload.dim))


def write_records(job: Job) -> dict[str, float]:
    """Write one file of records, for `MemmapRecords`."""
    return _write_files(job, {"records": RECORD_COLUMNS * job.workload.dim})


def _write_files(job: Job, columns: dict[str, int]) -> dict[str, float]:
    start, random = time.perf_counter(), np.random.default_rng(job.workload.seed)
    size = 0
    for name, width in columns.items():
        # Not negative, as the second moments of Adam.
        values = random.random((WRITE_ROWS, width), dtype=np.float32)
        with (job.folder / name).open("wb") as file:
            for first in range(0, job.workload.rows, WRITE_ROWS):
                values[: job.workload.rows - first].tofile(file)
            size += file.tell()
    return {"seconds": time.perf_counter() - start, "disk_bytes": size}


# ---------------------------------------------------------------- PyTorch


class TorchFile(DiskSession):
    """`nn.Embedding` and the state of SparseAdam in tensors of `torch.from_file`."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._torch = torch = import_torch()
        shape = (job.workload.rows, job.workload.dim)
        files = [str(job.folder / name) for name in ARRAYS]
        size = shape[0] * shape[1]
        weights, *state = (torch.from_file(name, shared=True, size=size).view(shape) for name in files)
        self._layer = torch.nn.Embedding.from_pretrained(weights, freeze=False, sparse=True)
        self._optimizer = torch.optim.SparseAdam(self._layer.parameters(), lr=LEARNING_RATE)
        # As the optimizer makes it in its first step, but for where it lies.
        self._optimizer.state[self._layer.weight] = {"step": 0, **dict(zip(ARRAYS[1:], state, strict=True))}
        self._torch_gradient = torch.from_numpy(self._gradient)

    def step(self, ids: npt.NDArray[np.int64]) -> None:
        self._optimizer.zero_grad()
        self._layer(self._torch.from_numpy(ids)).backward(self._torch_gradient)
        self._optimizer.step()


# ---------------------------------------------------------------- the table of contenders


@dataclass(frozen=True)
class DiskContender(Contender):
    """One way to train a table larger than RAM.

    Args:
        session: its session. Contenders with the same one take turns in one process, whose caches are filled once.
        write: writes its files, in a process of its own; contenders with the same one share them.
        how: arguments of `DiskSession.use`.
        limited: whether its RAM and page cache are bounded.
        probed: whether its reads are compared with the disk's own, which is measured before and after. (Not where
            files are dirty in the page cache: direct reads of them have to wait until they are written.)
        extras: methods of its session that measure more, given the number of the first batch and of steps.
    """

    session: type[DiskSession]
    write: Callable[[Job], dict[str, float]] | None
    how: tuple[int, ...] = ()
    limited: bool = True
    probed: bool = False
    extras: tuple[str, ...] = ()


def _ours(name: str, label: str, depth: int, *extras: str) -> DiskContender:
    return DiskContender(name, label, Ours, write_table, (depth,), probed=True, extras=extras)


CONTENDERS = (
    _ours("ours", "er.Table(path=, memory=)", 0, "resident"),
    _ours("ours-prefetch-2", "the same, Table.prefetch(depth=2)", 2, "overlap"),
    _ours("ours-prefetch-32", "the same, Table.prefetch(depth=32)", 32, "overlap", "amplification"),
    DiskContender(
        "ours-in-ram", "er.Table without path=, no limit", OursInRam, None, limited=False, extras=("resident",)
    ),
    DiskContender("memmap", "three np.memmap, fancy indexing, SparseAdam in NumPy", Memmap, write_arrays),
    DiskContender("torch-from-file", "torch.from_file, nn.Embedding, SparseAdam", TorchFile, write_arrays),
    DiskContender("memmap-records", "one np.memmap of whole records", MemmapRecords, write_records),
)
