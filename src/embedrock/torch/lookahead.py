"""`prefetch` for PyTorch: ids by layer instead of by table, and as tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from embedrock.errors import ArgumentError
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
    return prefetch_rows(loader, _by_table(ids_of), depth)


def _by_table(ids_of: Mapping[Any, Any]) -> Mapping[Table, Callable[[Any], np.ndarray]]:
    example = 'Pass, for example, {model.user: lambda batch: batch["user"]}.'
    if not isinstance(ids_of, Mapping):
        raise ArgumentError(
            f"`ids_of` of ert.prefetch must be a dict from layers to functions: got {ids_of!r}. {example}"
        )
    functions: dict[Table, list[tuple[str, Callable[[Any], Any]]]] = {}
    for layer, function in ids_of.items():
        if not isinstance(layer, RowLayer | Table):
            raise ArgumentError(
                f"`ids_of` of ert.prefetch must have layers of Embedrock's as its keys: got {layer!r}. {example}"
            )
        if not callable(function):
            raise ArgumentError(
                f"`ids_of` of ert.prefetch must have functions of a batch as its values: got {function!r}. {example}"
            )
        table, label = (layer, repr(layer)) if isinstance(layer, Table) else (layer.table, layer.handle.label)
        functions.setdefault(table, []).append((label, function))
    return {table: _joined(pairs) for table, pairs in functions.items()}


def _joined(functions: list[tuple[str, Callable[[Any], Any]]]) -> Callable[[Any], np.ndarray]:
    """Return the function of a batch that gives the ids of all the layers of one table."""

    def ids_of(batch: Any) -> np.ndarray:
        return np.concatenate([part for label, function in functions for part in _parts(function(batch), label)])

    return ids_of


def _parts(ids: Any, label: str) -> list[np.ndarray]:
    several = isinstance(ids, tuple | list) and any(isinstance(part, Tensor | np.ndarray) for part in ids)
    return [_flat(part, label) for part in (ids if several else [ids])]


def _flat(ids: Any, label: str) -> np.ndarray:
    if isinstance(ids, Tensor):
        return host_ids(ids, label).reshape(-1)
    array = np.asarray(ids).reshape(-1)
    return array if array.size else array.astype(np.int64)
