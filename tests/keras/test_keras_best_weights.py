"""The best or the last weights that callbacks of Keras restore: rows and dense weights of the same epoch."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import embedrock as er
import embedrock.keras as erk
from embedrock.keras.saving.state import _release

ROWS, DIM, EPOCHS, BEST = 48, 4, 4, 1
IDS = np.random.default_rng(0).permutation(ROWS)[:32].reshape(16, 2)
Y = np.random.default_rng(1).standard_normal((16, 1)).astype(np.float32)
FIRST = np.random.default_rng(2).standard_normal((ROWS, DIM)).astype(np.float32)
ALL = np.arange(ROWS)
RATES = [0.1, 0.05, 0.1, 0.02]


def model_of(layer: Any, optimizer: Any = None) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,), dtype="int64"), layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    made = keras.optimizers.SGD(0.2, momentum=0.5) if optimizer is None else optimizer
    ours = not type(layer).__module__.startswith("keras")
    model.compile(erk.optimizer(made) if ours else made, "mse", run_eagerly=True)
    return model


def make_model(path: Any = None, **more: Any) -> Any:
    layer = erk.Embedding(ROWS, DIM, **({} if path is None else {"path": path}), **more)
    if path is None or layer.table.last_commit == 0:
        layer.table.assign(ALL, FIRST)
    return model_of(layer)


def theirs() -> Any:
    model = model_of(keras.layers.Embedding(ROWS, DIM))
    model.layers[0].embeddings.assign(FIRST)
    return model


class Dense(keras.callbacks.Callback):
    """Keeps the dense weights and the rows of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.kept.append(contents(self.model))


def contents(model: Any) -> list[np.ndarray]:
    layer = model.layers[0]
    rows = layer.table.lookup(ALL) if hasattr(layer, "table") else layer.embeddings.numpy()
    return [rows, *model.layers[2].get_weights()]


