"""Layers whose tables get more rows while a model is trained."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import embedrock as er
import embedrock.torch as ert

ROWS, MORE, DIM = 50, 400, 8


def batches(below: int, count: int, seed: int = 0) -> list[torch.Tensor]:
    return list(torch.from_numpy(np.random.default_rng(seed).integers(0, below, (count, 16))))


def train(layer: ert.Embedding, optimizer: Any, ids_of_batches: list[torch.Tensor]) -> None:
    for ids in ids_of_batches:
        optimizer.zero_grad()
        layer(ids).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("rows", [MORE, None])
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_grown_layer_trains_on_as_one_that_was_made_so(rows: int | None, on_disk: bool, tmp_path: Path):
    grown = ert.Embedding(ROWS, DIM, seed=1, path=tmp_path / "t" if on_disk else None)
    made = ert.Embedding(rows, DIM, seed=1)
    steps = [ert.Adam(layer, lr=0.1) for layer in (grown, made)]
    scheduler = torch.optim.lr_scheduler.StepLR(steps[0], 1000)
    for layer, optimizer in zip((grown, made), steps, strict=True):
        train(layer, optimizer, batches(ROWS, 5))
        optimizer.zero_grad()
        layer(torch.arange(20)).square().sum().backward()  # which waits for its step
    grown.grow(rows)
    scheduler.step()
    assert (grown.num_embeddings, grown.table.rows) == (rows, rows)
    assert ert.num_parameters(grown) == ert.num_parameters(made)
    assert f"({rows}, {DIM}" in grown.handle.label
    assert f"({rows}, {DIM}" in repr(grown)
    for layer, optimizer in zip((grown, made), steps, strict=True):
        optimizer.step()
        train(layer, optimizer, batches(MORE, 5, seed=1))
    assert torch.equal(grown(torch.arange(MORE)), made(torch.arange(MORE)))
    if not on_disk:
        again = ert.Embedding(rows, DIM)
        again.load_state_dict(copy.deepcopy(grown.state_dict()))
        assert torch.equal(again(torch.arange(MORE)), made(torch.arange(MORE)))
    grown.table.commit() if on_disk else None
    grown.table.close()


def test_what_the_optimizer_has_named_keeps_its_name():
    layer = ert.Embedding(ROWS, DIM)
    model = nn.Sequential(layer, nn.Linear(DIM, 1))
    ert.Adam(model)
    layer.grow(MORE)
    assert layer.handle.label == f"'0', Embedding({MORE}, {DIM})"
    with pytest.raises(IndexError, match=str(MORE)):
        model(torch.tensor([MORE]))


DENSE = [
    (er.Adam(lr=0.05, dense=True), lambda weight: torch.optim.Adam([weight], lr=0.05)),
    (er.Momentum(lr=0.05, dense=True), lambda weight: torch.optim.SGD([weight], lr=0.05, momentum=0.9)),
    (er.RMSprop(lr=0.05, dense=True), lambda weight: torch.optim.RMSprop([weight], lr=0.05)),
]


@pytest.mark.parametrize(("rule", "optimizer_of"), DENSE, ids=lambda value: getattr(value, "name", None))
def test_new_rows_under_dense_rules_are_those_of_a_parameter_that_grew_at_that_step(rule: er.Rule, optimizer_of: Any):
    """The parameter gets rows of first values and of no state, and the count of its steps goes on."""
    table = er.Table(ROWS, DIM, rule=rule, seed=3)
    weight = nn.Parameter(torch.from_numpy(table.lookup(np.arange(ROWS))))
    optimizer = optimizer_of(weight)

    def train_both(below: int, seed: int) -> None:
        for ids in batches(below, 30, seed):
            grads = torch.from_numpy(np.random.default_rng(seed).standard_normal((16, DIM)).astype(np.float32))
            table.update(ids.numpy(), grads.numpy())
            weight.grad = torch.zeros(len(weight), DIM).index_add_(0, ids, grads)
            optimizer.step()

    train_both(ROWS, 0)
    table.grow(MORE)
    fresh = torch.from_numpy(table.lookup(np.arange(ROWS, MORE)))
    np.testing.assert_array_equal(fresh, er.Table(MORE, DIM, seed=3).lookup(np.arange(ROWS, MORE)))
    state = optimizer.state[weight]
    weight.data = torch.cat([weight.data, fresh])
    for key, value in state.items():
        if value is not None and value.ndim == 2:
            state[key] = torch.cat([value, torch.zeros(MORE - ROWS, DIM)])
    train_both(MORE, 1)
    np.testing.assert_allclose(table.lookup(np.arange(MORE)), weight.detach(), rtol=2e-6, atol=3e-6)


def test_state_of_before_is_loaded_before_growing():
    layer, larger = ert.Embedding(ROWS, DIM, seed=1), ert.Embedding(MORE, DIM, seed=2)
    train(layer, ert.Adam(layer, lr=0.1), batches(ROWS, 3))
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(er.ArgumentError, match=rf"A table of {ROWS} rows that has loaded the state .* grow\({MORE}\)"):
        larger.load_state_dict(before)
    layer.grow(MORE)
    with pytest.raises(er.ArgumentError, match=f"must have rows {MORE}: got {ROWS}"):
        layer.load_state_dict(before)


def test_a_checkpoint_goes_back_to_the_rows_that_there_were(tmp_path: Path):
    layer = ert.Embedding(ROWS, DIM, seed=1, path=tmp_path / "t")
    optimizer = ert.Adam(layer, lr=0.1)
    train(layer, optimizer, batches(ROWS, 3))
    before = layer(torch.arange(ROWS)).detach()
    ert.save(layer, tmp_path / "checkpoints", step=3, optimizer=optimizer)
    layer.grow(MORE)
    train(layer, optimizer, batches(MORE, 3))
    ert.load(layer, tmp_path / "checkpoints", optimizer)
    assert layer.num_embeddings == ROWS
    with pytest.raises(er.IdError, match=rf"Embedding\({ROWS}, {DIM}\)"):
        layer(torch.tensor([ROWS]))
    assert torch.equal(layer(torch.arange(ROWS)), before)
    layer.table.close()


def test_averages_of_rows_go_on():
    layers = [ert.Embedding(rows, DIM, seed=1) for rows in (ROWS, MORE)]
    averages = []
    for layer in layers:
        optimizer, average = ert.Adam(layer, lr=0.1), ert.average(layer, 0.9)
        for below, seed in ((ROWS, 0), (MORE, 1)):
            for ids in batches(below, 4, seed):
                train(layer, optimizer, [ids])
                average.update_parameters(layer)
            if layer.num_embeddings == ROWS:
                layer.grow(MORE)
        averages.append(average.module(torch.arange(MORE)))
    assert torch.equal(*averages)


@pytest.mark.parametrize("rows", [20, None])
@pytest.mark.parametrize("given", [5, 30])
def test_the_line_for_a_weight_of_another_number_of_rows(rows: int | None, given: int):
    layer, weight = ert.Embedding(rows, 4), torch.randn(given, 4)
    before = layer(torch.arange(20)).detach()
    with pytest.raises(er.ArgumentError, match=rf"`weight` for ert\.Embedding must have .*got \({given}, 4\)") as found:
        layer.load_state_dict({"weight": weight})
    assert torch.equal(layer(torch.arange(20)), before)
    line = re.findall(r"layer\.\S+\(.*\)+", str(found.value))[0]
    exec(line, {"layer": layer, "weight": weight})
    if "grow" in line:
        layer.load_state_dict({"weight": weight})
    assert torch.equal(layer(torch.arange(given)), weight)
    assert given >= 20 or torch.equal(layer(torch.arange(given, 20)), before[given:])


def test_the_error_of_resizing_names_the_line():
    layer = ert.Embedding(20, 4)
    with pytest.raises(AttributeError, match=r"layer\.grow\(n\) in the place of resize_token_embeddings"):
        layer.weight  # noqa: B018
