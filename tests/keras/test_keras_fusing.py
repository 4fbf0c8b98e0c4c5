"""Several layers in one call of the host: how many calls there are, and that nothing else changes."""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import embedrock as er
import embedrock.keras as erk
from embedrock.errors import ArgumentError, IdTypeError, UnsupportedError
from embedrock.keras.export import export

ROWS, DIM, COUNT = 20, 4, 32
RNG = np.random.default_rng(0)
WEIGHTS = RNG.standard_normal((ROWS, DIM)).astype(np.float32)
INPUTS = {
    "user": RNG.integers(0, ROWS, COUNT),
    "clicks": RNG.integers(0, ROWS, (COUNT, 3)),
    "genres": RNG.integers(0, ROWS, (COUNT, 5)),
    "factors": RNG.uniform(0.5, 2, (COUNT, 5)).astype(np.float32),
}
TARGETS = RNG.standard_normal((COUNT, 1)).astype(np.float32)


def table_of() -> er.Table:
    return er.Table(ROWS, DIM, init=er.FromArray(WEIGHTS))


def symbols() -> dict[str, Any]:
    return {name: keras.Input(each.shape[1:], dtype=each.dtype.name, name=name) for name, each in INPUTS.items()}


def tensors() -> dict[str, Any]:
    return {name: tf.constant(each) for name, each in INPUTS.items()}


def layers_on(tables: list[er.Table]) -> dict[str, Any]:
    """Return layers of all kinds, two of them on one table."""
    first, second, third, fourth = tables
    return {
        "user": erk.Embedding(first),
        "clicks": erk.Embedding(second, mask_zero=True),
        "genres": erk.EmbeddingBag(second, mode="mean", mask_zero=True),
        "weighted": erk.EmbeddingBag(third, mode="sqrtn"),
        "best": erk.EmbeddingBag(second, mode="max"),
        "worst": erk.EmbeddingBag(fourth, mode="max"),
    }


def plain_layers() -> dict[str, Any]:
    """Return such layers with tables of their own."""
    return {
        "user": erk.Embedding(ROWS, DIM),
        "clicks": erk.Embedding(ROWS, DIM, mask_zero=True),
        "genres": erk.EmbeddingBag(ROWS, DIM, mode="mean", mask_zero=True),
        "weighted": erk.EmbeddingBag(ROWS, DIM, mode="sqrtn"),
        "best": erk.EmbeddingBag(ROWS, DIM, mode="max"),
        "worst": erk.EmbeddingBag(ROWS, DIM, mode="max"),
    }


def separate(layers: dict[str, Any]) -> Any:
    """Return a model that calls each layer by itself, and one of them twice."""
    given = symbols()
    clicks = keras.layers.GlobalAveragePooling1D()(layers["clicks"](given["clicks"]))
    parts = [
        layers["user"](given["user"]),
        layers["user"](keras.ops.mod(given["user"] + 1, ROWS)),
        clicks,
        layers["genres"](given["genres"]),
        layers["weighted"](given["genres"], weights=given["factors"]),
        layers["best"](given["genres"]),
        layers["worst"](given["clicks"]),
    ]
    head = keras.layers.Dense(1, kernel_initializer="ones")
    return keras.Model(given, head(keras.layers.Concatenate()(parts)), name="rows")


def host_calls(model: Any, *, trains: bool) -> int:
    """Return how many calls of the host there are in a step of a compiled model, or in its forward pass."""
    data = tensors(), tf.constant(TARGETS)
    function = model.train_step if trains else lambda batch: model(batch[0], training=False)
    graph = tf.function(function).get_concrete_function(data).graph.as_graph_def()
    nodes = [*graph.node, *(node for part in graph.library.function for node in part.node_def)]
    return sum(node.op in ("EagerPyFunc", "PyFunc", "PyFuncStateless") for node in nodes)


def compiled(model: Any) -> Any:
    model.compile(erk.optimizer(keras.optimizers.SGD(0.05)), "mse")
    return model


