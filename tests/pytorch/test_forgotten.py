"""A training loop that forgot our optimizer gets an error within two steps; everything legitimate gets none."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import embedrock as er
import embedrock.torch as ert
from embedrock.torch.training import unapplied as vigil

IDS = torch.tensor([3, 1, 3, 7])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = ert.Embedding(20, 4)
        self.dense = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.dense(self.user(ids)).square().sum()


def train(model: Model, steps: int, zero: Callable[[], None], *step: Callable[[], object]) -> None:
    for _ in range(steps):
        zero()
        model(IDS).backward()
        for each in step:
            each()


# ---------------------------------------------------------------- mistakes

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "SGD fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True),
    "SGD without a learning rate": lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    "Adam": torch.optim.Adam,
    "Adam foreach": lambda parameters: torch.optim.Adam(parameters, foreach=True),
    "Adam fused": lambda parameters: torch.optim.Adam(parameters, fused=True),
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
    "LBFGS": torch.optim.LBFGS,
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("beside_ours", [False, True])
def test_an_optimizer_over_all_parameters(make, beside_ours):
    model = Model()
    ours = [ert.SGD(model)] if beside_ours else []
    theirs = make(model.parameters())

    def step() -> None:
        theirs.step(lambda: torch.zeros(()))

    with pytest.raises(ert.ForgottenGradientsError, match=r"wrote to the handle of .*dense_parameters.*ert\.Adam"):
        train(model, 2, theirs.zero_grad, step, *(each.step for each in ours))
    model(IDS)  # one error for each offence


@pytest.mark.parametrize("zero", ["optimizer", "model", "none"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_over_dense_parameters_only(make, zero):
    model = Model()
    theirs = make(ert.dense_parameters(model))
    zeroing = {"optimizer": theirs.zero_grad, "model": model.zero_grad, "none": lambda: None}[zero]
    with pytest.raises(
        ert.ForgottenGradientsError, match=r"Embedding\(20, 4\) were applied by no optimizer.*ert\.Adam"
    ):
        train(model, 2, zeroing, lambda: theirs.step(lambda: torch.zeros(())))


@pytest.mark.parametrize("zero_all", [False, True])
def test_our_optimizer_is_made_but_never_stepped(zero_all):
    model = Model()
    ours, theirs = ert.Adam(model), torch.optim.SGD(ert.dense_parameters(model), lr=0.1)

    def zero() -> None:
        theirs.zero_grad()
        if zero_all:
            ours.zero_grad()

    with pytest.raises(ert.ForgottenGradientsError, match=r"'user', Embedding\(20, 4\).*step\(\) of your ert\.Adam"):
        train(model, 2, zero, theirs.step)


MADE_OF_LAYERS = {
    "a layer": lambda model: ert.Adam(model.user),
    "a list of layers": lambda model: ert.Adam([model.user]),
    "a handle": lambda model: ert.Adam(model.user.handle),
    "a param group": lambda model: ert.Adam([{"params": [model.user], "lr": 0.1}]),
    "a list with the model": lambda model: ert.Adam([model]),
    "a model that is gone": lambda model: ert.Adam(nn.Sequential(model.user, nn.Linear(2, 2))),
}


@pytest.mark.parametrize("make", MADE_OF_LAYERS.values(), ids=MADE_OF_LAYERS)
def test_our_optimizer_is_made_of_layers_and_never_stepped(make):
    model = Model()
    ours, theirs = make(model), torch.optim.SGD(ert.dense_parameters(model), lr=0.1)
    gc.collect()
    train(model, 2, model.zero_grad, theirs.step)  # the first time, it might be another network's
    with pytest.raises(ert.ForgottenGradientsError, match=r"step\(\) of your ert\.Adam .*of the whole model"):
        model(IDS)
    train(model, 2, model.zero_grad, theirs.step)  # one error for each offence
    with pytest.raises(ert.ForgottenGradientsError):
        model(IDS)
    model.zero_grad()
    train(model, 3, model.zero_grad, theirs.step, ours.step)
    assert model.user.table.steps == 3


def test_our_optimizer_is_gone():
    model = Model()
    theirs = torch.optim.SGD(ert.dense_parameters(model), lr=0.1)
    ert.Adam(model).step()
    with pytest.raises(ert.ForgottenGradientsError, match="no optimizer"):
        train(model, 2, model.zero_grad, theirs.step)


@pytest.mark.parametrize("write", [
    lambda model: nn.init.uniform_(model.user.handle),
    lambda model: torch._foreach_mul_(list(model.parameters()), 0.9),
    lambda model: model.user.handle.data.add_(1.0),
], ids=["init", "weight averaging", "data"])  # fmt: skip
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
def test_writing_to_the_handle(write, mode):
    model = Model().train(mode == "train")
    with torch.no_grad(), pytest.raises(ert.ForgottenGradientsError, match="wrote to the handle"):
        write(model)
    with torch.set_grad_enabled(mode != "no_grad"):
        model(IDS)  # nothing was written


def test_after_the_error_the_loop_can_be_repaired():
    model = Model()
    theirs = torch.optim.SGD(ert.dense_parameters(model), lr=0.1)
    with pytest.raises(ert.ForgottenGradientsError):
        train(model, 2, theirs.zero_grad, theirs.step)
    ours = ert.SGD(model, lr=0.1)
    ours.zero_grad()
    train(model, 3, model.zero_grad, theirs.step, ours.step)
    assert model.user.table.steps == 3


def test_it_is_a_runtime_error():
    assert issubclass(ert.ForgottenGradientsError, RuntimeError)
    assert issubclass(ert.ForgottenGradientsError, er.EmbedrockError)


# ---------------------------------------------------------------- no mistakes


@pytest.fixture(autouse=True)
def no_hook_is_left() -> None:
    """Each test starts without PyTorch's hook on all optimizers, whatever the last one left."""
    vigil._waiting.clear()
    torch.optim.SGD([nn.Parameter(torch.zeros(1))]).step()
    assert vigil._hook is None


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_loop_with_both_optimizers(order, accumulate):
    model = Model()
    optimizers = [ert.Adam(model), torch.optim.Adam(ert.dense_parameters(model))][::order]
    for _ in range(3):
        for _ in range(accumulate):
            model(IDS).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    assert model.user.table.steps == 3
    assert vigil._hook is None  # ours has stepped: nothing to watch for


