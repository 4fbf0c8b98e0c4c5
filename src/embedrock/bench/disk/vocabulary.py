"""``bench vocabulary``: a vocabulary on disk, far larger than its RAM: making it, and lookups after a restart.

Its strings are in the order in which a stream of Zipf popularity first shows them. After each restart, with nothing of
its files in the page cache, the first batch of that stream is timed, then more of them, then batches of any strings
alike: each of these needs one random read of the disk, whose own speed is measured beside.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from embedrock.bench.disk import raw
from embedrock.bench.disk.effort import DiskEffort
from embedrock.bench.disk.files import forget_pages, scratch_folder
from embedrock.bench.disk.raw import Rate
from embedrock.bench.harness.bench import Bench, Task
from embedrock.bench.harness.processes import ChildError
from embedrock.bench.harness.report import Report
from embedrock.bench.harness.targets import Target, each
from embedrock.bench.harness.workload import SCATTER, Workload, bounded_zipf
from embedrock.machine.ram import peak_rss_bytes, rss_bytes
from embedrock.machine.sizes import format_bytes
from embedrock.terminal.progress import say

DIGITS = 12  # of a string
BATCH = 1 << 20  # strings that are added at once
SPACE = 4 * 50  # bytes of disk for a string while files are merged
BUILD_MEMORY = 1 << 30
SMALL = 200_000  # strings of a vocabulary that loads the kernels
BATCHES = 20  # of a restart, of each kind
OPEN_S, LOOKUP_MS = 1.0, 20.0
MB, MS = 1e6, 1e-3


def strings_of(ranks: np.ndarray) -> np.ndarray:
    """Return a string of `DIGITS` characters for each rank below 10^12, all of them different: "S12" (n,)."""
    numbers = ranks.astype(np.uint64) * np.uint64(SCATTER) % np.uint64(10**DIGITS)
    characters = np.empty((len(ranks), DIGITS), np.uint8)
    for place in range(DIGITS):
        numbers, digit = np.divmod(numbers, np.uint64(10))
        characters[:, DIGITS - 1 - place] = digit + ord("0")
    return characters.reshape(-1).view(f"S{DIGITS}")


class Maker:
    """In a process of its own: makes the vocabulary."""

    def make(self, path: str, workload: Workload) -> dict[str, float]:
        """Add all strings, commit, compact; return what that took."""
        import embedrock as er

        order = first_seen(workload)
        before_bytes, start = peak_rss_bytes(), time.perf_counter()
        spent = 0.0  # on making strings
        with er.Vocabulary(path, memory=BUILD_MEMORY) as vocabulary:
            for first in range(0, workload.rows, BATCH):
                began = time.perf_counter()
                strings = strings_of(order[first : first + BATCH])
                spent += time.perf_counter() - began
                vocabulary.add(strings)
                say(f"{len(vocabulary):,} strings", transient=True)
            vocabulary.commit()
            vocabulary.compact()
            seconds = time.perf_counter() - start - spent
            return {
                "seconds": seconds,
                "strings_per_s": workload.rows / seconds,
                "disk_bytes": vocabulary.stats()["disk_bytes"],
                "peak_growth_bytes": peak_rss_bytes() - before_bytes,
            }


def first_seen(workload: Workload) -> np.ndarray:
    """Return all ranks in the order in which a stream of that popularity first shows them.

    In a stream, rank k is first seen after a time that is exponentially distributed, with the mean of one over its
    popularity.
    """
    clocks = np.random.default_rng(workload.seed).exponential(size=workload.rows)
    clocks *= np.arange(1, workload.rows + 1) ** workload.zipf
    return np.argsort(clocks)


class Restart:
    """In a process of its own: opens the vocabulary, and looks strings up.

    Args:
        path: of the vocabulary.
        memory: its budget, bytes.
    """

    def __init__(self, path: str, memory: int) -> None:
        import embedrock as er

        small = f"{path}-small"  # kernels are loaded before, as they are in a process that trains
        with er.Vocabulary(small, memory="1KiB") as vocabulary:
            vocabulary.add(strings_of(np.arange(SMALL)))
            vocabulary.compact()
            vocabulary.lookup(strings_of(np.arange(0, 2 * SMALL, 20)))
            vocabulary.strings(np.arange(0, SMALL, 20))
        self._path, self._memory = path, memory

    def measure(self, workload: Workload) -> dict[str, float]:
        """Return the seconds of opening, of the first lookup, and the medians of those that follow."""
        import embedrock as er

        random, (rows, batch) = np.random.default_rng(workload.seed + 1), (workload.rows, workload.batch)
        popular = [strings_of(bounded_zipf(random.random(batch), rows, workload.zipf)) for _ in range(BATCHES)]
        others = [strings_of(random.integers(0, rows, batch)) for _ in range(BATCHES)]
        before_bytes, start = rss_bytes(), time.perf_counter()
        vocabulary = er.Vocabulary(self._path, self._memory, mode="r")
        opened = time.perf_counter() - start
        first, *more = [_timed(lambda batch=batch: vocabulary.lookup(batch, missing="raise")) for batch in popular]
        reads = vocabulary.stats()["pages_read"] / len(popular)
        alike = [_timed(lambda batch=batch: vocabulary.lookup(batch, missing="raise")) for batch in others]
        ids = [random.integers(0, rows, batch) for _ in range(3)]
        back = [_timed(lambda some=some: vocabulary.strings(some, bytes)) for some in ids]
        return {
            "open_s": opened,
            "first_ms": first / MS,
            "popular_ms": median(more) / MS,
            "popular_reads": reads,
            "uniform_ms": median(alike) / MS,
            "strings_ms": median(back) / MS,
            "rss_growth_bytes": rss_bytes() - before_bytes,
        }


def _timed(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(task: Task) -> Report:
    """Make a vocabulary, look strings up after restarts, and print the targets."""
    workload, effort = task.workload, task.effort
    with scratch_folder(effort.folder, SPACE * workload.rows) as folder:
        try:
            report = _measured(folder / "words", workload, effort)
        except ChildError as error:
            return Report().fail("vocabulary", error)
    print(_told(report.results))
    report.judge(targets(effort))
    return report


def _measured(path: Path, workload: Workload, effort: DiskEffort) -> Report:
    with effort.child(Maker) as child:
        made = child.call("make", str(path), workload)
    files = [one for one in path.rglob("*") if one.is_file()]
    restarts, peak = list[dict[str, float]](), dict[str, int]()
    for number in range(effort.rounds):
        say(f"restart {number + 1}", transient=True)
        forget_pages(files)
        with effort.confined(Restart, f"{path}", effort.memory) as (child, cgroup):
            restarts.append(child.call("measure", workload))
            peak = {"peak_bytes": cgroup.peak_bytes} if cgroup else {}
    largest = [max(files, key=lambda one: one.stat().st_size)]
    rate = raw.again(Rate("own", max(raw.DEPTHS), 0.0), largest).reads_per_s
    middle = {name: median([one[name] for one in restarts]) for name in restarts[0]}
    middle["uniform_over_raw"] = middle["uniform_ms"] * MS * rate / workload.batch
    sizes = {"strings": workload.rows, "batch": workload.batch, "status": "ok", "raw_reads_per_s": rate}
    return Report([{"name": "make", **sizes, **made}, {"name": "restart", **sizes, **middle, **peak}])


def _told(lines: Sequence[dict[str, Any]]) -> str:
    made, restart = lines
    whole = f"{made['strings']:,} strings: made in {made['seconds']:.0f} s, {format_bytes(made['disk_bytes'])}; "
    stream = f"the first {restart['first_ms']:.1f} ms, then {restart['popular_ms']:.1f} ms with"
    alike = f"{restart['uniform_ms']:.1f} ms, of {restart['raw_reads_per_s']:,.0f} reads/s that the disk gives"
    return (
        f"\n{whole}opened in {restart['open_s'] * 1e3:.0f} ms\n{restart['batch']:,} strings: {stream} "
        f"{restart['popular_reads']:.0f} reads; any strings alike: {alike}; back to strings: "
        f"{restart['strings_ms']:.1f} ms\n"
    )


def targets(effort: DiskEffort) -> list[Target]:
    """Return what should come out."""

    def at_most(what: str, key: str, wanted: float, unit: str, scale: float = 1.0) -> Target:
        return Target(what, each(lambda line: line[key] / scale, key, name="restart"), wanted, unit, at_most=True)

    return [
        at_most("opening after a restart", "open_s", OPEN_S, "s"),
        at_most("the first batch of a stream after a restart", "first_ms", LOOKUP_MS, "ms"),
        at_most("later batches of the stream", "popular_ms", LOOKUP_MS, "ms"),
        at_most("batches of any strings alike", "uniform_ms", LOOKUP_MS, "ms"),
        at_most("the same, over the time of as many random reads", "uniform_over_raw", 1.5, "x"),
        at_most("RAM of the open vocabulary", "rss_growth_bytes", effort.memory / MB, "MB", MB),
    ]


VOCABULARY = Bench(
    "vocabulary",
    "a vocabulary on disk: making it, and lookups after a restart",
    measure,
    ("rows", "batch", "zipf", "seed", "threads", "rounds", "timeout_s", "folder", "memory", "limit"),
    workloads=(Workload(rows=50_000_000, features=1),),
    effort=DiskEffort(memory=64 << 20, limit=384 << 20),
    texts={"rows": "strings", "batch": "strings that are looked up at once", "rounds": "restarts, whose medians count"},
)
