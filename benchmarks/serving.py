"""``serving``: readers of a table that another process trains: opening, lookups of few ids, `refresh`.

Readers have a cache that holds all rows (``memory=``), or map the files (``memory="map"``). Their rounds alternate.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.benchmark import Benchmark, Task
from benchmarks.disk import TABLE, scratch_folder
from benchmarks.implementations import LEARNING_RATE
from benchmarks.options import DiskOptions
from benchmarks.processes import Child
from benchmarks.progress import say
from benchmarks.report import Report, format_line
from benchmarks.targets import Target, each
from benchmarks.workload import SCATTER, Workload
from embedrock.system.sizes import format_bytes

IDS, SIDES, PROCESSES = 64, ("cache", "map"), 4
PERCENTS = {"p50": 50, "p99": 99, "p99_9": 99.9}
FEW, MANY = 1000, 100_000
PUBLISHED = ("float32", "bfloat16", "int8")
WRITE_ROWS = 65_536  # at a time
REFRESH_S, REFRESHES = 1.0, 5
CONTAINS_CALLS = 50


class Trainer:
    """In a process of its own: the writer of the table."""

    def __init__(self, workload: Workload, folder: Path, memory: int) -> None:
        import embedrock as er

        rule = er.Adagrad(lr=LEARNING_RATE)
        self._workload, self._step, self._stop = workload, 0, threading.Event()
        self._folder = folder
        self._table = er.Table(workload.rows, workload.dim, path=folder / TABLE, memory=memory, rule=rule, keep=1)
        for first in range(0, workload.rows, WRITE_ROWS):
            self._change(np.arange(first, min(first + WRITE_ROWS, workload.rows)))
        self._table.commit()
        self._table.compact()

    def commit(self, count: int) -> int:
        """Step `count` rows and commit them; return the bytes of the files."""
        self._step += 1
        rows = (np.arange(count) + self._step * count) * SCATTER % self._workload.rows
        for first in range(0, count, WRITE_ROWS):
            self._change(np.unique(rows[first : first + WRITE_ROWS]))
        self._table.commit()
        return int(self._table.stats()["disk_bytes"])

    def publish(self, count: int, dtype: str) -> dict[str, float]:
        """Commit `count` rows and publish them; return the seconds of that, and the bytes of the new logs."""
        import embedrock as er

        self.commit(count)
        before, start = self._log_bytes(dtype), time.perf_counter()
        er.publish(self._table, self._folder / dtype, dtype=dtype)
        return {"publish_s": time.perf_counter() - start, "log_bytes": self._log_bytes(dtype) - before}

    def _log_bytes(self, dtype: str) -> int:
        return sum(file.stat().st_size for file in (self._folder / dtype / "delta").glob("*"))

    def start(self, commits: bool) -> None:
        """Train in a thread until `stop`, and commit each second."""
        self._stop.clear()
        self._thread = threading.Thread(target=self._train, args=(commits,))
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _train(self, commits: bool) -> None:
        due, number = time.monotonic(), 0
        while not self._stop.is_set():
            number += 1
            self._change(np.unique(self._workload.batch_at(number)))
            if commits and time.monotonic() >= due:
                due = time.monotonic() + REFRESH_S
                self._table.commit(wait=False)

    def _change(self, ids: np.ndarray) -> None:
        self._table.update(ids, np.full((len(ids), self._workload.dim), 1e-3, np.float32))


class Reader:
    """In a process of its own: a snapshot of the table, whose rows are all in RAM."""

    def __init__(self, workload: Workload, folder: Path, memory: int | str) -> None:
        self._rows, self._how = workload.rows, {"path": folder / TABLE, "mode": "r", "memory": memory}
        self._draw, self._table = np.random.default_rng(workload.seed), None
        self.open()
        self._table.lookup(np.arange(IDS))  # loads kernels
        self._before = _own_bytes()
        self.warm()

    def open(self) -> float:
        """Open the table anew; return the seconds."""
        import embedrock as er

        if self._table is not None:
            self._table.close()
        start = time.perf_counter()
        self._table: Any = er.open(**self._how)
        return time.perf_counter() - start

    def warm(self) -> None:
        """Read all rows."""
        for first in range(0, self._rows, WRITE_ROWS):
            self._table.lookup(np.arange(first, min(first + WRITE_ROWS, self._rows)))

    def grown(self) -> int:
        """Return the bytes of RAM that the rows have taken; of pages that processes share, this one's part."""
        return _own_bytes() - self._before

    def lookups(self, count: int, refreshes: bool = False) -> dict[str, float]:
        """Look up random ids `count` times; return microseconds. With `refreshes`, follow the table each second."""
        batches, times = self._draw.integers(0, self._rows, (count, IDS)), list[float]()
        due, pauses = time.monotonic() + REFRESH_S, list[float]()
        while len(times) < count or (refreshes and len(pauses) < REFRESHES):
            if refreshes and time.monotonic() >= due:
                pauses.append(self.refresh())
                due = time.monotonic() + REFRESH_S
            start = time.perf_counter()
            self._table.lookup(batches[len(times) % count])
            times.append(time.perf_counter() - start)
        found = {name: float(np.percentile(times, percent) * 1e6) for name, percent in PERCENTS.items()}
        return found | ({"longest_pause_ms": max(pauses) * 1e3} if refreshes else {})

    def refresh(self) -> float:
        """Move to the newest commit; return the seconds, in which lookups wait."""
        start = time.perf_counter()
        self._table.refresh()
        return time.perf_counter() - start

    def after_refresh(self, count: int) -> dict[str, float]:
        """Return milliseconds of `refresh`, how many times longer lookups take after it, and the time of `changes`."""
        self.warm()
        before, since = self.lookups(count)["p50"], self._table.last_commit
        seconds, after = self.refresh(), self.lookups(count)["p50"]
        start = time.perf_counter()
        for _ in self._table.changes(since):
            pass
        changes_ms = (time.perf_counter() - start) * 1e3
        return {"refresh_ms": seconds * 1e3, "p50_after": after / before, "changes_ms": changes_ms}

    def contains(self, calls: int) -> dict[str, float]:
        """Return seconds of `contains` of few and of many random ids: medians."""
        found = dict[str, float]()
        for name, count in (("few_s", IDS), ("many_s", MANY)):
            batches, times = self._draw.integers(0, self._rows, (calls, count)), list[float]()
            for ids in batches:
                start = time.perf_counter()
                self._table.contains(ids)
                times.append(time.perf_counter() - start)
            found[name] = float(np.median(times))
        return found


