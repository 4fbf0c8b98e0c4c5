"""The handle: its gradient is the norm of the rows' gradient, and what is done to it is done to the rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint
from twins import DIM, ROWS, check_equal, embedding_twins, gradient_of, rows_of, weight_of

import embedrock as er
import embedrock.torch as ert
from embedrock.batch.gradients import RowGradients

IDS = torch.tensor([3, 1, 3, 7])


def exact_norm(layer: ert.Embedding) -> float:
    """The norm of the pending gradients, rounded once."""
    grads = layer.handle.pending.grads
    assert isinstance(grads, RowGradients)  # the rows are on the CPU
    return float(np.float32(np.sqrt(np.square(grads.values, dtype=np.float64).sum())))


def grad_of(layer: nn.Module) -> float:
    assert isinstance(layer, ert.Embedding | ert.EmbeddingBag)
    assert layer.handle.grad is not None
    return layer.handle.grad.item()


def factors(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def twins() -> tuple[ert.Embedding, nn.Embedding]:
    return embedding_twins()


def test_grad_is_the_norm_of_the_rows_gradient(twins):
    mine, theirs = twins
    assert mine.handle.grad is None
    for layer in twins:
        (layer(IDS) * factors(0, 4, DIM)).sum().backward()
    assert grad_of(mine) == exact_norm(mine)
    torch.testing.assert_close(mine.handle.grad, theirs.weight.grad.norm())


def test_accumulation_is_exact(twins):
    mine, theirs = twins
    for seed in range(9):
        for layer in twins:
            (layer(IDS + seed % 3) * factors(seed, 4, DIM)).sum().backward()
        assert grad_of(mine) == exact_norm(mine)
    assert torch.equal(gradient_of(mine), theirs.weight.grad)


def test_twice_in_one_forward(twins):
    mine, theirs = twins
    for layer in twins:
        (layer(IDS) * factors(0, 4, DIM) + layer(IDS.flip(0)) * factors(1, 4, DIM)).square().sum().backward()
    assert grad_of(mine) == exact_norm(mine)
    torch.testing.assert_close(gradient_of(mine), theirs.weight.grad)


def test_backward_twice_adds_twice(twins):
    mine, theirs = twins
    for layer in twins:
        loss = layer(IDS).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    torch.testing.assert_close(gradient_of(mine), theirs.weight.grad)


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_backward_twice_without_the_graph_is_pytorchs_error(kind: str):
    layer = getattr(ert, kind)(ROWS, DIM)
    loss = layer(IDS[None]).sum()
    loss.backward()
    norm = grad_of(layer)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    assert grad_of(layer) == norm


def test_an_unmodified_gradient_is_applied_as_it_is():
    # The norm is rounded to float32: dividing by it must nevertheless give 1, whatever the gradients are.
    for seed in range(50):
        mine, theirs = embedding_twins()
        rows, dense = ert.SGD(mine, lr=1.0), torch.optim.SGD(theirs.parameters(), lr=1.0)
        for part in range(3):
            for layer in (mine, theirs):
                (layer(IDS + part) * factors(seed + part, 4, DIM)).sum().backward()
        rows.step()
        dense.step()
        assert torch.equal(weight_of(mine), theirs.weight)


@pytest.mark.parametrize("factor", [0.5, 0.37, -2.0, 1e-20, 1e20])
def test_scaling_the_gradient_scales_the_rows(twins, factor):
    mine, theirs = twins
    for layer, parameter in ((mine, mine.handle), (theirs, theirs.weight)):
        (layer(IDS) * factors(0, 4, DIM)).sum().backward()
        parameter.grad *= factor
    torch.testing.assert_close(gradient_of(mine), theirs.weight.grad)


def test_scaling_between_accumulated_backwards(twins):
    mine, theirs = twins
    for seed in range(3):
        for layer, parameter in ((mine, mine.handle), (theirs, theirs.weight)):
            (layer(IDS + seed) * factors(seed, 4, DIM)).sum().backward()
            parameter.grad *= 0.25
    assert grad_of(mine) == exact_norm(mine) * 0.25
    torch.testing.assert_close(gradient_of(mine), theirs.weight.grad)


def zero_by_optimizer(layer: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def zero_by_optimizer_in_place(layer: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def zero_by_module(layer: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    layer.zero_grad()


def zero_by_module_in_place(layer: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    layer.zero_grad(set_to_none=False)


def zero_by_hand(layer: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in layer.parameters():
        parameter.grad = None


ZEROINGS = [zero_by_optimizer, zero_by_optimizer_in_place, zero_by_module, zero_by_module_in_place, zero_by_hand]


@pytest.mark.parametrize("zero", ZEROINGS)
def test_zeroing_from_any_side_drops_the_rows(twins, zero: Callable):
    mine, theirs = twins
    optimizers = ert.SGD(mine, lr=1.0), torch.optim.SGD(theirs.parameters(), lr=1.0)
    for layer, optimizer in zip(twins, optimizers, strict=True):
        layer(IDS).sum().backward()
        zero(layer, optimizer)
        optimizer.step()
        check_equal(mine, theirs)
        (layer(IDS[:2]) * 3).sum().backward()
    assert torch.equal(gradient_of(mine), theirs.weight.grad)
    assert grad_of(mine) == exact_norm(mine)


@pytest.mark.parametrize("zero", ZEROINGS)
def test_a_step_after_zeroing_counts_as_in_torch(twins, zero: Callable):
    # A gradient of None is no step; one zeroed in place is a step, which moves dense Adam's rows.
    mine, theirs = twins
    optimizers = ert.Adam(mine, lr=0.1, dense=True), torch.optim.Adam(theirs.parameters(), lr=0.1)
    for layer, optimizer in zip(twins, optimizers, strict=True):
        for ids in (IDS, IDS + 1):
            layer(ids).sum().backward()
            optimizer.step()
            zero(layer, optimizer)
            optimizer.step()
    check_equal(mine, theirs)
    assert mine.table.steps == theirs_steps(optimizers[1])


def theirs_steps(optimizer: torch.optim.Optimizer) -> int:
    (state,) = optimizer.state.values()
    return int(state["step"])


def test_a_step_without_zeroing_applies_the_gradient_again(twins):
    mine, theirs = twins
    for layer, optimizer in zip(
        twins, (ert.SGD(mine, lr=1.0), torch.optim.SGD(theirs.parameters(), lr=1.0)), strict=True
    ):
        for _ in range(3):
            (layer(IDS) * factors(0, 4, DIM)).sum().backward()
            optimizer.step()
            optimizer.step()
    check_equal(mine, theirs)


def test_autograd_grad_returns_the_norm_and_leaves_nothing(twins):
    mine, theirs = twins
    for uses in (1, 2, 3):
        losses = [
            torch.stack([(layer(IDS + k) * factors(k, 4, DIM)).sum() for k in range(uses)]).sum() for layer in twins
        ]
        (norm,) = torch.autograd.grad(losses[0], [mine.handle])
        (gradient,) = torch.autograd.grad(losses[1], [theirs.weight])
        torch.testing.assert_close(norm, gradient.norm())
    assert mine.handle.grad is None
    assert mine.handle.pending.grads is None
    for layer in twins:
        layer(IDS).sum().backward()
    assert torch.equal(gradient_of(mine), theirs.weight.grad)


def test_autograd_grad_between_accumulated_backwards(twins):
    mine, theirs = twins
    for layer, parameter in ((mine, mine.handle), (theirs, theirs.weight)):
        layer(IDS).sum().backward()
        torch.autograd.grad((layer(IDS) * 9).sum(), [parameter])
        layer(IDS).sum().backward()
    assert torch.equal(gradient_of(mine), theirs.weight.grad)


def test_gradients_of_per_sample_weights_alone_leave_the_rows_alone():
    bag = ert.EmbeddingBag(ROWS, DIM, mode="sum")
    weights = torch.ones(1, 2, requires_grad=True)
    torch.autograd.grad(bag(torch.tensor([[1, 2]]), None, weights).sum(), [weights])
    assert bag.handle.grad is None
    assert bag.handle.pending.grads is None


@pytest.mark.parametrize("with_rows", [True, False])
def test_backward_for_some_parameters_only(with_rows):
    mine, theirs = embedding_twins()
    dense = nn.Linear(DIM, 1)
    for layer in (mine, theirs):
        wanted = [*dense.parameters(), *(layer.parameters() if with_rows else [])]
        dense(layer(IDS)).square().sum().backward(inputs=wanted)
    if with_rows:
        torch.testing.assert_close(gradient_of(mine), theirs.weight.grad)
    else:
        assert mine.handle.grad is theirs.weight.grad is None
        assert mine.handle.pending.grads is None


def test_hooks_on_the_handle_are_refused():
    with pytest.raises(er.UnsupportedError, match="layer's output"):
        ert.Embedding(ROWS, DIM).handle.register_hook(lambda grad: grad * 0.5)


class Broken(torch.autograd.Function):
    """Fails in its backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        raise ZeroDivisionError


