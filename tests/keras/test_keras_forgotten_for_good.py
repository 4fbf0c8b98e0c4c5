"""A row that was forgotten stays so when a checkpoint of before is loaded by Keras."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import embedrock as er
import embedrock.keras as erk
from embedrock.__main__ import main
from slow import slow

IDS = np.array([[7, 8]])


def made(location: Path) -> keras.Sequential:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((2,), dtype="int64")
    layer = erk.Embedding(50, 4, path=location / "t", memory="8MiB", embeddings_initializer="zeros")
    model = keras.Sequential([inputs, layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(erk.optimizer("sgd"), "mse")
    return model


def fit(model: keras.Sequential, *callbacks: Any, epochs: int = 2) -> None:
    model.fit(np.repeat(IDS, 4, axis=0), np.ones((4, 1)), epochs=epochs, verbose=0, callbacks=list(callbacks))


def by_checkpoint(model: keras.Sequential, location: Path) -> Callable[[keras.Sequential], object]:
    fit(model, erk.TableCheckpoint(location / "checkpoints"))
    return lambda other: erk.TableCheckpoint(location / "checkpoints").restore(other)


def by_weights(model: keras.Sequential, location: Path) -> Callable[[keras.Sequential], object]:
    fit(model)
    model.save_weights(location / "m.weights.h5")
    return lambda other: other.load_weights(location / "m.weights.h5")


@pytest.mark.parametrize(
    ("save", "who"),
    [
        *((by_checkpoint, "the layer"), (by_weights, "the command")),
        *slow((by_checkpoint, "the command"), (by_weights, "the layer")),
    ],
)
def test_it_stays_forgotten(save: Callable[..., Any], who: str, tmp_path: Path):
    model = made(tmp_path)
    load = save(model, tmp_path)
    wanted = model.layers[0].table.lookup(IDS)
    assert wanted.all()
    wanted[0, 0] = 0.0
    if who == "the command":
        model.layers[0].table.close()
        (tmp_path / "ids.txt").write_text("7\n")
        assert main(["forget", str(tmp_path / "t"), str(tmp_path / "ids.txt")]) == 0
        model = made(tmp_path)
    else:
        assert model.layers[0].forget([7]) == 1
        model.layers[0].table.commit()
    load(model)
    table = model.layers[0].table
    np.testing.assert_array_equal(table.lookup(IDS), wanted)
    if who == "the command" or save is by_weights:  # the callback does nothing where the model is there already
        assert table.stats()["rows_withheld"] == 1
    table.commit()
    table.close()
    with er.open(tmp_path / "t") as again:
        np.testing.assert_array_equal(again.lookup(IDS), wanted)
