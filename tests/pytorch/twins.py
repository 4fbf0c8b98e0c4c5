"""An Embedrock layer and PyTorch's own, of the same first values: PyTorch is the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import embedrock as er
import embedrock.torch as ert
from embedrock.batch.gradients import RowGradients

ROWS, DIM = 23, 5


def rows_of(layer: nn.Module) -> er.Table:
    """Return the table of a layer (PyTorch's containers do not know that it has one)."""
    assert isinstance(layer, ert.Embedding | ert.EmbeddingBag)
    return layer.table


def weight_of(layer: nn.Module) -> Tensor:
    """Return all rows as a tensor (rows, dim), of the table's dtype."""
    table = rows_of(layer)
    assert table.rows is not None
    return torch.from_numpy(table.lookup(np.arange(table.rows))).to(getattr(torch, table.spec.dtype))


def embedding_twins(rows: int = ROWS, dim: int = DIM, **arguments: Any) -> tuple[ert.Embedding, nn.Embedding]:
    """Return an `ert.Embedding` and an `nn.Embedding`, both with `arguments`."""
    mine = ert.Embedding(rows, dim, **arguments)
    theirs = nn.Embedding(rows, dim, **arguments)
    with torch.no_grad():
        theirs.weight.copy_(weight_of(mine))
    return mine, theirs


def bag_twins(rows: int = ROWS, dim: int = DIM, **arguments: Any) -> tuple[ert.EmbeddingBag, nn.EmbeddingBag]:
    """Return an `ert.EmbeddingBag` and an `nn.EmbeddingBag`, both with `arguments`."""
    mine = ert.EmbeddingBag(rows, dim, **arguments)
    theirs = nn.EmbeddingBag(rows, dim, **arguments)
    with torch.no_grad():
        theirs.weight.copy_(weight_of(mine))
    return mine, theirs


def gradient_of(layer: ert.Embedding | ert.EmbeddingBag) -> Tensor:
    """Return the pending gradients as a dense tensor (rows, dim), and check that the handle shows their norm (or its
    negative, after someone multiplied it by a negative number)."""
    assert layer.num_embeddings is not None
    dense = torch.zeros(layer.num_embeddings, layer.embedding_dim)
    grads = layer.handle.gradients()
    if grads is None:
        return dense
    assert isinstance(grads, RowGradients)  # the rows are on the CPU
    dense[torch.from_numpy(grads.plan.ids.copy())] = torch.from_numpy(grads.values)
    assert layer.handle.grad is not None
    with np.errstate(over="ignore"):
        norm = np.float32(np.sqrt(np.square(grads.values, dtype=np.float64).sum()))
    np.testing.assert_allclose(abs(layer.handle.grad.numpy()), norm, rtol=2**-23)
    return dense


def check_equal(mine: ert.Embedding | ert.EmbeddingBag, theirs: nn.Embedding | nn.EmbeddingBag) -> None:
    """Compare all rows."""
    torch.testing.assert_close(weight_of(mine), theirs.weight.detach())
