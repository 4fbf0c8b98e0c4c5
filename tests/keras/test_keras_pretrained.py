"""`from_pretrained`: weights that are read where they are, of any size."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import embedrock as er
import embedrock.keras as erk
from embedrock.errors import ArgumentError, UnknownArgumentError, UnsupportedError
from embedrock.initializers import FromBfloat16
from embedrock.table.options import LayerOptions, declared
from slow import slow

ROWS, DIM = 30, 4
WEIGHTS = np.random.default_rng(0).standard_normal((ROWS, DIM)).astype(np.float32)
IDS = np.array([[3, 3, 0], [1, 29, 0]])

GIVEN = {
    "array": lambda: WEIGHTS,
    "float16 array": lambda: WEIGHTS.astype(np.float16),
    "bfloat16 array": lambda: WEIGHTS.astype(ml_dtypes.bfloat16),
    "tensor": lambda: tf.constant(WEIGHTS),
    "bfloat16 tensor": lambda: tf.constant(WEIGHTS, tf.bfloat16),
    "tf.Variable": lambda: tf.Variable(tf.constant(WEIGHTS)),
    "keras.Variable": lambda: keras.Variable(WEIGHTS),
}


def sequential(layer: Any) -> Any:
    model = keras.Sequential([keras.Input((3,), dtype="int64"), layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(erk.optimizer(keras.optimizers.SGD(0.1)), "mse")
    return model


@pytest.mark.parametrize("make", GIVEN.values(), ids=GIVEN)
def test_weights_of_all_kinds(make: Any):
    weights = make()
    layer = erk.Embedding.from_pretrained(weights)
    dtype = keras.backend.standardize_dtype(weights.dtype)
    assert (layer.table.spec.dtype, layer(IDS).dtype.name, layer.trainable) == (dtype, dtype, True)
    np.testing.assert_array_equal(layer(IDS), np.asarray(weights)[IDS])


def test_arrays_and_tensors_are_not_copied():
    layer = erk.Embedding.from_pretrained(WEIGHTS)
    assert layer.table.spec.init.array is WEIGHTS
    tensor: Any = tf.constant(WEIGHTS)
    array = erk.Embedding.from_pretrained(tensor).table.spec.init.array
    assert np.shares_memory(array, np.asarray(memoryview(tensor)))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((erk.Embedding, {}), (erk.EmbeddingBag, {"trainable": True}), (erk.Embedding, {"trainable": False})),
        *slow((erk.EmbeddingBag, {}), (erk.Embedding, {"trainable": True}), (erk.EmbeddingBag, {"trainable": False})),
    ],
    ids=str,
)
def test_trained_unless_told_otherwise(kind: Any, options: dict[str, Any]):
    layer = kind.from_pretrained(WEIGHTS, name="emb", **options)
    sequential(layer).fit(IDS, np.ones((2, 1)), verbose=0)
    changed = (layer.table.lookup(np.arange(ROWS)) != WEIGHTS).any(axis=1)
    assert np.flatnonzero(changed).tolist() == ([0, 1, 3, 29] if options.get("trainable", True) else [])
    np.testing.assert_array_equal(WEIGHTS, np.random.default_rng(0).standard_normal(WEIGHTS.shape).astype(np.float32))


def test_arguments_of_layers_and_tables(tmp_path: Path):
    layer = erk.EmbeddingBag.from_pretrained(
        WEIGHTS, mode="mean", mask_zero=True, name="bag", memory="1MiB", path=tmp_path / "t", rule=er.Adagrad(lr=0.5)
    )
    assert (layer.mode, layer.name, layer.table.name) == ("mean", "bag", "bag")
    np.testing.assert_allclose(layer(IDS), [WEIGHTS[3], WEIGHTS[[1, 29]].mean(0)], rtol=1e-6)
    assert layer.handle.own_rule == er.Adagrad(lr=0.5)
    layer.table.assign([3], np.ones((1, DIM)))
    layer.table.commit()
    layer.table.close()
    again = erk.EmbeddingBag.from_pretrained(WEIGHTS, mode="mean", memory="1MiB", path=tmp_path / "t", name="bag")
    np.testing.assert_allclose(again(IDS[:, :2]), [np.ones(DIM), WEIGHTS[[1, 29]].mean(0)], rtol=1e-6)


def test_bfloat16_weights_on_disk(tmp_path: Path):
    weights = WEIGHTS.astype(ml_dtypes.bfloat16)
    for _ in range(2):
        layer = erk.Embedding.from_pretrained(weights, path=tmp_path / "t", memory="1MiB")
        np.testing.assert_array_equal(layer(IDS), weights[IDS])
        layer.table.commit()
        layer.table.close()
    for bits in (weights, weights.view(np.uint16)):
        with er.open(tmp_path / "t", init=FromBfloat16(bits)) as table:
            np.testing.assert_array_equal(table.lookup(IDS), weights[IDS].astype(np.float32))
    with pytest.raises(ArgumentError, match=r"`array` of FromBfloat16 must be a 2-D NumPy array of 2-byte values: got"):
        FromBfloat16(WEIGHTS)


def test_dtypes():
    layer = erk.Embedding.from_pretrained(WEIGHTS.astype(np.float64), dtype="float32")
    assert (layer.table.spec.dtype, layer(IDS).dtype.name) == ("float32", "float32")
    layer = erk.Embedding.from_pretrained(WEIGHTS, dtype="mixed_bfloat16")
    assert (layer.table.spec.dtype, layer(IDS).dtype.name) == ("float32", "bfloat16")
    layer = erk.Embedding.from_pretrained(WEIGHTS, dtype="bfloat16")
    assert (layer.table.spec.dtype, layer(IDS).dtype.name) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize(
    ("weights", "options", "error", "text"),
    [
        (WEIGHTS.astype(np.float64), {}, ArgumentError, "are float64, which a table cannot hold. Pass dtype='float32'"),
        (
            np.ones((3, 4), np.int64),
            {"dtype": "float32"},
            ArgumentError,
            "must be a 2-D NumPy array of floats: got int64",
        ),
        (WEIGHTS[0], {}, ArgumentError, r"must be a 2-D array or tensor \(rows, dim\): got shape \(4,\)"),
        ([[1.0]], {}, ArgumentError, r"must be a 2-D array or tensor \(rows, dim\): got list"),
        (WEIGHTS, {"seed": 3}, UnsupportedError, "`seed` of erk.Embedding.from_pretrained: rows start as the weights"),
        (WEIGHTS, {"input_dim": 3}, UnsupportedError, "`input_dim` of erk.Embedding.from_pretrained: it is that of"),
        (WEIGHTS, {"size": 3}, UnknownArgumentError, "erk.Embedding has no argument `size`"),
    ],
)
def test_what_is_refused(weights: Any, options: dict[str, Any], error: type, text: str):
    with pytest.raises(error, match=text):
        erk.Embedding.from_pretrained(weights, **options)


def constants_of(function: Any) -> int:
    """Return the bytes of the largest constant of a function."""
    graph = function.graph.as_graph_def()
    nodes = [*graph.node, *(node for part in graph.library.function for node in part.node_def)]
    return max([node.ByteSize() for node in nodes if node.op == "Const"], default=0)


def test_a_function_holds_no_constant_of_the_weights():
    weights = np.ones((10_000, 16), np.float32)
    layer = erk.Embedding.from_pretrained(weights, trainable=True)
    function = tf.function(lambda ids: layer(ids), input_signature=[tf.TensorSpec((None, None), tf.int64)])
    assert not np.any(function(IDS) - 1)
    assert constants_of(function.get_concrete_function()) < 10_000


LARGE = """
import json, resource, sys
import keras, numpy as np, tensorflow as tf
import embedrock.keras as erk