def test_a_backward_that_fails_leaves_nothing_behind(twins):
    mine, theirs = twins
    before = torch.ones(1, requires_grad=True)
    # The lookup's backward comes first, then that of Broken fails, before the handle's gradient is accumulated.
    loss = (mine(IDS) * Broken.apply(before)).sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    mine.zero_grad()
    for layer in twins:
        layer(IDS).sum().backward()
    assert torch.equal(gradient_of(mine), theirs.weight.grad)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(twins, use_reentrant):
    mine, theirs = twins
    scale = torch.ones(1, requires_grad=True)
    for layer in twins:
        inside = checkpoint(lambda s, layer=layer: (layer(IDS) * s).tanh(), scale, use_reentrant=use_reentrant)
        (inside + layer(IDS.flip(0)).sin()).sum().backward()
    torch.testing.assert_close(gradient_of(mine), theirs.weight.grad)
    assert grad_of(mine) == exact_norm(mine)


def test_double_backward_is_refused():
    layer = ert.Embedding(ROWS, DIM)
    loss = layer(IDS).square().sum()
    with pytest.raises(er.UnsupportedError, match=r"create_graph=True.*dense_parameters"):
        torch.autograd.grad(loss, [layer.handle], create_graph=True)
    assert layer.handle.pending.grads is None


