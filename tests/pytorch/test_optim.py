"""Embedrock's optimizers against PyTorch's, and as `torch.optim.Optimizer`s."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from twins import DIM, ROWS, check_equal, embedding_twins, rows_of, weight_of

import embedrock as er
import embedrock.torch as ert
from embedrock.optimizers import RULES

IDS = torch.tensor([3, 1, 3, 7])


class Case(NamedTuple):
    """An optimizer of ours and the one of PyTorch's that it equals.

    Attributes:
        sparse: PyTorch's takes sparse gradients; otherwise dense ones.
        lazy: rows that a batch does not touch stay as they are in ours, but move in PyTorch's.
    """

    ours: type[ert.RowOptimizer]
    theirs: type[torch.optim.Optimizer]
    arguments: dict[str, Any]
    sparse: bool = False
    lazy: bool = False


CASES = {
    "SGD": Case(ert.SGD, torch.optim.SGD, {"lr": 0.1}),
    "Momentum": Case(ert.Momentum, torch.optim.SGD, {"lr": 0.1, "momentum": 0.8}, lazy=True),
    "Nesterov": Case(ert.Momentum, torch.optim.SGD, {"lr": 0.1, "momentum": 0.8, "nesterov": True}, lazy=True),
    "Adagrad": Case(ert.Adagrad, torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-6, "initial_accumulator_value": 0.2}),
    "RMSprop": Case(ert.RMSprop, torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.9, "eps": 1e-7}, lazy=True),
    "Adam": Case(ert.Adam, torch.optim.SparseAdam, {"lr": 0.1, "betas": (0.8, 0.99), "eps": 1e-6}, sparse=True),
    "AdamW": Case(
        ert.AdamW,
        torch.optim.AdamW,
        {"lr": 0.1, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1},
        lazy=True,
    ),
}


def batches(count: int, every_row: bool) -> list[Tensor]:
    """Skewed ids with repeats; with `every_row`, each batch has all rows too."""
    generator = torch.Generator().manual_seed(4)
    made = [(torch.rand(30, generator=generator) ** 3 * ROWS).long() for _ in range(count)]
    return [torch.cat([ids, torch.arange(ROWS)]) if every_row else ids for ids in made]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_like_torch(case: Case):
    mine, theirs = embedding_twins()
    theirs.sparse = case.sparse
    optimizers = case.ours(mine, **case.arguments), case.theirs(theirs.parameters(), **case.arguments)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]
    for step, ids in enumerate(batches(20, every_row=case.lazy)):
        factors = torch.randn(len(ids), DIM, generator=torch.Generator().manual_seed(step))
        for layer, optimizer, scheduler in zip((mine, theirs), optimizers, schedulers, strict=True):
            optimizer.zero_grad()
            (layer(ids).sin() * factors).sum().backward()
            optimizer.step()
            scheduler.step()
        check_equal(mine, theirs)


def test_dense_adam_like_torch():
    mine, theirs = embedding_twins()
    arguments = {"lr": 0.05, "betas": (0.8, 0.99)}
    optimizers = ert.Adam(mine, dense=True, **arguments), torch.optim.Adam(theirs.parameters(), **arguments)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 50) for each in optimizers]
    for ids in batches(100, every_row=False):
        for layer, optimizer, scheduler in zip((mine, theirs), optimizers, schedulers, strict=True):
            optimizer.zero_grad()
            layer(ids).square().sum().backward()
            optimizer.step()
            scheduler.step()
    torch.testing.assert_close(weight_of(mine), theirs.weight.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", RULES)
def test_a_schedule_may_end_at_zero(kind: type[er.Rule]):
    for options in ({}, {"dense": True}) if hasattr(kind, "dense") else ({},):
        layer = ert.Embedding(ROWS, DIM)
        optimizer = getattr(ert, kind.__name__)(layer, lr=0.1, **options)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 3))
        seen = []
        for ids in batches(6, every_row=False):
            optimizer.zero_grad()
            layer(ids).square().sum().backward()
            optimizer.step()
            schedule.step()
            seen.append(weight_of(layer))
        assert not torch.equal(seen[1], seen[2])
        assert torch.equal(seen[2], seen[-1])
        assert rows_of(layer).steps == 6
        optimizer.param_groups[0]["lr"] = float("nan")
        layer(IDS).sum().backward()
        with pytest.raises(er.ArgumentError, match=r"`lr` of .* got nan.*The step of Embedding.23, 5.* was refused"):
            optimizer.step()


@pytest.mark.parametrize("kind", [ert.RowwiseAdagrad, ert.RowwiseRMSprop, ert.Ftrl])
def test_rules_that_torch_lacks_step_like_the_table(kind: type[ert.RowOptimizer]):
    rule: Any = kind.rule_type
    layer, table = ert.Embedding(ROWS, DIM, seed=0), er.Table(ROWS, DIM, rule=rule(lr=0.2), seed=0)
    optimizer = kind(layer, lr=0.2)
    for ids in batches(5, every_row=False):
        optimizer.zero_grad()
        out = layer(ids)
        out.retain_grad()
        out.square().sum().backward()
        assert out.grad is not None
        table.update(ids.numpy(), out.grad.numpy())
        optimizer.step()
    assert torch.equal(weight_of(layer), torch.from_numpy(table.lookup(range(ROWS))))


def test_groups_that_do_not_fit_one_layer_bind_none():
    model = nn.ModuleDict({"user": ert.Embedding(ROWS, 8), "item": ert.Embedding(ROWS, 10)})
    match = r"divide the 10 columns of a row of 'item', Embedding\(23, 10\) into equal parts: got 4\. groups=2 does"
    with pytest.raises(er.ArgumentError, match=match):
        ert.RowwiseRMSprop(model, groups=4)
    assert (model["user"].table.rule, model["item"].table.rule) == (None, None)  # pyright: ignore
    optimizer = ert.RowwiseRMSprop(model, lr=0.1, groups=2)
    (model["user"](IDS).sum() + model["item"](IDS).sum()).backward()
    optimizer.step()
    assert model.state_dict()["item.rows.square_avg"].shape == (len(torch.unique(IDS)), 2)


def test_one_class_for_each_rule():
    from embedrock.optimizers import RULES

    for rule in RULES:
        optimizer = getattr(ert, rule.__name__)(ert.Embedding(ROWS, DIM))
        assert isinstance(optimizer, ert.RowOptimizer)
        assert issubclass(ert.RowOptimizer, torch.optim.Optimizer)
        assert optimizer.rule_type is rule
        assert set(optimizer.defaults) == {*inspect.signature(rule).parameters, "clip_value"}


def test_the_signature_is_that_of_the_rule():
    names = [*inspect.signature(ert.Adam).parameters]
    assert names == ["layers", "lr", "betas", "eps", "dense", "eps_hat", "clip_value", "reset_state"]
    assert inspect.signature(ert.Adam).parameters["lr"].default == 1e-3


@pytest.mark.parametrize("clip_value", [0.1, 1.0])
def test_clip_value_clamps_every_element(clip_value: float):
    mine, theirs = embedding_twins()
    rows = ert.SGD(mine, lr=1.0, clip_value=clip_value)
    dense = torch.optim.SGD(theirs.parameters(), lr=1.0)
    for layer in (mine, theirs):
        layer(IDS).square().sum().backward()
    torch.nn.utils.clip_grad_value_(theirs.parameters(), clip_value)
    rows.step()
    dense.step()
    check_equal(mine, theirs)


# ---------------------------------------------------------------- param groups, schedulers, closures, state


def two_layers() -> nn.ModuleDict:
    return nn.ModuleDict({"user": ert.Embedding(ROWS, DIM), "item": ert.Embedding(ROWS, DIM, seed=1)})


def test_param_groups_have_their_own_learning_rate():
    model = two_layers()
    before = [weight_of(layer) for layer in model.values()]
    optimizer = ert.SGD([{"params": model["user"]}, {"params": [model["item"]], "lr": 0.5}], lr=0.1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    (model["user"](IDS).sum() + model["item"](IDS).sum()).backward()
    optimizer.step()
    for layer, old, lr in zip(model.values(), before, (0.1, 0.5), strict=True):
        torch.testing.assert_close(weight_of(layer)[1], old[1] - lr)


def test_add_param_group():
    model = two_layers()
    optimizer = ert.SGD(model["user"], lr=0.1)
    optimizer.add_param_group({"params": model["item"], "lr": 0.2})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": model["user"]})
    with pytest.raises(er.ArgumentError, match="`lr`"):
        optimizer.add_param_group({"params": ert.Embedding(3, 2), "lr": -1.0})
    assert len(optimizer.param_groups) == 2


def test_whatever_a_scheduler_changes_counts_in_the_next_step():
    mine, theirs = embedding_twins()
    theirs.sparse = True
    optimizers = ert.Adam(mine, lr=0.1), torch.optim.SparseAdam(theirs.parameters(), lr=0.1)
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(each, max_lr=0.2, total_steps=12) for each in optimizers]
    for step in range(12):
        for layer, optimizer, scheduler in zip((mine, theirs), optimizers, schedulers, strict=True):
            optimizer.param_groups[0]["eps"] = 1e-8 * (1 + step)
            optimizer.zero_grad()
            layer(IDS + step).square().sum().backward()
            optimizer.step()
            scheduler.step()
        check_equal(mine, theirs)
    assert optimizers[0].param_groups[0]["betas"] == optimizers[1].param_groups[0]["betas"]


def test_a_learning_rate_may_be_a_tensor():
    layer = ert.Embedding(ROWS, DIM)
    optimizer = ert.SGD(layer, lr=torch.tensor(0.5))
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    before = weight_of(layer)
    layer(IDS).sum().backward()
    optimizer.step()
    torch.testing.assert_close(weight_of(layer)[1], before[1] - 0.25)


def test_closures():
    layer = ert.Embedding(ROWS, DIM)
    optimizer = ert.SGD(layer, lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = layer(IDS).square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.5 * losses[0]
    assert optimizer.step() is None


def test_hooks_run():
    layer, seen = ert.Embedding(ROWS, DIM), []
    optimizer = ert.SGD(layer)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.step()
    assert seen == ["before", "after"]


def test_state_dict_has_the_param_groups():
    model = two_layers()
    optimizer = ert.Adam(model, lr=0.1, betas=(0.5, 0.9), clip_value=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    scheduler.step()
    other = ert.Adam(two_layers())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.state_dict() == optimizer.state_dict()
    assert other.param_groups[0]["lr"] == pytest.approx(0.01)
    with pytest.raises(er.ArgumentError, match="another optimizer"):
        other.load_state_dict(ert.SGD(two_layers()).state_dict())


def test_a_copied_or_unpickled_optimizer_works():
    layer = ert.Embedding(ROWS, DIM, name="pickled")
    optimizer = ert.Adam(layer, lr=0.1)
    copies = copy.deepcopy((layer, optimizer)), pickle.loads(pickle.dumps((layer, optimizer)))
    for copied, its in copies:
        copied(IDS).sum().backward()
        its.step()
        assert copied.table.steps == 1
    assert copies[0][0].table is not layer.table
    assert copies[1][0].table is layer.table


def test_repr_shows_the_groups():
    assert "lr: 0.1" in repr(ert.Adam(ert.Embedding(ROWS, DIM), lr=0.1))


# ---------------------------------------------------------------- which layers


def test_layers_are_found_in_any_form():
    model = two_layers()
    every = [layer.handle for layer in model.values()]
    for layers in (model, [model["user"], model["item"]], every, iter(every), [{"params": model}]):
        found = [p for group in ert.SGD(layers).param_groups for p in group["params"]]
        assert all(a is b for a, b in zip(found, every, strict=True))
    assert ert.SGD(every[0]).param_groups[0]["params"][0] is every[0]


def test_dense_parameters_are_all_but_the_handles():
    model = nn.ModuleList([two_layers(), nn.Linear(2, 3), ert.EmbeddingBag(3, 2)])
    assert [tuple(p.shape) for p in ert.dense_parameters(model)] == [(3, 2), (3,)]
    assert len(ert.handles(model)) == 3
    assert {*map(id, ert.handles(model)), *map(id, ert.dense_parameters(model))} == set(map(id, model.parameters()))


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        (nn.Linear(2, 3), "no embedding layer"),
        ([], "no embedding layer"),
        (nn.Linear(2, 3).parameters(), r"tensor of shape \(3, 2\).*dense_parameters"),
        (ert.Embedding(3, 2).named_parameters(), "'handle'"),
        (3, "got 3"),
    ],
)
def test_no_layers(layers, text):
    with pytest.raises(er.ArgumentError, match=text):
        ert.Adam(layers)


@pytest.mark.parametrize(
    ("kind", "arguments", "error", "text"),
    [
        (ert.Adam, {"weight_decay": 0.1}, er.UnsupportedError, "AdamW"),
        (ert.Adam, {"amsgrad": True}, er.UnsupportedError, "`amsgrad`"),
        (ert.SGD, {"momentum": 0.9}, er.UnsupportedError, "ert.Momentum"),
        (ert.SGD, {"foreach": True}, er.UnsupportedError, "own kernels"),
        (ert.Adam, {"differentiable": True}, er.UnsupportedError, "cannot be differentiated"),
        (ert.Adam, {"maximize": True}, er.UnsupportedError, "negate the loss"),
        (ert.Adam, {"beta": 0.1}, er.UnknownArgumentError, "'beta'"),
        (ert.Adam, {"lr": -1.0}, er.ArgumentError, "`lr`"),
        (ert.Adam, {"betas": (0.9, 1.0)}, er.ArgumentError, "betas"),
        (ert.Adam, {"clip_value": 0.0}, er.ArgumentError, "`clip_value`"),
    ],
)
def test_refused_arguments(kind, arguments, error, text):
    layer = ert.Embedding(ROWS, DIM)
    with pytest.raises(error, match=text):
        kind(layer, **arguments)
    assert layer.table.rule is None


@pytest.mark.parametrize("clip_value", [-3, 0.0, float("nan"), "1", True])
def test_a_clip_value_that_cannot_work_is_refused_at_the_step(clip_value):
    layer = ert.Embedding(ROWS, DIM)
    optimizer = ert.SGD(layer)
    optimizer.param_groups[0]["clip_value"] = clip_value
    layer(IDS).sum().backward()
    with pytest.raises(er.ArgumentError, match="`clip_value`"):
        optimizer.step()
    assert layer.table.steps == 0


@pytest.mark.parametrize("kind", [ert.Embedding, ert.EmbeddingBag])
def test_dense_adam_is_refused_beside_max_norm(kind):
    model = nn.ModuleDict({"item": ert.Embedding(ROWS, DIM), "user": kind(ROWS, DIM, max_norm=1.5)})
    text = r"`max_norm` \(1.5\) of 'user', Embedding.*Use Adam\(\)"
    with pytest.raises(er.UnsupportedError, match=text):
        ert.Adam(model, dense=True)
    assert [rows_of(layer).rule for layer in model.values()] == [None, None]
    with pytest.raises(er.UnsupportedError, match=text):
        ert.Adam(copy.deepcopy(model["user"]), dense=True)
    optimizer = ert.Adam(model["item"], dense=True)
    with pytest.raises(er.UnsupportedError, match=text):
        optimizer.add_param_group({"params": model["user"]})
    assert len(optimizer.param_groups) == 1
    ert.Adam(model["user"])


def test_max_norm_is_refused_for_a_table_under_dense_adam():
    table = er.Table(ROWS, DIM, rule=er.Adam(dense=True))
    layer = ert.Embedding(table)
    with pytest.raises(er.UnsupportedError, match="`max_norm`"):
        ert.Embedding(table, max_norm=1.0)
    ert.Adam(layer)  # the layer that was not made leaves no trace
    assert table.rule == er.Adam(dense=True)


# ---------------------------------------------------------------- all tables or none


REFUSALS = {
    "memory": (er.MemoryBudgetError, lambda layer: None),
    "closed": (er.ClosedTableError, lambda layer: layer.table.close()),
    "nan": (er.NonFiniteGradientError, lambda layer: layer.handle.grad.fill_(float("nan"))),
}


@pytest.mark.parametrize(("error", "spoil"), REFUSALS.values(), ids=REFUSALS)
@pytest.mark.parametrize("order", [1, -1])
def test_a_step_is_made_by_all_tables_or_by_none(error, spoil, order):
    small = error is er.MemoryBudgetError
    first = ert.Embedding(ROWS, DIM)
    second = ert.Embedding(None, DIM, memory=4096 if small else None)
    optimizer = ert.SGD([first, second][::order], lr=1.0)
    before = weight_of(first)
    for layer in (first, second):
        layer(torch.arange(ROWS)).sum().backward()
    if small:
        second(torch.arange(5000)).sum().backward()
    spoil(second)
    with pytest.raises(error):
        optimizer.step()
    assert first.table.steps == 0
    assert first.table.stats()["rows_touched"] == 0
    assert torch.equal(weight_of(first), before)
    second.handle.forget()
    optimizer.step()  # the first one's gradients still wait
    torch.testing.assert_close(weight_of(first), before - 1)


def test_a_step_that_is_skipped_needs_no_room():
    layer = ert.Embedding(None, DIM, memory=4096, on_nonfinite="skip")
    optimizer = ert.SGD(layer)
    (layer(torch.arange(5000)).sum() * float("nan")).backward()
    optimizer.step()
    assert layer.table.stats()["skipped_steps"] == 1


# ---------------------------------------------------------------- one optimizer at a time


def test_the_optimizer_made_last_holds_the_rows():
    layer = ert.Embedding(ROWS, DIM)
    first, second = ert.Adam(layer), ert.Adam(layer)
    layer(IDS).sum().backward()
    with pytest.raises(er.ArgumentError, match="one optimizer at a time"):
        first.step()
    assert layer.table.steps == 0
    second.step()
    assert layer.table.steps == 1


def test_an_optimizer_of_the_same_kind_goes_on_with_the_rows_state():
    mine, theirs = embedding_twins()
    theirs.sparse = True
    dense = torch.optim.SparseAdam(theirs.parameters(), lr=0.1)
    for _ in range(3):
        rows = ert.Adam(mine, lr=0.1)
        for layer, optimizer in ((mine, rows), (theirs, dense)):
            optimizer.zero_grad()
            layer(IDS).square().sum().backward()
            optimizer.step()
    check_equal(mine, theirs)


def test_one_of_another_kind_begins_anew_where_it_may():
    layer = ert.Embedding(ROWS, DIM)
    optimizer = ert.Adam(layer, lr=0.1)
    layer(IDS).sum().backward()
    optimizer.step()
    before = weight_of(layer)
    other = ert.SGD(layer, lr=1.0, reset_state=True)
    assert torch.equal(weight_of(layer), before)
    other.step()  # the gradient is still there, as it is in PyTorch
    torch.testing.assert_close(weight_of(layer)[1], before[1] - 1)


def test_a_tables_own_rule_gives_way_to_the_optimizer():
    layer = ert.Embedding(ROWS, DIM, rule=er.SGD(lr=9.0), padding_idx=0)
    before = weight_of(layer)
    optimizer = ert.SGD(layer, lr=0.5)
    layer(IDS).sum().backward()
    optimizer.step()
    torch.testing.assert_close(weight_of(layer)[1], before[1] - 0.5)


def test_what_a_tables_own_rule_stores_stays_unless_the_optimizer_says_otherwise():
    model = nn.ModuleList(ert.Embedding(ROWS, DIM, rule=rule) for rule in (er.Adam(dense=True), er.Adam(), None))
    optimizer = ert.Adam(model, lr=0.1)
    for layer in model:
        layer(IDS).sum().backward()
    optimizer.step()
    assert [rows_of(layer).rule for layer in model] == [er.Adam(0.1, dense=True), er.Adam(0.1), er.Adam(0.1)]
    ert.Adam(model, dense=False, reset_state=True)
    assert [rows_of(layer).rule for layer in model] == [er.Adam()] * 3


def test_optimizers_may_be_subclassed():
    class Mine(ert.SGD):
        """A user's own."""

    layer = ert.Embedding(ROWS, DIM)
    optimizer = Mine(layer, lr=0.5)
    layer(IDS).sum().backward()
    optimizer.step()
    assert layer.table.rule == er.SGD(0.5)


def test_a_rule_changed_behind_the_optimizers_back_is_noticed():
    layer = ert.Embedding(ROWS, DIM)
    optimizer = ert.Adagrad(layer)
    layer.table.set_rule(er.RowwiseAdagrad())
    layer(IDS).sum().backward()
    with pytest.raises(er.ArgumentError, match=r"laid out for RowwiseAdagrad.*Make the ert.Adagrad anew"):
        optimizer.step()


def test_what_a_row_stores_cannot_change_by_param_group():
    layer = ert.Embedding(ROWS, DIM)
    optimizer = ert.Adam(layer)
    optimizer.param_groups[0]["dense"] = True
    layer(IDS).sum().backward()
    with pytest.raises(er.ArgumentError, match="anew"):
        optimizer.step()


def test_layers_without_a_gradient_are_left_alone():
    model = two_layers()
    optimizer = ert.Adam(model)
    model["user"](IDS).sum().backward()
    optimizer.step()
    assert [rows_of(layer).steps for layer in model.values()] == [1, 0]
