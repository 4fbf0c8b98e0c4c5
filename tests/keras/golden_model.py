"""Makes a golden model: `python tests/keras/golden_model.py [FOLDER]`. It is never made again.

A release that cannot load it, or reads other rows, has broken files that users have. The one in the repository was
written by the first release, whose layers were in modules of other names, which Keras writes down.
"""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import numpy as np

import embedrock as er
import embedrock.keras as erk

FOLDER = Path(__file__).resolve().parent / "golden"
INPUTS = [np.array([[1, 2], [3, 0]]), np.array([[7, -(2**63), 9], [7, 7, 0]]), np.array([[5], [6]])]
Y = np.array([[1.0], [-1.0]], np.float32)


def make() -> keras.Model:
    """Return a model with layers of all kinds, after a step."""
    keras.utils.set_random_seed(1)
    user, words, item = (keras.Input((n,), dtype="int64") for n in (2, 3, 1))
    bag = erk.EmbeddingBag(
        None, 3, er.Normal(std=0.1), True, "mean", rule=er.Adam(betas=(0.8, 0.9)), seed=3, name="words"
    )
    features = {"user": erk.Embedding(100, 2, name="user", directory="hashed"), "words": bag}
    found = erk.EmbeddingCollection(features)({"user": user, "words": words})
    last = erk.Embedding(10, 2, "ones", name="item", dtype="bfloat16", on_nonfinite="skip")(item)
    parts = [keras.layers.Flatten()(part) for part in (found["user"], keras.ops.cast(last, "float32"))]
    out = keras.layers.Dense(1, name="head")(keras.layers.Concatenate()([*parts, found["words"]]))
    model = keras.Model([user, words, item], out)
    model.compile(erk.optimizer(keras.optimizers.Adam(0.01)), "mse")
    model.train_on_batch(INPUTS, Y)
    return model


def tables(model: keras.Model) -> dict[str, er.Table]:
    """Return the tables of the model's layers, by name."""
    features = next(layer for layer in model.layers if isinstance(layer, erk.EmbeddingCollection)).embeddings
    return {name: layer.table for name, layer in [*features.items(), ("item", model.get_layer("item"))]}


def contents(model: keras.Model) -> dict[str, np.ndarray]:
    """Return the state of each table and what the model predicts."""
    states = {f"{name}/{key}": value for name, table in tables(model).items() for key, value in table.state().items()}
    return {**{key: v for key, v in states.items() if isinstance(v, np.ndarray)}, "out": np.asarray(model(INPUTS))}


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    model = make()
    model.save(folder / "model.keras")
    np.savez(folder / "contents.npz", **contents(model))
