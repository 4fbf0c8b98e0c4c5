"""What keeps and steps the embeddings of a model: Embedrock, or PyTorch with sparse or dense gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

import embedrock as er
import embedrock.torch as ert
from embedrock.demo.model_spec import EmbeddingSpec, ModelSpec

COPY_ROWS = 1 << 18  # rows whose first values are drawn at a time


@dataclass(frozen=True)
class Backend:
    """One way to keep and step embeddings.

    Args:
        name: as in the tables that people read.
        needs: what its RAM goes to, for people.
        copies: RAM at the peak, in float32 copies of all rows; 0: it follows the rows touched.
        embeddings: makes a layer for each table of a model.
        together: makes of bags a module that calls all of them, with the ids of each, and returns a list of their sums.
        optimizers: makes what steps a model with such layers, at a learning rate.
    """

    name: str
    needs: str
    copies: int
    embeddings: Callable[[ModelSpec], list[nn.Module]]
    together: Callable[[Mapping[str, nn.Module]], nn.Module]
    optimizers: Callable[[nn.Module, float], list[Optimizer]]


def first_values(spec: EmbeddingSpec) -> torch.Tensor:
    """Return what rows of `er.Table` start with, for all rows: float32 (rows, dim)."""
    weights = torch.empty(spec.rows, spec.dim)
    with er.Table(spec.rows, spec.dim, init=spec.first_values, seed=spec.seed, directory="hashed") as table:
        for start in range(0, spec.rows, COPY_ROWS):
            ids = np.arange(start, min(start + COPY_ROWS, spec.rows))
            weights[start : start + len(ids)] = torch.from_numpy(table.lookup(ids))
    return weights


def _our_embeddings(spec: ModelSpec) -> list[nn.Module]:
    group = spec.group()
    return [_our_embedding(each, group=group) for each in spec.embeddings]


def shared_out(ranks: int) -> Backend:
    """Return Embedrock with tables whose rows so many processes share out, each with an equal part of the memory."""
    return replace(EMBEDROCK, embeddings=partial(_shared_embeddings, ranks=ranks), together=_OneByOne)


def _shared_embeddings(spec: ModelSpec, ranks: int) -> list[nn.Module]:
    return [_our_embedding(each, sharded=True, **_own_place(spec, each, ranks)) for each in spec.embeddings]


def _own_place(spec: ModelSpec, of: EmbeddingSpec, ranks: int) -> dict[str, Any]:
    if spec.folder is None:
        return {}
    memory = None if spec.memory is None else spec.memory // (ranks * len(spec.embeddings))
    return {"path": spec.folder / f"{of.feature.name}.rock", "memory": memory}


def _our_embedding(spec: EmbeddingSpec, **place: Any) -> nn.Module:
    options: dict[str, Any] = {"init": spec.first_values, "seed": spec.seed, "name": spec.feature.name, **place}
    if spec.feature.bag:
        return ert.EmbeddingBag(spec.rows, spec.dim, mode="sum", **options)
    return ert.Embedding(spec.rows, spec.dim, **options)


class _Collection(nn.Module):
    """Calls bags of ours together."""

    def __init__(self, bags: Mapping[str, Any]) -> None:
        super().__init__()
        self.bags = ert.EmbeddingBagCollection(bags)

    def forward(self, *ids: torch.Tensor) -> list[torch.Tensor]:
        """Return the sums of each."""
        return list(self.bags(dict(zip(self.bags.features, ids, strict=True))).values())


class _OneByOne(nn.Module):
    """Calls bags one after another."""

    def __init__(self, bags: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.bags = nn.ModuleList(bags.values())

    def forward(self, *ids: torch.Tensor) -> list[torch.Tensor]:
        """Return the sums of each."""
        return [bag(each) for bag, each in zip(self.bags, ids, strict=True)]


def _our_optimizers(model: nn.Module, lr: float) -> list[Optimizer]:
    return [ert.Adam(model, lr=lr), torch.optim.Adam(ert.dense_parameters(model), lr=lr)]


def _torch_embedding(spec: EmbeddingSpec, sparse: bool) -> nn.Module:
    if spec.feature.bag:
        return nn.EmbeddingBag.from_pretrained(first_values(spec), freeze=False, mode="sum", sparse=sparse)
    return nn.Embedding.from_pretrained(first_values(spec), freeze=False, sparse=sparse)


def _sparse_embeddings(spec: ModelSpec) -> list[nn.Module]:
    return [_torch_embedding(each, sparse=True) for each in spec.embeddings]


def _sparse_optimizers(model: nn.Module, lr: float) -> list[Optimizer]:
    layers = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    sparse = [layer.weight for layer in layers]
    rest = [parameter for parameter in model.parameters() if all(parameter is not one for one in sparse)]
    return [torch.optim.SparseAdam(sparse, lr=lr), torch.optim.Adam(rest, lr=lr)]


def _dense_embeddings(spec: ModelSpec) -> list[nn.Module]:
    return [_torch_embedding(each, sparse=False) for each in spec.embeddings]


def _dense_optimizers(model: nn.Module, lr: float) -> list[Optimizer]:
    return [torch.optim.Adam(model.parameters(), lr=lr)]


EMBEDROCK = Backend("Embedrock", "the rows touched, with two states", 0, _our_embeddings, _Collection, _our_optimizers)
SPARSE = Backend(
    "nn.Embedding + SparseAdam",
    "weights and two states of all rows",
    3,
    _sparse_embeddings,
    _OneByOne,
    _sparse_optimizers,
)
DENSE = Backend(
    "nn.Embedding + Adam",
    "weights, gradient, two states and a temporary of all rows",
    5,
    _dense_embeddings,
    _OneByOne,
    _dense_optimizers,
)
BACKENDS = {"embedrock": EMBEDROCK, "sparse": SPARSE, "dense": DENSE}
