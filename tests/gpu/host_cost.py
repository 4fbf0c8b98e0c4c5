"""What a step costs the host: kernels launched, calls of PyTorch and Python, and time, with a driver that does nothing.

Run by compile_all.py, which has compiled the kernels; or by hand, with seconds to take the time of each way for:
``PYTHONPATH=src python tests/gpu/host_cost.py 2``; or with "compiles", for what is compiled late. "The GPU" is the CPU,
and plans are of zeros, which is no matter to what is counted.
"""

from __future__ import annotations

import os

os.environ.update(TRITON_INTERPRET="0", EMBEDROCK_THREADS="1")

import collections
import itertools
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.extend(str(Path(__file__).resolve().parents[2] / place) for place in ("tests/support", "."))

import torch
from compile_all import NoGPU, compiled
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver

import embedrock as er
import embedrock.torch as ert
from benchmarks import gpu as bench
from embedrock.device import attach, memory_for
from embedrock.kernels.gpu import runtime
from embedrock.torch import graphs
from python_calls import least_calls

ROWS, DIM, BATCH = 2000, 64, 96
NEAR = {"near": ROWS, "in place": 0, "cached": 500}
OPEN = 100_000  # records that there is room for, of a table of open ids
TOGETHER = 10  # tables of a collection


class Steps:
    """Lookups and steps of some tables, all alike, one by one or as a collection's."""

    def __init__(self, near: int, tables: int, together: bool, rows: int | None = ROWS) -> None:
        memory = near and memory_for(er.Table(rows, DIM, rule=er.Adam()).spec, near)
        self._layers = [ert.Embedding(rows, DIM, seed=k, device_memory=memory) for k in range(tables)]
        whole = torch.nn.ModuleList(self._layers)
        features = {str(k): layer for k, layer in enumerate(self._layers)}
        self._collection = ert.EmbeddingCollection(features) if together else None
        ert.place(whole, "cpu")
        self._optimizer = ert.Adam(whole, lr=1e-3)
        self._tables = tables
        self.take(BATCH)

    def take(self, batch: int) -> None:
        """Go on with batches of so many ids of each table."""
        self._gradient = torch.zeros(batch, DIM)
        self._batches = [list(torch.randint(0, ROWS, (self._tables, batch)).unbind()) for _ in range(4)]

    def run(self, count: int) -> None:
        for k in range(count):
            self._step(self._batches[k % 4])

    def _step(self, batch: list[torch.Tensor]) -> None:
        rows = self._rows(batch)
        torch.autograd.backward(rows, [self._gradient] * len(rows))
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _rows(self, batch: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._collection is None:
            return [layer(ids) for layer, ids in zip(self._layers, batch, strict=True)]
        return list(self._collection({str(k): ids for k, ids in enumerate(batch)}).values())


class Prefetched(Steps):
    """The same in a loop of `ert.prefetch`."""

    def __init__(self, near: int, tables: int, together: bool) -> None:
        super().__init__(near, tables, together)
        ids_of = {layer: lambda batch, k=k: batch[k] for k, layer in enumerate(self._layers)}
        self._loop = ert.prefetch((self._batches[k % 4] for k in itertools.count()), ids_of)

    def run(self, count: int) -> None:
        for _ in range(count):
            batch = next(self._loop)
            if len(batch[0]) != len(self._gradient):  # it was prefetched before `take`
                self._gradient = torch.zeros(len(batch[0]), DIM)
            self._step(batch)


class Forum:
    """Steps of the forum's model in `benchmarks gpu`: two tables looked up together, a dense model, two optimizers.

    Args:
        near: share of the rows in use that are on the device; None: of all rows.
        ahead: in a loop of `ert.prefetch`.
    """

    def __init__(self, near: float | None, ahead: bool = False) -> None:
        sizes: dict[str, Any] = {"cardinalities": (ROWS, ROWS // 10), "bag_sizes": (1, 1), "batch": BATCH, "batches": 4}
        work, device = bench.GpuWorkload(name="forum", dim=DIM, **sizes), bench.Device("cpu")
        self._steps = bench.Trainer(work, self._parts(work, device, near), device).run(sys.maxsize, ahead)

    def _parts(self, *given: Any) -> bench.Parts:
        return bench.our_parts(*given)

    def run(self, count: int) -> None:
        for _ in range(count):
            next(self._steps)


class ForumAlone(Forum):
    """The same without tables: the model gets rows."""

    def _parts(self, *given: Any) -> bench.Parts:
        rows = [torch.zeros(BATCH, DIM, requires_grad=True) for _ in range(2)]
        return bench.Parts(lambda batch: rows, ())


class BagSteps(Steps):
    """The same of bags of two or three ids, looked up by a collection."""

    def __init__(self, near: int, tables: int, mode: str) -> None:
        spec = er.Table(ROWS, DIM, rule=er.Adam()).spec
        memory = near and memory_for(spec, near)
        layers = {str(k): ert.EmbeddingBag(ROWS, DIM, mode=mode, seed=k, device_memory=memory) for k in range(tables)}
        self._bags = ert.EmbeddingBagCollection(layers)
        ert.place(self._bags, "cpu")
        self._optimizer = ert.Adam(self._bags, lr=1e-3)
        self._tables = tables
        self.take(BATCH)

    def take(self, batch: int) -> None:
        """Go on with batches of so many ids of each table, two or three in a bag."""
        super().take(batch)
        self._starts = torch.arange(batch // 2) * 2
        self._gradient = self._gradient[: batch // 2]

    def _rows(self, batch: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(self._bags({str(k): (ids, self._starts) for k, ids in enumerate(batch)}).values())


class Nothing(torch.autograd.Function):
    """Allocates and sorts as a lookup of rows near does, and as its gradients do; it launches nothing."""

    @staticmethod
    def forward(ctx: Any, handle: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        whole = torch.empty(9 * len(ids), dtype=torch.int32)
        parts = torch.split_with_sizes(whole, [2 * len(ids), len(ids), len(ids), 4, 5 * len(ids) - 4])
        torch.sort(parts[2], stable=True)
        return torch.empty(len(ids), DIM)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        torch.empty(2 * len(grads[0]), DIM)[: len(grads[0])]
        return torch.empty(3).unbind()[1].detach(), None


class Least(Steps):
    """What PyTorch takes of a step near, whatever Python and launches there are around its calls."""

    def __init__(self) -> None:
        self._tables, self._handle = 1, torch.nn.Parameter(torch.zeros(()))
        self._handle.register_post_accumulate_grad_hook(lambda _: None)
        self._layer: Any = torch.nn.Module()
        self._layer.forward = lambda ids: Nothing.apply(self._handle, ids)
        self.take(BATCH)

    def run(self, count: int) -> None:
        for k in range(count):
            torch.autograd.backward([self._layer(self._batches[k % 4][0])], [self._gradient])
            self._handle.grad = None


class Replayed(Steps):
    """The same in CUDA graphs, which replay nothing."""

    def __init__(self, near: int, tables: int, together: bool) -> None:
        super().__init__(near, tables, together)
        self._graphed = ert.graphed(self._step, self._optimizer)

    def run(self, count: int) -> None:
        for k in range(count):
            self._graphed(self._batches[k % 4])


class NoGraph:
    """`torch.cuda.CUDAGraph` of a GPU that is not there."""

    def replay(self) -> None:
        pass


def use_no_graphs() -> None:
    """Let steps be captured on a GPU that is not there."""
    stream, cuda, anything = SimpleNamespace(wait_stream=lambda _: None), torch.cuda, graphs
    for name in "Stream", "current_stream":
        setattr(cuda, name, lambda *_: stream)
    for name in "stream", "graph":
        setattr(cuda, name, lambda *_, **__: nullcontext())
    setattr(cuda, "CUDAGraph", NoGraph)  # noqa: B010
    setattr(anything, "_executor", lambda part: part.handle.executor())  # noqa: B010


class Calls(TorchDispatchMode):
    """Counts calls of PyTorch that do work on the device or allocate there."""

    # Views, spans for profilers, and what is asked of a handle or of a fault's copy, which are on the host here.
    VIEWS = (
        *("aten.view", "aten.detach", "aten.alias", "aten.select", "aten.slice", "aten._unsafe_view", "aten.expand"),
        *("aten.split_with_sizes", "aten.unbind", "aten.lift_fresh"),
    )
    SPANS = "profiler._record_function_enter_new", "profiler._record_function_exit"
    OF_HOST = *SPANS, "aten._local_scalar_dense", "aten.any"

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).rpartition(".")[0]
        if name not in self.VIEWS + self.OF_HOST:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


def launches_of(steps: Steps | Forum, count: int) -> collections.Counter[str]:
    """Return how often each kernel is launched."""
    seen: collections.Counter[str] = collections.Counter()

    def noted(kernel: Any, *args: Any) -> None:
        seen[kernel.__name__] += 1

    before, runtime.on_launch = runtime.on_launch, noted
    try:
        steps.run(count)
    finally:
        runtime.on_launch = before
    return seen


def cost(steps: Steps | Forum, each: int, seconds: float) -> dict[str, Any]:
    """Return what a step costs, of each of so many tables."""
    steps.run(4)
    launches = launches_of(steps, 4)
    with Calls() as calls:
        steps.run(4)
    taken, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.thread_time()
        steps.run(1)
        taken.append(time.thread_time() - start)
    each *= 4
    return {
        "launches": sum(launches.values()) / each,
        "calls": sum(calls.counts.values()) / each,
        "python": least_calls(lambda: steps.run(1), times=4),
        "us": round(min(taken) * 4 / each * 1e6) if taken else 0,  # the least, as others use the machine, too
        "kernels": {name: count / each for name, count in sorted(launches.items())},
        "of calls": {name: count / each for name, count in sorted(calls.counts.items())},
    }


def compiled_later(steps: Steps) -> int:
    """Return how many kernels are compiled for batches that are larger or smaller than those of the first two steps."""
    steps.run(2)
    before = sum(len(compiled(kernel)) for kernel in runtime.KERNELS)
    for batch in (BATCH + 1, 2, 16, 131, 2048, BATCH):
        steps.take(batch)
        steps.run(1)
    return sum(len(compiled(kernel)) for kernel in runtime.KERNELS) - before


def launched_ways() -> dict[str, Steps]:
    """Return steps by where the rows are. A driver that launches nothing is in use."""
    torch.set_num_threads(1)
    attach.check_interpreter = lambda: None
    torch.empty = torch.zeros  # what kernels would have written: no index is outside of anything
    ways = {name: Steps(near, 1, together=False) for name, near in NEAR.items()}
    ways["open ids"] = Steps(OPEN, 1, together=False, rows=None)
    ways["open ids in place"] = Steps(0, 1, together=False, rows=None)
    ways["ten near"] = Steps(ROWS, TOGETHER, together=True)
    ways["ten open ids"] = Steps(OPEN, TOGETHER, together=True, rows=None)
    ways["ten cached"] = Steps(NEAR["cached"], TOGETHER, together=True)
    ways |= {f"ten of bags, {mode}": BagSteps(ROWS, TOGETHER, mode) for mode in ("mean", "max")}
    for where in "near", "cached":
        ways[f"{where}, prefetched"] = Prefetched(NEAR[where], 1, together=False)
        ways[f"ten {where}, prefetched"] = Prefetched(NEAR[where], TOGETHER, together=True)
    return ways


def costs(seconds: float) -> dict[str, dict[str, Any]]:
    """Return what a step costs, by where the rows are. A driver that launches nothing is in use."""
    ways: dict[str, Any] = {**launched_ways()}
    use_no_graphs()
    ways["PyTorch alone"] = Least()
    forum = {"alone": ForumAlone(None), "near": Forum(None), "cached": Forum(0.2), "prefetched": Forum(0.2, ahead=True)}
    ways |= {f"forum, {name}": steps for name, steps in forum.items()}
    ways |= {"near, replayed": Replayed(ROWS, 1, together=False), "ten near, replayed": Replayed(ROWS, TOGETHER, True)}
    return {name: cost(steps, 1, seconds) for name, steps in ways.items()}


if __name__ == "__main__":
    gpu: Any = NoGPU()
    driver.set_active(gpu)
    if sys.argv[1:] == ["compiles"]:
        print(json.dumps({name: compiled_later(steps) for name, steps in launched_ways().items()}))
    else:
        print(json.dumps(costs(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0), indent=1))
