"""`prefetch` for PyTorch: ids by layer instead of by table, and as tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor

from embedrock.fronts.batch_ids import Kinds, ids_by_table
from embedrock.prefetch import prefetch as prefetch_rows
from embedrock.table import Table
from embedrock.torch.layer import RowLayer
from embedrock.torch.lookup import host_ids

T = TypeVar("T")
L = TypeVar("L", bound=RowLayer | Table)


def prefetch(loader: Iterable[T], ids_of: Mapping[L, Callable[[T], Any]], depth: int = 2) -> Iterator[T]:
    """Go through the batches of `loader` while the rows that the next batches need are read from disk.

    Training gives the same bits as a loop over the loader itself. Batches are taken from the loader in this thread,
    `depth` ahead; its workers go on working as they do.

    Args:
        loader: a `DataLoader`, or any iterable of batches. Batches must not change while they wait.
        ids_of: for each layer (or table), a function that returns the ids that a batch looks up in it: a tensor or
            an array of integers, or a tuple or list of these.
        depth: how many batches to look ahead; the cache must hold the rows of ``depth + 1`` batches. 0: not at all.

    Raises:
        ArgumentError: an argument that cannot work.
        CacheTooSmallError: (from the loop) the tables' `memory` cannot hold the rows of ``depth + 1`` batches.

    Example:
        >>> import torch, embedrock.torch as ert
        >>> emb = ert.Embedding(10**9, 4)
        >>> loader = torch.utils.data.DataLoader([{"user": k} for k in range(6)], batch_size=3)
        >>> [tuple(emb(batch["user"]).shape) for batch in ert.prefetch(loader, {emb: lambda batch: batch["user"]})]
        [(3, 4), (3, 4)]
    """
    kinds = Kinds(RowLayer, lambda layer: layer.handle.label, Tensor, host_ids)
    return prefetch_rows(loader, ids_by_table("ert.prefetch", ids_of, kinds), depth)
