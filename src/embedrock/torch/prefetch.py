"""`prefetch` for PyTorch: ids by layer instead of by table, and as tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from embedrock.distributed.owners import Shard
from embedrock.frontend.batch_ids import EXAMPLE, FrameworkTypes, asked_by_table, ids_by_table
from embedrock.table.prefetch import prefetch as prefetch_rows
from embedrock.table.table import Table
from embedrock.torch.layers.embedding import flat_ids, place_in
from embedrock.torch.layers.row_layer import RowLayer
from embedrock.torch.training.batch_prefetch import BatchPrefetcher
from embedrock.torch.training.lookup import check_ids, host_ids
from embedrock.torch.training.sharing import RankGroup, SharedTable

T = TypeVar("T")
L = TypeVar("L", bound=RowLayer | Table)


def prefetch(loader: Iterable[T], ids_of: Mapping[L, Callable[[T], Any]], depth: int = 2) -> Iterator[T]:
    """Go through the batches of `loader` while the rows that the next batches need are read from disk.

    Of tables that several processes share out, the ids of the next batches go to the owners of their rows, who bring
    them near, and the rows of all tables come in one message. All ranks must have as many batches.

    Of tables whose rows a GPU uses, the next batch is planned beside what it does with this one, whatever `depth` is
    (but 0); of those that it keeps a cache of, the rows of that batch are copied to it, too.

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
    kinds = FrameworkTypes(RowLayer, lambda layer: layer.handle.label, Tensor, _host_ids, place_in)
    functions = ids_by_table("ert.prefetch", ids_of, kinds)
    asked = asked_by_table("ert.prefetch", ids_of, RowLayer, EXAMPLE)
    caches = [] if depth == 0 else [*_caches(asked, functions)]
    wanted: dict[Any, Callable[[T], Any]] = {**functions, **{cache.table: cache.take for cache in caches}}
    aheads = [] if depth == 0 else _aheads(asked, wanted)
    source = loader
    for ahead in aheads:
        source = ahead.batches(source)
    batches = prefetch_rows(source, wanted, depth)
    return _expecting(batches, [*caches, *aheads]) if caches or aheads else batches


def _host_ids(ids: Tensor, label: str) -> np.ndarray:
    return host_ids(flat_ids(ids), label)


class _DevicePrefetch(Protocol):
    """Rows on a GPU that are brought there ahead of their batch."""

    def expect(self, ids: Tensor | None) -> None: ...


class _PulledBatches:
    """What the batches that were pulled look up in a table whose rows a GPU uses, in order.

    Args:
        table: the rows.
        side: where they are used.
        functions: return ids of a batch, as a user gave them.
        on_disk: returns the ids whose rows are read from disk; None: there are none.
    """

    def __init__(
        self,
        table: Table,
        executor: _DevicePrefetch,
        functions: Sequence[Callable[[Any], Any]],
        on_disk: Callable[[Any], np.ndarray] | None,
    ) -> None:
        self.table, self._executor, self._functions, self._on_disk = table, executor, functions, on_disk
        self._ids: deque[Tensor] = deque()

    def take(self, batch: Any) -> np.ndarray:
        """Note the ids of a batch, and return those whose rows are on disk."""
        parts = [function(batch) for function in self._functions]
        label = f"{self.table!r} in ert.prefetch"
        asked = [torch.as_tensor(ids) for part in parts for ids in _several(part)]
        flat = [check_ids(flat_ids(ids), label).reshape(-1) for ids in asked]
        self._ids.append(torch.cat(flat) if len(flat) > 1 else flat[0])
        return np.empty(0, np.int64) if self._on_disk is None else self._on_disk(batch)

    def advance(self) -> None:
        """Bring the next batch's rows; the first one's are in use from now on."""
        self._ids.popleft()
        self._executor.expect(self._ids[0] if self._ids else None)

    def close(self) -> None:
        """Do nothing: the side goes on with what it has."""


def _several(ids: Any) -> Sequence[Any]:
    return ids if isinstance(ids, tuple | list) and any(isinstance(p, Tensor | np.ndarray) for p in ids) else [ids]


def _caches(
    asked: Mapping[Table, list[tuple[Any, Callable[..., Any]]]], functions: Mapping[Any, Callable[[Any], Any]]
) -> Iterator[_PulledBatches]:
    for table, parts in asked.items():
        executor = next((layer.handle.executor() for layer, _ in parts if isinstance(layer, RowLayer)), table.executor)
        if hasattr(executor, "expect"):
            on_disk = functions[table] if table.is_on_disk else None
            yield _PulledBatches(table, executor, [function for _, function in parts], on_disk)  # pyright: ignore[reportArgumentType]


def _aheads(
    asked: Mapping[Table, list[tuple[Any, Any]]], wanted: dict[Any, Callable[..., Any]]
) -> list[BatchPrefetcher]:
    """Return what lets ids go ahead to other processes, in the place of what brings rows that are shared out."""
    crews: dict[RankGroup, dict[SharedTable, set[int | None]]] = {}
    for parts in asked.values():
        layers = [layer for layer, _ in parts if isinstance(layer, RowLayer)]
        sharing = layers[0].handle.sharing if layers else None
        if sharing is not None:
            crews.setdefault(sharing.rank_group, {})[sharing] = {layer.padding_idx for layer in layers}
    found = []
    for rank_group, paddings in crews.items():
        out = {one: wanted.pop(one.table) for one in paddings if isinstance(one.placement, Shard)}
        if out:
            found.append(ahead := BatchPrefetcher(rank_group, out, paddings))
            copies = {one.table: ahead.counted(one, wanted[one.table]) for one in paddings if one not in out}
            wanted |= {**copies, ahead: ahead}
    return found


def _expecting(batches: Iterator[T], ahead: Sequence[_PulledBatches | BatchPrefetcher]) -> Iterator[T]:
    try:
        for batch in batches:
            for each in ahead:
                each.advance()
            yield batch
    finally:
        for each in ahead:
            each.close()
