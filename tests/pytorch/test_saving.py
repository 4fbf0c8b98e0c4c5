"""Checkpoints, copies, pickles and pretrained rows."""

from __future__ import annotations

import copy
import io
import os
import pickle
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from twins import DIM, ROWS, check_equal, embedding_twins, weight_of

import embedrock as er
import embedrock.torch as ert

IDS = torch.tensor([3, 1, 3, 7])


class Model(nn.Module):
    """Two tables, one layer of each kind, and dense parameters."""

    def __init__(self, rows: int | None = ROWS, seed: int = 0, **arguments: Any) -> None:
        super().__init__()
        self.user = ert.Embedding(rows, DIM, seed=seed, **arguments)
        self.item = ert.EmbeddingBag(rows, DIM, seed=seed + 1, mode="sum", **arguments)
        self.dense = nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.dense(self.user(ids) + self.item(ids[:, None])).square().sum()


def train(model: Model, optimizers: list[torch.optim.Optimizer], steps: range) -> None:
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        model((IDS * (step + 1)) % ROWS).backward()
        for optimizer in optimizers:
            optimizer.step()


def optimizers_of(model: Model, kind: type[ert.RowOptimizer], **arguments: Any) -> list[torch.optim.Optimizer]:
    return [kind(model, lr=0.05, **arguments), torch.optim.Adam(ert.dense_parameters(model), lr=0.05)]


