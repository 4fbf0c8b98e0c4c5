"""Who takes part in ``bench shards``: a step of several processes, each with a batch of its own, under stock DDP."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from embedrock.bench.harness.contenders import LEARNING_RATE, Unavailable, import_torch
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


def torchrec_layer(workload: Workload) -> Any:
    """Return TorchRec's row-wise sharded `EmbeddingBagCollection`, of bags of one id, and its optimizer.

    Its sharded `EmbeddingCollection`, which has no bags, ends on gloo in "Split sizes doesn't match" (1.9.2).
    """
    torch = import_torch()
    try:
        fbgemm = import_module("fbgemm_gpu.split_embedding_configs")
        torchrec, sharding = import_module("torchrec"), import_module("torchrec.distributed.sharding_plan")
        bags, parallel = import_module("torchrec.distributed.embeddingbag"), import_module("torchrec.distributed")
        types = import_module("torchrec.distributed.types")
    except (ImportError, OSError, RuntimeError) as error:
        raise Unavailable(f"torchrec does not import: {error}. pip install torchrec, without another torch") from error

    class Rows(torch.nn.Module):
        is_parallel = True  # by itself, without DistributedDataParallel

        def __init__(self) -> None:
            super().__init__()
            table = torchrec.EmbeddingBagConfig(
                name="rows", embedding_dim=workload.dim, num_embeddings=workload.rows, feature_names=["ids"]
            )
            self.bags = torchrec.EmbeddingBagCollection(tables=[table], device=torch.device("meta"))

        def forward(self, ids: Any) -> Any:
            lengths = torch.ones(ids.numel(), dtype=torch.int64)
            wanted = torchrec.KeyedJaggedTensor(keys=["ids"], values=ids.reshape(-1), lengths=lengths)
            return self.bags(wanted).values().view(*ids.shape, workload.dim)

    layer, ranks = Rows(), torch.distributed.get_world_size()
    rule = {"optimizer": fbgemm.EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LEARNING_RATE}
    sharder = bags.EmbeddingBagCollectionSharder(fused_params=rule)
    plan = sharding.construct_module_sharding_plan(
        layer.bags, {"rows": sharding.row_wise()}, sharder, local_size=ranks, world_size=ranks, device_type="cpu"
    )
    made = parallel.DistributedModelParallel(
        layer, device=torch.device("cpu"), plan=types.ShardingPlan({"bags": plan}), sharders=[sharder]
    )
    return made.module, made.fused_optimizer


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
    _contender("torchrec-2", "TorchRec, bags of one id, row-wise, rowwise Adagrad", torchrec_layer, 2, 1.1),
)
