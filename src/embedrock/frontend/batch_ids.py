"""Functions of a batch by layer, which prefetching takes, by table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from embedrock.errors import ArgumentError
from embedrock.table.table import Table


def asked_by_table(
    function: str, ids_of: Any, kind: type, example: str
) -> dict[Table, list[tuple[Any, Callable[..., Any]]]]:
    """Return, by table, its layers (or the table) with their functions of a batch.

    Args:
        function: the function with the argument `ids_of`, for error messages.
        ids_of: {layer or table: function}.
        kind: the class of layers, which have a ``table``.
        example: a sentence for error messages.

    Raises:
        ArgumentError: `ids_of` is not such a dict.
    """
    must = f"`ids_of` of {function} must"
    if not isinstance(ids_of, Mapping):
        raise ArgumentError(f"{must} be a dict from layers to functions: got {ids_of!r}. {example}")
    by_table: dict[Table, list[tuple[Any, Callable[..., Any]]]] = {}
    for layer, ids_of_batch in ids_of.items():
        if not isinstance(layer, kind | Table):
            raise ArgumentError(f"{must} have layers of Embedrock's as its keys: got {layer!r}. {example}")
        if not callable(ids_of_batch):
            raise ArgumentError(f"{must} have functions of a batch as its values: got {ids_of_batch!r}. {example}")
        table = layer if isinstance(layer, Table) else layer.table
        by_table.setdefault(table, []).append((layer, ids_of_batch))
    return by_table
