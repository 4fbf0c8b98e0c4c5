"""`erk.Embedding`: whatever users do with a `keras.layers.Embedding`. Oracle: a Dense layer on one-hot ids."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import embedrock as er
import embedrock.keras as erk
from embedrock.errors import ArgumentError, IdError, IdTypeError, UnsupportedError
from embedrock.keras.layers.arguments import REFUSED, REFUSED_METHODS
from embedrock.table.options import LayerOptions, declared
from slow import slow

ROWS, DIM, COUNT = 20, 4, 48
RNG = np.random.default_rng(0)
WEIGHTS = RNG.standard_normal((ROWS, DIM)).astype(np.float32)
IDS = RNG.integers(0, ROWS, (2, COUNT, 3)) // RNG.integers(1, 5, (2, COUNT, 3))  # small ones are repeated most
TARGETS = RNG.standard_normal((COUNT, 1)).astype(np.float32)
SOME = np.array([[3, 3, 0], [1, 19, 0]])


def table_of(**options: Any) -> er.Table:
    return er.Table(ROWS, DIM, init=er.FromArray(WEIGHTS), **options)


def embedding(**options: Any) -> erk.Embedding:
    return erk.Embedding(table_of(), **options)


def pair_of(kind: str) -> tuple[Any, Any]:
    """Return two layers, or twice one, that look up in one table."""
    table = table_of()
    first = erk.Embedding(table)
    return first, erk.Embedding(table) if kind == "tied layers" else first


def one_hot_pair() -> tuple[Any, Any]:
    layer = keras.layers.Dense(DIM, use_bias=False)
    return layer, layer


def trained(pair: tuple[Any, Any], inputs: list[np.ndarray], optimizer: Any) -> None:
    """Train a model that looks up in two layers."""
    symbols = [keras.Input(each.shape[1:], dtype=each.dtype.name) for each in inputs]
    rows = [layer(symbol) for layer, symbol in zip(pair, symbols, strict=True)]
    if isinstance(pair[0], keras.layers.Dense):
        pair[0].set_weights([WEIGHTS])
    pooled = [keras.layers.GlobalAveragePooling1D()(each) for each in rows]
    out = keras.layers.Dense(1, kernel_initializer="ones")(keras.layers.Concatenate()(pooled))
    model: Any = keras.Model(symbols, out)
    model.compile(optimizer, "mse")
    model.fit(inputs, TARGETS, batch_size=16, epochs=2, shuffle=False, verbose=0)


OPTIMIZERS = {
    "sgd": (lambda: keras.optimizers.SGD(0.1), 5e-7),
    "momentum": (lambda: keras.optimizers.SGD(0.1, momentum=0.9), 1e-6),
    "adam": (lambda: keras.optimizers.Adam(0.01), 3e-6),  # whose square roots magnify what rounding made of a gradient
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("one layer twice", "sgd"), ("tied layers", "momentum")),
        *slow(
            ("one layer twice", "adam"),
            ("tied layers", "sgd"),
            ("one layer twice", "momentum"),
            ("tied layers", "adam"),
        ),
    ],
)
def test_a_table_used_twice_trains_as_one_dense_layer(kind: str, name: str):
    optimizer, bound = OPTIMIZERS[name]
    ours, theirs = pair_of(kind), one_hot_pair()
    trained(ours, list(IDS), erk.optimizer(optimizer()))
    trained(theirs, list(np.eye(ROWS, dtype=np.float32)[IDS]), optimizer())
    expected = theirs[0].get_weights()[0]
    assert np.abs(expected - WEIGHTS).max() > 0.04
    np.testing.assert_allclose(ours[0].table.lookup(np.arange(ROWS)), expected, rtol=0, atol=bound)
    assert ours[0].table.steps == 6


def subclassed(layer: Any) -> Any:
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.head = layer, keras.layers.Dense(1, kernel_initializer="ones")

        def call(self, inputs: Any) -> Any:
            return self.head(keras.ops.mean(self.rows(inputs), axis=1))

    return Model()


def sequential(layer: Any, *first: Any) -> Any:
    head = keras.layers.Dense(1, kernel_initializer="ones")
    return keras.Sequential([*first, layer, keras.layers.GlobalAveragePooling1D(), head])


MODELS: dict[str, Callable[[Any], Any]] = {
    "sequential": sequential,
    "sequential with an input": lambda layer: sequential(layer, keras.Input((3,), dtype="int64")),
    "subclassed": subclassed,
}


@pytest.mark.parametrize("eagerly", [False, *slow(True)])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_models_of_all_kinds_train_alike(make: Callable[[Any], Any], eagerly: bool):
    model, layer = make(layer := embedding()), layer
    model.compile(erk.optimizer(keras.optimizers.SGD(0.1)), "mse", run_eagerly=eagerly)
    model.fit(IDS[0], TARGETS, batch_size=16, shuffle=False, verbose=0)
    dense = keras.layers.Dense(DIM, use_bias=False)
    twin = sequential(dense, keras.Input((3, ROWS)))
    dense.set_weights([WEIGHTS])
    twin.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    twin.fit(np.eye(ROWS, dtype=np.float32)[IDS[0]], TARGETS, batch_size=16, shuffle=False, verbose=0)
    np.testing.assert_allclose(layer.table.lookup(np.arange(ROWS)), dense.get_weights()[0], rtol=0, atol=3e-7)
    assert model.predict(IDS[0], verbose=0).shape == (COUNT, 1)


def test_a_sequential_without_an_input_keeps_ids_that_no_float32_holds():
    layer = erk.Embedding(10**9, DIM)
    model = sequential(layer)
    model.compile(erk.optimizer("sgd"), "mse")
    model.fit(np.array([[2**24 + 1, 999_999_999]]), np.ones((1, 1)), verbose=0)
    assert sorted(layer.table.export()[0]) == [2**24 + 1, 999_999_999]
    assert keras.Sequential.from_config(model.get_config())(np.array([[999_999_999]])).shape == (1, 1)


def test_a_layer_may_be_built_by_a_function():
    layer = embedding()
    rows = tf.function(lambda ids: layer(ids))(tf.constant(SOME))
    np.testing.assert_array_equal(rows, WEIGHTS[SOME])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"])
def test_ids_of_any_integers(dtype: str):
    layer = embedding()
    np.testing.assert_array_equal(layer(SOME.astype(dtype)), WEIGHTS[SOME])


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 0), (1, 2, 3, 4)])
def test_ids_of_any_shape(shape: tuple[int, ...]):
    assert embedding()(np.ones(shape, np.int64)).shape == (*shape, DIM)
    assert embedding().compute_output_shape(shape) == (*shape, DIM)


def test_open_ids():
    rows = erk.Embedding(None, DIM)(np.array([-(2**63), -1, 2**63 - 1]))
    assert len(np.unique(rows, axis=0)) == 3


@pytest.mark.parametrize(("dtype", "named"), [("float32", "float32"), ("string", "string"), ("bool", "bool")])
def test_inputs_that_are_no_integers_are_refused_where_they_are_declared(dtype: str, named: str):
    with pytest.raises(IdTypeError, match=rf"ids for 'emb', .* must be integers, int32 or int64: got {named}\. \w+"):
        embedding(name="emb")(keras.Input((3,), dtype=dtype))


@pytest.mark.parametrize("make", [sequential, subclassed])
def test_floats_in_fit_are_refused(make: Callable[[Any], Any]):
    model = make(embedding())
    model.compile(erk.optimizer("sgd"), "mse")
    with pytest.raises(IdTypeError, match=r"got float32\. Pass integers, .* declare the input so: keras.Input\(shape"):
        model.fit(np.ones((2, 3)), np.ones((2, 1)), verbose=0)


def test_strings_name_their_remedy():
    with pytest.raises(IdTypeError, match=r"got string\. Put an erk\.Hashing\(\) before it"):
        embedding()(tf.constant(["a"]))
    for listed in (["a"], [b"a"]):
        with pytest.raises(IdTypeError, match=r"er\.hash_ids"):
            embedding()(listed)
    words = tf.constant(["a", "b"])
    layers = [
        keras.layers.StringLookup(vocabulary=["a", "b"]),
        keras.layers.Hashing(ROWS),
    ]
    for ids in layers:  # which the text names
        assert embedding()(ids(words)).shape == (2, DIM)


def test_ids_that_are_missing():
    layer = embedding(name="emb")
    with pytest.raises(
        IdTypeError, match=r"ids for 'emb'.* got dtype float32, nan at \[1, 0\] of ids of shape \(2, 2\)"
    ):
        layer(tf.constant([[1.0, 2.0], [np.nan, 3.0]]))
    with pytest.raises(
        IdTypeError, match=r"got dtype float32, 2.5 at \[0\].* That is no whole number: pass ids, not w"
    ):
        layer(tf.constant([2.5, 3.0]))
    with pytest.raises(IdTypeError, match=r"ids for 'emb'.* must be a tensor of integers: got None"):
        layer([np.array([1]), None])
    for nothing in ([], {}):
        with pytest.raises(ArgumentError, match=r"inputs of 'emb'.* must be a tensor of ids, or several: got"):
            layer(nothing)


def test_ids_outside_of_the_table():
    layer = embedding(name="emb")
    told = r"`ids` of 'emb', erk.Embedding\(20, \d\) must lie in \[0, 20\): got "
    with pytest.raises(IdError, match=told + r"20 at \[1\] of ids of shape \(2,\). For more rows, grow\(21\)"):
        layer(np.array([0, 20]))
    both = [np.array([[0]]), np.array([[1, 2], [3, 99]])]
    with pytest.raises(IdError, match=told + r"99 at \[1, 1\] of ids of shape \(2, 2\) of input 2 of 2"):
        layer(both)
    model = sequential(layer, keras.Input((3,), dtype="int64"))
    model.compile(erk.optimizer("sgd"), "mse")
    with pytest.raises(tf.errors.OpError, match=told + r"-1 at \[0, 2\] of ids of shape \(1, 3\)"):
        model.fit(np.array([[3, 4, -1]]), np.ones((1, 1)), verbose=0)
    np.testing.assert_array_equal(layer.table.lookup(np.arange(ROWS)), WEIGHTS)


@pytest.mark.parametrize("training", [True, False])
def test_ids_of_bags_outside_of_the_table(training: bool):
    told = r"`ids` of 'bag', erk.EmbeddingBag\(20, 4\) must lie in \[0, 20\): got 20 at "
    ids, ragged = np.array([[1, 2, 3], [0, 4, 20]]), tf.ragged.constant([[1], [], [2, 3, 20]], dtype=tf.int64)
    bag = erk.EmbeddingBag(20, 4, name="bag")
    with pytest.raises(IdError, match=told + r"\[2\] of bag 1. For more rows"):
        bag(ids, training=training)
    with pytest.raises(IdError, match=told + r"\[2\] of bag 2. For more rows"):
        bag(ragged, training=training)
    with pytest.raises(IdError, match=told + r"\[1\] of bag 1, padding not counted. For more rows"):
        erk.EmbeddingBag(bag.table, mask_zero=True, name="bag")(ids, training=training)


def test_hashes_of_64_bits():
    ids, layer = tf.constant([2**64 - 5, 3], tf.uint64), erk.Embedding(None, DIM)
    told = r"got uint64\. Hashes of 64 bits go by their bits into a layer with input_dim=None: (tf\.bitcast\(.*?\))\."
    with pytest.raises(IdTypeError, match=told) as caught:
        layer(ids)
    advice = re.search(told, str(caught.value))
    assert advice is not None
    np.testing.assert_array_equal(layer(eval(advice[1])), layer(np.array([-5, 3])))


def test_masks_reach_the_layers_that_follow():
    rows = embedding(mask_zero=True)(SOME)
    np.testing.assert_array_equal(rows._keras_mask, SOME != 0)
    ids = keras.Input((3,), dtype="int64")
    layer = embedding(mask_zero=True)
    model = keras.Model(ids, keras.layers.GlobalAveragePooling1D()(layer(ids)))
    np.testing.assert_allclose(model(SOME), WEIGHTS[SOME[:, :2]].mean(1), rtol=1e-6)
    lstm = keras.layers.LSTM(2)
    masked = keras.Model(ids, lstm(layer(ids)))
    np.testing.assert_allclose(masked(SOME), lstm(tf.constant(WEIGHTS[SOME[:, :2]])), rtol=1e-5, atol=1e-7)
    assert embedding().compute_mask(tf.constant(SOME)) is None


@pytest.mark.parametrize("when", ["made", "before building", "after building", "after training"])
def test_frozen_rows_stay_and_get_no_gradients(when: str):
    layer = embedding(trainable=when != "made")
    layer.trainable = when not in ("made", "before building")
    model = sequential(layer, keras.Input((3,), dtype="int64"))
    if when == "after training":
        model.compile(erk.optimizer("sgd"), "mse")
        model.fit(IDS[0], TARGETS, verbose=0)
        assert layer.table.steps == 2
    layer.trainable = False
    assert len(model.trainable_weights) == 2
    model.compile(erk.optimizer("sgd"), "mse")
    before = layer.table.lookup(np.arange(ROWS))
    model.fit(IDS[0], TARGETS, verbose=0)
    np.testing.assert_array_equal(layer.table.lookup(np.arange(ROWS)), before)
    assert not layer.handle.pending._arrivals


@pytest.mark.parametrize(
    ("policy", "out", "stored"),
    [
        ("mixed_float16", "float16", "float32"),
        ("mixed_bfloat16", "bfloat16", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float16", "float16", "float16"),
    ],
)
def test_dtypes(policy: str, out: str, stored: str):
    layer = erk.Embedding(ROWS, DIM, dtype=policy)
    assert layer.table.spec.dtype == stored
    assert layer(SOME).dtype.name == out
    assert layer(keras.Input((3,), dtype="int64")).dtype == out
    np.testing.assert_array_equal(layer(SOME), tf.cast(layer.table.lookup(SOME), out))


def test_mixed_precision_trains():
    layer = embedding(dtype="mixed_bfloat16")
    model = sequential(layer, keras.Input((3,), dtype="int64"))
    model.compile(erk.optimizer("sgd"), "mse")
    model.fit(IDS[0], TARGETS, verbose=0)
    assert layer.table.steps == 2


def test_time_distributed():
    ids = np.broadcast_to(SOME, (2, *SOME.shape))
    np.testing.assert_array_equal(keras.layers.TimeDistributed(embedding())(ids), WEIGHTS[ids])
    assert keras.layers.TimeDistributed(embedding())(keras.Input((5, 3), dtype="int64")).shape == (None, 5, 3, DIM)


def test_several_inputs_at_once():
    inputs = {"a": tf.constant(SOME), "b": [tf.constant([1, 2], tf.int32), tf.ragged.constant([[1], [], [2, 3]])]}
    layer = embedding(mask_zero=True)
    out = layer(inputs)
    np.testing.assert_array_equal(out["a"], WEIGHTS[SOME])
    np.testing.assert_array_equal(out["b"][0], WEIGHTS[[1, 2]])
    np.testing.assert_array_equal(out["b"][1].flat_values, WEIGHTS[[1, 2, 3]])
    np.testing.assert_array_equal(out["a"]._keras_mask, SOME != 0)
    symbols = {"a": keras.Input((3,), dtype="int64"), "b": keras.Input((None,), dtype="int32", ragged=True)}
    specs = layer(symbols)
    assert (specs["a"].shape, specs["a"].ragged) == ((None, 3, DIM), False)
    assert (specs["b"].shape, specs["b"].ragged) == ((None, None, DIM), True)
    assert layer.compute_output_shape([(2, 3), (None,)]) == [(2, 3, DIM), (None, DIM)]


def test_ragged_inputs_in_a_model():
    ids = keras.Input((None,), dtype="int64", ragged=True)
    model = keras.Model(ids, embedding()(ids))
    rows = model(tf.ragged.constant([[1, 2], [], [3]], dtype="int64"))
    np.testing.assert_array_equal(rows.flat_values, WEIGHTS[[1, 2, 3]])
    assert rows.row_lengths().numpy().tolist() == [2, 0, 1]


def test_rows_that_are_gathered_out_of_what_was_found_are_stepped():
    layer, ids = embedding(rule=er.SGD(lr=1.0)), tf.ragged.constant([[1, 2], [], [3]], dtype=tf.int64)

    def step():
        with tf.GradientTape() as tape:
            found = layer(ids)  # its gradients are slices
            loss = tf.reduce_sum(found.to_tensor()) + tf.reduce_sum(tf.gather(found.flat_values, [0, 0, 2]))
        optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)

    optimizer = erk.optimizer("sgd")
    step()
    tf.function(step)()
    moved = WEIGHTS[[1, 2, 3]] - layer.table.lookup([1, 2, 3])
    np.testing.assert_allclose(moved, np.broadcast_to([[6.0], [2.0], [4.0]], (3, DIM)), rtol=1e-5)


def test_config():
    layer = erk.Embedding(
        ROWS, DIM, "random_normal", mask_zero=True, rule=er.Adagrad(lr=0.3), seed=7, name="emb", dtype="bfloat16"
    )
    copy = erk.Embedding.from_config(layer.get_config())
    assert copy.get_config() == layer.get_config()
    np.testing.assert_array_equal(copy(SOME), layer(SOME))


def test_gradients_of_gradients_are_refused():
    layer = embedding()
    weights = tf.Variable(tf.ones(DIM))
    with tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(layer(SOME) * weights))
        number = tf.norm(tape.gradient(loss, layer.rows))
    with pytest.raises(er.EmbedrockError, match="the gradient of a gradient of rows cannot be computed"):
        outer.gradient(number, weights)


# ---------------------------------------------------------------- what else keras.layers.Embedding has


def test_the_page_says_what_becomes_of_every_argument_and_method():
    page = (Path(erk.__file__).parents[3] / "docs" / "keras.md").read_text()
    table = page.split("### Arguments and methods of `keras.layers.Embedding`")[1].split("\n\n")[1]
    told = set(re.findall(r"`(\w+)(?:\(\))?`", "".join(line.split(" | ")[0] for line in table.splitlines()[2:])))
    of_embedding = inspect.signature(keras.layers.Embedding.__init__).parameters.keys()
    of_layer = inspect.signature(keras.layers.Layer.__init__).parameters.keys()
    assert {*of_embedding, *of_layer} - {"self", "kwargs"} <= told
    own = {name for name, what in vars(keras.layers.Embedding).items() if callable(what) and not name.startswith("_")}
    as_ever = {"build", "call", "compute_mask", "compute_output_shape", "compute_output_spec", "from_config"}
    assert {"quantize", "enable_lora"} <= own
    assert own - as_ever - OF_KERAS_ITSELF <= told
    assert set(REFUSED) | set(REFUSED_METHODS) <= told  # and each is refused in these words
    for name, remedy in REFUSED.items():
        with pytest.raises(UnsupportedError, match=re.escape(f"`{name}` of erk.Embedding: {remedy}")):
            erk.Embedding(10, 2, **{name: 1})


# What Keras calls, not users; of them those that make a layer of a file are tested with saving.
OF_KERAS_ITSELF = {"get_config", "save_own_variables", "load_own_variables", "quantized_build", "quantized_call"}


@pytest.mark.parametrize("kind", [erk.Embedding, erk.EmbeddingBag])
@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ((1e9, 4), r"`input_dim` of erk\.{} must be a whole number from 1 .*: got 1000000000\.0\. None is for"),
        ((0, 4), r"`input_dim` of erk\.{} must be a whole number from 1 .*: got 0\. None"),
        ((9, 4.0), r"`output_dim` of erk\.{} must be a whole number from 1 .*: got 4\.0\.$"),
        ((9, None), r"`output_dim` of erk\.{} is missing"),
    ],
)
def test_sizes_that_are_refused_have_the_names_that_the_layer_gives_them(kind: Any, sizes: tuple[Any, Any], told: str):
    with pytest.raises(ArgumentError, match=told.format(kind.__name__)):
        kind(*sizes)
    assert kind(np.int64(9), np.int32(4)).input_dim == 9


def test_methods_that_are_refused():
    layer = embedding(name="rows")
    layer.build()
    with pytest.raises(UnsupportedError, match=r"quantize of 'rows', erk.Embedding\(20, 4\): use dtype=\"bfloat16\""):
        layer.quantize("int8")
    with pytest.raises(UnsupportedError, match=r"enable_lora of 'rows', .*: rows are trained themselves"):
        layer.enable_lora(2)
    model = keras.Sequential([keras.Input((3,), dtype="int64"), layer, keras.layers.Dense(8)])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model.quantize("int8")
    assert any("quantize of 'rows'" in str(each.message) for each in told)
    with pytest.raises(UnsupportedError, match=r"set_weights cannot set the rows of 'rows', .*layer\.table\.assign"):
        layer.set_weights([WEIGHTS])


def test_legacy_files_are_refused(tmp_path: Path):
    theirs, mine = (
        keras.Sequential([keras.Input((3,), dtype="int64"), made(ROWS, DIM, name="rows")])
        for made in (keras.layers.Embedding, erk.Embedding)
    )
    theirs.save(tmp_path / "theirs.h5")
    before = mine.layers[0].table.lookup(SOME)
    for by_name in (False, True):
        with pytest.raises(UnsupportedError, match=r"the rows of 'rows', .* the legacy \.h5 format.*from_pretrained"):
            mine.load_weights(tmp_path / "theirs.h5", by_name=by_name)
    np.testing.assert_array_equal(mine.layers[0].table.lookup(SOME), before)


def test_summaries_count_all_rows(capsys: pytest.CaptureFixture[str]):
    layer, ids = erk.Embedding(10**9, 64), keras.Input((3,), dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1)(layer(ids)))
    assert (layer.count_params(), model.count_params()) == (64 * 10**9, 64 * 10**9 + 65)
    model.summary()
    assert "Total params: 64,000,000,065 (238.42 GB)" in capsys.readouterr().out
    assert layer.rows.shape == (10**9, 64)
    model.compile(erk.optimizer(keras.optimizers.SGD(momentum=0.9)))
    model.optimizer.build(model.trainable_variables)
    assert sum(int(np.prod(v.shape)) for v in model.optimizer.variables) < 500  # to Keras itself it is small
    open_ids = erk.Embedding(None, 4)
    tied = keras.Sequential([keras.Input((3,), dtype="int64"), open_ids])
    tied.compile(erk.optimizer("sgd"), "mse")
    tied.fit(SOME, np.zeros((2, 3, 4)), verbose=0)
    assert tied.count_params() == 4 * len(np.unique(SOME))


def test_errors_of_programs_begin_with_ours():
    model = keras.Sequential([keras.Input((3,), dtype="int64"), embedding(name="rows"), keras.layers.Flatten()])
    model.compile(erk.optimizer("sgd"), "mse")
    steps = {"fit": lambda: model.fit(SOME + ROWS, np.zeros((2, 12)), verbose=0)}
    steps |= {"predict": lambda: model.predict(SOME + ROWS, verbose=0), "call": tf.function(lambda: model(SOME + ROWS))}
    for step in steps.values():
        with pytest.raises(tf.errors.UnknownError) as caught:
            step()
        sentence = "IdError: `ids` of 'rows', erk.Embedding(20, 4) must lie in [0, 20): got "
        before, ours, after = str(caught.value).partition(sentence)
        assert ours
        assert "File" not in before
        assert len(before) < 200
        assert len((ours + after).splitlines()) < 25
        assert str(caught.value).count("`ids`") == 2  # once at the end


def test_sparse_ids():
    layer, ids = embedding(), keras.Input((3,), dtype="int64", sparse=True)
    model = keras.Model(ids, keras.layers.Flatten()(layer(ids)))
    given = tf.sparse.from_dense(SOME)
    np.testing.assert_array_equal(layer(given), WEIGHTS[SOME])
    np.testing.assert_array_equal(model(given), WEIGHTS[SOME].reshape(2, -1))
    for masked in (given, ids):
        with pytest.raises(UnsupportedError, match=r"mask_zero=True of .* goes with dense and ragged ids: got sparse"):
            embedding(mask_zero=True)(masked)
    with pytest.raises(UnsupportedError, match=r"must be dense or ragged: got a SparseTensor.*from_sparse\(ids\)"):
        erk.EmbeddingBag(ROWS, DIM)(given)


def test_a_table_that_pytorch_made_is_found_at_its_path(tmp_path: Path):
    ert = pytest.importorskip("embedrock.torch")
    theirs = ert.Embedding(13, 3, path=tmp_path / "t.rock")
    first = theirs.table.lookup([5])
    theirs.table.commit()
    theirs.table.close()
    layer = erk.Embedding(13, 3, path=tmp_path / "t.rock")
    np.testing.assert_array_equal(layer(np.array([5])), first)
    layer.table.close()


def test_attributes_that_are_set_before_the_layer_is_built_count():
    layer = erk.Embedding(ROWS, 4, "ones")
    layer.embeddings_regularizer, layer.embeddings_constraint, layer.mask_zero = "l2", "non_neg", True
    layer(np.array([1, 1, 2]))
    assert float(layer.losses[0]) == pytest.approx(0.01 * 2 * 4)
    assert layer.handle.brought["embeddings_constraint"] is layer.embeddings_constraint
    assert layer.supports_masking
    assert layer.get_config()["embeddings_regularizer"] == keras.regularizers.serialize(layer.embeddings_regularizer)
    assert layer.get_config()["mask_zero"]
    bag = erk.EmbeddingBag(ROWS, 4, "ones")
    bag.mode = "mean"
    assert float(bag(np.array([[1, 2]]))[0, 0]) == 1.0
    assert bag.get_config()["mode"] == "mean"


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("embeddings_regularizer", "l2", "once the layer is built.*Set it before"),
        ("embeddings_constraint", "non_neg", "once the layer is built"),
        ("mask_zero", True, "once the layer is built"),
        ("mode", "mean", "once the layer is built"),
        ("embeddings_initializer", "zeros", r"its table was made with it. Give it to the layer, erk.EmbeddingBag\("),
        ("rule", er.Adam(), "its table was made with it"),
        ("embeddings", WEIGHTS, r"write them by layer.table.assign\(ids, values\)"),
    ],
)
def test_attributes_that_would_count_no_more_are_refused(name: str, value: Any, told: str):
    layer = erk.EmbeddingBag(ROWS, 4)
    layer.build()
    before = layer.get_config()
    with pytest.raises((ArgumentError, UnsupportedError), match=told):
        setattr(layer, name, value)
    assert layer.get_config() == before


def test_attributes_that_cannot_be_are_refused():
    layer = erk.EmbeddingBag(ROWS, 4)
    for name in declared(LayerOptions):
        with pytest.raises((ArgumentError, AttributeError), match=r"its table was made with it|'path'"):
            setattr(layer, name, "other")
    for name in ("embeddings_regularizer", "embeddings_constraint", "mode"):
        with pytest.raises(ArgumentError, match=f"`{name}` of erk.EmbeddingBag must be"):
            setattr(layer, name, "l3")
    layer.dtype_policy = "bfloat16"
    with pytest.raises(ArgumentError, match=r"set to keep variables in bfloat16, after its table.*float32"):
        layer.build()
