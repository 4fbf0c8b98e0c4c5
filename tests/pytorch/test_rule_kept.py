"""Optimizers and the rules that tables have: none that was chosen, and no state, is replaced in silence."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import embedrock as er
import embedrock.torch as ert

IDS = torch.tensor([1, 2, 3])


def train(layer: ert.Embedding, optimizer: Any, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        layer(IDS).square().sum().backward()
        optimizer.step()


def test_a_second_optimizer_of_another_kind_is_refused_where_state_would_be_lost():
    layer = ert.Embedding(10, 4)
    first = ert.Adam(layer, lr=0.1)
    train(layer, first)
    with pytest.raises(
        er.ArgumentError,
        match=r"rows of Embedding\(10, 4\) step by Adam\(.*, which has made 2 steps, and the state "
        r"\(exp_avg, exp_avg_sq\) of 3 rows would be lost: got ert.Momentum, which would step them by Momentum\(.* "
        r"Make an ert.Adam of them to go on so. .*pass reset_state=True to ert.Momentum.",
    ):
        ert.Momentum(layer, lr=0.1)
    train(layer, first, 1)  # nothing has changed
    assert (layer.table.rule, layer.table.steps) == (er.Adam(lr=0.1), 3)
    weights = layer.table.lookup(np.arange(10))
    train(layer, ert.Momentum(layer, lr=0.0, reset_state=True), 1)
    assert (layer.table.rule, layer.table.steps) == (er.Momentum(lr=0.0), 1)
    np.testing.assert_array_equal(layer.table.lookup(np.arange(10)), weights)


def test_an_optimizer_that_was_not_used_may_be_made_anew():
    layer = ert.Embedding(10, 4)
    for kind in (ert.Adam, ert.Adagrad, ert.SGD, ert.Adam):
        optimizer: Any = kind(layer, lr=0.1)
    train(layer, optimizer)
    train(layer, ert.Adam(layer, lr=0.2))  # a notebook's cell that was run again
    assert layer.table.steps == 4


def test_after_a_rule_without_state_another_one_is_no_loss():
    layer = ert.Embedding(10, 4)
    train(layer, ert.SGD(layer, lr=0.1))
    train(layer, ert.Adam(layer, lr=0.1))
    assert layer.table.rule == er.Adam(lr=0.1)


@pytest.mark.parametrize("place", [None, "rows.rock"])
def test_a_rule_that_was_given_to_the_table_stays(place: str | None, tmp_path: Path):
    layer = ert.Embedding(er.Table(10, 4, rule=er.Adagrad(lr=0.5), path=place and tmp_path / place))
    other = ert.Embedding(10, 4)
    with pytest.raises(er.ArgumentError, match=r"step by Adagrad\(.*, which was given to the table: got ert.Adam.*"):
        ert.Adam(torch.nn.ModuleList([other, layer]))
    assert (layer.table.rule, other.table.rule) == (er.Adagrad(lr=0.5), None)  # none of them has changed
    ert.Adagrad(layer)
    ert.Adam(layer, reset_state=True)
    assert layer.table.rule == er.Adam()
    layer.table.close()


def test_a_rule_that_came_with_the_files_stays(tmp_path: Path):
    er.Table(10, 4, rule=er.Adagrad(), path=tmp_path / "rows.rock").close()
    layer = ert.Embedding(10, 4, path=tmp_path / "rows.rock")
    with pytest.raises(er.ArgumentError, match=r"Adagrad\(.*, which came with its rows: got ert.Adam"):
        ert.Adam(layer)
    ert.Adagrad(layer)
    layer.table.close()


def test_fixed_hyperparameters_are_those_of_the_table_or_named():
    layer = ert.Embedding(er.Table(10, 4, rule=er.Adam(dense=True)))
    train(layer, ert.Adam(layer))
    with pytest.raises(er.ArgumentError, match=r"Leave out dense to go on so"):
        ert.Adam(layer, dense=False)
    assert layer.table.rule == er.Adam(dense=True)


def test_frozen_rows_keep_their_state_beside_an_optimizer_of_another_kind():
    frozen, trained = ert.Embedding(10, 4), ert.Embedding(10, 4)
    train(frozen, ert.Adam(frozen))
    frozen.requires_grad_(False)
    optimizer = ert.SGD(torch.nn.ModuleList([frozen, trained]), lr=0.1)
    train(trained, optimizer)
    assert (frozen.table.rule, frozen.table.steps) == (er.Adam(), 2)
    frozen.requires_grad_(True)
    frozen(IDS).sum().backward()
    with pytest.raises(er.ArgumentError, match=r"are laid out for Adam\(.*, and this ert.SGD steps by SGD"):
        optimizer.step()


def test_frozen_rows_begin_when_they_are_let_go():
    layer = ert.Embedding(10, 4).requires_grad_(False)
    optimizer = ert.Adam(layer, lr=0.1)
    optimizer.step()
    layer.requires_grad_(True)
    train(layer, optimizer)
    assert (layer.table.rule, layer.table.steps) == (er.Adam(lr=0.1), 2)
    layer.requires_grad_(False)
    ert.SGD(layer, reset_state=True)
    assert (layer.table.rule, layer.table.steps) == (er.Adam(lr=0.1), 2)


def test_a_later_param_group_and_a_copy_are_asked_again():
    one, other = ert.Embedding(10, 4), ert.Embedding(10, 4)
    train(other, ert.Adam(other))
    optimizer = ert.SGD(one, lr=0.1, reset_state=True)
    with pytest.raises(er.ArgumentError, match="reset_state=True"):
        optimizer.add_param_group({"params": other})
    assert other.table.steps == 2
    layer, again = copy.deepcopy((one, optimizer))
    train(layer, again)
    assert layer.table.steps == 2
