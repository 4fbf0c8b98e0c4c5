"""Corners of PyTorch: odd views, nested ids, transforms, arguments that come later. Each is right, or our own error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from twins import DIM, ROWS, bag_twins, embedding_twins, gradient_of, weight_of

import embedrock as er
import embedrock.torch as ert

IDS = torch.tensor([3, 1, 3, 7])


# ---------------------------------------------------------------- views that negate


@pytest.mark.parametrize("kind", ["ids", "grads"])
def test_ids_and_gradients_that_are_views_which_negate(kind: str):
    twins = embedding_twins()
    for layer in twins:
        rows = layer(torch._neg_view(-IDS) if kind == "ids" else IDS)
        rows.backward(torch._neg_view(-torch.ones_like(rows)) if kind == "grads" else torch.ones_like(rows))
    assert twins[1].weight.grad is not None
    assert torch.equal(gradient_of(twins[0]), twins[1].weight.grad)


def test_weights_and_gradients_of_bags_that_are_views_which_negate():
    twins = bag_twins(mode="sum")
    found = []
    for layer in twins:
        rows = layer(IDS[None], None, torch._neg_view(-torch.arange(4.0)[None]))
        rows.backward(torch._neg_view(torch.ones_like(rows)))
        found.append(rows.detach())
    torch.testing.assert_close(*found)
    assert twins[1].weight.grad is not None
    assert torch.equal(gradient_of(twins[0]), twins[1].weight.grad)


def test_pretrained_rows_that_are_a_view_which_negates():
    weights = torch._neg_view(torch.arange(6.0).reshape(3, 2))
    assert torch.equal(ert.Embedding.from_pretrained(weights)(torch.arange(3)), weights)


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize("given", [None, object])
def test_a_place_that_is_no_device(given: Any):
    layer = ert.Embedding(ROWS, DIM)
    with pytest.raises(
        er.ArgumentError, match=r"`device` of ert\.place must be one of PyTorch's, such as 'cuda' .*: got "
    ):
        ert.place(layer, given)
    assert torch.equal(layer(IDS), layer(IDS))


@pytest.mark.parametrize("padding_idx", [3, -1, None])
def test_padding_idx_set_later(padding_idx: int | None):
    mine, theirs = embedding_twins(padding_idx=1)
    for layer in (mine, theirs):
        layer.padding_idx = padding_idx
        layer(torch.tensor([3, 1, ROWS - 1])).sum().backward()
    assert mine.padding_idx == (ROWS - 1 if padding_idx == -1 else padding_idx)
    assert theirs.weight.grad is not None
    assert torch.equal(gradient_of(mine), theirs.weight.grad)


def test_a_wrong_padding_idx_set_later():
    layer = ert.Embedding(ROWS, DIM, padding_idx=3)
    with pytest.raises(er.ArgumentError, match=r"`padding_idx` must lie in \[-23, 23\): got 77"):
        layer.padding_idx = 77
    assert layer.padding_idx == 3


def test_no_learning_rate():
    layer = ert.Embedding(ROWS, DIM)
    assert ert.Adam(layer, lr=None).param_groups[0]["lr"] == 0.001
    with pytest.raises(er.ArgumentError, match=r"`lr` of SGD must be a finite number .*: got None"):
        ert.SGD([{"params": layer, "lr": None}], lr=0.5)
    optimizer = ert.SGD(layer, lr=0.5)
    optimizer.param_groups[0]["lr"] = None
    layer(IDS).sum().backward()
    before = weight_of(layer)
    with pytest.raises(er.ArgumentError, match=r"`lr` of SGD must be a finite number .*: got None"):
        optimizer.step()
    assert torch.equal(weight_of(layer), before)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
@pytest.mark.parametrize("as_dtype", [None, torch.float32])
def test_pretrained_rows_that_are_no_floats(dtype: torch.dtype, as_dtype: torch.dtype | None):
    for weights in (torch.ones(3, 2).to(dtype), torch.ones(3, 2).to(dtype).numpy()):
        name = str(dtype).removeprefix("torch.")
        with pytest.raises(er.ArgumentError, match=rf"`embeddings` of ert\.Embedding must be floats: got {name}\."):
            ert.Embedding.from_pretrained(weights, dtype=as_dtype)


# ---------------------------------------------------------------- nested tensors


def jagged() -> Tensor:
    return torch.nested.nested_tensor([IDS, IDS[:0], IDS[1:3]], layout=torch.jagged)


def test_jagged_ids():
    mine, theirs = embedding_twins()
    found = []
    for layer in (mine, theirs):
        rows = layer(jagged())
        found.append([part.detach() for part in rows.unbind()])
        rows.values().square().sum().backward()
    assert [tuple(part.shape) for part in found[0]] == [(4, DIM), (0, DIM), (2, DIM)]
    assert all(map(torch.equal, *found))
    assert theirs.weight.grad is not None
    torch.testing.assert_close(gradient_of(mine), theirs.weight.grad)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_jagged_bags(mode: str):
    mine, theirs = bag_twins(mode=mode)
    torch.testing.assert_close(mine(jagged()), theirs(jagged()))
    if mode == "sum":
        with pytest.raises(er.UnsupportedError, match="`per_sample_weights` do not go with a jagged input"):
            mine(jagged(), None, torch.ones(6))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("kind", [ert.Embedding, ert.EmbeddingBag])
def test_other_nested_ids_are_refused(kind: Any):
    with pytest.raises(
        er.IdTypeError, match=r"int64, torch\.strided, nested\. Of nested tensors, .* layout=torch\.jagged"
    ):
        kind(ROWS, DIM)(torch.nested.nested_tensor([IDS, IDS[:2]]))


# ---------------------------------------------------------------- bags


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize(("ids", "offsets"), [
    ([1, 2, 3, 9], [0, 2, 4]), ([1, 2, 9, 9], [0, 2, 4]), ([9, 9], [0, 0, 2]), ([1, 9], [0, 2, 2]), ([9], [0, 1]),
    ([1, 2, 3, 9], [0, 2, 3]), ([1, 2, 9], [0, 2]), ([9], [0]),
], ids=str)  # fmt: skip
def test_include_last_offset_with_padding_at_the_end(mode: str, ids: list[int], offsets: list[int]):
    mine, theirs = bag_twins(mode=mode, padding_idx=9)
    mine.include_last_offset = True
    # PyTorch is asked for the bags without their last offset: with ids beyond it, its backward writes out of bounds.
    for layer, flat, starts in ((mine, ids, offsets), (theirs, ids[: offsets[-1]], offsets[:-1])):
        rows = layer(torch.tensor(flat, dtype=torch.int64), torch.tensor(starts, dtype=torch.int64))
        (rows * torch.arange(1.0, DIM + 1)).sum().backward()
        assert rows.shape == (len(offsets) - 1, DIM)
    assert theirs.weight.grad is not None
    torch.testing.assert_close(gradient_of(mine), theirs.weight.grad)


# ---------------------------------------------------------------- transforms


@pytest.mark.parametrize("kind", [ert.Embedding, ert.EmbeddingBag])
@pytest.mark.parametrize("transform", ["vmap", "grad", "jacrev"])
def test_transforms_of_other_inputs_of_a_model_with_frozen_rows(transform: str, kind: Any):
    layer = kind(ROWS, DIM).requires_grad_(False)
    ids, rows = IDS[None], layer(IDS[None])

    def loss(x: Tensor, look_up: Any) -> Tensor:
        return (look_up() * x).square().sum()

    x = torch.randn(3, DIM)
    if transform == "vmap":
        found = [torch.vmap(lambda x, up=up: loss(x, up))(x) for up in (lambda: layer(ids), lambda: rows)]
    else:
        of = getattr(torch.func, transform)
        found = [of(lambda x, up=up: loss(x, up))(x[0]) for up in (lambda: layer(ids), lambda: rows)]
    assert torch.equal(*found)


def test_transforms_of_rows_that_train_are_refused():
    layer = ert.Embedding(ROWS, DIM)
    for transform in (torch.vmap, torch.func.grad):
        with pytest.raises(
            er.UnsupportedError, match=r"Embedding\(23, 5\) cannot train inside of .*rows = layer\(ids\)"
        ):
            transform(lambda x: (layer(IDS) * x).sum())(torch.randn(DIM))
    rows = layer(IDS)
    torch.vmap(lambda row: row.square().sum())(rows).sum().backward()  # as the error says
    assert torch.equal(gradient_of(layer)[1], 2 * rows[1])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # which forward mode calls
@pytest.mark.parametrize("transform", ["grad", "jacrev", "hessian", "jvp"])
def test_derivatives_of_weights_in_transforms_are_refused(transform: str):
    bag = ert.EmbeddingBag(ROWS, DIM, mode="sum").requires_grad_(False)
    ids, weights = torch.tensor([[1, 2], [3, 3]]), torch.rand(2, 2)

    def derived(loss: Callable[[Tensor], Tensor]) -> Any:
        of = getattr(torch.func, transform)
        return of(loss, (weights,), (weights,)) if transform == "jvp" else of(loss)(weights)

    with pytest.raises(er.UnsupportedError, match=r"EmbeddingBag\(23, 5.* weights of positions as constants"):
        derived(lambda w: bag(ids, None, w).sum())
    found = derived(lambda w: (bag(ids, None, w.detach()) * w.sum()).sum())  # as the error says
    expected = derived(lambda w: (bag(ids, None, weights).detach() * w.sum()).sum())
    assert all(map(torch.equal, found, expected))
    assert torch.autograd.grad(bag(ids, None, weights.requires_grad_()).sum(), weights)[0].abs().min() > 0


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # which forward mode calls
@pytest.mark.parametrize("trains", [True, False])
def test_tangents_of_weights_are_refused(trains: bool):
    bag = ert.EmbeddingBag(ROWS, DIM, mode="sum").requires_grad_(trains)
    both = ert.EmbeddingBagCollection({"a": bag, "b": ert.EmbeddingBag(ROWS, DIM, mode="sum").requires_grad_(trains)})
    ids, offsets = torch.tensor([1, 2]), torch.tensor([0])
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        weights = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        given = ids, offsets, weights
        for look_up in (lambda: bag(*given), lambda: both({"a": given, "b": given})):
            with pytest.raises((RuntimeError, NotImplementedError), match=r"forward AD|jvp"):
                look_up()


@pytest.mark.parametrize("trains", [True, False])
def test_vmap_over_ids_is_refused(trains: bool):
    layer = ert.Embedding(ROWS, DIM).requires_grad_(trains)
    with torch.set_grad_enabled(False), pytest.raises(er.UnsupportedError, match=r"ids that vmap goes over.*any shape"):
        torch.vmap(layer)(IDS)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # PyTorch reads it
def test_compiled_autograd():
    from torch._dynamo import compiled_autograd

    mine, theirs = embedding_twins()
    for layer in (mine, theirs):
        for factor in (1.0, 2.0):
            loss = (layer(IDS).square() * factor + layer(IDS + 1)).sum()
            with compiled_autograd._enable(torch.compile(backend="eager")):
                loss.backward()
    assert theirs.weight.grad is not None
    torch.testing.assert_close(gradient_of(mine), theirs.weight.grad)


# ---------------------------------------------------------------- tied layers


def test_tied_layers_are_saved_and_loaded_together():
    def make() -> nn.ModuleList:
        table = er.Table(ROWS, DIM, seed=0)
        return nn.ModuleList([ert.Embedding(table), ert.EmbeddingBag(table, mode="sum")])

    model, again = make(), make()
    optimizer = ert.Adam(model, lr=0.1)
    (model[0](IDS).square().sum() + model[1](IDS[None]).sum()).backward()
    optimizer.step()
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    optimizers = [optimizer, ert.Adam(again, lr=0.1)]
    for each, stepping in zip((model, again), optimizers, strict=True):
        stepping.zero_grad()
        each[0](IDS).square().sum().backward()
        stepping.step()
    np.testing.assert_array_equal(weight_of(model[0]), weight_of(again[1]))
