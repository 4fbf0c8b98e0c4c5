"""Features of one table with paddings of their own, which a GPU looks up one by one."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from gpu_models import on_device

import embedrock as er
import embedrock.torch as ert
from slow import slow

ROWS, DIM = 10, 2
WHERE: dict[str, tuple[int, dict[str, Any]]] = {
    "near": (1 << 30, {}),
    "in place": (0, {}),
    "cached": (200, {}),
    "hashed": (1 << 16, {"directory": "hashed"}),
    "open": (1 << 16, {"rows": None}),
}
PADDINGS = [(None, 3), (3, None), (3, 5), (3, 3), (None, None)]


def trained(kind: str, where: str, paddings: tuple[int | None, ...], on_gpu: bool) -> list[np.ndarray]:
    """Return what features looked up, and the rows after a step."""
    memory, options = WHERE[where]
    given: dict[str, Any] = {"rows": ROWS, **options, "device_memory": memory if on_gpu else None}
    table = er.Table(dim=DIM, seed=0, rule=er.SGD(lr=1.0), init=er.Zeros(), **given)
    if kind == "rows":
        rows = {str(k): ert.Embedding(table, padding_idx=padding) for k, padding in enumerate(paddings)}
        collection: Any = ert.EmbeddingCollection(rows)
    else:
        bags = {str(k): ert.EmbeddingBag(table, padding_idx=padding, mode=kind) for k, padding in enumerate(paddings)}
        collection = ert.EmbeddingBagCollection(bags)
    if on_gpu:
        on_device(collection)
    step = ert.SGD(collection, lr=1.0)
    table.assign(np.arange(ROWS), np.arange(2 * ROWS, dtype=np.float32).reshape(ROWS, DIM))
    ids = torch.tensor([3, 5, 3]) if kind == "rows" else torch.tensor([[3, 5], [5, 5], [3, 7]])
    found = collection(dict.fromkeys(collection.features, ids))
    torch.stack([rows.square().sum().cpu() for rows in found.values()]).sum().backward()
    step.step()
    return [*(rows.detach().cpu().numpy() for rows in found.values()), table.lookup(np.arange(ROWS))]


KINDS = ["rows", "sum", "mean", "max"]
CASES = list(itertools.product(WHERE, KINDS))
FEW = [(where, KINDS[k % len(KINDS)]) for k, where in enumerate(WHERE)]  # each place, and each kind


@pytest.mark.parametrize(("where", "kind"), [*FEW, *slow(*(case for case in CASES if case not in FEW))])
def test_features_of_one_table_have_paddings_of_their_own(where: str, kind: str) -> None:
    for paddings in PADDINGS:
        mine, theirs = (trained(kind, where, paddings, on_gpu) for on_gpu in (True, False))
        for got, expected in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(got, expected, str(paddings))
