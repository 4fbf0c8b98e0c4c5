"""Frozen rows of tables on a device: the bits of the same table on the CPU."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from gpu_device import DEVICE
from gpu_models import on_device

import embedrock as er
import embedrock.torch as ert
from embedrock.device.host_planned import HostPlannedExecutor
from slow import slow

ROWS, DIM = 12, 2
FROZEN = [3, range(7, 9)]
WHERE: dict[str, tuple[int, dict[str, Any]]] = {
    "near": (1 << 30, {}),
    "in place": (0, {}),
    "cached": (200, {}),
    "open": (1 << 16, {"rows": None}),
    "evicting": (1 << 16, {"rows": None, "eviction": er.Eviction(max_rows=7, by="recency")}),
    "dense": (1 << 16, {"rule": er.Adam(lr=0.5, dense=True)}),
}
PADDINGS = [(None, None), (3, 5), (None, 8)]
KINDS = ["rows", "sum", "mean", "max"]
CASES = list(itertools.product(WHERE, KINDS))
FEW = [(where, KINDS[k % len(KINDS)]) for k, where in enumerate(WHERE)]  # each place, and each kind


def trained(kind: str, where: str, paddings: tuple[int | None, ...], on_gpu: bool) -> list[np.ndarray]:
    """Return norms of gradients, and the rows after some steps."""
    memory, options = WHERE[where]
    given: dict[str, Any] = {"rows": ROWS, "rule": er.Adam(lr=0.5), **options}
    table = er.Table(dim=DIM, seed=0, frozen=FROZEN, device_memory=memory if on_gpu else None, **given)
    if kind == "rows":
        rows = {str(k): ert.Embedding(table, padding_idx=padding) for k, padding in enumerate(paddings)}
        collection: Any = ert.EmbeddingCollection(rows)
    else:
        bags = {str(k): ert.EmbeddingBag(table, padding_idx=padding, mode=kind) for k, padding in enumerate(paddings)}
        collection = ert.EmbeddingBagCollection(bags)
    if on_gpu:
        on_device(collection)
    optimizer, norms = ert.Adam(collection, lr=0.5, dense=given["rule"].dense), list[np.ndarray]()
    for shift in range(3):
        ids = torch.tensor([3, 5, 3, 8]) if kind == "rows" else torch.tensor([[3, 5], [5, 5], [3, 7], [8, 8]])
        found = collection(dict.fromkeys(collection.features, (ids + shift) % 10))
        torch.stack([rows.square().sum().cpu() for rows in found.values()]).sum().backward()
        (handle,) = ert.handles(collection)
        assert handle.grad is not None
        norms.append(handle.grad.cpu().numpy())
        optimizer.step()
        optimizer.zero_grad()
    if on_gpu:
        assert isinstance(table.executor, HostPlannedExecutor)
    return [np.stack(norms), table.lookup(np.arange(ROWS)), table.export()[0]]


@pytest.mark.parametrize(("where", "kind"), [*FEW, *slow(*(case for case in CASES if case not in FEW))])
def test_frozen_rows_get_no_gradient_on_a_device(where: str, kind: str) -> None:
    for paddings in PADDINGS:
        mine, theirs = (trained(kind, where, paddings, on_gpu) for on_gpu in (True, False))
        for got, expected in zip(mine, theirs, strict=True):  # within rounding
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6, err_msg=str(paddings))
        first = er.Table(ROWS, DIM, seed=0).lookup([3, 7, 8])
        np.testing.assert_array_equal(mine[1][[3, 7, 8]], first, str(paddings))


def test_gradients_of_frozen_rows_are_left_out_wherever_they_are_looked_at() -> None:
    layer = ert.Embedding(ROWS, DIM, seed=0, frozen=FROZEN, scale_grad_by_freq=True)
    ert.place(layer, DEVICE)
    optimizer = ert.SGD(layer, lr=1.0)
    first = layer.table.lookup(np.arange(ROWS))
    for factor in (1.0, 2.0):  # the gradients of two batches add up
        (factor * layer(torch.tensor([3, 5, 3, 5, 8]))).sum().backward()
    assert layer.handle.grad is not None
    assert layer.handle.grad.item() == pytest.approx(3 * DIM**0.5)
    (layer(torch.tensor([3, 8])) * float("nan")).sum().backward()  # of frozen rows alone
    assert torch.nn.utils.clip_grad_norm_(layer.parameters(), 100.0).item() == pytest.approx(3 * DIM**0.5)
    optimizer.step()
    expected = first - 3.0 * (np.arange(ROWS) == 5)[:, None]
    np.testing.assert_array_equal(layer.table.lookup(np.arange(ROWS)), expected.astype(np.float32))


def test_rows_are_frozen_while_a_device_has_them() -> None:
    group = er.Group()
    table = group.table("users", ROWS, DIM, seed=0, rule=er.SGD(lr=1.0))
    layer = ert.Embedding(table)
    ert.place(layer, DEVICE)
    optimizer = ert.SGD(layer, lr=1.0)
    for frozen in (None, 3, []):
        group.table("users", ROWS, DIM, frozen=frozen)
        before = table.lookup([3, 4])
        layer(torch.tensor([3, 4])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        moved = [frozen != 3, True]
        np.testing.assert_array_equal(table.lookup([3, 4]) == before - 1, np.array(moved)[:, None].repeat(DIM, 1))