def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def run(weights):
    layer = erk.Embedding.from_pretrained(weights, trainable=True)
    model = keras.Sequential([keras.Input((3,), dtype="int64"), layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(erk.optimizer(keras.optimizers.SGD(0.1)), "mse")
    ids = np.random.default_rng(0).integers(0, len(weights), (64, 3))
    ids[0] = 0, 1, len(weights) - 1
    found = tf.function(lambda ids: layer(ids))(tf.constant(ids[0])).numpy()
    model.fit(ids, np.ones((64, 1)), batch_size=32, epochs=2, verbose=0)
    return found[:, 0].tolist(), layer.table.steps

run(np.ones((1000, 256), np.float32))
before = peak_mib()
weights = np.memmap(sys.argv[1], np.float32, "r", shape=(int(sys.argv[2]), 256))
found, steps = run(weights)
print(json.dumps({"found": found, "steps": steps, "grown_mib": peak_mib() - before}))
"""


@pytest.mark.slow
def test_three_gigabytes_are_used_where_they_are(tmp_path: Path):
    rows = 3 * 2**30 // 1024 + 1  # more than 3 GiB, and more than protocol buffers hold
    weights = np.memmap(tmp_path / "weights", np.float32, "w+", shape=(rows, 256))  # sparse: it takes no place
    weights[[0, 1, rows - 1], 0] = 1, 2, 3
    weights.flush()
    command = [sys.executable, "-c", LARGE, str(tmp_path / "weights"), str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["found"], told["steps"]) == ([1, 2, 3], 4)
    assert told["grown_mib"] < 200, told


@pytest.mark.parametrize("kind", [erk.Embedding, erk.EmbeddingBag])
def test_help_shows_the_options(kind: Any):
    shown = inspect.signature(kind.from_pretrained).parameters.keys()
    assert {*declared(LayerOptions), "trainable", "dtype"} - {"seed"} <= shown
    assert "seed" not in shown  # the rows start as the weights
