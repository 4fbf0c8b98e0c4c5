"""The ids that a batch looks up, by table, from functions of a batch by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from embedrock.batch.ids import check_range
from embedrock.batch.wrong_ids import Place, in_array
from embedrock.errors import ArgumentError
from embedrock.table.table import Table

EXAMPLE = 'Pass, for example, {model.user: lambda batch: batch["user"]}.'

Labeled = tuple[str, Callable[[Any], Any]]  # a layer's name in error messages, and its function of a batch


class FrameworkTypes(NamedTuple):
    """The types of a front end's layers and tensors.

    Attributes:
        layer: the class of its layers, which have a ``table``.
        label: returns the name of a layer in error messages.
        tensors: the classes of its tensors.
        host_ids: returns a tensor as an array of integers, or raises an error that names the layer.
        place: returns a function that describes the position of one id of a tensor.
    """

    layer: type
    label: Callable[[Any], str]
    tensors: type | tuple[type, ...]
    host_ids: Callable[[Any, str], np.ndarray]
    place: Callable[[Any], Place]


def ids_by_table(
    function: str, ids_of: Mapping[Any, Callable[[Any], Any]], kinds: FrameworkTypes
) -> dict[Table, Callable[[Any], np.ndarray]]:
    """Return the functions of a batch for `embedrock.table.prefetch`: ids (n,) of all layers on a table.

    Args:
        function: the function with the argument `ids_of`, such as "ert.prefetch", for error messages.
        ids_of: {layer or table: function}. A function returns the batch's ids for its layer: a tensor or array of
            integers, or several.
        kinds: types of the framework's layers and tensors.

    Raises:
        ArgumentError: `ids_of` is not such a dict.
    """

    def labeled(layer: Any, ids_of_batch: Callable[[Any], Any]) -> Labeled:
        return (repr(layer) if isinstance(layer, Table) else kinds.label(layer)), ids_of_batch

    asked = asked_by_table(function, ids_of, kinds.layer, EXAMPLE)
    return {table: _JoinedIds(table, [labeled(*part) for part in parts], kinds) for table, parts in asked.items()}


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


class _JoinedIds:
    """A function of a batch that returns the ids of all layers on one table, flat."""

    def __init__(self, table: Table, functions: list[Labeled], kinds: FrameworkTypes) -> None:
        self._table, self._functions, self._kinds = table, functions, kinds

    def __call__(self, batch: Any) -> np.ndarray:
        parts = [_flat(part, label, self._kinds) for label, part in self._parts(batch)]
        return np.concatenate(parts)

    def refuse_outside(self, batch: Any) -> None:
        """Raise `IdError` if a batch has ids outside the table. The error names their position in the batch."""
        for label, part in self._parts(batch):
            place = self._kinds.place(part) if isinstance(part, self._kinds.tensors) else in_array(np.shape(part))
            check_range(_flat(part, label, self._kinds), self._table.rows, self._table.subject, place)

    def _parts(self, batch: Any) -> Iterator[tuple[str, Any]]:
        for label, function in self._functions:
            ids = function(batch)
            several = isinstance(ids, tuple | list) and any(
                isinstance(part, (np.ndarray, self._kinds.tensors)) for part in ids
            )
            yield from ((label, part) for part in (ids if several else [ids]))


def _flat(ids: Any, label: str, kinds: FrameworkTypes) -> np.ndarray:
    if isinstance(ids, kinds.tensors):
        return kinds.host_ids(ids, label).reshape(-1)
    array = np.asarray(ids).reshape(-1)
    return array if array.size else array.astype(np.int64)