class Server:
    """In a process of its own: a subscriber of what the trainer publishes, looked up by another thread."""

    def __init__(self, workload: Workload, folder: Path, dtype: str) -> None:
        import embedrock as er

        self._served, self._ids = er.Subscriber(folder / dtype), np.arange(IDS) * SCATTER % workload.rows

    def show(self) -> dict[str, float]:
        """Show the newest step; return the milliseconds of that, and of the longest lookup meanwhile."""
        ended, times = threading.Event(), list[float]()

        def look() -> None:
            while not ended.is_set():
                start = time.perf_counter()
                self._served.lookup({Path(TABLE).stem: self._ids})
                times.append(time.perf_counter() - start)

        thread = threading.Thread(target=look)
        thread.start()
        start = time.perf_counter()
        assert self._served.refresh()
        seconds = time.perf_counter() - start
        ended.set()
        thread.join()
        return {"shown_ms": seconds * 1e3, "longest_lookup_ms": max(times) * 1e3}


def _own_bytes() -> int:
    """Return the proportional set size of this process (Linux)."""
    (line,) = (line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) << 10


@dataclass
class World:
    """A trainer, a reader of each side, and functions that make further readers of a side, and subscribers."""

    trainer: Child
    readers: dict[str, Child]
    options: DiskOptions
    make: Callable[[str], Child]
    serve: Callable[[str], Child]

    def rounds(self, name: str, turn: Callable[[Child], dict[str, float]]) -> list[dict[str, Any]]:
        """Take turns of all readers; return a line for each, with medians and least values."""
        say(name)
        turns = [{side: turn(reader) for side, reader in self.readers.items()} for _ in range(self.options.rounds)]
        lines = list[dict[str, Any]]()
        for side in self.readers:
            own = [each_turn[side] for each_turn in turns]
            found = {key: median(one[key] for one in own) for key in own[0]}
            least = {f"least_{key}": min(one[key] for one in own) for key in own[0]}
            lines.append({"name": f"{name}, {side}", "row": name, "side": side, **found, **least, "turns": own})
        return lines

    @contextmanager
    def training(self, commits: bool) -> Iterator[None]:
        self.trainer.call("start", commits)
        try:
            yield
        finally:
            self.trainer.call("stop")


