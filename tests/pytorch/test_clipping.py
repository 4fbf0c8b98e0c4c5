"""Clipping by norms of any order and by value, as PyTorch does it to a dense weight's gradient."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from twins import DIM, ROWS, check_equal, embedding_twins, gradient_of, weight_of

import embedrock as er
import embedrock.torch as ert
from embedrock.torch.training.handle_gradient import HandleGradient

IDS = torch.tensor([3, 1, 3, 7])
ORDERS = [1.0, 2.0, 3.0, 0.5, math.inf, 0.0]


class Twin:
    """A model of rows and a dense layer, and PyTorch's own of the same weights."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.mine, self.theirs = embedding_twins()
        dense = nn.Linear(DIM, 1)
        self.models = [nn.Sequential(self.mine, dense), nn.Sequential(self.theirs, copy.deepcopy(dense))]
        self.parameters = [list(model.parameters()) for model in self.models]
        self.optimizers = [
            [ert.SGD(self.mine, lr=0.1), torch.optim.SGD(ert.dense_parameters(self.models[0]), lr=0.1)],
            [torch.optim.SGD(self.models[1].parameters(), lr=0.1)],
        ]

    def backward(self, scale: float = 1.0) -> None:
        for model in self.models:
            (model(IDS) * torch.tensor([1.0, -2.0, 3.0, 5.0])[:, None] * scale).square().sum().backward()

    def step(self) -> None:
        for optimizer in (each for group in self.optimizers for each in group):
            optimizer.step()
            optimizer.zero_grad()

    def check(self) -> None:
        torch.testing.assert_close(gradient_of(self.mine), self.theirs.weight.grad)
        self.step()
        check_equal(self.mine, self.theirs)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("order", ORDERS)
def test_clip_grad_norm_of_any_order(order: float, foreach: bool | None):
    twin = Twin()
    for max_norm in (0.5, 1e6):
        twin.backward()
        norms = [clip_grad_norm_(each, max_norm, norm_type=order, foreach=foreach) for each in twin.parameters]
        assert type(norms[0]) is Tensor
        torch.testing.assert_close(*norms)
        twin.check()


@pytest.mark.parametrize("order", ORDERS)
def test_norms_after_scaling_and_accumulating(order: float):
    twin = Twin()
    for factor in (0.25, -3.0, 1.0):
        twin.backward()
        for parameters in twin.parameters:
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad *= factor
        norms = [torch.linalg.vector_norm(each[0].grad, order) for each in twin.parameters]
        torch.testing.assert_close(*norms)
    grads = [[p.grad for p in each if p.grad is not None] for each in twin.parameters]
    norms = [torch.nn.utils.get_total_norm(each, order) for each in grads]
    for each, norm in zip(twin.parameters, norms, strict=True):
        torch.nn.utils.clip_grads_with_norm_(each, 1.0, norm)
    twin.check()


def test_the_ways_to_ask_for_a_norm():
    twin = Twin()
    twin.backward()
    mine, theirs = twin.mine.handle.grad, twin.theirs.weight.grad
    assert mine is not None
    assert theirs is not None
    for ask in (
        lambda g: g.norm(),
        lambda g: g.norm(p=1),
        lambda g: g.norm(math.inf),
        lambda g: torch.norm(g, 1),
        lambda g: g.data.norm(3),
        lambda g: g.detach().clone().norm(1),
        lambda g: torch.linalg.norm(g.flatten() if g.ndim else g, ord=1),
        lambda g: (g * 0.5).norm(math.inf),
        lambda g: torch.linalg.vector_norm(g, ord=1, dtype=torch.float64),
        lambda g: torch._foreach_norm([g, torch.ones(2)], 1)[0],
    ):
        torch.testing.assert_close(ask(mine), ask(theirs))


@pytest.mark.parametrize("order", [1.0, math.inf])
@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan])
def test_norms_of_gradients_that_are_zero_or_not_finite(scale: float, order: float):
    norms = []
    for layer in embedding_twins():
        (layer(IDS) * scale).sum().backward()
        if scale:
            with pytest.raises(RuntimeError, match="non-finite"):
                clip_grad_norm_(layer.parameters(), 1.0, norm_type=order, error_if_nonfinite=True)
        norms.append(clip_grad_norm_(layer.parameters(), 1.0, norm_type=order))
        layer.zero_grad(set_to_none=False)
        assert clip_grad_norm_(layer.parameters(), 1.0, norm_type=order).item() == 0.0
    torch.testing.assert_close(*norms, equal_nan=True)


def test_negative_orders_are_refused():
    layer = ert.Embedding(ROWS, DIM)
    layer(IDS).sum().backward()
    with pytest.raises(er.UnsupportedError, match=r"order -inf .* smallest elements"):
        clip_grad_norm_(layer.parameters(), 1.0, norm_type=-math.inf)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_clip_grad_value(foreach: bool | None):
    twin = Twin()
    for value in (0.7, 1e6):
        twin.backward()
        twin.backward(scale=-0.5)
        for parameters in twin.parameters:
            assert parameters[0].grad is not None
            parameters[0].grad *= 0.5
            clip_grad_value_(parameters, value, foreach=foreach)
        twin.check()


