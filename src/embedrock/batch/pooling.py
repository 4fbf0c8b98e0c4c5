"""Pooling of rows into bags, and its gradients for rows and for the weights of positions."""

from __future__ import annotations

from collections.abc import Callable, Set
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from embedrock import kernels
from embedrock.batch.gradients import RowGradients
from embedrock.batch.ids import check_ids
from embedrock.batch.plan import Plan
from embedrock.errors import ArgumentError, IdTypeError, with_article
from embedrock.system import forks
from embedrock.system.buffers import buffers
from embedrock.system.spans import spanned

ONES = np.empty(0, np.float32)  # factors of 1, in the form that kernels take


class RowSources:
    """Places of bags among pooled rows and their gradients.

    Args:
        of_bags: int32 (bags,), place of each bag.
        offsets: int64 (bags + 1,), where the positions of each bag begin.
    """

    def __init__(self, of_bags: np.ndarray, offsets: np.ndarray) -> None:
        self.of_bags, self._offsets = of_bags, offsets

    @forks.cached_property
    def of_positions(self) -> np.ndarray:
        """Place of each position's bag: int32 (n,)."""
        return np.repeat(self.of_bags, np.diff(self._offsets))

    def part(self, start: int, stop: int) -> RowSources:
        return RowSources(self.of_bags[start:stop], self._offsets[start : stop + 1])


class Bags(NamedTuple):
    """A batch of bags.

    Attributes:
        plan: plan of the n positions of all bags.
        offsets: int64 (bags + 1,); bag b holds the positions ``offsets[b]`` to ``offsets[b + 1]``.
        skip: index in ``plan.ids`` of the padding id, which counts in no bag; -1 for none.
        mode: "sum", "mean" or "max".
        places: places of the bags among pooled rows, and among their gradients; None: in order.
    """

    plan: Plan
    offsets: np.ndarray
    skip: int
    mode: str
    places: RowSources | None = None

    @property
    def place_of_bag(self) -> np.ndarray:
        """Return the place of each bag among pooled rows: int32 (bags,)."""
        return np.arange(len(self.offsets) - 1, dtype=np.int32) if self.places is None else self.places.of_bags

    def place_of_position(self) -> np.ndarray:
        """Return the place of each position's bag among pooled rows: int32 (n,)."""
        return (self.places or RowSources(self.place_of_bag, self.offsets)).of_positions


class PooledSource(NamedTuple):
    """The rows of a batch, as ``tests/reference/pooling.py`` defines them.

    Attributes:
        words: stored words of records, (slots, at least dim), in the stored dtype.
        slots: int64 (unique,); ``-1 - k`` stands for ``fresh[k]``.
        fresh: float32 (new, dim), rows without records.
    """

    words: np.ndarray
    slots: np.ndarray
    fresh: np.ndarray

    @staticmethod
    def of(rows: np.ndarray) -> PooledSource:
        """Wrap plain rows, float32 (unique, dim)."""
        return PooledSource(rows, np.arange(len(rows)), rows[:0])


def index_of(plan: Plan, padding: int | None) -> int:
    """Return the index of the padding id in ``plan.ids``; -1 if it is None or not in the batch."""
    if padding is None:
        return -1
    found = np.flatnonzero(plan.ids == padding)
    return int(found[0]) if len(found) else -1


def pool(rows: np.ndarray, weights: np.ndarray | None, bags: Bags) -> tuple[np.ndarray, np.ndarray]:
    """Pool unique rows float32 (unique, dim).

    Args:
        rows: rows of ``bags.plan``.
        weights: factors of the positions, float32 (n,); None for ones.
        bags: the bags.

    Returns:
        The bags float32 (bags, dim), in their places, and the `trace` for `unpool`. That is the factors of sums, `ONES`
        without means, or the positions of maxima.
    """
    count, dim = len(bags.offsets) - 1, rows.shape[1]
    out, trace = pooled_like(count, dim, {bags.mode})
    pool_into(PooledSource.of(rows), weights, bags, out, trace)
    return out, trace


