"""Layers whose rows come and go: their state dicts have who has a record; what does not go together is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import embedrock as er
import embedrock.torch as ert

POLICIES = {"admission": er.Admission(2), "eviction": er.Eviction(max_rows=50, by="recency")}


def train(layer: ert.Embedding, optimizer: torch.optim.Optimizer, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(20):
        optimizer.zero_grad()
        layer(torch.from_numpy(rng.integers(0, 100, 20))).sum().backward()
        optimizer.step()


def test_a_state_dict_has_who_has_a_record():
    layer, other = (ert.Embedding(None, 4, seed=0, **POLICIES) for _ in range(2))
    first, second = (ert.SGD(each, lr=0.1) for each in (layer, other))
    train(layer, first, 0)
    other.load_state_dict(layer.state_dict())
    for each, optimizer in ((layer, first), (other, second)):
        train(each, optimizer, 1)
    for got, wanted in zip(other.table.export(), layer.table.export(), strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert layer.table.stats()["evicted"] == other.table.stats()["evicted"] > 0


def test_rows_whose_gradients_wait_are_not_forgotten():
    layer = ert.Embedding(None, 4, seed=0)
    optimizer = ert.SGD(layer, lr=0.1)
    layer(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(er.ArgumentError, match=r"read and is not stepped yet: got 1 row, first ids \[1\]"):
        layer.table.forget([1])
    optimizer.step()
    assert layer.table.forget([1]) == 1


def test_a_shared_row_trains_and_goes_where_the_rows_go():
    layer = ert.Embedding(None, 4, seed=0, admission=er.Admission(2, default="shared"))
    optimizer = ert.SGD(layer, lr=0.1)
    before = layer(torch.tensor([7])).detach()
    optimizer.zero_grad()
    layer(torch.tensor([1, 2, 2])).sum().backward()
    optimizer.step()
    shared = layer(torch.tensor([7])).detach()
    torch.testing.assert_close(shared, before - 0.3)
    other = ert.Embedding(None, 4, seed=0, admission=er.Admission(2, default="shared"))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(torch.tensor([7])).detach(), shared)
    frozen = ert.freeze(layer, {"": [1, 2]})
    assert torch.equal(frozen(torch.tensor([1, 99])), shared.repeat(2, 1))


@pytest.mark.filterwarnings("ignore:sharded=:UserWarning")
def test_what_does_not_go_together_is_refused():
    with pytest.raises(er.UnsupportedError, match=r"cannot come and go .* made with segments=1, and each process must"):
        ert.Embedding(er.Table(None, 4, admission=er.Admission(2)), sharded=True)
    with pytest.raises(
        er.UnsupportedError, match=r"`max_norm` \(1.0\) of .* cannot go with admission=: a lookup would"
    ):
        ert.Embedding(None, 4, max_norm=1.0, admission=er.Admission(2))


def test_the_row_of_padding_stays():
    layer = ert.Embedding(None, 4, seed=0, padding_idx=3, eviction=er.Eviction(max_rows=5, keep=[10]))
    optimizer = ert.SGD(layer, lr=0.1)
    for first in range(10, 20):
        layer(torch.tensor([first, first + 1, 3])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert layer(torch.tensor([3])).tolist() == [[0.0] * 4]
    assert layer.table.export()[0].tolist() == [3, 10, 18, 19, 20]
