"""``shards``: a training step of several processes under stock DDP, each with a batch of its own.

The implementation's own process is rank 0. It starts the others, and all make their step at the same time.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.benchmark import Benchmark
from benchmarks.implementations import LEARNING_RATE, PROCESS_BYTES, Implementation, StepSession, Timing, import_torch
from benchmarks.options import BenchmarkOptions
from benchmarks.processes import Child
from benchmarks.targets import Target, each, faster, ratio
from benchmarks.workload import Workload
from embedrock.cli.terminal.tables import Field, format_number
from embedrock.system.sizes import format_bytes

START_S = 120.0  # that a process may take to start

Make = Callable[[Workload], tuple[Any, Any]]  # returns a layer and its optimizer


# ---------------------------------------------------------------- a rank


class Rank:
    """One of the processes.

    Args:
        make: makes the layer and its optimizer, of a workload.
        workload: of this rank.
        ahead: batches that `ert.prefetch` looks ahead; 0: no prefetching.
        rank, ranks: its number, and the number of all.
        store: file by which they find each other.
    """

    def __init__(self, make: Make, workload: Workload, ahead: int, rank: int, ranks: int, store: str) -> None:
        torch = import_torch()
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        torch.manual_seed(0)
        self._layer, self._optimizer = make(workload)
        self._net = torch.nn.parallel.DistributedDataParallel(self._layer)
        self._gradient = torch.from_numpy(workload.gradient())
        shifted = [(batch + rank * 7919) % workload.rows for batch in workload.ids()]  # other ids, as popular
        self._unique = [np.unique(ids).size for ids in shifted]
        self._formula = 0.0
        batches = itertools.cycle([torch.from_numpy(ids) for ids in shifted])
        if ahead:
            import embedrock.torch as ert

            batches = iter(ert.prefetch(batches, {self._layer: lambda ids: ids}, depth=ahead))
        self._batches = batches

    def step(self, index: int) -> None:
        """Work through the next batch, whose number is `index`."""
        self._optimizer.zero_grad()
        self._net(next(self._batches)).backward(self._gradient)
        self._optimizer.step()
        if self._handle is not None:
            self._formula += self._bytes(self._handle, self._unique[index])

    def meters(self) -> dict[str, float]:
        """Return the use until now: ms of processors, and of our collective operations; bytes, and by the formula."""
        found = {"cpu_ms": time.process_time() * 1e3}
        if self._handle is None:
            return found
        group = self._handle.sharing.rank_group
        carriers = [one for one in (group.ranks, group._ahead) if one is not None]
        waited_s, sent = (sum(getattr(one, name) for one in carriers) for name in ("waited_s", "sent"))
        return found | {"waited_ms": waited_s * 1e3, "sent_bytes": sent, "formula_bytes": self._formula}

    @property
    def _handle(self) -> Any:
        handle = getattr(self._layer, "handle", None)
        return None if handle is None or handle.sharing is None else handle

    def _bytes(self, handle: Any, unique: int) -> float:
        """Return the bytes that a step should send, by the table in `docs/shards.md`."""
        dim, ranks = handle.table.dim, handle.sharing.placement.ranks
        if handle.terms.sharded is False:
            return (8 + 4 * dim) * unique * (ranks - 1)
        element = 2 if handle.terms.wire == "bfloat16" else 4
        return (2 * element * dim + 16) * unique * (ranks - 1) / ranks


class RanksSession(StepSession):
    """In rank 0's process: has all ranks make their step at the same time, times it, and reads their meters."""

    def __init__(self, make: Make, workload: Workload, ahead: int, ranks: int) -> None:
        folder, self._pool = tempfile.TemporaryDirectory(), ThreadPoolExecutor(ranks)
        args, store = (make, workload, ahead), os.path.join(folder.name, "store")
        environment = {name: value for name, value in os.environ.items() if name.endswith("_THREADS")}
        starting = [
            self._pool.submit(Child, Rank, *args, rank, ranks, store, environment=environment, timeout_s=START_S)
            for rank in range(1, ranks)
        ]
        self._folder, self._own = folder, Rank(*args, 0, ranks, store)
        self._others = [one.result() for one in starting]
        super().__init__(lambda _: self._step_all, workload)

    def turn(self, steps: int, seconds: float) -> Timing:
        """Make `steps` steps, or as many as fit into `seconds`; add the mean use of a rank in a step."""
        before, first = self._meters(), self._count
        steps_s, more = super().turn(steps, seconds)
        made = self._count - first
        return Timing(steps_s, more | {name: (value - before[name]) / made for name, value in self._meters().items()})

    def _step_all(self, index: int) -> None:
        made = [self._pool.submit(other.call, "step", index) for other in self._others]
        self._own.step(index)
        for one in made:
            one.result()

    def _meters(self) -> dict[str, float]:
        ranks = [self._own.meters(), *(other.call("meters") for other in self._others)]
        return {name: fmean(one[name] for one in ranks) for name in ranks[0]}


