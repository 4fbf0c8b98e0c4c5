"""`erk.export`: a SavedModel that needs nothing of ours. What Keras and TensorFlow would export is refused."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from workers import run

import embedrock as er
import embedrock.keras as erk
from embedrock.errors import ArgumentError, UnsupportedError
from slow import slow

ROWS = 10**9

# Runs where `import embedrock` and `import keras` fail: what a SavedModel says of inputs must be what the model said.
COMPARE = """
import sys
sys.modules["embedrock"] = sys.modules["keras"] = None
import pickle, numpy as np, tensorflow as tf
for folder in sys.argv[1:]:
    inputs, outputs = pickle.load(open(folder + "/example", "rb"))
    served = tf.saved_model.load(folder)
    for call in (served.serve, lambda x: served.signatures["serving_default"](**x)):
        got = call(tf.nest.map_structure(tf.constant, inputs))
        tf.nest.map_structure(np.testing.assert_array_equal, tf.nest.map_structure(np.asarray, got), outputs)
    print(folder, "is right")
"""


def same(got, want):
    tf.nest.map_structure(lambda one, other: np.testing.assert_array_equal(one, other), got, want)
    return True


def served_as_called(model, folder, inputs, **options):
    """Export, load and compare with the model, in this process."""
    erk.export(model, folder, **options)
    served = tf.saved_model.load(str(folder))
    return same(served.serve(inputs), model(inputs))


def two_tables():
    users, names = keras.Input((3,), dtype="int64", name="users"), keras.Input((2,), dtype="string", name="names")
    embed, other = erk.Embedding(ROWS, 8), erk.Embedding(None, 4, dtype="bfloat16", name="names_rows")
    words = keras.layers.StringLookup(vocabulary=["a", "b"])(names)
    parts = [keras.layers.Flatten()(rows) for rows in (embed(users), other(words), embed(words))]
    joined = keras.layers.BatchNormalization()(
        keras.layers.Concatenate()([keras.ops.cast(p, "float32") for p in parts])
    )
    outputs = keras.layers.Dense(2)(keras.layers.Dropout(0.5)(joined))
    return keras.Model({"users": users, "names": names}, {"score": outputs})


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.rows = [erk.Embedding(ROWS, 8)]
        self.head = keras.layers.Dense(1)

    def call(self, inputs):
        return self.head(self.rows[0](inputs))


IDS = np.array([[1, 2, 3], [4, ROWS - 1, 3]])


def trained():
    model = keras.Sequential([keras.Input((3,), dtype="int64"), erk.Embedding(ROWS, 8), keras.layers.Dense(1)])
    model.compile(optimizer=erk.optimizer("sgd"), loss="mse")
    model.train_on_batch(IDS, np.ones((2, 3, 1), np.float32))
    return model


def test_a_process_without_embedrock_and_keras_serves_the_model(tmp_path):
    model = two_tables()
    model.compile(optimizer=erk.optimizer("sgd"), loss="mse")
    example = {"users": IDS, "names": np.array([["a", "?"], ["b", "b"]])}
    inputs = tf.nest.map_structure(tf.constant, example)
    model.train_on_batch(inputs, {"score": np.ones((2, 2), np.float32)})
    outputs = tf.nest.map_structure(np.asarray, model(inputs))
    erk.export(model, tmp_path / "1")
    (tmp_path / "1" / "example").write_bytes(pickle.dumps((example, outputs)))
    command = [sys.executable, "-c", COMPARE, str(tmp_path / "1")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "is right" in done.stdout


def test_a_model_is_served_as_it_was_when_it_was_exported_and_trains_on(tmp_path):
    model = trained()
    erk.export(model, tmp_path / "1")
    before = model(IDS).numpy()
    model.train_on_batch(IDS, np.ones((2, 3, 1), np.float32))
    served = tf.saved_model.load(str(tmp_path / "1"))
    assert same(served.serve(IDS), before)
    assert not np.array_equal(model(IDS), before)
    assert served_as_called(model, tmp_path / "2", tf.constant(IDS), whole_bytes=1)


def test_subclassed_models_are_told_their_inputs(tmp_path):
    model = Subclassed()
    model(tf.constant(IDS))
    with pytest.raises(ArgumentError, match=r"`input_signature` of erk.export must be given .*TensorSpec"):
        erk.export(model, tmp_path / "1")
    signature = [tf.TensorSpec((None, None), tf.int64, name="ids")]
    assert served_as_called(model, tmp_path / "1", tf.constant(IDS), input_signature=signature)
    served = tf.saved_model.load(str(tmp_path / "1"))
    assert list(served.signatures["serve"].structured_input_signature[1]) == ["ids"]


def test_ragged_ids(tmp_path):
    ids = keras.Input((None,), dtype="int64", ragged=True)
    pooled = keras.layers.Lambda(lambda rows: tf.reduce_sum(rows, 1))(erk.Embedding(50, 4)(ids))
    assert served_as_called(keras.Model(ids, pooled), tmp_path / "1", tf.ragged.constant([[1, 2], [], [3]], tf.int64))


@pytest.mark.parametrize(
    ("mask_zero", "mode"),
    [
        *((True, "mean"), (False, "max")),
        *slow((False, "sum"), (False, "sqrtn"), (True, "max"), (True, "sum"), (False, "mean"), (True, "sqrtn")),
    ],
)
def test_bags(tmp_path, mode, mask_zero):
    bag = erk.EmbeddingBag(100, 5, mask_zero=mask_zero, mode=mode)
    dense, ragged = keras.Input((7,), dtype="int64"), keras.Input((None,), dtype="int64", ragged=True)
    ids = np.random.default_rng(0).integers(0, 100, (3, 7)) * [[1], [0], [1]]
    lists = tf.ragged.constant([[3, 0, 3, 4], [], [99]], tf.int64)
    assert served_as_called(
        keras.Model([dense, ragged], bag([dense, ragged])), tmp_path / "1", [tf.constant(ids), lists]
    )


def test_weighted_bags(tmp_path):
    ids, weights = keras.Input((4,), dtype="int32"), keras.Input((4,))
    model = keras.Model([ids, weights], erk.EmbeddingBag(100, 5, mode="mean")(ids, weights=weights))
    rng = np.random.default_rng(0)
    inputs = [tf.constant(rng.integers(0, 100, (3, 4)), tf.int32), tf.constant(rng.random((3, 4)), tf.float32)]
    assert served_as_called(model, tmp_path / "1", inputs)


def test_layers_that_are_looked_up_together(tmp_path):
    model = two_tables()
    inputs = {"users": tf.constant(IDS), "names": tf.constant([["a", "?"], ["b", "b"]])}
    assert served_as_called(erk.fuse(model), tmp_path / "1", inputs)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, tf.bfloat16.as_numpy_dtype])
def test_pretrained_rows(tmp_path, dtype):
    weights = np.random.default_rng(0).random((50, 4)).astype(dtype)
    model = keras.Sequential([keras.Input((3,), dtype="int64"), erk.Embedding.from_pretrained(weights)])
    assert served_as_called(model, tmp_path / "1", tf.constant(IDS % 50), whole_bytes=1)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float16"])
def test_other_precisions(tmp_path, policy):
    ids = keras.Input((3,), dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1, dtype=policy)(erk.Embedding(50, 4, dtype=policy)(ids)))
    assert served_as_called(model, tmp_path / "1", tf.constant(IDS % 50))


def test_a_model_of_several_replicas(tmp_path):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,), dtype="int64"), erk.Embedding(50, 4), keras.layers.Dense(1)])
    assert served_as_called(model, tmp_path / "1", tf.constant(IDS % 50))


def test_ids_out_of_range_fail_as_in_the_table(tmp_path):
    model = keras.Sequential([keras.Input((3,), dtype="int64"), erk.Embedding(50, 4, name="users")])
    erk.export(model, tmp_path / "1")
    served = tf.saved_model.load(str(tmp_path / "1"))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"users.*must lie in \[0, 50\): got.*\[50\].*\[1\]"):
        served.serve(tf.constant([[1, 50, 3]], tf.int64))


def test_a_layer_of_a_table_made_from_an_array(tmp_path):
    array = np.random.default_rng(0).random((50, 4), np.float32)
    layer = erk.Embedding(er.Table(50, 4, init=er.FromArray(array)))
    model = keras.Sequential([keras.Input((3,), dtype="int64"), layer])
    erk.export(model, tmp_path / "1", whole_bytes=1)
    served = tf.saved_model.load(str(tmp_path / "1"))
    assert same(served.serve(tf.constant(IDS % 50)), array[IDS % 50])


# ------------------------------------------------------------ what cannot be exported


def test_what_is_no_built_model_is_refused(tmp_path):
    for model, got in ((Subclassed(), "not built. Call it once"), (keras.layers.Dense(1), "<Dense")):
        with pytest.raises(ArgumentError, match=f"must be a Keras model that is built: got.*{got}"):
            erk.export(model, tmp_path / "1")


def test_a_folder_with_something_in_it_is_refused_and_left_alone(tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "file").touch()
    with pytest.raises(ArgumentError, match=r"`folder` of erk.export must be a new folder"):
        erk.export(trained(), tmp_path / "1")
    assert [path.name for path in tmp_path.rglob("*")] == ["1", "file"]


class Hidden(keras.Model):
    def __init__(self):
        super().__init__()
        self.head, layer = keras.layers.Dense(1), erk.Embedding(50, 4)
        self.look_up = lambda ids: layer(ids)

    def call(self, inputs):
        return self.head(self.look_up(inputs))


class CallsPython(keras.Model):
    def __init__(self):
        super().__init__()
        self.rows = erk.Embedding(50, 4)

    def call(self, inputs):
        rows = self.rows(inputs)
        return tf.ensure_shape(tf.numpy_function(lambda x: 2 * x, [rows], tf.float32), rows.shape)


class TracedBefore(keras.Model):
    def __init__(self):
        super().__init__()
        self.rows = erk.Embedding(50, 4)
        self.rows.build()
        self.look_up = tf.function(lambda ids: self.rows(ids), input_signature=[tf.TensorSpec((None, 3), tf.int64)])

    def call(self, inputs):
        return self.look_up(inputs)


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (Hidden, ArgumentError, "is looked up by the model that is exported, but by none of its layers. Assign"),
        (CallsPython, UnsupportedError, "its forward pass calls Python, which no other process has"),
        (TracedBefore, UnsupportedError, "a tf.function of its own was traced earlier with lookups in it"),
    ],
)
def test_what_would_be_dead_elsewhere_is_refused_and_leaves_nothing(tmp_path, kind, error, message):
    model = kind()
    model(tf.constant(IDS % 50))
    with pytest.raises(error, match=message):
        erk.export(model, tmp_path / "1", input_signature=[tf.TensorSpec((None, 3), tf.int64)])
    assert not list(tmp_path.iterdir())


def by_archive(model, folder):
    archive: Any = keras.export.ExportArchive()
    archive.add_endpoint("serve", lambda ids: model(ids), [tf.TensorSpec((None, 3), tf.int64)])
    archive.write_out(folder, verbose=False)


def as_part(model, folder):
    module: Any = tf.Module()
    module.serve = tf.function(lambda ids: model(ids), input_signature=[tf.TensorSpec((None, 3), tf.int64)])
    module.weights = [variable.value for variable in model.variables]
    tf.saved_model.save(module, folder)


PLAIN = {
    "model.export": lambda model, folder: model.export(folder, verbose=False),
    "litert": lambda model, folder: model.export(f"{folder}.tflite", format="litert", verbose=False),
    "tf.saved_model.save": tf.saved_model.save,
    "ExportArchive": by_archive,
    "tf.Module": as_part,
}


@pytest.mark.parametrize(
    ("kind", "plain"),
    [(trained, name) for name in PLAIN] + [(Subclassed, name) for name in ("ExportArchive", "tf.Module")],
)
def test_plain_exports_say_what_to_do(tmp_path, kind, plain):
    model = kind()
    before = model(tf.constant(IDS)).numpy()
    with pytest.raises(UnsupportedError, match=r"Use erk.export\(model, folder\)"):
        PLAIN[plain](model, str(tmp_path / "1"))
    assert same(model(tf.constant(IDS)), before)
    assert not list(tmp_path.iterdir())


def test_checkpoints_of_tensorflow_are_not_refused(tmp_path):
    model, table = on_disk(tmp_path)
    assert tf.train.Checkpoint(model=model).save(str(tmp_path / "1"))
    table.close()


# ------------------------------------------------------------ exports that depend on Embedrock


def on_disk(folder):
    ids = keras.Input((3,), dtype="int64")
    rows = erk.Embedding(ROWS, 8, path=str(folder / "users.rock"), memory="1MiB")
    model = keras.Model(ids, keras.layers.Dense(1)(rows(ids)))
    model.compile(optimizer=erk.optimizer("sgd"), loss="mse")
    model.train_on_batch(IDS, np.ones((2, 3, 1), np.float32))
    return model, rows.table


def loaded(folder, ids):
    return erk.load_model(f"{folder}/model.keras", mode="r")(ids).numpy()


def test_an_export_that_depends_on_embedrock_reads_its_commit_while_the_table_is_trained(tmp_path):
    model, table = on_disk(tmp_path)
    erk.export(model, tmp_path / "1", dependency="embedrock")
    before = model(IDS).numpy()
    for _ in range(4):  # more commits than the table keeps
        model.train_on_batch(IDS, np.ones((2, 3, 1), np.float32))
        table.commit()
    (elsewhere,) = run(loaded, tmp_path / "1", IDS, workers=1)
    assert same(elsewhere, before)
    assert not np.array_equal(model(IDS), before)
    table.close()


def test_an_export_that_depends_on_embedrock_has_the_rows_of_tables_in_ram(tmp_path):
    model = trained()
    erk.export(model, tmp_path / "1", dependency="embedrock")
    assert same(erk.load_model(tmp_path / "1" / "model.keras", mode="r")(IDS), model(IDS))


def test_options_that_would_do_nothing_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match=r"`dependency` of erk.export must be"):
        erk.export(trained(), tmp_path / "1", dependency="torch")
    with pytest.raises(ArgumentError, match=r"`whole_bytes` of erk.export cannot go with dependency"):
        erk.export(trained(), tmp_path / "1", dependency="embedrock", whole_bytes=1)