def test_a_fused_model_is_the_same_in_three_calls_of_the_host():
    ours, theirs = [[table_of() for _ in range(4)] for _ in range(2)]
    fused, model = erk.fuse(separate(layers_on(ours))), separate(layers_on(theirs))
    np.testing.assert_array_equal(fused(tensors()), model(tensors()))
    assert (fused.name, fused.count_params()) == (model.name, model.count_params())
    for each in (fused, model):
        compiled(each).fit(INPUTS, TARGETS, batch_size=8, epochs=2, shuffle=False, verbose=0)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.steps == other.steps == 8
        assert np.abs(mine.lookup(np.arange(ROWS)) - WEIGHTS).max() > 0.01
        np.testing.assert_allclose(mine.lookup(np.arange(ROWS)), other.lookup(np.arange(ROWS)), rtol=0, atol=1e-6)
    assert (host_calls(fused, trains=False), host_calls(fused, trains=True)) == (1, 3)
    assert (host_calls(model, trains=False), host_calls(model, trains=True)) == (7, 15)


def test_a_fused_model_shares_its_layers():
    layers = layers_on([table_of() for _ in range(4)])
    model = separate(layers)
    fused = compiled(erk.fuse(model))
    fused.fit(INPUTS, TARGETS, verbose=0)
    np.testing.assert_array_equal(model(tensors()), fused(tensors()))
    assert {id(variable) for variable in model.weights} == {id(variable) for variable in fused.weights}


def test_a_fused_model_may_keep_lookups_that_need_others():
    first, second = erk.Embedding(table_of()), erk.Embedding(table_of())
    ids = keras.Input((3,), dtype="int64")
    best = keras.ops.argmax(first(ids), axis=-1)
    model = keras.Model(ids, [first(ids), second(best), second(ids)])
    fused = erk.fuse(model)
    batch = tf.constant(INPUTS["clicks"])
    for mine, other in zip(fused(batch), model(batch), strict=True):
        np.testing.assert_array_equal(mine, other)
    assert sum(isinstance(layer, erk.EmbeddingCollection) for layer in fused.layers) == 1


def test_what_needs_no_fusing_stays():
    ids = keras.Input((3,), dtype="int64")
    for model in (keras.Model(ids, erk.Embedding(table_of())(ids)), keras.Sequential([ids, erk.Embedding(table_of())])):
        assert erk.fuse(model) is model


def test_what_cannot_be_fused():
    class Model(keras.Model):
        def call(self, inputs: Any) -> Any:
            return inputs

    for given in (Model(), "model"):
        with pytest.raises(UnsupportedError, match=r"must be given a functional model.* call one erk.EmbeddingColl"):
            erk.fuse(given)


def collection() -> erk.EmbeddingCollection:
    layers = layers_on([table_of() for _ in range(4)])
    names = ("user", "clicks", "genres", "weighted")
    return erk.EmbeddingCollection({name: layers[name] for name in names})


def of_collection(given: dict[str, Any]) -> dict[str, Any]:
    return {**{name: given[name] for name in ("user", "clicks", "genres")}, "weighted": given["genres"]}


def test_a_collection_gives_what_its_layers_give():
    features = collection()
    out = features(of_collection(tensors()), weights={"weighted": tensors()["factors"]})
    for name, layer in features.embeddings.items():
        more = {"weights": tensors()["factors"]} if name == "weighted" else {}
        np.testing.assert_array_equal(out[name], layer(of_collection(tensors())[name], **more))
    np.testing.assert_array_equal(out["clicks"]._keras_mask, INPUTS["clicks"] != 0)
    assert not hasattr(out["user"], "_keras_mask")