def test_gradients_without_any_optimizer():
    model = Model()
    for zero in (True, True, False, False, False):
        model(IDS).backward()
        if zero:
            model.zero_grad()


def test_accumulation_while_another_model_trains():
    model, other = Model(), nn.Linear(2, 2)
    ours, theirs = ert.Adam(model), torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(3):
        model(IDS).backward()
        other(torch.ones(2)).sum().backward()
        theirs.step()
    ours.step()


def test_a_discriminator_steps_first():
    generator, discriminator = Model(), nn.Linear(1, 1)
    rows, dense = ert.Adam(generator), torch.optim.SGD(ert.dense_parameters(generator), lr=0.1)
    judge = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(2):  # its gradients go through the generator too, and are dropped there
            discriminator(generator(IDS)[None]).sum().backward()
            judge.step()
            generator.zero_grad()
        discriminator(generator(IDS)[None]).sum().backward()
        rows.step()
        dense.step()
        generator.zero_grad()


@pytest.mark.parametrize("judge_first", [True, False])
def test_networks_take_turns_and_our_optimizer_is_made_of_a_layer(judge_first):
    generator, discriminator = Model(), nn.Linear(1, 1)
    rows, judge = ert.Adam(generator.user), torch.optim.SGD(discriminator.parameters(), lr=0.1)
    table_locks = [judge, rows] if judge_first else [rows, judge]
    for _ in range(4):
        for optimizer in table_locks:
            discriminator(generator(IDS)[None]).sum().backward()
            optimizer.step()
            generator.zero_grad()


