"""``bench commit``: bytes, time and RAM of commits, stalls of training beside them, and opening again."""

from __future__ import annotations

import time
import zlib
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from embedrock.bench.disk.contenders import RECORD_COLUMNS, TABLE, Job, train
from embedrock.bench.disk.effort import OPTIONS, WORKLOAD, DiskEffort
from embedrock.bench.disk.files import scratch_folder
from embedrock.bench.harness.bench import Bench, Task
from embedrock.bench.harness.contenders import LEARNING_RATE
from embedrock.bench.harness.machine import RamGrowth
from embedrock.bench.harness.options import several_rows
from embedrock.bench.harness.processes import Child, ChildError
from embedrock.bench.harness.report import Report, medians
from embedrock.bench.harness.targets import Found, Line, Target, each
from embedrock.bench.harness.workload import SCATTER, Workload
from embedrock.machine.probe import write_rate
from embedrock.machine.ram import rss_bytes
from embedrock.machine.sizes import format_bytes
from embedrock.terminal.progress import say
from embedrock.terminal.tables import Field, format_lines, format_number, format_whole

COMMIT_ROWS = (10_000, 100_000, 1_000_000)
TOUCH_ROWS = 16_384  # stepped at a time
QUIET_STEPS = 60  # timed without a commit, to compare with
RESIDENT_BATCHES = 8
SPARSE_BYTES = 100 * 10**9
SPAN_IDS = 1 << 21  # of a chunk of the sparse table, half of whose ids have records
LOG_ROWS = 4_000_000  # that are not compacted, for the RAM of the overlay
WRITTEN, RATE, RAM_MB, STALL, OPEN_S, OVERLAY_BYTES = 1.1, 0.6, 128.0, 0.05, 1.0, 24.0


class Commits:
    """In a process of its own: a table on disk, and commits of rows that were stepped."""

    def __init__(self, job: Job) -> None:
        import embedrock as er

        workload = job.workload
        where: dict[str, Any] = {"path": job.folder / TABLE, "memory": job.memory, "keep": 1}
        self._job, self._gradient = job, workload.gradient()
        self._table = er.Table(workload.rows, workload.dim, rule=er.Adam(lr=LEARNING_RATE), **where)
        self._step = 0
        self._commit([0])  # compiles

    def commit(self, count: int) -> dict[str, float]:
        """Step `count` rows and commit them; return bytes, seconds and the growth of RAM."""
        before = self._table.stats()
        self._touch(count)
        middle = self._table.stats()
        with RamGrowth() as ram:
            start = time.perf_counter()
            self._table.commit()
            seconds = time.perf_counter() - start
        after = self._table.stats()
        return {
            "rows": count,
            "record_bytes": after["record_bytes"],
            "seconds": seconds,
            "bytes_written": _committed(after) - _committed(before),
            "bytes_in_commit": _committed(after) - _committed(middle),
            "extra_ram_bytes": ram.growth_bytes,
        }

    def stalls(self, count: int) -> dict[str, float]:
        """Commit `count` rows in the background; return how training on other, resident rows went meanwhile."""
        batches = list(self._job.batches(0, RESIDENT_BATCHES))
        self._touch(count)
        for ids in batches * 2:
            self._train(ids)
        quiet = [self._train(batches[index % len(batches)]) for index in range(QUIET_STEPS)]
        number, start = self._table.last_commit, time.perf_counter()
        self._table.commit(wait=False)
        call_s, busy = time.perf_counter() - start, list[float]()
        while self._table.last_commit == number:
            busy.append(self._train(batches[len(busy) % len(batches)]))
        seconds = time.perf_counter() - start
        usual, longest = median(quiet), max(quiet)
        return {
            "rows": count,
            "seconds": seconds,
            "call_s": call_s,
            "steps": len(busy),
            "quiet_step_s": usual,
            "step_s": median(busy) if busy else 0.0,
            "slowdown": mean(busy) / mean(quiet) if busy else 1.0,
            "longest_step_s": max(busy, default=0.0),
            # Time in which training stood: the call, and what steps took beyond the longest of those without a commit.
            "stalled_s": call_s + sum(max(0.0, step - longest) for step in busy),
        }

    def close(self) -> None:
        """Close the table, and remember nothing that was not committed."""
        self._table.close()

    def _touch(self, count: int) -> None:
        self._step += 1
        gradient = np.full((TOUCH_ROWS, self._job.workload.dim), 1e-3, np.float32)
        for first in range(0, count, TOUCH_ROWS):
            ranks = np.arange(first, min(first + TOUCH_ROWS, count)) + self._step * count
            self._table.update(ranks * SCATTER % self._job.workload.rows, gradient[: len(ranks)])

    def _train(self, ids: np.ndarray) -> float:
        start = time.perf_counter()
        train(self._table, ids, self._gradient)
        return time.perf_counter() - start

    def _commit(self, ids: Sequence[int]) -> None:
        self._table.update(ids, np.zeros((len(ids), self._job.workload.dim), np.float32))
        self._table.commit()