def clamped_data(grad: Tensor) -> Tensor:
    grad.data.clamp_(-1, 1)  # as in PyTorch's tutorial of deep Q-learning
    return grad


@pytest.mark.parametrize("clamp", [
    clamped_data,
    lambda grad: grad.clamp_(min=-0.5),
    lambda grad: grad.clip_(max=torch.tensor(0.5)),
    lambda grad: torch.clamp(grad, -0.5, 0.25),
    lambda grad: grad.clip(-0.5, 0.25),
    lambda grad: grad.clamp_min(-0.5).clamp_max(0.5),
    lambda grad: (grad / 2).clamp_min_(-0.5).neg(),
    lambda grad: torch._foreach_clamp_max([torch.ones(1), grad], [0.5, 1.5])[1],
])  # fmt: skip
def test_the_ways_to_clamp(clamp):
    twin = Twin()
    twin.backward()
    for each in twin.parameters:
        before = each[0].grad
        assert before is not None
        kept = before.clone()
        each[0].grad = clamp(before)
        torch.testing.assert_close(kept.norm(1), kept.norm(1))
    twin.backward()
    twin.check()


def test_a_clamp_of_a_copy_leaves_the_gradient_alone():
    twin = Twin()
    twin.backward()
    for each in twin.parameters:
        assert each[0].grad is not None
        each[0].grad.clone().clamp_(-0.1, 0.1)
        each[0].grad.clamp(-0.1, 0.1)
    twin.check()


def test_clamps_that_exclude_zero_are_refused():
    layer = ert.Embedding(ROWS, DIM)
    layer(IDS).sum().backward()
    assert layer.handle.grad is not None
    for low, high in ((0.1, 1.0), (-1.0, -0.1)):
        with pytest.raises(er.UnsupportedError, match="excludes 0"):
            layer.handle.grad.clamp_(low, high)
    assert layer.handle.grad.item() == pytest.approx(math.sqrt(DIM * 6))


@pytest.mark.parametrize("do", [
    lambda grad: grad.add_(1.0),
    lambda grad: grad.__iadd__(torch.ones(())),
    lambda grad: torch._foreach_add_([torch.ones(1), grad], 1.0),
    lambda grad: grad.sign_(),
    lambda grad: torch.nan_to_num_(grad),
], ids=["add_", "+=", "foreach", "sign_", "nan_to_num_"])  # fmt: skip
def test_what_cannot_be_done_to_rows_is_refused(do):
    layer = ert.Embedding(ROWS, DIM)
    layer(IDS).sum().backward()
    grad = layer.handle.grad
    assert grad is not None
    before = grad.item()
    with pytest.raises(er.UnsupportedError, match=r"cannot be done to handle\.grad.*multiplied, clamped and zeroed"):
        do(grad)
    assert grad.item() == before


