"""`RowsVariable`: the variable that stands for rows, as Keras' summaries and its files of old see it."""

from __future__ import annotations

import weakref
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from embedrock.errors import UnsupportedError
from embedrock.keras import callers
from embedrock.table.table import Table, rows_of


class RowsVariable(keras.Variable):
    """A small variable that Keras counts as all the weights that it stands for.

    Args:
        value: what it holds.
        table: whose rows it stands for.
        label: what error messages call the layer.
    """

    def __init__(self, value: np.ndarray, table: Table, label: str) -> None:
        self._rows, self._label = weakref.ref(table), label  # programs keep variables longer than models
        super().__init__(value, trainable=True, autocast=False, name="rows")

    @property
    def shape(self) -> Any:
        """Its own shape; of all rows where Keras asks for it to count weights, or to tell how much room they take."""
        if any(callers.local(callers.KERAS_SUMMARY, asking, "weights") is not callers.MISSING for asking in _COUNTING):
            return self._shape_of_rows()
        if callers.local(callers.KERAS_LEGACY, "_set_weights", "skip_mismatch") is False:
            raise UnsupportedError(
                f"the rows of {self._label} cannot be loaded from the legacy .h5 format, which holds none. Build the "
                "model that was saved, with keras.layers.Embedding, load the file into it, and make this layer by "
                "from_pretrained(weights) of that one's."
            )
        if callers.local(callers.KERAS_LAYER, "set_weights", "weights") is not callers.MISSING:
            raise UnsupportedError(
                f"set_weights cannot set the rows of {self._label}, which are in no list of arrays. Write rows by "
                "layer.table.assign(ids, values), or make the layer by from_pretrained(weights)."
            )
        return super().shape

    def _shape_of_rows(self) -> Any:
        """Return the shape of a variable that has all rows; of open ids, those that were stepped so far."""
        table = self._rows()
        if table is None or rows_of(table).is_closed:
            return super().shape
        rows = int(table.stats()["rows_touched"]) if table.rows is None else table.rows
        return tf.TensorShape([rows, table.dim])


_COUNTING = ("count_params", "weight_memory_size")
