"""``bench stream``: a long stream of ids that are born and die, through a table on disk that keeps the rows in use.

The ids of a step are those of items by their age, which is spread evenly by its logarithm: so young items are seen
most, as in logs of clicks, and all ids of the stream are asked for again and again. An admission by a sketch and an
eviction by least use keep the table at `ROWS` rows. Commits go on in the background. What counts begins when the table
is full: throughput of the last tenth of the stream against that of the first, steps that take longer than others, RAM,
and files against the records that are alive.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embedrock.bench.disk.effort import DiskEffort
from embedrock.bench.disk.files import scratch_folder
from embedrock.bench.harness.bench import Bench, Task
from embedrock.bench.harness.report import Report
from embedrock.bench.harness.targets import Target, each
from embedrock.bench.harness.workload import Workload, bounded_zipf
from embedrock.machine.ram import peak_rss_bytes
from embedrock.machine.sizes import format_bytes
from embedrock.terminal.arguments import count
from embedrock.terminal.progress import say
from embedrock.terminal.tables import format_count

MIXED = np.uint64(0x9E3779B97F4A7C15)  # odd: ids that are neighbours in time end up far apart
ROWS, LOOKUPS = 1_000_000, 100_000_000
STEPS_A_COMMIT = 200
WITHIN = 1000  # steps, of the admission
LOOKED_AT = 10  # steps between two looks at the files
MANY = 2  # times the median: a step that takes longer is counted
MB = 1e6


def ids_of(workload: Workload, step: int, steps: int) -> npt.NDArray[np.int64]:
    """Return the ids of a step: in all steps together, as many are born as the workload has rows."""
    uniform = np.random.default_rng((workload.seed, step)).random(workload.lookups)
    born = step * workload.rows // steps
    return ((born - bounded_zipf(uniform, workload.rows, 1.0)).astype(np.uint64) * MIXED).view(np.int64)


class Stream:
    """In a process of its own: a table on disk, and a stream through it.

    Args:
        workload: its `rows` are the ids of the stream.
        folder: of the table.
        memory: of the table.
        sizes: lookups of the stream, and rows that the table may have.
    """

    def __init__(self, workload: Workload, folder: Path, memory: int, sizes: tuple[int, int]) -> None:
        import embedrock as er

        (lookups, rows), self._workload = sizes, workload
        self._steps = lookups // workload.lookups
        seen = workload.lookups * WITHIN // 2  # in a period; fewer are different
        admission = er.Admission(2, within=WITHIN, sketch=er.Admission.sketch_bytes(seen // 2, 2))
        options: dict[str, Any] = {"rule": er.Adam(lr=1e-3), "seed": 0, "keep": 1}
        self._gradient = np.full((workload.lookups, workload.dim), 1e-3, np.float32)
        small = er.Eviction(max_rows=2 * workload.lookups)  # kernels are loaded before, as in a process that trains
        with er.Table(
            None, workload.dim, admission=admission, eviction=small, path=folder / "small", memory="32MiB", **options
        ) as table:
            for step in range(4):
                self._step(table, ids_of(workload, step, 4))
                table.commit()
            table.compact()
        self._before_bytes = peak_rss_bytes()
        options |= {"admission": admission, "eviction": er.Eviction(max_rows=rows)}
        self._folder = folder / "table"
        self._table = er.Table(None, workload.dim, path=self._folder, memory=memory, **options)

    def run(self) -> dict[str, Any]:
        """Go through the stream, and return what was seen from the step on in which the first row left."""
        table, times, full_at, worst = self._table, np.zeros(self._steps), 0, 0.0
        begun, used = np.zeros(self._steps + 1), np.zeros(self._steps + 1)
        for step in range(self._steps):
            begun[step], used[step] = time.perf_counter(), time.process_time()
            ids = ids_of(self._workload, step, self._steps)
            started = time.perf_counter()
            self._step(table, ids)
            times[step] = time.perf_counter() - started
            if (step + 1) % LOOKED_AT == 0 and full_at:
                worst = max(worst, self._files_over_live(table.stats()))
            if (step + 1) % STEPS_A_COMMIT == 0:
                table.commit(step=step, wait=False)
                full_at = full_at or (step + 1 if table.stats()["evicted"] else 0)
                say(f"{(step + 1) * self._workload.lookups:,} lookups", transient=True)
        begun[-1], used[-1] = time.perf_counter(), time.process_time()
        table.commit()
        return self._told(times[full_at:], np.diff(begun)[full_at:], np.diff(used)[full_at:], worst)

    def _step(self, table: Any, ids: np.ndarray) -> None:
        table.update(ids, 0.1 * table.lookup(ids) + self._gradient)
        table.lookup(ids[:1])  # waits for the step

    def _told(self, times: np.ndarray, whole: np.ndarray, used: np.ndarray, worst: float) -> dict[str, Any]:
        stats, tenth = self._table.stats(), max(1, len(whole) // 10)
        typical = float(np.median(times)) if len(times) else 0.0
        return {
            "rows": stats["rows_touched"],
            "admitted": stats["admitted"],
            "evicted": stats["evicted"],
            "lookups": self._steps * self._workload.lookups,
            "lookups_full": len(whole) * self._workload.lookups,
            "first_lookups_per_s": self._workload.lookups * tenth / float(whole[:tenth].sum()),
            "last_lookups_per_s": self._workload.lookups * tenth / float(whole[-tenth:].sum()),
            "first_processor_ms": 1e3 * float(used[:tenth].mean()),
            "last_processor_ms": 1e3 * float(used[-tenth:].mean()),
            "step_ms": 1e3 * typical,
            "slow_share": float(np.mean(times > MANY * typical)),
            "longest_ms": 1e3 * float(times.max()),
            "ram_bytes": peak_rss_bytes() - self._before_bytes,
            "budget_bytes": stats["budget_bytes"],
            "residents_bytes": stats["residents_bytes"],
            "files_over_live": self._files_over_live(stats),
            "most_files_over_live": worst,
        }

    def _files_over_live(self, stats: dict[str, float]) -> float:
        """Return the bytes of all files that there are, those that are about to go too, over those of the rows."""
        sizes = [one.stat().st_size for one in self._folder.rglob("*") if one.is_file()]
        return sum(sizes) / (stats["rows_touched"] * stats["record_bytes"])


def measure(task: Task) -> Report:
    """Send the stream through a table, and print how it went."""
    workload, effort, sizes = task.workload, task.effort, (task.arguments.lookups, task.arguments.most_rows)
    print(
        f"{format_count(sizes[0], 'lookup')} of {format_count(workload.rows, 'id')}, {workload.lookups:,} in a step, "
        f"max_rows={sizes[1]:,}, dim {workload.dim}, a commit every {STEPS_A_COMMIT} steps"
    )
    with scratch_folder(effort.folder, 5 * sizes[1] * 12 * workload.dim) as folder:
        report = effort.run("stream", Stream, workload, folder, effort.memory, sizes, ids=workload.rows)
    for line in report.results:
        print(_told(line))
    report.judge(targets())
    return report


def _told(line: dict[str, Any]) -> str:
    return (
        f"\n{line['rows']:,.0f} rows; {line['admitted']:,.0f} came, {line['evicted']:,.0f} left. Since the table was "
        f"full, {line['lookups_full']:,} lookups: {line['first_lookups_per_s'] / MB:.2f} M/s in the first tenth, "
        f"{line['last_lookups_per_s'] / MB:.2f} in the last; {line['first_processor_ms']:.1f} and "
        f"{line['last_processor_ms']:.1f} ms of processors a step\n"
        f"a step {line['step_ms']:.1f} ms, {line['slow_share']:.1%} took twice that, the longest "
        f"{line['longest_ms']:.0f}; RAM {format_bytes(line['ram_bytes'])}, of which "
        f"{format_bytes(line['budget_bytes'])} for rows and {format_bytes(line['residents_bytes'])} to know who they "
        f"are; files {line['files_over_live']:.2f}x of live records at the end, {line['most_files_over_live']:.2f}x at "
        "most\n"
    )


def targets() -> Sequence[Target]:
    """Return what should come out."""

    def at_most(what: str, key: str, wanted: float, unit: str = "x") -> Target:
        return Target(what, each(lambda line: line[key], key, name="stream"), wanted, unit, at_most=True)

    slower = each(lambda line: line["first_lookups_per_s"] / line["last_lookups_per_s"], "step_ms", name="stream")
    busier = each(lambda line: line["last_processor_ms"] / line["first_processor_ms"], "step_ms", name="stream")
    beyond = each(
        lambda line: line["ram_bytes"] / (line["budget_bytes"] + line["residents_bytes"]), "ram_bytes", name="stream"
    )
    return [
        Target("time of the last tenth, over the first", slower, 1.2, at_most=True),
        Target("processor time of the last tenth, over the first", busier, 1.2, at_most=True),
        at_most("files at the end, over live records", "files_over_live", 3.0),
        at_most("files at most, over live records", "most_files_over_live", 3.0),
        Target("RAM of the process, over the budgets", beyond, 1.0, at_most=True),
    ]


def _add_sizes(parser: ArgumentParser) -> None:
    for name, default, text in (
        ("--lookups", LOOKUPS, "ids looked up and stepped, in all"),
        ("--most-rows", ROWS, "rows that the table may have"),
    ):
        parser.add_argument(name, type=count, default=default, metavar="N", help=f"{text} (default: {default:,})")


STREAM = Bench(
    "stream",
    "a long stream of ids that are born and die, through a table on disk that keeps the rows in use",
    measure,
    ("rows", "dim", "batch", "seed", "threads", "timeout_s", "folder", "memory", "limit"),
    workloads=(Workload(rows=100_000_000, dim=16, batch=16384, features=1),),
    effort=DiskEffort(memory=256 << 20, limit=2 << 30),
    texts={"rows": "ids of the stream"},
    add_options=_add_sizes,
)
