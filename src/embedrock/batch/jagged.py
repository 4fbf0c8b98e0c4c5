"""`jagged`: lists of several lengths, as columns have them, end to end."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np

from embedrock.batch.ids import check_ids
from embedrock.errors import ArgumentError, IdTypeError
from embedrock.wording import with_article

_LISTS = list | tuple | np.ndarray
EXAMPLE = "For example er.jagged([[1, 2], [3]])."


def jagged(lists: Any, to_ids: Callable[[Any], np.ndarray] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of lists, end to end, and where each list begins: both int64, as layers of bags take them.

    Args:
        lists: of several lengths: a column of lists of pandas, polars or Arrow, or lists in a list. One that is missing
            (None, NaN) is empty.
        to_ids: makes ids of what all lists have, end to end: `er.hash_ids` or a vocabulary's ``add``, of strings.
            None: they are ids.

    Raises:
        IdTypeError: no lists, lists in them, or what is no id.

    Example:
        >>> import embedrock as er
        >>> er.jagged([[7, 3], [], [7]])
        (array([7, 3, 7]), array([0, 2, 2]))
        >>> words = er.Vocabulary()
        >>> er.jagged([["red", "green"], ["red"]], words.add)
        (array([0, 1, 0]), array([0, 2]))
    """
    values, sizes = _end_to_end(lists)
    try:
        ids = check_ids(values, None, "er.jagged") if to_ids is None else np.asarray(to_ids(values))
    except IdTypeError as error:
        name, function = ("ids", "f(ids)") if to_ids is None else ("values", "er.hash_ids(f(values))")
        raise IdTypeError(
            f"{error} Of lists, `{name}` are what all of them have, end to end: er.jagged(lists, lambda {name}: "
            f"{function}), where f does that."
        ) from error
    if ids.shape != (int(sizes.sum()),):
        raise ArgumentError(
            f"`to_ids` of er.jagged must return an id for each of {int(sizes.sum())} values: got shape {ids.shape}. "
            "Leave none out: the lists would no longer begin where they do."
        )
    return ids, np.cumsum(sizes) - sizes


def _end_to_end(lists: Any) -> tuple[Any, np.ndarray]:
    library = type(lists).__module__.partition(".")[0]
    if not hasattr(lists, "__iter__") or hasattr(lists, "columns"):  # a number, or a table
        raise IdTypeError(
            "`lists` of er.jagged must be a column of lists, or lists in a list: got "
            f"{with_article(type(lists).__name__)}. {EXAMPLE}"
        )
    if library == "pandas" and hasattr(lists.dtype, "pyarrow_dtype"):
        lists, library = lists.array.__arrow_array__(), "pyarrow"
    if library == "pyarrow":
        return _of_arrow(lists)
    if library == "polars" and "." in type(lists).__module__ and hasattr(lists, "list"):
        return _of_polars(lists)
    parts = [() if _is_missing(part) else part for part in lists]
    for position, part in enumerate(parts):
        if not isinstance(part, _LISTS) or np.ndim(part) == 0:
            raise _no_list(part, position)
    sizes, filled = np.array([len(part) for part in parts], np.int64), [part for part in parts if len(part)]
    if filled and all(isinstance(part, np.ndarray) and part.ndim == 1 for part in filled):
        return np.concatenate(filled), sizes  # without the empty ones, which may be of floats
    values = list(chain.from_iterable(filled))
    if nested := next((value for value in values if isinstance(value, _LISTS)), None):
        raise _too_deep(type(nested).__name__)
    return values, sizes


def _of_polars(lists: Any) -> tuple[Any, np.ndarray]:
    if hasattr(lists.dtype, "shape"):  # of arrays, all of one length
        lists = lists.arr.to_list()
    if not hasattr(lists.dtype, "inner"):
        raise _no_list(lists[0] if len(lists) else lists.dtype, 0)
    if hasattr(lists.dtype.inner, "inner"):
        raise _too_deep(lists.dtype)
    sizes = lists.list.len().fill_null(0)
    return lists.filter(sizes > 0).explode(), sizes.to_numpy().astype(np.int64)


def _of_arrow(lists: Any) -> tuple[Any, np.ndarray]:
    from pyarrow import compute

    if not hasattr(lists.type, "value_type") or not hasattr(lists, "flatten") or "list" not in str(lists.type):
        raise _no_list(lists[0] if len(lists) else lists.type, 0)
    if "list" in str(lists.type.value_type):
        raise _too_deep(lists.type)
    sizes = compute.fill_null(compute.list_value_length(lists), 0)  # pyright: ignore[reportAttributeAccessIssue]
    return compute.list_flatten(lists), sizes.to_numpy().astype(np.int64)  # pyright: ignore[reportAttributeAccessIssue]


def _is_missing(part: Any) -> bool:
    return part is None or (not isinstance(part, _LISTS) and str(part) in ("nan", "<NA>"))


def _no_list(value: Any, position: int) -> IdTypeError:
    return IdTypeError(
        f"`lists` of er.jagged must be lists of ids, or of strings: got {str(value)[:40]!r} at [{position}]. {EXAMPLE} "
        "What has one id for each row goes as it is."
    )


def _too_deep(kind: Any) -> IdTypeError:
    return IdTypeError(f"`lists` of er.jagged must be one level of lists: got {kind} in lists. {EXAMPLE}")
