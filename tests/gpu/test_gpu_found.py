"""Steps in place go on from the weights that the lookup of their batch has read, if they are those still."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gpu_models import on_device
from torch import Tensor

import embedrock as er
import embedrock.torch as ert
from embedrock.table.table import rows_of
from slow import slow

ROWS, DIM = 30, 6


class Pair:
    """Layers whose rows are used in place, and the same on the CPU, in a group where those are used together."""

    def __init__(self, kind: str) -> None:
        group = er.Group() if kind in ("together", "bags together") else None
        bags = kind.startswith("bags")
        self.layers = [self._made(kind, bags, 0, None), self._made(kind, bags, None, group)]
        collection: Any = ert.EmbeddingBagCollection if bags else ert.EmbeddingCollection
        self.models = [collection(layers) for layers in self.layers]
        self.steps = [ert.Adam(model, lr=0.1) for model in self.models]
        on_device(self.models[0])

    def _made(self, kind: str, bags: bool, memory: int | None, group: er.Group | None) -> dict[str, Any]:
        made, options = {}, {"init": er.Normal(std=0.5), "dtype": "bfloat16" if kind == "bfloat16" else "float32"}
        for k in range(2 if "together" in kind else 1):
            rows, own = None if kind == "hashed" else ROWS, {**options, "seed": k}
            table = (
                er.Table(rows, DIM, device_memory=memory, **own)
                if group is None
                else group.table(f"t{k}", rows, DIM, **own)
            )
            made[f"f{k}"] = (
                ert.EmbeddingBag(table, mode="sum")
                if bags
                else ert.Embedding(table, padding_idx=None if rows is None else 3)
            )
        return made

    @property
    def tables(self) -> list[tuple[er.Table, er.Table]]:
        mine, others = self.layers
        return [(mine[name].table, others[name].table) for name in mine]

    def forward(self, ids: Tensor) -> list[Tensor]:
        losses = []
        for model in self.models:
            found = model({name: ids.view(-1, 2) for name in model.features})
            losses.append(
                torch.stack(
                    [(rows.float().square().sum() * (k + 1)).cpu() for k, rows in enumerate(found.values())]
                ).sum()
            )
        return losses

    def step(self, losses: list[Tensor]) -> None:
        for loss, step in zip(losses, self.steps, strict=True):
            loss.backward()
            step.step()
            step.zero_grad()

    def check(self) -> None:
        for mine, other in self.tables:
            for got, expected in zip(mine.export(), other.export(), strict=True):
                np.testing.assert_array_equal(got, expected)


KINDS = ["bags together", *slow("alone", "together", "bags alone", "hashed", "bfloat16")]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_were_read_are_not_read_again(kind: str) -> None:
    pair, ids = Pair(kind), torch.tensor([1, 2, 3, 1, 7, 9])
    pair.step(pair.forward(ids))
    losses = pair.forward(torch.cat([ids, ids + 4]))  # some are new
    for mine, _ in pair.tables:
        rows_of(mine).tier.records.weights[:ROWS, :DIM] = 77  # which a step would read
    pair.step(losses)
    for mine, other in pair.tables:
        stepped = np.array([1, 2, 5, 6, 7, 9, 11, 13])
        np.testing.assert_array_equal(mine.lookup(stepped), other.lookup(stepped))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_others_changed_since_are_read_again(kind: str) -> None:
    pair, ids = Pair(kind), torch.tensor([1, 2, 3, 1, 7, 9])
    pair.step(pair.forward(ids))
    grads = np.ones((2, DIM), np.float32)

    def elsewhere() -> None:
        for table in pair.tables[-1]:
            table.update([2, 9], grads)

    for change in (elsewhere, lambda: pair.step(pair.forward(ids + 1))):
        losses = pair.forward(ids)
        change()
        pair.step(losses)
        pair.check()
    for _ in range(2):  # what accumulates is read when it is stepped
        for loss in pair.forward(ids):
            loss.backward()
    pair.step(pair.forward(ids + 2))
    for mine, other in pair.tables:
        np.testing.assert_allclose(
            mine.lookup(np.arange(12)), other.lookup(np.arange(12)), rtol=1e-2 if kind == "bfloat16" else 1e-5
        )