def test_several_optimizers_after_one_backward_count_once():
    model = Model()
    rows = ert.Adam([model.user])
    others = [torch.optim.SGD([parameter], lr=0.1) for parameter in ert.dense_parameters(model)]
    model(IDS).backward()
    for _ in range(2):
        for other in others:
            other.step()
    model(IDS)
    rows.step()


def test_once_stepped_our_optimizer_chooses_when():
    model = Model()
    ours, theirs = ert.Adam(model), torch.optim.SGD(ert.dense_parameters(model), lr=0.1)
    train(model, 1, model.zero_grad, theirs.step, ours.step)
    train(model, 3, model.zero_grad, theirs.step)
    assert model.user.table.steps == 1


def drop(model: Model, rows: ert.RowOptimizer) -> None:
    model.user.handle.grad = None


def drop_in_place(model: Model, rows: ert.RowOptimizer) -> None:
    model.zero_grad(set_to_none=False)


def drop_by_ours(model: Model, rows: ert.RowOptimizer) -> None:
    rows.zero_grad()


@pytest.mark.parametrize("of", ["model", "layer"])
@pytest.mark.parametrize("zero", [drop, drop_in_place, drop_by_ours])
def test_a_warm_up_that_zeroes_gradients_of_rows_and_steps_dense_weights(zero, of):
    model = Model()
    rows = ert.Adam(model if of == "model" else model.user)
    theirs = torch.optim.SGD(ert.dense_parameters(model), lr=0.1)
    for _ in range(5):
        model(IDS).backward()
        zero(model, rows)
        theirs.step()
    train(model, 2, model.zero_grad, theirs.step, rows.step)
    assert model.user.table.steps == 2


class TwoTables(Model):
    def __init__(self) -> None:
        super().__init__()
        self.item = ert.Embedding(20, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.dense(self.user(ids) + self.item(ids)).square().sum()


@pytest.mark.filterwarnings("ignore::embedrock.torch.UntrainedWarning")  # of the dense weights, which nobody steps
@pytest.mark.parametrize("of", ["layers", "towers"])
def test_two_optimizers_of_rows_take_turns(of):
    model = TwoTables()
    tower = nn.ModuleList([model.user, model.dense])
    users = ert.Adam(tower if of == "towers" else model.user)
    items = ert.SGD(model.item)
    for table_lock in (items, items, items, users, items, users):
        model(IDS).backward()
        table_lock.step()
        model.zero_grad()
    assert [model.user.table.steps, model.item.table.steps] == [2, 4]


def test_an_optimizer_of_other_rows_only():
    model = TwoTables()
    items = ert.SGD(model.item)
    with pytest.raises(ert.ForgottenGradientsError, match=r"'?Embedding\(20, 4\).* ert\.SGD stepped, .*made of them"):
        train(model, 2, model.zero_grad, items.step)


def test_evaluation_with_gradients():
    model = Model()
    theirs = torch.optim.SGD(ert.dense_parameters(model), lr=0.1)
    train(model.eval(), 3, theirs.zero_grad, theirs.step)  # rows on purpose not trained


def test_frozen_rows():
    model = Model()
    model.user.requires_grad_(False)
    theirs = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, 3, theirs.zero_grad, theirs.step)


def test_steps_that_the_scaler_skips():
    model = Model()
    ours, theirs = ert.Adam(model), torch.optim.SGD(ert.dense_parameters(model), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for _ in range(3):
        model.zero_grad()
        out = model.user(IDS)
        out.register_hook(lambda grad: grad * float("inf"))  # only the rows' gradients overflow
        scaler.scale(model.dense(out).sum()).backward()
        for optimizer in (ours, theirs):
            scaler.step(optimizer)
        scaler.update()
    assert model.user.table.steps == 0


def test_the_hook_is_there_only_while_gradients_wait():
    model = Model()
    ours = ert.Adam(model)
    assert vigil._hook is None
    model(IDS).backward()
    assert vigil._hook is not None
    ours.step()
    assert vigil._hook is None
    model(IDS).backward()
    assert vigil._hook is None