def test_second_derivatives_of_the_other_parameters():
    mine, theirs = embedding_twins()
    dense = nn.Linear(DIM, 1)
    grads = []
    for layer in (mine, theirs):
        its = copy.deepcopy(dense)
        (first,) = torch.autograd.grad(its(layer(IDS)).square().sum(), [its.weight], create_graph=True)
        first.square().sum().backward()
        grads.append(its.weight.grad)
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(gradient_of(mine), theirs.weight.grad)


# ---------------------------------------------------------------- loss scaling and clipping


@pytest.mark.parametrize("broken_step", [None, 0, 3])
def test_grad_scaler_like_torch(broken_step: int | None):
    mine, theirs = embedding_twins(ROWS, 16)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    optimizers = ert.Adam(mine, lr=0.1), torch.optim.SparseAdam(theirs.parameters(), lr=0.1)
    theirs.sparse = True
    for step in range(6):
        for layer, optimizer, scaler in zip((mine, theirs), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            loss = (layer(IDS + step) * factors(step, 4, 16)).sum() * (float("inf") if step == broken_step else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        check_equal(mine, theirs)
    assert mine.table.steps == 6 - (broken_step is not None)


def test_grad_scaler_is_bit_equal():
    mine, theirs = embedding_twins(ROWS, 16)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**16) for _ in range(2)]
    optimizers = ert.SGD(mine, lr=0.5), torch.optim.SGD(theirs.parameters(), lr=0.5)
    for step in range(6):
        for layer, optimizer, scaler in zip((mine, theirs), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            loss = (layer(IDS + step) * factors(step, 4, 16)).sum() * (float("nan") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)  # unscales by itself
            scaler.update()
        assert torch.equal(weight_of(mine), theirs.weight)


@pytest.mark.parametrize("foreach", [True, False])
def test_clip_grad_norm_like_torch(foreach: bool):
    torch.manual_seed(0)  # float32 sums of other weights differ by more than the bound, once in many runs
    mine, theirs = embedding_twins(ROWS, 16)
    models = [nn.Sequential(layer, nn.Linear(16, 1)) for layer in (mine, theirs)]
    models[1][1].load_state_dict(models[0][1].state_dict())
    optimizers = [
        [ert.SGD(models[0], lr=0.05), torch.optim.SGD(ert.dense_parameters(models[0]), lr=0.05)],
        [torch.optim.SGD(models[1].parameters(), lr=0.05)],
    ]
    parameters = [*ert.dense_parameters(models[0]), *ert.handles(models[0])], models[1].parameters()
    parameters = [list(each) for each in parameters]
    for step in range(8):
        norms = []
        for model, group, each in zip(models, optimizers, parameters, strict=True):
            model.zero_grad()
            (model(IDS + step) * 10).square().sum().backward()
            norms.append(clip_grad_norm_(each, 1.0, foreach=foreach))
            for optimizer in group:
                optimizer.step()
        assert norms[1] > 1.0  # it was clipped
        torch.testing.assert_close(*norms)
        check_equal(mine, theirs)
        torch.testing.assert_close(models[0][1].weight, models[1][1].weight)


def test_clipping_to_more_than_the_norm_changes_no_bit():
    mine, theirs = embedding_twins()
    rows, dense = ert.SGD(mine, lr=1.0), torch.optim.SGD(theirs.parameters(), lr=1.0)
    for layer, optimizer in ((mine, rows), (theirs, dense)):
        (layer(IDS) * factors(0, 4, DIM)).sum().backward()
        clip_grad_norm_(layer.parameters(), 1e6)
        optimizer.step()
    assert torch.equal(weight_of(mine), theirs.weight)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite(bad: float):
    model = nn.ModuleList([ert.Embedding(ROWS, DIM), ert.Embedding(ROWS, DIM, seed=1)])
    optimizer = ert.Adam(model, lr=0.1)
    before = weight_of(model[0])
    loss = model[0](IDS).sum() + (model[1](IDS) * torch.tensor([1, bad, 1, 1])[:, None]).sum()
    loss.backward()
    assert grad_of(model[1]) == float("inf")
    with pytest.raises(er.NonFiniteGradientError, match="NaN or Inf") as caught:
        optimizer.step()
    assert (caught.value.count, caught.value.ids.tolist()) == (1, [1])
    assert [rows_of(layer).steps for layer in model] == [0, 0]
    assert torch.equal(weight_of(model[0]), before)
    optimizer.zero_grad()
    (model[0](IDS).sum() + model[1](IDS).sum()).backward()
    optimizer.step()
    assert [rows_of(layer).steps for layer in model] == [1, 1]


def test_tables_may_skip_steps_that_are_not_finite():
    layer = ert.Embedding(ROWS, DIM, on_nonfinite="skip")
    optimizer = ert.Adam(layer)
    (layer(IDS) * float("nan")).sum().backward()
    optimizer.step()
    assert (layer.table.steps, layer.table.stats()["skipped_steps"]) == (0, 1)


def test_gradients_too_large_for_a_float32_norm():
    mine, theirs = embedding_twins(ROWS, 64)
    for layer in (mine, theirs):
        (layer(IDS) * 3e38).sum(1)[:2].sum().backward()
    assert grad_of(mine) == float("inf")
    assert theirs.weight.grad is not None
    assert torch.equal(gradient_of(mine), theirs.weight.grad)  # still there, for a step that nobody scaled


def test_a_gradient_set_by_hand_is_refused():
    layer = ert.Embedding(ROWS, DIM)
    optimizer = ert.SGD(layer)
    layer.handle.grad = torch.tensor(3.0)
    with pytest.raises(er.ArgumentError, match="set by hand"):
        optimizer.step()


def test_a_penalty_on_all_parameters_is_refused():
    mine = ert.Embedding(ROWS, DIM, name="items")
    before = weight_of(mine)
    for penalty in (Tensor.square, Tensor.abs, Tensor.sum, Tensor.norm):
        with pytest.raises(er.UnsupportedError, match=r"reads the value of the handle of .*items.*dense_parameters"):
            (mine(IDS).sum() + sum(penalty(p).sum() for p in mine.parameters())).backward()
    assert torch.equal(weight_of(mine), before)
    assert mine.handle.grad is None


# ---------------------------------------------------------------- layers that share a table


def test_layers_on_one_table_share_its_handle():
    table = er.Table(ROWS, DIM)
    first, second = ert.Embedding(table, padding_idx=3), ert.EmbeddingBag(table, mode="sum")
    theirs = nn.Embedding(ROWS, DIM, padding_idx=3, _weight=weight_of(first))
    bag = nn.EmbeddingBag(ROWS, DIM, mode="sum", _weight=theirs.weight)
    bag.weight = theirs.weight
    model = nn.ModuleList([first, second])
    assert first.handle is second.handle
    assert len(list(model.parameters())) == 1
    rows, dense = ert.Adam(model, lr=0.1), torch.optim.SparseAdam([theirs.weight], lr=0.1)
    theirs.sparse = bag.sparse = True
    for step in range(3):
        for one, many, optimizer in ((first, second, rows), (theirs, bag, dense)):
            optimizer.zero_grad()
            ((one(IDS) + many(IDS[:, None] + step)) * factors(step, 4, DIM)).square().sum().backward()
            optimizer.step()
    check_equal(first, theirs)
    assert table.steps == 3


def test_a_new_layer_on_a_table_whose_layer_is_gone():
    table = er.Table(ROWS, DIM)
    layer = ert.Embedding(table)
    layer.requires_grad_(False)
    del layer
    assert ert.Embedding(table).handle.requires_grad


def test_a_handle_does_not_keep_its_table_alive_in_a_cycle():
    import gc
    import weakref

    gc.disable()
    try:
        layer = ert.Embedding(ROWS, DIM)
        optimizer = ert.SGD(layer)
        layer(IDS).sum().backward()
        optimizer.step()
        table = weakref.ref(layer.table)
        del layer, optimizer
        assert table() is None
    finally:
        gc.enable()


def test_a_handle_is_found_in_a_list_of_parameters():
    model = torch.nn.ModuleList([ert.Embedding(9, 4), ert.Embedding(10, 4), torch.nn.Linear(4, 1)])
    parameters = list(model.parameters())
    for at, sought in enumerate(parameters):
        assert [torch.equal(one, sought) for one in parameters] == [one == at for one in range(len(parameters))]
    for other in (parameters[0].clone(), ert.Embedding(9, 4).handle, torch.zeros(9, 4)):
        with pytest.raises(er.UnsupportedError, match="`equal` reads the value"):
            torch.equal(parameters[0], other)


# ---------------------------------------------------------------- numbers that are made when code looks at them


MANY = 26


def collections_of_many() -> tuple[ert.EmbeddingBagCollection, dict[str, nn.EmbeddingBag]]:
    names = [f"t{number}" for number in range(MANY)]
    mine = ert.EmbeddingBagCollection([ert.EmbeddingBagConfig(ROWS, DIM, name, pooling="sum") for name in names])
    theirs = {name: nn.EmbeddingBag(ROWS, DIM, mode="sum") for name in names}
    with torch.no_grad():
        for name in names:
            theirs[name].weight.copy_(weight_of(mine.layer_of(name)))
    return mine, theirs


def losses_of_many(mine: ert.EmbeddingBagCollection, theirs: dict[str, nn.EmbeddingBag], seed: int) -> list[Tensor]:
    given = {name: (IDS + number + seed)[:, None] % ROWS for number, name in enumerate(theirs)}
    outputs = mine(given), {name: theirs[name](ids) for name, ids in given.items()}
    return [(torch.cat(list(each.values()), 1) * factors(seed, 4, MANY * DIM)).sum() for each in outputs]


def train_many(change: Callable[[int, list[list[Any]]], None], backwards: int = 1) -> None:
    """Train both for three steps. Before each, change the gradients: those of the tables of each."""
    mine, theirs = collections_of_many()
    handles = [mine.layer_of(name).handle for name in theirs]
    weights = [theirs[name].weight for name in theirs]
    optimizers = ert.SGD(mine, lr=1.0), torch.optim.SGD(weights, lr=1.0)
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for k in range(backwards):
            for loss in losses_of_many(mine, theirs, 10 * step + k):
                loss.backward()
            change(step, [handles, weights])
        for optimizer in optimizers:
            optimizer.step()
        for name, weight in zip(theirs, weights, strict=True):
            torch.testing.assert_close(weight_of(mine.layer_of(name)), weight.detach())


def zero_one(step: int, both: list[list[Any]]) -> None:
    for parameters in both:
        if step == 1:
            parameters[7].grad = None
        else:
            parameters[7 + step].grad.zero_()


def clip_one(step: int, both: list[list[Any]]) -> None:
    norms = [clip_grad_norm_([parameters[5 + step]], 0.5) for parameters in both]
    torch.testing.assert_close(*norms)


def look_at_some(step: int, both: list[list[Any]]) -> None:
    for mine, theirs in list(zip(*both, strict=True))[:: 2 + step]:
        torch.testing.assert_close(mine.grad, theirs.grad.norm())


@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("change", [zero_one, clip_one, look_at_some, lambda step, both: None])
def test_gradients_of_many_tables(change: Callable, backwards: int):
    train_many(change, backwards)


def test_nobody_looks_at_the_gradients_of_a_plain_step():
    mine, theirs = collections_of_many()
    optimizer = ert.Adam(mine)
    for step in range(2):
        optimizer.zero_grad()
        losses_of_many(mine, theirs, step)[0].backward()
        optimizer.step()
        assert all(handle.pending.seen is None for handle in ert.handles(mine))
    mine.zero_grad()
    assert all(handle.gradients() is None for handle in ert.handles(mine))


def test_a_gradient_put_back_is_that_of_the_rows(twins):
    mine, theirs = twins
    for layer, parameter in ((mine, mine.handle), (theirs, theirs.weight)):
        (layer(IDS) * factors(0, 4, DIM)).sum().backward()
        kept, parameter.grad = parameter.grad, None
        parameter.grad = kept
        (layer(IDS + 1) * factors(1, 4, DIM)).sum().backward()
    torch.testing.assert_close(gradient_of(mine), theirs.weight.grad)
    del mine.handle.grad
    assert mine.handle.grad is None


def test_a_hook_sees_the_gradient_when_autograd_has_accumulated_it(twins):
    mine, _ = twins
    mine(IDS).sum().backward()
    mine.zero_grad()
    seen: list[float] = []
    node = mine.handle.view_as(mine.handle).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: seen.append(grad_of(mine)))  # as of `_apply_optimizer_in_backward`
    mine(IDS).sum().backward()
    assert seen == [exact_norm(mine)]
    mine.handle.register_post_accumulate_grad_hook(lambda handle: seen.append(handle.grad.item()))
    mine(IDS).sum().backward()
    assert seen[2] == exact_norm(mine) == grad_of(mine)


def test_looked_at_in_inference_mode(twins):
    mine, theirs = twins
    for layer in twins:
        layer(IDS).square().sum().backward()
    with torch.inference_mode():
        norm = grad_of(mine)
    assert norm == exact_norm(mine)
    mine.handle.grad *= 0.5
    torch.testing.assert_close(gradient_of(mine), theirs.weight.grad * 0.5)
