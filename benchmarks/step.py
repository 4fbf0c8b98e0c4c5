"""``step``, ``ids``, ``lookup``, ``update``, ``rows``: one table in RAM, beside PyTorch and FBGEMM.

To add an implementation: a function that gets a `Workload` and returns ``step(index)``, which works through batch
`index`, and a row. Nothing heavier than NumPy is imported before it is made in its own process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.benchmark import ROUNDS, SIZES, Benchmark, Option, Task, several_rows
from benchmarks.implementations import LEARNING_RATE, Implementation, Step, fbgemm_tables, import_torch, training_step
from benchmarks.options import BenchmarkOptions
from benchmarks.report import Report, compare
from benchmarks.runner import Entry
from benchmarks.targets import Target, at_most, faster, ratio
from benchmarks.workload import Workload

FEW_IDS = {64: 1.2, 1024: 1.5, 16_384: 1.2}  # in a batch; the most time, over that of nn.Embedding with SGD
ROWS = (1_000_000, 4_000_000, 100_000_000, 1_000_000_000)


def _training_step(table: Any, optimizer: Any, workload: Workload) -> Step:
    batches = list(map(import_torch().from_numpy, workload.ids()))
    return training_step(table, batches, optimizer, workload.gradient())


def our_step(workload: Workload, optimizer: str, dtype: str = "float32", **options: Any) -> Step:
    """Train `embedrock.torch.Embedding`."""
    torch = import_torch()
    import embedrock.torch as ert

    table = ert.Embedding(workload.rows, workload.dim, dtype=getattr(torch, dtype))
    return _training_step(table, getattr(ert, optimizer)(table, lr=LEARNING_RATE, **options), workload)


def torch_step(workload: Workload, optimizer: str, sparse: bool, **options: Any) -> Step:
    """Train `torch.nn.Embedding`."""
    torch = import_torch()
    table = torch.nn.Embedding(workload.rows, workload.dim, sparse=sparse)
    make_optimizer = getattr(torch.optim, optimizer)
    return _training_step(table, make_optimizer(table.parameters(), lr=LEARNING_RATE, **options), workload)


def fbgemm_step(workload: Workload, pooling: str) -> Step:
    """Train FBGEMM's CPU table-batched embedding, one id per bag."""
    torch = import_torch()
    table = fbgemm_tables([workload.rows], workload.dim, pooling)
    ids = [torch.from_numpy(batch.ravel()) for batch in workload.ids()]
    offsets = torch.arange(workload.lookups + 1)
    gradient = torch.from_numpy(workload.gradient()).view(-1, workload.dim)
    return lambda index: table(ids[index], offsets).backward(gradient)


def _ours(name: str, label: str, tables: float, **arguments: Any) -> Implementation:
    return Implementation(name, f"ert.Embedding, {label}", partial(our_step, **arguments), tables, lazy=True)


def _nn(name: str, label: str, tables: float, **arguments: Any) -> Implementation:
    return Implementation(name, f"nn.Embedding, {label}", partial(torch_step, **arguments), tables)


def _fbgemm(name: str, pooling: str) -> Implementation:
    make = partial(fbgemm_step, pooling=pooling)
    return Implementation(name, f"FBGEMM CPU, rowwise Adagrad, {pooling}", make, 1.1)


