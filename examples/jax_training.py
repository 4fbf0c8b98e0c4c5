"""Train two towers with JAX. Their tables lie on disk, and get less RAM than their rows need.

python examples/jax_training.py                         planted clicks, nothing to download
python examples/jax_training.py --data ml-100k.inter    a log of interactions: user item [rating] [timestamp]
python examples/jax_training.py --path FOLDER           keeps the training; killed or given more --steps, it goes on
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

import embedrock as er
import embedrock.jax as ej
import embedrock.jax.orbax as ejo
from common import auc, count, facts, mib, run, summary, training_folder
from interactions import read_log
from leave_one_out import NOTHING, leave_one_out
from planted import PlantedClicks

NUMBERS = {"users": 1_000_000, "items": 100_000, "dim": 16, "steps": 2000, "batch-size": 256, "lr": 0.005, "seed": 0}
SAME = "data", "users", "items", "dim", "lr", "batch_size", "seed"
EVERY = 500  # steps from one test and checkpoint to the next
Clicks = tuple[dict[str, np.ndarray], np.ndarray]  # ids of each table, and labels


def with_ids(users: np.ndarray, items: np.ndarray, labels: np.ndarray) -> Clicks:
    """Return clicks with the ids of each table together."""
    return {"users": users, "items": items}, labels


def read_clicks(options: Namespace) -> tuple[Callable[[int], Clicks], Clicks]:
    """Return the batch of each step, and the clicks of the test."""
    if options.data is None:
        planted = PlantedClicks(options.users, options.items, options.batch_size, options.seed)
        print(f"clicks   planted, the best possible AUC is {planted.best:.4f}")
        return lambda step: with_ids(*planted.batch(step)[:3]), with_ids(*planted.test[:3])
    log = read_log(Path(options.data))
    options.users, options.items, split = log.num_users, log.num_items, leave_one_out(log, options.seed)
    print(f"clicks   of {options.data}; the last item of each user is held out, among 100 others")
    size, epoch = options.batch_size, lru_cache(1)(lambda number: split.epoch(options.seed, number))
    steps = max(1, len(epoch(0)[0]) // size)  # of an epoch
    users = np.repeat(split.test_users, split.candidates.shape[1])
    items, labels = split.candidates.ravel(), np.zeros(split.candidates.shape, np.float32)
    labels[:, 0] = 1
    test = with_ids(*(each[items != NOTHING] for each in (users, items, labels.ravel())))
    return lambda step: with_ids(*(each[step % steps * size :][:size] for each in epoch(step // steps))), test


def make_dense(seed: int, dim: int) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Return the dense weights: two layers of each tower. The last column of a tower is a bias of the logit."""
    keys, init = jax.random.split(jax.random.key(seed), (2, 2)), jax.nn.initializers.glorot_uniform()
    users, items = ((init(one, (dim, dim)), init(other, (dim, dim + 1))) for one, other in keys)
    return {"users": users, "items": items}


@jax.jit
def score(dense: dict[str, Any], batch: ej.Batch) -> jax.Array:
    """Return the logit of each click."""
    vectors = batch.lookup()
    user, item = (jax.nn.silu(vectors[name] @ dense[name][0]) @ dense[name][1] for name in ("users", "items"))
    return (user[:, :-1] * item[:, :-1]).sum(-1) + user[:, -1] + item[:, -1]


def train(options: Namespace, batch_of: Callable[[int], Clicks], test: Clicks, folder: Path) -> None:
    """Train from the last checkpoint on, and print loss and AUC on the way."""
    group = er.Group(path=folder / "model.rock", memory=options.memory)
    for k, (name, rows) in enumerate({"users": options.users, "items": options.items}.items()):
        group.table(name, rows, options.dim, rule=er.Adam(), init=er.Normal(std=0.1), seed=2 * options.seed + k)
    tables, tested = ej.Tables(group), ej.Tables(group)  # each with padded sizes of its own
    rate = optax.warmup_constant_schedule(options.lr / 10, options.lr, 100)
    optimizer, dense = optax.adam(rate), make_dense(options.seed, options.dim)
    newest = ocp.CheckpointManagerOptions(max_to_keep=2)
    state, manager = optimizer.init(dense), ocp.CheckpointManager(folder.absolute() / "checkpoints", options=newest)
    first = manager.latest_step() or 0
    if first:
        both = {"dense": ocp.args.StandardRestore((dense, state)), "rows": ejo.TablesRestore(tables)}
        saved: Any = manager.restore(first, args=ocp.args.Composite(**both))
        dense, state = saved.dense
        print(f"resumed  at step {first:,}")

    @jax.jit
    def train_step(dense: Any, state: Any, batch: ej.Batch, labels: Any) -> Any:
        def loss_of(dense: Any, rows: Any) -> jax.Array:
            return optax.sigmoid_binary_cross_entropy(score(dense, batch.with_rows(rows)), labels).mean()

        loss, (grads, row_grads) = jax.value_and_grad(loss_of, (0, 1))(dense, batch.rows)
        finite = ej.all_finite(loss, grads, row_grads)
        updates, moved = optimizer.update(grads, state, dense)
        dense, state = ej.where(finite, (optax.apply_updates(dense, updates), moved), (dense, state))
        return dense, state, row_grads, finite, loss

    print("\n    step    loss     AUC")
    losses, started = [], time.perf_counter()
    batches = ej.prefetch(map(batch_of, range(first, options.steps)), tables, depth=2)
    for step, (batch, (_, labels)) in enumerate(batches, first + 1):
        dense, state, row_grads, finite, loss = train_step(dense, state, batch, labels)
        tables.apply(batch, row_grads, finite, lr=rate)
        losses.append(loss)
        if step % EVERY == 0 or step == options.steps:
            scores = score(dense, tested.fetch(test[0], missing="zeros"))  # rows without a step are zeros here
            print(f"{step:8,}  {np.mean(losses[-100:]):.4f}  {auc(test[1], np.asarray(scores)):.4f}", flush=True)
            both = {"dense": ocp.args.StandardSave((dense, state)), "rows": ejo.TablesSave(tables)}
            manager.save(step, args=ocp.args.Composite(**both))  # rows and dense weights of one step
    print("\n" + summary(group.stats(), options, len(losses), time.perf_counter() - started))
    needed = sum(group[name].stats()["rows_touched"] * group[name].spec.record_bytes for name in group)
    print(facts({"needed": f"{mib(needed)} by these rows; the tables may take {mib(options.memory)}"}))
    manager.close()
    group.close()


def main(words: list[str]) -> None:
    """Train as the words of the command line say."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FILE", help="a log of interactions, in place of planted clicks")
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    parser.add_argument("--memory", type=count, help="RAM of the tables; default: 4MiB, or 384KiB with --data")
    parser.add_argument("--path", type=Path, metavar="FOLDER", help="folder of the tables, which stays")
    options = parser.parse_args(words, Namespace(in_ram=False))
    options.memory = options.memory or count("384KiB" if options.data else "4MiB")
    batch_of, test = read_clicks(options)
    with training_folder(options, *SAME) as folder:
        train(options, batch_of, test, Path(str(folder)))


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
