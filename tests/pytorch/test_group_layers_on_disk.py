"""Layers whose tables are members of a group on disk: trained, saved and loaded as those of tables alone."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import embedrock as er
import embedrock.torch as ert
from embedrock.errors import ClosedTableError

NAMES = ("user", "item", "tag")


def model_of(group: er.Group | None) -> Any:
    """Return a collection over three tables of a group, one of which has another dim, and a dense layer."""
    torch.manual_seed(0)
    kinds: dict[str, Any] = {"user": (10**9, 4), "item": (1000, 4), "tag": (50, 3)}
    made = [ert.EmbeddingBagConfig(kinds[name][0], kinds[name][1], name) for name in NAMES]
    return nn.ModuleDict({"rows": ert.EmbeddingBagCollection(made, group=group), "top": nn.Linear(11, 1)})


def train(model: Any, optimizer: Any, start: int, steps: int) -> float:
    loss = torch.zeros(())
    for number in range(start, start + steps):
        rng = np.random.default_rng(number)
        batch = {name: torch.from_numpy(rng.integers(0, 50, (16, 2))) for name in NAMES}
        loss = model["top"](model["rows"](batch, concatenate=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def optimizer_of(model: nn.Module) -> Any:
    return ert.optimizer(model, rows=ert.Adam, dense=torch.optim.Adam, lr=0.1)


def test_a_model_on_a_group_trains_saves_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = model_of(er.Group())
    losses = [train(expected, optimizer := optimizer_of(expected), 0, 5), train(expected, optimizer, 5, 5)]

    group = er.Group(path=tmp_path / "m.rock", memory="64KiB")
    model = model_of(group)
    optimizer = optimizer_of(model)
    assert train(model, optimizer, 0, 5) == losses[0]
    ert.save(model, tmp_path / "saved", 5, optimizer)
    assert len(group.commits()) == 2  # one, besides the first: of all tables
    train(model, optimizer, 90, 3)  # which is not saved
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", er.UncommittedWarning)
        group.close()

    group = er.Group(path=tmp_path / "m.rock", memory="64KiB")
    caplog.set_level("INFO", "embedrock")
    model = model_of(group)
    assert caplog.text.count(f"{group.path} resumed at step 5 (commit 1)") == 1  # not once a table
    optimizer = optimizer_of(model)
    train(model, optimizer, 95, 2)
    assert ert.load(model, tmp_path / "saved", optimizer) == 5
    commits = group.last_commit
    assert train(model, optimizer, 5, 5) == losses[1]
    for name in NAMES:
        for got, wanted in zip(group[name].export(), expected["rows"].layer_of(name).table.export(), strict=True):
            np.testing.assert_array_equal(got, wanted)
    assert ert.save(model, tmp_path / "saved", 10, optimizer)
    assert group.last_commit == commits + 1
    group.close()


def test_a_state_is_that_of_its_own_member(tmp_path: Path) -> None:
    group = er.Group(path=tmp_path / "m.rock", memory="64KiB")
    layers = [ert.Embedding(10, 4, group=group, name=name) for name in ("one", "two")]
    layers[0].table.update([1], np.ones((1, 4)), lr=0.1) if layers[0].table.rule else None
    state = layers[0].state_dict()
    with pytest.raises(
        er.ArgumentError, match=r"table 'one' of .* has table 'two' of .* name='one', or group\.rename\('two', 'one'\)"
    ):
        layers[1].load_state_dict(state)
    group.rename("one", "three")
    with pytest.raises(er.ArgumentError, match="the layer has table 'three'"):
        layers[0].load_state_dict(state)
    group.rename("three", "one")
    layers[0].load_state_dict(state)
    group.drop("one")
    with pytest.raises(ClosedTableError, match="is closed, since"):
        layers[0](torch.tensor([1]))
    assert layers[1](torch.tensor([1])).shape == (1, 4)
    group.commit()
    group.close()


def test_prefetching_for_layers_of_a_group(tmp_path: Path) -> None:
    with er.Group(path=tmp_path / "m.rock", memory="64KiB") as group:
        model = model_of(group)
        optimizer = optimizer_of(model)
        train(model, optimizer, 0, 5)
        group.commit()
        layer = model["rows"].layer_of("user")
        batches = [torch.from_numpy(np.random.default_rng(k).integers(0, 50, (16, 2))) for k in range(5)]
        for ids in ert.prefetch(batches, {layer: lambda ids: ids}, depth=2):
            layer(ids).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert layer.table.steps == 10
        group.commit()