# ---------------------------------------------------------------- rows of the report, each with a place in `ROWS`


def opening(world: World) -> list[dict[str, Any]]:
    """Time `er.open` of a compacted table."""
    return world.rounds("open", lambda reader: {"open_s": reader.call("open")})


def ram(world: World) -> list[dict[str, Any]]:
    """Measure the RAM of rows in several processes of a side."""
    lines = list[dict[str, Any]]()
    for side in world.readers:
        with ExitStack() as held:
            more = [held.enter_context(world.make(side)) for _ in range(1, PROCESSES)]
            total = sum(reader.call("grown") for reader in (world.readers[side], *more))
        lines.append({"name": f"RAM of {PROCESSES} processes, {side}", "row": "ram", "side": side, "ram_bytes": total})
    return lines


def lookups_alone(world: World) -> list[dict[str, Any]]:
    """Time lookups on a machine that does nothing else."""
    for reader in world.readers.values():
        reader.call("warm")
    return world.rounds("lookups alone", lambda reader: reader.call("lookups", world.options.steps))


def contains(world: World) -> list[dict[str, Any]]:
    """Time `contains` on a machine that does nothing else."""
    return world.rounds("contains", lambda reader: reader.call("contains", CONTAINS_CALLS))


def lookups_beside_a_trainer(world: World) -> list[dict[str, Any]]:
    """Time lookups while the trainer steps batches."""
    with world.training(commits=False):
        return world.rounds("lookups beside a trainer", lambda reader: reader.call("lookups", world.options.steps))


def lookups_over_refreshes(world: World) -> list[dict[str, Any]]:
    """Time lookups of readers that follow a trainer."""
    with world.training(commits=True):
        name = "lookups over a refresh each second"
        return world.rounds(name, lambda reader: reader.call("lookups", world.options.steps, True))


