"""Program of `test_jax_devices`: trains one model on one device, and on eight emulated ones.

Arguments: a folder, and names of `RUNS`. What a run ends with is then in a file of its name.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import embedrock as er
import embedrock.jax as ej

DIM, SIZE, STEPS, RATE = 8, 64, 12, 0.5
ROWS = {"user": 40, "item": 150}  # that batches have
MESHES: dict[str, Callable[[], Mesh]] = {
    "auto": lambda: Mesh(jax.devices(), ("data",)),
    "explicit": lambda: jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,)),
}


def batches(nan_at: int | None = None) -> Iterator[tuple[Any, np.ndarray]]:
    """Make batches of few rows, so that each device has most of them, with NaN in a target of the sixth device."""
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        ids = {
            "user": rng.integers(0, ROWS["user"], SIZE),
            "item": {
                "clicked": rng.integers(0, ROWS["item"], SIZE),
                "history": rng.integers(0, ROWS["item"], (SIZE, 3)),
            },
        }
        targets = rng.normal(size=SIZE).astype(np.float32)
        if step == nan_at:
            targets[5 * SIZE // 8 + 1] = np.nan
        yield ids, targets


def table(seed: int, rule: er.Rule) -> er.Table:
    return er.Table(rows=10**9, dim=DIM, rule=rule, init=er.Normal(std=0.3), seed=seed, on_nonfinite="skip")


def tables(mesh: Mesh | None, rule: er.Rule) -> ej.Tables:
    made = {name: table(seed, rule) for seed, name in enumerate(ROWS)}
    return ej.Tables(made, sharding=None if mesh is None else NamedSharding(mesh, P("data")))


def dense_start() -> dict[str, jax.Array]:
    rng = np.random.default_rng(1)
    return {name: jnp.asarray(rng.normal(0, 0.5, (DIM, DIM)), jnp.float32) for name in ("user", "item")}


def loss_of(dense: Any, vectors: Any, targets: Any) -> jax.Array:
    item = vectors["item"]["clicked"] + vectors["item"]["history"].mean(1)
    score = jnp.sum(jax.nn.relu(vectors["user"] @ dense["user"]) * (item @ dense["item"]), -1)
    return jnp.mean((score - targets) ** 2)


def gradients(dense: Any, batch: ej.Batch, targets: Any, by_position: bool, reduce: Any = lambda loss: loss) -> Any:
    """Return the loss, and gradients of dense weights and of rows, or of vectors."""

    def of(dense: Any, given: Any) -> jax.Array:
        vectors = given if by_position else batch.with_rows(given).lookup()
        return reduce(loss_of(dense, vectors, targets))

    return jax.value_and_grad(of, (0, 1))(dense, batch.lookup() if by_position else batch.rows)


def mapped(mesh: Mesh, by_position: bool) -> Callable[..., Any]:
    """Return the gradients by `shard_map`. The loss is that of all devices, so JAX sums its gradients over them."""

    def local(dense: Any, batch: ej.Batch, targets: Any) -> Any:
        return gradients(dense, batch, targets, by_position, lambda loss: jax.lax.pmean(loss, "data"))

    out = P(), (P(), P("data") if by_position else P())
    return jax.shard_map(local, mesh=mesh, in_specs=(P(), ej.Batch(P(), P("data")), P("data")), out_specs=out)


def train(
    mesh: Mesh | None = None,
    by_shard_map: bool = False,
    *,
    rule: er.Rule | None = None,
    by_position: bool = False,
    depth: int = 0,
    frozen: bool = False,
    nan_at: int | None = None,
) -> dict[str, np.ndarray]:
    """Return what a run ends with: rows, dense weights, losses, and row gradients of all steps.

    With `nan_at`, it also returns the rows and dense weights before that step.
    """
    own = tables(mesh, rule or er.SGD(lr=RATE))
    optimizer = optax.sgd(0.0 if frozen else 0.05)
    everywhere, spread = (None, None) if mesh is None else (NamedSharding(mesh, P()), NamedSharding(mesh, P("data")))
    dense = jax.device_put(dense_start(), everywhere)
    state = optimizer.init(dense)
    of: Any = partial(gradients, by_position=by_position)
    if mesh is not None and by_shard_map:
        of = mapped(mesh, by_position)

    @jax.jit
    def step(dense: Any, state: Any, batch: ej.Batch, targets: Any) -> Any:
        loss, (grads, row_grads) = of(dense, batch, targets)
        finite = ej.all_finite(loss, grads, row_grads)
        updates, new = optimizer.update(grads, state, dense)
        dense, state = ej.where(finite, (optax.apply_updates(dense, updates), new), (dense, state))
        return dense, state, row_grads, finite, loss

    def read() -> dict[str, np.ndarray]:
        rows = {name: table.lookup(np.arange(ROWS[name])) for name, table in own.by_name.items()}
        return {**rows, **{f"dense {name}": np.asarray(weights) for name, weights in dense.items()}}

    found, losses, gradients_of_steps = {}, [], []
    for batch, (_, targets) in ej.prefetch(batches(nan_at), own, depth):
        if len(losses) == nan_at:
            found = {f"before {name}": values for name, values in read().items()}
        dense, state, row_grads, finite, loss = step(dense, state, batch, jax.device_put(targets, spread))
        own.apply(batch, row_grads, finite, by_position=by_position)
        losses.append(loss)
        gradients_of_steps.append(row_grads["user"])
    steps = [table.steps for table in own.by_name.values()]
    return {**found, **read(), "steps": np.array(steps), "gradients": np.array(gradients_of_steps)}


def placed() -> dict[str, Any]:
    """Return where the arrays of a batch are: for each device, its slice of positions and shape of rows."""
    batch = tables(MESHES["auto"](), er.SGD(lr=RATE)).fetch(next(batches())[0])

    def shards(tree: Any) -> list[Any]:
        arrays = jax.tree.leaves(tree)
        return [[(part.device.id, *part.data.shape) for part in array.addressable_shards] for array in arrays]

    firsts = [part.index[0].start or 0 for part in batch.positions["user"].addressable_shards]
    return {"positions": shards(batch.positions), "firsts": firsts, "rows": shards(batch.rows)}


def refused(mesh: Mesh) -> dict[str, Any]:
    """Return the error of a batch that eight devices cannot share evenly, and whether the next one is right."""
    own, (ids, _) = tables(mesh, er.SGD(lr=RATE)), next(batches())
    try:
        own.fetch(jax.tree.map(lambda array: array[:60], ids))
        error = ""
    except ValueError as caught:
        error = str(caught)
    return {"error": error, "steps": own.stats()["steps"], "next": own.fetch(ids).lookup("user").shape[0]}


def runs() -> dict[str, dict[str, Any]]:
    auto, explicit = (make() for make in MESHES.values())
    by_shard_map = {"mesh": auto, "by_shard_map": True}
    by_position = {"by_position": True, "frozen": True, "rule": er.Adam(lr=0.05)}
    return {
        "one": {},
        "jit": {"mesh": auto},
        "shard_map": by_shard_map,
        "jit explicit": {"mesh": explicit},
        "shard_map explicit": {**by_shard_map, "mesh": explicit},
        "jit ahead": {"mesh": auto, "depth": 3},
        "one by position": by_position,
        "jit by position": {**by_position, "mesh": auto},
        "shard_map by position": {**by_position, **by_shard_map},
        "jit nan": {"mesh": auto, "nan_at": STEPS - 1},
        "shard_map nan": {**by_shard_map, "nan_at": STEPS - 1},
    }


def main(folder: Path, *names: str) -> None:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"  # JAX reads it with its first array
    options = runs()
    for name in names:
        arrays: Any = train(**options[name])
        np.savez(folder / f"{name}.npz", **arrays)
    facts = {"devices": jax.device_count(), "placed": placed()}
    print(json.dumps({**facts, **{f"refused {name}": refused(make()) for name, make in MESHES.items()}}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
