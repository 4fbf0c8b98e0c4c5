"""`ert.fuse`: the tables of a model's layers become one group, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import embedrock as er
import embedrock.torch as ert
from embedrock.errors import ArgumentError, ClosedTableError, UnsupportedError


class Model(nn.Module):
    """Layers that are called one by one, two of them on one table, and a collection."""

    def __init__(self) -> None:
        super().__init__()
        self.user = ert.Embedding(30, 4, seed=1)
        self.friend = ert.EmbeddingBag(self.user.table, mode="sum")
        self.features = ert.EmbeddingBagCollection(
            {"item": ert.EmbeddingBag(20, 4, seed=2), "hour": ert.EmbeddingBag(24, 3, seed=3)}
        )
        self.head = nn.Linear(15, 1)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.features({"item": ids % 20, "hour": ids % 24}, concatenate=True)
        return self.head(torch.cat([self.user(ids), self.friend(ids[:, None] % 7), rows], dim=1))


def pair() -> tuple[Model, Model]:
    """Return two models that are alike."""
    models = Model(), Model()
    models[1].head.load_state_dict(models[0].head.state_dict())
    return models


def train(model: Model, optimizer: Any, steps: int, seed: int = 0) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.from_numpy(np.random.default_rng((seed, step)).integers(0, 30, 8))).square().sum().backward()
        optimizer.step()


def optimizer_of(model: Model) -> Any:
    return ert.optimizer(model, rows=ert.Adam, dense=torch.optim.SGD, lr=0.05)


def test_a_fused_model_goes_on_as_it_would_have():
    mine, theirs = pair()
    optimizers = optimizer_of(mine), optimizer_of(theirs)
    train(mine, optimizers[0], 2)
    train(theirs, optimizers[1], 2)
    before = mine.user.table
    group = ert.fuse(mine)
    assert list(group) == ["user", "features.embedding_bags.item", "features.embedding_bags.hour"]
    assert mine.friend.table is mine.user.table is group["user"]
    assert ert.fuse(mine) is group  # a notebook's cell that is run again: it was a new group, without tables
    with pytest.raises(ClosedTableError):
        before.lookup([1])
    train(mine, optimizers[0], 3, seed=1)
    train(theirs, optimizers[1], 3, seed=1)
    for one, other in zip(ert.handles(mine), ert.handles(theirs), strict=True):
        assert one.table.steps == other.table.steps == 5
        every = np.arange(one.table.rows or 0)
        np.testing.assert_array_equal(one.table.lookup(every), other.table.lookup(every))
    assert torch.equal(mine.head.weight, theirs.head.weight)


def test_what_stays_where_it_is(tmp_path: Any):
    group = er.Group()
    model = nn.ModuleList([
        ert.Embedding(9, 2, path=tmp_path / "table"),
        ert.Embedding(9, 2, memory="1MiB"),
        ert.Embedding(9, 2, group=er.Group(), name="other"),
        ert.Embedding(9, 2),
    ])  # fmt: skip
    tables = [layer.table for layer in model]
    assert ert.fuse(model, group) is group
    assert list(group) == ["3"]
    assert [layer.table is table for layer, table in zip(model, tables, strict=True)] == [True, True, True, False]
    assert list(ert.fuse(model, group)) == ["3"]  # again


def test_what_cannot_be_fused():
    model = Model()
    with pytest.raises(ArgumentError, match=r"`group` of ert.fuse must be an er.Group or None: got 'all'"):
        ert.fuse(model, "all")  # type: ignore[arg-type]
    group = er.Group()
    group.table("user", 30, 4)
    with pytest.raises(ArgumentError, match=r"has a table 'user' already, as EmbeddingBag\(30, 4\) would be called"):
        ert.fuse(model, group)
    optimizer = optimizer_of(model)
    model(torch.arange(8)).sum().backward()
    with pytest.raises(UnsupportedError, match=r"move the rows of 'friend', .*: gradients of them wait for a step"):
        ert.fuse(model)
    optimizer.step()
    optimizer.zero_grad()
    averaged = ert.average(model)
    with pytest.raises(UnsupportedError, match=r"averages follow them\. Call it before ert\.average"):
        ert.fuse(model)
    del averaged
    assert model.user.table.group is None


def test_a_model_of_which_nothing_can_move_is_refused(tmp_path: Path):
    model: Any = nn.ModuleDict({"user": ert.Embedding(10, 4, path=tmp_path / "u.rock"), "item": ert.Embedding(9, 4)})
    assert list(ert.fuse(model)) == ["item"]  # the one on disk stays as it is
    told = r"move none of .*Embedding\(10, 4\).*: tables stay where they are that are on disk"
    with pytest.raises(UnsupportedError, match=told):
        ert.fuse(nn.Sequential(model["user"]))
    with pytest.raises(UnsupportedError, match=r"no layer of Embedrock's in Linear\. Pass a model"):
        ert.fuse(nn.Linear(2, 2))
    model["user"].table.close()
