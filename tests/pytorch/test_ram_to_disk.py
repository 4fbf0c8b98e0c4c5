"""A model whose rows were in RAM goes on with rows on disk."""

from __future__ import annotations

import copy
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import embedrock as er
import embedrock.torch as ert

ROWS, DIM = 500, 8


def make(**options: Any) -> tuple[nn.Sequential, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(ert.Embedding(ROWS, DIM, padding_idx=0, **options), nn.Linear(DIM, 1))
    return model, ert.optimizer(model, rows=ert.Adam(model, lr=0.1), dense=torch.optim.Adam)


def train(model: nn.Module, optimizer: Any, seed: int) -> None:
    for ids in torch.from_numpy(np.random.default_rng(seed).integers(0, ROWS, (6, 32))):
        optimizer.zero_grad()
        model(ids).square().sum().backward()
        optimizer.step()


def rows_of(model: nn.Sequential) -> torch.Tensor:
    return model[0](torch.arange(ROWS)).detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["state_dict", "ert.save"])
def test_training_goes_on_to_the_bit(way: str, dtype: torch.dtype, tmp_path: Path):
    ram, optimizer = make(seed=3, dtype=dtype)
    ram.to(dtype)
    train(ram, optimizer, 0)
    disk, later = make(seed=4, dtype=dtype, path=tmp_path / "t", memory="40KiB")
    disk.to(dtype)
    train(disk, later, 9)
    if way == "state_dict":
        disk.load_state_dict(copy.deepcopy(ram.state_dict()))
        later.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        ert.save(ram, tmp_path / "checkpoints", 6, optimizer)
        assert ert.load(disk, tmp_path / "checkpoints", later) == 6
    assert torch.equal(rows_of(disk), rows_of(ram))
    for model, stepper in ((ram, optimizer), (disk, later)):
        train(model, stepper, 1)
    assert torch.equal(rows_of(disk), rows_of(ram))
    table: er.Table = disk[0].table  # pyright: ignore
    table.commit(step=12)
    table.close()
    again, last = make(dtype=dtype, path=tmp_path / "t")
    again.to(dtype)
    assert torch.equal(rows_of(again), rows_of(ram))
    assert again[0].table.last_step == 12  # pyright: ignore
    again[1].load_state_dict(disk[1].state_dict())
    last.load_state_dict(copy.deepcopy(later.state_dict()))
    for model, stepper in ((ram, optimizer), (again, last)):
        train(model, stepper, 2)
    assert torch.equal(rows_of(again), rows_of(ram))
    again[0].table.commit()  # pyright: ignore
    again[0].table.close()  # pyright: ignore


def test_another_dtype_is_refused(tmp_path: Path):
    ram, _ = make(seed=3)
    layer = ert.Embedding(ROWS, DIM, dtype=torch.bfloat16, path=tmp_path / "t")
    with pytest.raises(er.ArgumentError, match="must have dtype 'bfloat16': got 'float32'"):
        layer.load_state_dict(ram[0].state_dict())
    layer.table.close()


def test_no_second_copy_of_the_rows_is_made(tmp_path: Path):
    rows, dim = 60_000, 256
    ram, disk = ert.Embedding(rows, dim), ert.Embedding(rows, dim, path=tmp_path / "t", memory="4MiB")
    ram.table.assign(np.arange(rows), np.ones((rows, dim), np.float32))
    state = ram.state_dict()
    taken = sum(tensor.nbytes for tensor in state.values())
    tracemalloc.start()
    disk.load_state_dict(state)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 0.6 * taken
    assert torch.equal(disk(torch.arange(1000)), ram(torch.arange(1000)))
    disk.table.commit()
    disk.table.close()
