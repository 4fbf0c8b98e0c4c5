"""Gradients by position: the sums of one batch, whoever brings which part of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import embedrock as er
import embedrock.torch as ert
from embedrock.distributed import stages
from embedrock.torch.training.cpu_executor import CpuExecutor
from embedrock.torch.training.lookup import HostLookup, LayerLayout

DIM, BAGS, EACH = 3, 40, 5
PARTS = slice(0, 13), slice(13, 13), slice(13, BAGS)  # of the bags, by rank: one has none


def gradients(executor: CpuExecutor, ids: np.ndarray, grads: np.ndarray, weights: Any, mode: str) -> Any:
    """Return what a lookup of bags (n, EACH) brings, in which 0 is padding; "rows" is one without bags."""
    layer: Any = ert.Embedding(executor.table) if mode == "rows" else ert.EmbeddingBag(executor.table, mode=mode)
    layer.padding_idx = 0
    layout = LayerLayout(0, (layer,))
    layout.executor = executor
    given = [torch.from_numpy(weights.reshape(-1))] if mode == "sum" else ()
    lookup = HostLookup(layout, layout.handles, [ids], weights=given)
    lookup.read(for_weights=False)
    of_ids = np.repeat(grads, EACH, axis=0).reshape(*ids.shape, DIM)
    ((sums, _),) = lookup.blocks([of_ids if mode == "rows" else grads])
    return sums.of(0)


@pytest.mark.parametrize("mode", ["rows", "sum", "mean", "max"])
def test_parts_of_a_batch_by_position_are_summed_as_the_batch(mode: str) -> None:
    table, draw = er.Table(10, DIM, init=er.Normal(), seed=1), np.random.default_rng(2)
    ids = draw.integers(0, 10, (2, BAGS, EACH))
    grads = draw.normal(size=(2, BAGS, DIM)).astype(np.float32)
    weights = draw.normal(size=(2, BAGS, EACH)).astype(np.float32)
    whole, by_position = CpuExecutor(table), CpuExecutor(table, sums_positions=True)
    lookups = [(ids[k], grads[k], weights[k]) for k in range(2)]
    first, second = (gradients(whole, *lookup, mode) for lookup in lookups)
    expected, ranks = whole.merge(first, second), []
    for part in PARTS:
        own = [(ids[part], grads[part], weights[part]) for ids, grads, weights in lookups]
        first, second = (gradients(by_position, *lookup, mode) for lookup in own)
        merged: Any = by_position.merge(first, second)
        ranks.append(merged.lookups)
    found = stages.fold_positions(ranks)
    order, other = np.argsort(found.plan.ids), np.argsort(expected.plan.ids)
    np.testing.assert_array_equal(found.plan.ids[order], np.arange(1, 10))
    np.testing.assert_array_equal(found.values[order], expected.values[other])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"positions": 1}, r"`positions` of ert.EmbeddingBag must be True or False: got 1"),
        ({"positions": True, "wire": "bfloat16", "sharded": True}, r"got positions=True and wire='bfloat16'. Leave"),
        ({"positions": True, "scale_grad_by_freq": True}, r"`scale_grad_by_freq` of ert.EmbeddingBag does not go with"),
        ({"positions": True, "group": er.Group()}, r"`group` of ert.EmbeddingBag does not go with positions=True"),
    ],
)
def test_what_does_not_go_with_positions_is_told(options: dict[str, Any], said: str) -> None:
    with pytest.raises(er.EmbedrockError, match=said):
        ert.EmbeddingBag(10, 2, name="tags", **options)
