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
from embedrock.table.prefetch import check_ids_of, look_ahead
from embedrock.table.table import Table
from embedrock.torch.layers.bag import EmbeddingBag
from embedrock.torch.layers.embedding import flat_ids, place_in
from embedrock.torch.layers.row_layer import RowLayer
from embedrock.torch.training.batch_prefetch import BatchPrefetcher
from embedrock.torch.training.lookup import LayerLayout, check_ids, host_ids
from embedrock.torch.training.sharing import RankGroup, SharedTable

T = TypeVar("T")
L = TypeVar("L", bound=RowLayer | Table)

EXAMPLE = 'Pass, for example, {model.user: lambda batch: batch["user"]}.'


def prefetch(loader: Iterable[T], ids_of: Mapping[L, Callable[[T], Any]], depth: int = 2) -> Iterator[T]:
    """Iterate over the batches of `loader`, and read the rows of the next batches from disk meanwhile.

    Tables may be sharded over several processes. Then the ids of the next batches go to the owners of the rows, which
    load them. The rows of all tables arrive in one message. All ranks must have the same number of batches.

    If a GPU has a cache of a table, it plans the next batch during the current one, and copies the rows of that batch
    to the cache, unless `depth` is 0. The next batch of tables that the host plans is planned then, too.

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
    check_ids_of(functions)
    executors = {} if depth == 0 else _executors(by_table)
    pulled = [_PulledBatches(executors, by_table)] if executors else []
    wanted: dict[Any, Callable[[T], Any]] = {
        table: function for table, function in functions.items() if table not in executors or table.is_on_disk
    }
    prefetchers = [] if depth == 0 else _prefetchers(by_table, wanted)
    source = loader
    for ahead in prefetchers:
        source = ahead.batches(source)
    batches = look_ahead(source, wanted, depth, pulled[0].take if pulled else None)
    return _expecting(batches, pulled, prefetchers) if pulled or prefetchers else batches


class _JoinedIds:
    """Function of a batch that returns the ids of all layers on one table, flat.

    Attributes:
        note: gets the ids, too; None: no other code needs them.
    """

    note: Callable[[np.ndarray], None] | None = None

    def __init__(self, table: Table, functions: Sequence[tuple[Any, Callable[[Any], Any]]]) -> None:
        self._table = table
        self._functions = [(repr(by) if by is table else by.handle.label, function) for by, function in functions]

    def __call__(self, batch: Any) -> np.ndarray:
        ids = np.concatenate([_flat(part, label) for label, part in self._parts(batch)])
        if self.note is not None:
            self.note(ids)
        return ids

    def refuse_outside(self, batch: Any) -> None:
        """Raise `IdError` if a batch has ids outside the table. The error names their position in the batch."""
        for label, part in self._parts(batch):
            place = place_in(part) if isinstance(part, Tensor) else in_array(np.shape(part))
            check_range(_flat(part, label), self._table.rows, self._table.subject, place)

    def _parts(self, batch: Any) -> Iterator[tuple[str, Any]]:
        return ((label, part) for label, function in self._functions for part in _several(function(batch)))


def _flat(ids: Any, label: str) -> np.ndarray:
    if isinstance(ids, Tensor):
        return host_ids(flat_ids(ids), label).reshape(-1)
    array = np.asarray(ids).reshape(-1)
    return array if array.size else array.astype(np.int64)


class _PulledBatches:
    """Ids of the pulled batches for tables on a GPU, in order. They are kept, and no rows are loaded from disk.

    Args:
        executors: GPU executor of each table, which loads rows before their batch.
        by_table: functions that return the ids of a batch, as the user passed them.
    """

    def __init__(self, executors: Mapping[Table, Any], by_table: Mapping[Table, list[tuple[Any, Any]]]) -> None:
        self._executors = list(executors.values())
        self._functions = [function for table in executors for _, function in by_table[table]]
        self._tables = [table for table in executors for _ in by_table[table]]
        self._labels = {table: f"{table!r} in ert.prefetch" for table in executors}
        self._ids: deque[Sequence[Tensor]] = deque()

    def take(self, batch: Any) -> None:
        given = [function(batch) for function in self._functions]
        if len(given) > len(self._executors) or LayerLayout.ids_on_device(given) is None:
            given = self._joined(given)
        self._ids.append(given)

    def _joined(self, given: Sequence[Any]) -> list[Tensor]:
        """Return the ids of each table, after a check, in one tensor."""
        parts: dict[Table, list[Tensor]] = {}
        for table, each in zip(self._tables, given, strict=True):
            tensors = [flat_ids(torch.as_tensor(ids)) for ids in _several(each)]
            parts.setdefault(table, []).extend(check_ids(ids, self._labels[table]) for ids in tensors)
        return [own[0] if len(own) == 1 else torch.cat([ids.reshape(-1) for ids in own]) for own in parts.values()]

    def advance(self) -> None:
        """Load the rows of the next batch. The rows of the current batch are in use from now on."""
        self._ids.popleft()
        given = self._ids[0] if self._ids else [None] * len(self._executors)
        for executor, ids in zip(self._executors, given, strict=True):
            executor.expect(ids)


def _several(ids: Any) -> Sequence[Any]:
    return ids if isinstance(ids, tuple | list) and any(isinstance(p, Tensor | np.ndarray) for p in ids) else [ids]


def _executors(by_table: Mapping[Table, list[tuple[Any, Callable[..., Any]]]]) -> dict[Table, Any]:
    """Return the executor of each table that a GPU has."""
    found: dict[Table, Any] = {}
    for table, parts in by_table.items():
        executor = next((layer.handle.executor() for layer, _ in parts if isinstance(layer, RowLayer)), table.executor)
        if hasattr(executor, "expect"):
            found[table] = executor
    return found


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
    batches: Iterator[T], pulled: Sequence[_PulledBatches], prefetchers: Sequence[BatchPrefetcher]
) -> Iterator[T]:
    try:
        for batch in batches:
            for each in (*pulled, *prefetchers):
                each.advance()
            yield batch
    finally:
        for each in prefetchers:
            each.close()
