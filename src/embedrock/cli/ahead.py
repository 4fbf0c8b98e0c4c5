"""`ahead`: the next batch is read while the last one is written."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import TypeVar

Item = TypeVar("Item")


@contextmanager
def ahead(items: Generator[Item]) -> Iterator[Iterator[Item]]:
    """Go through `items`, none of which is None, while a thread makes the next one."""
    with closing(items), ThreadPoolExecutor(1) as maker:
        yield _ahead(items, maker)


def _ahead(items: Generator[Item], maker: ThreadPoolExecutor) -> Iterator[Item]:
    coming = maker.submit(next, items, None)
    while (item := coming.result()) is not None:
        coming = maker.submit(next, items, None)
        yield item
