"""`prefetch` for `tf.data`: load rows of coming batches from disk while others are trained on."""

from __future__ import annotations

import contextlib
import itertools
import operator
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from embedrock.errors import ArgumentError, CacheTooSmallError, IdError, UnsupportedError
from embedrock.frontend.batch_ids import asked_by_table
from embedrock.keras.layers.row_layer import KerasRowLayer
from embedrock.keras.training.lookup import checked_ids
from embedrock.storage.backend import Pin
from embedrock.system.spans import span
from embedrock.table.prefetch import Wanted, crowded, joined
from embedrock.table.table import Table

EXAMPLE = 'Pass, for example, {layer: lambda x, y: x["user"]}.'
# Global batches that `experimental_distribute_dataset`, and so `fit`, takes ahead of the step under a strategy of
# several replicas: one in its own prefetch, two in its iterator (seen with TensorFlow 2.21).
STRATEGY_AHEAD = 3

LayerIds = tuple[Any, Callable[..., Any]]  # a layer or table, and its function of a batch that returns ids


def prefetch(dataset: tf.data.Dataset, ids_of: Mapping[Any, Callable[..., Any]], depth: int = 2) -> tf.data.Dataset:
    """Return `dataset` with the rows of its next batches read from disk ahead of time.

    The batches are the same, and so is every bit of training: steps still look up the values of rows. `fit`, `evaluate`
    and `predict` take it, and so do custom loops, with or without a `tf.distribute.MirroredStrategy`. It prefetches the
    batches as well: call it last. For tables in RAM it does only that.

    Args:
        dataset: dataset of batches.
        ids_of: {layer or table: function}. A function returns the batch's ids for its layer: a dense, ragged or sparse
            tensor of integers, or several. It is traced (without AutoGraph), with the arguments of a function for
            `Dataset.map`. Ids that it leaves out are read by the lookup.
        depth: number of batches to look ahead; 0: none. The cache must hold the rows of ``depth + 1`` global batches,
            or ``depth + 4`` under a strategy with several replicas.

    Raises:
        ArgumentError: an argument that cannot work.
        IdTypeError: a function returns no integers.
        UnsupportedError: it is called inside of a `tf.function`.

    The loop gets a TensorFlow error with the text of a `CacheTooSmallError` if the tables' `memory` is too small.

    Example:
        >>> import numpy as np, tensorflow as tf, embedrock.keras as erk
        >>> emb = erk.Embedding(10**9, 4)
        >>> dataset = tf.data.Dataset.from_tensor_slices({"user": np.arange(6)}).batch(3)
        >>> [tuple(emb(x["user"]).shape) for x in erk.prefetch(dataset, {emb: lambda x: x["user"]})]
        [(3, 4), (3, 4)]
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise ArgumentError(f"`dataset` of erk.prefetch must be a tf.data.Dataset: got {dataset!r}.")
    layers_by_table = asked_by_table("erk.prefetch", ids_of, KerasRowLayer, EXAMPLE)
    if not layers_by_table:
        raise ArgumentError(f"`ids_of` of erk.prefetch must be a dict from layers to functions: got {{}}. {EXAMPLE}")
    if isinstance(depth, bool) or not hasattr(depth, "__index__") or operator.index(depth) < 0:
        raise ArgumentError(f"`depth` of erk.prefetch must be a whole number of batches, 0 or more: got {depth!r}.")
    if not tf.executing_eagerly():
        raise UnsupportedError(
            "erk.prefetch must be called outside of tf.function. Pass it the dataset as an argument."
        )
    if depth == 0:
        return dataset
    on_disk = {table: part for table, part in layers_by_table.items() if table.is_on_disk}
    return _ahead(dataset, on_disk, operator.index(depth)) if on_disk else dataset.prefetch(depth)


def _ahead(dataset: tf.data.Dataset, layers_by_table: dict[Table, list[LayerIds]], depth: int) -> tf.data.Dataset:
    """Return `dataset` with `depth` batches ahead of the loop, whose rows are in the tables' caches."""
    passes = _Passes(layers_by_table, depth)

    @tf.autograph.experimental.do_not_convert  # it wraps errors, and warns of several lambdas in a line
    def begin(number: tf.Tensor) -> tf.data.Dataset:
        @tf.autograph.experimental.do_not_convert
        def bring(*batch: Any) -> Any:
            ids = [_joined(part, batch) for part in layers_by_table.values()]
            tf.numpy_function(passes.bring, [number, *ids], [])
            return batch if isinstance(dataset.element_spec, tuple) else batch[0]

        return dataset.map(bring).prefetch(depth)

    # A generator of one number for each pass through the dataset. TensorFlow closes it after the last batch of a pass,
    # or when the iterator is gone: by a break, an error, or at the end of an epoch.
    numbers = tf.data.Dataset.from_generator(passes.open, output_signature=tf.TensorSpec((), tf.int64))
    made = numbers.flat_map(begin)  # pyright: ignore[reportArgumentType]  # it takes a generator for its numbers
    if dataset.cardinality() != tf.data.UNKNOWN_CARDINALITY:
        made = made.apply(tf.data.experimental.assert_cardinality(dataset.cardinality()))
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False  # it would go further ahead than `depth`
    return made.with_options(dataset.options().merge(options))