STEP = Benchmark(
    "step",
    "a training step: forward, backward and optimizer, through the public API",
    (
        _ours("ours-adam", "Adam", 3, optimizer="Adam"),
        _ours("ours-adam-dense", "Adam(dense=True)", 3.1, optimizer="Adam", dense=True),
        _ours("ours-rowwise-adagrad", "RowwiseAdagrad", 1.1, optimizer="RowwiseAdagrad"),
        _ours("ours-bfloat16", "RowwiseAdagrad, bfloat16", 1.1, optimizer="RowwiseAdagrad", dtype="bfloat16"),
        _ours("ours-sgd", "SGD", 1, optimizer="SGD"),
        _nn("torch-sparse-adam", "sparse=True, SparseAdam", 3, optimizer="SparseAdam", sparse=True),
        _nn("torch-sparse-sgd", "sparse=True, SGD", 1, optimizer="SGD", sparse=True),
        _nn("torch-sparse-adagrad", "sparse=True, Adagrad", 2, optimizer="Adagrad", sparse=True),
        # Weights, gradient, two states, and two temporaries of torch's unfused update.
        _nn("torch-dense-adam", "Adam", 6, optimizer="Adam", sparse=False),
        _nn("torch-dense-adam-fused", "Adam(fused=True)", 4, optimizer="Adam", sparse=False, fused=True),
        _fbgemm("fbgemm-rowwise-sum", "SUM"),
        _fbgemm("fbgemm-rowwise-none", "NONE"),
    ),
    (
        faster("ours-adam", "torch-sparse-adam", 7),
        faster("ours-rowwise-adagrad", "fbgemm-rowwise-sum", 1),
        faster("ours-rowwise-adagrad", "fbgemm-rowwise-none", 5),
        faster("ours-adam", "torch-dense-adam", 300, rows=10_000_000),
    ),
)

_few = Workload(rows=1_000_000, features=1)
IDS = Benchmark(
    "ids",
    "the same step on batches of few ids and of many, where the calls from Python show",
    tuple(one for one in STEP.implementations if one.name in ("ours-adam", "torch-sparse-adam", "torch-sparse-sgd")),
    tuple(at_most("ours-adam", ["torch-sparse-sgd"], most, batch=n) for n, most in FEW_IDS.items()),
    tuple(replace(_few, batch=n) for n in FEW_IDS),
    BenchmarkOptions(together=True),
)

# ---------------------------------------------------------------- lookup


def our_lookup(workload: Workload, trained: bool) -> Step:
    """Look up rows of `embedrock.torch.Embedding`, after one training step on each batch or none at all."""
    torch = import_torch()
    import embedrock.torch as ert

    table = ert.Embedding(workload.rows, workload.dim)
    train = _training_step(table, ert.Adam(table, lr=LEARNING_RATE), workload)
    for index in range(workload.batches if trained else 0):
        train(index)
    return _without_grad(table, [torch.from_numpy(ids) for ids in workload.ids()])


def torch_lookup(workload: Workload) -> Step:
    """Look up rows by `torch.nn.functional.embedding`."""
    torch = import_torch()
    weights = torch.nn.Embedding(workload.rows, workload.dim).weight
    ids = [torch.from_numpy(ids) for ids in workload.ids()]
    return _without_grad(lambda batch: torch.nn.functional.embedding(batch, weights), ids)


def _without_grad(lookup: Callable[[Any], Any], ids: list[Any]) -> Step:
    no_grad = import_torch().no_grad

    def step(index: int) -> object:
        with no_grad():
            return lookup(ids[index])

    return step


def _looked_up(name: str, label: str, trained: bool) -> Implementation:
    return Implementation(name, label, partial(our_lookup, trained=trained), 3, lazy=True)


LOOKUP = Benchmark(
    "lookup",
    "lookup alone, under torch.no_grad()",
    (
        _looked_up("ours", "ert.Embedding under no_grad, rows trained before", trained=True),
        _looked_up("ours-first-values", "the same, rows never trained", trained=False),
        Implementation("torch", "F.embedding under no_grad", torch_lookup, 2),
    ),
    (faster("ours", "torch", 1),),
)

# ---------------------------------------------------------------- update


def table_update(workload: Workload, **options: Any) -> Step:
    """Train `embedrock.Table` by its own verb. Policies are given by their arguments."""
    import embedrock as er

    kinds: dict[str, Any] = {"admission": er.Admission, "eviction": er.Eviction}
    own = {name: kinds[name](**each) if name in kinds else each for name, each in options.items()}
    table = er.Table(workload.rows, workload.dim, rule=er.Adam(lr=LEARNING_RATE), **own)
    ids, gradient = [batch.ravel() for batch in workload.ids()], workload.gradient()[:, 0]
    return lambda index: table.update(ids[index], gradient)


