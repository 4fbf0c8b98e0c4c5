"""Layers on tables of int8 and int4: outputs of float32, states, and what trains rows is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import embedrock as er
import embedrock.torch as ert
from embedrock.device.requirements import device_side
from embedrock.distributed.stages import RowSource
from embedrock.spec.codecs import CODECS
from embedrock.storage.listeners import PlacementWarning

EVERY = pytest.mark.parametrize("dtype", CODECS)
ROWS, DIM = 90, 17


def packed(dtype: str, **options: object) -> er.Table:
    source = er.Table(ROWS, DIM, seed=1)
    ids = np.arange(0, ROWS, 2)
    source.assign(ids, np.random.default_rng(0).standard_normal((len(ids), DIM)).astype(np.float32))
    made = er.Table(ROWS, DIM, dtype=dtype, seed=1, **options)  # pyright: ignore[reportArgumentType]
    made.load_state(source)
    return made


@EVERY
def test_outputs_are_those_of_a_layer_of_the_same_weights(dtype: str):
    table, ids = packed(dtype), torch.arange(60).reshape(12, 5) * 7 % ROWS
    whole = torch.from_numpy(table.lookup(np.arange(ROWS)))
    layer, plain = ert.Embedding(table, padding_idx=3), torch.nn.Embedding.from_pretrained(whole, padding_idx=3)
    assert torch.equal(layer(ids), plain(ids))
    for mode in ("sum", "mean", "max"):
        weights = torch.rand(ids.shape) if mode == "sum" else None
        bag, own = ert.EmbeddingBag(table, mode=mode), torch.nn.EmbeddingBag.from_pretrained(whole, mode=mode)
        torch.testing.assert_close(bag(ids, None, weights), own(ids, None, weights))
    several = ert.EmbeddingCollection({"a": ert.Embedding(table), "b": ert.Embedding(packed(dtype))})
    for rows in several({"a": ids, "b": ids}).values():
        assert torch.equal(torch.as_tensor(rows), plain(ids))


@EVERY
def test_a_state_has_the_same_records(dtype: str):
    layer, ids = ert.Embedding(packed(dtype)), torch.arange(ROWS)
    state = layer.state_dict()
    assert state["rows.weight"].dtype == torch.uint8
    other = ert.Embedding(er.Table(ROWS, DIM, dtype=dtype, seed=1))
    other.load_state_dict(state)
    assert torch.equal(other(ids), layer(ids))
    assert torch.equal(ert.freeze(other)(ids), layer(ids))


def test_an_optimizer_of_rows_is_refused():
    model = torch.nn.Sequential(ert.Embedding(packed("int8")))
    with pytest.raises(er.UnsupportedError, match=r"a table with rows of int8 must be only read: got rule=SGD"):
        ert.SGD(model, lr=0.1)
    weight = torch.zeros(ROWS, DIM)
    with pytest.raises(er.UnsupportedError, match="with rows of int8 must be only read: got values to assign"):
        model.load_state_dict({"0.weight": weight})


@EVERY
def test_the_cpu_decodes_rows_for_a_gpu(dtype: str):
    with pytest.warns(PlacementWarning, match=f"has rows of {dtype}, which the CPU decodes: weights are copied"):
        assert device_side(packed(dtype), torch.device("cuda:0")) is None
    with pytest.raises(er.UnsupportedError, match=r"it cannot have device_memory=1048576. Leave that out."):
        device_side(packed(dtype, device_memory="1MiB"), torch.device("cuda:0"))


@EVERY
def test_rows_of_other_processes_are_sent_as_floats(dtype: str):
    assert [RowSource.of(packed(dtype), wire).sent_as for wire in ("float32", "bfloat16")] == ["float32", "bfloat16"]
