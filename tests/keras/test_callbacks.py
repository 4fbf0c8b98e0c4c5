"""`TableCheckpoint`: rows, dense weights and optimizer of the same step, whatever happens."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import workers

import embedrock.keras as erk
from embedrock.errors import ArgumentError, UnsupportedError
from embedrock.keras.saving.checkpoint import TableCheckpoint
from table_files import files_of

ROWS, DIM = 50, 4
IDS = np.random.default_rng(0).integers(0, ROWS, (64, 3))
Y = np.random.default_rng(1).standard_normal((64, 1)).astype(np.float32)
ALL = np.arange(ROWS)

# Tables end here as they are in the middle of things.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is closed with changes since:embedrock.table.storage.UncommittedWarning"
)


def make_model(folder, optimizer="adam"):
    keras.utils.set_random_seed(1)
    path = None if folder is None else os.path.join(folder, "items.rock")
    inputs = keras.Input((3,), dtype="int64")
    layers = erk.Embedding(ROWS, DIM, path=path), keras.layers.Flatten(), keras.layers.Dense(1)
    model = keras.Sequential([inputs, *layers])
    model.compile(erk.optimizer(optimizer), "mse")
    return model


class Dies(keras.callbacks.Callback):
    """Kills the process, or raises, after a step."""

    def __init__(self, step, kill=True):
        super().__init__()
        self.last, self.kill = step, kill

    def on_train_batch_end(self, batch, logs=None):
        model: Any = self.model
        if int(model.optimizer.iterations) == self.last:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyboardInterrupt


def fit(model, epochs, *callbacks):
    model.fit(IDS, Y, batch_size=16, shuffle=False, epochs=epochs, verbose=0, callbacks=list(callbacks))


def result(model):
    table, (*_, head) = model.layers[0].table, model.layers
    moments = [variable.numpy() for variable in model.optimizer.variables]
    return [table.lookup(ALL), head.get_weights()[0], *moments]


def assert_same(one, other):
    for mine, others in zip(one, other, strict=True):
        np.testing.assert_array_equal(mine, others)


def _run(folder, every, dies_at):
    model = make_model(folder)
    fit(model, 5, TableCheckpoint(os.path.join(folder, "checkpoints"), every), Dies(dies_at))
    return result(model)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("whole"))
    model = make_model(folder)
    fit(model, 5)
    yield result(model)
    model.layers[0].table.close()


SLOW = pytest.mark.slow
KILLED = [pytest.param(e, at, marks=SLOW) for e in ("epoch", 3) for at in (2, 4, 9, 11, 20)]


@pytest.mark.parametrize(("every", "dies_at"), KILLED)
def test_killed_and_started_again_it_ends_as_if_nothing_had_happened(tmp_path, whole, every, dies_at):
    killed = workers.outcomes_of(_run, str(tmp_path), every, dies_at, workers=1)[0]
    assert killed.code == -signal.SIGKILL, killed
    assert_same(workers.run(_run, str(tmp_path), every, -1, workers=1)[0], whole)


def files_in(folder):
    names = [name for name in os.listdir(folder) if ".tmp" not in name]
    return sorted((int(name.split("-")[1]) for name in names), reverse=True)


@pytest.mark.parametrize("every", [3, pytest.param("epoch", marks=SLOW)])
def test_goes_back_to_the_last_checkpoint(tmp_path, caplog, every):
    caplog.set_level("INFO", "embedrock")
    model, folder = make_model(tmp_path), tmp_path / "checkpoints"
    with pytest.raises(KeyboardInterrupt):
        fit(model, 5, TableCheckpoint(folder, every), Dies(11, kill=False))
    table = model.layers[0].table
    steps = files_in(folder)
    assert steps in ([[8, 4]] if every == "epoch" else [[9, 6], [6, 3]])  # as far as the background had come
    assert {commit["step"] for commit in table.commits() if commit["name"]} >= set(steps)
    callback = TableCheckpoint(folder, every)
    assert callback.restore(model)
    assert (callback.step, callback.epoch, callback.batch) == (steps[0], steps[0] // 4, steps[0] % 4)
    assert re.search(rf"resumed at step {steps[0]} \(commit \d+\), as saved with the model", caplog.text)
    assert (table.steps, int(model.optimizer.iterations)) == (steps[0], steps[0])
    assert not callback.restore(model)
    fit(model, 5, callback)
    assert (table.steps, table.last_step, files_in(folder)[0]) == (20, 20, 20)
    table.close()


EXECUTIONS = [
    (1, "unknown", [4, 5, 18]),
    *(pytest.param(2, length, [4, 5, 18], marks=SLOW) for length in ("known", "unknown")),
    pytest.param(1, "known", [4, 5, 18], marks=SLOW),
]


@pytest.mark.parametrize(("execution", "length", "dies_at"), EXECUTIONS, ids=str)
@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # of unknown length: Keras says so at its end
def test_goes_on_at_the_batch(tmp_path, whole, execution, length, dies_at):
    """What was trained after the last checkpoint is trained again, and nothing else."""
    model, seen = make_model(tmp_path), []
    model.compile(erk.optimizer("adam"), "mse", steps_per_execution=execution)
    data = tf.data.Dataset.from_tensor_slices((IDS, Y)).batch(16)
    data = data.filter(lambda ids, y: True) if length == "unknown" else data

    class Notes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(int(model.optimizer.iterations))

    def train(*more):
        seen.clear()
        checkpoint = TableCheckpoint(tmp_path / "checkpoints", execution)
        model.fit(data, epochs=5, verbose=0, callbacks=[checkpoint, Notes(), *more])
        return checkpoint.step

    for step in dies_at:
        with pytest.raises(KeyboardInterrupt):
            train(Dies(step + step % execution, kill=False))
    resumed = train()
    assert_same(result(model), whole)
    assert seen == list(range(resumed + execution, 21, execution))
    model.layers[0].table.close()


def test_an_epoch_is_repeated_if_asked_and_epochs_that_are_too_short_are_refused(tmp_path):
    model, folder = make_model(tmp_path), tmp_path / "checkpoints"
    with pytest.raises(KeyboardInterrupt):
        fit(model, 5, TableCheckpoint(folder, 3, keep=None), Dies(7, kill=False))
    step = files_in(folder)[0]
    assert step in (3, 6)  # as far as the background had come
    table, short = model.layers[0].table, tf.data.Dataset.from_tensor_slices((IDS[:1], Y[:1])).batch(1)
    for data in (short.filter(lambda ids, y: True), short):
        text = rf"made after batch {step % 4} of an epoch, .* got epochs of 1\. Give it the data and the batch size"
        with pytest.raises(ArgumentError, match=text):
            model.fit(data, epochs=5, verbose=0, callbacks=[TableCheckpoint(folder)])
        assert (table.steps, int(model.optimizer.iterations)) == (step, step)
    callback = TableCheckpoint(folder)
    callback.restore(model)
    assert (callback.step, callback.epoch, callback.batch) == (step, step // 4, step % 4)
    callback.batch = 0
    fit(model, 5, callback)
    assert table.steps == step + (5 - step // 4) * 4
    table.close()


def test_who_is_at_a_checkpoint_in_the_middle_of_an_epoch_goes_on_from_there(tmp_path, whole):
    """A notebook's cell that is run twice: the callback is new, and the model is where the checkpoint was made."""
    model, folder = make_model(tmp_path), tmp_path / "checkpoints"
    with pytest.raises(KeyboardInterrupt):
        fit(model, 5, TableCheckpoint(folder, 3), Dies(7, kill=False))
    assert TableCheckpoint(folder).restore(model)
    callback = TableCheckpoint(folder)
    assert not callback.restore(model)
    step = files_in(folder)[0]
    assert (callback.step, callback.epoch, callback.batch) == (step, step // 4, step % 4)
    assert step % 4
    fit(model, 5, TableCheckpoint(folder))
    assert_same(result(model), whole)
    model.layers[0].table.close()


def test_later_fit_goes_on_and_does_not_go_back(tmp_path):
    model, callback = make_model(tmp_path), TableCheckpoint(tmp_path / "checkpoints", keep=None)
    fit(model, 2, callback)
    fit(model, 1, callback)
    assert files_in(tmp_path / "checkpoints") == [12, 8, 4]
    assert model.layers[0].table.steps == 12
    model.layers[0].table.close()


def test_file_is_one_that_keras_reads(tmp_path):
    model = make_model(tmp_path)
    fit(model, 2, TableCheckpoint(tmp_path / "checkpoints"))
    before = result(model)
    fit(model, 1)
    model.load_weights(next((tmp_path / "checkpoints").glob("step-8-*.weights.h5")))
    assert_same(result(model), before)
    model.layers[0].table.close()


def test_goes_with_the_callbacks_of_keras(tmp_path, whole):
    model = make_model(tmp_path)
    others = (
        keras.callbacks.BackupAndRestore(tmp_path / "backup"),
        keras.callbacks.ModelCheckpoint(tmp_path / "best.keras", monitor="loss", save_best_only=True),
    )
    with pytest.raises(KeyboardInterrupt):
        fit(model, 5, TableCheckpoint(tmp_path / "checkpoints"), *others, Dies(10, kill=False))
    fit(model, 5, TableCheckpoint(tmp_path / "checkpoints"), *others)
    assert_same(result(model), whole)
    model.layers[0].table.close()


def test_waits_for_the_step_of_accumulated_gradients(tmp_path):
    model = make_model(tmp_path, keras.optimizers.SGD(0.1, gradient_accumulation_steps=3))
    fit(model, 2, TableCheckpoint(tmp_path / "checkpoints", 1, keep=None))
    assert files_in(tmp_path / "checkpoints") == [2, 1]
    model.layers[0].table.close()


def test_rows_that_go_on_without_a_checkpoint_are_told(tmp_path, caplog):
    first = make_model(tmp_path)
    fit(first, 1)
    first.layers[0].table.commit()
    first.layers[0].table.close()
    again, folder = make_model(tmp_path), tmp_path / "checkpoints"
    fit(again, 1, TableCheckpoint(folder))
    path = again.layers[0].table.path
    told = f"{folder} has no checkpoint: dense weights begin anew, and rows of {path} go on after step 4"
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [told]
    fit(again, 2, TableCheckpoint(folder))
    assert caplog.text.count("has no checkpoint") == 1
    again.layers[0].table.close()


def test_failed_commit_is_raised(tmp_path, monkeypatch):
    model = make_model(tmp_path)
    table = model.layers[0].table

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files_of(table).table_folder, "write", fail, raising=False)
    monkeypatch.setattr(type(files_of(table).table_folder), "publish", fail, raising=False)
    with pytest.raises(Exception, match=r"No space left|the disk is full"):
        fit(model, 2, TableCheckpoint(tmp_path / "checkpoints", 1))
    assert not [name for name in os.listdir(tmp_path / "checkpoints") if ".tmp" not in name]
    table.close()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"every": 0}, ArgumentError, r"`every` of TableCheckpoint must be a whole number from 1, or 'epoch': got 0"),
        ({"every": "step"}, ArgumentError, r"or 'epoch': got 'step'"),
        ({"keep": 0}, ArgumentError, r"`keep` of TableCheckpoint must be a whole number from 1, or None: got 0"),
    ],
)
def test_bad_arguments(tmp_path, arguments, error, text):
    with pytest.raises(error, match=text):
        TableCheckpoint(tmp_path, **arguments)


def test_rows_in_ram_and_folders_in_tables_are_refused(tmp_path):
    in_ram, model = make_model(None), make_model(tmp_path)
    with pytest.raises(UnsupportedError, match=r"TableCheckpoint is for tables on disk, and the rows of .* are in RAM"):
        fit(in_ram, 1, TableCheckpoint(tmp_path / "checkpoints"))
    inside = tmp_path / "items.rock" / "checkpoints"
    with pytest.raises(ArgumentError, match=r"`folder` of TableCheckpoint must be outside of tables: got .*inside of"):
        fit(model, 1, TableCheckpoint(inside))
    assert not inside.exists()
    with pytest.raises(ArgumentError, match=r"TableCheckpoint must be given a model that is compiled and built"):
        TableCheckpoint(tmp_path / "checkpoints").restore(keras.Sequential([keras.layers.Dense(1)]))
    model.layers[0].table.close()