# ---------------------------------------------------------------- implementations


def our_layer(workload: Workload, **options: Any) -> Any:
    """Return `embedrock.torch.Embedding` and its optimizer."""
    import embedrock.torch as ert

    layer = ert.Embedding(workload.rows, workload.dim, **options)
    return layer, ert.Adam(layer, lr=LEARNING_RATE)


def torch_layer(workload: Workload) -> Any:
    """Return `torch.nn.Embedding` with sparse gradients and its optimizer."""
    torch = import_torch()
    layer = torch.nn.Embedding(workload.rows, workload.dim, sparse=True)
    return layer, torch.optim.SparseAdam(list(layer.parameters()), lr=LEARNING_RATE)


def _row(
    name: str, label: str, make: Make, ranks: int, tables: float, ahead: int = 0, lazy: bool = False
) -> Implementation:
    label = f"{label}, {'1 process' if ranks == 1 else f'{ranks} processes'}"
    session = partial(RanksSession, ahead=ahead, ranks=ranks)
    return Implementation(name, label, make, tables * ranks, lazy, PROCESS_BYTES * ranks, session)


def _ours(ranks: int, name: str, label: str, sharded: Any, ahead: int = 0, **options: Any) -> Implementation:
    make = partial(our_layer, sharded=sharded, **options)
    return _row(f"ours-{name}-{ranks}", f"ert.Embedding, {label}", make, ranks, 1.0, ahead)


IMPLEMENTATIONS = (
    _row("ours-alone", "ert.Embedding under DDP", partial(our_layer, sharded=False), 1, 3.0, lazy=True),
    _ours(1, "sharded", "sharded=True", True),
    _ours(2, "sharded", "sharded=True", True),
    _ours(4, "sharded", "sharded=True", True),
    _ours(2, "prefetch", "sharded=True, ids ahead by ert.prefetch", True, 2),
    _ours(2, "bfloat16", "sharded=True, wire='bfloat16'", True, wire="bfloat16"),
    _ours(2, "replicated", "all rows on each rank", False),
    _row("torch-sparse-2", "nn.Embedding(sparse=True), SparseAdam", torch_layer, 2, 3.0),
)

# ---------------------------------------------------------------- the benchmark


def _off(name: str) -> Target:
    off = each(lambda line: abs(line["sent_bytes"] / line["formula_bytes"] - 1) * 100, "sent_bytes", name=name)
    return Target("bytes of {name} off their formula", off, 2, "%", at_most=True)


_MORE = (
    Field("cpu ms", "cpu_ms", format_number),  # of a rank
    # The share of the step in collective operations of ours, waiting for other ranks included.
    Field("waiting", lambda line: f"{line['waited_ms'] / line['median_ms']:.0%}" if "waited_ms" in line else ""),
    Field("sent", "sent_bytes", format_bytes),  # from a rank to others
    Field(
        "of formula", lambda line: f"{line['sent_bytes'] / line['formula_bytes']:.4f}" if line.get("sent_bytes") else ""
    ),
)

SHARDS = Benchmark(
    "shards",
    "a training step of one table over several processes of torch.distributed, each with a batch of its own",
    IMPLEMENTATIONS,
    (
        faster("ours-sharded-2", "torch-sparse-2", 5),
        faster("ours-prefetch-2", "torch-sparse-2", 5),
        ratio("processor time of a rank of 2, over one process", "ours-sharded-2", "ours-alone", "cpu_ms", 2),
        ratio("sharded on a single rank, over not sharded", "ours-sharded-1", "ours-alone", "median_ms", 1.05),
        _off("ours-sharded-2"),
        _off("ours-prefetch-2"),
    ),
    (Workload(),),
    BenchmarkOptions(threads=1),
    fields=_MORE,
)
