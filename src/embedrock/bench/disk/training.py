"""Tables several times larger than RAM: ours against the usual recipes, against RAM, and against the disk itself.

Unlike the other benchmarks, contenders run one after another, each from a cold start: files of all of them would not
fit on one disk, and what they read would share its page cache. The disk's own speed is measured before and after
each, so that a busy moment of a shared machine shows.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from embedrock.bench.disk import raw as raw_disk
from embedrock.bench.disk.contenders import RECORD_COLUMNS, DiskContender, Job
from embedrock.bench.disk.raw import Rate
from embedrock.bench.harness.cgroups import MemoryCgroup, confined, why_not
from embedrock.bench.harness.processes import Child, ChildError
from embedrock.bench.harness.report import Report, Verdict, format_verdicts, spread
from embedrock.bench.harness.rounds import Effort
from embedrock.bench.harness.workload import Workload
from embedrock.errors import EmbedrockError
from embedrock.machine.sizes import format_bytes
from embedrock.machine.vfs import OS_SYSTEM
from embedrock.terminal.progress import say
from embedrock.terminal.tables import format_number, format_table

SPACE = 2.6  # times the bytes of all records that must be free: a table while it is compacted, and its log
WARM_UP_TIMES = 2  # the untimed steps end after so many times the seconds of the timed ones
SPARE_BYTES = 300_000_000
PROBE_FILES = 64
SETTLE_STEPS = 64  # untimed, after another way to use a session
EXTRA_STEPS = 10_000  # of the stream, for each extra measurement


class SpaceError(EmbedrockError, OSError):
    """There is too little free space for the files of a benchmark."""


@dataclass(frozen=True)
class DiskEffort(Effort):
    """How much to measure, and where. Contenders have one turn each.

    Args:
        rounds: commits of each size, whose medians count.
        folder: files go to a new folder in it, which is removed at the end.
        memory: the most RAM that our table may take, bytes.
        limit: of RAM and page cache of each contender's process together, bytes.
        warmup: untimed steps before the timed ones, which fill the cache.
    """

    rounds: int = 3
    steps: int = 200
    seconds: float = 90.0
    timeout_s: float = 3600.0
    folder: Path = Path()
    memory: int = 1 << 30
    limit: int = 2 << 30
    warmup: int = 2500


@dataclass
class Measured:
    """What came of one contender.

    Attributes:
        contender: who.
        status: "ok" or "failed".
        reason, details: why it failed, and its traceback.
        line: numbers, plain JSON values.
    """

    contender: DiskContender
    status: str = "ok"
    reason: str = ""
    details: str = ""
    line: dict[str, Any] | None = None

    def summary(self) -> dict[str, Any]:
        """Return the line of the JSON."""
        about = {"name": self.contender.name, "label": self.contender.label}
        return {**about, "status": self.status, "reason": self.reason, **(self.line or {})}


def run(workload: Workload, chosen: Sequence[DiskContender], effort: DiskEffort) -> Report:
    """Measure contenders, print a table, and return all that was found."""
    with scratch_folder(effort.folder, int(SPACE * RECORD_COLUMNS * workload.table_bytes)) as folder:
        bench = DiskBench(Job(workload, folder, effort.memory), effort)
        measured = [one for group in _by(chosen, "write") for one in bench.measure(group)]
    report = Report(
        results=[*(one.summary() for one in measured), {"name": "raw-disk", **bench.raw_summary()}],
        verdicts=Judge(workload, effort, measured).verdicts(),
        failures=[(one.contender.name, one.details) for one in measured if one.status != "ok"],
    )
    print(_format(report.results, limit_note(effort)))
    print(f"\n{format_verdicts(report.verdicts)}\n")
    return report


@contextmanager
def scratch_folder(parent: Path, need_bytes: int) -> Iterator[Path]:
    """Yield a new folder that is removed with all that is in it.

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
    """Leave by way of every `finally`: many gigabytes must not stay behind."""
    raise SystemExit(128 + number)


def _by(contenders: Sequence[DiskContender], attribute: str) -> list[list[DiskContender]]:
    """Return contenders in groups of the same attribute."""
    groups: dict[Any, list[DiskContender]] = {}
    for one in contenders:
        groups.setdefault(getattr(one, attribute), []).append(one)
    return list(groups.values())


