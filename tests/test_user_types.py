# pyright: strict
"""A user's programs, as a strict type checker sees them: no cast, and no `Any` where there is a type."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import numpy as np
import pytest

import embedrock as er

# Names that `dir` leaves out: they are for other parts of the library.
INTERNAL = {"in_graph", "looked_up", "label", "layer_type", "shares_open_table", "fetcher"}


def test_tables_and_groups(tmp_path: Path):
    with er.Table(rows=10**9, dim=4, path=tmp_path / "users.rock", rule=er.SGD(lr=0.5), memory="1MiB") as table:
        assert_type(table.lookup([3, 14]), np.ndarray)
        table.update([3, 14], np.ones((2, 4)), lr=0.1)
        assert_type(table.commit(step=1), int)
        assert_type(table.stats()["rows_touched"], float)
        assert_type(3 in table, bool)
        ids, rows = table.export()
        assert (ids.tolist(), rows.shape) == ([3, 14], (2, 4))
    with er.open(tmp_path / "users.rock", mode="r", at=1) as reader:
        assert_type(reader, er.Table)
        assert_type(reader.refresh(), bool)
        assert_type(reader.last_step, int | None)
        changes = reader.refresh(changes=True)
        assert not changes
    with er.Group(path=tmp_path / "model.rock", memory="1MiB") as group:
        assert_type(group.table("users", rows=None, dim=4, rule=er.Adam()), er.Table)
        assert_type(group["users"], er.Table)
        assert_type([*group], list[str])
        group.commit()
    with er.open(tmp_path / "model.rock", mode="r", kind=er.Group) as snapshot:
        assert_type(snapshot, er.Group)
        assert_type(snapshot.lookup({"users": [7]}), dict[str, np.ndarray])
        assert_type(snapshot["users"].lookup([7]), np.ndarray)
    words = er.Vocabulary()
    assert_type(words.lookup(["red"]), np.ndarray)
    assert_type(er.hash_ids(["red"]), np.ndarray)


def test_pytorch(tmp_path: Path):
    pytest.importorskip("torch")
    import torch
    from torch import nn

    import embedrock.torch as ert

    layer = ert.Embedding(10**9, 4, path=tmp_path / "items.rock", memory="1MiB")
    bag = ert.EmbeddingBag(100, 4, mode="mean", rule=er.Adam())
    model = nn.ModuleDict({"item": layer, "tags": bag, "head": nn.Linear(4, 1)})
    optimizer = ert.optimizer(model, rows=ert.Adam(model, lr=1e-3), dense=torch.optim.Adam)
    loader = [{"item": torch.tensor([3, 14])}]
    for batch in ert.prefetch(loader, {layer: lambda batch: batch["item"]}, depth=2):
        vectors = assert_type(layer(batch["item"]), torch.Tensor)
        bags = assert_type(bag(torch.tensor([[1, 2], [3, 4]])), torch.Tensor)
        model["head"](vectors + bags).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    together = ert.EmbeddingCollection({"item": layer})
    assert_type(together(loader[0]), dict[str, torch.Tensor])
    assert_type(layer.table, er.Table)
    assert_type(ert.dense_parameters(model), list[nn.Parameter])
    ert.save(model, tmp_path / "checkpoint", step=1)
    frozen = ert.Embedding.from_pretrained(np.zeros((5, 4), np.float32))
    assert_type(frozen, ert.Embedding)
    assert {*dir(ert)} == {*ert.__all__}
    assert INTERNAL.isdisjoint(dir(layer) + dir(bag) + dir(together))
    assert {"table", "grow", "forward", "padding_idx"} <= {*dir(layer)}
    layer.table.close()


def test_jax():
    pytest.importorskip("jax")
    import embedrock.jax as ej

    tables = ej.Tables({"user": er.Table(rows=10**9, dim=4, rule=er.Adam())})
    batch = assert_type(tables.fetch({"user": np.array([3, 14])}), ej.Batch)
    tables.apply(batch, batch.rows, ej.all_finite(batch.rows))
    assert_type(tables.by_name, dict[str, er.Table])
    assert {*dir(ej)} == {*ej.__all__}
    assert INTERNAL.isdisjoint(dir(tables))
    for fetched, _ in ej.prefetch([({"user": np.array([3])}, 1.0)], tables):
        assert_type(fetched, ej.Batch)


@pytest.mark.slow
def test_keras():
    pytest.importorskip("keras")
    import embedrock.keras as erk

    layer = erk.Embedding(100, 4, rule=er.Adam())
    assert_type(layer, erk.Embedding)
    assert_type(layer.table, er.Table)
    assert_type(layer.grow(200), None)
    assert {*dir(erk)} == {*erk.__all__}
    assert INTERNAL.isdisjoint(dir(layer))
