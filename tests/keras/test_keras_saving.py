"""Saving and loading by each of Keras' and TensorFlow's ways: rows come back to the bit, or an error comes first."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import os
import pickle
import shutil
import warnings
import zipfile
from typing import Any

import golden_model
import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
import workers

import embedrock as er
import embedrock.keras as erk
from embedrock.errors import ArgumentError, TableLockedError, UnsupportedError
from embedrock.keras import callers
from embedrock.keras.saving.loading import load_model
from embedrock.table.options import LayerOptions, declared
from embedrock.table.storage import UncommittedWarning
from slow import slow

ROWS, DIM = 50, 4
IDS = np.random.default_rng(0).integers(0, ROWS, (32, 3))
Y = np.random.default_rng(1).standard_normal((32, 1)).astype(np.float32)
ALL = np.arange(ROWS)


# Tables end here as they are in the middle of things.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is closed with changes since:embedrock.table.storage.UncommittedWarning"
)


def make_model(optimizer="adam", **options):
    keras.utils.set_random_seed(1)
    layer = erk.Embedding(ROWS, DIM, **options)
    model = keras.Sequential([keras.Input((3,), dtype="int64"), layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    if optimizer is not None:
        model.compile(
            erk.optimizer(optimizer), "mse", run_eagerly=True
        )  # to trace programs would take most of the time
    return model


def train(model, epochs=1):
    """Do what `fit` does, in a tenth of the time."""
    for _ in range(epochs):
        for start in range(0, len(IDS), 16):
            model.train_on_batch(IDS[start : start + 16], Y[start : start + 16])


def fit(model, epochs=1, **more):
    return model.fit(IDS, Y, batch_size=16, shuffle=False, epochs=epochs, verbose=0, **more)


def outputs(model):
    return np.asarray(model(IDS))


def table_of(model):
    return model.layers[0].table


def load(file, *more) -> Any:
    return keras.models.load_model(file, *more)


def names_in(table):
    return [commit["name"] for commit in table.commits() if commit["name"] is not None]


def assert_same(model, other):
    """Raise if two models differ in what they predict, their rows or their optimizers."""
    np.testing.assert_array_equal(outputs(model), outputs(other))
    np.testing.assert_array_equal(table_of(model).lookup(ALL), table_of(other).lookup(ALL))
    for mine, others in zip(model.optimizer.variables, other.optimizer.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), others.numpy())


@pytest.fixture
def place(tmp_path):
    return {"path": tmp_path / "items.rock"}


# ---------------------------------------------------------------- .keras


def test_assert_same_notices_another_row():
    model, other = make_model(), make_model()
    train(model)
    train(other)
    assert_same(model, other)
    table_of(other).update([3], np.ones((1, DIM), "f"))
    with pytest.raises(AssertionError):
        assert_same(model, other)


@pytest.mark.parametrize("options", [{"directory": "hashed"}, {"dtype": "bfloat16"}])
def test_keras_file_holds_rows_in_ram(tmp_path, options):
    model = make_model(**options)
    train(model)
    model.save(tmp_path / "m.keras")
    loaded = load(tmp_path / "m.keras")
    assert table_of(loaded) is not table_of(model)
    assert_same(model, loaded)
    train(model)
    train(loaded)
    assert_same(model, loaded)


def test_model_of_the_first_release_loads():
    """Keras writes down the modules of layers, and those have moved."""
    model, expected = load(golden_model.FOLDER / "model.keras"), np.load(golden_model.FOLDER / "contents.npz")
    found = golden_model.contents(model)
    assert found.keys() == set(expected.files)
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-6 if name == "out" else 0)
    model.train_on_batch(golden_model.INPUTS, golden_model.Y)


@pytest.mark.parametrize("kind", [erk.Embedding, erk.EmbeddingBag])
def test_layers_take_all_options_of_a_table_and_keep_them(kind, tmp_path):
    given = {"rule": er.SGD(), "seed": 3, "directory": "hashed", "memory": "2MiB", "on_nonfinite": "skip"}
    given |= {"policy": "lru", "keep": 5, "path": tmp_path / "t.rock", "device_memory": 0, "commit_every": "5min"}
    given |= {"admission": er.Admission(min_count=2), "eviction": er.Eviction(max_rows=ROWS), "frozen": range(3)}
    assert set(given) == set(declared(LayerOptions)) <= set(inspect.signature(kind).parameters)
    layer = kind(ROWS, DIM, "zeros", **given)
    config = layer.get_config()
    nested = ("rule", "path", "admission", "eviction", "frozen")
    assert {name: config[name] for name in given if name not in nested}.items() <= given.items()
    assert (config["path"], config["rule"]["name"]) == (str(given["path"]), "SGD")
    table = layer.table
    assert (table.device_memory, table.options["keep"], table.options["policy"]) == (0, 5, "lru")
    assert (table.spec.admission, table.spec.eviction) == (given["admission"], given["eviction"])
    assert config["frozen"] == {"ranges": [[0, 3]]}
    shared = kind(table, name="shared").get_config()["table"]
    assert (shared["device_memory"], shared["keep"]) == (0, 5)
    table.close()
    assert kind.from_config(config).get_config() == config


@pytest.mark.parametrize(
    ("module", "kind"),
    [("embedding", erk.Embedding), ("bag", erk.EmbeddingBag), ("group", erk.EmbeddingCollection)],
)
def test_modules_in_files_of_the_first_release_can_be_imported(module, kind):
    assert getattr(importlib.import_module(f"embedrock.keras.{module}"), kind.__name__) is kind


def test_rule_of_a_layer_is_in_its_config():
    layer = erk.EmbeddingBag(ROWS, DIM, "zeros", mode="mean", rule=er.Adam(betas=(0.8, 0.9)), on_nonfinite="skip")
    again = erk.EmbeddingBag.from_config(json.loads(json.dumps(layer.get_config())))
    assert again.get_config() == layer.get_config()
    again.build()
    assert again.handle.own_rule == er.Adam(betas=(0.8, 0.9))


def test_keras_file_refers_to_a_commit_that_is_kept(place, tmp_path):
    model = make_model(**place, keep=1)
    train(model)
    model.save(tmp_path / "m.keras")
    assert table_of(model).commits()[-1]["step"] == 2
    before = outputs(model)
    for _ in range(3):
        train(model)
        table_of(model).commit()
    reader = load_model(tmp_path / "m.keras", mode="r")
    np.testing.assert_array_equal(outputs(reader), before)
    assert table_of(reader).mode == "r"
    assert not np.array_equal(outputs(model), before)
    table_of(model).close()
    table_of(reader).close()


def test_open_table_is_shared_where_it_is_as_it_was(place, tmp_path):
    model = make_model(**place)
    train(model)
    model.save(tmp_path / "m.keras")
    loaded = load(tmp_path / "m.keras")
    assert table_of(loaded) is table_of(model)
    assert_same(model, loaded)
    before = outputs(model)
    train(loaded)
    assert table_of(loaded).steps == 4
    loaded.load_weights(tmp_path / "m.keras")
    np.testing.assert_array_equal(outputs(loaded), before)
    table_of(model).close()


def test_failed_load_changes_nothing_of_an_open_table(place, tmp_path):
    model = make_model(**place)
    train(model)
    model.save(tmp_path / "m.keras")
    model.compile(erk.optimizer("sgd", reset_state=True), "mse", run_eagerly=True)
    train(model)
    table_of(model).commit()
    rows, rule = table_of(model).lookup(ALL), table_of(model).rule
    with pytest.raises(ValueError, match=r"refers to commit 1, and the table is at commit"):
        load(tmp_path / "m.keras")
    np.testing.assert_array_equal(table_of(model).lookup(ALL), rows)
    assert table_of(model).rule == rule
    table_of(model).close()


def test_open_table_that_went_on_is_not_taken_back(place, tmp_path):
    model = make_model(**place)
    train(model)
    model.save(tmp_path / "m.keras")
    train(model)
    rows = table_of(model).lookup(ALL)
    with pytest.raises((ValueError, TypeError), match=r"has changes since commit 1: the file refers to an earlier"):
        load(tmp_path / "m.keras")
    table_of(model).commit()
    with pytest.raises(
        ValueError, match=r"refers to commit 1, and the table is at commit 2\. Load the file as it was by"
    ):
        load(tmp_path / "m.keras")
    np.testing.assert_array_equal(table_of(model).lookup(ALL), rows)
    table_of(model).close()
    loaded = load(tmp_path / "m.keras")
    assert table_of(loaded).steps == 2
    again = load(tmp_path / "m.keras")  # shared: what went back to commit 1 is at commit 1
    assert table_of(again) is table_of(loaded)
    table_of(loaded).close()


def test_model_that_nobody_has_any_more_is_no_hindrance(place, tmp_path, recwarn):
    model = make_model(**place)
    train(model)
    model.save(tmp_path / "m.keras")
    before = outputs(model)
    train(model)
    del model
    with pytest.warns(UncommittedWarning):
        loaded = load(tmp_path / "m.keras")
    np.testing.assert_array_equal(outputs(loaded), before)
    table_of(loaded).close()


def test_table_of_another_writer_says_how_to_read(place, tmp_path):
    model = make_model(**place)
    train(model)
    model.save(tmp_path / "m.keras")
    table_of(model).close()
    with (
        er.open(place["path"]),
        pytest.raises((TableLockedError, ValueError), match="this process has it open for writing"),
    ):
        load(tmp_path / "m.keras")


def test_moved_table_is_found_by_relocate(place, tmp_path):
    model = make_model(**place)
    train(model)
    model.save(tmp_path / "m.keras")
    before = outputs(model)
    table_of(model).close()
    old, new = str(place["path"]), str(tmp_path / "moved.rock")
    shutil.move(old, new)
    with pytest.raises(
        (ArgumentError, ValueError), match=r"there is no table at .*items\.rock.*relocate=.*items\.rock'\."
    ):
        load(tmp_path / "m.keras")
    assert not os.path.exists(old)
    with pytest.raises(
        ArgumentError, match=r"`relocate` of erk.load_model must have old paths as its keys, here .*items"
    ):
        load_model(tmp_path / "m.keras", relocate={"elsewhere": new})
    with pytest.raises(ArgumentError, match=r'`mode` of erk\.load_model must be "w" or "r"'):
        load_model(tmp_path / "m.keras", mode="a")
    for mode in ("r", "w"):
        loaded = load_model(tmp_path / "m.keras", mode=mode, relocate={old: new})
        np.testing.assert_array_equal(outputs(loaded), before)
        assert table_of(loaded).path == new
        table_of(loaded).close()


@pytest.mark.parametrize("on_disk", [False, True])
def test_layers_on_one_table_share_it_again(tmp_path, on_disk):
    keras.utils.set_random_seed(1)
    table = er.Table(ROWS, DIM, seed=7, path=tmp_path / "t.rock" if on_disk else None, on_nonfinite="skip")
    inputs = keras.Input((3,), dtype="int64")
    first, second = erk.Embedding(table, name="first"), erk.EmbeddingBag(table, mode="mean", name="second")
    model = keras.Model(
        inputs,
        keras.layers.Dense(1)(keras.layers.Concatenate()([keras.layers.Flatten()(first(inputs)), second(inputs)])),
    )
    model.compile(erk.optimizer("adam"), "mse", run_eagerly=True)
    train(model)
    model.save(tmp_path / "m.keras")
    before = outputs(model)
    if on_disk:
        table.close()
    loaded = load(tmp_path / "m.keras")
    again = loaded.get_layer("first").table
    assert again is loaded.get_layer("second").table is not table
    assert (again.spec.seed, again.options["on_nonfinite"]) == (7, "skip")
    np.testing.assert_array_equal(outputs(loaded), before)
    train(loaded)
    assert again.steps == 4
    again.close()


class Recommender(keras.Model):
    def __init__(self, path=None, **more):
        super().__init__(**more)
        self.place = path
        self.items = erk.Embedding(ROWS, DIM, path=path)
        self.head = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(1)])

    def call(self, ids):
        return self.head(self.items(ids))

    def get_config(self):
        return {"path": self.place}


@pytest.mark.parametrize("on_disk", [False, True])
def test_subclassed_model_is_loaded(tmp_path, on_disk):
    model = Recommender(str(tmp_path / "t.rock") if on_disk else None)
    model.compile(erk.optimizer("adam"), "mse", run_eagerly=True)
    train(model)
    model.save(tmp_path / "m.keras")
    loaded = load(tmp_path / "m.keras", {"Recommender": Recommender})
    np.testing.assert_array_equal(outputs(loaded), outputs(model))
    assert (loaded.items.table is model.items.table) == on_disk
    model.items.table.close()


def test_pickle_in_ram():
    model = make_model()
    train(model)
    assert_same(model, pickle.loads(pickle.dumps(model)))


@pytest.mark.parametrize("save", [pickle.dumps, copy.deepcopy])
def test_commits_of_what_has_no_file_stay(tmp_path, save):
    model = make_model(path=tmp_path / "t.rock", keep=2)
    train(model)
    saved = save(model)
    assert names_in(table_of(model)) == ["keras_state-1"]
    save(model)
    assert names_in(table_of(model)) == ["keras_state-1"]  # nothing has changed: the same commit will do
    before = outputs(model)
    for _ in range(4):
        train(model)
        table_of(model).commit()
    assert names_in(table_of(model)) == ["keras_state-1"]
    table_of(model).close()
    if save is pickle.dumps:
        np.testing.assert_array_equal(outputs(pickle.loads(saved)), before)


def test_it_is_told_when_pickles_keep_many_commits(tmp_path):
    model, told = make_model(path=tmp_path / "t.rock"), []
    for number in range(16):
        table_of(model).assign([1], np.full((1, DIM), float(number)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pickle.dumps(model)
        told += [(number, str(each.message)) for each in caught if each.category is erk.HeldCommitsWarning]
    assert [number for number, _ in told] == [15]
    assert "keeps 16 commits because states refer to them" in told[0][1]
    assert "lists them as keras_state-<number>" in told[0][1]


def test_it_is_told_that_nothing_keeps_the_commit_of_a_snapshot(tmp_path):
    model = make_model(path=tmp_path / "t.rock")
    train(model)
    table_of(model).commit()
    with er.open(tmp_path / "t.rock", mode="r") as snapshot:
        frozen = keras.Sequential([erk.Embedding(snapshot)])
        frozen(IDS)
        with pytest.warns(erk.HeldCommitsWarning, match=r"refers to commit 1 of .*its writer drops .*with a name"):
            frozen.save(tmp_path / "m.keras")


def test_saved_again_in_the_same_place_a_file_lets_go_of_what_it_kept(place, tmp_path):
    model = make_model(**place)
    file = tmp_path / "best.keras"
    for k in range(4):
        train(model)
        model.save(file)
        model.save(tmp_path / f"epoch-{k}.keras")
    names = names_in(table_of(model))
    epochs = [f"epoch-{k}.keras" for k in range(4)]
    assert [name.split()[0] for name in names] == [*epochs[:2], "best.keras", epochs[2], "best.keras", epochs[3]]
    model.save(tmp_path / "epoch-3.keras")  # nothing has changed since
    assert names_in(table_of(model)) == names
    file.rename(tmp_path / "moved.keras")
    for _ in range(3):
        train(model)
        model.save(file)
    before = outputs(model)
    kept = [name for name in names_in(table_of(model)) if name.startswith("best")]
    assert len(kept) == 4
    assert kept[:2] == [names[2], names[4]]  # those of the file that was moved, and two newer ones
    loaded = load_model(tmp_path / "moved.keras", mode="r")
    assert table_of(loaded).steps == 8
    np.testing.assert_array_equal(outputs(model), before)
    table_of(model).close()


# ---------------------------------------------------------------- weights alone


def test_weights_go_back_with_the_table(place, tmp_path, caplog):
    caplog.set_level("INFO", "embedrock")
    model = make_model(**place)
    train(model)
    model.save_weights(tmp_path / "m.weights.h5")
    before, state = outputs(model), [variable.numpy() for variable in model.optimizer.variables]
    train(model)
    once = outputs(model)
    assert not np.array_equal(once, before)
    model.load_weights(tmp_path / "m.weights.h5")
    assert "items.rock resumed at step 2 (commit 1)" in caplog.text
    np.testing.assert_array_equal(outputs(model), before)
    for variable, saved in zip(model.optimizer.variables, state, strict=True):
        np.testing.assert_array_equal(variable.numpy(), saved)
    train(model)
    np.testing.assert_array_equal(outputs(model), once)
    table_of(model).close()


def test_saving_between_two_steps_of_accumulation_is_told(place, tmp_path):
    model = make_model(keras.optimizers.SGD(0.1, gradient_accumulation_steps=3), **place)
    train(model)
    with pytest.warns(UserWarning, match=r"between two steps of gradient_accumulation_steps=3: .* cannot go on from"):
        model.save_weights(tmp_path / "m.weights.h5")
    table_of(model).close()
    again = make_model(keras.optimizers.SGD(0.1, gradient_accumulation_steps=3), **place)
    again.optimizer.build(again.trainable_variables)
    again.load_weights(tmp_path / "m.weights.h5")
    with pytest.raises((ArgumentError, tf.errors.InvalidArgumentError), match="training cannot go on from it"):
        train(again)
    table_of(again).close()


def test_file_holds_no_rows(place, tmp_path):
    model = make_model(**place)
    train(model)
    model.save_weights(tmp_path / "m.weights.h5")
    with h5py.File(tmp_path / "m.weights.h5") as file:
        stored: Any = file["layers/embedding/vars"]
        assert list(stored) == ["embedrock"]
        assert len(stored["embedrock"]) < 500
    table_of(model).close()


@pytest.mark.parametrize("way", ["save_weights", "ModelCheckpoint", "BackupAndRestore", "Checkpoint", "saved_model"])
def test_what_would_lose_rows_in_ram_is_refused(tmp_path, way):
    model = make_model()
    train(model)
    best = keras.callbacks.ModelCheckpoint(tmp_path / "m.weights.h5", save_weights_only=True)
    ways = {
        "save_weights": lambda: model.save_weights(tmp_path / "m.weights.h5"),
        "ModelCheckpoint": lambda: fit(model, callbacks=[best]),
        "BackupAndRestore": lambda: fit(model, callbacks=[keras.callbacks.BackupAndRestore(tmp_path / "backup")]),
        "Checkpoint": lambda: tf.train.Checkpoint(model=model).save(tmp_path / "tf" / "ckpt"),
        "saved_model": lambda: tf.saved_model.save(model, tmp_path / "saved"),
    }
    with pytest.raises(UnsupportedError, match=r"'embedding\w*', erk\.Embedding\(50, 4\)") as raised:
        ways[way]()
    remedy = "erk.export(model, folder)" if way == "saved_model" else 'model.save("x.keras")'
    assert remedy in str(raised.value)


def test_weights_of_another_kind_are_refused(place, tmp_path):
    ours, in_ram = make_model(**place), make_model()
    plain = keras.Sequential(
        [keras.Input((3,)), keras.layers.Embedding(ROWS, DIM), keras.layers.Flatten(), keras.layers.Dense(1)]
    )
    plain.save_weights(tmp_path / "plain.weights.h5")
    with pytest.raises(
        ValueError, match=r"there are no rows for 'embedding.*are taken over by erk.Embedding.from_pret"
    ):
        ours.load_weights(tmp_path / "plain.weights.h5")
    ours.save_weights(tmp_path / "ours.weights.h5")
    with pytest.raises(ValueError, match="must have rows, because its table is in RAM: got a reference"):
        in_ram.load_weights(tmp_path / "ours.weights.h5")
    other = make_model(path=tmp_path / "other.rock")
    with pytest.raises(ValueError, match=r"must be that of its own table, at .*other\.rock"):
        other.load_weights(tmp_path / "ours.weights.h5")
    table_of(ours).close()
    table_of(other).close()


@pytest.mark.parametrize("on_disk", [False, True])
def test_load_weights_takes_rows_that_were_in_ram_from_a_file(on_disk, place, tmp_path):
    trained = make_model()
    train(trained)
    trained.save(tmp_path / "ram.keras")
    keras.utils.set_random_seed(5)
    ours = make_model(**(place if on_disk else {}), seed=5)
    train(ours)
    ours.load_weights(tmp_path / "ram.keras")
    for each in (trained, ours):
        np.testing.assert_array_equal(table_of(each).lookup(ALL), table_of(trained).lookup(ALL))
        assert table_of(each).steps == table_of(trained).steps
    for each in (trained, ours):
        train(each)
    np.testing.assert_array_equal(table_of(ours).lookup(ALL), table_of(trained).lookup(ALL))
    if on_disk:
        table_of(ours).commit()
        table_of(ours).close()
        with er.open(place["path"]) as table:
            np.testing.assert_array_equal(table.lookup(ALL), table_of(trained).lookup(ALL))


def test_commit_that_was_let_go_is_an_error(place, tmp_path):
    model = make_model(**place, keep=1)
    train(model)
    model.save_weights(tmp_path / "m.weights.h5")
    table_of(model).release(names_in(table_of(model))[0])
    train(model)
    table_of(model).commit()
    with pytest.raises(
        ValueError, match=r"refers to commit 1 .* no longer kept: the table has commits 2\. A file keeps"
    ):
        model.load_weights(tmp_path / "m.weights.h5")
    assert table_of(model).last_commit == 2
    assert table_of(model).steps == 4
    table_of(model).close()


class Begun(keras.callbacks.Callback):
    """Counts batches of training that have begun."""

    batches = 0

    def on_train_batch_begin(self, batch, logs=None):
        self.batches += 1


LOSING = {
    "ModelCheckpoint": (
        lambda folder: keras.callbacks.ModelCheckpoint(folder / "m.weights.h5", save_weights_only=True),
        "are in RAM",
    ),
    "BackupAndRestore": (lambda folder: keras.callbacks.BackupAndRestore(folder / "backup"), "are in RAM"),
}


@pytest.mark.parametrize("nested", [True, *slow(False)])
@pytest.mark.parametrize("which", LOSING)
def test_a_callback_that_would_lose_rows_is_refused_before_the_first_batch(which, nested, tmp_path):
    make, text = LOSING[which]
    model, begun = make_model(None), Begun()
    if nested:
        model = keras.Sequential([keras.Input((3,), dtype="int64"), model])
    model.compile(erk.optimizer("adam"), "mse", run_eagerly=True)
    fit(model)  # a later `fit` traces no program
    with pytest.raises(UnsupportedError, match=text):
        fit(model, callbacks=[begun, [make(tmp_path)]])
    assert begun.batches == 0
    assert os.listdir(tmp_path) == []
    fit(
        model,
        callbacks=[begun, keras.callbacks.EarlyStopping("loss"), keras.callbacks.ModelCheckpoint(tmp_path / "m.keras")],
    )
    assert begun.batches == len(IDS) // 16


@pytest.mark.parametrize("on_disk", [False, True])
def test_clone_has_rows_of_its_own(tmp_path, on_disk):
    model = make_model(path=tmp_path / "t.rock" if on_disk else None, seed=3)
    train(model)
    if on_disk:
        with pytest.raises(
            UnsupportedError, match=r"cannot be copied .*its table on disk at .*t\.rock' is open.*clone_fun"
        ):
            keras.models.clone_model(model)
    else:
        first = keras.models.clone_model(model)
        assert table_of(first) is not table_of(model)
        np.testing.assert_array_equal(table_of(first).lookup(ALL), table_of(make_model(seed=3)).lookup(ALL))

    def clone(layer):
        return (
            erk.Embedding(layer.table)
            if isinstance(layer, erk.Embedding)
            else type(layer).from_config(layer.get_config())
        )

    shared = keras.models.clone_model(model, clone_function=clone)
    assert table_of(shared) is table_of(model)
    table_of(model).close()


# ---------------------------------------------------------------- callbacks and checkpoints


def test_model_checkpoint_keeps_the_best(place, tmp_path):
    model, file = make_model(**place), tmp_path / "best.weights.h5"
    best = keras.callbacks.ModelCheckpoint(file, monitor="loss", save_best_only=True, save_weights_only=True)
    each = keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch:02d}.keras"))
    fit(model, 4, callbacks=[best, each])
    before = outputs(model)
    best_twice = ["best.weights.h5", "best.weights.h5"]
    kept = sorted(name.split()[0] for name in names_in(table_of(model)))
    assert kept == ["01.keras", "02.keras", "03.keras", "04.keras", *best_twice]
    train(model)
    model.load_weights(file)
    np.testing.assert_array_equal(outputs(model), before)
    second = load_model(tmp_path / "02.keras", mode="r")
    assert table_of(second).steps == 4
    table_of(model).close()


class Interrupted(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize("double", [False, *slow(True)])
def test_backup_and_restore_goes_on_as_if_nothing_had_happened(tmp_path, double):
    whole = make_model(path=tmp_path / "whole.rock")
    train(whole, 4)
    model = make_model(path=tmp_path / "t.rock")
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", double_checkpoint=double, delete_checkpoint=False)
    with pytest.raises(KeyboardInterrupt):
        fit(model, 4, callbacks=[backup, Interrupted()])
    table_of(model).update([1], np.ones((1, DIM), np.float32))  # which comes to nothing
    if double:
        (tmp_path / "backup" / "latest.weights.h5").write_bytes(b"cut short")
    fit(model, 4, callbacks=[backup])
    assert_same(whole, model)
    table_of(model).close()
    table_of(whole).close()


def test_tf_checkpoint_goes_back_with_the_table(place, tmp_path):
    model = make_model(**place)
    train(model)
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model), tmp_path / "tf", max_to_keep=2)
    states = []
    for _ in range(4):
        manager.save()
        states.append(outputs(model))
        train(model)
    assert [name.split()[0] for name in names_in(table_of(model))] == ["ckpt-2", "ckpt-3", "ckpt-4"]
    commits = len(table_of(model).commits())
    for number, state in ((3, states[2]), (4, states[3])):
        tf.train.Checkpoint(model=model).restore(
            str(tmp_path / "tf" / f"ckpt-{number}")
        ).assert_existing_objects_matched()
        np.testing.assert_array_equal(outputs(model), state)
    assert len(table_of(model).commits()) <= commits + 2
    with pytest.raises(ArgumentError, match="a model must be saved outside of its tables"):
        tf.train.Checkpoint(model=model).save(place["path"] / "ckpt")
    table_of(model).close()


@pytest.mark.parametrize("name", ["m.keras", "inner/m.weights.h5"])
def test_saving_inside_of_a_table_is_refused(place, tmp_path, name):
    model = make_model(**place)
    train(model)
    (place["path"] / "inner").mkdir()
    link = tmp_path / "link"
    link.symlink_to(place["path"])
    before = sorted(os.listdir(place["path"]))
    with pytest.raises(
        ArgumentError, match=r"a model must be saved outside of its tables: got .*inside of the table at"
    ):
        (model.save if name.endswith(".keras") else model.save_weights)(link / name)
    assert sorted(os.listdir(place["path"])) == before
    assert os.listdir(place["path"] / "inner") == []
    assert names_in(table_of(model)) == []
    table_of(model).close()


# ---------------------------------------------------------------- first values from an array


def test_first_values_in_a_file_are_referred_to(tmp_path):
    np.save(tmp_path / "w.npy", np.random.default_rng(2).standard_normal((2 * ROWS, DIM)).astype(np.float32))
    weights = np.load(tmp_path / "w.npy", mmap_mode="r")[ROWS:]
    model = keras.Sequential([keras.Input((3,), dtype="int64"), erk.Embedding.from_pretrained(weights)])
    model.save(tmp_path / "m.keras")
    loaded = load(tmp_path / "m.keras")
    np.testing.assert_array_equal(table_of(loaded).lookup(ALL), weights)
    assert os.path.getsize(tmp_path / "m.keras") < 40_000
    os.rename(tmp_path / "w.npy", tmp_path / "v.npy")
    with pytest.raises(
        (ArgumentError, TypeError, ValueError), match=r"first values of rows come from the file .*w.npy"
    ):
        load(tmp_path / "m.keras")


def test_first_values_in_ram_are_refused(tmp_path):
    weights = np.ones((ROWS, DIM), np.float32)
    model = keras.Sequential([keras.Input((3,), dtype="int64"), erk.Embedding.from_pretrained(weights)])
    for save in (lambda: model.save(tmp_path / "m.keras"), lambda: keras.models.clone_model(model)):
        with pytest.raises(UnsupportedError, match=r"first values of its rows come from an array in RAM.*np.save\("):
            save()


def test_snapshot_is_saved_as_such(place, tmp_path):
    with er.Table(ROWS, DIM, path=place["path"]) as table:
        table.assign([1], np.full((1, DIM), 9.0))
        table.commit(name="served")
    reader = er.open(place["path"], mode="r")
    model = keras.Sequential([keras.Input((3,), dtype="int64"), erk.Embedding(reader)])
    model.save(tmp_path / "m.keras")
    with er.open(place["path"]) as table:
        table.assign([1], np.full((1, DIM), 8.0))
        table.commit()
        loaded = load(tmp_path / "m.keras")
    assert (table_of(loaded).mode, table_of(loaded).lookup([1])[0, 0]) == ("r", 9.0)


# ---------------------------------------------------------------- Keras' own functions, of which `saving` needs to know


def test_keras_still_has_the_functions_that_saving_looks_for(tmp_path, monkeypatch):
    """Where Keras no longer has them, commits get no name and rows in RAM are refused: nothing is lost."""
    seen = []
    local = callers.local

    def noting(module, function, variable):
        found = local(module, function, variable)
        seen.append((function, variable, found is not callers.MISSING))
        return found

    monkeypatch.setattr(callers, "local", noting)
    model = make_model()
    train(model)
    model.save(tmp_path / "m.keras")
    load(tmp_path / "m.keras")
    assert {("_save_state", "assets_store", True), ("_load_state", "assets_store", True)} <= set(seen)
    with pytest.raises(UnsupportedError):
        model.save_weights(tmp_path / "m.weights.h5")
    on_disk = make_model(path=tmp_path / "t.rock")
    on_disk.save_weights(tmp_path / "m.weights.h5")
    on_disk.save(tmp_path / "m.keras")
    assert {("save_model", "filepath", True), ("save_weights_only", "filepath", True)} <= set(seen)
    monkeypatch.setattr(callers, "local", lambda *names: callers.MISSING)
    with pytest.raises(UnsupportedError):
        model.save(tmp_path / "m.keras")
    table_of(on_disk).close()


# ---------------------------------------------------------------- fresh processes


def _train_more(folder, file):
    """Go on, in a process of its own, from a file; return what came of it."""
    model = load(f"{folder}/{file}")
    train(model, 2)
    return table_of(model).lookup(ALL), model.layers[-1].get_weights()[0]


@pytest.mark.parametrize("on_disk", [True, *slow(False)])
def test_fresh_process_goes_on_to_the_bit(tmp_path, on_disk):
    options = {"path": tmp_path / "t.rock"} if on_disk else {}
    whole, model = make_model("adam"), make_model("adam", **options)
    train(whole, 3)
    train(model)
    model.save(tmp_path / "m.keras")
    if on_disk:
        train(model)  # what comes after the file was saved is not in it
        table_of(model).commit()
        table_of(model).close()
    rows, head = workers.run(_train_more, str(tmp_path), "m.keras", workers=1)[0]
    np.testing.assert_array_equal(rows, table_of(whole).lookup(ALL))
    np.testing.assert_array_equal(head, whole.layers[-1].get_weights()[0])


def _ram_model(optimizer="adam"):
    inputs = keras.Input((3,), dtype="int64")
    hidden = keras.layers.Flatten()(erk.Embedding(50, 4)(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile(erk.optimizer(optimizer), "mse", run_eagerly=True)
    model.fit(np.arange(48).reshape(16, 3), np.ones((16, 1)), verbose=0)
    return model


def _spoil(file, member, content):
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in parts if name.endswith(member))
    parts[name] = content(parts[name])
    with zipfile.ZipFile(file, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part)


@pytest.mark.filterwarnings("ignore:Skipping nested container")  # Keras, beside the error
@pytest.mark.parametrize(
    ("member", "content"),
    [
        ("records.bin", lambda part: part[:-7]),
        ("table.json", lambda part: b"{"),
        ("history_table.npy", lambda part: b""),
    ],
)
def test_damaged_rows_of_a_table_in_ram_are_told(tmp_path, member, content):
    file = str(tmp_path / "model.keras")
    _ram_model().save(file)
    _spoil(file, member, content)
    with pytest.raises(ValueError, match="could not be loaded"):
        keras.models.load_model(file)


@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")  # Keras, of dense ones
def test_rows_in_ram_that_were_saved_under_another_optimizer_are_loaded(tmp_path):
    model = _ram_model()
    model.compile(erk.optimizer("adagrad"), "mse")
    file = str(tmp_path / "model.keras")
    model.save(file)
    again: Any = keras.models.load_model(file)
    np.testing.assert_array_equal(
        again.layers[1].table.lookup(np.arange(50)), model.layers[1].table.lookup(np.arange(50))
    )


def test_the_legacy_format_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match=r"cannot be saved in the legacy .h5 format"):
        _ram_model().save(str(tmp_path / "model.h5"))


@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")  # Keras, of dense ones
def test_a_table_that_goes_back_to_another_rule_is_trained_on(tmp_path):
    def make():
        inputs = keras.Input((3,), dtype="int64")
        hidden = keras.layers.Flatten()(erk.Embedding(50, 4, path=tmp_path / "table.rock", memory="1MiB")(inputs))
        return keras.Model(inputs, keras.layers.Dense(1)(hidden))

    model, data = make(), (np.arange(48).reshape(16, 3), np.ones((16, 1)))
    model.compile(erk.optimizer("adam"), "mse")
    model.fit(*data, verbose=0)
    model.save_weights(str(tmp_path / "adam.weights.h5"))
    model.compile(erk.optimizer("adagrad", reset_state=True), "mse")
    model.fit(*data, verbose=0)
    model.load_weights(str(tmp_path / "adam.weights.h5"))
    with pytest.raises(Exception, match=r"step by Adam\(.* made 1 step, .*got erk.optimizer\(Adagrad\)"):
        model.fit(*data, verbose=0)
    model.compile(erk.optimizer("adagrad", reset_state=True), "mse")
    model.fit(*data, verbose=0)
    assert isinstance(model.layers[1].table.rule, er.Adagrad)
    model.layers[1].table.commit()
