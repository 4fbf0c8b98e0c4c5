"""Dense layers of which each process has a part (DTensors), in checkpoints of `ert.save`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import embedrock as er
import embedrock.torch as ert
from embedrock.torch.saving.dense_parts import whole

DIM = 6


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    ranks = Ranks(2, timeout=30)
    yield ranks
    ranks.close()


def model_of(how: str, **options: Any) -> tuple[Any, Any]:
    """Return a model whose dense layers are in parts, and its optimizer."""
    torch.manual_seed(0)
    kinds: dict[str, Any] = {"sharded": True, **options}
    hidden = 8 if how in ("columns", "both") else 7  # which two processes cannot halve
    dense = nn.Sequential(nn.BatchNorm1d(DIM), nn.Linear(DIM, hidden), nn.Linear(hidden, 3))
    model = nn.Sequential(ert.Embedding(None, DIM, seed=1, **kinds), dense)
    world = dist.get_world_size()
    if how in ("columns", "both"):
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(dense, mesh["tensor"], {"1": ColwiseParallel(), "2": RowwiseParallel()})
        if how == "both":
            fully_shard(dense, mesh=mesh["data"])
    elif how == "fully":
        fully_shard(dense, mesh=init_device_mesh("cpu", (world,)))
    elif how == "whole model":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)), ignored_params=set(ert.handles(model)))
    return model, ert.optimizer(model, rows=ert.Adam, dense=torch.optim.AdamW, lr=0.1)


def train(model: Any, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        model(torch.arange(12) + step).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def told(model: Any, optimizer: Any) -> list[torch.Tensor]:
    """Return all dense numbers, whole."""
    state = [value for values in optimizer.state.values() for value in values.values()]
    tensors = [*ert.dense_parameters(model), *model.buffers(), *state]
    return [whole(each.detach(), is_kept=True).clone() for each in tensors]


def saves_and_loads(rank: int, folder: str, how: str) -> list[Any]:
    """Save, train on, and load into the same model, and into a new one; train on."""
    model, optimizer = model_of(how)
    train(model, optimizer, 2)
    ert.save(model, folder, step=2, optimizer=optimizer)
    before = told(model, optimizer)
    train(model, optimizer, 2)
    after = told(model, optimizer)
    assert ert.load(model, folder, optimizer=optimizer) == 2
    loaded = told(model, optimizer)
    train(model, optimizer, 2)
    again = told(model, optimizer)
    model, optimizer = model_of(how)
    ert.load(model, folder, optimizer=optimizer)
    fresh = told(model, optimizer)
    train(model, optimizer, 2)
    return [(before, loaded), (before, fresh), (after, again), (after, told(model, optimizer))]


def check_same(found: list[Any]) -> None:
    for pairs in found:
        for one, other in pairs:
            assert len(one) == len(other) > 8
            for expected, got in zip(one, other, strict=True):
                torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("how", ["fully", "whole model", "columns"])
def test_dense_weights_and_their_optimizer_state_are_after_load_what_they_were(
    pair: Ranks, tmp_path: Path, how: str
) -> None:
    check_same(pair.run(saves_and_loads, str(tmp_path), how))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fully", "both"])
def test_four_processes_do_too(tmp_path: Path, how: str) -> None:
    ranks = Ranks(4, timeout=60)
    try:
        check_same(ranks.run(saves_and_loads, str(tmp_path), how))
    finally:
        ranks.close()


def saves(rank: int, folder: str) -> list[torch.Tensor]:
    model, optimizer = model_of("fully")
    train(model, optimizer, 2)
    ert.save(model, folder, step=2, optimizer=optimizer)
    return told(model, optimizer)


def loads_whole(rank: int, folder: str) -> list[torch.Tensor]:
    model, optimizer = model_of("not at all")
    ert.load(model, folder, optimizer=optimizer)
    return told(model, optimizer)


def test_a_checkpoint_of_parts_is_loaded_by_a_model_that_has_none(pair: Ranks, tmp_path: Path) -> None:
    saved = pair.run(saves, str(tmp_path))
    check_same([[(saved[0], each)] for each in pair.run(loads_whole, str(tmp_path))])


class Flat(torch.optim.Optimizer):
    """Has optimizer state in parts of another shape than its parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["sums"] = parameter.detach().square().sum(-1, keepdim=True)


def refused(rank: int, folder: str, how: str) -> str:
    torch.manual_seed(0)
    model: Any
    optimizer: Any
    model, optimizer = (None, None) if how in ("FSDP1", "subset") else model_of("fully")
    if how == "FSDP1":
        wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # its __init__ wants a GPU
        nn.Module.__init__(wrapped)
        model = nn.Sequential(ert.Embedding(None, DIM, seed=1, sharded=True), wrapped)
    elif how == "subset":
        groups = [dist.new_group([each]) for each in range(2)]
        model, _ = model_of("fully", sharded=groups[rank])
    elif how == "state":
        optimizer = Flat(ert.dense_parameters(model))
        model[1](torch.ones(2, DIM)).sum().backward()
        optimizer.step()
    try:
        ert.save(model, f"{folder}/{rank if how == 'subset' else 0}", step=1, optimizer=optimizer)
    except er.UnsupportedError as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("FSDP1", "cannot put together what FullyShardedDataParallel (FSDP1) has made of dense weights"),
        ("subset", "is in parts (DTensor), which ranks [0, 1] have, and ert.save is called by ranks ["),
        ("state", "'sums' of optimizer 0 is in parts (DTensor) of another shape than its parameter"),
    ],
)
def test_what_cannot_be_put_together_is_refused_on_all_ranks_and_nothing_is_saved(
    pair: Ranks, tmp_path: Path, how: str, said: str
) -> None:
    for each in pair.run(refused, str(tmp_path), how):
        assert said in each
    assert not [name for _, _, names in os.walk(tmp_path) for name in names]
