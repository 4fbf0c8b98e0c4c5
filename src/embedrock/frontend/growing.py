"""Checkpoints of fewer rows than the layers have: `grow=True` of loading functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from embedrock.initializers import FromArray
from embedrock.system.scopes import set_within
from embedrock.table.changes import has_more

_grows: ContextVar[bool] = ContextVar("a checkpoint may have fewer rows", default=False)


def grows() -> bool:
    """Return whether a checkpoint that is loaded now may have fewer rows than its layer."""
    return _grows.get()


@contextmanager
def growing(layers: Iterable[Any], grow: bool) -> Iterator[None]:
    """Allow a checkpoint with fewer rows in the block, if `grow`.

    A table on disk then has the rows of its commit. It gets all its rows back when all tables are loaded, because those
    of a group go to their commit together.

    Args:
        layers: layers with tables, with the methods of `RowLayer`.
        grow: the argument of the user.
    """
    before = [(layer, layer.table.spec) for layer in layers] if grow else []
    with set_within(_grows, grow or grows()):
        yield
    found = [layer.table.rows for layer, _ in before]
    for layer, spec in before:
        if has_more(spec, layer.table.rows):
            layer.grow(spec.rows, spec.init if isinstance(spec.init, FromArray) else None)
    for (layer, _), rows in zip(before, found, strict=True):
        layer.begin_padding(rows)
