"""``dlrm``, ``groups``: many tables that one batch uses together, beside PyTorch and FBGEMM.

A step is a forward of the bags of all tables, a backward with given gradients of their sums, and the optimizer. Each
implementation gets its bags and gradients in the form that it takes best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.benchmark import ROUNDS, Benchmark, Task, compare_implementations
from benchmarks.implementations import (
    LEARNING_RATE,
    Implementation,
    Step,
    fbgemm_tables,
    import_torch,
)
from benchmarks.report import Report, compare
from benchmarks.runner import Entry
from benchmarks.targets import Target, beside, faster
from benchmarks.workload import ManyTables

SIZES = ("dim", "batch", "zipf", "batches", "seed", "max_rows", "max_bag")
ROWS, ONE_MORE = 200_000, "27-tables"
RAM_ROWS = 1_000_000  # the largest tables are cut to this, so all implementations fit the RAM of a laptop

# ---------------------------------------------------------------- ours


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


# ---------------------------------------------------------------- others


def torch_layers(workload: ManyTables, optimizer: str) -> Step:
    """Train one `torch.nn.EmbeddingBag` with sparse gradients for each table."""
    torch = import_torch()
    bags = (torch.nn.EmbeddingBag(rows, workload.dim, mode="sum", sparse=True) for rows in workload.rows)
    layers = torch.nn.ModuleList(bags)
    made = getattr(torch.optim, optimizer)(layers.parameters(), lr=LEARNING_RATE)
    return _step(lambda batch: [layer(ids) for layer, ids in zip(layers, batch, strict=True)], made, workload)


def _step(sums: Callable[[Sequence[Any]], list[Any]], optimizer: Any, workload: ManyTables) -> Step:
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
    """Train FBGEMM's CPU table-batched embedding.

    Small batches take it longer on two threads that sleep while they wait than on one, so it may have its own number.
    """
    torch = import_torch()
    if threads is not None:
        torch.set_num_threads(threads)
    tables = fbgemm_tables(workload.rows, workload.dim, "SUM")
    batches = [torch.from_numpy(_values(batch)) for batch in workload.ids()]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.from_numpy(_lengths(workload)).cumsum(0)])
    gradient = _side_by_side(torch.from_numpy(workload.gradient()))
    return lambda index: tables(batches[index], offsets).backward(gradient)


def _values(batch: Sequence[np.ndarray]) -> np.ndarray:
    """Return the ids of a batch one after another, by table and sample."""
    return np.concatenate([ids.ravel() for ids in batch])


def _lengths(workload: ManyTables) -> np.ndarray:
    """Return the number of ids of each bag, by table and sample."""
    return np.repeat(np.array(workload.bags, np.int64), workload.batch)


def _side_by_side(gradients: Any) -> Any:
    """Return (tables, batch, dim) as (batch, tables * dim)."""
    return gradients.permute(1, 0, 2).reshape(gradients.shape[1], -1).contiguous()


# ---------------------------------------------------------------- the benchmarks


def _row(name: str, label: str, make: Any, tables: float, **arguments: Any) -> Implementation:
    return Implementation(name, label, partial(make, **arguments), tables)


ROWWISE = {"optimizer": "RowwiseAdagrad"}
IMPLEMENTATIONS = (
    _row("ours-rowwise-adagrad", "ert.EmbeddingBagCollection, RowwiseAdagrad", our_collection, 1.1, **ROWWISE),
    _row("ours-adam", "ert.EmbeddingBagCollection, Adam", our_collection, 3, optimizer="Adam"),
    _row("ours-side-by-side", "the same, by concatenate=True", our_side_by_side, 1.1, **ROWWISE),
    _row("ours-adam-side-by-side", "Adam, by concatenate=True", our_side_by_side, 3, optimizer="Adam"),
    _row("fbgemm-rowwise-sum", "FBGEMM CPU, rowwise Adagrad, SUM", fbgemm, 1.1),
    _row("fbgemm-one-thread", "the same, on one thread", fbgemm, 1.1, threads=1),
    _row("torch-sparse-adam", "nn.EmbeddingBag(sparse=True) each, SparseAdam", torch_layers, 3, optimizer="SparseAdam"),
    _row("torch-sparse-adagrad", "nn.EmbeddingBag(sparse=True) each, Adagrad", torch_layers, 2, optimizer="Adagrad"),
)


def compare_groups(task: Task) -> Report:
    """Measure implementations on tables that are alike, and the cost of one more table for the first of them."""
    workload = task.workload
    more = replace(workload, cardinalities=(*workload.cardinalities, ROWS), bag_sizes=(*workload.bag_sizes, 1))
    print(workload.describe())
    entries = [Entry(one, workload) for one in task.implementations]
    one_more = Entry(replace(task.implementations[0], name=ONE_MORE), more)
    return compare([*entries, one_more], task.benchmark.targets, task.options)


DLRM = Benchmark(
    "dlrm",
    "a training step on DLRM's 26 tables with MLPerf's bags: forward, backward and optimizer",
    compare_implementations,
    (*SIZES, *ROUNDS),
    IMPLEMENTATIONS,
    (faster("ours-rowwise-adagrad", "fbgemm-rowwise-sum", 1.3),),
    (ManyTables(max_rows=RAM_ROWS),),
)

_more_ms = beside(
    ONE_MORE, IMPLEMENTATIONS[0].name, lambda one, other: one["median_ms"] - other["median_ms"], "median_ms"
)

# A batch of 2,048 of one more table costs its ids, its rows, and the fixed cost of a table.
GROUPS = Benchmark(
    "groups",
    "a training step on 26 tables that are alike, one id each: forward, backward and optimizer",
    compare_groups,
    (*SIZES, *ROUNDS),
    IMPLEMENTATIONS,
    (
        faster("ours-side-by-side", "fbgemm-rowwise-sum", 1.8),
        faster("ours-adam-side-by-side", "torch-sparse-adam", 8),
        Target("the 27th table", _more_ms, 0.1, "ms", at_most=True),
    ),
    (ManyTables(cardinalities=(ROWS,) * 26, bag_sizes=(1,) * 26),),
)
