"""Layers over published tables: frozen and trained, as over the same rows in a tensor."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import embedrock as er
import embedrock.torch as ert
from published_files import NAME, base_of, codes, floats, table_of, written

ROWS, DIM = 900, 16
BASE = floats("BF16", ROWS, DIM).split(300)
WEIGHT = torch.from_numpy(BASE.rows)


@pytest.fixture
def base(tmp_path: Path) -> er.FromSafetensors:
    return written(BASE, tmp_path / "base")


def test_a_frozen_layer(base: er.FromSafetensors):
    layer, ids = ert.Embedding.from_pretrained(base), torch.randint(0, ROWS, (7, 5))
    found = layer(ids)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.float(), WEIGHT[ids])
    assert not found.requires_grad
    wide = ert.Embedding.from_pretrained(base, dtype=torch.float32)
    assert torch.equal(wide(ids), WEIGHT[ids])
    padded = ert.Embedding.from_pretrained(base, padding_idx=3, freeze=False)
    assert torch.equal(padded(ids).float(), WEIGHT[ids])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags(mode: str, base: er.FromSafetensors):
    ids, offsets = torch.randint(0, ROWS, (30,)), torch.tensor([0, 4, 4, 20])
    plain = nn.EmbeddingBag.from_pretrained(WEIGHT, mode=mode)
    bag = ert.EmbeddingBag.from_pretrained(base, mode=mode, dtype=torch.float32)
    torch.testing.assert_close(bag(ids, offsets), plain(ids, offsets), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"path": "delta", "memory": "256KiB"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_is_that_over_a_tensor(dtype: torch.dtype, options: dict[str, Any], base: Any, tmp_path: Path):
    options = {key: tmp_path / value if key == "path" else value for key, value in options.items()}
    layers = [
        ert.Embedding.from_pretrained(base, freeze=False, dtype=dtype, seed=1, **options),
        ert.Embedding.from_pretrained(WEIGHT, freeze=False, dtype=dtype, seed=1),
    ]
    for layer in layers:
        optimizer = ert.Adam(layer.parameters(), lr=0.01)
        batches = [torch.from_numpy(np.random.default_rng(k).integers(0, ROWS // 2, (4, 20))) for k in range(5)]
        for ids in ert.prefetch(batches, {layer: lambda ids: ids}, depth=2):
            layer(ids).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    ids = torch.arange(ROWS)
    assert torch.equal(layers[0](ids), layers[1](ids))
    assert layers[0].table.stats()["rows_touched"] == layers[1].table.stats()["rows_touched"] < ROWS
    layers[0].table.commit() if options else None
    layers[0].table.close()


def stepped(layer: ert.Embedding) -> ert.Embedding:
    optimizer = ert.SGD(layer.parameters(), lr=1.0)
    layer(torch.tensor([3, 899])).float().sum().backward()
    optimizer.step()
    return layer


def test_a_state_over_the_same_base_in_another_folder(base: er.FromSafetensors, tmp_path: Path):
    layer = stepped(ert.Embedding.from_pretrained(base, freeze=False, seed=1))
    other = ert.Embedding.from_pretrained(written(BASE, tmp_path / "other"), freeze=False, seed=1)
    other.load_state_dict(layer.state_dict())
    ids = torch.arange(ROWS)
    assert torch.equal(other(ids), layer(ids))
    assert other.table.stats()["rows_touched"] == len(layer.state_dict()["rows.ids"]) == 2
    different = ert.Embedding.from_pretrained(written(floats("BF16", ROWS, DIM, 1), tmp_path / "c"), freeze=False)
    with pytest.raises(
        (er.EmbedrockError, RuntimeError),
        match=r"must have first values FromSafetensors.* of digest .*: got those of digest",
    ):
        different.load_state_dict(layer.state_dict())


def test_a_copy_of_a_layer(base: er.FromSafetensors):
    layer = stepped(ert.Embedding.from_pretrained(base, freeze=False))
    other, ids = copy.deepcopy(layer), torch.arange(ROWS)
    assert torch.equal(other(ids), layer(ids))
    stepped(other)
    assert not torch.equal(other(ids), layer(ids))


def test_saving_and_loading_a_model(base: er.FromSafetensors, tmp_path: Path):
    def made() -> tuple[nn.Sequential, er.Table]:
        layer = ert.Embedding.from_pretrained(base, freeze=False, path=tmp_path / "delta")
        return nn.Sequential(layer), layer.table

    (model, table), ids = made(), torch.arange(ROWS)
    optimizer = ert.SGD(model.parameters(), lr=1.0)
    model(torch.tensor([3, 899])).float().sum().backward()
    optimizer.step()
    expected = model(ids)
    ert.save(model, tmp_path / "saved", 1, optimizer)
    table.close()
    again, table = made()
    assert ert.load(again, tmp_path / "saved", ert.SGD(again.parameters(), lr=1.0)) == 1
    assert torch.equal(again(ids), expected)
    table.close()


def test_collections(tmp_path: Path):
    published = [floats("F32", 100 + k, 8, seed=k) for k in range(26)]
    bases = [written(each, tmp_path / str(k), memory="64KiB") for k, each in enumerate(published)]
    layers = {f"t{k}": ert.Embedding.from_pretrained(each, freeze=False) for k, each in enumerate(bases)}
    collection = ert.EmbeddingCollection(layers)
    ids = {name: torch.randint(0, 100, (5, 3)) for name in layers}
    found = collection(ids)
    for k, (name, rows) in enumerate(found.items()):
        assert torch.equal(torch.as_tensor(rows), torch.from_numpy(published[k].rows)[ids[name]])
    optimizer = ert.SGD(collection.parameters(), lr=1.0)
    torch.stack([torch.as_tensor(rows).sum() for rows in found.values()]).sum().backward()
    optimizer.step()
    for k, (name, layer) in enumerate(layers.items()):
        weight = torch.from_numpy(published[k].rows.copy())
        weight.index_add_(0, ids[name].flatten(), -torch.ones(15, 8))
        torch.testing.assert_close(layer(torch.arange(100)), weight[:100])


@pytest.mark.slow
def test_a_compiled_layer(base: er.FromSafetensors):
    layer, ids = ert.Embedding.from_pretrained(base, dtype=torch.float32), torch.randint(0, ROWS, (7, 5))
    model = torch.compile(nn.Sequential(layer), backend="aot_eager", fullgraph=True)
    assert torch.equal(model(ids), WEIGHT[ids])


class Rows(torch.utils.data.Dataset):
    def __init__(self, init: er.FromSafetensors) -> None:
        self.table = table_of(init)

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> np.ndarray:
        return self.table.lookup(np.arange(index, ROWS, 60))


class RowsAnew(Rows):
    """Rows of a table that each worker makes of the initializer, which is pickled."""

    def __init__(self, init: er.FromSafetensors) -> None:
        self.init = init

    @property
    def table(self) -> er.Table:
        return table_of(self.init)


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_a_data_loader(context: str, base: er.FromSafetensors):
    data = Rows(base) if context == "fork" else RowsAnew(base)
    if context == "fork":
        data[0]  # the files are open, and the cache has rows
    for k, rows in enumerate(DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=context)):
        assert torch.equal(torch.as_tensor(rows), WEIGHT[k::60])


def test_float8_tensors_are_refused():
    weight = codes("F8_E4M3", 9, 4, None).tensors[f"{NAME}.weight"]
    for layer in (ert.Embedding, ert.EmbeddingBag):
        with pytest.raises(er.ArgumentError) as caught:
            layer.from_pretrained(weight)
        assert str(caught.value) == (
            f"`embeddings` of ert.{layer.__name__} must be floats of 16 bits or more: got float8_e4m3fn. Read them "
            "with their scale from their file: er.FromSafetensors(folder, tensor)."
        )


def test_what_a_base_is_not(base: er.FromSafetensors):
    with pytest.raises(er.EmbedrockError, match=r"must be a 2-D tensor or array"):
        ert.Embedding.from_pretrained([[1.0]])  # pyright: ignore[reportArgumentType]
    layer = ert.Embedding(ROWS, DIM, init=base)
    assert torch.equal(layer(torch.arange(ROWS)), WEIGHT)
    with pytest.raises(er.ArgumentError, match=r"must have the table's shape \(5, 16\): got \(900, 16\)"):
        ert.Embedding(5, DIM, init=base)
    assert base_of(str(base.folder)).shape == (ROWS, DIM)
    assert torch.equal(ert.Embedding.from_pretrained(str(base.folder))(torch.arange(ROWS)), WEIGHT)
