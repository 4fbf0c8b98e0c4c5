"""A model of ours and its twin, whose embedding is a Dense layer on one-hot ids: the oracle of exact steps.

(`keras.layers.Embedding` is none: it steps repeated ids wrongly.)
"""

from __future__ import annotations

import keras
import numpy as np

import embedrock as er
import embedrock.keras as erk

ROWS, DIM, LENGTH = 40, 4, 5


def batches(samples=96, seed=0):
    """Ids that repeat inside of a batch, some that only later batches have, and targets."""
    generator = np.random.default_rng(seed)
    ids = (generator.zipf(1.3, (samples, LENGTH)) - 1) % (ROWS - 4)
    ids[samples // 2 :, 0] = ROWS - 1 - ids[samples // 2 :, 0] % 4
    return ids.astype(np.int64), (3 * generator.standard_normal((samples, 1))).astype(np.float32)


def first_values(seed=1):
    return (0.1 * np.random.default_rng(seed).standard_normal((ROWS, DIM))).astype(np.float32)


def one_hot(ids):
    return np.eye(ROWS, dtype=np.float32)[ids]


def head(inputs, embedded):
    """The rest of both models."""
    pooled = keras.layers.GlobalAveragePooling1D()(embedded)
    drawn = keras.initializers.RandomNormal(seed=2)
    hidden = keras.layers.Dense(3, activation="tanh", kernel_initializer=drawn)(pooled)
    return keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(hidden))


def ours(optimizer, *, table=None, rule=None, **compile_options):
    """A compiled model of ours, and its table."""
    table = er.Table(ROWS, DIM, init=er.FromArray(first_values())) if table is None else table
    inputs = keras.Input((LENGTH,), dtype="int64")
    model = head(inputs, erk.Embedding(table, rule=rule)(inputs))
    model.compile(optimizer, "mse", **compile_options)
    return model, table


def dense(optimizer, **compile_options):
    """The compiled twin, and the layer that has its rows."""
    inputs = keras.Input((LENGTH, ROWS))
    layer = keras.layers.Dense(DIM, use_bias=False)
    model = head(inputs, layer(inputs))
    layer.set_weights([first_values()])
    model.compile(optimizer, "mse", **compile_options)
    return model, layer


def every_row(table):
    return table.lookup(np.arange(ROWS))
