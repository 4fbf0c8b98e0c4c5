"""Layers on one table are in a state dict, and so in a file, once; and files that have them twice load as before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

import embedrock as er
import embedrock.torch as ert
from embedrock.torch.dcp import LoadPlanner

IDS = torch.arange(30)


class Tied(nn.Module):
    def __init__(self, path: str | None = None) -> None:
        super().__init__()
        items = er.Table(None, 8, init=er.Normal(0.1), seed=1, path=path, memory="1MiB")
        self.history, self.candidate = ert.Embedding(items), ert.Embedding(items)
        self.again = self.history
        self.own = ert.Embedding(50, 8)

    def trained(self) -> Tied:
        optimizer = ert.Adam(self, lr=0.1)
        (self.history(IDS).sum() + self.own(IDS).square().sum()).backward()
        optimizer.step()
        return self


def same(one: Tied, other: Tied) -> bool:
    return torch.equal(one.candidate(IDS), other.candidate(IDS)) and torch.equal(one.own(IDS), other.own(IDS))


def metas(state: dict[str, Any]) -> list[str]:
    return [key for key in state if key.endswith("rows.meta")]


def by_torch(model: Tied, other: Tied, folder: Any) -> None:
    torch.save(model.state_dict(), folder / "model.pt")
    other.load_state_dict(torch.load(folder / "model.pt", weights_only=True))


def by_ert(model: Tied, other: Tied, folder: Any) -> None:
    ert.save(model, folder / "checkpoints", 1)
    ert.load(other, folder / "checkpoints")


def by_safetensors(model: Tied, other: Tied, folder: Any) -> None:
    save_file(model.state_dict(), folder / "model.safetensors")
    other.load_state_dict(load_file(folder / "model.safetensors"))


def by_its_models(model: Tied, other: Tied, folder: Any) -> None:
    save_model(model, str(folder / "model.safetensors"))
    load_model(other, str(folder / "model.safetensors"))


def by_dcp(model: Tied, other: Tied, folder: Any) -> None:
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "dcp")
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder / "dcp", planner=LoadPlanner())
    other.load_state_dict(state["model"])


@pytest.mark.parametrize("copy_by", [by_torch, by_ert, by_safetensors, by_its_models, by_dcp])
def test_rows_are_saved_once(copy_by: Callable[..., None], tmp_path: Any):
    model, other = Tied().trained(), Tied()
    assert metas(model.state_dict()) == ["history.rows.meta", "own.rows.meta"]
    assert metas(model.candidate.state_dict()) == metas(model.candidate.state_dict()) == ["rows.meta"]
    copy_by(model, other, tmp_path)
    assert same(model, other)


@pytest.mark.parametrize("left", [["history"], ["candidate"], ["history", "candidate", "again"]])
def test_a_file_may_have_the_rows_by_any_name_and_by_several(left: list[str]):
    model, other = Tied().trained(), Tied()
    state, rows = model.state_dict(), model.candidate.state_dict()
    state = {key: value for key, value in state.items() if not key.startswith("history")}
    state |= {f"{name}.{key}": value for name in left for key, value in copy.deepcopy(rows).items()}
    assert other.load_state_dict(state).missing_keys == []
    assert same(model, other)
    nothing = {key: value for key, value in state.items() if key.startswith("own")}
    with pytest.raises(RuntimeError, match=r'Missing key\(s\).*"history.rows.meta", "candidate.rows.meta"'):
        other.load_state_dict(nothing)
    assert other.load_state_dict(state).missing_keys == []


def test_tables_on_disk_refer_to_one_commit(tmp_path: Any):
    model = Tied(str(tmp_path / "items.rock")).trained()
    state = model.state_dict()
    before = model.candidate(IDS).detach().clone()
    model.trained()
    assert metas(state) == ["history.rows.meta", "own.rows.meta"]
    model.load_state_dict(state)
    assert torch.equal(model.candidate(IDS), before)
    model.candidate.table.close()


def test_layers_on_tables_of_their_own_do_not_load_what_one_had():
    state = Tied().trained().state_dict()
    other = Tied()
    other.candidate = ert.Embedding(None, 8)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*candidate\.rows\.meta"):
        other.load_state_dict(state)