def timed_update(workload: Workload) -> Step:
    """Train a table whose rows are idle by the time of their events, all of one moment."""
    import embedrock as er

    idle = er.Eviction(idle="30 days")
    table = er.Table(workload.rows, workload.dim, rule=er.Adam(lr=LEARNING_RATE), eviction=idle)
    ids, gradient = [batch.ravel() for batch in workload.ids()], workload.gradient()[:, 0]
    times = np.full(workload.lookups, 1.7e9)
    return lambda index: table.update(ids[index], gradient, time=times)


def group_update(workload: Workload) -> Step:
    """Train three tables of an `embedrock.Group` by its own verb."""
    import embedrock as er

    group = er.Group()
    for name in "abc":
        group.table(name, workload.rows, workload.dim, rule=er.Adam(lr=LEARNING_RATE))
    ids = [dict.fromkeys("abc", batch.ravel()) for batch in workload.ids()]
    gradients = dict.fromkeys("abc", workload.gradient()[:, 0])
    return lambda index: group.update(ids[index], gradients)


def _not_slower(name: str, most: float) -> Target:
    return ratio(f"least time of {name} over before", name, f"{name}-before", "least_ms", most)


UPDATE = Benchmark(
    "update",
    "`Table.update` and `Group.update` of 64 ids a table; for targets, --beside an older checkout",
    (
        Implementation("ours-table", "Table.update", table_update, 3),
        Implementation("ours-group", "Group.update of three tables", group_update, 9),
    ),
    (_not_slower("ours-table", 0.75), _not_slower("ours-group", 0.5)),
    (Workload(rows=100_000, batch=64, features=1),),
    BenchmarkOptions(steps=300),
)

_HALF = {"max_rows": 100_000, "by": "recency"}  # of the rows that the batches touch
POLICIES = Benchmark(
    "policies",
    "`Table.update` of rows that come, go or stay; for targets, --beside an older checkout",
    (
        Implementation("ours", "Table.update", table_update, 3),
        Implementation("frozen", "frozen=range(100)", partial(table_update, frozen=range(100)), 3),
        Implementation("admission", "Admission(2)", partial(table_update, admission={"min_count": 2}), 3),
        Implementation("idle", "Eviction(idle=10_000)", partial(table_update, eviction={"idle": 10_000}), 3),
        Implementation("events", "Eviction(idle='30 days') and time=", timed_update, 3),
        Implementation("limit", "Eviction(max_rows=100_000)", partial(table_update, eviction=_HALF), 3),
        Implementation("segments", "the same, segments=256", partial(table_update, eviction=_HALF, segments=256), 3),
    ),
    (_not_slower("ours", 1.02),),
    (Workload(rows=1_000_000, batch=4096, features=1),),
    BenchmarkOptions(together=True),
)

# ---------------------------------------------------------------- rows


def compare_rows(task: Task) -> Report:
    """Measure our Adam step on tables of several sizes, by the same pattern of ids."""
    ours, ranks = STEP.implementations[0], min(task.arguments.sizes)
    entries = [Entry(replace(ours, name=f"{one.rows:,} rows"), replace(one, ranks=ranks)) for one in task.workloads]
    print(entries[0].workload.describe())
    return compare(entries, task.benchmark.targets, task.options)


TABLE_SIZES = Benchmark(
    "rows",
    "our Adam step on tables of several sizes, same ids",
    arguments=(*SIZES, *ROUNDS),
    measure=compare_rows,
    targets=(faster(f"{100_000_000:,} rows", f"{1_000_000:,} rows", 1.5, at_most=True),),
    own=(Option("--rows", "sizes", several_rows, ROWS, "numbers of rows"),),
)
