"""`erk.Hashing` and `erk.hash_ids`: the ids of `er.hash_ids`, in graphs, models and what is served."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import embedrock as er
import embedrock.keras as erk
from embedrock.errors import ArgumentError, IdTypeError

WORDS = ["", "a", "eight888", "fifteen letters", "Grüße", "日本語", "\U0001f600 smile", "inner\0zero", "x" * 300]
SALTS = [0, 7, (3, 2**64 - 1), 2**63]
BUCKETS = [None, 1, 1000, 2**62 + 1]

SERVE = """
import sys
sys.modules["embedrock"] = None
import numpy as np, tensorflow as tf
served = tf.saved_model.load(sys.argv[1])
print(np.array(served.serve(tf.constant([["red", "green"]]))).tolist())
"""


@pytest.mark.parametrize("salt", SALTS, ids=["zero", "number", "pair", "large"])
@pytest.mark.parametrize("buckets", BUCKETS)
def test_the_same_ids_as_on_the_host(salt: Any, buckets: int | None):
    expected = er.hash_ids(WORDS, salt=salt, buckets=buckets)
    hashed = tf.function(lambda words: erk.hash_ids(words, salt=salt, buckets=buckets))
    layer = erk.Hashing(buckets, salt)
    for found in (hashed(tf.constant(WORDS)), layer(tf.constant(WORDS)), layer(WORDS), layer(np.array(WORDS, object))):
        assert found.dtype == tf.int64
        assert np.array_equal(found, expected)


def test_bytes_that_are_no_text():
    texts = [b"\xff\xfe", b"\x00", b""]
    assert np.array_equal(erk.hash_ids(tf.constant(texts)), er.hash_ids(texts))


def test_any_shape():
    ids = er.hash_ids(["a", "b", "c"])
    ragged = tf.ragged.constant([["a"], [], ["b", "c"]])
    sparse = tf.sparse.from_dense(tf.constant([["a", ""], ["b", "c"]]))
    for hashed in (erk.hash_ids, erk.Hashing()):
        assert hashed(ragged).to_list() == [[ids[0]], [], [ids[1], ids[2]]]
        assert tf.sparse.to_dense(hashed(sparse)).numpy().tolist() == [[ids[0], 0], [ids[1], ids[2]]]
        assert hashed(tf.constant("a")).shape == ()
        assert hashed(tf.constant([[["a", "b", "c"]]])).shape == (1, 1, 3)
        assert hashed(tf.zeros((0, 2), tf.string)).shape == (0, 2)


def test_in_a_pipeline():
    words = tf.data.Dataset.from_tensor_slices(WORDS).batch(4).map(erk.hash_ids)
    assert np.concatenate(list(words.as_numpy_iterator())).tolist() == er.hash_ids(WORDS).tolist()


def test_the_kind_of_symbolic_ids():
    for options in ({}, {"ragged": True}, {"sparse": True}):
        words: Any = keras.Input((None,), dtype="string", **options)
        ids = erk.Hashing(10)(words)
        assert (ids.shape, ids.dtype) == ((None, None), "int64")
        assert (ids.ragged, ids.sparse) == (words.ragged, words.sparse)


def small_model() -> Any:
    words = keras.Input((2,), dtype="string")
    rows = keras.layers.Embedding(50, 4, embeddings_initializer="uniform")(erk.Hashing(50, salt=(1, 2**63))(words))
    return keras.Model(words, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))


def test_it_is_saved_and_loaded(tmp_path: Path):
    model, batch = small_model(), tf.constant([["red", "green"], ["", "blue"]])
    model.save(tmp_path / "model.keras")
    loaded: Any = keras.models.load_model(tmp_path / "model.keras")
    assert np.array_equal(loaded(batch), model(batch))
    assert loaded.layers[1].get_config() == model.layers[1].get_config()
    assert np.array_equal(keras.models.clone_model(model).layers[1](batch), model.layers[1](batch))


def test_it_trains_rows_of_open_ids():
    words = keras.Input((2,), dtype="string")
    model = keras.Model(words, keras.layers.Flatten()(erk.Embedding(None, 4, seed=0)(erk.Hashing(salt=5)(words))))
    model.compile(optimizer=erk.optimizer("sgd"), loss="mse")
    batch = tf.constant([["red", "green"], ["red", "blue"]])
    model.fit(batch, np.zeros((2, 8), np.float32), verbose=0)
    table = model.layers[2].table
    assert table.stats()["rows_touched"] == 3
    expected = table.lookup(er.hash_ids(["red", "blue"], salt=5)).reshape(-1)
    assert np.array_equal(model(tf.constant([["red", "blue"]]))[0], expected)


def test_a_sequential_model_without_an_input():
    model = keras.Sequential([erk.Hashing(), erk.Embedding(None, 4)])
    assert model(tf.constant(["red", "green"])).shape == (2, 4)


@pytest.mark.slow
def test_it_is_served_without_embedrock(tmp_path: Path):
    words = keras.Input((2,), dtype="string")
    rows = erk.Embedding(None, 4, embeddings_initializer=er.Normal())(erk.Hashing(salt=5)(words))
    for name, model in {"open": keras.Model(words, rows), "small": small_model()}.items():
        folder = tmp_path / name
        erk.export(model, folder) if name == "open" else model.export(folder, verbose=False)
        done = subprocess.run([sys.executable, "-c", SERVE, folder], capture_output=True, text=True, check=True)
        assert json.loads(done.stdout.splitlines()[-1]) == model(tf.constant([["red", "green"]])).numpy().tolist()


@pytest.mark.parametrize("hashed", [erk.hash_ids, erk.Hashing(name="words")], ids=["function", "layer"])
def test_what_is_no_string_is_refused(hashed: Any):
    with pytest.raises(IdTypeError, match=r"must be strings \(dtype string\): got dtype int64.*as_string"):
        hashed(tf.constant([1, 2], tf.int64))
    with pytest.raises(IdTypeError, match=r"got None at \[1\]"):
        hashed(["a", None])


def test_a_model_of_integers_is_refused():
    with pytest.raises(IdTypeError, match=r"layer 'words', erk.Hashing must be strings.*keras.Input"):
        erk.Hashing(name="words")(keras.Input((2,), dtype="int64"))


def test_wrong_arguments():
    with pytest.raises(ArgumentError, match=r"`salt` of layer 'words', erk.Hashing must be a number"):
        erk.Hashing(salt=-1, name="words")
    with pytest.raises(ArgumentError, match=r"`buckets` of layer 'words', erk.Hashing must be"):
        erk.Hashing(0, name="words")
    with pytest.raises(ArgumentError, match="`buckets` of hash_ids must be"):
        erk.hash_ids(tf.constant(["a"]), buckets=2**63)
