"""Who takes part where one batch uses many tables: each makes a `Step` on a `ManyTables`.

A step is a forward of the bags of all tables, a backward with given gradients of their sums, and the optimizer. Each
is given its bags and gradients as it likes them best. Nothing heavier than NumPy is imported before a contender is made
in its own process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from embedrock.bench.harness.comparison import Step
from embedrock.bench.harness.contenders import LEARNING_RATE, Unavailable, import_fbgemm, import_torch
from embedrock.bench.harness.many_tables import ManyTables
from embedrock.bench.step.contenders import StepContender

FIRST_VALUES = 0.01  # rows begin between minus this and this


def our_layers(workload: ManyTables, optimizer: str) -> Step:
    """Train one `embedrock.torch.EmbeddingBag` for each table."""
    torch = import_torch()
    import embedrock.torch as ert

    layers = torch.nn.ModuleList(ert.EmbeddingBag(rows, workload.dim, mode="sum") for rows in workload.rows)
    return _step(_each(layers), getattr(ert, optimizer)(layers, lr=LEARNING_RATE), workload)


def our_collection(workload: ManyTables, optimizer: str) -> Step:
    """Train an `embedrock.torch.EmbeddingBagCollection`, whose tables are in one group."""
    collection, names, made = _collection(workload, optimizer)

    def sums(ids: Sequence[Any]) -> list[Any]:
        return list(collection(dict(zip(names, ids, strict=True))).values())

    return _step(sums, made, workload)


def our_side_by_side(workload: ManyTables, optimizer: str) -> Step:
    """Train the same collection by one tensor of all features, as FBGEMM returns it."""
    torch = import_torch()
    collection, names, made = _collection(workload, optimizer)
    batches = [dict(zip(names, map(torch.from_numpy, ids), strict=True)) for ids in workload.ids()]
    gradient = _side_by_side(torch.from_numpy(workload.gradient()))

    def step(index: int) -> None:
        made.zero_grad()
        collection(batches[index], concatenate=True).backward(gradient)
        made.step()

    return step


def _collection(workload: ManyTables, optimizer: str) -> tuple[Any, list[str], Any]:
    """Return a collection, the names of its features, and its optimizer."""
    import_torch()
    import embedrock.torch as ert

    names = [f"t{number}" for number in range(len(workload.rows))]
    tables = zip(workload.rows, names, strict=True)
    configs = [ert.EmbeddingBagConfig(rows, workload.dim, name, pooling="sum") for rows, name in tables]
    collection = ert.EmbeddingBagCollection(configs)
    return collection, names, getattr(ert, optimizer)(collection, lr=LEARNING_RATE)


def our_table(workload: ManyTables, optimizer: str) -> Step:
    """Train one `embedrock.torch.EmbeddingBag` with the rows of all tables, as nobody's model has it: what is least."""
    torch = import_torch()
    import embedrock.torch as ert

    layer = ert.EmbeddingBag(sum(workload.rows), workload.dim, mode="sum")
    starts = np.cumsum([0, *workload.rows[:-1]])
    shifted = ([ids + start for ids, start in zip(batch, starts, strict=True)] for batch in workload.ids())
    batches = [torch.from_numpy(_values(batch)) for batch in shifted]
    offsets = torch.from_numpy(np.cumsum([0, *_lengths(workload)[:-1]]))
    gradient = torch.from_numpy(workload.gradient()).view(-1, workload.dim)
    made = getattr(ert, optimizer)(layer, lr=LEARNING_RATE)

    def step(index: int) -> None:
        made.zero_grad()
        layer(batches[index], offsets).backward(gradient)
        made.step()

    return step


def torch_layers(workload: ManyTables, optimizer: str) -> Step:
    """Train one `torch.nn.EmbeddingBag` with sparse gradients for each table."""
    torch = import_torch()
    bags = (torch.nn.EmbeddingBag(rows, workload.dim, mode="sum", sparse=True) for rows in workload.rows)
    layers = torch.nn.ModuleList(bags)
    return _step(_each(layers), getattr(torch.optim, optimizer)(layers.parameters(), lr=LEARNING_RATE), workload)


Sums = Callable[[Sequence[Any]], list[Any]]  # given the ids of each table


def _each(layers: Iterable[Any]) -> Sums:
    """Call layer after layer."""
    return lambda batch: [layer(ids) for layer, ids in zip(layers, batch, strict=True)]


def _step(sums: Sums, optimizer: Any, workload: ManyTables) -> Step:
    """Return the loop body that users write, the same for `nn.EmbeddingBag` and for ours."""
    torch = import_torch()
    batches = [[torch.from_numpy(ids) for ids in batch] for batch in workload.ids()]
    gradients = list(torch.from_numpy(workload.gradient()))

    def step(index: int) -> None:
        optimizer.zero_grad()
        torch.autograd.backward(sums(batches[index]), gradients)
        optimizer.step()

    return step


