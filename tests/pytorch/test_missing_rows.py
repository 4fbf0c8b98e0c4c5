"""`missing=` of layers: rows that are not there, in layers that are frozen or in `eval()`, and in frozen copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import embedrock as er
import embedrock.torch as ert
from embedrock.errors import ArgumentError, IdError, UnsupportedError

ROWS, DIM = 50, 4
ROW = [0.5, -1.0, 2.0, 3.0]
KNOWN = [3, 4, 14]
IDS = torch.tensor([[3, 14, 15], [9, 4, 9]])
ALL_OPTIONS = [("zeros", [0.0] * DIM), (ROW, ROW), (np.array(ROW, np.float32), ROW), (torch.tensor(ROW), ROW)]
TRAINS = r"has missing='zeros', and trains: a row would be read as one value.*Freeze the layer, call the model for inf"


def filled(layer: Any) -> Any:
    layer.table.assign(KNOWN, np.arange(DIM * len(KNOWN)).reshape(-1, DIM) + 1.0)
    return layer


def plain(layer: Any, row: list[float]) -> Tensor:
    """Return a weight with all rows as a lookup must see them."""
    weight = torch.tensor(row).repeat(ROWS, 1)
    weight[KNOWN] = torch.from_numpy(layer.table.lookup(KNOWN))
    return weight


@pytest.mark.parametrize("still", [lambda layer: layer.eval(), lambda layer: layer.requires_grad_(False)])
@pytest.mark.parametrize(("missing", "row"), ALL_OPTIONS)
def test_rows(still: Callable[[Any], Any], missing: Any, row: list[float]):
    layer = still(filled(ert.Embedding(ROWS, DIM, missing=missing)))
    weight = plain(layer, row)
    assert torch.equal(layer(IDS), weight[IDS])
    jagged = torch.nested.nested_tensor_from_jagged(IDS.reshape(-1), torch.tensor([0, 2, 6]))
    assert torch.equal(layer(jagged).values(), weight[IDS.reshape(-1)])
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, backend="aot_eager")(IDS), weight[IDS])
    assert len(layer.table) == len(KNOWN)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize(("missing", "row"), ALL_OPTIONS[:2])
def test_bags_count_them(mode: str, missing: Any, row: list[float]):
    bag = filled(ert.EmbeddingBag(ROWS, DIM, mode=mode, padding_idx=9, missing=missing)).eval()
    weight = plain(bag, row)
    expected = nn.functional.embedding_bag(IDS, weight, mode=mode, padding_idx=9)
    torch.testing.assert_close(bag(IDS), expected)
    flat, offsets = IDS.reshape(-1), torch.tensor([0, 2])
    torch.testing.assert_close(
        bag(flat, offsets), nn.functional.embedding_bag(flat, weight, offsets, mode=mode, padding_idx=9)
    )


def test_weights_of_positions_get_their_gradients():
    bag = filled(ert.EmbeddingBag(ROWS, DIM, mode="sum", missing=ROW)).requires_grad_(False)
    weights, others = (torch.ones(2, 3).requires_grad_() for _ in range(2))
    bag(IDS, per_sample_weights=weights).square().sum().backward()
    nn.functional.embedding_bag(IDS, plain(bag, ROW), mode="sum", per_sample_weights=others).square().sum().backward()
    torch.testing.assert_close(weights.grad, others.grad)


def test_training_is_refused_and_nothing_changes():
    layer = filled(ert.Embedding(ROWS, DIM, missing="zeros"))
    rule = ert.SGD(layer, lr=0.1)
    with pytest.raises(UnsupportedError, match=TRAINS):
        layer(IDS)
    with pytest.raises(UnsupportedError, match=TRAINS), torch.no_grad():
        layer(IDS)
    with pytest.raises(UnsupportedError, match=TRAINS):  # rows do not train in `eval()` without a word
        layer.eval()(IDS).sum().backward()
    with pytest.raises(UnsupportedError, match=TRAINS):
        torch.compile(layer, backend="aot_eager")(IDS).sum().backward()
    layer.train()
    layer.missing = None
    layer(IDS).sum().backward()
    rule.step()
    assert layer.table.contains(IDS.numpy()).all()
    assert (layer.table.steps, len(layer.table)) == (1, 5)


def test_it_can_be_set_at_any_time_and_is_seen():
    layer = filled(ert.Embedding(ROWS, DIM)).eval()
    first = layer(IDS)
    layer.missing = "zeros"
    assert layer(IDS)[0, 2].tolist() == [0.0] * DIM
    assert "missing='zeros'" in repr(layer)
    copied = copy.deepcopy(layer)
    assert torch.equal(copied(IDS), layer(IDS))
    layer.missing = "first"
    assert torch.equal(layer(IDS), first)
    layer.train()(IDS).sum().backward()  # "first" trains
    layer.missing = "raise"
    with pytest.raises(IdError, match=r"of Embedding\(50, 4\) must have rows.*: 2 ids without one, \[9, 15\]"):
        layer.eval()(torch.tensor([9, 15, 3]))


@pytest.mark.parametrize("kind", [ert.Embedding, ert.EmbeddingBag])
def test_what_is_refused(kind: Any, tmp_path: Path):
    with pytest.raises(ArgumentError, match=r"`missing` of .*\(50, 4\) must be one of first, zeros"):
        kind(ROWS, DIM, missing="nothing")
    with pytest.raises(ArgumentError, match="has no default row"):
        kind(ROWS, DIM, missing="shared")
    with pytest.raises(ArgumentError, match=r"must be a row of shape \(4,\): got one of shape \(2,\)"):
        kind(ROWS, DIM, missing=[1.0, 2.0])
    with pytest.raises(UnsupportedError, match="does not go with max_norm, as a lookup makes the rows that it shrinks"):
        kind(ROWS, DIM, max_norm=1.0, missing="zeros")
    average = ert.average(nn.Sequential(kind(ROWS, DIM, missing="zeros"))).eval()
    with pytest.raises(UnsupportedError, match=r"`missing` \('zeros'\) of .* goes with rows that this process's CPU"):
        average(IDS)


def test_the_padding_row_is_there():
    table = er.Table(ROWS, DIM, init=er.Constant(7.0))
    layer = ert.Embedding(table, padding_idx=9, missing="zeros").eval()
    assert layer(torch.tensor([9, 8])).tolist() == [[7.0] * DIM, [0.0] * DIM]
    layer.missing = "raise"
    assert layer(torch.tensor([9])).tolist() == [[7.0] * DIM]
    with pytest.raises(IdError, match=r"1 id without one, \[8\]"):
        layer(torch.tensor([8, 9]))
    layer.missing = ROW
    assert ert.freeze(layer)(torch.tensor([9, 8])).tolist() == [[7.0] * DIM, ROW]
    assert ert.EmbeddingBag(table, padding_idx=9, missing="raise").eval()(torch.tensor([[9]])).tolist() == [[0.0] * DIM]


@pytest.mark.parametrize("bags", [False, True])
def test_features_of_a_collection(bags: bool):
    def config(name: str, missing: Any, **options: Any) -> Any:
        kind = ert.EmbeddingBagConfig if bags else ert.EmbeddingConfig
        own = {} if missing is None else {"missing": missing}
        return kind(ROWS, DIM, name, init=er.Constant(7.0), options=own, **options)

    kind = ert.EmbeddingBagCollection if bags else ert.EmbeddingCollection
    model = kind([
        config("a", "zeros", padding_idx=3), config("b", None), config("c", "zeros", padding_idx=4), config("d", ROW),
        config("e", "raise"),
    ])  # fmt: skip
    filled(model.layer_of("e"))
    ids = {name: torch.tensor([[3, 4]]) for name in "abcde"}
    with pytest.raises(UnsupportedError, match=r"has missing='zeros', and trains"):
        model(ids)
    found = {name: out.reshape(-1, DIM)[:, 0].tolist() for name, out in model.eval()(ids).items()}
    each = {"a": [0.0, 0.0], "b": [7.0, 7.0], "c": [0.0, 0.0], "d": [0.5, 0.5], "e": [1.0, 5.0]}
    assert found == ({name: [sum(own)] for name, own in each.items()} if bags else each)
    if bags:
        together: Any = model(ids, concatenate=True)
        assert together[0, ::DIM].tolist() == [sum(own) for own in each.values()]
    ids["e"] = torch.tensor([[3, 9]])
    with pytest.raises(IdError, match=r"must have rows.*: 1 id without one, \[9\]"):
        model(ids)


def test_layers_over_a_reader(tmp_path: Path):
    with er.Table(ROWS, DIM, path=tmp_path / "table", rule=er.SGD()) as table:
        table.assign(KNOWN, np.ones((3, DIM)))
        table.commit()
    reader = er.open(tmp_path / "table", mode="r", missing="zeros")
    layer, bag = ert.Embedding(reader), ert.EmbeddingBag(reader)
    for own in (layer, bag):
        own.requires_grad_(False)
    assert layer(IDS)[..., 0].tolist() == [[1.0, 1.0, 0.0], [0.0, 1.0, 0.0]]
    torch.testing.assert_close(bag(IDS)[:, 0], torch.tensor([2 / 3, 1 / 3]))
    assert ert.freeze(layer)(IDS)[..., 0].tolist() == [[1.0, 1.0, 0.0], [0.0, 1.0, 0.0]]
    layer.missing = ROW
    assert layer(IDS)[0, 2].tolist() == ROW
    reader.close()


def test_pretrained_rows_are_there():
    layer = ert.Embedding.from_pretrained(torch.eye(3), missing="raise")
    assert layer(torch.tensor([1])).tolist() == [[0.0, 1.0, 0.0]]


# ---------------------------------------------------------------- frozen copies


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.item = filled(ert.Embedding(ROWS, DIM, **options))
        self.tags = filled(ert.EmbeddingBag(ROWS, DIM, mode="mean", padding_idx=9, **options))

    def forward(self, ids: Tensor) -> Tensor:
        return self.item(ids).sum(1) + self.tags(ids)


@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize(("missing", "row"), ALL_OPTIONS[:2])
def test_frozen_copies_and_their_export(some: bool, by_layer: bool, missing: Any, row: list[float]):
    model = Model(missing=missing if by_layer else None).eval()
    ids = {"item": [3, 15], "tags": [3, 4, 14, 9]} if some else None
    frozen = ert.freeze(model, ids, missing=None if by_layer else missing)
    model.item.missing = model.tags.missing = missing
    if some:
        rest = model.item.table.lookup(KNOWN)
        model.item.table.forget([4, 14])  # as the copy has them
        assert len(rest) == len(model.item.table) + 2
    torch.testing.assert_close(frozen(IDS), model(IDS))
    exported = torch.export.export(frozen, (IDS,))
    torch.testing.assert_close(exported.module()(IDS), model(IDS))


def test_open_ids_that_a_copy_does_not_keep():
    layer = ert.Embedding(None, DIM, missing=ROW).eval()
    layer.table.assign(KNOWN, np.ones((3, DIM)))
    frozen = ert.freeze(nn.Sequential(layer), {"0": [*KNOWN, 77]})
    ids = torch.tensor([3, 77, -1, 2**40])
    assert frozen(ids).tolist() == layer(ids).tolist() == [[1.0] * DIM, ROW, ROW, ROW]
    assert torch.export.export(frozen, (ids,)).module()(ids).tolist() == frozen(ids).tolist()


def test_frozen_copies_raise_nothing():
    with pytest.raises(UnsupportedError, match=r"Embedding\(50, 4\) cannot be frozen with missing='raise': plain"):
        ert.freeze(Model(missing="raise"))
    with pytest.raises(ArgumentError, match="has no default row"):
        ert.freeze(Model(), missing="shared")
    with pytest.raises(ArgumentError, match=r"`missing` of ert\.freeze must be one of"):
        ert.freeze(Model(), missing="x")
    model = Model(missing="raise")
    model.tags.missing = None
    weight = ert.freeze(model, missing="first").get_submodule("item").weight
    np.testing.assert_array_equal(weight, model.item.table.lookup(np.arange(ROWS)))