def _joined(layers: Sequence[LayerIds], batch: tuple[Any, ...]) -> tf.Tensor:
    """Return the ids, int64 (n,), that a batch looks up in one table."""
    parts = []
    for layer, ids_of in layers:
        label = layer.label if isinstance(layer, KerasRowLayer) else repr(layer)
        for ids in tf.nest.flatten(ids_of(*batch)):
            if isinstance(ids, tf.RaggedTensor):
                ids = ids.flat_values
            flat = checked_ids(ids.values if isinstance(ids, tf.SparseTensor) else ids, label)
            parts.append(tf.cast(tf.reshape(flat, [-1]), tf.int64))
    return tf.concat(parts, 0)


class _PrefetchedRows(NamedTuple):
    """The rows of one batch: ids and pins, by table."""

    ids: list[np.ndarray]
    pins: list[Pin]


class _Passes:
    """The running passes through a dataset, and the rows that each of them pins in the caches.

    A pass pins the rows of the loop's batch and of the batches after it. `depth` batches wait. So a request for a batch
    means that the batch ``depth + 1`` before it is used up.

    TensorFlow keeps every Python function that it calls for ever. So this object refers to tables and layers weakly.
    """

    def __init__(self, layers_by_table: dict[Table, list[LayerIds]], depth: int) -> None:
        self._tables = [weakref.ref(table) for table in layers_by_table]
        layers = [layer for parts in layers_by_table.values() for layer, _ in parts]
        self._layers = [weakref.ref(layer) for layer in layers if isinstance(layer, KerasRowLayer)]
        self._depth = depth
        self._numbers = itertools.count()
        self._windows: dict[int, deque[_PrefetchedRows]] = {}

    def open(self) -> Iterator[int]:
        """Yield the number of a new pass; when closed, release its rows."""
        number = next(self._numbers)
        self._windows[number] = deque()
        try:
            yield number
        finally:
            # In a thread of its own: garbage collection may end a pass inside a call that holds a table lock.
            with contextlib.suppress(RuntimeError):  # at interpreter exit: the tables go as well
                threading.Thread(target=_release, args=(self._windows.pop(number),), daemon=True).start()

    def bring(self, number: np.ndarray, *ids: np.ndarray) -> None:
        """Load the rows of a batch of a pass into the caches. `ids` are (n,) for each table."""
        window = self._windows[int(number)]
        while len(window) >= self._size:
            _release([window.popleft()])
        fetched = _PrefetchedRows([part.copy() for part in ids], [])  # TensorFlow will reuse their memory
        window.append(fetched)
        with span("fetch"):
            for prefetcher, part in self._wanted(fetched):
                try:
                    fetched.pins.append(prefetcher.bring(part))
                except IdError:
                    return  # the layer's own lookup will report it
                except CacheTooSmallError as error:
                    kept = f"erk.prefetch with depth={self._depth} keeps the rows of {self._size} batches"
                    windows = [[self._wanted(each) for each in window]]
                    raise crowded(error, kept, prefetcher, windows, f" of {len(window)}") from error

    def _wanted(self, fetched: _PrefetchedRows) -> Wanted:
        """Return the ids of a batch by prefetcher, for tables that still exist."""
        tables = [reference() for reference in self._tables]
        return joined([(table, ids) for table, ids in zip(tables, fetched.ids, strict=True) if table is not None])

    @property
    def _size(self) -> int:
        """The number of batches whose rows a pass pins."""
        layers = [layer for reference in self._layers if (layer := reference()) is not None and layer.built]
        several = any(len(layer.handle.cells()) > 1 for layer in layers)
        return self._depth + 1 + (STRATEGY_AHEAD if several else 0)


def _release(window: Sequence[_PrefetchedRows]) -> None:
    for fetched in window:
        for pin in fetched.pins:
            pin.release()
