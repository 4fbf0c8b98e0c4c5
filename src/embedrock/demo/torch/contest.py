"""A few steps of one model on several backends, each in a process of its own, whose memory ends with it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np

from embedrock.bench.harness.processes import Child, ChildError
from embedrock.demo.data.examples import Examples
from embedrock.demo.model_spec import ModelSpec
from embedrock.demo.options import DemoOptions
from embedrock.demo.torch.backends import BACKENDS
from embedrock.demo.torch.learner import TorchLearner, use_threads, warm_up
from embedrock.machine.ram import available_bytes, rss_bytes
from embedrock.machine.sizes import format_bytes
from embedrock.terminal.tables import format_table

BATCHES = 15
PASSES = 3  # over the same batches: in the first one, most rows are new
PASSES_TIME_S = 10  # slow backends make fewer steps
TIMEOUT_S = 300
PROCESS_BYTES = 600 << 20  # an interpreter with torch, and the activations of a batch
STREAM = 2  # of random numbers; training and test have others


@dataclass(frozen=True)
class Outcome:
    """What came of one backend.

    Attributes:
        name: of its backend.
        need_bytes: RAM that its tables take; 0: it follows the rows touched.
        step_s: median seconds of a step on a batch that was seen before; None if it was not run.
        new_step_s: median seconds of a step on a batch that was not, most of whose rows are new.
        setup_s: seconds to make the tables and the first step.
        rss_bytes: RAM of its process at the end.
        reason: why it was not run.
    """

    name: str
    need_bytes: int
    step_s: float | None = None
    new_step_s: float = 0.0
    setup_s: float = 0.0
    rss_bytes: int = 0
    reason: str = ""


class Log(Protocol):
    """Where clicks come from. It goes to other processes, so it must not have been used."""

    def clicks(self, random: np.random.Generator, count: int) -> Examples:
        """Draw `count` examples."""
        ...


def contest(spec: ModelSpec, log: Log, batch_size: int, threads: int | None) -> Iterator[Outcome]:
    """Run every backend on the same batches of a log, one after the other.

    One that would not fit in the RAM available is skipped, with the reason.
    """
    for key, backend in BACKENDS.items():
        need = backend.copies * sum(embedding.weight_bytes for embedding in spec.embeddings)
        available = available_bytes()
        if need + PROCESS_BYTES > available:
            reason = f"needs {format_bytes(need)} for {backend.needs}; {format_bytes(available)} of RAM available"
            yield Outcome(backend.name, need, reason=reason)
            continue
        try:
            with Child(TimedBackend, key, spec, log, threads, environment={}, timeout_s=TIMEOUT_S) as child:
                yield Outcome(backend.name, need, **child.call("run", batch_size))
        except ChildError as error:
            yield Outcome(backend.name, need, reason=f"failed: {error}")


def compare_backends(spec: ModelSpec, log: Log, options: DemoOptions) -> list[Outcome]:
    """Run every backend, print what came of them, and return it."""
    print("\na few steps of the same model in RAM, in a process of its own each")
    outcomes = list(contest(spec, log, options.batch_size, options.threads))
    print(format_outcomes(outcomes))
    return outcomes


def format_outcomes(outcomes: Sequence[Outcome]) -> str:
    """Return the table that people read; below it, who was skipped, and why."""
    base = outcomes[0].step_s
    done = [
        (
            outcome.name,
            f"{outcome.step_s * 1e3:.1f}",
            f"{outcome.step_s / base:.1f}x" if base else "",
            f"{outcome.new_step_s * 1e3:.1f}",
            f"{outcome.setup_s:.1f}",
            format_bytes(outcome.rss_bytes),
        )
        for outcome in outcomes
        if outcome.step_s
    ]
    table = format_table(("", "ms/step", "time", "with new rows, ms", "first step, s", "RAM"), done)
    skipped = [f"{outcome.name}: skipped, {outcome.reason}" for outcome in outcomes if outcome.reason]
    return "\n".join([table, *skipped])


class TimedBackend:
    """One backend's steps, timed in a process of their own."""

    def __init__(self, backend: str, spec: ModelSpec, log: Log, threads: int | None) -> None:
        _die_first()
        use_threads(threads)
        self._spec, self._log, self._backend = spec, log, BACKENDS[backend]

    def run(self, batch_size: int) -> dict[str, Any]:
        """Make the tables, train some steps, and return the measured fields of `Outcome`."""
        warm_up(self._spec, self._backend)
        random = np.random.default_rng((self._spec.seed, STREAM))
        first, *batches = [self._log.clicks(random, batch_size) for _ in range(1 + BATCHES)]
        start = time.perf_counter()
        learner = TorchLearner(self._spec, self._backend)
        learner.step(first)  # optimizers make their state in the first step
        setup_s = time.perf_counter() - start
        new = _timed(learner, batches)
        again = _timed(learner, batches[: len(new)] * (PASSES - 1))
        return {
            "step_s": median(again),
            "new_step_s": median(new),
            "setup_s": setup_s,
            "rss_bytes": rss_bytes(),
        }


def _timed(learner: TorchLearner, batches: Iterable[Examples]) -> list[float]:
    """Return the seconds of a step on each batch, until there are enough of them."""
    times: list[float] = []
    for clicks in batches:
        if sum(times) > PASSES_TIME_S:
            break
        start = time.perf_counter()
        learner.step(clicks)
        times.append(time.perf_counter() - start)
    return times


def _die_first() -> None:
    """Ask the system to end this process before any other if RAM runs out after all."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
