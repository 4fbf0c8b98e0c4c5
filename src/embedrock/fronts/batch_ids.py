"""The ids that a batch looks up, by table, from functions of a batch by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from embedrock.errors import ArgumentError
from embedrock.table.table import Table

EXAMPLE = 'Pass, for example, {model.user: lambda batch: batch["user"]}.'

Labeled = tuple[str, Callable[[Any], Any]]  # a layer's name in error messages, and its function of a batch


class Kinds(NamedTuple):
    """What layers and tensors are in a front end.

    Attributes:
        layer: the class of its layers, which have a ``table``.
        label: returns what error messages call a layer.
        tensors: the classes of its tensors.
        host_ids: returns a tensor, of the layer with this label, as an array of integers, or raises an error.
    """

    layer: type
    label: Callable[[Any], str]
    tensors: type | tuple[type, ...]
    host_ids: Callable[[Any, str], np.ndarray]


def ids_by_table(
    function: str, ids_of: Mapping[Any, Callable[[Any], Any]], kinds: Kinds
) -> dict[Table, Callable[[Any], np.ndarray]]:
    """Return the functions of a batch for `embedrock.table.prefetch`: ids (n,) of all layers on a table.

    Args:
        function: that has the argument `ids_of`, such as "ert.prefetch", for error messages.
        ids_of: for each layer or table, a function that returns the ids that a batch looks up in it: a tensor or an
            array of integers, or a tuple or list of these.
        kinds: what layers and tensors are.

    Raises:
        ArgumentError: `ids_of` is not such a dict.
    """

    def labeled(layer: Any, ids_of_batch: Callable[[Any], Any]) -> Labeled:
        return (repr(layer) if isinstance(layer, Table) else kinds.label(layer)), ids_of_batch

    asked = asked_by_table(function, ids_of, kinds.layer, EXAMPLE)
    return {table: _joined([labeled(*part) for part in parts], kinds) for table, parts in asked.items()}


def asked_by_table(
    function: str, ids_of: Any, kind: type, example: str
) -> dict[Table, list[tuple[Any, Callable[..., Any]]]]:
    """Return the layers (or tables) on each table, with the functions that give what batches look up in them.

    Args:
        function: that has the argument `ids_of`, for error messages.
        ids_of: {layer or table: function}.
        kind: the class of layers, which have a ``table``.
        example: a sentence for error messages.

    Raises:
        ArgumentError: `ids_of` is not such a dict.
    """
    if not isinstance(ids_of, Mapping):
        raise ArgumentError(
            f"`ids_of` of {function} must be a dict from layers to functions: got {ids_of!r}. {example}"
        )
    by_table: dict[Table, list[tuple[Any, Callable[..., Any]]]] = {}
    for layer, ids_of_batch in ids_of.items():
        if not isinstance(layer, kind | Table):
            raise ArgumentError(
                f"`ids_of` of {function} must have layers of Embedrock's as its keys: got {layer!r}. {example}"
            )
        if not callable(ids_of_batch):
            raise ArgumentError(
                f"`ids_of` of {function} must have functions of a batch as its values: got {ids_of_batch!r}. {example}"
            )
        table = layer if isinstance(layer, Table) else layer.table
        by_table.setdefault(table, []).append((layer, ids_of_batch))
    return by_table


def _joined(functions: list[Labeled], kinds: Kinds) -> Callable[[Any], np.ndarray]:
    """Return the function of a batch that gives the ids of all the layers of one table."""

    def ids_of(batch: Any) -> np.ndarray:
        parts = [part for label, function in functions for part in _parts(function(batch), label, kinds)]
        return np.concatenate(parts)

    return ids_of


def _parts(ids: Any, label: str, kinds: Kinds) -> list[np.ndarray]:
    several = isinstance(ids, tuple | list) and any(isinstance(p, (np.ndarray, kinds.tensors)) for p in ids)
    return [_flat(part, label, kinds) for part in (ids if several else [ids])]


def _flat(ids: Any, label: str, kinds: Kinds) -> np.ndarray:
    if isinstance(ids, kinds.tensors):
        return kinds.host_ids(ids, label).reshape(-1)
    array = np.asarray(ids).reshape(-1)
    return array if array.size else array.astype(np.int64)
