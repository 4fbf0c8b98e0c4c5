"""`prefetch` for PyTorch: ids by layer instead of by table, also as tensors."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from embedrock.batch.ids import check_range
from embedrock.batch.wrong_ids import in_array
from embedrock.distributed.owners import Shard
from embedrock.frontend.batch_ids import asked_by_table
from embedrock.table.prefetch import prefetch as prefetch_rows
from embedrock.table.table import Table
from embedrock.torch.layers.bag import EmbeddingBag
from embedrock.torch.layers.embedding import flat_ids, place_in
from embedrock.torch.layers.row_layer import RowLayer
from embedrock.torch.training.batch_prefetch import BatchPrefetcher
from embedrock.torch.training.lookup import check_ids, host_ids
from embedrock.torch.training.sharing import RankGroup, SharedTable

T = TypeVar("T")
L = TypeVar("L", bound=RowLayer | Table)

EXAMPLE = 'Pass, for example, {model.user: lambda batch: batch["user"]}.'


def prefetch(loader: Iterable[T], ids_of: Mapping[L, Callable[[T], Any]], depth: int = 2) -> Iterator[T]:
    """Iterate over the batches of `loader`, and read the rows of the next batches from disk meanwhile.

    Tables may be sharded over several processes. Then the ids of the next batches go to the owners of the rows, which
    load them. The rows of all tables arrive in one message. All ranks must have the same number of batches.

    A GPU plans the next batch of its tables during the current one, unless `depth` is 0. If the GPU has a cache of the
    table, the rows of that batch are copied to it, too.

    Training gives the same bits as a loop over the loader itself. This thread takes batches from the loader, `depth`
    ahead. The loader's workers are not affected.

    Args:
        loader: a `DataLoader`, or any iterable of batches. Batches must not change while they wait.
        ids_of: for each layer (or table), a function from a batch to the ids that it looks up. The ids are a tensor or
            an array of integers, or a tuple or list of these.
        depth: number of batches to look ahead; 0: no prefetching. The cache must hold the rows of ``depth + 1``
            batches.

    Raises:
        ArgumentError: an argument is invalid.
        CacheTooSmallError: (from the loop) the tables' `memory` cannot hold the rows of ``depth + 1`` batches.

    Example:
        >>> import torch, embedrock.torch as ert
        >>> emb = ert.Embedding(10**9, 4)
        >>> loader = torch.utils.data.DataLoader([{"user": k} for k in range(6)], batch_size=3)
        >>> [tuple(emb(batch["user"]).shape) for batch in ert.prefetch(loader, {emb: lambda batch: batch["user"]})]
        [(3, 4), (3, 4)]
    """
    by_table = asked_by_table("ert.prefetch", ids_of, RowLayer, EXAMPLE)
    functions = {table: _JoinedIds(table, parts) for table, parts in by_table.items()}
    caches = [] if depth == 0 else [*_caches(by_table, functions)]
    wanted: dict[Any, Callable[[T], Any]] = {**functions, **{cache.table: cache.take for cache in caches}}
    prefetchers = [] if depth == 0 else _prefetchers(by_table, wanted)
    source = loader
    for ahead in prefetchers:
        source = ahead.batches(source)
    batches = prefetch_rows(source, wanted, depth)
    return _expecting(batches, caches, prefetchers) if caches or prefetchers else batches


class _JoinedIds:
    """Function of a batch that returns the ids of all layers on one table, flat.

    Attributes:
        note: gets the ids, too; None: no other code needs them.
    """

    note: Callable[[np.ndarray], None] | None = None

    def __init__(self, table: Table, functions: Sequence[tuple[Any, Callable[[Any], Any]]]) -> None:
        self.table = table
        self._functions = [(repr(by) if by is table else by.handle.label, function) for by, function in functions]

    def __call__(self, batch: Any) -> np.ndarray:
        ids = np.concatenate([_flat(part, label) for label, part in self._parts(batch)])
        if self.note is not None:
            self.note(ids)
        return ids

    def tensor(self, batch: Any) -> Tensor:
        """Return the ids where they are."""
        label = f"{self.table!r} in ert.prefetch"
        parts = [function(batch) for _, function in self._functions]
        tensors = [torch.as_tensor(ids) for part in parts for ids in _several(part)]
        flat = [check_ids(flat_ids(ids), label).reshape(-1) for ids in tensors]
        return torch.cat(flat) if len(flat) > 1 else flat[0]

    def refuse_outside(self, batch: Any) -> None:
        """Raise `IdError` if a batch has ids outside the table. The error names their position in the batch."""
        for label, part in self._parts(batch):
            place = place_in(part) if isinstance(part, Tensor) else in_array(np.shape(part))
            check_range(_flat(part, label), self.table.rows, self.table.subject, place)

    def _parts(self, batch: Any) -> Iterator[tuple[str, Any]]:
        return ((label, part) for label, function in self._functions for part in _several(function(batch)))


def _flat(ids: Any, label: str) -> np.ndarray:
    if isinstance(ids, Tensor):
        return host_ids(flat_ids(ids), label).reshape(-1)
    array = np.asarray(ids).reshape(-1)
    return array if array.size else array.astype(np.int64)


class _PulledBatches:
    """Ids of the pulled batches for a table on a GPU, in order.

    Args:
        joined: returns the ids of a batch.
        executor: GPU executor of the rows, which loads rows before their batch.
    """

    def __init__(self, joined: _JoinedIds, executor: Any) -> None:
        self.table, self._joined, self._executor = joined.table, joined, executor
        self._ids: deque[Tensor] = deque()

    def take(self, batch: Any) -> np.ndarray:
        """Return the ids whose rows are read from disk."""
        self._ids.append(self._joined.tensor(batch))
        return self._joined(batch) if self.table.is_on_disk else np.empty(0, np.int64)

    def advance(self) -> None:
        """Load the rows of the next batch. The rows of the current batch are in use from now on."""
        self._ids.popleft()
        self._executor.expect(self._ids[0] if self._ids else None)


def _several(ids: Any) -> Sequence[Any]:
    return ids if isinstance(ids, tuple | list) and any(isinstance(p, Tensor | np.ndarray) for p in ids) else [ids]


def _caches(
    by_table: Mapping[Table, list[tuple[Any, Callable[..., Any]]]], functions: Mapping[Table, _JoinedIds]
) -> Iterator[_PulledBatches]:
    for table, parts in by_table.items():
        executor = next((layer.handle.executor() for layer, _ in parts if isinstance(layer, RowLayer)), table.executor)
        if hasattr(executor, "expect"):
            yield _PulledBatches(functions[table], executor)


def _prefetchers(by_table: Mapping[Table, list[tuple[Any, Any]]], wanted: dict[Any, Any]) -> list[BatchPrefetcher]:
    """Return the prefetchers of sharded tables, and remove these tables from `wanted`."""
    groups: dict[RankGroup, dict[SharedTable, set[int | None]]] = {}
    pooled = set[SharedTable]()
    for parts in by_table.values():
        layers = [layer for layer, _ in parts if isinstance(layer, RowLayer)]
        sharing = layers[0].handle.sharing if layers else None
        if sharing is not None:
            groups.setdefault(sharing.rank_group, {})[sharing] = {layer.padding_idx for layer in layers}
            pooled |= {sharing} if all(isinstance(layer, EmbeddingBag) for layer in layers) else set()
    found = []
    for rank_group, paddings in groups.items():
        out = {one: wanted.pop(one.table) for one in paddings if isinstance(one.placement, Shard)}
        if out:
            found.append(ahead := BatchPrefetcher(rank_group, out, paddings, pooled))
            for one in paddings.keys() - out.keys():
                wanted[one.table].note = functools.partial(ahead.count, one)
            wanted[ahead] = ahead
    return found


def _expecting(
    batches: Iterator[T], caches: Sequence[_PulledBatches], prefetchers: Sequence[BatchPrefetcher]
) -> Iterator[T]:
    try:
        for batch in batches:
            for each in (*caches, *prefetchers):
                each.advance()
            yield batch
    finally:
        for each in prefetchers:
            each.close()
