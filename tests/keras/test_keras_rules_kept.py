"""Which rule steps rows: the layer's, else the table's, else the optimizer's. None is replaced in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch

import embedrock as er
import embedrock.keras as erk
import embedrock.torch as ert
from embedrock.frontend.row_files import read_rows, write_rows

IDS, Y = np.array([[1, 2], [3, 4]]), np.ones((2, 1), np.float32)


def model_of(layer: Any, optimizer: Any = None) -> Any:
    model: Any = keras.Sequential([keras.Input((2,), dtype="int64"), layer, keras.layers.Flatten()])
    model.add(keras.layers.Dense(1))
    if optimizer is not None:
        model.compile(optimizer, "mse")
    return model


def sgd(lr: float = 0.5, **options: Any) -> Any:
    return erk.optimizer(keras.optimizers.SGD(lr), **options)


def trained(layer: Any, optimizer: Any, steps: int = 1) -> Any:
    model = model_of(layer, optimizer)
    for _ in range(steps):
        model.train_on_batch(IDS, Y)
    return model


def kind_of(layer: Any) -> str:
    return type(layer.table.rule).__name__


def test_a_rule_that_was_given_to_a_table_stays():
    table = er.Table(10, 3, rule=er.Adagrad(lr=0.1))
    table.update([1], np.ones((1, 3)))
    model = trained(erk.Embedding(table), sgd(), 3)
    assert (table.rule, table.steps) == (er.Adagrad(lr=0.1), 4)
    expected = er.Table(10, 3, rule=er.Adagrad(lr=0.1), seed=table.spec.seed)
    assert expected.spec.seed == table.spec.seed
    model.compile(erk.optimizer("adam"), "mse")
    model.train_on_batch(IDS, Y)
    assert (table.rule, table.steps) == (er.Adagrad(lr=0.1), 5)


@pytest.mark.parametrize("rule", [er.Adagrad(), er.Adagrad(lr=0.25)])
def test_its_learning_rate_is_the_optimizers_unless_it_was_given(rule: er.Rule):
    rows = []
    for of_table in (True, False):
        keras.utils.set_random_seed(0)
        given: Any = {"rule": rule, "seed": 0}
        layer = erk.Embedding(er.Table(10, 3, **given)) if of_table else erk.Embedding(10, 3, er.Normal(), **given)
        trained(layer, sgd(0.5), 2)
        rows.append(layer.table.lookup(np.arange(10)))
    np.testing.assert_array_equal(*rows)


def test_the_layers_rule_goes_before_the_tables():
    layer = erk.Embedding(er.Table(10, 3, rule=er.Adagrad()), rule=er.Momentum())
    trained(layer, sgd(), 2)
    assert (kind_of(layer), layer.table.steps) == ("Momentum", 2)
    other = erk.Embedding(layer.table, rule=er.Adam())
    with pytest.raises(er.ArgumentError, match=r"`rule` of layers that share a table must be the same"):
        trained(other, sgd())
    used = er.Table(10, 3, rule=er.Adagrad())
    used.update([1], np.ones((1, 3)))
    with pytest.raises(
        er.ArgumentError, match=r"step by Adagrad\(.* given to the table and has made 1 step, and the state"
    ):
        trained(erk.Embedding(used, rule=er.Momentum()), sgd())
    trained(erk.Embedding(used, rule=er.Momentum()), sgd(reset_state=True))
    assert type(used.rule) is er.Momentum


def test_another_optimizer_is_refused_where_state_would_be_lost():
    layer = erk.Embedding(10, 3, name="user")
    model = trained(layer, erk.optimizer("adam"), 2)
    weights = layer.table.lookup(np.arange(10))
    model.compile(sgd(), "mse")
    with pytest.raises(
        er.ArgumentError,
        match=r"rows of 'user', erk.Embedding\(10, 3\) step by Adam\(.* made 2 steps, and the state .* of 4 rows would "
        r"be lost: got erk.optimizer\(SGD\).* To go on so, give the layer rule=er.Adam\(eps=1e-07, dense=True, "
        r"eps_hat=True\)..* pass reset_state=True to erk.optimizer\(SGD\)",
    ):
        model.fit(IDS, Y, verbose=0)
    assert (kind_of(layer), layer.table.steps) == ("Adam", 2)
    model.compile(sgd(0.0, reset_state=True), "mse")
    model.fit(IDS, Y, verbose=0)
    assert (kind_of(layer), layer.table.steps) == ("SGD", 1)
    np.testing.assert_array_equal(layer.table.lookup(np.arange(10)), weights)


def test_an_optimizer_that_made_no_step_may_be_replaced():
    layer = erk.Embedding(10, 3)
    model = model_of(layer, erk.optimizer("adam"))
    model.optimizer.build(model.trainable_variables)
    assert kind_of(layer) == "Adam"
    model.compile(erk.optimizer("adagrad"), "mse")
    model.train_on_batch(IDS, Y)
    assert kind_of(layer) == "Adagrad"


def train_in_pytorch(table: er.Table) -> None:
    layer = ert.Embedding(table)
    optimizer = ert.Adam(layer, lr=0.1)
    for _ in range(50):
        optimizer.zero_grad()
        layer(torch.tensor([1, 2])).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("place", [None, "rows.rock"])
def test_a_table_trained_in_pytorch_goes_on_in_keras_or_says_how(place: str | None, tmp_path: Path):
    table = er.Table(10, 3, path=place and tmp_path / place)
    train_in_pytorch(table)
    arguments: Any = (table,)
    options: Any = {}
    if table.is_on_disk:
        table.commit(step=50)
        table.close()
        arguments, options = (10, 3), {"path": tmp_path / "rows.rock"}
    layer = erk.Embedding(*arguments, **options)
    with pytest.raises(
        er.ArgumentError, match=r"step by Adam\(.*50 steps.*To go on so, give the layer rule=er.Adam\(\)"
    ):
        trained(layer, erk.optimizer("adam"))
    assert layer.table.steps == 50
    if table.is_on_disk:
        layer.table.close()
    going_on = erk.Embedding(*arguments, rule=er.Adam(), **options)
    trained(going_on, erk.optimizer("adam"))
    assert (kind_of(going_on), going_on.table.rule.dense, going_on.table.steps) == ("Adam", False, 51)  # pyright: ignore
    if table.is_on_disk:
        going_on.table.commit()
        assert [commit["step"] for commit in going_on.table.commits()] == [50, None]
    going_on.table.close()


def test_a_file_has_the_rule_of_a_table(tmp_path: Path):
    model = trained(erk.Embedding(er.Table(10, 3, rule=er.Adagrad())), sgd())
    model.save(tmp_path / "model.keras")
    loaded: Any = keras.models.load_model(tmp_path / "model.keras")
    for one in (model, loaded):
        one.train_on_batch(IDS, Y)
    table = loaded.layers[0].table
    assert (table.rule, table.steps) == (er.Adagrad(), 2)
    np.testing.assert_array_equal(table.lookup(np.arange(10)), model.layers[0].table.lookup(np.arange(10)))


def test_a_file_of_a_model_that_was_compiled_anew_loses_no_state(tmp_path: Path):
    model = trained(erk.Embedding(10, 3, name="user"), erk.optimizer("adam"), 2)
    model.compile(sgd(), "mse")
    model.save(tmp_path / "model.keras")
    loaded: Any = keras.models.load_model(tmp_path / "model.keras")
    layer = loaded.layers[0]
    assert (kind_of(layer), layer.table.steps) == ("Adam", 2)
    with pytest.raises(Exception, match=r"2 steps, and the state .*got erk.optimizer\(SGD\)"):
        loaded.train_on_batch(IDS, Y)
    loaded.compile(erk.optimizer("adam"), "mse")
    loaded.train_on_batch(IDS, Y)
    assert layer.table.steps == 3


def test_weights_without_their_state_are_taken_with_a_warning(tmp_path: Path):
    saved = er.Table(10, 3, rule=er.Adam(), name="user")
    saved.update([1], np.ones((1, 3)))
    write_rows(saved, str(tmp_path))
    table = er.Table(10, 3, rule=er.Adagrad(), name="user")
    with pytest.warns(
        UserWarning, match=r"only the weights .*'user' are taken.*Adagrad\(.*: Adam\(.*1 step.* left out"
    ):
        read_rows(table, str(tmp_path))
    assert (type(table.rule), table.steps) == (er.Adagrad, 0)


# ---------------------------------------------------------------- models on disk, loaded where they are open


def on_disk(folder: Path) -> Any:
    return erk.Embedding(10, 3, path=folder / "rows.rock", name="user")


def test_a_model_that_was_saved_before_its_first_step_is_loaded_where_it_is_open(tmp_path: Path):
    model = model_of(on_disk(tmp_path), erk.optimizer("adam"))
    model.save(tmp_path / "model.keras")
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer"):  # as Keras says of any such model
        loaded: Any = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.layers[0].table is model.layers[0].table
    loaded.train_on_batch(IDS, Y)
    assert loaded.layers[0].table.steps == 1
    loaded.layers[0].table.commit()
    loaded.layers[0].table.close()


def test_a_model_that_was_compiled_anew_and_saved_is_loaded_where_it_is_open(tmp_path: Path):
    model = trained(on_disk(tmp_path), erk.optimizer("adam"))
    model.compile(sgd(), "mse")
    model.save(tmp_path / "model.keras")
    loaded: Any = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(IDS, verbose=0), model.predict(IDS, verbose=0))
    with pytest.raises(Exception, match=r"1 step, and the state .*got erk.optimizer\(SGD\)"):
        loaded.train_on_batch(IDS, Y)
    loaded.compile(sgd(reset_state=True), "mse")
    loaded.train_on_batch(IDS, Y)
    assert (kind_of(loaded.layers[0]), loaded.layers[0].table.steps) == ("SGD", 1)
    loaded.layers[0].table.commit()
    loaded.layers[0].table.close()
