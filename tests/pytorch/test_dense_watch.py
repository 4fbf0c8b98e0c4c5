"""Dense weights that nobody steps beside an optimizer of rows: a warning at the second step, and no false ones."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import embedrock.torch as ert

IDS = torch.tensor([1, 2, 3])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = ert.Embedding(10, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.rows(ids)))


def run(model: nn.Module, *optimizers: Any, steps: int = 5, before: Callable[[], None] | None = None) -> None:
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(IDS).square().sum().backward()
        if before is not None:
            before()
        for optimizer in optimizers:
            optimizer.step()


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def test_the_second_step_warns_once_and_names_what_to_do(model: Model):
    optimizer = ert.Adam(model, lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(model, optimizer, steps=1)
        assert not caught
        run(model, optimizer, steps=4)
    [warning] = caught
    assert warning.category is ert.UntrainedWarning
    assert warning.filename == __file__  # the line that called step()
    for part in (
        "ert.Adam steps rows only, and nothing steps the dense weights of Model",
        "body.0.weight, body.0.bias, body.2.weight and 3 more had gradients at two steps",
        "ert.optimizer(model, rows=ert.Adam, dense=torch.optim.Adam, lr=1e-3)",
        "ert.dense_parameters(model)",
        "requires_grad_(False)",
    ):
        assert part in str(warning.message)


def test_gradients_that_a_trainer_zeroes_are_noticed_too(model: Model):
    optimizer = ert.SGD(model, lr=0.1)

    def step() -> None:
        model.zero_grad()
        model(IDS).sum().backward()
        optimizer.step()

    step()
    with pytest.warns(ert.UntrainedWarning, match="ert.SGD steps rows only"):
        step()
    step()


def dense_of(model: Model, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(ert.dense_parameters(model), **options)


@pytest.mark.parametrize("rows_first", [True, False])
@pytest.mark.parametrize("options", [{}, {"lr": 0.0}, {"fused": True}, {"foreach": True}], ids=str)
def test_another_optimizer_steps_them(model: Model, rows_first: bool, options: Any):
    both = ert.Adam(model, lr=0.1), dense_of(model, **options)
    run(model, *(both if rows_first else reversed(both)))


def test_one_optimizer_of_both_steps_them(model: Model):
    run(model, ert.optimizer(model, rows=ert.Adam, dense=torch.optim.AdamW, lr=1e-3))


def test_an_optimizer_that_waits_for_more_batches_will(model: Model):
    rows, dense = ert.Adam(model, lr=0.1), dense_of(model)
    run(model, rows, steps=5)
    dense.step()


def test_a_scaler_that_leaves_out_the_first_steps_of_it(model: Model):
    rows, dense = ert.Adam(model, lr=0.1), dense_of(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step in range(4):
        model.zero_grad()
        scaler.scale(model(IDS).sum()).backward()
        if step < 3:
            model.head.weight.grad.fill_(torch.inf)  # pyright: ignore[reportOptionalMemberAccess]
        for optimizer in (rows, dense):
            scaler.step(optimizer)
        scaler.update()
    assert model.rows.table.steps == 4


def test_whoever_writes_to_data_steps_them(model: Model):
    def by_hand() -> None:
        for parameter in ert.dense_parameters(model):
            assert parameter.grad is not None
            parameter.data.sub_(parameter.grad, alpha=0.1)

    run(model, ert.Adam(model, lr=0.1), before=by_hand)


def test_weights_without_gradients_are_no_matter(model: Model):
    model.body.requires_grad_(False)
    model.head.requires_grad_(False)
    run(model, ert.Adam(model, lr=0.1))
    only = ert.Embedding(10, 4)
    run(only, ert.Adam(only, lr=0.1))


def test_layers_alone_do_not_tell_what_else_there_is(model: Model):
    run(model, ert.Adam([model.rows], lr=0.1))


def test_a_copy_does_not_warn_again(model: Model):
    optimizer = ert.Adam(model, lr=0.1)
    with pytest.warns(ert.UntrainedWarning):
        run(model, optimizer, steps=2)
    run(*copy.deepcopy((model, optimizer)))
