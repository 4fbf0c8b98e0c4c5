"""`torch.distributed.checkpoint` saves rows, and loads them into models that have others or none yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import embedrock as er
import embedrock.torch as ert
from embedrock.torch.dcp import LoadPlanner

ROWS = 60


def made(seed: int, folder: Path | None = None, kind: Any = ert.Adam) -> tuple[Any, ert.ModelOptimizer]:
    torch.manual_seed(seed)
    path: Any = {} if folder is None else {"path": folder / "items.rock"}
    tower = nn.ModuleDict({"item": ert.EmbeddingBag(None, 4, seed=seed + 1, **path), "dense": nn.Linear(4, 1)})
    model = nn.ModuleDict({"user": ert.Embedding(ROWS, 4, seed=seed), "tower": tower})
    return model, ert.optimizer(model, rows=kind, dense=torch.optim.Adam, lr=0.05)


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        ids = torch.tensor([1, 2 + step, 7, 1])
        model["tower"]["dense"](model["user"](ids) + model["tower"]["item"](ids[:, None] * 10**9)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def check_same(model: Any, other: Any) -> None:
    ids = np.arange(ROWS)
    for one, its in ((model["user"], other["user"]), (model["tower"]["item"], other["tower"]["item"])):
        assert one.table.steps == its.table.steps
        assert np.array_equal(one.table.lookup(ids), its.table.lookup(ids))
        assert np.array_equal(one.table.lookup(ids * 10**9 % ROWS), its.table.lookup(ids * 10**9 % ROWS))
    assert all(map(torch.equal, ert.dense_parameters(model), ert.dense_parameters(other)))


def save(model: Any, optimizer: Any, folder: Path) -> None:
    state, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": of_optimizer}, checkpoint_id=folder)


def load(model: Any, optimizer: Any, folder: Path) -> None:
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder, planner=LoadPlanner())
    set_model_state_dict(model, state["model"])
    options = StateDictOptions(strict=False)  # the handles have no state
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


@pytest.mark.parametrize("trained", [0, 9])
@pytest.mark.parametrize("kind", [ert.Adam, ert.SGD])
def test_training_goes_on_to_the_same_bits(trained: int, kind: Any, tmp_path: Path):
    model, optimizer = made(0, kind=kind)
    train(model, optimizer, range(5))
    save(model, optimizer, tmp_path / "c")
    again, its = made(1, kind=kind)
    train(again, its, range(trained))  # other rows, more of them
    load(again, its, tmp_path / "c")
    check_same(model, again)
    for each, of_it in ((model, optimizer), (again, its)):
        train(each, of_it, range(5, 9))
    check_same(model, again)


def test_a_table_on_disk(tmp_path: Path):
    straight, of_it = made(0)
    model, optimizer = made(0, tmp_path)
    train(model, optimizer, range(5))
    save(model, optimizer, tmp_path / "c")
    train(model, optimizer, range(5, 7))  # lost
    model["tower"]["item"].table.commit()
    model["tower"]["item"].table.close()
    again, its = made(0, tmp_path)
    load(again, its, tmp_path / "c")
    for each, optimizer_of_it, steps in ((again, its, range(5, 9)), (straight, of_it, range(9))):
        train(each, optimizer_of_it, steps)
    check_same(straight, again)
    again["tower"]["item"].table.commit()
    again["tower"]["item"].table.close()


@pytest.mark.parametrize("dense", [torch.optim.SGD, torch.optim.Adam])
def test_looking_at_states_changes_nothing(dense: Any):
    """PyTorch has optimizers without state make a step, by gradients of zero."""
    model, twin = made(0)[0], made(0)[0]
    for each in (model, twin):
        optimizers = [ert.Adam(each, lr=0.05), dense(ert.dense_parameters(each), lr=0.05)]
        both = ert.optimizer(each, *optimizers)
        train(each, both, range(3))
        if each is model:
            for optimizer in (both, optimizers, optimizers[0]):
                get_state_dict(each, optimizer)
        train(each, both, range(3, 5))
    check_same(model, twin)
    assert model["user"].table.steps == 5


def test_state_dicts_that_are_not_nested(tmp_path: Path):
    layer, again = ert.Embedding(ROWS, 4), ert.Embedding(ROWS, 4)
    layer.table.set_rule(er.SGD())
    layer.table.update([1, 2], np.ones((2, 4), np.float32))
    dcp.save(layer.state_dict(), checkpoint_id=tmp_path / "c")
    state = again.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "c", planner=LoadPlanner())
    with pytest.raises(er.ArgumentError, match=r"`rows\.weight` .*got none.*belong together"):
        again.load_state_dict(state)
    outer = {"model": again.state_dict()}
    dcp.save({"model": layer.state_dict()}, checkpoint_id=tmp_path / "d")
    dcp.load(outer, checkpoint_id=tmp_path / "d", planner=LoadPlanner())
    again.load_state_dict(outer["model"])
    assert torch.equal(again(torch.arange(ROWS)), layer(torch.arange(ROWS)))


def test_without_our_planner_nothing_is_loaded_in_silence(tmp_path: Path):
    model, optimizer = made(0)
    train(model, optimizer, range(12))
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "c")
    again, _ = made(1)
    state = again.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "c")
    with pytest.raises(er.ArgumentError, match=r"`rows\.weight` .*got none.*belong together"):
        again.load_state_dict(state)
    assert not again["user"].table.steps
    again, optimizer = made(1)
    train(again, optimizer, range(1))
    with pytest.raises(dcp.api.CheckpointException, match="Size mismatch"):
        dcp.load(again.state_dict(), checkpoint_id=tmp_path / "c")


def test_a_layer_that_the_checkpoint_does_not_have(tmp_path: Path):
    dcp.save(nn.Linear(4, 1).state_dict(), checkpoint_id=tmp_path / "c")
    state = ert.Embedding(ROWS, 4).state_dict()
    with pytest.raises(dcp.api.CheckpointException, match=r"Missing key .*rows\.meta"):
        dcp.load(state, checkpoint_id=tmp_path / "c", planner=LoadPlanner())
