"""`TableStats`: a callback that logs numbers about the tables of a model."""

from __future__ import annotations

import operator
import os
from typing import Any

import keras
import tensorflow as tf

from embedrock.errors import ArgumentError
from embedrock.frontend.checkpoints import TableNumbers
from embedrock.keras.layers.row_layer import KerasRowLayer

# The marker of scalars for TensorBoard. (`tf.summary.scalar` needs TensorBoard itself, which TensorFlow does not
# install.)
_PLUGIN = tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars")
SCALAR = tf.compat.v1.SummaryMetadata(plugin_data=_PLUGIN, data_class=1)  # DATA_CLASS_SCALAR


class TableStats(keras.callbacks.Callback):
    """A callback that adds numbers about a model's tables to the logs of `fit`, during and after epochs.

    Their keys are ``"tables/<what>"``, for all tables together:

    - ``rows``: rows that were ever stepped, and so are stored;
    - ``ram_bytes``: RAM that the rows take now (for a table on disk, its cache and its index);

    if a table is on disk,

    - ``disk_bytes``: bytes of its files;
    - ``hit_rate``: fraction of the row requests of this epoch (or these batches) that were in the cache. A prefetched
      row counts as a miss, and then as a hit;
    - ``commit_age_s``: seconds since the last commit; of several tables, since the oldest of these commits;

    and with admission or eviction, ``admitted``, ``evicted``, ``gradients_dropped`` and ``gradients_shared``.

    All later callbacks in the list see them, and so do the progress bar and ``history``. Put it before
    `keras.callbacks.TensorBoard`, which then writes them as scalars, as ``epoch_tables/<what>``.

    Args:
        every: log also at the end of each n-th batch; None: at the end of epochs only.
        log_dir: a folder to write scalars to for TensorBoard, without its callback.
        per_table: log the numbers of each table instead, by the name of the first layer on it:
            ``"<name of the layer>/<what>"``.

    Raises:
        ArgumentError: `every` is not a number of batches.

    Example:
        >>> import keras, numpy as np, embedrock.keras as erk
        >>> layers = [erk.Embedding(10**9, 4, name="user"), keras.layers.Flatten()]
        >>> model = keras.Sequential([keras.Input((1,), dtype="int64"), *layers])
        >>> model.compile(optimizer=erk.optimizer("sgd"), loss="mse")
        >>> history = model.fit(np.array([[3], [14]]), np.zeros((2, 4)), callbacks=[erk.TableStats()], verbose=0)
        >>> history.history["tables/rows"]
        [2.0]
    """

    def __init__(
        self, every: int | None = None, log_dir: str | os.PathLike[str] | None = None, *, per_table: bool = False
    ) -> None:
        super().__init__()
        if every is not None and (not hasattr(every, "__index__") or isinstance(every, bool) or every < 1):
            raise ArgumentError(f"`every` of erk.TableStats must be a number of batches, or None: got {every!r}.")
        self._every = None if every is None else operator.index(every)
        self._log_dir = None if log_dir is None else os.fspath(log_dir)
        self._writer: Any = None
        self._batches, self._per_table = 0, per_table
        self._numbers = {"batch": TableNumbers(), "epoch": TableNumbers()}

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self._layers = [layer for layer in model._flatten_layers() if isinstance(layer, KerasRowLayer)]

    def on_train_begin(self, logs: Any = None) -> None:
        self._batches = 0
        for numbers in self._numbers.values():
            numbers.begin(layer.table for layer in self._layers)
        if self._log_dir is not None:
            self._writer = tf.summary.create_file_writer(self._log_dir)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches += 1
        if self._every is not None and self._batches % self._every == 0:
            self._log(logs, "batch", self._batches)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._log(logs, "epoch", epoch)

    def on_train_end(self, logs: Any = None) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _log(self, logs: Any, period: str, step: int) -> None:
        numbers = self._numbers[period].of([(layer.name, layer.table) for layer in self._layers], self._per_table)
        if logs is not None:
            logs.update(numbers)
        if self._writer is not None:
            with self._writer.as_default():
                for name, value in numbers.items():
                    tf.summary.write(f"{period}_{name}", value, step, SCALAR)
