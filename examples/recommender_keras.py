"""Train the recommender of `recommender.py` with Keras' `fit`: the same clicks, and tables on disk behind 360 MiB.

python examples/recommender_keras.py                   killed and started again, it goes on
python examples/recommender_keras.py --path FOLDER     keeps the tables; more --steps go on with them
"""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from keras import ops
from keras.layers import Dense

import embedrock as er
import embedrock.keras as erk
from common import add_training_options, auc, describe, make_parser, reports, run, summary, training_folder
from planted import Clicks, PlantedClicks

SAVE_STEPS = 250  # between two checkpoints
SCORED = 1 << 14  # clicks that are scored at a time
SAME = "users", "items", "dim", "lr", "batch_size", "seed"


def make_model(options: Namespace, group: er.Group) -> Any:
    """Return a compiled model: matrix factorization, with a bias that each row gives."""
    keras.utils.set_random_seed(options.seed)
    seeds = np.random.SeedSequence(options.seed).generate_state(2).tolist()
    inputs, rows = {}, []
    for name, size, seed in zip(("users", "items"), (options.users, options.items), seeds, strict=True):
        inputs[name] = keras.Input((), dtype="int64", name=name)
        how: Any = {"seed": seed, "rule": er.Adam(), "group": group}  # this Adam steps only the rows of the batch
        layer = erk.Embedding(size, options.dim, er.Normal(std=0.01), name=f"{name}_rows", **how)
        rows.append(layer(inputs[name]))
    p, q = rows
    logits = ops.sum(p * q, -1, keepdims=True) + Dense(1, name="user_bias")(p) + Dense(1, name="item_bias")(q)
    model = keras.Model(inputs, logits)
    adam = keras.optimizers.Adam(options.lr, epsilon=er.Adam.eps)
    model.compile(optimizer=erk.optimizer(adam), loss=keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def train(options: Namespace, folder: Path | None) -> None:
    """Train from the last checkpoint on, and print the AUC on the way."""
    group = er.Group(memory=options.memory, path=folder / "model.rock") if folder else er.Group()
    model = make_model(options, group)
    saving = [erk.TableCheckpoint(folder / "checkpoints", SAVE_STEPS, resume=False)] if folder else []
    for checkpoint in saving:
        checkpoint.restore(model)
    clicks = PlantedClicks(options.users, options.items, options.batch_size, options.seed)
    first = step = int(model.optimizer.iterations)
    if first:
        print(f"resumed  at step {first:,}")
    print(f"\n    step    loss     AUC   (best possible: {clicks.best:.4f}, by the planted model itself)")
    before, started = Counter(group.stats()), time.perf_counter()
    for end in reports(first, options.steps):
        data = dataset(model, clicks, step, end)
        fitted = model.fit(data, callbacks=saving, verbose=int(sys.stdout.isatty()), shuffle=False)
        print(f"{end:8,}  {fitted.history['loss'][-1]:.4f}  {test_auc(model, clicks.test):.4f}", flush=True)
        step = end
    seconds, grown = time.perf_counter() - started, group.stats()
    grown.update({name: grown[name] - before[name] for name in ("hits", "misses", "reads")})
    print("\n" + summary(grown, options, step - first, seconds))
    trained = test_auc(model, clicks.test)
    print(f"AUC      {trained:.4f} trained, {clicks.best:.4f} planted model, on {len(clicks.test.labels):,} clicks")
    group.close()


def dataset(model: Any, clicks: PlantedClicks, start: int, stop: int) -> tf.data.Dataset:
    """Return the batches of some steps. The rows of the next two are read meanwhile."""

    def drawn(step: np.ndarray) -> tuple[np.ndarray, ...]:
        return clicks.batch(int(step))[:3]

    def tensors(step: tf.Tensor) -> Any:
        batch: Any = tf.numpy_function(drawn, [step], [tf.int64, tf.int64, tf.float32])
        users, items, labels = (tf.ensure_shape(each, [None]) for each in batch)
        return {"users": users, "items": items}, labels[:, tf.newaxis]

    ids_of = {model.get_layer(f"{name}_rows"): (lambda x, y, name=name: x[name]) for name in ("users", "items")}
    return erk.prefetch(tf.data.Dataset.range(start, stop).map(tensors), ids_of, depth=2)


def test_auc(model: Any, test: Clicks) -> float:
    """Return the AUC on the test."""
    logits = model.predict({"users": test.users, "items": test.items}, SCORED, verbose=0)
    return auc(test.labels, logits[:, 0])


def use_threads(threads: int | None) -> None:
    """Give TensorFlow and Embedrock that many threads each; None: their own choice."""
    if threads is not None:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
        er.set_threads(threads)


def main(words: list[str]) -> None:
    """Train as the words of the command line say."""
    parser = make_parser(__doc__)
    add_training_options(parser)
    options = parser.parse_args(words)
    describe(options)
    use_threads(options.threads)
    with training_folder(options, *SAME) as folder:
        train(options, folder)


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
