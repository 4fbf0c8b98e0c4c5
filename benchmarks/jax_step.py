"""``jax``: a jitted step of two towers, each over half of the tables, beside PyTorch and beside all rows in JAX."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import numpy as np

from benchmarks.benchmark import ROUNDS, Benchmark, Option, Task, compare_implementations
from benchmarks.implementations import LEARNING_RATE, Implementation, Step, Unavailable, import_torch
from benchmarks.options import BenchmarkOptions
from benchmarks.report import Report
from benchmarks.targets import at_most, faster
from benchmarks.workload import ManyTables
from embedrock.cli.terminal.arguments import folder

UNITS, CHECKED_STEPS, MEMORY = 32, 3, "32MiB"  # of a tower; whose bits are checked; of tables on disk
FOLDER = "EMBEDROCK_BENCHMARK_FOLDER"  # environment variable: where tables on disk are


def _jax() -> tuple[Any, Any, Any]:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        return import_module("jax"), import_module("optax").adam(LEARNING_RATE), import_module("embedrock.jax")
    except ImportError as error:
        raise Unavailable(f"JAX does not import: {error}. pip install 'embedrock[jax]' optax") from error


def _named(values: Iterable[Any]) -> dict[str, Any]:
    return {f"t{number:02}": value for number, value in enumerate(values)}


def _tables(workload: ManyTables, in_group: bool = False, on_disk: bool = False) -> dict[str, Any]:
    er = import_module("embedrock")
    own = {"dim": workload.dim, "rule": er.Adam(lr=LEARNING_RATE), "init": er.Normal(std=0.1), "seed": 0}
    disk = {"path": Path(mkdtemp(dir=os.environ[FOLDER]), "tables"), "memory": MEMORY} if on_disk else {}
    make = er.Group(**disk).table if in_group else lambda name, rows, **own: er.Table(rows, **own)
    return {name: make(name, rows, **own) for name, rows in _named(workload.rows).items()}


def _data(workload: ManyTables) -> tuple[list[Any], np.ndarray]:
    random, ids = np.random.default_rng(workload.seed), workload.ids()
    weights = random.normal(0.0, 0.1, (2, workload.dim * len(workload.rows) // 2, UNITS)).astype(np.float32)
    return [(_named(map(np.ravel, own)), random.random(workload.batch, np.float32)) for own in ids], weights


def _loss(library: Any, towers: Any, vectors: dict[str, Any], targets: Any) -> Any:
    each, half = [vectors[name] for name in sorted(vectors)], len(vectors) // 2
    user, item = (library.concatenate(own, 1) for own in (each[:half], each[half:]))
    return ((((user @ towers[0]).clip(0) * (item @ towers[1]).clip(0)).sum(1) - targets) ** 2).mean()


@cache  # all ways in a process share it
def _step(by_position: bool) -> Any:
    jax, optimizer, ej = _jax()

    def loss_of(towers: Any, own: Any, batch: Any, targets: Any) -> Any:
        return _loss(jax.numpy, towers, own if by_position else batch.with_rows(own).lookup(), targets)

    @jax.jit
    def step(towers: Any, state: Any, batch: Any, targets: Any) -> Any:
        own = batch.lookup() if by_position else batch.rows
        loss, (grads, row_grads) = jax.value_and_grad(loss_of, (0, 1))(towers, own, batch, targets)
        finite = ej.all_finite(loss, grads, row_grads)
        updates, new = optimizer.update(grads, state, towers)
        return *ej.where(finite, (towers + updates, new), (towers, state)), row_grads, finite, loss

    return step


def our_jax(workload: ManyTables, depth: int = 0, by_position: bool = False, **where: bool) -> Iterator[Any]:
    """Train tables by `embedrock.jax`, once others that are trained alike have the bits of `Table.update`."""
    jax, optimizer, ej = _jax()
    (batches, weights), step, twins = _data(workload), _step(by_position), _tables(workload)
    for checked in (CHECKED_STEPS, None):
        tables, towers = _tables(workload, **where), jax.numpy.array(weights)
        fetched, state = ej.Tables(tables), optimizer.init(towers)
        for batch, (ids, targets) in ej.prefetch(islice(cycle(batches), checked), fetched, depth):
            towers, state, grads, finite, loss = step(towers, state, batch, targets)
            fetched.apply(batch, grads, finite, by_position=by_position)
            if not checked:
                yield loss
                continue
            for name, own in ids.items():
                rows = own if by_position else own[np.unique(batch.positions[name], return_index=True)[1]]
                twins[name].update(rows, np.asarray(grads[name])[: len(rows)])
        seen = {name: np.concatenate([ids[name] for ids, _ in batches[:checked]]) for name in tables}
        if any(tables[name].lookup(own).tobytes() != twins[name].lookup(own).tobytes() for name, own in seen.items()):
            raise AssertionError("rows differ from those of Table.update")


def our_torch(workload: ManyTables, collection: bool) -> Iterator[Any]:
    """Train the same model by `embedrock.torch`."""
    torch, ert, er = import_torch(), import_module("embedrock.torch"), import_module("embedrock")
    (batches, weights), own = _data(workload), {"init": er.Normal(std=0.1), "seed": 0}
    configs = [ert.EmbeddingConfig(rows, workload.dim, name, **own) for name, rows in _named(workload.rows).items()]
    alone = torch.nn.ModuleDict(_named(ert.Embedding(rows, workload.dim, **own) for rows in workload.rows))
    layers = ert.EmbeddingCollection(configs) if collection else alone
    towers = torch.nn.ParameterList(map(torch.from_numpy, weights))
    optimizers = ert.Adam(layers, lr=LEARNING_RATE), torch.optim.Adam(towers.parameters(), lr=LEARNING_RATE)
    for ids, targets in cycle(torch.utils._pytree.tree_map(torch.from_numpy, batches)):
        vectors = layers(ids) if collection else {name: alone[name](own) for name, own in ids.items()}
        loss = _loss(torch, towers, vectors, targets)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield loss.detach()


def dense_jax(workload: ManyTables) -> Iterator[Any]:
    """Train the same model with all rows in JAX, which optax steps in place."""
    (jax, optimizer, _), (batches, towers) = _jax(), _data(workload)

    def loss_of(weights: Any, ids: Any, targets: Any) -> Any:
        return _loss(jax.numpy, weights[0], jax.tree.map(partial(jax.numpy.take, axis=0), weights[1], ids), targets)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(weights: Any, state: Any, *batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(weights, *batch)
        updates, state = optimizer.update(grads, state, weights)
        return jax.tree.map(jax.numpy.add, weights, updates), state, loss

    rows = {name: table.lookup(np.arange(table.rows)) for name, table in _tables(workload).items()}
    state = optimizer.init(weights := jax.tree.map(jax.numpy.array, (towers, rows)))
    for batch in cycle(batches):
        weights, state, loss = jax.block_until_ready(step(weights, state, *batch))
        yield loss


def _steps(train: Any, workload: ManyTables, **own: Any) -> Step:
    training = train(workload, **own)
    return lambda index: next(training)


def _row(name: str, label: str, train: Any, tables: float = 3, **own: Any) -> Implementation:
    return Implementation(name, label, partial(_steps, train, **own), tables)


def measure(task: Task) -> Report:
    """Compare all, with a folder for tables on disk."""
    with TemporaryDirectory(dir=task.arguments.folder) as os.environ[FOLDER]:
        return compare_implementations(task)


_targets = (
    *(at_most(f"ours-jax{form}", [f"ours-torch{form}"], 1.1) for form in ("", "-group")),
    *(faster("ours-jax-group", "jax-dense", most, max_rows=rows) for most, rows in ((3, 100_000), (24, 1_000_000))),
)
_two, _many = ManyTables((10**9,) * 2, (1,) * 2, dim=32, batch=4096), ManyTables((200_000,) * 26, (1,) * 26, dim=16)
_sizes = [replace(_two, max_rows=rows, zipf=zipf) for rows in (100_000, 1_000_000) for zipf in (0.0, 1.2)]
JAX = Benchmark(
    "jax",
    "a jitted step of JAX over rows of tables, beside the same model in PyTorch",
    (
        _row("ours-torch", "ert.Embedding each", our_torch, collection=False),
        _row("ours-torch-group", "ert.EmbeddingCollection", our_torch, collection=True),
        _row("ours-jax", "ej.Tables of tables alone", our_jax),
        _row("ours-jax-group", "ej.Tables of a group", our_jax, in_group=True),
        _row("ours-jax-ahead", "the same, ej.prefetch(depth=2)", our_jax, in_group=True, depth=2),
        _row("ours-jax-positions", "a group, gradients by position", our_jax, in_group=True, by_position=True),
        _row("ours-jax-disk", f"on disk, {MEMORY}, depth=2", our_jax, in_group=True, on_disk=True, depth=2),
        _row("jax-dense", "jnp.take, optax.adam of all rows", dense_jax, 7),
    ),
    tuple(replace(one, what=f"{{max_rows:,}} rows, Zipf({{zipf:g}}): {one.what}") for one in _targets),
    tuple(replace(one, batches=30) for one in (*_sizes, replace(_many, max_rows=200_000))),
    BenchmarkOptions(rounds=5, steps=20, seconds=1.0, together=True),
    ("dim", "batch", "max_rows", "zipf", "batches", "seed", *ROUNDS),
    measure,
    (Option("--folder", "folder", folder, Path(), "where a folder for the files is made, and removed at the end"),),
)