def pooled_like(count: int, dim: int, modes: Set[str | None]) -> tuple[np.ndarray, np.ndarray]:
    """Allocate the arrays that `pool` returns for `count` bags: of maxima, or of sums and means."""
    out = buffers.empty((count, dim), np.float32)
    if "max" in modes:
        return out, np.empty((count, dim), np.int32)
    return out, np.empty(count, np.float32) if "mean" in modes else ONES


def pool_into(source: PooledSource, weights: np.ndarray | None, bags: Bags, out: np.ndarray, trace: np.ndarray) -> None:
    """Write the results of `pool` to the places of the bags in `out` and `trace`, which may have more places."""
    cpu = kernels.cpu
    rows = source.words, source.slots, bags.plan.inverse, source.fresh, bags.offsets, bags.place_of_bag
    if bags.mode == "max":
        cpu.launch(cpu.pooling.pool_max, *rows, bags.skip, out, trace)
    else:
        factors = ONES if weights is None else weights
        cpu.launch(cpu.pooling.pool_sum, *rows, factors, bags.skip, bags.mode == "mean", out, trace)


def unpool(grads: np.ndarray, weights: np.ndarray | None, bags: Bags, trace: np.ndarray) -> RowGradients:
    """Return the gradients of a table's rows from those of the bags, float32 (bags, dim)."""
    values, squares = sum_bags(grads, weights, bags, trace)
    return RowGradients(bags.plan, values, float(squares.sum()))


@spanned("sum")
def sum_bags(
    grads: np.ndarray, weights: np.ndarray | None, bags: Bags, trace: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of the rows from those of the bags, float32 (bags, dim).

    Returns:
        The gradients, float32 (unique, dim), and the sum of squares of each, float64 (unique,).
    """
    plan = bags.plan
    values, squares = buffers.empty((len(plan.ids), grads.shape[1]), np.float32), np.empty(len(plan.ids), np.float64)
    cpu, segments = kernels.cpu, (grads, bags.place_of_position(), plan.starts, plan.order)
    if bags.mode == "max":
        cpu.launch(cpu.pooling.pool_max_backward, *segments, trace, values, squares)
    else:
        args = *segments, ONES if weights is None else weights, trace, bags.skip, values, squares
        cpu.launch(cpu.pooling.pool_sum_backward, *args)
    return values, squares


def weight_grads(grads: np.ndarray, rows: np.ndarray, bags: Bags) -> np.ndarray:
    """Return the gradients of the positions' weights float32 (n,), in mode "sum".

    Args:
        grads: gradients of the bags, float32 (bags, dim).
        rows: the pooled rows, float32 (unique, dim).
        bags: the bags.
    """
    out = np.empty(len(bags.plan.inverse), np.float32)
    args = grads, rows, bags.plan.inverse, bags.place_of_position(), bags.skip, out
    kernels.cpu.launch(kernels.cpu.pooling.weight_grads, *args)
    return out


_LISTS = list | tuple | np.ndarray
EXAMPLE = "For example er.jagged([[1, 2], [3]])."


def jagged(lists: Any, to_ids: Callable[[Any], np.ndarray] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the concatenated ids of lists, and the offset of each list: both int64, as layers of bags take them.

    Args:
        lists: lists of different lengths: a column of lists of pandas, polars or Arrow, or a list of lists. A missing
            one (None, NaN) is empty.
        to_ids: converts all concatenated values to ids: `er.hash_ids` or a vocabulary's ``add``, of strings. None: the
            values are ids.

    Raises:
        IdTypeError: the argument is no lists, or has nested lists, or a value that is no id.

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
        return np.concatenate(filled), sizes  # without empty lists, which may be of floats
    values = list(chain.from_iterable(filled))
    if nested := next((value for value in values if isinstance(value, _LISTS)), None):
        raise _too_deep(type(nested).__name__)
    return values, sizes


def _of_polars(lists: Any) -> tuple[Any, np.ndarray]:
    if hasattr(lists.dtype, "shape"):  # of arrays of one length
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
