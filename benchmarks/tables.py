"""``dlrm``, ``groups``: many tables that one batch uses together, beside PyTorch and FBGEMM.

A step is a forward of the bags of all tables, a backward with given gradients of their sums, and the optimizer. Each
implementation gets its bags and gradients in the form that it takes best.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from operator import sub
from typing import Any

from benchmarks.benchmark import ROUNDS, Benchmark
from benchmarks.implementations import LEARNING_RATE, Implementation, Step, fbgemm_tables, import_torch, training_step
from benchmarks.targets import Target, at_most, beside, faster
from benchmarks.workload import ManyTables

ARGUMENTS = ("dim", "batch", "zipf", "batches", "seed", "max_rows", "max_bag", *ROUNDS)
ROWS, FIRST, ONE_MORE = 200_000, "ours-rowwise-adagrad", "27-tables"
FEW = 64  # samples of a batch whose time is that of calls

# ---------------------------------------------------------------- the implementations


def our_collection(workload: ManyTables, optimizer: str, **form: bool) -> Step:
    """Train an `embedrock.torch.EmbeddingBagCollection`, whose tables are in one group; `form`: of its output."""
    torch = import_torch()
    import embedrock.torch as ert

    names = [f"t{number}" for number in range(len(workload.rows))]
    tables = zip(workload.rows, names, strict=True)
    configs = [ert.EmbeddingBagConfig(rows, workload.dim, name, pooling="sum") for rows, name in tables]
    collection = ert.EmbeddingBagCollection(configs)
    batches = [dict(zip(names, batch, strict=True)) for batch in _batches(workload)]

    def sums(batch: dict[str, Any]) -> Any:
        found = collection(batch, **form)
        return found if form else torch.cat(list(found.values()), 1)

    made = getattr(ert, optimizer)(collection, lr=LEARNING_RATE)
    return training_step(sums, batches, made, workload.gradient())


def one_more(workload: ManyTables, optimizer: str) -> Step:
    """Train the same with one table more."""
    cardinalities, bags = (*workload.cardinalities, ROWS), (*workload.bag_sizes, 1)
    return our_collection(replace(workload, cardinalities=cardinalities, bag_sizes=bags), optimizer)


def torch_layers(workload: ManyTables, optimizer: str) -> Step:
    """Train one `torch.nn.EmbeddingBag` with sparse gradients for each table."""
    torch = import_torch()
    bags = (torch.nn.EmbeddingBag(rows, workload.dim, mode="sum", sparse=True) for rows in workload.rows)
    layers = torch.nn.ModuleList(bags)

    def sums(batch: list[Any]) -> Any:
        return torch.cat([layer(ids) for layer, ids in zip(layers, batch, strict=True)], 1)

    made = getattr(torch.optim, optimizer)(layers.parameters(), lr=LEARNING_RATE)
    return training_step(sums, _batches(workload), made, workload.gradient())


def _batches(workload: ManyTables) -> list[list[Any]]:
    return [list(map(import_torch().from_numpy, batch)) for batch in workload.ids()]


def fbgemm(workload: ManyTables, threads: int | None = None) -> Step:
    """Train FBGEMM's CPU table-batched embedding.

    Small batches take it longer on two threads that sleep while they wait than on one, so it may have its own number.
    """
    torch = import_torch()
    usual = torch.get_num_threads()
    tables = fbgemm_tables(workload.rows, workload.dim, "SUM")
    batches = [torch.cat([ids.flatten() for ids in batch]) for batch in _batches(workload)]
    lengths = torch.tensor(workload.bags).repeat_interleave(workload.batch)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    gradient = torch.from_numpy(workload.gradient())

    def step(index: int) -> None:
        torch.set_num_threads(threads or usual)
        tables(batches[index], offsets).backward(gradient)
        torch.set_num_threads(usual)  # of the others in this process

    return step


# ---------------------------------------------------------------- the benchmarks


def _row(name: str, label: str, make: Any, tables: float, **arguments: Any) -> Implementation:
    return Implementation(name, label, partial(make, **arguments), tables)


ROWWISE, SIDE = {"optimizer": "RowwiseAdagrad"}, {"concatenate": True}
IMPLEMENTATIONS = (
    _row(FIRST, "ert.EmbeddingBagCollection, RowwiseAdagrad", our_collection, 1.1, **ROWWISE),
    _row("ours-adam", "ert.EmbeddingBagCollection, Adam", our_collection, 3, optimizer="Adam"),
    _row("ours-side-by-side", "the same, by concatenate=True", our_collection, 1.1, **ROWWISE, **SIDE),
    _row("ours-adam-side-by-side", "Adam, by concatenate=True", our_collection, 3, optimizer="Adam", **SIDE),
    _row("fbgemm-rowwise-sum", "FBGEMM CPU, rowwise Adagrad, SUM", fbgemm, 1.1),
    _row("fbgemm-one-thread", "the same, on one thread", fbgemm, 1.1, threads=1),
    _row("torch-sparse-adam", "nn.EmbeddingBag(sparse=True) each, SparseAdam", torch_layers, 3, optimizer="SparseAdam"),
    _row("torch-sparse-adagrad", "nn.EmbeddingBag(sparse=True) each, Adagrad", torch_layers, 2, optimizer="Adagrad"),
)


def _beside_fbgemm(rule: str, dim: int, batch: int, side_by_side: float, by_dict: float, **only: int) -> list[Target]:
    """Return targets of both forms of output, beside FBGEMM on the number of threads that is best for it."""
    names = {"Adam": ("ours-adam-side-by-side", "ours-adam"), "Rowwise": ("ours-side-by-side", "ours-rowwise-adagrad")}
    peers, only = ("fbgemm-rowwise-sum", "fbgemm-one-thread"), {"dim": dim, "batch": batch, **only}
    factors = zip(names[rule], (side_by_side, by_dict), strict=True)
    return [at_most(name, peers, factor, **only) for name, factor in factors]


DLRM = Benchmark(
    "dlrm",
    "a training step on DLRM's 26 tables with MLPerf's bags: forward, backward and optimizer",
    IMPLEMENTATIONS,
    tuple(_beside_fbgemm("Rowwise", 64, 1024, 0.75, 0.85, max_rows=ROWS)),
    (ManyTables(max_rows=ROWS, batch=1024),),
    arguments=ARGUMENTS,
)

_alike = ManyTables(cardinalities=(ROWS,) * 26, bag_sizes=(1,) * 26)

GROUPS = Benchmark(
    "groups",
    "a training step on 26 tables that are alike, one id each: forward, backward and optimizer",
    (*IMPLEMENTATIONS, _row(ONE_MORE, f"{FIRST}, one table more", one_more, 1.2, **ROWWISE)),
    (
        *_beside_fbgemm("Rowwise", 16, 2048, 0.75, 1.0),
        *_beside_fbgemm("Adam", 16, 2048, 0.9, 1.15),
        *_beside_fbgemm("Adam", 64, 2048, 0.75, 0.9),
        _beside_fbgemm("Adam", 16, FEW, 1.1, 1.1)[0],
        faster("ours-adam-side-by-side", "torch-sparse-adam", 8),
        Target("the 27th table", beside(ONE_MORE, FIRST, "least_ms", sub, batch=FEW), 0.02, "ms", at_most=True),
    ),
    tuple(replace(_alike, dim=dim, batch=batch) for dim, batch in ((16, 2048), (64, 2048), (16, FEW))),
    arguments=ARGUMENTS,
)
