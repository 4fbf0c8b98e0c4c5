"""What commits cost: bytes, time and RAM for the rows they hold, stalls of training beside them, and opening again."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from embedrock.bench.disk.contenders import RECORD_COLUMNS, TABLE, Job, train
from embedrock.bench.disk.raw import write_rate
from embedrock.bench.disk.training import DiskEffort, limit_note, scratch_folder
from embedrock.bench.harness.cgroups import confined
from embedrock.bench.harness.machine import rss_bytes
from embedrock.bench.harness.processes import Child, ChildError
from embedrock.bench.harness.report import Report, Verdict, format_verdicts
from embedrock.bench.harness.workload import SCATTER, Workload
from embedrock.bench.step.contenders import LEARNING_RATE
from embedrock.machine.sizes import format_bytes
from embedrock.terminal.progress import say
from embedrock.terminal.tables import format_number, format_table

TOUCH_ROWS = 16_384  # stepped at a time
SAMPLE_S = 0.002  # between two looks at the RAM of a commit under way
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
        with Sampler() as ram:
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


class Sampler:
    """Looks at this process's RAM while a block runs.

    Attributes:
        growth_bytes: the most that it held beyond what it held before.
    """

    growth_bytes = 0

    def __enter__(self) -> Sampler:
        self._before, self._done = rss_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE_S):
            self.growth_bytes = max(self.growth_bytes, rss_bytes() - self._before)


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
        with Sampler() as ram:
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
    from embedrock.store.runs import CRC_BYTES, Entry, Log

    name = f"base/{manifest.commit + 1:010d}/c{span:05d}.rows"
    (folder / name).parent.mkdir(exist_ok=True)
    Log.create(OS_SYSTEM, str(folder), name, manifest.uuid, manifest.record_bytes, 0).close()
    bits = np.random.default_rng(span).bytes(SPAN_IDS // 8)
    count = int(np.unpackbits(np.frombuffer(bits, np.uint8)).sum())
    with (folder / name).open("r+b") as file:
        file.truncate(Log.first + count * (manifest.record_bytes + CRC_BYTES))
        file.seek(0, 2)
        file.write(bits)
        size = file.tell()
    return Entry(name, size, count, "bits", span * SPAN_IDS, (span + 1) * SPAN_IDS, zlib.crc32(bits))


# ---------------------------------------------------------------- in the parent


def run(workload: Workload, sizes: Sequence[int], effort: DiskEffort) -> Report:
    """Measure commits of several sizes and openings, print tables, and return all that was found.

    Args:
        workload: rows and dim of the table, and the batches that train beside a commit.
        sizes: rows of a commit, ascending; the largest should fit `effort.memory`.
        effort: where, how often, and with how much RAM.
    """
    bench = _Bench(workload, effort)
    report = Report()
    for name, stage in (("commit", partial(bench.commits, sizes)), ("open", bench.openings)):
        try:
            report.results += stage()
        except ChildError as error:
            say(f"{name}: failed: {error.kind}: {error}")
            report.failures.append((name, error.details))
    report.verdicts = list(_verdicts(report.results))
    print(_format(report.results))
    print(f"\n{limit_note(effort)}\n\n{format_verdicts(report.verdicts)}\n")
    return report


class _Bench:
    """Runs the stages, each on a table of its own."""

    def __init__(self, workload: Workload, effort: DiskEffort) -> None:
        self._workload, self._effort = workload, effort
        self._options: dict[str, Any] = {"environment": effort.environment(), "timeout_s": effort.timeout_s}

    def commits(self, sizes: Sequence[int]) -> list[dict[str, Any]]:
        """Commit each number of rows some times, with the disk's own rate before and after each."""
        record_bytes = self._workload.dim * 4 * RECORD_COLUMNS
        with scratch_folder(self._effort.folder, 8 * max(sizes) * record_bytes) as folder:
            job = Job(self._workload, folder, self._effort.memory)
            with confined(self._effort.limit, Commits, job, **self._options) as (child, _):
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
        line = {key: median(run[key] for run in runs) for key in runs[0]}
        return {"name": f"commit of {count:,} rows", **line, "disk_bytes_per_s": mean(rates), "runs": runs}

    def openings(self) -> list[dict[str, Any]]:
        """Open a large table of indexes and holes, and one of logs that are not compacted."""
        return [
            self._opening("open a sparse table", "write_sparse", SPARSE_BYTES),
            self._opening("open logs", "write_logs", LOG_ROWS),
        ]

    def _opening(self, name: str, write: str, size: int) -> dict[str, Any]:
        say(name)
        with scratch_folder(self._effort.folder, LOG_ROWS * 64) as folder:
            job = Job(self._workload, folder, self._effort.memory)
            with Child(Openings, job, **self._options) as child:
                child.call(write, size)
            runs = []
            for _ in range(self._effort.rounds):
                with confined(self._effort.limit, Openings, job, **self._options) as (child, _):
                    runs.append(child.call("open"))
        return {"name": name, **{key: median(run[key] for run in runs) for key in runs[0]}, "runs": runs}


