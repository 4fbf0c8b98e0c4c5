"""``bench disk``: tables several times larger than RAM, ours against the usual recipes, RAM, and the disk itself.

Unlike the other benchmarks, contenders run one after another, each from a cold start: files of all of them would not
fit on one disk, and what they read would share its page cache. The disk's own speed is measured before and after
each, so that a busy moment of a shared machine shows.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

from embedrock.bench.disk import raw
from embedrock.bench.disk.contenders import CONTENDERS, RECORD_COLUMNS, DiskContender, Job
from embedrock.bench.disk.effort import OPTIONS, WORKLOAD, DiskEffort
from embedrock.bench.disk.files import SPARE_BYTES, forget_pages, scratch_folder
from embedrock.bench.disk.raw import Rate
from embedrock.bench.harness.bench import Bench, Task
from embedrock.bench.harness.cgroups import MemoryCgroup
from embedrock.bench.harness.processes import Child, ChildError
from embedrock.bench.harness.report import Report, about, failures, format_results, spread
from embedrock.bench.harness.runner import Racer, Result
from embedrock.bench.harness.targets import Line, Target, beside, each
from embedrock.machine.sizes import format_bytes
from embedrock.terminal.progress import say
from embedrock.terminal.tables import Field, format_number, format_range, format_whole

SPACE = 2.6  # times the bytes of all records that must be free: a table while it is compacted, and its log
WARM_UP_TIMES = 2  # the untimed steps end after so many times the seconds of the timed ones
PROBE_FILES = 64
SETTLE_STEPS = 64  # untimed, after another way to use a session
EXTRA_STEPS = 10_000  # of the stream, for each extra measurement


def measure(task: Task) -> Report:
    """Measure contenders, print a table, and return all that was found."""
    workload, effort = task.workload, task.effort
    with scratch_folder(effort.folder, int(SPACE * RECORD_COLUMNS * workload.table_bytes)) as folder:
        runner = DiskRunner(Job(workload, folder, effort.memory), effort)
        results = [result for group in _by(task.contenders, "write") for result in runner.measure(group)]
    lines = [summary(result) for result in results]
    note = f"{effort.limit_note()}\n{_format_rates(runner.rates)}"
    print(f"\n{format_results(_FIELDS, lines, note)}\n")
    raw_line = {"name": "raw-disk", "label": "4 KiB random reads", "status": "ok"}
    report = Report([*lines, {**raw_line, "rates": list(map(asdict, runner.rates))}], failures=failures(results))
    report.judge(targets(effort))
    return report


def _by(contenders: Sequence[DiskContender], attribute: str) -> list[list[DiskContender]]:
    """Return contenders in groups of the same attribute."""
    groups: dict[Any, list[DiskContender]] = {}
    for one in contenders:
        groups.setdefault(getattr(one, attribute), []).append(one)
    return list(groups.values())


class DiskRunner:
    """In the parent: writes files, runs contenders on them one after another, probes the disk between."""

    def __init__(self, job: Job, effort: DiskEffort) -> None:
        self._job, self._effort = job, effort
        self.rates: list[Rate] = []

    def measure(self, group: Sequence[DiskContender]) -> list[Result]:
        """Write the files that contenders share, measure each, and remove the files."""
        results = [Result(Racer(one, self._job.workload, (one.session, self._job))) for one in group]
        try:
            if group[0].write is not None:
                self._write(group[0])
            for same in _by(group, "session"):
                self._measure([result for result in results if result.racer.contender in same])
        except ChildError as error:
            for result in results:
                result.fail(error)
        finally:
            for path in self._job.folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return results

    def _write(self, contender: DiskContender) -> None:
        say(f"{contender.name}: writing {format_bytes(RECORD_COLUMNS * self._job.workload.table_bytes)}")
        with self._effort.child(FilesWriter, contender.write, self._job) as child:
            done = child.call("write")
        say(f"{contender.name}: written in {done['seconds']:.0f} s")
        if not self.rates:
            self.rates = raw.probe(self._paths())

    def _measure(self, results: Sequence[Result]) -> None:
        """Measure contenders that are ways to use one session, in one process, one after another."""
        say(f"{', '.join(result.name for result in results)}: filling what caches there are")
        forget_pages(self._files())
        contenders: list[Any] = [result.racer.contender for result in results]
        try:
            for result, line in zip(results, self._lines(contenders), strict=True):
                result.turns.append(line)
        except ChildError as error:
            for result in results:
                result.fail(error)

    def _lines(self, same: Sequence[DiskContender]) -> list[dict[str, Any]]:
        effort, lines = self._effort, list[dict[str, Any]]()
        with effort.confined(same[0].session, self._job, limited=same[0].limited) as (child, cgroup):
            first = child.call("steps", 0, effort.warmup, WARM_UP_TIMES * effort.seconds)
            say(f"{first} steps to warm up")
            for one in same:
                lines.append({"warmup": first, **self._turn(child, one, first)})
                first += SETTLE_STEPS + lines[-1]["steps"]
            peaks = _peaks(child, cgroup)  # before what follows, which keeps tables of its own
            for one, line in zip(same, lines, strict=True):
                line |= peaks
                for name in one.extras:
                    child.call("use", *one.how)
                    line[name] = child.call(name, first, effort.steps)
                    first += EXTRA_STEPS
            child.call("close")
        return lines

    def _turn(self, child: Child, one: DiskContender, first: int) -> dict[str, Any]:
        child.call("use", *one.how)
        child.call("steps", first, SETTLE_STEPS, self._effort.seconds)
        before = self._raw_now() if one.probed else None
        measured = child.call("measure", first + SETTLE_STEPS, self._effort.steps, self._effort.seconds)
        line = _line(measured, mean((before, self._raw_now())) if before else None)
        say(f"{one.name}: {format_number(line['mean_ms'])} ms/step")
        return line

    def _raw_now(self) -> float:
        """Return the disk's random reads/s at its best depth, as it is now."""
        best = max(self.rates, key=lambda rate: rate.reads_per_s)
        return raw.again(best, self._paths()).reads_per_s

    def _paths(self) -> list[Path]:
        """Return the largest files there are."""
        files = sorted(self._files(), key=lambda path: path.stat().st_size)[-PROBE_FILES:]
        return [path for path in files if path.stat().st_size >= files[-1].stat().st_size // 2]

    def _files(self) -> list[Path]:
        return [path for path in self._job.folder.rglob("*") if path.is_file()]


class FilesWriter:
    """Writes a contender's files, in a process of its own, whose memory ends with it."""

    def __init__(self, write: Callable[[Job], dict[str, float]], job: Job) -> None:
        self._write, self._job = write, job

    def write(self) -> dict[str, float]:
        """Write them; return what that took."""
        return self._write(self._job)


def _peaks(child: Child, cgroup: MemoryCgroup | None) -> dict[str, int | None]:
    """Return the most that a contender's process held, without and with page cache."""
    rss_bytes, outside_bytes = child.call("ram")
    return {"peak_rss_bytes": rss_bytes, "peak_bytes": cgroup.peak_bytes + outside_bytes if cgroup else None}


def _line(measured: dict[str, Any], raw: float | None) -> dict[str, Any]:
    times, counted = measured["steps_s"], measured["counted"]
    low, middle, high = spread(times)
    line = {
        "steps": len(times),
        "mean_ms": mean(times) * 1e3,
        "median_ms": middle * 1e3,
        "quartiles_ms": [low * 1e3, high * 1e3],
        "steps_per_s": len(times) / sum(times),
        "raw_reads_per_s": raw,
    }
    for name, value in counted.items():
        line[f"{name}_per_step"] = value / len(times)
    if counted:
        line["reads_per_s"] = counted["reads"] / sum(times)
    return line | {name: value for name, value in measured.items() if name not in ("steps_s", "counted")}


def summary(result: Result) -> dict[str, Any]:
    """Return the line of the table and of the JSON."""
    line = about(result) | (result.turns[0] if result.turns else {})
    if "cache_slots" in line:  # none: all rows fit
        line["best_misses_per_step"] = result.racer.workload.expected_misses(int(line["cache_slots"])) or None
    return line


# ---------------------------------------------------------------- targets

RECIPES = {"memmap": 10, "memmap-records": 0, "torch-from-file": 0}  # that we should be so many times faster than
MISSES = {"ours": 1.15, "ours-prefetch-32": 1.0}  # over those of the best rows kept


def targets(effort: DiskEffort) -> list[Target]:
    """Return what should come out with so much RAM."""
    return [*_against_recipes(), *_against_limits(), *_extras(), *_peaks_wanted(effort)]


def _against_recipes() -> Iterator[Target]:
    for ours in ("ours", "ours-prefetch-2"):
        for recipe, wanted in RECIPES.items():
            factor = beside(ours, recipe, lambda one, other: one["steps_per_s"] / other["steps_per_s"])
            yield Target(f"steps/s of {ours} over {recipe}", factor, wanted)


def _against_limits() -> Iterator[Target]:
    best = "misses of {name} over those of the {cache_slots:,.0f} most popular rows kept"
    for name, wanted in MISSES.items():
        keys = ("misses_per_step", "best_misses_per_step")
        share = each(lambda line: line["misses_per_step"] / line["best_misses_per_step"], *keys, name=name)
        yield Target(best, share, wanted, at_most=True)
    share = each(lambda line: line["reads_per_s"] / line["raw_reads_per_s"], "reads_per_s", "raw_reads_per_s")
    yield Target("record reads/s of {name} over the disk's own", share, 0.7)


def _extras() -> Iterator[Target]:
    resident = beside("ours", "ours-in-ram", _resident, "resident")
    yield Target("step with all rows resident over that in RAM", resident, 1.3, at_most=True)
    overlap = "{name} with a dense model over the larger of the two alone"
    yield Target(overlap, each(_overlap, "overlap"), 1.2, at_most=True)
    yield Target("bytes written over those of changed rows", each(_written, "amplification"), 4, at_most=True)


def _resident(ours: Line, in_ram: Line) -> float:
    return ours["resident"]["step_s"] / in_ram["resident"]["step_s"]


def _overlap(line: Line) -> float:
    found = line["overlap"]
    return found["together_s"] / max(found["prefetch_s"], found["dense_s"])


def _written(line: Line) -> float:
    return line["amplification"]["bytes_written"] / line["amplification"]["bytes_changed"]


def _peaks_wanted(effort: DiskEffort) -> Iterator[Target]:
    wanted = (effort.memory + SPARE_BYTES) / 1e6
    peak = each(lambda line: line["peak_bytes"] / 1e6, "peak_bytes", "cache_slots")  # tables on disk have a cache
    yield Target("RAM and page cache of {name}", peak, wanted, "MB", at_most=True)


# ---------------------------------------------------------------- printing

_FIELDS = (
    Field("contender", "name"),
    Field("ms/step", "mean_ms", format_number),
    Field("quartiles", "quartiles_ms", format_range),
    Field("steps/s", "steps_per_s", format_number),
    Field("misses", "misses_per_step", format_whole),
    Field("reads/s", "reads_per_s", format_whole),
    Field("disk's own", "raw_reads_per_s", format_whole),
    Field("RAM", "peak_rss_bytes", format_bytes),
    Field("with page cache", "peak_bytes", format_bytes),
)


def _format_rates(rates: Sequence[Rate]) -> str:
    found = ", ".join(f"{rate.reads_per_s / 1e3:.0f} k at depth {rate.depth}" for rate in rates)
    return f"the disk's own 4 KiB random reads/s, by {rates[0].reader if rates else 'nobody'}: {found}"


DISK = Bench(
    "disk",
    "training a table larger than RAM, page cache counted",
    measure,
    OPTIONS,
    CONTENDERS,
    workloads=(WORKLOAD,),
    effort=DiskEffort(),
)