def _committed(stats: dict[str, float]) -> float:
    # Compaction runs in the background, and has its own line in `bench disk`.
    return stats["bytes_written"] - stats["bytes_compacted"]


class Openings:
    """In a process of its own: opens a table again."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def write_sparse(self, nbytes: int) -> dict[str, float]:
        """Make a compacted table of `nbytes` whose files have indexes, and holes where the records would be."""
        import embedrock as er
        from embedrock.machine.vfs import OS_SYSTEM
        from embedrock.store import manifest as manifests

        folder, dim = self._job.folder / TABLE, self._job.workload.dim
        spans = max(1, round(nbytes / (dim * 4 * RECORD_COLUMNS) / (SPAN_IDS // 2)))
        with er.Table(spans * SPAN_IDS, dim, rule=er.Adam(), path=folder) as table:
            table.update([0], np.zeros((1, dim), np.float32))
            number = table.commit()
        manifest = manifests.read(OS_SYSTEM, str(folder), number)
        base = tuple(_sparse_run(folder, manifest, span) for span in range(spans))
        count = sum(entry.count for entry in base)
        changes: dict[str, Any] = {"commit": number + 1, "parent": number, "delta": (), "base": base, "count": count}
        manifests.publish(OS_SYSTEM, str(folder), replace(manifest, **changes))
        return {"disk_bytes": sum(entry.size for entry in base), "rows": count}

    def write_logs(self, count: int) -> dict[str, float]:
        """Make a table whose rows are all in logs that are not compacted."""
        import embedrock as er

        rows = 8 * count
        with er.Table(rows, 1, rule=er.SGD(), path=self._job.folder / TABLE, memory=self._job.memory) as table:
            for first in range(0, count, TOUCH_ROWS):
                ids = np.arange(first, min(first + TOUCH_ROWS, count)) * SCATTER % rows
                table.update(ids, np.ones((len(ids), 1), np.float32))
            table.commit()
            return {"overlay_rows": table.stats()["overlay_rows"]}

    def open(self) -> dict[str, float]:
        """Open the table; return its seconds, and the growth of RAM in bytes."""
        import embedrock as er
        from embedrock import kernels

        kernels.cpu.runtime  # noqa: B018  # what is loaded once for all tables does not count
        with RamGrowth() as ram:
            before_bytes, start = rss_bytes(), time.perf_counter()
            table = er.open(self._job.folder / TABLE, mode="r")
            seconds = time.perf_counter() - start
        grown_bytes, stats = rss_bytes() - before_bytes, table.stats()
        table.close()
        return {
            "seconds": seconds,
            "rss_growth_bytes": grown_bytes,
            "peak_growth_bytes": ram.growth_bytes,
            "overlay_rows": stats["overlay_rows"],
            "overlay_bytes": stats["overlay_bytes"],
            "disk_bytes": stats["disk_bytes"],
        }


def _sparse_run(folder: Path, manifest: Any, span: int) -> Any:
    """Make a chunk without records, half of whose ids seem to have them, and return its entry."""
    from embedrock.machine.vfs import OS_SYSTEM
    from embedrock.store.runs import CRC_BYTES, Log, RunFile

    name = f"base/{manifest.commit + 1:010d}/c{span:05d}.rows"
    (folder / name).parent.mkdir(exist_ok=True)
    log = Log.create(OS_SYSTEM, str(folder), name, manifest.uuid, manifest.record_bytes, 0)
    log.close()
    bits = np.random.default_rng(span).bytes(SPAN_IDS // 8)
    count = int(np.unpackbits(np.frombuffer(bits, np.uint8)).sum())
    with (folder / name).open("r+b") as file:
        file.truncate(Log.first + count * (manifest.record_bytes + CRC_BYTES))
        file.seek(0, 2)
        file.write(bits)
        size = file.tell()
    return RunFile(name, size, count, "bits", span * SPAN_IDS, (span + 1) * SPAN_IDS, zlib.crc32(bits), log.salt)


# ---------------------------------------------------------------- in the parent


def measure(task: Task) -> Report:
    """Measure commits of several sizes and openings, print tables, and return all that was found.

    The largest commit should fit `DiskEffort.memory`.
    """
    stages = Stages(task.workload, task.effort)
    report = Report()
    for name, stage in (("commit", partial(stages.commits, task.arguments.sizes)), ("open", stages.openings)):
        try:
            report.results += stage()
        except ChildError as error:
            report.fail(name, error)
    print(f"{_format(report.results)}\n\n{task.effort.limit_note()}\n")
    report.judge(_targets(report.results))
    return report


class Stages:
    """Runs the stages, each on a table of its own."""

    def __init__(self, workload: Workload, effort: DiskEffort) -> None:
        self._workload, self._effort = workload, effort

    def commits(self, sizes: Sequence[int]) -> list[dict[str, Any]]:
        """Commit each number of rows some times, with the disk's own rate before and after each."""
        record_bytes = self._workload.dim * 4 * RECORD_COLUMNS
        need_bytes = 8 * max(sizes) * record_bytes
        with (
            scratch_folder(self._effort.folder, need_bytes) as folder,
            self._effort.confined(Commits, self._job(folder)) as (child, _),
        ):
            lines = [self._commit(child, folder, count, count * record_bytes) for count in sizes]
            lines.append({"name": "commit in the background", **child.call("stalls", max(sizes))})
            child.call("close")
        return lines

    def _commit(self, child: Child, folder: Path, count: int, size: int) -> dict[str, Any]:
        say(f"commits of {count:,} rows")
        rates, runs = [write_rate(folder / "sequential", size)], list[dict[str, float]]()
        for _ in range(self._effort.rounds):
            runs.append(child.call("commit", count))
            rates.append(write_rate(folder / "sequential", size))
        rate = {"disk_bytes_per_s": mean(rates)}
        return {"name": f"commit of {count:,} rows", **medians(runs), **rate, "runs": runs}

    def openings(self) -> list[dict[str, Any]]:
        """Open a large table of indexes and holes, and one of logs that are not compacted."""
        return [
            self._opening("open a sparse table", "write_sparse", SPARSE_BYTES),
            self._opening("open logs", "write_logs", LOG_ROWS),
        ]

    def _opening(self, name: str, write: str, size: int) -> dict[str, Any]:
        say(name)
        with scratch_folder(self._effort.folder, LOG_ROWS * 64) as folder:
            with self._effort.child(Openings, self._job(folder)) as child:
                child.call(write, size)
            runs = []
            for _ in range(self._effort.rounds):
                with self._effort.confined(Openings, self._job(folder)) as (child, _):
                    runs.append(child.call("open"))
        return {"name": name, **medians(runs), "runs": runs}

    def _job(self, folder: Path) -> Job:
        return Job(self._workload, folder, self._effort.memory)


