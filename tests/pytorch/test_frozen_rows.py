"""Frozen rows of PyTorch's layers: `torch.nn`'s layers, whose gradients of these rows are set to zero by hand."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import embedrock as er
import embedrock.torch as ert
from embedrock.errors import ArgumentError, UnsupportedError
from slow import slow

ROWS, DIM = 50, 4
FROZEN: Any = [3, range(10, 20)]
EVERY, STAYS = torch.arange(ROWS), torch.tensor([3, *range(10, 20)])


def ranges_of(layer: Any) -> list[list[int]]:
    return [] if layer.table.spec.frozen is None else layer.table.spec.frozen.ranges


def rows_of(layer: Any) -> torch.Tensor:
    return torch.from_numpy(layer.table.lookup(EVERY.numpy()))


CASES: list[tuple[str, dict[str, Any]]] = [
    ("Embedding", {}),
    ("Embedding", {"padding_idx": 5}),
    ("Embedding", {"padding_idx": 12}),
    ("Embedding", {"scale_grad_by_freq": True}),
    ("EmbeddingBag", {"mode": "sum"}),
    ("EmbeddingBag", {"mode": "mean", "padding_idx": 12}),
    ("EmbeddingBag", {"mode": "max"}),
]


@pytest.mark.parametrize(("kind", "given"), CASES)
def test_a_layer_is_that_of_torch_with_zeroed_gradients(kind: str, given: dict[str, Any]):
    torch.manual_seed(0)
    weight = torch.randn(ROWS, DIM)
    mine = getattr(ert, kind).from_pretrained(weight.clone(), freeze=False, frozen=FROZEN, **given)
    theirs = getattr(nn, kind).from_pretrained(weight.clone(), freeze=False, **given)
    optimizers = ert.SGD(mine, lr=0.1), torch.optim.SGD(theirs.parameters(), lr=0.1)
    for _ in range(8):
        ids, target = torch.randint(0, ROWS, (16, 5)), torch.randn(DIM)
        for layer, optimizer in zip((mine, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            (layer(ids) * target).square().sum().backward()
        assert theirs.weight.grad is not None
        theirs.weight.grad[STAYS] = 0.0
        torch.testing.assert_close(mine.handle.grad, theirs.weight.grad.norm())
        norms = [nn.utils.clip_grad_norm_(layer.parameters(), 1.0, norm_type=1.0) for layer in (mine, theirs)]
        torch.testing.assert_close(*norms)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(rows_of(mine), theirs.weight.detach(), rtol=1e-5, atol=1e-5)
    assert torch.equal(rows_of(mine)[STAYS], weight[STAYS])


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("kind", [ert.Adam, ert.Momentum])
def test_optimizers_with_state_leave_them(kind: Any, dense: bool):
    layer = ert.Embedding(ROWS, DIM, frozen=FROZEN)
    optimizer, before = kind(layer, lr=0.1, dense=dense), rows_of(layer)
    for step in range(6):
        layer(torch.arange(step, ROWS, 2)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    changed = (rows_of(layer) != before).any(1)
    assert not changed[STAYS].any()
    assert changed.sum() == ROWS - len(STAYS)


def test_weight_decay_leaves_them_or_is_refused():
    layer = ert.Embedding(ROWS, DIM, frozen=FROZEN)
    with pytest.raises(UnsupportedError, match=r"Embedding\(50, 4\): `frozen` rows cannot stay under AdamW"):
        ert.AdamW(layer, dense=True)
    optimizer, before = ert.AdamW(layer, lr=0.1, weight_decay=0.5), rows_of(layer)
    layer(EVERY).square().sum().backward()
    optimizer.step()
    assert torch.equal(rows_of(layer)[STAYS], before[STAYS])


def test_layers_of_one_table_share_them_and_each_has_its_padding():
    first = ert.Embedding(ROWS, DIM, frozen=FROZEN, padding_idx=0)
    second = ert.EmbeddingBag(first.table, mode="sum")
    with pytest.raises(ArgumentError, match=r"`frozen` of ert.Embedding belongs to the table"):
        ert.Embedding(first.table, frozen=np.array([1, 2]))
    optimizer, before = ert.SGD(nn.ModuleList([first, second]), lr=1.0), rows_of(first)
    (first(EVERY).sum() + second(EVERY[:, None]).sum()).backward()
    optimizer.step()
    steps = (before - rows_of(first)).mean(1).round()
    expected = torch.full((ROWS,), 2.0)
    expected[STAYS], expected[0] = 0.0, 1.0
    assert torch.equal(steps, expected)


def test_max_norm_leaves_them_in_lookups_and_frozen_models():
    weight = 5 * torch.randn(ROWS, DIM)
    layer = ert.Embedding.from_pretrained(weight.clone(), freeze=False, frozen=FROZEN, max_norm=1.0)
    plain: Any = ert.freeze(layer)
    layer(EVERY)
    norms = rows_of(layer).norm(dim=1)
    assert torch.equal(rows_of(layer)[STAYS], weight[STAYS])
    assert (norms > 1.001).nonzero().flatten().tolist() == STAYS.tolist()
    torch.testing.assert_close(plain.weight, rows_of(layer))
    assert torch.equal(plain.weight[STAYS], weight[STAYS])


def test_averages_of_them_are_the_rows():
    layer = ert.Embedding(ROWS, DIM, frozen=FROZEN)
    optimizer, average = ert.SGD(layer, lr=1.0), ert.average(layer, decay=0.5)
    for _ in range(3):
        layer(EVERY).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(layer)
    assert torch.equal(average(STAYS), layer(STAYS))
    assert not torch.equal(average(EVERY), layer(EVERY))


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_collection_gives_each_table_its_own(on_disk: bool, tmp_path: Path):
    group = er.Group(path=tmp_path / "group") if on_disk else None
    options = {"frozen": FROZEN}
    configs = [ert.EmbeddingBagConfig(ROWS, DIM, "a", options=options), ert.EmbeddingBagConfig(ROWS, DIM, "b")]
    collection = ert.EmbeddingBagCollection(configs, group=group)
    layers = {layer.table.name: layer for layer in collection.modules() if isinstance(layer, ert.EmbeddingBag)}
    optimizer, before = ert.SGD(collection, lr=1.0), {name: rows_of(layer) for name, layer in layers.items()}
    found = collection(dict.fromkeys("ab", EVERY[:, None]))
    torch.stack([rows.sum() for rows in found.values()]).sum().backward()
    optimizer.step()
    stays = {name: (rows_of(layer) == before[name]).all(1).nonzero().flatten() for name, layer in layers.items()}
    assert {name: ids.tolist() for name, ids in stays.items()} == {"a": STAYS.tolist(), "b": []}
    if group is not None:
        group.commit()
        group.close()


def test_they_go_with_states_copies_and_moved_tables():
    layer = ert.Embedding(ROWS, DIM, frozen=FROZEN)
    for own, ranges in ((None, [[3, 4], [10, 20]]), (7, [[7, 8]]), ([], [])):
        other = ert.Embedding(ROWS, DIM, frozen=own)
        other.load_state_dict(layer.state_dict())
        assert ranges_of(other) == ranges
    assert ranges_of(copy.deepcopy(layer)) == [[3, 4], [10, 20]]
    layer.reset_parameters()
    assert ranges_of(layer) == [[3, 4], [10, 20]]
    model = nn.ModuleDict({"layer": layer})
    ert.fuse(model)
    assert ranges_of(model["layer"]) == [[3, 4], [10, 20]]


# -------------------------------------------------------------------- several processes


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def trained(net: Any, layer: ert.Embedding, blocks: list[int], share: float) -> tuple[list[float], np.ndarray]:
    """Return norms of the gradients, and the rows after some steps by the batches of some ranks."""
    optimizer, norms = ert.Adam(layer, lr=0.1), list[float]()
    for step in range(4):
        for block in blocks:
            ids = torch.from_numpy(np.random.default_rng([step, block]).integers(0, ROWS, 16))
            (net(ids).square().sum() * share).backward()
        assert layer.handle.grad is not None
        norms.append(layer.handle.grad.item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return norms, net(EVERY).numpy()


def train_on_rank(rank: int, sharded: bool, positions: bool) -> tuple[list[float], np.ndarray]:
    layer = ert.Embedding(None, DIM, seed=1, frozen=FROZEN, sharded=sharded, positions=positions)
    return trained(DistributedDataParallel(layer), layer, [rank], 1.0)


WAYS = [(True, False), *slow((False, False), (False, True), (True, True))]


@pytest.mark.parametrize(("sharded", "positions"), WAYS)
def test_processes_leave_them_as_one_does(pair: Ranks, sharded: bool, positions: bool):
    layer = ert.Embedding(None, DIM, seed=1, frozen=FROZEN)
    first = rows_of(layer)
    norms, rows = trained(layer, layer, [0, 1], 0.5)
    for found in pair.run(train_on_rank, sharded, positions):
        np.testing.assert_allclose(found[0], norms, rtol=1e-6)
        np.testing.assert_allclose(found[1], rows, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(found[1][STAYS], first[STAYS])
