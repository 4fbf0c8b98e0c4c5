"""Processes of torch.distributed that make a step together, and what they need for it besides time.

The contender's own process is rank 0. It starts the others, and has all make their step at the same time.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from embedrock.bench.harness.comparison import StepSession, Timing
from embedrock.bench.harness.contenders import import_torch
from embedrock.bench.harness.processes import Child
from embedrock.bench.harness.workload import Workload

START_S = 120.0  # that a process may take to start

Make = Callable[[Workload], tuple[Any, Any]]  # returns a layer and its optimizer


def ids_of(workload: Workload, rank: int) -> list[np.ndarray]:
    """Return the batches of a rank: other ids on each, as popular."""
    return [(batch + np.int64(rank * 7919)) % workload.rows for batch in workload.ids()]


def ids_of_ranks(workload: Workload, ranks: int) -> Iterator[np.ndarray]:
    """Go through the batches of all ranks, in the order of steps, then of ranks: a log for `simulate`."""
    for step in zip(*(ids_of(workload, rank) for rank in range(ranks)), strict=True):
        yield from (ids.reshape(-1) for ids in step)


class Meters(NamedTuple):
    """What a rank has used until now, or for a step.

    Attributes:
        cpu_s: seconds of processors, of all threads.
        waited_s: seconds in collective operations of ours; of others it is not known.
        sent: bytes to other ranks, of ours.
        formula: bytes that it should be.
    """

    cpu_s: float
    waited_s: float | None
    sent: float | None
    formula: float | None

    def since(self, before: Meters, steps: int) -> Meters:
        """Return what a step took, on average, of so many."""
        rest = zip(self[1:], before[1:], strict=True)
        more = (None if one is None or other is None else (one - other) / steps for one, other in rest)
        return Meters((self.cpu_s - before.cpu_s) / steps, *more)


class RanksTiming(NamedTuple):
    """A turn of all ranks: a `Timing`, and what a step took of each.

    Attributes:
        steps_s, rss_bytes, peak_bytes: of rank 0, see `Timing`.
        meters: by rank.
    """

    steps_s: list[float]
    rss_bytes: int
    peak_bytes: int
    meters: list[Meters]


class Rank:
    """One of the processes: it makes a step when it is told to.

    Args:
        make: makes the layer and its optimizer, of a workload.
        workload: of this rank.
        loop: over batches: "plain", "prefetch" or "uneven".
        rank, ranks: which one it is, of how many.
        store: file by which they find each other.
    """

    def __init__(self, make: Make, workload: Workload, loop: str, rank: int, ranks: int, store: str) -> None:
        torch = import_torch()
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        torch.manual_seed(0)
        self._layer, self._optimizer = make(workload)
        is_parallel = getattr(self._layer, "is_parallel", False)
        self._net = self._layer if is_parallel else torch.nn.parallel.DistributedDataParallel(self._layer)
        self._gradient, self._stack = torch.from_numpy(workload.gradient()), ExitStack()
        shifted = ids_of(workload, rank)
        self._unique = [np.unique(ids) for ids in shifted]
        self._formula = 0.0
        batches = itertools.cycle([torch.from_numpy(ids) for ids in shifted])
        self._batches = _looped(loop, self._layer, self._net, batches, self._stack)

    def step(self, index: int) -> None:
        """Work through a batch: the next one, of which the number is told."""
        self._optimizer.zero_grad()
        self._net(next(self._batches)).backward(self._gradient)
        self._optimizer.step()
        self._formula += self._bytes(index)

    def meters(self) -> Meters:
        """Return what was used until now."""
        carriers = self._carriers()
        if not carriers:
            return Meters(time.process_time(), None, None, None)
        waited, sent = (sum(getattr(one, name) for one in carriers) for name in ("waited_s", "sent"))
        return Meters(time.process_time(), waited, sent, self._formula)

    def _carriers(self) -> list[Any]:
        handle = getattr(self._layer, "handle", None)
        if handle is None or handle.sharing is None:
            return []
        return handle.sharing.crew.carriers

    def _bytes(self, index: int) -> float:
        """Return the bytes that a step should send: those of the table in `docs/shards.md`."""
        handle = getattr(self._layer, "handle", None)
        if handle is None or handle.sharing is None:
            return 0.0
        dim, ranks, unique = handle.table.dim, handle.sharing.placement.ranks, self._unique[index]
        if handle.terms.sharded is False:
            return (8 + 4 * dim) * len(unique) * (ranks - 1)
        element = 2 if handle.terms.wire == "bfloat16" else 4
        return (2 * element * dim + 16) * len(unique) * (ranks - 1) / ranks


def _looped(loop: str, layer: Any, net: Any, batches: Any, stack: ExitStack) -> Any:
    import embedrock.torch as ert

    if loop == "prefetch":
        return iter(ert.prefetch(batches, {layer: lambda ids: ids}, depth=2))
    if loop == "uneven":
        stack.enter_context(net.join())
        stack.enter_context(ert.uneven(layer))
    return batches


class RanksSession(StepSession):
    """In rank 0's process: lets all ranks make their step at the same time, times it, and reads their meters.

    Args:
        make: makes a layer and its optimizer.
        loop: over batches, see `Rank`.
        ranks: how many.
        workload: of each.
    """

    def __init__(self, make: Make, loop: str, ranks: int, workload: Workload) -> None:
        folder, self._pool = tempfile.TemporaryDirectory(), ThreadPoolExecutor(ranks)
        args, store = (make, workload, loop), os.path.join(folder.name, "store")
        environment = {name: value for name, value in os.environ.items() if name.endswith("_THREADS")}
        starting = [
            self._pool.submit(Child, Rank, *args, rank, ranks, store, environment=environment, timeout_s=START_S)
            for rank in range(1, ranks)
        ]
        self._folder, self._own = folder, Rank(*args, 0, ranks, store)
        self._others = [each.result() for each in starting]
        super().__init__(lambda _: self._step_all, workload)

    def turn(self, steps: int, seconds: float) -> RanksTiming:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Make `steps` steps, or as many as fit into `seconds`."""
        before, first = self._meters(), self._count
        timing: Timing = super().turn(steps, seconds)
        made = self._count - first
        each = [now.since(then, made) for now, then in zip(self._meters(), before, strict=True)]
        return RanksTiming(*timing, each)

    def _step_all(self, index: int) -> None:
        made = [self._pool.submit(other.call, "step", index) for other in self._others]
        self._own.step(index)
        for each in made:
            each.result()

    def _meters(self) -> list[Meters]:
        return [self._own.meters(), *(other.call("meters") for other in self._others)]