# ---------------------------------------------------------------- targets


def _written(line: Line) -> float:
    return line["bytes_written"] / (line["rows"] * line["record_bytes"])


def _rate(line: Line) -> float:
    return line["bytes_in_commit"] / line["seconds"] / line["disk_bytes_per_s"]


def _extra_ram(lines: Sequence[Line]) -> Iterator[Found]:
    if extra := [line["extra_ram_bytes"] for line in lines if "extra_ram_bytes" in line]:
        yield max(extra) / 1e6, {}


def _stalled(line: Line) -> float:
    return line["stalled_s"] / line["seconds"]


def _per_row(line: Line) -> float:
    return line["overlay_bytes"] / line["overlay_rows"]


def _targets(lines: Sequence[Line]) -> list[Target]:
    """Return what should come out; the rate is that of the largest commit."""
    largest = [line["name"] for line in lines if "bytes_written" in line][-1:]
    sparse = [format_bytes(line["disk_bytes"]) for line in lines if line["name"] == "open a sparse table"]
    stood = "time that training stood during a commit in the background"
    return [
        Target("bytes written of {name}, over its records", each(_written, "bytes_written"), WRITTEN, at_most=True),
        *(Target("rate of a {name}, over the disk's own", each(_rate, name=name), RATE) for name in largest),
        Target("extra RAM of a commit", _extra_ram, RAM_MB, "MB", at_most=True),
        Target(stood, each(_stalled, "stalled_s"), STALL, at_most=True),
        *(
            Target(f"open {size}", each(lambda line: line["seconds"], name="open a sparse table"), OPEN_S, "s", True)
            for size in sparse
        ),
        Target("RAM of a row not compacted", each(_per_row, name="open logs"), OVERLAY_BYTES, "bytes", at_most=True),
    ]


