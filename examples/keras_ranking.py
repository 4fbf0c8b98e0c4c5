"""Rank items for users with a functional Keras model: fit with callbacks, rows on disk, a SavedModel at the end.

python examples/keras_ranking.py                     clicks that it makes; about a minute on two cores
python examples/keras_ranking.py --path FOLDER       keeps all files; killed and started again, it continues
python examples/keras_ranking.py --logs FOLDER       also writes TensorBoard's files: tensorboard --logdir FOLDER

A click is a user, the items of the user's history, and the item shown. The label says whether the user clicked it.
For your data, replace `make_clicks`: it returns a dict of the inputs, and the labels. Strings become ids by
`erk.Hashing`, or by `er.Vocabulary`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import keras
import numpy as np
import tensorflow as tf

import embedrock as er
import embedrock.keras as erk

USERS, ITEMS, LONGEST = 50_000, 5_000, 8  # a history has up to 8 items; the item 0 is its padding
Inputs = dict[str, np.ndarray]


def make_clicks(count: int, seed: int) -> tuple[Inputs, np.ndarray, np.ndarray]:
    """Return inputs, labels (n, 1), and the logits (n,) by which the labels were drawn: no model ranks better."""
    world, rng = np.random.default_rng(0), np.random.default_rng((1, seed))
    activity, appeal, genre = world.normal(size=USERS), world.normal(size=ITEMS), world.integers(0, 6, ITEMS)
    lengths = world.integers(1, LONGEST + 1, USERS)
    histories = np.where(np.arange(LONGEST) < lengths[:, None], popular(world, (USERS, LONGEST)), 0)
    user, item = rng.integers(0, USERS, count), popular(rng, count)
    history = histories[user]
    alike = ((genre[history] == genre[item][:, None]) & (history > 0)).sum(1) / lengths[user]
    logits = 0.5 * activity[user] + appeal[item] + 4 * alike - 1.5
    labels = (rng.random(count) < 1 / (1 + np.exp(-logits))).astype("float32")
    return {"user": user, "history": history, "item": item}, labels[:, None], logits


def popular(rng: np.random.Generator, shape: int | tuple[int, ...]) -> np.ndarray:
    """Draw items. A few of them are shown often."""
    return 1 + ((ITEMS - 1) * rng.random(shape) ** 3).astype("int64")


def make_model(folder: Path) -> Any:
    """Return a compiled model. Its two tables lie on disk, in one group with 8 MiB of RAM."""
    keras.utils.set_random_seed(0)
    group = er.Group(path=folder / "model.rock", memory="8MiB")
    user = keras.Input((), dtype="int64", name="user")
    item = keras.Input((), dtype="int64", name="item")
    history = keras.Input((LONGEST,), dtype="int64", name="history")
    items = erk.Embedding(ITEMS, 16, group=group, name="items")
    liked = erk.EmbeddingBag(items.table, mode="mean", mask_zero=True, name="liked")(history)  # the same rows
    shown, person = items(item), erk.Embedding(USERS, 4, group=group, name="users")(user)
    features = keras.layers.Concatenate()([person, shown, liked, keras.layers.Multiply()([shown, liked])])
    hidden = keras.layers.Dense(32, activation="relu")(features)
    logit = keras.layers.Dense(1)(hidden)
    model = erk.fuse(keras.Model({"user": user, "history": history, "item": item}, logit))  # one lookup for all three
    model.compile(
        optimizer=erk.optimizer(keras.optimizers.Adam(0.01)),  # a name works, too: erk.optimizer("adam")
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.AUC(from_logits=True, name="auc")],
    )
    return model


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Return the probability that a click scores above a non-click."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    clicks = labels.ravel() > 0
    return (ranks[clicks].mean() - (clicks.sum() + 1) / 2) / (~clicks).sum()


def train(folder: Path, options: argparse.Namespace) -> None:
    """Train in a folder, from its last checkpoint on. Then export the model, and compare the predictions."""
    model = make_model(folder)
    clicks, labels, _ = make_clicks(options.clicks, seed=0)
    tested, test_labels, planted = make_clicks(50_000, seed=1)
    callbacks = [
        erk.TableCheckpoint(folder / "checkpoints", every=200),  # rows, dense weights and optimizer of one step
        erk.TableStats(),  # before TensorBoard, which writes what is in the logs
        keras.callbacks.EarlyStopping("val_auc", mode="max", patience=1, restore_best_weights=True),
        *([keras.callbacks.TensorBoard(options.logs)] if options.logs else []),
    ]
    valid = make_clicks(20_000, seed=2)[:2]
    how = {"validation_data": valid, "callbacks": callbacks, "verbose": 2, "shuffle": False}
    model.fit(clicks, labels, batch_size=2048, epochs=options.epochs, **how)

    scores = model.predict(tested, batch_size=4096, verbose=0)[:, 0]
    print(f"AUC {auc(test_labels, scores):.4f}, best possible {auc(test_labels, planted):.4f}, chance 0.5")
    served = folder / "served"
    shutil.rmtree(served, ignore_errors=True)  # of an earlier run
    erk.export(model, served)
    some = {name: column[:1000] for name, column in tested.items()}
    alone = tf.saved_model.load(str(served))  # here, or where there is no Embedrock
    difference = np.abs(alone.serve(some) - model.predict(some, batch_size=1000, verbose=0)).max()
    print(f"SavedModel: largest difference of 1000 predictions {difference}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, help="folder that keeps tables, checkpoints and served, the SavedModel")
    parser.add_argument("--logs", help="folder for TensorBoard; needs the package tensorboard")
    parser.add_argument("--clicks", type=int, default=1_000_000, help="training clicks; default: 1000000")
    parser.add_argument("--epochs", type=int, default=3, help="most epochs; default: 3")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.path or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        train(folder, options)
