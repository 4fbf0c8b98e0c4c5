"""First values of layers that were given no seed: `torch.manual_seed` decides them, as those of all other layers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import embedrock as er
import embedrock.torch as ert

IDS = torch.arange(100)


class TwoTowers(nn.Module):
    """Two layers of the same dim, and dense weights that are drawn after them."""

    def __init__(self, embedding: Any = ert.Embedding, **options: Any) -> None:
        super().__init__()
        self.user, self.item = embedding(100, 16, **options), embedding(100, 16, **options)
        self.head = nn.Linear(16, 1)


def contents(model: TwoTowers) -> list[torch.Tensor]:
    return [model.user(IDS).detach(), model.item(IDS).detach(), *(p.detach() for p in model.head.parameters())]


def seeded(seed: int, **options: Any) -> TwoTowers:
    torch.manual_seed(seed)
    return TwoTowers(**options)


def test_layers_of_the_same_dim_start_apart():
    torch.manual_seed(0)
    layers = [ert.Embedding(100, 8) for _ in range(26)]
    bags = [ert.EmbeddingBag(100, 8) for _ in range(2)]
    rows = torch.stack([layer(IDS).detach() for layer in layers] + [bag(IDS[:, None]).detach() for bag in bags])
    assert rows.unique().numel() > 0.999 * rows.numel()


@pytest.mark.parametrize("embedding", [nn.Embedding, ert.Embedding])
def test_the_item_ranked_first_for_a_user_is_not_that_of_the_same_id(embedding: Any):
    torch.manual_seed(0)
    user, item = embedding(1000, 16), embedding(1000, 16)
    ids = torch.arange(1000)
    first = (user(ids) @ item(ids).T).argmax(1)
    assert (first == ids).double().mean() < 0.02


def test_manual_seed_repeats_a_model():
    one, same, other = seeded(0), seeded(0), seeded(1)
    for a, b, c in zip(contents(one), contents(same), contents(other), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


def test_a_layer_draws_one_number_whether_its_table_is_there_or_not(tmp_path: Path):
    def on_disk() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(ert.Embedding(100, 8, path=tmp_path / "rows.rock"), nn.Linear(8, 8))

    made = on_disk()
    rows, dense = made[0](IDS).detach(), made[1].weight.detach()
    made[0].table.close()
    torch.manual_seed(5)
    again = on_disk()
    assert torch.equal(again[1].weight, dense)
    assert torch.equal(again[0](IDS), rows)
    again[0].table.close()
    torch.manual_seed(0)
    in_ram: Any = nn.Sequential(ert.Embedding(100, 8), nn.Linear(8, 8))
    assert torch.equal(in_ram[1].weight, dense)
    assert torch.equal(in_ram[0](IDS), rows)


def test_a_table_that_is_there_keeps_its_seed_under_another_manual_seed(tmp_path: Path):
    torch.manual_seed(0)
    made = ert.Embedding(100, 8, path=tmp_path / "rows.rock")
    rows = made(IDS).detach()
    made.table.close()
    torch.manual_seed(1)
    again = ert.Embedding(100, 8, path=tmp_path / "rows.rock")
    assert torch.equal(again(IDS), rows)
    again.table.close()


def test_a_seed_that_is_given_draws_nothing_and_neither_does_a_ready_made_table():
    for make in (lambda: ert.Embedding(9, 4, seed=3), lambda: ert.Embedding(er.Table(9, 4, seed=3))):
        torch.manual_seed(0)
        expected = torch.rand(3)
        torch.manual_seed(0)
        layer = make()
        assert torch.equal(torch.rand(3), expected)
        assert layer.table.spec.seed == 3


@pytest.mark.parametrize("place", [lambda: torch.device("meta"), FakeTensorMode, torch.inference_mode])
def test_where_tensors_are_not_real_a_seed_is(place: Any):
    torch.manual_seed(0)
    expected = ert.Embedding(9, 4).table.spec.seed
    torch.manual_seed(0)
    with place():
        layer = ert.Embedding(9, 4)
    assert layer.table.spec.seed == expected


def test_copies_keep_the_seed():
    model = seeded(0)
    for a, b in zip(contents(model), contents(copy.deepcopy(model)), strict=True):
        assert torch.equal(a, b)


def test_rows_that_were_never_trained_come_with_a_state_dict(tmp_path: Path):
    saved, fresh = seeded(0), seeded(1)
    rows = ert.Adam(saved.user)
    saved.user(torch.tensor([3, 4])).sum().backward()
    rows.step()
    torch.save(saved.state_dict(), tmp_path / "model.pt")
    fresh.load_state_dict(torch.load(tmp_path / "model.pt"))
    for a, b in zip(contents(saved), contents(fresh), strict=True):
        assert torch.equal(a, b)


def test_pretrained_layers_of_16_bits_round_apart():
    weights = torch.zeros(9, 4, dtype=torch.bfloat16)
    torch.manual_seed(0)
    one, other = (ert.Embedding.from_pretrained(weights, freeze=False).table.spec.seed for _ in range(2))
    assert one != other
    torch.manual_seed(0)
    assert ert.Embedding.from_pretrained(weights).table.spec.seed == one


def test_padding_row_and_init_are_as_before():
    torch.manual_seed(0)
    layer = ert.Embedding(9, 4, padding_idx=0, init=er.Uniform(2, 3))
    rows = layer.table.lookup(np.arange(9))
    assert not rows[0].any()
    assert (rows[1:] >= 2).all()