def saved(value: Any) -> Any:
    """Return what `torch.load` makes of what `torch.save` wrote."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def check_same(one: Model, other: Model) -> None:
    """All bits of rows, optimizer state and dense parameters."""
    for mine, its in ((one.user.table, other.user.table), (one.item.table, other.item.table)):
        assert mine.steps == its.steps
        assert mine.rule == its.rule
        assert np.array_equal(mine.lookup(np.arange(ROWS)), its.lookup(np.arange(ROWS)))
        (ids, records), (its_ids, its_records) = ((t.state()["ids"], t.state()["records"]) for t in (mine, its))
        assert np.array_equal(records[np.argsort(ids)], its_records[np.argsort(its_ids)])
    assert all(torch.equal(a, b) for a, b in zip(one.dense.parameters(), other.dense.parameters(), strict=True))


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [(ert.Adam, {}), (ert.Adam, {"dense": True}), (ert.SGD, {}), (ert.RowwiseAdagrad, {}), (ert.Ftrl, {})],
    ids=["Adam", "dense Adam", "SGD", "RowwiseAdagrad", "Ftrl"],
)
@pytest.mark.parametrize("optimizer_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_training_goes_on_to_the_same_bits(kind, arguments, optimizer_first, dtype):
    model = Model(dtype=dtype).float()
    optimizers = optimizers_of(model, kind, **arguments)
    train(model, optimizers, range(5))
    checkpoint = saved([model.state_dict(), *(optimizer.state_dict() for optimizer in optimizers)])

    resumed = Model(seed=5, dtype=dtype).float()  # other first values, until the checkpoint brings its own
    again = optimizers_of(resumed, kind, **arguments) if optimizer_first else []
    resumed.load_state_dict(checkpoint[0])
    again = again or optimizers_of(resumed, kind, **arguments)
    for optimizer, state in zip(again, checkpoint[1:], strict=True):
        optimizer.load_state_dict(state)
    check_same(model, resumed)
    for each, group in ((model, optimizers), (resumed, again)):
        train(each, group, range(5, 12))
    check_same(model, resumed)


def test_open_ids_go_through_a_checkpoint():
    layer, other = ert.Embedding(None, DIM), ert.Embedding(None, DIM, seed=3)
    optimizer = ert.SGD(layer, lr=1.0)
    ids = torch.tensor([2**62, -5])
    layer(ids).sum().backward()
    optimizer.step()
    other.load_state_dict(saved(layer.state_dict()))
    assert torch.equal(other(ids), layer(ids))
    assert torch.equal(other(ids + 1), layer(ids + 1))  # first values come with the seed


def test_a_checkpoint_is_as_large_as_the_rows_touched():
    layer = ert.Embedding(10**9, DIM)
    optimizer = ert.SGD(layer)
    layer(IDS).sum().backward()
    optimizer.step()
    state = layer.state_dict()
    assert sorted(state) == ["rows.ids", "rows.meta", "rows.weight"]  # the handle has nothing to say
    file = io.BytesIO()
    torch.save(state, file)
    assert len(file.getvalue()) < 10_000


def test_a_checkpoint_may_be_copied():
    model = Model()
    optimizers = optimizers_of(model, ert.Adam)
    train(model, optimizers, range(2))
    best = copy.deepcopy(model.state_dict())
    train(model, optimizers, range(2, 4))
    other = Model()
    other.load_state_dict(best)
    assert other.user.table.steps == 2


def test_loading_keeps_pending_gradients():
    """As PyTorch keeps .grad: the rows that were loaded are stepped by it."""
    mine, theirs = embedding_twins()
    start, its_start = mine.state_dict(), copy.deepcopy(theirs.state_dict())
    optimizers = [ert.SGD(mine, lr=1.0), torch.optim.SGD(theirs.parameters(), lr=1.0)]
    for layer in (mine, theirs):
        layer(IDS).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    for layer, state in ((mine, start), (theirs, its_start)):
        layer.load_state_dict(state)
    check_equal(mine, theirs)
    for optimizer in optimizers:
        optimizer.step()
    check_equal(mine, theirs)
    assert not torch.equal(weight_of(mine), its_start["weight"])
    assert mine.table.steps == 1


def test_keys_are_checked():
    layer = ert.Embedding(ROWS, DIM)
    with pytest.raises(RuntimeError, match=r'Missing key.*"rows.meta"'):
        layer.load_state_dict({})
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"other"'):
        layer.load_state_dict({**layer.state_dict(), "other": torch.zeros(1)})
    assert layer.load_state_dict({}, strict=False).missing_keys == ["rows.meta"]
    assert ert.handles(layer) == [layer.handle]


def test_a_checkpoint_of_another_table_is_refused():
    layer = ert.Embedding(ROWS, DIM)
    with pytest.raises(er.ArgumentError, match="dim"):
        layer.load_state_dict(ert.Embedding(ROWS, DIM + 1).state_dict())
    with pytest.raises(er.ArgumentError, match="rows"):
        layer.load_state_dict(ert.Embedding(ROWS + 1, DIM).state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_of_nn_embedding(dtype: torch.dtype):
    theirs = nn.ModuleDict({"user": nn.Embedding(ROWS, DIM, padding_idx=0, dtype=dtype), "dense": nn.Linear(DIM, 1)})
    mine = nn.ModuleDict({"user": ert.Embedding(ROWS, DIM, padding_idx=0, dtype=dtype), "dense": nn.Linear(DIM, 1)})
    mine.load_state_dict(saved(theirs.state_dict()))
    assert torch.equal(weight_of(mine["user"]), theirs.state_dict()["user.weight"])
    optimizer = ert.Adam(mine, lr=0.1)
    mine["user"](IDS).sum().backward()
    optimizer.step()
    with pytest.raises(er.ArgumentError, match=r"\(23, 5\).*\(3, 5\)"):
        mine["user"].load_state_dict({"weight": torch.zeros(3, DIM)})


SPOILT = {
    "nan": (torch.float32, float("nan")),
    "inf": (torch.float32, float("inf")),
    "too large": (torch.float16, 1e30),
    "too large as float64": (torch.float32, 1e300),
}


@pytest.mark.parametrize(("dtype", "value"), SPOILT.values(), ids=SPOILT)
def test_a_checkpoint_of_nn_embedding_is_loaded_as_a_whole_or_not_at_all(dtype: torch.dtype, value: float):
    rows = 70_000  # more than are imported at once
    layer = ert.Embedding(rows, 2, dtype=dtype)
    before = weight_of(layer)
    weight = torch.zeros(rows, 2, dtype=torch.float64)
    weight[rows - 3, 1] = value
    with pytest.raises(er.GradientError, match=r"`weight` for ert\.Embedding must be finite .* in row 69997\."):
        layer.load_state_dict({"weight": weight if value == 1e300 else weight.float()})
    assert layer.table.stats()["rows_touched"] == 0
    assert torch.equal(weight_of(layer), before)
    layer.load_state_dict({"weight": torch.ones(rows, 2)})
    assert (weight_of(layer) == 1).all()


def test_a_checkpoint_of_nn_embedding_comes_before_dense_adam():
    layer = ert.Embedding(ROWS, DIM)
    state = nn.Embedding(ROWS, DIM).state_dict()
    layer.load_state_dict(state)
    ert.Adam(layer, dense=True)
    with pytest.raises(er.UnsupportedError, match="before you make the optimizer"):
        layer.load_state_dict(state)
    assert torch.equal(weight_of(layer), state["weight"])


def test_a_checkpoint_of_nn_embedding_bag():
    theirs, mine = nn.EmbeddingBag(ROWS, DIM), ert.EmbeddingBag(ROWS, DIM)
    mine.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(mine(IDS[None]), theirs(IDS[None]))


# ---------------------------------------------------------------- copies and pickles


def test_deepcopy_is_independent():
    model = Model(name="original")
    optimizers = optimizers_of(model, ert.Adam)
    train(model, optimizers, range(3))
    model.user.requires_grad_(False)
    twin, its_optimizers = copy.deepcopy((model, optimizers))
    check_same(model, twin)
    assert not twin.user.handle.requires_grad
    assert twin.item.handle.requires_grad
    assert twin.user.handle.grad is None
    before = weight_of(twin.item)
    train(model, optimizers, range(3, 5))
    assert torch.equal(weight_of(twin.item), before)
    train(twin, its_optimizers, range(3, 5))
    check_same(model, twin)


def test_deepcopy_keeps_ties():
    table = er.Table(ROWS, DIM)
    model = copy.deepcopy(nn.ModuleList([ert.Embedding(table), ert.EmbeddingBag(table)]))
    assert model[0].table is model[1].table is not table
    assert model[0].handle is model[1].handle


def test_pickling_by_reference():
    layer = ert.Embedding(ROWS, DIM, name="users", padding_idx=1)
    again = pickle.loads(pickle.dumps(layer))
    assert again.table is layer.table
    assert again.handle is layer.handle
    assert repr(again) == repr(layer)
    file = io.BytesIO()
    torch.save(nn.Sequential(layer, nn.Linear(DIM, 1)), file)
    file.seek(0)
    assert torch.load(file, weights_only=False)[0].table is layer.table


def test_pickling_without_a_name_is_refused():
    with pytest.raises(er.UnsupportedError, match=r"name.*model\.state_dict\(\)"):
        pickle.dumps(ert.Embedding(ROWS, DIM))
    with pytest.raises(er.UnsupportedError, match="name"):
        torch.save(ert.Embedding(ROWS, DIM).handle, io.BytesIO())


def test_unpickling_where_there_is_no_such_table():
    layer = ert.Embedding(ROWS, DIM, name="elsewhere")
    pickled = pickle.dumps(layer).replace(b"elsewhere", b"somewhere")  # as if it came from another process
    with pytest.raises(er.ArgumentError, match="no table named 'somewhere' is open in this process"):
        pickle.loads(pickled)


# ---------------------------------------------------------------- pretrained rows


@pytest.mark.parametrize("kind", ["tensor", "array", "float16", "bfloat16", "strided"])
def test_from_pretrained(kind: str):
    weights = torch.randn(ROWS, DIM)
    weights = {"float16": weights.half(), "bfloat16": weights.bfloat16()}.get(kind, weights)
    weights = torch.randn(DIM, ROWS).t() if kind == "strided" else weights
    layer = ert.Embedding.from_pretrained(weights.numpy() if kind == "array" else weights, padding_idx=3)
    theirs = nn.Embedding.from_pretrained(weights, padding_idx=3)
    assert torch.equal(layer(IDS), theirs(IDS))
    assert not layer(IDS).requires_grad
    assert layer.table.stats()["rows_touched"] == 0


def test_from_pretrained_then_trained():
    weights = torch.randn(ROWS, DIM)
    kept = weights.clone()
    mine = ert.Embedding.from_pretrained(weights, freeze=False)
    theirs = nn.Embedding.from_pretrained(weights.clone(), freeze=False)
    for layer, optimizer in ((mine, ert.SGD(mine, lr=0.1)), (theirs, torch.optim.SGD(theirs.parameters(), lr=0.1))):
        layer(IDS).square().sum().backward()
        optimizer.step()
    check_equal(mine, theirs)
    assert torch.equal(weights, kept)


def test_pretrained_rows_go_through_a_checkpoint():
    weights = torch.randn(ROWS, DIM)
    layer, other = (ert.Embedding.from_pretrained(weights, freeze=False) for _ in range(2))
    optimizer = ert.Adam(layer, lr=0.1)
    layer(IDS).sum().backward()
    optimizer.step()
    other.load_state_dict(saved(layer.state_dict()))
    assert torch.equal(weight_of(other), weight_of(layer))


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        (torch.zeros(3, dtype=torch.float32), r"shape \(3,\)"),
        (torch.zeros(3, 2, dtype=torch.float64), "float64.*dtype=torch.float32"),
        (torch.zeros(3, 2, dtype=torch.int64), "floats"),
        ([[1.0]], "list"),
    ],
)
def test_pretrained_weights_that_cannot_be_used(weights, text):
    with pytest.raises(er.ArgumentError, match=text):
        ert.Embedding.from_pretrained(weights)
    if getattr(weights, "dtype", None) == torch.float64:
        assert ert.Embedding.from_pretrained(weights, dtype=torch.float32)(torch.tensor([0])).dtype == torch.float32


def test_arguments_of_from_pretrained_are_checked():
    weights = torch.zeros(3, 2)
    with pytest.raises(er.UnsupportedError, match="`sparse`"):
        ert.Embedding.from_pretrained(weights, sparse=True)  # pyright: ignore[reportCallIssue]
    with pytest.raises(er.UnknownArgumentError, match=r"ert\.Embedding has no argument `whatever`"):
        ert.Embedding.from_pretrained(weights, whatever=True)  # pyright: ignore[reportCallIssue]
    assert ert.Embedding.from_pretrained(weights, name="mine", memory="1MiB").table.name == "mine"


def test_a_large_file_is_not_read_into_memory(tmp_path: Path):
    rows, dim = 10_000_000, 256  # 10 GB, sparse on disk
    path = tmp_path / "weights.bin"
    with path.open("wb") as file:
        file.truncate(rows * dim * 4)
        for row in (0, 123_456, rows - 1):
            file.seek(row * dim * 4)
            file.write(np.full(dim, row, np.float32).tobytes())
    weights = np.memmap(path, np.float32, "r", shape=(rows, dim))
    ert.Embedding.from_pretrained(torch.zeros(2, 2))(torch.tensor([0]))  # compiled
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    layer = ert.Embedding.from_pretrained(weights, freeze=False)
    optimizer = ert.Adam(layer)
    ids = torch.tensor([0, 123_456, rows - 1])
    out = layer(ids)
    assert out[:, 0].tolist() == [0.0, 123_456.0, rows - 1]
    out.sum().backward()
    optimizer.step()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 200e6
    assert layer.table.stats()["rows_touched"] == 3
    assert os.stat(path).st_blocks * 512 < 1e6
