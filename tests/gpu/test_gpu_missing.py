"""Rows on a GPU: which ids have one is known there too, and values of others than the first are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_models import ALL_NEAR, DIM, HASHED, HOSTED, OPEN, ROWS, Way, batches, by_name, make, on_device, train

import embedrock as er
import embedrock.torch as ert
from embedrock.errors import UnsupportedError
from slow import slow


@pytest.mark.parametrize("way", [ALL_NEAR, HASHED[2], *slow(HASHED[0], OPEN, HOSTED[0], HOSTED[2])], ids=by_name)
def test_rows_that_a_gpu_made_are_there(way: Way):
    model = make(way)
    ids = batches(2)
    train(model, ids)
    table, every = model.rows.table, np.arange(ROWS)
    there = np.isin(every, torch.cat([each.reshape(-1) for each in ids]).cpu())
    np.testing.assert_array_equal(table.contains(every), there)
    assert len(table) == there.sum()
    zeros = table.lookup(every, missing="zeros")
    np.testing.assert_array_equal(zeros[there], table.lookup(every[there]))
    assert not zeros[~there].any()
    model.rows.missing = "zeros"
    with pytest.raises(UnsupportedError, match=r"`missing` \('zeros'\) of .* goes with rows that this process's CPU"):
        model.rows.eval()(ids[0])
    model.rows.missing = None
    model.rows(ids[0])


def test_a_reader_with_other_values_stays_on_the_cpu(tmp_path: Path):
    with er.Table(ROWS, DIM, path=tmp_path / "table", rule=er.SGD()) as table:
        table.commit()
    reader = er.open(tmp_path / "table", mode="r", missing="zeros", device_memory="1MiB")
    layer = on_device(ert.Embedding(reader).requires_grad_(False))
    with pytest.raises(UnsupportedError, match=r"`missing` \('zeros'\) of .* goes with rows that this process's CPU"):
        layer(torch.tensor([3]))
    reader.close()
