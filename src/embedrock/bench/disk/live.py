"""``bench live``: what it costs to see and decide: the curve of a table that trains, spans, and stats that are kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np

from embedrock.bench.disk.contenders import TABLE, Job, train
from embedrock.bench.disk.effort import DiskEffort
from embedrock.bench.disk.files import scratch_folder
from embedrock.bench.harness.bench import Bench, Task
from embedrock.bench.harness.contenders import LEARNING_RATE
from embedrock.bench.harness.processes import ChildError
from embedrock.bench.harness.report import Report
from embedrock.bench.harness.targets import Line, Target, each
from embedrock.bench.harness.workload import Workload
from embedrock.terminal.tables import Field, format_lines, format_number
from embedrock.tiers.watch import Counted, Watch

STEP_S, COST = 2e-3, 0.01  # of a step that long, all of it may take so much
EVERY_S = 1.0  # from one sample of `keep_stats` to the next
CALLS, SAMPLES, COUNTED = 20_000, 30, 640
TURN = 100  # steps, with all of it and without, in turns


class Blind:
    """A watch that sees nothing."""

    def see(self, ids: np.ndarray) -> bool:
        return False


class Watched:
    """In a process of its own: a table on disk that trains, looked at or not."""

    def __init__(self, job: Job) -> None:
        import embedrock as er
        import embedrock.torch  # whose tracer is asked at each span
        from embedrock.table.table import rows_of

        workload = job.workload
        where: dict[str, Any] = {"path": job.folder / TABLE, "memory": job.memory}
        self._job, self._gradient, self._step = job, workload.gradient(), 0
        self._table = er.Table(workload.rows, workload.dim, rule=er.Adam(lr=LEARNING_RATE), **where)
        self._tier: Any = rows_of(self._table).tier

    def warm_up(self, seconds: float) -> None:
        """Train until the curve is known for all sizes that matter, or so long."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self._steps(10)

    def alone(self) -> dict[str, float]:
        """Return what each part costs a step, in seconds, as measured alone."""
        return {"curve_s": self._curve(), **self._spans(), "sample_s": self._sample()}

    def _curve(self) -> float:
        """Return the processor's time: what others do meanwhile does not count."""
        watch, ids, spent = self._tier.watch, np.unique(self._job.workload.batch_at(0)), [0.0]
        look = watch.look

        def timed(*args: Any) -> None:
            start = time.thread_time()
            look(*args)
            spent[0] += time.thread_time() - start

        watch.look = timed
        try:
            self._steps(COUNTED)
        finally:
            del watch.look
        other, none = Watch("lfu"), Counted(0, 0, 0)
        start = time.thread_time()
        for _ in range(CALLS):
            if other.see(ids):
                other.look(1, 1, none, None)  # of so small a table it looks at nothing, and has room again
        return spent[0] / COUNTED + (time.thread_time() - start) / CALLS

    def _spans(self) -> dict[str, float]:
        from embedrock.process.spans import forget, span, trace_by
        from embedrock.table.numbers import Clock

        begun = [0]

        def count(name: str) -> None:
            begun[0] += 1

        trace_by(count)
        self._steps(COUNTED)
        forget(count)
        clock = Clock()
        seconds = {"span_s": _seconds(span)}
        clock.is_on = True
        trace_by(clock)
        seconds["timed_span_s"] = _seconds(span) - seconds["span_s"]
        forget(clock)
        return {**seconds, "spans": begun[0] / COUNTED}

    def _sample(self) -> float:
        from embedrock.table.numbers import _Recorder

        recorder = _Recorder(1e9)
        times = []
        for _ in range(SAMPLES):
            start = time.perf_counter()
            recorder.sample()
            times.append(time.perf_counter() - start)
        recorder.stop()
        return median(times)

    def turns(self, count: int) -> dict[str, float]:
        """Return the median step in turns with all of it, and without, in seconds."""
        import embedrock as er

        looked, bare = [], []
        for _ in range(count):
            er.keep_stats(EVERY_S)
            looked.append(self._steps(TURN))
            er.keep_stats(None)
            with self._blind():
                bare.append(self._steps(TURN))
        return {"looked_s": median(looked), "bare_s": median(bare), "ratio": median(np.divide(looked, bare).tolist())}

    @contextmanager
    def _blind(self) -> Iterator[None]:
        from embedrock.process import spans

        watch, tracers = self._tier.watch, spans._tracers
        self._tier.watch, spans._tracers = Blind(), ()
        try:
            yield
        finally:
            self._tier.watch, spans._tracers = watch, tracers

    def _steps(self, count: int) -> float:
        """Train some steps; return the mean seconds of one."""
        batches = [self._job.workload.batch_at(self._step + number) for number in range(count)]
        self._step += count
        start = time.perf_counter()
        for ids in batches:
            train(self._table, ids, self._gradient)
        return (time.perf_counter() - start) / count

    def close(self) -> None:
        """Close the table."""
        self._table.commit()
        self._table.close()


def _seconds(span: Callable[[str], Any]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        with span("plan"):
            pass
    return (time.perf_counter() - start) / CALLS


def measure(task: Task) -> Report:
    """Train a table on disk, and print what each part of looking at it costs a step."""
    workload, effort = task.workload, task.effort
    with scratch_folder(effort.folder, 4 * 3 * workload.table_bytes) as folder:
        try:
            with effort.child(Watched, Job(workload, folder, effort.memory)) as child:
                child.call("warm_up", effort.seconds)
                found = child.call("alone")
                turns = child.call("turns", effort.rounds)
                child.call("close")
        except ChildError as error:
            return Report().fail("live", error)
    lines = _lines(found)
    report = Report([*lines, {"name": "all, in turns", "status": "ok", **turns}])
    print(format_lines(_FIELDS, lines))
    told = f"{turns['looked_s'] * 1e3:.2f} ms a step, {turns['bare_s'] * 1e3:.2f} without"
    print(f"\nin turns of {TURN} steps: {told}, {turns['ratio']:.3f}x\n")
    report.judge([Target("curve, stats and spans, of a step of 2 ms", each(_share, name="all"), COST, at_most=True)])
    return report


def _lines(found: dict[str, float]) -> list[dict[str, Any]]:
    spans = found["spans"] * found["span_s"]
    stats = found["sample_s"] / EVERY_S * STEP_S + found["spans"] * found["timed_span_s"] / 8
    seconds = {"curve": found["curve_s"], "spans": spans, "stats": stats}
    seconds["all"] = sum(seconds.values())
    return [{"name": name, "status": "ok", "seconds": value, **found} for name, value in seconds.items()]


def _share(line: Line) -> float:
    return line["seconds"] / STEP_S


_FIELDS = (
    Field("", "name"),
    Field("us a step", lambda line: line["seconds"] * 1e6, format_number),
    Field("of 2 ms", _share, lambda share: f"{share:.2%}"),
)

LIVE = Bench(
    "live",
    "what the curve of a table that trains costs a step, and stats that are kept, and spans that nobody looks at",
    measure,
    ("rows", "dim", "batch", "zipf", "seed", "threads", "rounds", "seconds", "timeout_s", "folder", "memory"),
    workloads=(Workload(rows=1_000_000, dim=16, batch=1024),),
    effort=DiskEffort(memory=64 << 20, seconds=12.0, rounds=9),
)
