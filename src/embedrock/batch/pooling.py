"""Pooling of rows into bags, and its gradients for rows and for the weights of positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from embedrock import kernels
from embedrock.batch.ids import check_ids
from embedrock.batch.plan import Plan
from embedrock.errors import ArgumentError, IdTypeError, with_article
from embedrock.system.buffers import buffers
from embedrock.system.spans import spanned

ONES = np.empty(0, np.float32)  # factors of 1, in the form that kernels take
_EACH = np.empty(0, np.int64)  # an array for each feature
ZERO, NOTHING = np.float32(0.0), np.float32(-0.0)  # sums of bags begin with 0, and those of rows with their first bits


class Bags(NamedTuple):
    """The n positions of a batch, in bags.

    Attributes:
        offsets: int64 (bags + 1,); bag b holds the positions ``offsets[b]`` to ``offsets[b + 1]``.
        mode: "sum", "mean" or "max"; None: each position is alone, and its row is not pooled.
        bounds: int64 (features + 1,), where the bags of each feature begin.
        own: int64 (tables + 1,), where the features of each table begin.
        of_positions: int32 (n,), bag of each position; empty if each bag is one position.
        are_alone: each bag is one position.
    """

    offsets: np.ndarray
    mode: str | None
    bounds: np.ndarray
    own: np.ndarray
    of_positions: np.ndarray
    are_alone: bool = False

    def are_copies(self, weights: np.ndarray | None) -> bool:
        """Return whether each bag is the row of its only position, or that row and 0."""
        return self.are_alone and weights is None and self.mode != "max"

    @staticmethod
    def of_rows(plan: Plan) -> Bags:
        """Return the positions of one feature, without bags."""
        return Bags(plan.positions, None, plan.positions, _ONE, NO_BAGS, are_alone=True)


_ONE, NO_BAGS = np.array([0, 1]), np.empty(0, np.int32)
NO_BAGS.setflags(write=False)  # kernels would make a view of it each time


def bag_of_position(offsets: np.ndarray) -> np.ndarray:
    """Return the bag of each position, int32 (n,), given the bounds of the bags."""
    return np.repeat(np.arange(len(offsets) - 1, dtype=np.int32), np.diff(offsets))


class Places(NamedTuple):
    """Where the rows of features are: their outputs, or the gradients of these.

    Attributes:
        at: address and stride in bytes, int64 (features, 2).
        like: an empty array of the rows' dtype, float32 or words of 16 bits.
    """

    at: np.ndarray
    like: np.ndarray

    def of(self, features: Any) -> Places:
        return Places(self.at[features], self.like)


def places_of(arrays: Sequence[np.ndarray], begins: np.ndarray = _EACH) -> Places:
    """Return where the rows of each feature are.

    Args:
        arrays: (bags, dim) of each feature, of one dtype, with rows that lie anywhere. The caller keeps them alive.
        begins: of features that share one array, the bytes from its start to the first row of each: int64 (features,).
    """
    objects = np.fromiter(map(id, arrays), np.int64)
    found = np.empty((begins.size or objects.size, 2), np.int64)
    kernels.cpu.addresses.read_places(objects, begins, found)
    return Places(found, np.empty(0, arrays[0].dtype))


class PooledSource(NamedTuple):
    """The rows of a batch, as ``tests/reference/pooling.py`` defines them.

    Attributes:
        words: stored words of records, (slots, at least dim), in the stored dtype. `gather` also takes `PackedRows`.
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


def trace_of(count: int, dim: int, modes: Set[str | None]) -> np.ndarray:
    """Allocate the trace of `count` bags: of maxima, or of sums and means."""
    if "max" in modes:
        return np.empty((count, dim), np.int32)
    return np.empty(count, np.float32) if "mean" in modes else ONES


def pool_into(
    plan: Plan,
    source: PooledSource,
    weights: np.ndarray | None,
    bags: Bags,
    places: Places,
    trace: np.ndarray,
) -> None:
    """Write bags of a plan's positions to their places, of float32 unless bags `are_copies`, and their trace."""
    cpu, (words, slots, fresh) = kernels.cpu, source
    rows, dim = (words, slots, plan.inverse, fresh), fresh.shape[1]
    if bags.are_copies(weights):
        start = NOTHING if bags.mode is None else ZERO
        return cpu.launch(cpu.pooling.copy_rows, *rows, *places, bags.bounds, start, dim)
    pooled = *rows, bags.offsets[:-1], bags.offsets[1:]
    if bags.mode == "max":
        cpu.launch(cpu.pooling.pool_max, *pooled, places.at, bags.bounds, trace)
    else:
        about = ONES if weights is None else weights, bags.mode == "mean"
        cpu.launch(cpu.pooling.pool_sum, *pooled, *about, places.at, bags.bounds, dim, trace)


@spanned("sum")
def sum_bags(
    plan: Plan, places: Places, dim: int, weights: np.ndarray | None, bags: Bags, trace: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of a plan's rows from those of the bags, which lie in `places`.

    Returns:
        The gradients, float32 (unique, dim), and the sum of squares of each table, float64 (tables,).
    """
    cpu, rows = kernels.cpu, plan.rows
    values, squares = buffers.empty((plan.ids.size, dim), np.float32), np.empty(plan.ids.size)
    given = *places, bags.bounds, bags.own, rows, bags.of_positions
    segments = *given, plan.starts, plan.order
    if bags.mode == "max":
        cpu.launch(cpu.pooling.pool_max_backward, *segments, trace, values, squares)
    else:
        start = NOTHING if bags.mode is None else ZERO
        about = ONES if weights is None else weights, trace, start
        cpu.launch(cpu.pooling.pool_sum_backward, *segments, *about, values, squares)
    sums = np.empty(rows.size - 1)
    cpu.pooling.sum_squares(squares, rows, sums)
    return values, sums


def weight_grads(plan: Plan, places: Places, rows: np.ndarray, bags: Bags) -> np.ndarray:
    """Return the gradients of the positions' weights float32 (n,), in mode "sum".

    Args:
        plan: of the positions.
        places: of the gradients of the bags.
        rows: the pooled rows, float32 (unique, dim).
        bags: the bags.
    """
    out = np.empty(len(plan.inverse), np.float32)
    args = *places, bags.bounds, rows, plan.inverse, bags.of_positions, out
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
            f"{function}), where f does that; for strings er.jagged(lists, er.hash_ids)."
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