class DiskBench:
    """In the parent: writes files, runs contenders on them one after another, probes the disk between."""

    def __init__(self, job: Job, effort: DiskEffort) -> None:
        self._job, self._effort = job, effort
        self.rates: list[Rate] = []

    def measure(self, group: Sequence[DiskContender]) -> list[Measured]:
        """Write the files that contenders share, measure each, and remove the files."""
        try:
            if group[0].write is not None:
                self._write(group[0])
        except ChildError as error:
            return [self._failed(one, error) for one in group]
        else:
            return [one for same in _by(group, "session") for one in self._measure(same)]
        finally:
            for path in self._job.folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _write(self, contender: DiskContender) -> None:
        say(f"{contender.name}: writing {format_bytes(RECORD_COLUMNS * self._job.workload.table_bytes)}")
        environment, timeout_s = self._effort.environment(), self._effort.timeout_s
        with Child(Writer, contender.write, self._job, environment=environment, timeout_s=timeout_s) as child:
            done = child.call("write")
        say(f"{contender.name}: written in {done['seconds']:.0f} s")
        if not self.rates:
            self.rates = raw_disk.probe(self._paths())

    def _measure(self, same: Sequence[DiskContender]) -> list[Measured]:
        """Measure contenders that are ways to use one session, in one process, one after another."""
        say(f"{', '.join(one.name for one in same)}: filling what caches there are")
        _forget_pages(self._files())
        try:
            return [Measured(one, line=line) for one, line in zip(same, self._lines(same), strict=True)]
        except ChildError as error:
            return [self._failed(one, error) for one in same]

    def _lines(self, same: Sequence[DiskContender]) -> list[dict[str, Any]]:
        effort, lines = self._effort, list[dict[str, Any]]()
        limit = effort.limit if same[0].limited else None
        options: dict[str, Any] = {"environment": effort.environment(), "timeout_s": effort.timeout_s}
        with confined(limit, same[0].session, self._job, **options) as (child, cgroup):
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
        return raw_disk.again(best, self._paths()).reads_per_s

    def _paths(self) -> list[Path]:
        """Return the largest files there are."""
        files = sorted(self._files(), key=lambda path: path.stat().st_size)[-PROBE_FILES:]
        return [path for path in files if path.stat().st_size >= files[-1].stat().st_size // 2]

    def _files(self) -> list[Path]:
        return [path for path in self._job.folder.rglob("*") if path.is_file()]

    def _failed(self, contender: DiskContender, error: ChildError) -> Measured:
        reason = str(error) if error.kind in ("Unavailable", "Died") else f"{error.kind}: {error}"
        say(f"{contender.name}: failed: {reason}")
        return Measured(contender, "failed", reason, error.details)

    def raw_summary(self) -> dict[str, Any]:
        """Return what the disk itself gave."""
        return {"label": "4 KiB random reads", "status": "ok", "rates": [asdict(rate) for rate in self.rates]}


def limit_note(effort: DiskEffort) -> str:
    """Return one line about the cgroups."""
    if reason := why_not():
        return f"NO memory cgroup could be made ({reason}): page cache is neither bounded nor counted"
    return f"each in a memory cgroup of {format_bytes(effort.limit)}, page cache included"


def _forget_pages(paths: Sequence[Path]) -> None:
    """Have nothing of files in the page cache, where it would serve a contender and be charged to another."""
    for path in paths:
        fd = OS_SYSTEM.open(str(path), os.O_RDONLY)
        try:
            OS_SYSTEM.fdatasync(fd)
            OS_SYSTEM.drop(fd)
        finally:
            OS_SYSTEM.close(fd)


class Writer:
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


# ---------------------------------------------------------------- verdicts


class Judge:
    """Compares what was measured with what is wanted; a line whose contenders are missing is left out."""

    def __init__(self, workload: Workload, effort: DiskEffort, measured: Sequence[Measured]) -> None:
        self._workload, self._effort = workload, effort
        self._lines = {one.contender.name: one.line for one in measured if one.line is not None}

    def verdicts(self) -> list[Verdict]:
        """Return a verdict for every target."""
        ours = [name for name in self._lines if name.startswith("ours") and name != "ours-in-ram"]
        found = [*self._against_recipes(), *self._misses()]
        for name in ours:
            found += [*self._reads(name), *self._extras(name), *self._peak(name)]
        return found

    def _against_recipes(self) -> Iterator[Verdict]:
        for ours in ("ours", "ours-prefetch-2"):
            for recipe, wanted in (("memmap", 10), ("memmap-records", 0), ("torch-from-file", 0)):
                if ours in self._lines and recipe in self._lines:
                    factor = self._lines[ours]["steps_per_s"] / self._lines[recipe]["steps_per_s"]
                    yield Verdict(f"steps/s of {ours} over {recipe}", factor, wanted, "x")

    def _misses(self) -> Iterator[Verdict]:
        for name, wanted in (("ours", 1.15), ("ours-prefetch-32", 1.0)):
            if name in self._lines:
                line = self._lines[name]
                best = self._workload.expected_misses(int(line["cache_slots"]))
                line["best_misses_per_step"] = best
                if not best:  # all rows fit
                    continue
                what = f"misses of {name} over those of the {int(line['cache_slots']):,} most popular rows kept"
                yield Verdict(what, line["misses_per_step"] / best, wanted, "x", at_most=True)

    def _reads(self, name: str) -> Iterator[Verdict]:
        line = self._lines[name]
        if line["raw_reads_per_s"]:
            share = line["reads_per_s"] / line["raw_reads_per_s"]
            yield Verdict(f"record reads/s of {name} over the disk's own", share, 0.7, "x")

    def _extras(self, name: str) -> Iterator[Verdict]:
        line = self._lines[name]
        in_ram = self._lines.get("ours-in-ram", {})
        if "resident" in line and "resident" in in_ram:
            factor = line["resident"]["step_s"] / in_ram["resident"]["step_s"]
            yield Verdict("step with all rows resident over that in RAM", factor, 1.3, "x", at_most=True)
        if "overlap" in line:
            both, alone = line["overlap"]["together_s"], max(line["overlap"][key] for key in ("prefetch_s", "dense_s"))
            what = f"{name} with a dense model over the larger of the two alone"
            yield Verdict(what, both / alone, 1.2, "x", at_most=True)
        if "amplification" in line:
            written, changed = (line["amplification"][key] for key in ("bytes_written", "bytes_changed"))
            yield Verdict("bytes written over those of changed rows", written / changed, 4, "x", at_most=True)

    def _peak(self, name: str) -> Iterator[Verdict]:
        peak = self._lines[name]["peak_bytes"]
        if peak is not None:
            wanted = (self._effort.memory + SPARE_BYTES) / 1e6
            yield Verdict(f"RAM and page cache of {name}", peak / 1e6, wanted, "MB", at_most=True)


# ---------------------------------------------------------------- printing

_COLUMNS = ("contender", "ms/step", "quartiles", "steps/s", "misses", "reads/s", "disk's own", "RAM", "with page cache")


def _format(lines: Sequence[dict[str, Any]], note: str) -> str:
    rows = [_cells(line) for line in lines if "mean_ms" in line]
    rates = [rate for line in lines for rate in line.get("rates", ())]
    table = format_table(_COLUMNS, rows) if rows else "nothing was measured"
    raw = ", ".join(f"{rate['reads_per_s'] / 1e3:.0f} k at depth {rate['depth']}" for rate in rates)
    missing = [f"{line['name']}: {line['status']}: {line['reason']}" for line in lines if line["status"] != "ok"]
    by = rates[0]["reader"] if rates else "nobody"
    return "\n".join(["", table, note, f"the disk's own 4 KiB random reads/s, by {by}: {raw}", *missing])


def _cells(line: dict[str, Any]) -> list[str]:
    low, high = line["quartiles_ms"]
    return [
        line["name"],
        format_number(line["mean_ms"]),
        f"{format_number(low)} - {format_number(high)}",
        format_number(line["steps_per_s"]),
        f"{line['misses_per_step']:,.0f}" if "misses_per_step" in line else "",
        f"{line['reads_per_s']:,.0f}" if "reads_per_s" in line else "",
        f"{line['raw_reads_per_s']:,.0f}" if line["raw_reads_per_s"] else "",
        format_bytes(line["peak_rss_bytes"]),
        format_bytes(line["peak_bytes"]) if line["peak_bytes"] is not None else "",
    ]
