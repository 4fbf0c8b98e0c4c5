"""Who takes part in ``bench shards``: a step of several processes, each with a batch of its own, under stock DDP."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from embedrock.bench.harness.contenders import LEARNING_RATE, import_torch
from embedrock.bench.harness.runner import Racer
from embedrock.bench.harness.workload import Workload
from embedrock.bench.shards.ranks import Make, RanksSession
from embedrock.bench.step.contenders import PROCESS_BYTES, StepContender


@dataclass(frozen=True)
class RanksContender(StepContender):
    """Processes that make a step together.

    Args:
        ranks: how many.
        loop: over batches: "plain", "prefetch" or "uneven".
    """

    ranks: int = 1
    loop: str = "plain"

    def racer(self, workload: Workload, name: str = "", session: type = RanksSession) -> Racer:
        """Return it as it takes part."""
        return Racer(self, workload, (session, self.make, self.loop, self.ranks, workload), name)


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


def _contender(
    name: str, label: str, make: Make, ranks: int, tables: float, loop: str = "plain", lazy: bool = False
) -> RanksContender:
    processes = "1 process" if ranks == 1 else f"{ranks} processes"
    ram = PROCESS_BYTES * ranks
    return RanksContender(name, f"{label}, {processes}", make, tables * ranks, lazy, ram, ranks, loop)


def _ours(ranks: int, name: str, label: str, sharded: Any, loop: str = "plain", **options: Any) -> RanksContender:
    make = partial(our_layer, sharded=sharded, **options)
    return _contender(f"ours-{name}-{ranks}", f"ert.Embedding, {label}", make, ranks, 1.0, loop)


CONTENDERS = (
    _contender("ours-alone", "ert.Embedding under DDP", partial(our_layer, sharded=False), 1, 3.0, lazy=True),
    _ours(1, "sharded", "sharded=True", True),
    _ours(2, "sharded", "sharded=True", True),
    _ours(4, "sharded", "sharded=True", True),
    _ours(2, "prefetch", "sharded=True, ids ahead by ert.prefetch", True, "prefetch"),
    _ours(2, "uneven", "sharded=True, inside of ert.uneven", True, "uneven"),
    _ours(2, "bfloat16", "sharded=True, wire='bfloat16'", True, wire="bfloat16"),
    _ours(2, "replicated", "all rows on each rank", False),
    _contender("torch-sparse-2", "nn.Embedding(sparse=True), SparseAdam", torch_layer, 2, 3.0),
)
