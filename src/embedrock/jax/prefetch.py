"""`prefetch` for JAX: batches that are planned, and whose rows are loaded from disk, during the steps before."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from embedrock.errors import ArgumentError
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
    if not isinstance(tables, Tables) or not (ids_of is None or callable(ids_of)):
        raise ArgumentError(
            f"prefetch takes a loader, an ej.Tables, and `ids_of`, a function of an item: got {tables!r}, "
            f"ids_of={ids_of!r}. Pass, for example, ej.prefetch(loader, tables, ids_of=lambda item: item['ids'])."
        )

    def planned() -> Iterator[tuple[Callable[[], Batch], T]]:
        for item in loader:
            if ids_of is None and isinstance(item, list):  # as a DataLoader of torch makes of tuples
                got = "must be ids, or a tuple that begins with them: got a list. Pass ids_of=lambda item: item[0]"
                raise ArgumentError(f"an item of ej.prefetch {got}, or another function that returns its ids.")
            ids: Any = ids_of(item) if ids_of is not None else item[0] if isinstance(item, tuple) else item
            yield functools.cache(lambda ids=ids: tables.plan(ids)), item  # another thread is the first to call it

    is_iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")  # else `look_ahead` refuses it
    source: Any = planned() if is_iterable else loader
    ahead = look_ahead(source, {tables.fetcher: lambda pair: lambda: pair[0]().fetched}, depth)
    return ((tables.read(plan()), item) for plan, item in ahead)