FORMS = [
    lambda grad: grad.view(-1), lambda grad: grad.reshape(1), lambda grad: grad.data.flatten(), lambda grad: grad[None],
    lambda grad: grad.detach().view(1, 1).T, lambda grad: torch.as_strided(grad, (1,), (1,)),
    lambda grad: grad.view(-1).unbind()[0], lambda grad: grad.expand(1), lambda grad: grad.view(-1).data,
    lambda grad: grad.squeeze(),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_gradient_in_another_form_is_written_to_as_it_is_itself(form):
    layer = ert.Embedding(ROWS, DIM)
    optimizer = ert.SGD(layer, lr=1.0)
    layer(IDS).sum().backward()
    before, grads = weight_of(layer), gradient_of(layer)
    norm = layer.handle.grad
    assert norm is not None
    shown = norm.item()
    for write in (
        lambda part: part.copy_(torch.full_like(part, 3.0)),
        lambda part: part.__setitem__(..., 3.0),
        lambda part: part.fill_(3.0),
        lambda part: part.add_(1.0),
        lambda part: part.sign_(),
        lambda part: torch._foreach_add_([part], 1.0),
        lambda part: torch._foreach_copy_([part], [torch.full_like(part, 3.0)]),
        lambda part: torch.add(torch.ones(()), 1, out=part),
    ):
        with pytest.raises(er.UnsupportedError, match=r"cannot be done to handle\.grad"):
            write(form(norm))
        assert norm.item() == shown
    form(norm).mul_(0.5)
    optimizer.step()
    torch.testing.assert_close(weight_of(layer), before - 0.5 * grads)


@pytest.mark.parametrize("do", [
    lambda grad: grad + torch.ones(()),
    lambda grad: torch.ones(()) - grad,
    lambda grad: grad * grad,
    lambda grad: 2 / grad,
    lambda grad: torch.full_like(grad, 7.0),
    lambda grad: torch.cat([grad.flatten(), torch.ones(3)]).neg()[0],
], ids=["+", "-", "square", "inverse", "full_like", "vector"])  # fmt: skip
def test_a_number_that_was_computed_otherwise_is_refused(do):
    layer, before = ert.Embedding(ROWS, DIM, name="items"), None
    optimizer = ert.SGD(layer)
    for use in (optimizer.step, lambda: layer(IDS).sum().backward()):
        layer.zero_grad()
        layer(IDS).sum().backward()
        before = weight_of(layer)
        layer.handle.grad = do(layer.handle.grad)
        with pytest.raises(er.ArgumentError, match=r"`handle\.grad` of .*items.* and was 5\.47.*: it was set by hand"):
            use()
        assert torch.equal(weight_of(layer), before)


@pytest.mark.parametrize("do", [
    lambda grad: 3 * grad,
    lambda grad: torch.tensor(3.0) * grad,
    lambda grad: torch.mul(torch.tensor(3.0), grad),
    lambda grad: grad.mul(3),
    lambda grad: torch.where(torch.tensor(False), grad, 0.0),
    lambda grad: torch.where(torch.tensor(True), grad, 0.0),
], ids=["by a number", "by a tensor", "torch.mul", "mul", "zeroed", "as it is"])  # fmt: skip
def test_products_stand_for_gradients(do):
    layer = ert.Embedding(ROWS, DIM)
    optimizer = ert.SGD(layer, lr=1.0)
    layer(IDS).sum().backward()
    before, norm = weight_of(layer), layer.handle.grad
    grads = gradient_of(layer)
    layer.handle.grad = do(norm)
    assert norm is not None
    assert layer.handle.grad is not None
    factor = round(layer.handle.grad.item() / norm.item())
    optimizer.step()
    torch.testing.assert_close(weight_of(layer), before - factor * grads)


def test_a_gradient_of_another_layer_is_refused():
    mine, other = ert.Embedding(ROWS, DIM), ert.Embedding(ROWS, DIM)
    optimizer = ert.SGD(mine)
    for layer in (mine, other):
        layer(IDS).sum().backward()
    mine.handle.grad = other.handle.grad
    with pytest.raises(er.ArgumentError, match="that of another layer"):
        optimizer.step()
    with pytest.raises(er.ArgumentError, match="that of another layer"):
        mine(IDS).sum().backward()
    assert mine.table.steps == 0


def test_copies_of_a_gradient_are_numbers():
    layer = ert.Embedding(ROWS, DIM)
    layer(IDS).sum().backward()
    grad = layer.handle.grad
    assert type(grad) is HandleGradient
    for copied in (copy.deepcopy(grad), pickle.loads(pickle.dumps(grad))):
        assert type(copied) is Tensor
        assert copied.item() == grad.item()


def test_a_norm_of_what_waited_stays_what_it_was():
    layer = ert.Embedding(ROWS, DIM)
    layer(IDS).sum().backward()
    kept, layer.handle.grad = layer.handle.grad, None
    assert kept is not None
    (layer(IDS[:1]) * 100).sum().backward()
    assert (kept.norm(1).item(), np.float32(kept.norm(math.inf).item())) == (4 * DIM, 2.0)


def flat(grads: list[Tensor]) -> Tensor:
    return torch.cat([grad.reshape(-1) for grad in grads])


def write_back(grads: list[Tensor], bucket: Tensor) -> None:
    for grad, part in zip(grads, bucket.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


@pytest.mark.parametrize("share", [
    lambda bucket: bucket / 3, lambda bucket: bucket, lambda bucket: bucket.mul_(0.25),
    lambda bucket: bucket.half().float(),
], ids=["a third", "all", "in place", "in 16 bits"])  # fmt: skip
def test_a_share_of_a_bucket_is_written_back(share):
    twin = Twin()
    twin.backward()
    for each in twin.parameters:
        grads = [parameter.grad for parameter in each if parameter.grad is not None]
        write_back(grads, share(flat(grads)))
    mine, theirs = gradient_of(twin.mine), twin.theirs.weight.grad
    assert theirs is not None
    torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("mend", [
    lambda one, other: (one + other) / 2,  # which is, of tasks whose norms are equal, the number that is there
    lambda one, other: torch.stack([one, other]).mean(0),
    lambda one, other: one - 0.5 * (one @ other) / other.norm() ** 2 * other,  # a whole one is 0, or a rounding error
    lambda one, other: other.clone().add_(one).div_(2),
    lambda one, other: torch.where(one.abs() > other.abs(), one, other),
    lambda one, other: one,
    lambda one, other: other.__iadd__(one),
    lambda one, other: (other.__setitem__(slice(None), one), other)[1],
    lambda one, other: (other.view(1, -1)[0].add_(one), other)[1],
], ids=["mean", "stack", "PCGrad", "in place", "largest", "of another backward", "+=", "[:] =", "view"])  # fmt: skip
def test_buckets_of_several_backwards_are_refused(mend):
    twin = Twin()
    buckets, grads = [], []
    for _ in range(2):
        twin.models[0].zero_grad()
        twin.models[0](IDS).sum().backward()
        grads = [parameter.grad for parameter in twin.parameters[0] if parameter.grad is not None]
        buckets.append(flat(grads))
    before = [grad.clone() for grad in grads]
    with pytest.raises(er.UnsupportedError, match=r"`copy_` cannot be done to handle\.grad.* a sum of losses"):
        write_back(grads, mend(*buckets))
    assert all(map(torch.equal, before, grads))