def test_a_collection_in_models():
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.head = collection(), keras.layers.Dense(1)

        def call(self, inputs: Any) -> Any:
            rows = self.features(of_collection(inputs), weights={"weighted": inputs["factors"]})
            rows["clicks"] = keras.ops.mean(rows["clicks"], axis=1)
            return self.head(keras.ops.concatenate(list(rows.values()), axis=-1))

    subclassed = Model()
    features, given = collection(), symbols()
    rows = features(of_collection(given), weights={"weighted": given["factors"]})
    assert {name: each.shape for name, each in rows.items()} == {
        "user": (None, DIM),
        "clicks": (None, 3, DIM),
        "genres": (None, DIM),
        "weighted": (None, DIM),
    }
    parts = [rows["user"], keras.layers.GlobalAveragePooling1D()(rows["clicks"]), rows["genres"], rows["weighted"]]
    functional = keras.Model(given, keras.layers.Dense(1)(keras.layers.Concatenate()(parts)))
    models: list[Any] = [subclassed, functional]
    for model in models:
        losses = compiled(model).fit(INPUTS, TARGETS, epochs=8, batch_size=8, verbose=0).history["loss"]
        assert losses[-1] < losses[0]
        assert host_calls(model, trains=True) == 3


def test_a_frozen_layer_of_a_collection_gets_no_gradients():
    features = collection()
    features.embeddings["user"].trainable = False
    features.embeddings["weighted"].trainable = False
    given = symbols()
    rows = features(of_collection(given), weights={"weighted": keras.layers.Dense(5)(given["factors"])})
    parts = [rows["user"], keras.layers.GlobalAveragePooling1D()(rows["clicks"]), rows["weighted"], rows["genres"]]
    model = compiled(keras.Model(given, keras.layers.Dense(1)(keras.layers.Concatenate()(parts))))
    kernel: Any = next(layer for layer in model.layers if isinstance(layer, keras.layers.Dense)).kernel
    before = np.array(kernel)
    model.fit(INPUTS, TARGETS, verbose=0)
    assert [layer.table.steps for layer in features.embeddings.values()] == [0, 1, 1, 0]
    assert all(not layer.handle.pending._arrivals for layer in features.embeddings.values())
    assert np.abs(np.array(kernel) - before).max() > 0  # the weights of bags get theirs all the same


def test_config():
    layer = erk.Embedding(ROWS, DIM, name="user")
    features = erk.EmbeddingCollection({"a": layer, "bag": erk.EmbeddingBag(ROWS, DIM), "b": layer}, name="features")
    copy = erk.EmbeddingCollection.from_config(json.loads(json.dumps(features.get_config())))
    assert json.dumps(copy.get_config()) == json.dumps(features.get_config())
    assert copy.embeddings["a"] is copy.embeddings["b"]
    assert isinstance(copy.embeddings["bag"], erk.EmbeddingBag)


def test_saving(tmp_path: Any):
    fused = compiled(erk.fuse(separate(plain_layers())))
    fused.fit(INPUTS, TARGETS, verbose=0)
    fused.save(tmp_path / "model.keras")
    loaded: Any = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(tensors()), fused(tensors()))


def test_what_a_collection_refuses():
    features = collection()
    with pytest.raises(
        ArgumentError, match=r"must be a dict of 'user', 'clicks', 'genres', 'weighted': got a dict of 'u'\."
    ):
        features({"u": tf.constant([1])})
    with pytest.raises(ArgumentError, match=r"`weights` of .* must be a dict of some of .*: got a dict of 'other'"):
        features(of_collection(tensors()), weights={"other": tf.ones(1)})
    layer = erk.Embedding(ROWS, DIM)
    wrong: list[Any] = [{"a": keras.layers.Dense(1)}, {}, [layer], {3: layer}]
    for given in wrong:
        with pytest.raises(ArgumentError, match=r"must be a dict from names to layers, .*, at least one: got [\[{]"):
            erk.EmbeddingCollection(given)
    with pytest.raises(IdTypeError, match="got float32"):
        features({**of_collection(symbols()), "user": keras.Input(())})


def test_an_exported_model_gives_the_same(tmp_path: Any):
    model = erk.fuse(separate(layers_on([table_of() for _ in range(4)])))
    export(model, tmp_path / "served")
    served = tf.saved_model.load(str(tmp_path / "served"))
    np.testing.assert_allclose(served.serve(tensors()), model(tensors()), rtol=1e-5, atol=1e-5)