def _verdicts(lines: Sequence[dict[str, Any]]) -> Iterator[Verdict]:
    commits = [line for line in lines if "bytes_written" in line]
    for line in commits:
        factor = line["bytes_written"] / (line["rows"] * line["record_bytes"])
        yield Verdict(f"bytes written of {line['name']}, over its records", factor, WRITTEN, "x", at_most=True)
    if commits:
        largest = commits[-1]
        share = largest["bytes_in_commit"] / largest["seconds"] / largest["disk_bytes_per_s"]
        yield Verdict(f"rate of a {largest['name']}, over the disk's own", share, RATE, "x")
        extra = max(line["extra_ram_bytes"] for line in commits) / 1e6
        yield Verdict("extra RAM of a commit", extra, RAM_MB, "MB", at_most=True)
    for line in lines:
        if "stalled_s" in line:
            what = "time that training stood during a commit in the background"
            yield Verdict(what, line["stalled_s"] / line["seconds"], STALL, "x", at_most=True)
        if line["name"] == "open a sparse table":
            what = f"open {format_bytes(line['disk_bytes'])}"
            yield Verdict(what, line["seconds"], OPEN_S, "s", at_most=True)
        if line["name"] == "open logs":
            per_row = line["overlay_bytes"] / line["overlay_rows"]
            yield Verdict("RAM of a row not compacted", per_row, OVERLAY_BYTES, "bytes", at_most=True)


# ---------------------------------------------------------------- printing


def _format(lines: Sequence[dict[str, Any]]) -> str:
    commits = [
        (
            line["name"],
            f"{line['seconds'] * 1e3:,.0f}",
            format_bytes(line["bytes_in_commit"]),
            f"{line['bytes_in_commit'] / line['seconds'] / 1e6:,.0f}",
            f"{line['disk_bytes_per_s'] / 1e6:,.0f}",
            format_bytes(line["extra_ram_bytes"]),
        )
        for line in lines
        if "bytes_in_commit" in line
    ]
    tables = [format_table(("", "ms", "written", "MB/s", "disk's own", "extra RAM"), commits)] if commits else []
    for line in lines:
        if "stalled_s" in line:
            tables.append(
                f"{line['name']}, {line['rows']:,} rows: {line['seconds']:.2f} s, of which the call took "
                f"{line['call_s'] * 1e3:.1f} ms; {line['steps']} steps of {format_number(line['step_s'] * 1e3)} ms "
                f"(without: {format_number(line['quiet_step_s'] * 1e3)} ms), the longest "
                f"{format_number(line['longest_step_s'] * 1e3)} ms, all together {line['slowdown']:.2f}x as long"
            )
        if "rss_growth_bytes" in line:
            tables.append(
                f"{line['name']}, {format_bytes(line['disk_bytes'])}: {line['seconds']:.3f} s, "
                f"{format_bytes(line['rss_growth_bytes'])} of RAM (at most {format_bytes(line['peak_growth_bytes'])})"
            )
    return "\n".join(["", *tables])
