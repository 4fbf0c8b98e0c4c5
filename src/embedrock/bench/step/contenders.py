"""Who takes part: one row of a table for each contender, and a small function that makes its step.

To add one, write a function that takes a `Workload` and returns ``step(index)``, which works through batch
`index`, and add a row. Nothing heavier than NumPy is imported before a contender is made in its own process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from embedrock.bench.harness.comparison import Step, StepSession
from embedrock.bench.harness.contenders import LEARNING_RATE, Contender, Footprint, import_fbgemm, import_torch
from embedrock.bench.harness.runner import Racer
from embedrock.bench.harness.workload import Workload
from embedrock.tiers.memory import SMALL_BYTES

HASHED_OVERHEAD = 1.3  # RAM of a hashed directory's rows over the bytes of their records
PROCESS_BYTES = 512 << 20  # with torch


@dataclass(frozen=True)
class StepContender(Contender):
    """One way to make a step on a table in RAM.

    Args:
        make: called in the contender's own process; must be importable by name. It returns a `Step`, or what the
            session that it is entered with asks for.
        tables: RAM at the peak, in float32 tables of rows x dim: weights, state, gradient and temporaries.
        lazy: a table too large for a direct directory takes RAM for the touched rows only.
        process_bytes: RAM of an interpreter with its libraries and one batch's activations.
    """

    make: Callable[[Any], Any]
    tables: float
    lazy: bool = False
    process_bytes: int = PROCESS_BYTES

    def need(self, workload: Workload) -> Footprint:
        """Return the RAM that its process may come to hold."""
        batches = workload.batches * workload.lookups * 8
        whole = int(self.tables * workload.table_bytes)
        if self.lazy and whole > SMALL_BYTES:
            whole = int(whole * HASHED_OVERHEAD * workload.touched_rows() / workload.rows)
        return Footprint(self.process_bytes + batches + whole)

    def racer(self, workload: Workload, name: str = "", session: type = StepSession) -> Racer:
        """Return it as it takes part, stepped by `session`."""
        return Racer(self, workload, (session, self.make, workload), name)


# ---------------------------------------------------------------- bench step


def _training_step(table: Any, optimizer: Any, workload: Workload) -> Step:
    """Return the loop body that users write, the same for `nn.Embedding` and for ours."""
    torch = import_torch()
    ids = [torch.from_numpy(batch) for batch in workload.ids()]
    gradient = torch.from_numpy(workload.gradient())

    def step(index: int) -> None:
        optimizer.zero_grad()
        table(ids[index]).backward(gradient)
        optimizer.step()

    return step


def our_step(workload: Workload, optimizer: str, **options: Any) -> Step:
    """Train `embedrock.torch.Embedding`."""
    import_torch()
    import embedrock.torch as ert

    table = ert.Embedding(workload.rows, workload.dim)
    return _training_step(table, getattr(ert, optimizer)(table, lr=LEARNING_RATE, **options), workload)


def torch_step(workload: Workload, optimizer: str, sparse: bool, **options: Any) -> Step:
    """Train `torch.nn.Embedding`."""
    torch = import_torch()
    table = torch.nn.Embedding(workload.rows, workload.dim, sparse=sparse)
    make_optimizer = getattr(torch.optim, optimizer)
    return _training_step(table, make_optimizer(table.parameters(), lr=LEARNING_RATE, **options), workload)


def fbgemm_step(workload: Workload, pooling: str) -> Step:
    """Train FBGEMM's CPU table-batched embedding; its optimizer runs inside backward. One id per bag."""
    torch = import_torch()
    training, common, configs = import_fbgemm()
    table = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(workload.rows, workload.dim, common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)],
        optimizer=configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        pooling_mode=common.PoolingMode[pooling],
        learning_rate=LEARNING_RATE,
    )
    table.init_embedding_weights_uniform(-1.0, 1.0)
    ids = [torch.from_numpy(batch.ravel()) for batch in workload.ids()]
    offsets = torch.arange(workload.lookups + 1)
    gradient = torch.from_numpy(workload.gradient()).view(-1, workload.dim)

    def step(index: int) -> None:
        table(ids[index], offsets).backward(gradient)

    return step


