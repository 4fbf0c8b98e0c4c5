"""A table over a published one that two real processes share: the rows of one process, and deltas on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks
from torch.nn.parallel import DistributedDataParallel

import embedrock as er
import embedrock.torch as ert
from embedrock.cli.main import main
from published_files import base_of, floats

ROWS, DIM, STEPS, BLOCK = 500, 8, 4, 30
BASE = floats("BF16", ROWS, DIM).split(200)
pytestmark = pytest.mark.filterwarnings("ignore:sharded=.*there is no process group yet:UserWarning")


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def ids_of(step: int, rank: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng((step, rank)).integers(0, ROWS // 2, BLOCK))


def trained(rank: int, folder: str, memory: str, options: dict[str, Any]) -> np.ndarray:
    """Train on a rank, and return all rows."""
    base = base_of(folder, memory)
    layer = ert.Embedding.from_pretrained(base, freeze=False, dtype=torch.float32, sharded=True, seed=1, **options)
    model = torch.nn.Sequential(layer)
    parallel, optimizer = DistributedDataParallel(model), ert.Adam(model.parameters(), lr=0.1)
    batches = [ids_of(step, rank) for step in range(STEPS)]
    for ids in ert.prefetch(batches, {layer: lambda ids: ids}):
        parallel(ids).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if options:
        ert.save(model, f"{options['path']}-saved", STEPS, optimizer)
    with torch.no_grad():
        rows = parallel(torch.arange(ROWS)).numpy()
    touched = layer.table.stats()["rows_touched"]
    assert 0 < touched < ROWS // 2  # those of this rank
    layer.table.close()
    return rows


def alone() -> np.ndarray:
    layer = ert.Embedding.from_pretrained(torch.from_numpy(BASE.rows), freeze=False, seed=1)
    optimizer = ert.Adam(layer.parameters(), lr=0.1)
    for step in range(STEPS):
        both = [layer(ids_of(step, rank)).square().sum() / 2 for rank in range(2)]
        (both[0] + both[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return layer(torch.arange(ROWS)).detach().numpy()


@pytest.mark.parametrize("memory", ["1MiB", "map"])
def test_two_ranks_train_the_rows_of_one(memory: str, pair: Ranks, tmp_path: Path):
    first, second = pair.run(trained, str(BASE.write(tmp_path / "base")), memory, {})
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, alone(), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(first[ROWS // 2 :], BASE.rows[ROWS // 2 :])


def test_a_delta_in_parts_is_opened_resharded_and_exported(pair: Ranks, tmp_path: Path):
    options = {"path": str(tmp_path / "delta"), "memory": "256KiB"}
    rows, _ = pair.run(trained, str(BASE.write(tmp_path / "base")), "1MiB", options)
    for shards in (None, 3):
        if shards is not None:
            assert main(["reshard", options["path"], "--shards", "3"]) == 0
        with er.open(options["path"], mode="r") as table:
            np.testing.assert_array_equal(table.lookup(np.arange(ROWS)), rows)
    assert main(["export", options["path"], str(tmp_path / "all.npy"), "--all"]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "all.npy"), rows)
    assert main(["verify", options["path"]]) == 0
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(er.TableFileError, match=r"pass it: init=er.FromSafetensors"):
        er.open(options["path"], mode="r")
    with er.open(options["path"], mode="r", init=base_of(tmp_path / "moved")) as table:
        np.testing.assert_array_equal(table.lookup(np.arange(ROWS)), rows)
