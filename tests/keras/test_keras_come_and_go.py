"""Layers of Keras whose rows come and go: files of models have who has a record."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")

import embedrock as er  # noqa: E402
import embedrock.keras as erk  # noqa: E402
from slow import slow  # noqa: E402

POLICIES = {"admission": er.Admission(2, within=40), "eviction": er.Eviction(max_rows=50, by="recency", keep=[3])}


def test_a_file_of_a_model_has_who_has_a_record(tmp_path: Path):
    rows = erk.Embedding(None, 4, seed=0, **POLICIES)
    model = keras.Sequential([keras.Input((3,), dtype="int64"), rows, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(erk.optimizer("sgd"), "mse")
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 200, (160, 3)), rng.random((160, 1))
    history = model.fit(x, y, batch_size=16, verbose=0, callbacks=[erk.TableStats()])
    assert history.history["tables/evicted"][-1] == rows.table.stats()["evicted"] > 0
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras").layers[0]
    assert again.table.spec.admission == POLICIES["admission"]
    for each in (again, rows):
        each.table.update([1000, 3], np.ones((2, 4), np.float32))
        each.table.update([1000, 3], np.ones((2, 4), np.float32))
    for got, wanted in zip(again.table.export(), rows.table.export(), strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert again.table.stats()["admitted"] == rows.table.stats()["admitted"]


@pytest.mark.parametrize("default", ["shared", *slow("zeros")])
def test_what_is_served_reads_rows_without_a_record_as_the_layer_does(default: str, tmp_path: Path):
    layer = erk.Embedding(None, 2, seed=0, admission=er.Admission(2, default=default))
    model = keras.Sequential([keras.Input((1,), dtype="int64"), layer, keras.layers.Dense(1)])
    model.compile(erk.optimizer(keras.optimizers.SGD(0.1)), "mse")
    for ids in ([[1], [2]], [[2], [3]]):
        model.train_on_batch(np.array(ids), np.ones((2, 1, 1)))
    assert layer.table.export()[0].tolist() == [2]
    ids = np.array([[1], [2], [99]])
    erk.export(model, tmp_path / "served")
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again.predict(ids, verbose=0), model.predict(ids, verbose=0))
    served = tf.saved_model.load(str(tmp_path / "served"))
    np.testing.assert_allclose(served.serve(ids), model(ids), rtol=1e-6)
    assert (layer.table.lookup([99]) != 0).all() == (default == "shared")


def test_a_default_row_does_not_go_with_sharded():
    with pytest.raises(
        er.UnsupportedError, match=r"`admission` of erk.Embedding with default='shared' does not go with"
    ):
        erk.Embedding(None, 4, sharded=True, admission=er.Admission(2, default="shared"))
    layer = erk.Embedding(None, 4, sharded=True, admission=er.Admission(2), eviction=er.Eviction(max_rows=999))
    assert layer.table.spec.segments == 256


def test_a_constraint_gives_nobody_a_record():
    unit = keras.constraints.UnitNorm(axis=1)
    layer = erk.Embedding(9, 2, "ones", admission=er.Admission(min_count=2), embeddings_constraint=unit)
    model = keras.Sequential([keras.Input((1,), dtype="int64"), layer, keras.layers.Dense(1)])
    model.compile(erk.optimizer(keras.optimizers.SGD(0.1)), "mse")
    first, both = np.array([[1], [2]]), np.array([[2], [3]])
    model.train_on_batch(first, np.zeros((2, 1, 1)))
    assert layer.table.stats()["rows_touched"] == 0
    model.train_on_batch(both, np.zeros((2, 1, 1)))
    assert layer.table.stats()["rows_touched"] == layer.table.stats()["admitted"] == 1
    rows = layer.table.lookup(np.arange(9))
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), [*[2**0.5] * 2, 1, *[2**0.5] * 6], rtol=1e-6)
