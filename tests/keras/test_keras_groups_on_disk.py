"""Layers of a group on disk: checkpoints with one commit of all, and files of models that refer to its tables."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import workers

import embedrock as er
import embedrock.keras as erk
from embedrock.errors import ArgumentError, UnsupportedError

SIZES = {"users": 60, "items": 40, "tags": 30}

pytestmark = pytest.mark.filterwarnings("ignore::embedrock.table.storage.UncommittedWarning")


def group_at(folder: Path) -> er.Group:
    return er.Group(path=folder / "model.rock", memory="1MiB")


def model_of(group: er.Group) -> Any:
    """Return a model on three tables of a group, two of which are laid out alike."""
    keras.utils.set_random_seed(0)
    kinds: dict[str, Any] = {"tags": erk.EmbeddingBag}
    rows = {
        name: kinds.get(name, erk.Embedding)(count, 3 if name == "items" else 4, name=name, group=group, seed=1)
        for name, count in SIZES.items()
    }
    inputs = {name: keras.Input((2,), dtype="int64", name=name) for name in rows}
    found = erk.EmbeddingCollection(rows)(inputs)
    flat = [keras.layers.Flatten()(each) for each in found.values()]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(flat)))
    model.compile(erk.optimizer(keras.optimizers.Adam(0.05)), "mse")
    return model


def ids_and_targets() -> tuple[dict[str, np.ndarray], np.ndarray]:
    draws = np.random.default_rng(0)
    ids = {name: draws.integers(0, rows, (32, 2)) for name, rows in SIZES.items()}
    return ids, draws.standard_normal((32, 1)).astype(np.float32)


def fit(model: Any, epochs: int = 1, **more: Any) -> None:
    model.fit(*ids_and_targets(), batch_size=8, epochs=epochs, shuffle=False, verbose=0, **more)


def outputs(model: Any) -> np.ndarray:
    return model.predict(ids_and_targets()[0], verbose=0)


def rows_in(group: er.Group) -> list[np.ndarray]:
    return [group[name].lookup(np.arange(rows)) for name, rows in SIZES.items()]


def assert_same(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    for ours, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(ours, theirs)


class Killed(keras.callbacks.Callback):
    """Ends a training in the middle, with steps that no checkpoint has, once the second checkpoint is whole."""

    def __init__(self, group: er.Group) -> None:
        super().__init__()
        self.group = group

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        steps = int(self.model.optimizer.iterations)  # type: ignore[union-attr]
        if steps == 7:  # before the checkpoint's own callback, which then finds its commit written
            until = time.monotonic() + 60
            while self.group.last_commit < 2 and time.monotonic() < until:
                time.sleep(0.001)
        if steps == 8:
            raise KeyboardInterrupt


def test_what_is_resumed_has_the_bits_of_a_group_in_ram_and_each_checkpoint_is_one_commit(tmp_path: Path) -> None:
    in_ram = er.Group()
    fit(model_of(in_ram), epochs=3)

    group = group_at(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        fit(model_of(group), epochs=3, callbacks=[Killed(group), erk.TableCheckpoint(tmp_path / "saved", every=3)])
    assert [commit["step"] for commit in group.commits()][-2:] == [3, 6]
    assert group.last_commit == 2
    group.close()

    group = group_at(tmp_path)
    resumed = erk.TableCheckpoint(tmp_path / "saved", every=3)
    fit(model_of(group), epochs=3, callbacks=[resumed])
    assert resumed.step == 6
    assert_same(rows_in(in_ram), rows_in(group))
    assert group.last_step == 12
    group.close()


def _run(folder: Path, killed_at: int) -> list[np.ndarray]:
    """Fit in a process of its own, with checkpoints; return its rows, unless it is killed after a step."""

    def end(batch: int, logs: Any) -> None:
        if int(model.optimizer.iterations) == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    folder.mkdir(exist_ok=True)
    group = group_at(folder)
    model = model_of(group)
    saved = erk.TableCheckpoint(folder / "saved", every=3)
    fit(model, epochs=5, callbacks=[saved, keras.callbacks.LambdaCallback(on_train_batch_end=end)])
    return [*rows_in(group), *(variable.numpy() for variable in model.optimizer.variables)]


@pytest.mark.slow
def test_killed_three_times_it_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    (whole,) = workers.run(_run, tmp_path / "whole", -1, workers=1)
    for killed_at in (2, 7, 16):
        (outcome,) = workers.outcomes_of(_run, tmp_path / "killed", killed_at, workers=1)
        assert outcome.code == -signal.SIGKILL, outcome
    (ended,) = workers.run(_run, tmp_path / "killed", -1, workers=1)
    assert_same(whole, ended)


def test_a_file_of_a_model_refers_to_the_tables_of_its_group(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO", "embedrock")
    group = group_at(tmp_path)
    model = model_of(group)
    fit(model)
    model.save(tmp_path / "model.keras")
    assert group.last_commit == 1  # of all tables
    expected, rows = outputs(model), rows_in(group)
    np.testing.assert_array_equal(outputs(keras.models.load_model(tmp_path / "model.keras")), expected)  # which shares

    fit(model)
    with pytest.raises(ArgumentError, match=r"the group at '.*model\.rock' is open in this process, and has changes"):
        keras.models.load_model(tmp_path / "model.keras")
    then = erk.load_model(tmp_path / "model.keras", mode="r")
    np.testing.assert_array_equal(outputs(then), expected)
    assert caplog.text.count("resumed at step 4") == 1  # not once for each table
    model.load_weights(tmp_path / "model.keras")
    np.testing.assert_array_equal(outputs(model), expected)
    assert caplog.text.count("resumed at step 4") == 2
    assert_same(rows_in(group), rows)
    group.close()

    shutil.move(tmp_path / "model.rock", tmp_path / "moved.rock")
    with pytest.raises(ArgumentError, match=r"erk\.load_model\(file, relocate="):
        keras.models.load_model(tmp_path / "model.keras")
    where = {str(tmp_path / "model.rock"): str(tmp_path / "moved.rock")}
    moved = erk.load_model(tmp_path / "model.keras", relocate=where)
    np.testing.assert_array_equal(outputs(moved), expected)
    fit(moved)
    moved_group = er.opened(tmp_path / "moved.rock")
    assert moved_group["users"].steps == 8
    moved_group.close()


@pytest.mark.slow
def test_ready_made_members_are_in_the_file_too(tmp_path: Path) -> None:
    groups = er.Group(), group_at(tmp_path)
    for number, group in enumerate(groups):
        table = group.table("users", 60, 4, rule=er.SGD(lr=0.1))
        model = keras.Sequential([keras.Input((2,), dtype="int64"), erk.Embedding(table), keras.layers.Dense(1)])
        model.compile(erk.optimizer("sgd"), "mse")
        model.fit(np.arange(8).reshape(4, 2), np.ones((4, 2, 1)), verbose=0)
        model.save(tmp_path / f"{number}.keras")
        expected = model.predict(np.arange(8).reshape(4, 2), verbose=0)
        group.close()
        loaded: Any = keras.models.load_model(tmp_path / f"{number}.keras")
        np.testing.assert_array_equal(loaded.predict(np.arange(8).reshape(4, 2), verbose=0), expected)
        assert list(loaded.layers[0].table.group) == ["users"]
        loaded.layers[0].table.group.close()


def test_what_cannot_be_copied_or_loaded(tmp_path: Path) -> None:
    with group_at(tmp_path) as group:
        one = erk.Embedding(60, 4, group=group, name="users")
        with pytest.raises(UnsupportedError, match=r"its table on disk at '.*model\.rock#users' is open, and a copy"):
            erk.Embedding.from_config(one.get_config())
        with pytest.raises(UnsupportedError, match=r"its table on disk at '.*model\.rock#users' is open, and a copy"):
            erk.Embedding.from_config(erk.Embedding(group["users"], name="other").get_config())
        config = one.get_config()
        other = erk.Embedding(40, 4, group=group, name="items")
        for layer in (one, other):
            layer.build()
        state: dict[str, Any] = {}
        one.save_own_variables(state)
        with pytest.raises(ArgumentError, match=r"table 'users' of a group: the layer has table 'items' of a group"):
            other.load_own_variables(state)
    again = erk.Embedding.from_config(config)  # nobody has it open any more
    assert again.table.group.path == str(tmp_path / "model.rock")
    again.table.group.close()
