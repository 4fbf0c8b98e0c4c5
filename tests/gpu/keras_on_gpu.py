"""Trains rows of Keras' layers on TensorFlow's GPU, and tells whether they are right, and how long a step takes.

    PYTHONPATH=src python tests/gpu/keras_on_gpu.py

needs a GPU, TensorFlow and PyTorch built for it, and Triton. ``TRITON_INTERPRET=1`` tries the script without one. It
prints a line for each way in which rows are used, and ends with status 1 where one of these is not so:

- All rows near, a cache of a few, and all near again train to the same bits. Where one framework does not wait for the
  other, they hardly would.
- The CPU trains to the same within rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

import keras
import numpy as np
import tensorflow as tf

import embedrock as er
import embedrock.keras as erk
from embedrock.device import memory_for

QUIET: Any = 0  # which Keras calls a string


def trained(rows: Any, batches: tf.data.Dataset, steps: int) -> dict[str, Any]:
    """Fit a model on rows, which a layer has; return the microseconds of a step, but for the first, and its loss."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((26,), dtype="int64")
    hidden = keras.layers.Dense(64, "relu")(keras.layers.Flatten()(rows(inputs)))
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile(erk.optimizer(keras.optimizers.Adagrad(0.05)), "mse")
    model.fit(batches.take(1), verbose=QUIET)
    start = time.perf_counter()
    history = model.fit(batches.skip(1), verbose=QUIET)
    return {"us": round((time.perf_counter() - start) / max(1, steps - 1) * 1e6), "loss": history.history["loss"][-1]}


def main(given: Sequence[str] | None = None) -> int:
    """Run the ways, print what they did, and return 1 where one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"rows": 1_000_000, "dim": 64, "batch": 4096, "steps": 100}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args(given)
    tf.config.experimental.enable_op_determinism()
    ids = np.random.default_rng(0).zipf(1.1, (asked.steps * asked.batch, 26)) % asked.rows
    targets = (ids[:, :1] % 7).astype(np.float32)
    batches = tf.data.Dataset.from_tensor_slices((ids, targets)).batch(asked.batch)
    spec = er.Table(asked.rows, asked.dim, rule=er.Adagrad(lr=0.1)).spec
    near, cache = (memory_for(spec, count) for count in (asked.rows, asked.rows // 10))
    values: dict[str, np.ndarray] = {}
    for name, memory in {"near": near, "cache": cache, "near again": near, "cpu": 0}.items():
        layer = erk.Embedding(asked.rows, asked.dim, seed=1, device_memory=memory)
        told = trained(layer, batches, asked.steps)
        values[name] = layer.table.lookup(np.unique(ids))
        told |= {"most difference from near": float(np.abs(values[name] - values["near"]).max())}
        print(json.dumps({"way": name, "side": repr(layer.table.executor)} | told), flush=True)
    print(json.dumps({"way": "keras.layers.Embedding"} | trained(plain(asked), batches, asked.steps)))
    same = all(np.array_equal(values[name], values["near"]) for name in ("cache", "near again"))
    close = np.allclose(values["cpu"], values["near"], rtol=1e-3, atol=1e-4)
    print(json.dumps({"same bits on the GPU": same, "as on the CPU, within rounding": close}))
    return 0 if same and close else 1


def plain(asked: argparse.Namespace) -> keras.layers.Layer:
    """Return the layer of Keras'. (It steps rows that repeat in a batch wrongly.)"""
    return keras.layers.Embedding(asked.rows, asked.dim)


if __name__ == "__main__":
    sys.exit(main())
