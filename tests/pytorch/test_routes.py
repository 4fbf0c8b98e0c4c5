"""Layers resolve once how they look rows up. Each change that this rests on is seen by the next lookup."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import embedrock as er
import embedrock.torch as ert
from embedrock.errors import ClosedTableError, UnsupportedError
from embedrock.table.table import rows_of
from embedrock.torch import ForgottenGradientsError

NAMES = "abc"
IDS = torch.tensor([3, 1, 3])


def collection(**more: Any) -> ert.EmbeddingBagCollection:
    configs = [ert.EmbeddingBagConfig(9, 4, name, seed=seed, **more) for seed, name in enumerate(NAMES)]
    made = ert.EmbeddingBagCollection(configs)
    lookup_in(made)  # resolves the route
    return made


def lookup_in(made: Any) -> dict[str, Tensor]:
    return made(dict.fromkeys(made.features, IDS))


def warm(kind: Any = ert.Embedding, **more: Any) -> Any:
    layer = kind(9, 4, seed=0, **more)
    given(layer).sum().backward()
    return layer


def given(layer: Any) -> Tensor:
    return layer(IDS[:, None] if isinstance(layer, ert.EmbeddingBag) else IDS)


KINDS = [ert.Embedding, ert.EmbeddingBag]

# ---------------------------------------------------------------- what the next lookup sees


def test_hooks_that_come_and_go():
    made = collection()
    before = lookup_in(made)
    layer = made.layer_of("b")
    removable = layer.register_forward_hook(lambda layer, args, out: out + 1)
    for _ in range(2):
        assert torch.equal(lookup_in(made)["b"], before["b"] + 1)
    removable.remove()
    assert torch.equal(lookup_in(made)["b"], before["b"])
    out = lookup_in(made)
    assert out["b"].grad_fn is out["a"].grad_fn  # in one lookup again
    layer.register_forward_pre_hook(lambda layer, args: (args[0] * 0,))
    assert torch.equal(lookup_in(made)["b"], layer(IDS[:, None] * 0))


def test_a_layer_in_the_place_of_another():
    made, other = collection(), ert.EmbeddingBag(9, 4, seed=7, mode="sum")
    layers: Any = made.embedding_bags
    layers["b"] = other
    assert torch.equal(lookup_in(made)["b"], other(IDS[:, None]))
    layers["b"] = torch.nn.EmbeddingBag(9, 4, mode="sum")
    assert torch.equal(lookup_in(made)["b"], made.layer_of("b")(IDS[:, None]))


def test_a_padding_that_is_set_later():
    made = collection()
    made.layer_of("a").padding_idx = 3
    assert lookup_in(made)["a"].any(1).tolist() == [False, True, False]
    layer = warm(ert.EmbeddingBag)
    layer.padding_idx = 3
    assert given(layer).any(1).tolist() == [False, True, False]


def test_rows_that_are_frozen_and_train_again():
    made = collection()
    for frozen in (True, False, True):
        made.layer_of("a").requires_grad_(not frozen)
        assert [out.requires_grad for out in lookup_in(made).values()] == [not frozen, True, True]
    made.requires_grad_(False)
    assert not any(out.requires_grad for out in lookup_in(made).values())


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_another_dtype(kind: Any):
    layer, made = warm(kind), collection()
    layer.to(torch.float64)
    assert given(layer).dtype == torch.float64
    made.layer_of("b").to(torch.bfloat16)
    assert [out.dtype for out in lookup_in(made).values()] == [torch.float32, torch.bfloat16, torch.float32]
    made.to(torch.float64)
    assert made(dict.fromkeys(NAMES, IDS), concatenate=True).dtype == torch.float64


@pytest.mark.parametrize("make", [warm, collection])
def test_a_copy_has_rows_of_its_own(make: Callable[[], Any]):
    made = make()
    copied = copy.deepcopy(made)
    for handle in ert.handles(made):
        handle.table.assign([3], torch.ones(1, 4))
    look_up = given if make is warm else lambda each: torch.cat(list(lookup_in(each).values()), dim=1)
    assert (look_up(made)[0] == 1).all()
    assert not (look_up(copied)[0] == 1).any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_handle_that_is_replaced(kind: Any):
    layer, made = warm(kind), collection()
    with pytest.raises(UnsupportedError, match="the handle was replaced"):
        torch.func.functional_call(layer, {"handle": torch.zeros(())}, (IDS[:, None],))
    name = "embedding_bags.b.handle"
    with pytest.raises(UnsupportedError, match="the handle was replaced"):
        torch.func.functional_call(made, {name: torch.zeros(())}, (dict.fromkeys(NAMES, IDS),))
    given(layer)
    lookup_in(made)


@pytest.mark.parametrize("kind", KINDS)
def test_writes_to_handles(kind: Any):
    layer, made = warm(kind), collection()
    set_version: Any = torch._C._autograd._unsafe_set_version_counter  # pyright: ignore[reportAttributeAccessIssue]
    for handle, look_up in ((layer.handle, lambda: given(layer)), (made.layer_of("b").handle, lambda: lookup_in(made))):
        set_version((handle,), (handle._version + 1,))
        with pytest.raises(ForgottenGradientsError, match="something wrote to the handle"):
            look_up()
        look_up()


@pytest.mark.parametrize("kind", KINDS)
def test_more_rows(kind: Any):
    layer = warm(kind)
    layer.grow(12)
    assert layer(torch.tensor([[11]])).shape[-1] == 4
    with pytest.raises(er.IdError, match=r"\[0, 12\)"):
        layer(torch.tensor([[12]]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_table(kind: Any):
    layer, made = warm(kind), collection()
    layer.table.close()
    made.layer_of("b").table.close()
    for look_up in (lambda: given(layer), lambda: lookup_in(made)):
        with pytest.raises(ClosedTableError):
            look_up()


def test_max_norm_that_is_set_later():
    layer = warm()
    layer.max_norm = 0.5
    assert (given(layer).norm(dim=1) <= 0.5001).all()


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_and_its_table_go_with_the_last_reference(kind: Any):
    gc.disable()
    try:
        layer = warm(kind)
        gone = [weakref.ref(layer), weakref.ref(layer.table), weakref.ref(rows_of(layer.table).backend)]
        del layer
        assert [each() for each in gone] == [None, None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", KINDS)
def test_records_go_when_a_table_is_closed_or_loaded(kind: Any):
    layer, other = warm(kind), warm(kind)
    before = weakref.ref(rows_of(layer.table).backend)
    layer.table.load_state(other.table)
    assert before() is None
    before = weakref.ref(rows_of(layer.table).backend)
    layer.table.close()
    assert before() is None


def test_records_go_when_a_layer_gets_another_table():
    made, table = collection(), er.Table(9, 4)
    layer = made.layer_of("b")
    before = weakref.ref(rows_of(layer.table))
    layer.table.group.drop("b")
    layer.take_over(table)
    assert before() is None
    table.assign([3], torch.ones(1, 4))
    assert lookup_in(made)["b"][0].tolist() == [1, 1, 1, 1]


def test_outputs_are_parts_of_one_allocation_and_may_be_written_to():
    out = lookup_in(collection())
    assert len({each.untyped_storage().data_ptr() for each in out.values()}) == 1
    kept = out["b"].detach().clone()
    out["a"].mul_(2).relu_()
    torch.nn.functional.dropout(out["c"], 0.5, inplace=True)
    assert torch.equal(out["b"], kept)
    (out["a"].sum() + out["b"].sum()).backward()
