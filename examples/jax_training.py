"""Train two towers with JAX and optax. Their tables lie on disk, with less RAM than the rows need.

python examples/jax_training.py                  clicks that it makes; about a minute on two cores
python examples/jax_training.py --path FOLDER    keeps the training; killed, or given more --steps, it continues

Each checkpoint of Orbax has rows, dense weights and optimizer of one step. So a run that was killed ends with the same
bits as one that was not. For your data, replace `batch_of`: it returns the ids of each table, and the labels.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

import embedrock as er
import embedrock.jax as ej
import embedrock.jax.orbax as ejo

ROWS = {"users": 1_000_000, "items": 100_000}
DIM, BATCH, EVERY = 16, 256, 500  # EVERY: steps between two checkpoints
Clicks = tuple[dict[str, np.ndarray], np.ndarray]  # ids of each table, and labels
# A bias and two factors of each id, which draw the labels. Rows without a step are a function of the id.
PLANTED = {name: er.Table(rows, 3, init=er.Normal(), seed=1, directory="hashed") for name, rows in ROWS.items()}


def draw(count: int, seed: int) -> tuple[Clicks, np.ndarray]:
    """Return clicks, and the logits (n,) by which the labels were drawn: no model ranks better."""
    rng = np.random.default_rng(seed)
    ids = {name: (rows * rng.random(count) ** 6).astype(np.int64) for name, rows in ROWS.items()}  # some are frequent
    user, item = (PLANTED[name].lookup(ids[name]) for name in ROWS)
    logits = 0.5 * user[:, 0] + 2 * item[:, 0] + 0.5 * (user[:, 1:] * item[:, 1:]).sum(1) - 1
    return (ids, (rng.random(count) < 1 / (1 + np.exp(-logits))).astype(np.float32)), logits


def batch_of(step: int) -> Clicks:
    """Return the clicks of a step, a function of its number."""
    return draw(BATCH, seed=step)[0]


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Return the probability that a click scores above a non-click."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    clicks = labels > 0
    return (ranks[clicks].mean() - (clicks.sum() + 1) / 2) / (~clicks).sum()


rate = optax.warmup_constant_schedule(0.0005, 0.005, 100)  # of rows and of dense weights
optimizer = optax.adam(rate)


@jax.jit
def score(dense: dict[str, Any], batch: ej.Batch) -> jax.Array:
    """Return the logit of each click. The last column of a tower is a bias."""
    vectors = batch.lookup()
    user, item = (jax.nn.silu(vectors[name] @ dense[name][0]) @ dense[name][1] for name in ROWS)
    return (user[:, :-1] * item[:, :-1]).sum(-1) + user[:, -1] + item[:, -1]


@jax.jit
def train_step(dense: Any, state: Any, batch: ej.Batch, labels: Any) -> Any:
    """Return new dense weights and optimizer state, gradients of rows, whether all is finite, and the loss."""

    def loss_of(dense: Any, rows: Any) -> jax.Array:
        return optax.sigmoid_binary_cross_entropy(score(dense, batch.with_rows(rows)), labels).mean()

    loss, (grads, row_grads) = jax.value_and_grad(loss_of, (0, 1))(dense, batch.rows)
    finite = ej.all_finite(loss, grads, row_grads)
    updates, moved = optimizer.update(grads, state, dense)
    dense, state = ej.where(finite, (optax.apply_updates(dense, updates), moved), (dense, state))
    return dense, state, row_grads, finite, loss


def train(folder: Path, steps: int, memory: str) -> None:
    """Train in a folder, from its last checkpoint on."""
    folder.mkdir(parents=True, exist_ok=True)
    group = er.Group(path=folder / "model.rock", memory=memory)
    for k, (name, rows) in enumerate(ROWS.items()):
        group.table(name, rows, DIM, rule=er.Adam(), init=er.Normal(std=0.1), seed=2 + k)
    tables, tested = ej.Tables(group), ej.Tables(group)  # each with padded sizes of its own
    keys, init = jax.random.split(jax.random.key(0), (2, 2)), jax.nn.initializers.glorot_uniform()
    dense = {name: (init(a, (DIM, DIM)), init(b, (DIM, DIM + 1))) for name, (a, b) in zip(ROWS, keys, strict=True)}
    state = optimizer.init(dense)
    newest = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(folder.absolute() / "checkpoints", options=newest) as manager, group:
        if (first := manager.latest_step() or 0) > 0:
            both = {"dense": ocp.args.StandardRestore((dense, state)), "rows": ejo.TablesRestore(tables)}
            dense, state = manager.restore(first, args=ocp.args.Composite(**both))["dense"]
            print(f"resumed at step {first}")
        batches = ej.prefetch(map(batch_of, range(first, steps)), tables, depth=2)
        for step, (batch, (_, labels)) in enumerate(batches, first + 1):
            dense, state, row_grads, finite, loss = train_step(dense, state, batch, labels)
            tables.apply(batch, row_grads, finite, lr=rate)
            if step % EVERY == 0 or step == steps:
                both = {"dense": ocp.args.StandardSave((dense, state)), "rows": ejo.TablesSave(tables)}
                manager.save(step, args=ocp.args.Composite(**both))  # rows and dense weights of one step
                print(f"step {step}: loss {loss:.4f}", flush=True)
        (ids, labels), best = draw(50_000, seed=10**9)
        scores = np.asarray(score(dense, tested.fetch(ids, missing="zeros")))  # rows without a step count as zeros
        print(f"AUC {auc(labels, scores):.4f}, best possible {auc(labels, best):.4f}, chance 0.5")
        needed = sum(group[name].stats()["rows_touched"] * group[name].spec.record_bytes for name in group)
        print(f"the trained rows need {needed / 2**20:.1f} MiB, and had {memory} of RAM")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, help="folder that keeps the training")
    parser.add_argument("--steps", type=int, default=3000, help="default: 3000")
    parser.add_argument("--memory", default="4MiB", help="RAM of the tables; default: 4MiB")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        train(options.path or Path(temporary), options.steps, options.memory)