def _ours(name: str, label: str, tables: float, **arguments: Any) -> StepContender:
    return StepContender(name, f"ert.Embedding, {label}", partial(our_step, **arguments), tables, lazy=True)


def _nn(name: str, label: str, tables: float, **arguments: Any) -> StepContender:
    return StepContender(name, f"nn.Embedding, {label}", partial(torch_step, **arguments), tables)


def _fbgemm(name: str, pooling: str) -> StepContender:
    make = partial(fbgemm_step, pooling=pooling)
    return StepContender(name, f"FBGEMM CPU, rowwise Adagrad, {pooling}", make, 1.1)


STEP = (
    _ours("ours-adam", "Adam", 3, optimizer="Adam"),
    _ours("ours-adam-dense", "Adam(dense=True)", 3.1, optimizer="Adam", dense=True),
    _ours("ours-rowwise-adagrad", "RowwiseAdagrad", 1.1, optimizer="RowwiseAdagrad"),
    _ours("ours-sgd", "SGD", 1, optimizer="SGD"),
    _nn("torch-sparse-adam", "sparse=True, SparseAdam", 3, optimizer="SparseAdam", sparse=True),
    _nn("torch-sparse-sgd", "sparse=True, SGD", 1, optimizer="SGD", sparse=True),
    _nn("torch-sparse-adagrad", "sparse=True, Adagrad", 2, optimizer="Adagrad", sparse=True),
    # Weights, gradient, two states, and two temporaries of torch's unfused update.
    _nn("torch-dense-adam", "Adam", 6, optimizer="Adam", sparse=False),
    _nn("torch-dense-adam-fused", "Adam(fused=True)", 4, optimizer="Adam", sparse=False, fused=True),
    _fbgemm("fbgemm-rowwise-sum", "SUM"),
    _fbgemm("fbgemm-rowwise-none", "NONE"),
)

# ---------------------------------------------------------------- bench lookup


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


def _looked_up(name: str, label: str, trained: bool) -> StepContender:
    return StepContender(name, label, partial(our_lookup, trained=trained), 3, lazy=True)


LOOKUP = (
    _looked_up("ours", "ert.Embedding under no_grad, rows trained before", trained=True),
    _looked_up("ours-first-values", "the same, rows never trained", trained=False),
    StepContender("torch", "F.embedding under no_grad", torch_lookup, 2),
)

# ---------------------------------------------------------------- bench unique


def our_plan(workload: Workload) -> Step:
    """Plan batches of a core table: unique ids, inverse, and the segments that the update needs."""
    import embedrock as er

    table = er.Table(workload.rows, workload.dim, rule=er.Adam())
    ids = workload.ids()
    return lambda index: table.plan(ids[index])


def torch_unique(workload: Workload, **options: Any) -> Step:
    """Unique ids and inverse by `torch.unique`."""
    torch = import_torch()
    ids = [torch.from_numpy(batch) for batch in workload.ids()]
    return lambda index: torch.unique(ids[index], return_inverse=True, **options)


def numpy_unique(workload: Workload) -> Step:
    """Unique ids and inverse by `numpy.unique`."""
    ids = workload.ids()
    return lambda index: np.unique(ids[index], return_inverse=True)


UNIQUE = (
    StepContender("ours", "er.Table.plan", our_plan, 0),
    StepContender("torch-unique", "torch.unique(return_inverse=True)", torch_unique, 0),
    StepContender("torch-unique-unsorted", "the same, sorted=False", partial(torch_unique, sorted=False), 0),
    StepContender("numpy-unique", "np.unique(return_inverse=True)", numpy_unique, 0),
)
