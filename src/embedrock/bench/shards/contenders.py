"""Who takes part in ``bench shards``: a step of several processes, each with a batch of its own, under stock DDP.

The contender's own process is rank 0. It starts the others, and has all make their step at the same time.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from embedrock.bench.harness.comparison import Step
from embedrock.bench.harness.contenders import LEARNING_RATE, import_torch
from embedrock.bench.harness.processes import Child
from embedrock.bench.harness.workload import Workload
from embedrock.bench.step.contenders import PROCESS_BYTES, StepContender, our_step

START_S = 120.0  # that a process may take to start


class Rank:
    """One of the processes: it makes a step when it is told to.

    Args:
        make: makes the layer and its optimizer, of a workload.
        workload: of this rank.
        rank, ranks: which one it is, of how many.
        store: file by which they find each other.
    """

    def __init__(self, make: Callable[[Workload], Any], workload: Workload, rank: int, ranks: int, store: str) -> None:
        torch = import_torch()
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        torch.manual_seed(0)
        layer, self._optimizer = make(workload)
        self._net = torch.nn.parallel.DistributedDataParallel(layer)
        shift = np.int64(rank * 7919)  # other ids on each, as popular
        self._ids = [torch.from_numpy((batch + shift) % workload.rows) for batch in workload.ids()]
        self._gradient = torch.from_numpy(workload.gradient())

    def step(self, index: int) -> None:
        """Work through a batch."""
        self._optimizer.zero_grad()
        self._net(self._ids[index]).backward(self._gradient)
        self._optimizer.step()


def step_of_ranks(workload: Workload, make: Callable[[Workload], Any], ranks: int) -> Step:
    """Return a step that all ranks make at the same time, in as many processes."""
    folder, pool = tempfile.TemporaryDirectory(), ThreadPoolExecutor(ranks)
    args = make, workload
    store = os.path.join(folder.name, "store")
    environment = {name: value for name, value in os.environ.items() if name.endswith("_THREADS")}
    starting = [
        pool.submit(Child, Rank, *args, rank, ranks, store, environment=environment, timeout_s=START_S)
        for rank in range(1, ranks)
    ]
    own, others = Rank(*args, 0, ranks, store), [each.result() for each in starting]

    def step(index: int, keeps: object = folder) -> None:
        made = [pool.submit(other.call, "step", index) for other in others]
        own.step(index)
        for each in made:
            each.result()

    return step


def our_layer(workload: Workload, sharded: Any) -> Any:
    """Return `embedrock.torch.Embedding` and its optimizer."""
    import embedrock.torch as ert

    layer = ert.Embedding(workload.rows, workload.dim, sharded=sharded)
    return layer, ert.Adam(layer, lr=LEARNING_RATE)


def torch_layer(workload: Workload) -> Any:
    """Return `torch.nn.Embedding` with sparse gradients and its optimizer."""
    torch = import_torch()
    layer = torch.nn.Embedding(workload.rows, workload.dim, sparse=True)
    return layer, torch.optim.SparseAdam(list(layer.parameters()), lr=LEARNING_RATE)


def _contender(name: str, label: str, make: Callable[[Workload], Any], ranks: int, tables: float) -> StepContender:
    step = partial(step_of_ranks, make=make, ranks=ranks)
    return StepContender(name, f"{label}, {ranks} processes", step, tables * ranks, process_bytes=PROCESS_BYTES * ranks)


def _ours(ranks: int, name: str, label: str, sharded: Any) -> StepContender:
    return _contender(f"ours-{name}-{ranks}", label, partial(our_layer, sharded=sharded), ranks, 1.0)


CONTENDERS = (
    StepContender("ours-alone", "ert.Embedding, one process", partial(our_step, optimizer="Adam"), 3.0, lazy=True),
    _ours(2, "sharded", "ert.Embedding(sharded=True)", True),
    _ours(4, "sharded", "ert.Embedding(sharded=True)", True),
    _ours(2, "replicated", "ert.Embedding, all rows on each rank", False),
    _contender("torch-sparse-2", "nn.Embedding(sparse=True), SparseAdam", torch_layer, 2, 3.0),
)