def fbgemm(workload: ManyTables, threads: int | None = None) -> Step:
    """Train FBGEMM's CPU table-batched embedding; its optimizer runs inside backward.

    Small batches take it longer on two threads that sleep while they wait than on one, so it may have its own number.
    """
    torch = import_torch()
    if threads is not None:
        torch.set_num_threads(threads)
    training, common, configs = import_fbgemm()
    place = common.EmbeddingLocation.HOST, training.ComputeDevice.CPU
    tables = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, workload.dim, *place) for rows in workload.rows],
        optimizer=configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        pooling_mode=common.PoolingMode.SUM,
        learning_rate=LEARNING_RATE,
    )
    tables.init_embedding_weights_uniform(-FIRST_VALUES, FIRST_VALUES)
    batches = [torch.from_numpy(_values(batch)) for batch in workload.ids()]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.from_numpy(_lengths(workload)).cumsum(0)])
    gradient = _side_by_side(torch.from_numpy(workload.gradient()))

    def step(index: int) -> None:
        tables(batches[index], offsets).backward(gradient)

    return step


def torchrec(workload: ManyTables) -> Step:
    """Train TorchRec's fused `EmbeddingBagCollection`, which calls FBGEMM; its optimizer runs inside backward."""
    torch = import_torch()
    import_fbgemm()
    try:
        collections = import_module("torchrec.modules.fused_embedding_modules")
        modules, optimizers = import_module("torchrec"), import_module("torchrec.optim")
        _one_process(torch)
    except (ImportError, OSError, RuntimeError) as error:
        raise Unavailable(f"torchrec does not import: {error}. pip install torchrec, without another torch") from error
    names = [f"t{number}" for number in range(len(workload.rows))]
    configs = [
        modules.EmbeddingBagConfig(name=name, embedding_dim=workload.dim, num_embeddings=rows, feature_names=[name])
        for name, rows in zip(names, workload.rows, strict=True)
    ]
    tables = collections.FusedEmbeddingBagCollection(
        configs, optimizers.RowWiseAdagrad, {"lr": LEARNING_RATE}, device=torch.device("cpu")
    )
    lengths = torch.from_numpy(_lengths(workload))
    batches = [torch.from_numpy(_values(batch)) for batch in workload.ids()]
    gradient = _side_by_side(torch.from_numpy(workload.gradient()))

    def step(index: int) -> None:
        sums = tables(modules.KeyedJaggedTensor(keys=names, values=batches[index], lengths=lengths))
        sums.values().backward(gradient)

    return step


def _one_process(torch: Any) -> None:
    # TorchRec's fused modules ask for a process group, also where there is one process.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def _values(batch: Sequence[np.ndarray]) -> np.ndarray:
    """Return the ids of a batch one after another, by table and sample."""
    return np.concatenate([ids.ravel() for ids in batch])


def _lengths(workload: ManyTables) -> np.ndarray:
    """Return how many ids each bag has, by table and sample."""
    return np.repeat(np.array(workload.bags, np.int64), workload.batch)


def _side_by_side(gradients: Any) -> Any:
    """Return (tables, batch, dim) as (batch, tables * dim)."""
    return gradients.permute(1, 0, 2).reshape(gradients.shape[1], -1).contiguous()


def _row(name: str, label: str, make: Any, tables: float, **arguments: Any) -> StepContender:
    return StepContender(name, label, partial(make, **arguments), tables)


ROWWISE = {"optimizer": "RowwiseAdagrad"}

CONTENDERS = (
    _row("ours-rowwise-adagrad", "ert.EmbeddingBagCollection, RowwiseAdagrad", our_collection, 1.1, **ROWWISE),
    _row("ours-adam", "ert.EmbeddingBagCollection, Adam", our_collection, 3, optimizer="Adam"),
    _row("ours-side-by-side", "the same, by concatenate=True", our_side_by_side, 1.1, **ROWWISE),
    _row("ours-adam-side-by-side", "Adam, by concatenate=True", our_side_by_side, 3, optimizer="Adam"),
    _row("ours-one-table", "one ert.EmbeddingBag with all rows, RowwiseAdagrad", our_table, 1.1, **ROWWISE),
    _row("ours-layers-rowwise-adagrad", "ert.EmbeddingBag each, RowwiseAdagrad", our_layers, 1.1, **ROWWISE),
    _row("ours-layers-adam", "ert.EmbeddingBag each, Adam", our_layers, 3, optimizer="Adam"),
    _row("fbgemm-rowwise-sum", "FBGEMM CPU, rowwise Adagrad, SUM", fbgemm, 1.1),
    _row("fbgemm-one-thread", "the same, on one thread", fbgemm, 1.1, threads=1),
    _row("torchrec-fused", "TorchRec, fused EmbeddingBagCollection, rowwise Adagrad", torchrec, 2.2),
    _row("torch-sparse-adam", "nn.EmbeddingBag(sparse=True) each, SparseAdam", torch_layers, 3, optimizer="SparseAdam"),
    _row("torch-sparse-adagrad", "nn.EmbeddingBag(sparse=True) each, Adagrad", torch_layers, 2, optimizer="Adagrad"),
)