class Score(keras.callbacks.Callback):
    """Makes an epoch the best one."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["score"] = abs(epoch - BEST)


def fit(model: Any, *callbacks: Any, rates: Any = RATES, **more: Any) -> Any:
    by_epoch = keras.callbacks.LearningRateScheduler(lambda epoch, _: rates[min(epoch, len(rates) - 1)])
    arguments = {"batch_size": 8, "shuffle": False, "epochs": len(rates), "verbose": 0, **more}
    return model.fit(IDS, Y, callbacks=[by_epoch, Score(), *callbacks], **arguments)


def stopping(patience: int = 9) -> Any:
    return keras.callbacks.EarlyStopping("score", mode="min", patience=patience, restore_best_weights=True)


def check_same(one: Any, other: Any) -> None:
    for mine, its in zip(one, other, strict=True):
        np.testing.assert_array_equal(mine, its)


@pytest.fixture(params=["RAM", "disk", "group"])
def model(request: Any, tmp_path: Path) -> Any:
    if request.param == "group":
        group = er.Group(path=tmp_path / "group.rock", memory="8MiB")
        made = make_model(None, group=group, name="users")
    else:
        made = make_model(None if request.param == "RAM" else tmp_path / "t.rock")
    yield made
    table = made.layers[0].table
    if table.is_on_disk:
        table.commit()
        (table if table.group is None else table.group).close()


@pytest.mark.parametrize("patience", [1, 9])
def test_early_stopping_restores_rows_and_dense_weights_of_the_best_epoch(model: Any, patience: int):
    other, seen, callback = theirs(), Dense(), stopping(patience)
    fit(model, callback, seen)
    fit(other, stopping(patience))
    assert callback.best_epoch == BEST
    assert len(seen.kept) == (BEST + 2 if patience == 1 else EPOCHS)
    check_same(contents(model), seen.kept[BEST])  # to the bit
    assert not np.array_equal(contents(model)[0], seen.kept[-1][0])
    for mine, its in zip(contents(model), contents(other), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-5, atol=1e-6)
    table = model.layers[0].table
    assert table.steps == (BEST + 1) * 2  # the optimizer state of rows is that of the epoch, too
    fit(model, rates=[0.1])
    assert table.steps == (BEST + 2) * 2


def test_the_commit_of_the_best_epoch_is_kept_while_it_may_be_restored(tmp_path: Path):
    model, callback = make_model(tmp_path / "t.rock", keep=1), stopping()
    fit(model, callback)
    table = model.layers[0].table
    assert [commit["name"].split(" ")[:2] for commit in table.commits() if commit["name"]] == [["best", "weights"]]
    for _ in range(3):
        fit(model, rates=[0.1])
        table.commit()
    model.set_weights(callback.best_weights)
    assert table.steps == (BEST + 1) * 2
    del callback
    gc.collect()
    table.commit()
    assert not any(commit["name"] for commit in table.commits())
    table.close()


def test_the_first_epoch_stays_while_other_callbacks_commit(tmp_path: Path):
    model, seen = make_model(tmp_path / "t.rock", keep=1), Dense()
    saved = keras.callbacks.ModelCheckpoint(str(tmp_path / "m.keras"))  # Keras takes the first weights twice
    stops = keras.callbacks.EarlyStopping("number", mode="min", patience=9, restore_best_weights=True)
    number = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(number=epoch))
    fit(model, number, stops, seen, saved)
    check_same(contents(model), seen.kept[0])
    model.layers[0].table.close()


def test_a_kept_epoch_is_released_in_silence_when_its_folder_is_gone(tmp_path: Path):
    model = make_model(tmp_path / "t.rock")
    fit(model, callback := stopping())
    table = model.layers[0].table
    table.commit()
    shutil.rmtree(tmp_path / "t.rock")  # as a temporary folder at exit, before the callback goes
    with warnings.catch_warnings(action="error"):
        _release(weakref.ref(table), "best")
        del callback
        gc.collect()
    table.close()


def test_tables_of_a_group_share_a_commit_of_the_best_epoch(tmp_path: Path):
    group = er.Group(path=tmp_path / "group.rock", memory="8MiB")
    inputs = keras.Input((2,), dtype="int64")
    hidden = [keras.layers.Flatten()(erk.Embedding(ROWS, DIM, group=group, name=name)(inputs)) for name in ("a", "b")]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(hidden)))
    model.compile(erk.optimizer("sgd"), "mse", run_eagerly=True)
    tables = [group["a"], group["b"]]
    seen: list[Any] = []
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.append([t.lookup(ALL) for t in tables]))
    callback = stopping()
    fit(model, callback, keep)
    assert len([commit for commit in group.commits() if commit["name"]]) == 1
    for table, rows in zip(tables, seen[callback.best_epoch], strict=True):
        np.testing.assert_array_equal(table.lookup(ALL), rows)
    group.commit()
    group.close()


def test_layers_on_one_table_restore_it_once():
    table = er.Table(ROWS, DIM, seed=0)
    inputs = keras.Input((2,), dtype="int64")
    hidden = [keras.layers.Flatten()(erk.Embedding(table)(inputs)) for _ in range(2)]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(hidden)))
    model.compile(erk.optimizer("sgd"), "mse", run_eagerly=True)
    kept: list[Any] = []
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: kept.append(table.lookup(ALL)))
    callback = stopping()
    fit(model, callback, keep)
    np.testing.assert_array_equal(table.lookup(ALL), kept[callback.best_epoch])


def test_a_table_that_is_only_read_stays_as_it_is(tmp_path: Path):
    first = make_model(tmp_path / "t.rock")
    fit(first, rates=[0.1])
    first.layers[0].table.commit()
    first.layers[0].table.close()
    model = model_of(erk.Embedding(er.open(tmp_path / "t.rock", mode="r"), trainable=False))
    before = contents(model)
    fit(model, stopping())
    np.testing.assert_array_equal(contents(model)[0], before[0])
    assert not np.array_equal(contents(model)[1], before[1])
    model.layers[0].table.close()


def test_compiled_programs_see_the_restored_rows(tmp_path: Path):
    model = make_model(tmp_path / "t.rock")
    model.compile(erk.optimizer(keras.optimizers.SGD(0.2)), "mse")
    seen, callback = Dense(), stopping()
    fit(model, callback, seen)
    check_same(contents(model), seen.kept[callback.best_epoch])
    rows, kernel, bias = contents(model)
    wanted = rows[IDS].reshape(len(IDS), -1) @ kernel + bias
    np.testing.assert_allclose(model.predict(IDS, verbose=0), wanted, rtol=1e-5, atol=1e-5)
    model.layers[0].table.commit()
    model.layers[0].table.close()


def test_other_code_gets_no_rows_by_get_weights(model: Any):
    fit(model, rates=[0.1])
    with pytest.raises(
        er.UnsupportedError, match=r"get_weights cannot return the rows of .*ModelCheckpoint.*EarlyStop"
    ):
        model.get_weights()
    before = contents(model)
    arrays = [np.zeros((ROWS, DIM), np.float32), *model.layers[2].get_weights()]
    with pytest.raises(er.UnsupportedError, match=r"set_weights cannot set the rows of .*layer\.table\.assign"):
        model.set_weights(arrays)
    check_same(contents(model), before)


@pytest.mark.parametrize("save_best_only", [True, False])
def test_model_checkpoint_with_the_best_weights(model: Any, save_best_only: bool, tmp_path: Path):
    file, seen = tmp_path / "best.keras", Dense()
    fit(model, seen, keras.callbacks.ModelCheckpoint(file, "score", mode="min", save_best_only=save_best_only))
    model.load_weights(file)
    check_same(contents(model), seen.kept[BEST if save_best_only else -1])


# ---------------------------------------------------------------- averages of Keras


def test_an_average_is_refused_before_training(model: Any):
    before = contents(model)
    for callbacks in ([], [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]):
        model.compile(erk.optimizer(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)), "mse", run_eagerly=True)
        with pytest.raises(er.UnsupportedError, match=r"use_ema=True of SGD cannot go with .*Leave it out"):
            fit(model, *callbacks)
        check_same(contents(model), before)


# ---------------------------------------------------------------- killed and resumed


PROGRAM = """
import os, sys
from pathlib import Path
import keras, numpy as np
import test_keras_best_weights as here

