"""`ert.optimizer`: one optimizer of rows and dense parameters does what two do."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twins import ROWS, weight_of

import embedrock as er
import embedrock.torch as ert

IDS = torch.tensor([3, 1, 3, 7])


def model_of(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(ert.Embedding(ROWS, 5, seed=seed), nn.Linear(5, 1))


def one(model: Any, **more: Any) -> ert.ModelOptimizer:
    return ert.optimizer(model, **{"rows": ert.Adam, "dense": torch.optim.AdamW, "lr": 0.05, **more})


def two(model: Any) -> list[torch.optim.Optimizer]:
    return [ert.Adam(model, lr=0.05), torch.optim.AdamW(ert.dense_parameters(model), lr=0.05)]


def loss_of(model: Any, step: int) -> Tensor:
    return model((IDS * (step + 1)) % ROWS).square().sum()


def train(model: Any, optimizers: list[torch.optim.Optimizer], steps: range, **zero: bool) -> None:
    for step in steps:
        loss_of(model, step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(**zero)


def check_same(model: Any, other: Any) -> None:
    assert torch.equal(weight_of(model[0]), weight_of(other[0]))
    assert model[0].table.steps == other[0].table.steps
    assert all(map(torch.equal, ert.dense_parameters(model), ert.dense_parameters(other)))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_one_does_what_two_do(set_to_none: bool):
    model, twin = model_of(), model_of()
    train(model, [one(model)], range(5), set_to_none=set_to_none)
    train(twin, two(twin), range(5), set_to_none=set_to_none)
    check_same(model, twin)


def test_a_loop_with_everything():
    """Scaled losses, accumulation, clipping, a scheduler of both, and a step that is skipped."""
    model, twin = model_of(), model_of()
    for each, optimizers in ((model, [one(model)]), (twin, two(twin))):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=8) for o in optimizers]
        for step in range(6):
            for micro in range(2):
                loss = loss_of(each, 2 * step + micro) * (float("inf") if step == 3 else 0.5)
                scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            for scheduler in schedulers:
                scheduler.step()
    check_same(model, twin)
    assert model[0].table.steps == 5


def test_a_closure_is_called_once():
    model, twin = model_of(), model_of()
    optimizer, calls = one(model), []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    assert isinstance(optimizer.step(closure), Tensor)
    assert calls == [True]
    train(twin, two(twin), range(1))
    check_same(model, twin)


def test_training_goes_on_to_the_same_bits():
    model = model_of()
    optimizer = one(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    train(model, [optimizer], range(4))
    scheduler.step()
    file = io.BytesIO()
    torch.save([each.state_dict() for each in (model, optimizer, scheduler)], file)
    file.seek(0)
    again = model_of(seed=1)
    its = one(again)
    its_scheduler = torch.optim.lr_scheduler.ExponentialLR(its, 0.9)
    for each, state in zip((again, its, its_scheduler), torch.load(file, weights_only=True), strict=True):
        each.load_state_dict(state)
    for group in its.param_groups:
        assert group["lr"] == pytest.approx(0.05 * 0.9)
    for each, the_optimizer, the_scheduler in ((model, optimizer, scheduler), (again, its, its_scheduler)):
        train(each, [the_optimizer], range(4, 6))
        the_scheduler.step()
        train(each, [the_optimizer], range(6, 8))
    check_same(model, again)


def test_groups_are_those_of_both():
    model = model_of()
    optimizer = one(model, rows=functools.partial(ert.Adagrad, lr=0.5), lr=None)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1e-3]
    optimizer.param_groups[0]["lr"] = 0.25
    assert optimizer.rows.param_groups[0]["lr"] == 0.25
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.125
    assert optimizer.rows.param_groups[0]["lr"] == 0.125
    assert set(optimizer.defaults) >= {"lr"}
    assert "betas" not in optimizer.defaults  # of one of them only: OneCycleLR would look for it in both
    assert isinstance(optimizer, torch.optim.Optimizer)


def test_groups_that_are_added_come_last():
    model, more = model_of(), model_of(seed=1)
    optimizer = one(model)
    optimizer.param_groups[1]["lr"] = 0.1
    optimizer.add_param_group({"params": more[0], "lr": 0.5})
    optimizer.add_param_group({"params": [*more[1].parameters()], "lr": 0.25})
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.1, 0.5, 0.25]
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 2, 1, 2]
    for each in (model, more):
        loss_of(each, 1).backward()
    optimizer.step()
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    again = optimizer.state_dict()
    assert again["param_groups"] == state["param_groups"]
    assert [sorted(each["state"]) for each in (state, again)] == [[1, 2, 4, 5]] * 2
    assert more[0].table.steps == 1


@pytest.mark.parametrize(
    "params",
    [lambda model: model, nn.Module.parameters, lambda model: [model[0], *model[1].parameters()]],
    ids=["a model", "its parameters", "a layer and parameters"],
)
def test_a_param_group_of_rows_and_dense_parameters_is_refused(params: Callable[[nn.Module], Any]):
    optimizer, more = one(model_of()), model_of(seed=1)
    before = optimizer.param_groups
    with pytest.raises(er.ArgumentError, match=r"param group of ert\.optimizer .* got both\. Add two, of ert\.handles"):
        optimizer.add_param_group({"params": params(more)})
    assert optimizer.param_groups == before
    optimizer.add_param_group({"params": more[0].parameters()})
    assert [group["params"] for group in optimizer.rows.param_groups] == [before[0]["params"], ert.handles(more)]


def test_made_optimizers_are_taken_as_they_are():
    model = model_of()
    rows, dense = two(model)
    optimizer = ert.optimizer(model, rows=rows, dense=dense)  # pyright: ignore[reportArgumentType]
    assert (optimizer.rows, optimizer.dense) == (rows, dense)
    train(model, [optimizer], range(2))
    assert model[0].table.steps == 2
    with pytest.raises(er.ArgumentError, match=r"`lr` of ert\.optimizer .* both of these have their own"):
        ert.optimizer(model, rows, dense, lr=0.1)  # pyright: ignore[reportArgumentType]


def test_a_model_of_rows_only():
    layer = ert.Embedding(ROWS, 5)
    optimizer = one(layer)
    layer(IDS).sum().backward()
    optimizer.step()
    assert optimizer.dense is None
    assert optimizer.state_dict()["state"] == {}
    with pytest.raises(er.ArgumentError, match="had none when"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_copies_and_pickles():
    model = model_of()
    optimizer = one(model)
    train(model, [optimizer], range(2))
    twin, its = copy.deepcopy((model, optimizer))
    for each, group in ((model, optimizer), (twin, its)):
        train(each, [group], range(2, 4))
    check_same(model, twin)
    assert its.param_groups[0] is its.rows.param_groups[0]


def test_nothing_changes_where_the_rows_cannot_be_stepped():
    model = model_of()
    optimizer = one(model)
    before = copy.deepcopy(model.state_dict())
    (loss_of(model, 0) * float("nan")).backward()
    with pytest.raises(er.NonFiniteGradientError):
        optimizer.step()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a class of PyTorch's": ({"rows": torch.optim.Adam}, r"`rows` of ert\.optimizer .* Embedrock's .*got Adam"),
    "a name": ({"rows": "adam"}, r"got 'adam'\. For example: ert\.optimizer\(model, rows=ert\.Adam"),
    "ours for dense": ({"dense": lambda p, lr: ert.Adam(ert.Embedding(3, 2))}, r"`dense` .* PyTorch's .*got Adam"),
    "nothing": (
        {"dense": None},
        r"`dense` of ert\.optimizer must step .* 2 parameters \('1\.weight', '1\.bias'\): got No",
    ),
    "nothing for rows": ({"rows": None}, r"`rows` of ert\.optimizer must be an optimizer of Embedrock's .*: got None"),
}


@pytest.mark.parametrize("what", WRONG)
def test_arguments_that_cannot_work(what: str):
    arguments, text = WRONG[what]
    model = model_of()
    with pytest.raises(er.ArgumentError, match=text):
        one(model, **arguments)
    assert model[0].table.rule is None


@pytest.mark.parametrize(
    ("name", "meant"), [("weight_decay", ""), ("rate", ""), ("row", r" Did you mean 'rows'\?"), ("denses", " Did you")]
)
def test_arguments_that_there_are_not(name: str, meant: str):
    model = model_of()
    match = (
        rf"^ert\.optimizer has no argument `{name}`: .*dense=functools\.partial\(torch\.optim\.Adam, {name}=.*{meant}"
    )
    with pytest.raises(er.UnknownArgumentError, match=match):
        one(model, **{name: 0.1})
    assert model[0].table.rule is None


DIFFERENT: dict[str, tuple[Any, Any, str]] = {
    "SGD": (ert.SGD, torch.optim.SGD, "SGD would step the rows by 0.01, SGD all else by 0.001"),
    "two rules": (ert.Adagrad, torch.optim.Adam, "Adagrad would step the rows by 0.01, Adam all else by 0.001"),
    "with arguments": (
        functools.partial(ert.Momentum, momentum=0.5),
        functools.partial(torch.optim.SGD, momentum=0.5),
        "Momentum would step the rows by 0.01, SGD all else by 0.001",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_default_rates_that_differ_are_refused(what: str):
    rows, dense, text = DIFFERENT[what]
    model = model_of()
    remedy = r"Pass lr=.*rows=functools\.partial\(ert\.\w+, lr=0\.01\)"
    match = rf"^`lr` of ert\.optimizer is missing, and the defaults differ: ert\.{text}\. {remedy}"
    with pytest.raises(er.ArgumentError, match=match):
        one(model, rows=rows, dense=dense, lr=None)
    assert model[0].table.rule is None
    assert [group["lr"] for group in one(model, rows=rows, dense=dense, lr=0.1).param_groups] == [0.1, 0.1]


@pytest.mark.parametrize(
    ("rows", "dense", "rates"),
    [
        (ert.Adagrad, torch.optim.Adagrad, [0.01, 0.01]),
        (ert.Adam, torch.optim.SGD, [0.001, 0.001]),
        (functools.partial(ert.SGD, lr=0.1), torch.optim.SGD, [0.1, 0.001]),
        (ert.SGD, lambda parameters: torch.optim.SGD(parameters), [0.01, 0.001]),
        (ert.SGD, lambda parameters: torch.optim.SGD(parameters, lr=0.3), [0.01, 0.3]),
    ],
)
def test_rates_that_are_the_same_or_were_given_are_taken(rows: Any, dense: Any, rates: list[float]):
    assert [group["lr"] for group in one(model_of(), rows=rows, dense=dense, lr=None).param_groups] == rates


def test_a_model_of_rows_needs_nothing_for_others():
    optimizer = ert.optimizer(ert.Embedding(ROWS, 5), rows=ert.SGD)
    assert (optimizer.dense, optimizer.param_groups[0]["lr"]) == (None, 0.01)


def test_handles_among_the_dense_parameters():
    model = model_of()
    with pytest.raises(er.ArgumentError, match=r"must be made of ert\.dense_parameters\(model\)"):
        one(model, dense=torch.optim.Adam(model.parameters()))


def test_hooks():
    model = model_of()
    optimizer, seen = one(model), []
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append("before") or {**state, "more": 1})
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("after"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "more": 2})
    optimizer.register_step_post_hook(lambda *_: seen.append("stepped"))
    state = optimizer.state_dict()
    assert state["more"] == 2
    optimizer.load_state_dict(state)
    train(model, [optimizer], range(1))
    assert seen == ["before", "after", "stepped"]


def test_an_optimizer_that_needs_its_closure():
    with pytest.raises(er.UnsupportedError, match=r"LBFGS calls a closure many times"):
        one(model_of(), dense=torch.optim.LBFGS)


def test_errors_of_loops_name_it():
    """In a trainer, which takes one optimizer, nothing else would help."""
    layer = ert.Embedding(ROWS, 5)
    model = nn.Sequential(layer, nn.Linear(5, 1))
    for wrong in (torch.optim.Adam(model.parameters()), torch.optim.Adam(ert.dense_parameters(model))):
        with pytest.raises(ert.ForgottenGradientsError, match=r"optimizer = ert\.optimizer\(model, rows=ert\.Adam, "):
            train(model, [wrong], range(3))
        layer.handle.forget()


def test_states_of_others():
    model, other = model_of(), nn.Sequential(ert.Embedding(ROWS, 5), nn.Linear(5, 1, bias=False))
    with pytest.raises(ValueError, match=r"groups of \[1, 2\] parameters: got \[1, 1\]"):
        one(model).load_state_dict(one(other).state_dict())
    with pytest.raises(er.ArgumentError, match="of another optimizer"):
        one(model).load_state_dict(one(model, rows=ert.SGD).state_dict())