def refresh(world: World) -> list[dict[str, Any]]:
    """Time `refresh` to a commit of few and of many rows, and lookups after it."""
    lines = list[dict[str, Any]]()
    for count in (FEW, MANY):

        def turn(reader: Child, count: int = count) -> dict[str, float]:
            reader.call("refresh")
            world.trainer.call("commit", count)
            return reader.call("after_refresh", world.options.steps // 10)

        lines += [{**line, "changed": count} for line in world.rounds(f"refresh of {count:,} rows", turn)]
    return lines


def publishing(world: World) -> list[dict[str, Any]]:
    """Publish many changed rows as each dtype, and show them elsewhere."""
    lines = list[dict[str, Any]]()
    for dtype in PUBLISHED:
        say(f"publish {MANY:,} rows as {dtype}")
        world.trainer.call("publish", MANY, dtype)  # the base
        server, turns = world.serve(dtype), list[dict[str, float]]()
        for _ in range(world.options.rounds):
            turns.append({**world.trainer.call("publish", MANY, dtype), **server.call("show")})
        found = {key: median(one[key] for one in turns) for key in turns[0]}
        lines.append(
            {"name": f"publish {MANY:,} rows as {dtype}", "row": "publish", "side": "map", "turns": turns, **found}
        )
    return lines


ROWS = (
    opening,
    ram,
    lookups_alone,
    contains,
    lookups_beside_a_trainer,
    lookups_over_refreshes,
    refresh,
    publishing,
)


def _of(row: str, key: str) -> Any:
    return lambda lines: each(lambda line: line[key], key)([line for line in lines if line["row"] == row])


def _targets(table_bytes: int) -> list[Target]:
    wanted = {
        "lookups alone": (40, 100, 200),
        "lookups beside a trainer": (50, 300, 1500),
        "lookups over a refresh each second": (None, 1000, None),
    }
    found = [
        Target(f"{{name}}: {key} of {IDS} ids", _of(row, key), float(most), "us", at_most=True)
        for row, limits in wanted.items()
        for key, most in zip(PERCENTS, limits, strict=True)
        if most is not None
    ]
    pause = _of("lookups over a refresh each second", "longest_pause_ms")
    found.append(Target("{name}: longest pause", pause, 1.0, "ms", at_most=True))
    for ids, key, most in ((IDS, "few_s", 30e-6), (MANY, "many_s", 5e-3)):
        found.append(Target(f"{{name}}: {ids:,} ids", _of("contains", key), most, "s", at_most=True))
    for count, most, changes in ((FEW, 10.0, 3.0), (MANY, 40.0, 100.0)):
        row = f"refresh of {count:,} rows"
        found.append(Target("{name}: changes, with their rows", _of(row, "changes_ms"), changes, "ms", at_most=True))
        found.append(Target("{name}", _of(row, "refresh_ms"), most, "ms", at_most=True))
        found.append(Target("{name}: p50 after it, over before", _of(row, "p50_after"), 1.5, at_most=True))
    shared = each(lambda line: line["ram_bytes"] / table_bytes, "ram_bytes", name=f"RAM of {PROCESSES} processes, map")
    found.append(Target("{name}, over the bytes of the table", shared, 1.1, at_most=True))
    found.append(Target("{name}", _of("publish", "publish_s"), 0.3, "s", at_most=True))
    found.append(Target("{name}: shown elsewhere", _of("publish", "shown_ms"), 100.0, "ms", at_most=True))
    return [*found, Target("{name}", _of("open", "open_s"), 0.2, "s", at_most=True)]


def measure(task: Task) -> Report:
    """Measure each row, print the lines, and return the outcome."""
    workload, options = task.workload, task.options
    table_bytes = workload.rows * (8 * workload.dim + 4)  # weights, Adagrad's state, a seal
    memory = 2 * table_bytes + (64 << 20)
    with scratch_folder(options.folder, 4 * table_bytes) as folder, ExitStack() as held:
        say(f"making a table of {format_bytes(table_bytes)}")
        trainer = held.enter_context(options.child(Trainer, workload, folder, memory))
        sizes = dict(zip(SIDES, (memory, "map"), strict=True))

        def make(side: str) -> Child:
            return options.child(Reader, workload, folder, sizes[side])

        readers = {side: held.enter_context(make(side)) for side in SIDES}

        def serve(dtype: str) -> Child:
            return held.enter_context(options.child(Server, workload, folder, dtype))

        world = World(trainer, readers, options, make, serve)
        report = Report([line for row in ROWS for line in row(world)])
    print("\n".join(map(format_line, report.results)))
    report.compare_with(_targets(table_bytes))
    return report


SERVING = Benchmark(
    "serving",
    "readers of a table that another process trains",
    arguments=("rows", "dim", "batch", "features", "zipf", "seed", "threads", "rounds", "steps", "timeout_s", "folder"),
    measure=measure,
    workloads=(Workload(rows=1_000_000),),
    options=DiskOptions(steps=10_000, rounds=3, limit=0),
)
