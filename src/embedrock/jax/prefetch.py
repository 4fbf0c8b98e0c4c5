"""`prefetch` for JAX: batches that are planned, and whose rows are loaded from disk, during the steps before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from embedrock.jax.tables import Batch, Tables, Tree
from embedrock.table.prefetch import look_ahead

T = TypeVar("T")


def prefetch(
    loader: Iterable[T], tables: Tables, depth: int = 2, ids_of: Callable[[T], Tree] | None = None
) -> Iterator[tuple[Batch, T]]:
    """Iterate over a loader's items, each with its fetched batch, while rows of the next `depth` batches are loaded.

    The next batches are planned, and their rows come from disk into the cache. A batch is read once the one before it
    is applied, so training gives the same bits for any depth. Each is applied, if at all, before the next one is taken.

    Args:
        loader: any iterable, read once. Items must not change while they wait.
        tables: of the batches.
        depth: number of batches to look ahead; 0: none. Caches of tables on disk must hold the rows of ``depth + 1``.
        ids_of: returns the ids of an item, as `Tables.fetch` takes them. None: an item is a tuple that begins with
            them, or the ids themselves.

    Raises:
        ArgumentError: an invalid argument.
        CacheTooSmallError: (from the loop) the tables' `memory` cannot hold the rows of ``depth + 1`` batches.

    Example:
        >>> import numpy as np, embedrock as er, embedrock.jax as ej
        >>> tables = ej.Tables({"item": er.Table(rows=100, dim=4)})
        >>> loader = [({"item": np.array([k, 7])}, float(k)) for k in range(3)]
        >>> [(batch.lookup("item").shape, target) for batch, (_, target) in ej.prefetch(loader, tables)]
        [((2, 4), 0.0), ((2, 4), 1.0), ((2, 4), 2.0)]
    """
    planned: deque[Batch] = deque()

    def plan(item: Any) -> Any:
        ids = ids_of(item) if ids_of is not None else item[0] if isinstance(item, tuple) else item
        planned.append(tables.plan(ids))
        return planned[-1].fetched

    return _current(look_ahead(loader, {tables.fetcher: plan}, depth), tables, planned, plan)


def _current(
    items: Iterator[T], tables: Tables, planned: deque[Batch], plan: Callable[[T], Any]
) -> Iterator[tuple[Batch, T]]:
    for item in items:
        if not planned:  # without prefetching
            plan(item)
        batch = planned.popleft()
        assert batch.fetched is not None
        tables.fetcher.read(batch.fetched)
        yield tables.put(batch), item