# ---------------------------------------------------------------- printing


_FIELDS = (
    Field("", "name"),
    Field("ms", lambda line: line["seconds"] * 1e3, format_whole),
    Field("written", "bytes_in_commit", format_bytes),
    Field("MB/s", lambda line: line["bytes_in_commit"] / line["seconds"] / 1e6, format_whole),
    Field("disk's own", lambda line: line["disk_bytes_per_s"] / 1e6, format_whole),
    Field("extra RAM", "extra_ram_bytes", format_bytes),
)


def _format(lines: Sequence[dict[str, Any]]) -> str:
    commits = [line for line in lines if "bytes_in_commit" in line]
    tables = [format_lines(_FIELDS, commits)] if commits else []
    tables += [_format_stalls(line) for line in lines if "stalled_s" in line]
    tables += [_format_opening(line) for line in lines if "rss_growth_bytes" in line]
    return "\n".join(["", *tables])


def _format_stalls(line: Line) -> str:
    step, quiet, longest = (format_number(line[name] * 1e3) for name in ("step_s", "quiet_step_s", "longest_step_s"))
    return (
        f"{line['name']}, {line['rows']:,} rows: {line['seconds']:.2f} s, of which the call took "
        f"{line['call_s'] * 1e3:.1f} ms; {line['steps']} steps of {step} ms (without: {quiet} ms), "
        f"the longest {longest} ms, all together {line['slowdown']:.2f}x as long"
    )


def _format_opening(line: Line) -> str:
    return (
        f"{line['name']}, {format_bytes(line['disk_bytes'])}: {line['seconds']:.3f} s, "
        f"{format_bytes(line['rss_growth_bytes'])} of RAM (at most {format_bytes(line['peak_growth_bytes'])})"
    )


def _add_sizes(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--sizes", type=several_rows, default=list(COMMIT_ROWS), metavar="N,N,...", help="rows of a commit"
    )


COMMIT = Bench(
    "commit",
    "commits, training beside them, and opening",
    measure,
    OPTIONS,
    workloads=(WORKLOAD,),
    effort=DiskEffort(),
    add_options=_add_sizes,
)
