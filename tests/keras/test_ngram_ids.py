"""`er.Ngrams` on tensors of TensorFlow: the ids of arrays, eagerly, in graphs, in pipelines and in a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import embedrock as er
import embedrock.keras as erk

VALUES = {
    "own": er.Ngrams(10**6, 50),
    "open": er.Ngrams(None, 50, orders=(1, 2, 4), boundary=3),
    "xor, folded": er.Ngrams(None, 50, heads=2, boundary=3, pad=7, mix="xor", token_map=[k // 3 for k in range(50)]),
    "tokens alone": er.Ngrams(1000, 50, orders=(1,), boundary=3),
}
EVERY = pytest.mark.parametrize("grams", VALUES.values(), ids=VALUES)
TOKENS = np.random.default_rng(0).integers(0, 50, (3, 17))
TOKENS[:, [4, 5, 11]] = 3
CUTS = (0, 1, 9, 17)


@EVERY
def test_the_ids_of_arrays(grams: er.Ngrams):
    for cut in CUTS:
        ids = grams.ids(tf.constant(TOKENS[:, cut:]), tf.constant(TOKENS[:, :cut]))
        assert ids.dtype == tf.int64
        assert np.array_equal(ids, grams.ids(TOKENS)[:, cut:])
    assert np.array_equal(grams.ids(tf.constant(TOKENS[0], tf.int32)), grams.ids(TOKENS[0]))


@EVERY
@pytest.mark.parametrize("jit", [False, True], ids=["graph", "XLA"])
def test_in_a_graph(grams: er.Ngrams, jit: bool):
    signature = [tf.TensorSpec((None, None), tf.int32), tf.TensorSpec((None, None), tf.int64)]
    ids_of = tf.function(lambda tokens, history: grams.ids(tokens, history), signature, jit_compile=jit)
    for cut in CUTS[:-1] if jit else CUTS:
        ids = ids_of(tf.constant(TOKENS[:, cut:], tf.int32), tf.constant(TOKENS[:, :cut]))
        assert np.array_equal(ids, grams.ids(TOKENS)[:, cut:])


@EVERY
def test_in_a_pipeline(grams: er.Ngrams):
    ids = tf.data.Dataset.from_tensor_slices(TOKENS).map(grams.ids).batch(3)
    assert np.array_equal(next(iter(ids)), grams.ids(TOKENS))


@EVERY
def test_wrong_tokens(grams: er.Ngrams):
    tokens, expected = TOKENS.copy(), grams.ids(TOKENS)
    tokens[1, 6], tokens[2, 8] = 50, -1
    expected[1, 6 : 6 + max(grams.orders)] = expected[2, 8 : 8 + max(grams.orders)] = -1
    assert np.array_equal(grams.ids(tf.constant(tokens)), expected)


def test_what_are_no_integers():
    with pytest.raises(
        er.IdTypeError, match=r"^`tokens` of Ngrams\.ids must be integers .*: got string of shape \(1,\)"
    ):
        VALUES["own"].ids(tf.constant(["a"]))
    with pytest.raises(
        er.IdTypeError, match=r"^`history` of Ngrams\.ids must be integers .*: got float32 of shape \(1,\)"
    ):
        VALUES["own"].ids(tf.constant([3]), tf.constant([1.0]))
    for tokens in (keras.Input((None,), dtype="int64"), tf.ragged.constant([[1], [2, 3]])):
        with pytest.raises(
            er.IdTypeError, match=r"in sequences of one length\. In a Keras model, a layer's `call` does it"
        ):
            VALUES["own"].ids(tokens)


@keras.saving.register_keras_serializable("tests")
class Grams(keras.layers.Layer):
    """Ids of n-grams in a model, as a user writes it."""

    def __init__(self, grams: Any, **options: Any) -> None:
        super().__init__(**options)
        self.grams = grams if isinstance(grams, er.Ngrams) else er.Ngrams(**grams)

    def call(self, tokens: Any) -> Any:
        return self.grams.ids(tokens)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "grams": self.grams.describe()}


@pytest.mark.parametrize("name", ["own", "open"])
def test_a_model_trains_and_is_saved(name: str, tmp_path: Path):
    grams: Any = VALUES[name]
    tokens: Any = keras.Input((None,), dtype="int64")
    rows = erk.Embedding(grams.rows, 4)(Grams(grams)(tokens))
    memory = keras.layers.Reshape((-1, 4 * grams.ids_per_token))(rows)
    joined = keras.layers.Concatenate()([keras.layers.Embedding(50, 8)(tokens), memory])
    model = keras.Model(tokens, keras.layers.Dense(50)(joined))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(erk.optimizer(keras.optimizers.Adagrad(0.5)), loss)
    fitted: Any = model.fit(TOKENS[:, :-1], TOKENS[:, 1:], epochs=8, verbose="0")
    assert fitted.history["loss"][-1] < fitted.history["loss"][0] - 0.5
    model.save(tmp_path / "model.keras")
    loaded: Any = keras.saving.load_model(tmp_path / "model.keras")
    assert np.array_equal(loaded(TOKENS), model(TOKENS))
