"""`prefetch` for `tf.data`: rows that coming batches need are brought up from disk while others are trained on."""

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

from embedrock.errors import ArgumentError, CacheTooSmallError, IdError, UnsupportedError, counted
from embedrock.frontend.batch_ids import asked_by_table
from embedrock.keras.layers.row_layer import KerasRowLayer
from embedrock.keras.training.lookup import checked_ids
from embedrock.storage.backend import Pin
from embedrock.system.sizes import format_bytes
from embedrock.system.spans import span
from embedrock.table.prefetch import Prefetcher, Wanted, joined, of_bringer
from embedrock.table.table import Table

EXAMPLE = 'Pass, for example, {layer: lambda x, y: x["user"]}.'
# Global batches that `experimental_distribute_dataset`, and so `fit`, takes ahead of the step under a strategy of
# several replicas: one in its own prefetch, two in its iterator (seen with TensorFlow 2.21).
STRATEGY_AHEAD = 3


def prefetch(dataset: tf.data.Dataset, ids_of: Mapping[Any, Callable[..., Any]], depth: int = 2) -> tf.data.Dataset:
    """Return `dataset` with the rows that its next batches need read from disk ahead of time.

    Its batches are the same, and so is every bit of what is trained on them: values of rows are still looked up in the
    step. `fit`, `evaluate` and `predict` take it, and so do loops of one's own, with or without a
    `tf.distribute.MirroredStrategy`. It prefetches the batches as well: call it last. For tables in RAM it does only
    that.

    Args:
        dataset: of batches.
        ids_of: for each layer (or table), a function that returns the ids that a batch looks up in it: a dense, ragged
            or sparse tensor of integers, or a list, tuple or dict of these. It is traced (without AutoGraph), and
            called with what a function for `Dataset.map` is called with. Ids that it leaves out are read when they are
            looked up.
        depth: how many batches to look ahead; the cache must hold the rows of ``depth + 1`` global batches, of
            ``depth + 4`` where a strategy has several replicas. 0: not at all.

    Raises:
        ArgumentError: an argument that cannot work.
        IdTypeError: a function returns something else than integers.
        UnsupportedError: it is called inside of a `tf.function`.

    The loop gets a TensorFlow error with the text of a `CacheTooSmallError` where the tables' `memory` cannot hold the
    rows of so many batches.

    Example:
        >>> import numpy as np, tensorflow as tf, embedrock.keras as erk
        >>> emb = erk.Embedding(10**9, 4)
        >>> dataset = tf.data.Dataset.from_tensor_slices({"user": np.arange(6)}).batch(3)
        >>> [tuple(emb(x["user"]).shape) for x in erk.prefetch(dataset, {emb: lambda x: x["user"]})]
        [(3, 4), (3, 4)]
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise ArgumentError(f"`dataset` of erk.prefetch must be a tf.data.Dataset: got {dataset!r}.")
    asked = _by_table(ids_of)
    if isinstance(depth, bool) or not hasattr(depth, "__index__") or operator.index(depth) < 0:
        raise ArgumentError(f"`depth` of erk.prefetch must be a whole number of batches, 0 or more: got {depth!r}.")
    if not tf.executing_eagerly():
        raise UnsupportedError(
            "erk.prefetch must be called outside of tf.function. Pass it the dataset as an argument."
        )
    if depth == 0:
        return dataset
    on_disk = {table: part for table, part in asked.items() if table.is_on_disk}
    return _ahead(dataset, on_disk, operator.index(depth)) if on_disk else dataset.prefetch(depth)


class _LayerIds(NamedTuple):
    """A layer (or table), and what gives the ids that a batch looks up in it."""

    layer: Any
    ids_of: Callable[..., Any]

    @property
    def label(self) -> str:
        return self.layer.label if isinstance(self.layer, KerasRowLayer) else repr(self.layer)


def _by_table(ids_of: Any) -> dict[Table, list[_LayerIds]]:
    asked = asked_by_table("erk.prefetch", ids_of, KerasRowLayer, EXAMPLE)
    if not asked:
        raise ArgumentError(f"`ids_of` of erk.prefetch must be a dict from layers to functions: got {{}}. {EXAMPLE}")
    return {table: [_LayerIds(*part) for part in parts] for table, parts in asked.items()}


def _ahead(dataset: tf.data.Dataset, asked: dict[Table, list[_LayerIds]], depth: int) -> tf.data.Dataset:
    """Return `dataset`, of which `depth` batches wait for the loop with their rows in the caches of these tables."""
    passes = _Passes(asked, depth)

    @tf.autograph.experimental.do_not_convert  # it wraps errors, and warns of several lambdas in a line
    def begin(number: tf.Tensor) -> tf.data.Dataset:
        @tf.autograph.experimental.do_not_convert
        def bring(*batch: Any) -> Any:
            ids = [_joined(part, batch) for part in asked.values()]
            tf.numpy_function(passes.bring, [number, *ids], [])
            return batch if isinstance(dataset.element_spec, tuple) else batch[0]

        return dataset.map(bring).prefetch(depth)

    # A generator of one number for each pass through the dataset, which TensorFlow closes when the pass has handed out
    # its last batch, or its iterator is gone: by a break, an error, or at the end of an epoch.
    numbers = tf.data.Dataset.from_generator(passes.open, output_signature=tf.TensorSpec((), tf.int64))
    made = numbers.flat_map(begin)  # pyright: ignore[reportArgumentType]  # it takes a generator for its numbers
    if dataset.cardinality() != tf.data.UNKNOWN_CARDINALITY:
        made = made.apply(tf.data.experimental.assert_cardinality(dataset.cardinality()))
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False  # it would go further ahead than was asked for
    return made.with_options(dataset.options().merge(options))


def _joined(asked: Sequence[_LayerIds], batch: tuple[Any, ...]) -> tf.Tensor:
    """Return the ids, int64 (n,), that a batch looks up in one table."""
    parts = []
    for one in asked:
        for ids in tf.nest.flatten(one.ids_of(*batch)):
            flat = tf.reshape(checked_ids(_values(ids), one.label), [-1])
            parts.append(tf.cast(flat, tf.int64))
    return tf.concat(parts, 0)


def _values(ids: Any) -> Any:
    if isinstance(ids, tf.RaggedTensor):
        return ids.flat_values
    return ids.values if isinstance(ids, tf.SparseTensor) else ids


class _PrefetchedRows(NamedTuple):
    """The rows of one batch: ids and tickets, by table."""

    ids: list[np.ndarray]
    pins: list[Pin]


class _Passes:
    """The passes through a dataset that are under way, and the rows that each of them keeps in the caches.

    A pass keeps the rows of the batch that the loop has, and of those after it. It counts: `depth` batches wait, so
    when the next one is asked for, the one that came ``depth + 1`` before it is done with.

    TensorFlow never forgets a function of Python that it calls, and so not what is here: tables and layers must be
    able to go.
    """

    def __init__(self, asked: dict[Table, list[_LayerIds]], depth: int) -> None:
        self._tables = [weakref.ref(table) for table in asked]
        layers = [one.layer for part in asked.values() for one in part]
        self._layers = [weakref.ref(layer) for layer in layers if isinstance(layer, KerasRowLayer)]
        self._depth = depth
        self._numbers = itertools.count()
        self._windows: dict[int, deque[_PrefetchedRows]] = {}

    def open(self) -> Iterator[int]:
        """Yield the number of a new pass; when closed, let its rows go."""
        number = next(self._numbers)
        self._windows[number] = deque()
        try:
            yield number
        finally:
            # In a thread of its own: garbage collection may end a pass inside of a call that holds a table.
            with contextlib.suppress(RuntimeError):  # Python is ending, and the tables with it
                threading.Thread(target=_release, args=(self._windows.pop(number),), daemon=True).start()

    def bring(self, number: np.ndarray, *ids: np.ndarray) -> None:
        """Bring up the rows of a batch.

        Args:
            number: of the pass.
            ids: (n,) for each table.
        """
        window = self._windows[int(number)]
        while len(window) >= self._size:
            _release([window.popleft()])
        brought = _PrefetchedRows([part.copy() for part in ids], [])  # TensorFlow will use their memory again
        window.append(brought)
        with span("fetch"):
            for bringer, part in self._wanted(brought):
                try:
                    brought.pins.append(bringer.bring(part))
                except IdError:
                    return  # of which the layer will tell when it looks them up
                except CacheTooSmallError as error:
                    raise self._explained(error, window, bringer) from error

    def _wanted(self, brought: _PrefetchedRows) -> Wanted:
        """Return the ids of a batch by who brings their rows, as far as there are tables."""
        tables = [reference() for reference in self._tables]
        return joined([(table, ids) for table, ids in zip(tables, brought.ids, strict=True) if table is not None])

    @property
    def _size(self) -> int:
        """How many batches a pass keeps the rows of."""
        layers = [layer for reference in self._layers if (layer := reference()) is not None and layer.built]
        several = any(len(layer.handle.cells()) > 1 for layer in layers)
        return self._depth + 1 + (STRATEGY_AHEAD if several else 0)

    def _explained(
        self, error: CacheTooSmallError, window: Sequence[_PrefetchedRows], bringer: Prefetcher
    ) -> CacheTooSmallError:
        """Say how much memory the batches of a window need of who could not bring up the last one's rows."""
        rows, memory = bringer.room_for(of_bringer(bringer, [self._wanted(brought) for brought in window]))
        return CacheTooSmallError(
            f"{error} erk.prefetch with depth={self._depth} keeps the rows of {self._size} batches in the cache at "
            f"once, here {counted(rows, 'row')} of {len(window)}: memory={memory} ({format_bytes(memory)}) is "
            "enough for them, and a lower `depth` needs less."
        )


def _release(window: Sequence[_PrefetchedRows]) -> None:
    for brought in window:
        for pin in brought.pins:
            pin.release()
