"""`reset_parameters`: rows and their optimizer state begin anew, as dense layers do between folds of a validation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import embedrock as er
import embedrock.torch as ert

IDS = torch.arange(8)
KINDS: dict[str, dict[str, Any]] = {
    "RAM": {"num_embeddings": 20},
    "open ids": {"num_embeddings": None},
    "padding": {"num_embeddings": 20, "padding_idx": 3},
    "dense rule": {"num_embeddings": 20, "rule": er.Adam(dense=True)},
    "disk": {"num_embeddings": 20, "path": "table.rock", "memory": "1MiB"},
    "group": {"num_embeddings": 20, "name": "users"},
    "evicted": {"num_embeddings": None, "eviction": er.Eviction(max_rows=16)},
    "pretrained": {},
}


def made(kind: str) -> ert.Embedding:
    torch.manual_seed(0)
    if kind == "pretrained":
        return ert.Embedding.from_pretrained(torch.randn(20, 4), freeze=False)
    more: dict[str, Any] = {"group": er.Group()} if kind == "group" else {}
    return ert.Embedding(embedding_dim=4, **KINDS[kind], **more)


def train(layer: ert.Embedding, optimizer: torch.optim.Optimizer) -> None:
    layer(IDS).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_was_reset_trains_like_a_new_one(kind: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    layer = made(kind)
    first = layer(IDS).detach().clone()
    rule = ert.Adam(layer, lr=0.1, dense=kind == "dense rule")
    for _ in range(3):
        train(layer, rule)
    layer(IDS).sum().backward()  # what waits is dropped
    torch.manual_seed(0)
    if kind == "pretrained":
        torch.randn(20, 4)
    layer.reset_parameters()
    assert torch.equal(layer(IDS), first)
    assert layer.handle.grad is None
    assert layer.table.steps == 0
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    other = made(kind)
    fresh = ert.Adam(other, lr=0.1, dense=kind == "dense rule")
    for _ in range(2):
        train(layer, rule)
        train(other, fresh)
    assert torch.equal(layer(IDS), other(IDS))
    for each in (layer, other):
        each.table.close() if each.table.is_on_disk and each.table.commit() else None


def test_another_seed_gives_other_rows_and_takes_one_number():
    layer = made("RAM")
    before, after = layer(IDS).detach().clone(), []
    for reset in (layer.reset_parameters, lambda: ert.Embedding(20, 4)):
        torch.manual_seed(1)
        reset()
        after.append(torch.rand(()))
    assert after[0] == after[1]
    assert not torch.equal(layer(IDS), before)


def test_folds_as_tutorials_reset_them():
    model: Any = nn.Sequential(ert.EmbeddingBag(20, 4), nn.Linear(4, 1))
    bags = IDS.view(-1, 2)
    optimizer = ert.optimizer(model, rows=ert.Adam, dense=torch.optim.Adam, lr=0.1)
    for _ in range(2):
        model(bags).sum().backward()
        optimizer.step()
        trained = model[0](bags)
        model.apply(lambda layer: layer.reset_parameters() if hasattr(layer, "reset_parameters") else None)
        assert not torch.equal(model[0](bags), trained)
        np.testing.assert_array_equal(model[0].table.export()[0], [])


def test_averages_cannot_be_reset():
    averaged: Any = ert.average(nn.Sequential(made("RAM")))
    with pytest.raises(er.UnsupportedError, match=r"average of .* cannot be reset: .*ert\.average\(model\)"):
        averaged.module[0].reset_parameters()
