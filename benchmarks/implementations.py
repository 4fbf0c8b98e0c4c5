"""An implementation: a row of a benchmark's table, the RAM that it needs, and the session that times its steps."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from benchmarks.workload import Workload
from embedrock.storage.ram_backend import SMALL_BYTES
from embedrock.system.ram import peak_rss_bytes, rss_bytes
from embedrock.system.sizes import format_bytes

LEARNING_RATE = 1e-3
FIRST_VALUES = 0.01  # rows begin between minus this and this
PROCESS_BYTES = 512 << 20  # of an interpreter with torch, and one batch's activations
HASHED_OVERHEAD = 1.3  # RAM of the rows of a hash index, over the bytes of their records
SETTLE_STEPS = 3  # untimed steps at the start of a turn: others have used the caches meanwhile
SETTLE_BELOW_S = 0.05  # slower implementations outgrow every cache anyway
FIRST_STEPS = 2  # steps that load or compile

Step = Callable[[int], object]  # gets the number of a batch


class Unavailable(Exception):
    """An implementation cannot run here; the text says why, and what to install."""


class Footprint(NamedTuple):
    """Bytes of RAM and of a GPU's memory."""

    host: int = 0
    device: int = 0

    def fits(self, room: Footprint) -> bool:
        return self.host <= room.host and self.device <= room.device

    def too_large_for(self, room: Footprint) -> str:
        need, have, device, room_device = map(format_bytes, (self.host, room.host, self.device, room.device))
        if not (self.device or room.device):
            return f"needs {need} of RAM, {have} may be used"
        return f"needs {need} of RAM and {device} of GPU memory; {have} and {room_device} may be used"


class Timing(NamedTuple):
    """A turn.

    Attributes:
        steps_s: seconds of each timed step.
        more: other numbers of the turn. The line of the implementation has their medians over all turns.
    """

    steps_s: list[float]
    more: dict[str, float | None]

    @classmethod
    def now(cls, steps_s: list[float], **more: float | None) -> Timing:
        """Return a turn that ends now, with the RAM of this process now, and the most that it ever held."""
        return cls(steps_s, {"rss_bytes": rss_bytes(), "peak_bytes": peak_rss_bytes(), **more})


class StepSession:
    """In an implementation's own process: makes its step, and times it."""

    def __init__(self, make: Callable[[Any], Step], workload: Any) -> None:
        self._step = make(workload)
        self._batches = workload.batches
        self._count = 0
        self._last_s = 0.0
        self._calls = 0

    def warm_up(self, seconds: float) -> list[float]:
        """Work through all batches, or as many as fit into `seconds`; return the seconds of each step.

        Kernels are compiled in the first steps of the first run ever, so these do not count. One step more tells how
        many functions a step calls from Python.
        """
        first = min(FIRST_STEPS, self._batches)
        times = self._timed_steps(first, math.inf) + self._timed_steps(self._batches - first, seconds)
        self._calls = python_calls(partial(self._step, self._count % self._batches))
        self._count += 1
        return times

    def turn(self, steps: int, seconds: float) -> Timing:
        if self._last_s < SETTLE_BELOW_S:
            self._timed_steps(SETTLE_STEPS, seconds)
        return Timing.now(self._timed_steps(steps, seconds), calls=self._calls)

    def _timed_steps(self, steps: int, seconds: float) -> list[float]:
        times: list[float] = []
        while len(times) < steps and sum(times) < seconds:
            start = time.perf_counter()
            self._step(self._count % self._batches)
            self._last_s = time.perf_counter() - start
            self._count += 1
            times.append(self._last_s)
        return times


def python_calls(function: Callable[[], object]) -> int:
    """Return how many functions, Python's and C's, `function` calls from Python on this thread."""
    count, before = 0, sys.getprofile()

    def see(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


class Sessions:
    """In a process that several implementations share: their sessions, by name."""

    def __init__(self) -> None:
        self._sessions: dict[str, Any] = {}

    def open(self, name: str, session: Callable[..., Any], *arguments: Any) -> None:
        self._sessions[name] = session(*arguments)

    def call(self, name: str, method: str, *arguments: Any) -> Any:
        return getattr(self._sessions[name], method)(*arguments)


@dataclass(frozen=True)
class Implementation:
    """One way to do a job.

    Args:
        name: on the command line and in the tables.
        label: for people.
        make: called with a workload in the implementation's own process; must be importable by name.
        tables: RAM at the peak, in float32 tables of rows x dim: weights, state, gradient and temporaries.
        lazy: a table too large for a dense index takes RAM for the touched rows only.
        process_bytes: RAM of everything else.
        session: called with `make` and the workload. The session has ``warm_up(seconds)`` and
            ``turn(steps, seconds)``, and ``use(way)`` if there are several ways.
        ways: how the session is used, one result each; a way is the suffix of the name in the tables.
    """

    name: str
    label: str
    make: Callable[..., Any]
    tables: float = 0.0
    lazy: bool = False
    process_bytes: int = PROCESS_BYTES
    session: Callable[..., Any] = StepSession
    ways: tuple[str, ...] = ("",)

    def need(self, workload: Any) -> Footprint:
        records = int(self.tables * workload.table_bytes)
        if self.lazy and records > SMALL_BYTES and isinstance(workload, Workload):
            records = int(records * HASHED_OVERHEAD * workload.touched_rows() / workload.rows)
        return Footprint(self.process_bytes + workload.batches * workload.lookups * 8 + records)


def training_step(layer: Callable[[Any], Any], batches: Sequence[Any], optimizer: Any, gradient: Any) -> Step:
    """Return the loop body that users write, the same for PyTorch's layers and for ours."""
    gradient = import_torch().from_numpy(gradient)

    def step(index: int) -> None:
        optimizer.zero_grad()
        layer(batches[index]).backward(gradient)
        optimizer.step()

    return step


def import_torch() -> Any:
    """Return the module, with as many threads as an implementation may use."""
    try:
        import torch
    except ImportError as error:
        raise Unavailable(f"PyTorch does not import: {error}. pip install 'embedrock[torch]'") from error
    torch.set_num_threads(int(os.environ["EMBEDROCK_THREADS"]))
    return torch


def fbgemm_tables(rows: Sequence[int], dim: int, pooling: str) -> Any:
    """Return FBGEMM's CPU table-batched embedding with rowwise Adagrad; its optimizer runs inside backward."""
    training, common, configs = import_fbgemm()
    place = common.EmbeddingLocation.HOST, training.ComputeDevice.CPU
    tables = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(count, dim, *place) for count in rows],
        optimizer=configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        pooling_mode=common.PoolingMode[pooling],
        learning_rate=LEARNING_RATE,
    )
    tables.init_embedding_weights_uniform(-FIRST_VALUES, FIRST_VALUES)
    return tables


def import_fbgemm() -> tuple[Any, Any, Any]:
    """Return FBGEMM's modules of table-batched embeddings: training, common and configurations."""
    try:
        training = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
        common = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
        return training, common, import_module("fbgemm_gpu.split_embedding_configs")
    except (ImportError, OSError, RuntimeError) as error:  # the last two: built for another torch
        raise Unavailable(f"fbgemm_gpu does not import: {error}. pip install 'embedrock[bench]'") from error