folder, dies_at = Path(sys.argv[1]), int(sys.argv[2])
model = here.make_model(folder / "t.rock")
seen = 0

class Dies(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        global seen
        seen += 1
        if seen == dies_at:
            os._exit(9)

before = keras.callbacks.BackupAndRestore(folder / "backup", save_freq=FREQUENCY, delete_checkpoint=False)
here.fit(model, before, Dies())
np.savez(folder / "result.npz", *here.contents(model))
model.layers[0].table.commit()
model.layers[0].table.close()
"""


class Interrupts(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        model: Any = self.model
        if model.layers[0].table.steps == 5:
            raise KeyboardInterrupt


def trained(batches: int) -> Any:
    """Return a model after some batches, and then the epochs that are left."""
    model = make_model()
    for k in range(batches):
        model.optimizer.learning_rate.assign(RATES[k // 2])
        model.train_on_batch(IDS[k % 2 * 8 : k % 2 * 8 + 8], Y[k % 2 * 8 : k % 2 * 8 + 8])
    fit(model, initial_epoch=batches // 2)
    return model


@pytest.mark.parametrize("frequency", ["epoch", 3])
def test_backup_and_restore_after_an_interrupt_in_an_epoch(frequency: Any, tmp_path: Path):
    """Rows and dense weights go back to one moment: a program without a break, from there, comes to the same."""
    model = make_model(tmp_path / "t.rock")
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=frequency)
    with pytest.raises(KeyboardInterrupt):
        fit(model, backup, Interrupts())
    fit(model, keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=frequency))
    check_same(contents(trained(4 if frequency == "epoch" else 3)), contents(model))
    model.layers[0].table.commit()
    model.layers[0].table.close()


@pytest.mark.slow
@pytest.mark.parametrize(("frequency", "dies_at"), [("'epoch'", 5), (3, 5), (1, 3)])
def test_backup_and_restore_after_a_kill_in_an_epoch(frequency: Any, dies_at: int, tmp_path: Path):
    source = PROGRAM.replace("FREQUENCY", str(frequency))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TF_CPP_MIN_LOG_LEVEL": "3"}

    def run(folder: Path, dies: int) -> subprocess.CompletedProcess[str]:
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-c", source, str(folder), str(dies)]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)

    assert run(tmp_path / "killed", dies_at).returncode == 9
    done = run(tmp_path / "killed", 0)
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "killed" / "result.npz") as found:
        result = list(found.values())
    batches = {1: dies_at, 3: 3}.get(frequency, 4)
    check_same(contents(trained(batches)), result)
