"""Checkpoints of fewer rows than the layers have: `grow=True` of loading functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from embedrock.initializers import FromArray
from embedrock.system.scopes import set_within
from embedrock.table.changes import has_more

_grows: ContextVar[bool] = ContextVar("a checkpoint may have fewer rows", default=False)
grows = _grows.get


@contextmanager
def growing(layers: Iterable[Any], grow: bool) -> Iterator[None]:
    """Allow a checkpoint with fewer rows than its layers have, if `grow`.

    A table on disk goes back to the rows of its commit. It grows at the end: a group's tables go back together.
    """
    before = [(layer, layer.table.spec) for layer in layers] if grow else []
    with set_within(_grows, grow or grows()):
        yield
    found = [(layer, layer.table.rows) for layer, _ in before]
    for layer, spec in before:
        if has_more(spec, layer.table.rows):
            layer.grow(spec.rows, spec.init if isinstance(spec.init, FromArray) else None)
    for layer, rows in found:
        begin_padding(layer, rows)


def begin_padding(layer: Any, saved: int | None) -> None:
    """Set a layer's padding row to zeros if it is none of the `saved` rows."""
    padding = getattr(layer, "padding_idx", None)
    if padding is not None and saved is not None and padding >= saved:
        layer.table.assign([padding], np.zeros((1, layer.table.dim)))
