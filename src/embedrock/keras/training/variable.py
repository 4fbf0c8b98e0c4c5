"""`RowsVariable`: the proxy variable of rows, for tapes, for Keras' summaries and for its old files."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from embedrock.errors import UnsupportedError
from embedrock.keras import callers
from embedrock.keras.training import host_calls
from embedrock.keras.training.guards import READING_REFUSED, WRITING_REFUSED
from embedrock.keras.training.pending import ForgottenGradientsError
from embedrock.keras.training.slices import DENSE_WEIGHTS
from embedrock.table.table import rows_of


class RowsVariable(keras.Variable):
    """A small proxy variable. Keras counts it as all weights of the rows, and its gradient is that of the rows.

    Args:
        value: the variable's own value.
        handle: the handle that owns the variable.
    """

    def __init__(self, value: np.ndarray, handle: Any) -> None:
        # Programs keep variables longer than models.
        self._known, self._rows = host_calls.weakly_known(handle), weakref.ref(handle.table)
        self._label = handle.label
        super().__init__(value, trainable=True, autocast=False, name="rows")

    @property
    def shape(self) -> Any:
        """The variable's shape for Keras and TensorFlow. Others, and counts of weights, get the shape of all rows."""
        if not sys._getframe(1).f_globals.get("__name__", "").startswith(_OWN_SHAPE):
            return self._shape_of_rows()
        if any(callers.local(*asking) is not callers.MISSING for asking in _ABOUT_ROWS):
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
        """Return the shape of all rows; for open ids, of the rows that were stepped so far."""
        table = self._rows()
        if table is None or rows_of(table).is_closed:
            return super().shape
        rows = int(table.stats()["rows_touched"]) if table.rows is None else table.rows
        return tf.TensorShape([rows, table.dim])

    @property
    def handle(self) -> Any:
        """The source that a tape uses in place of the variable."""
        return _RowsResource(self.value.handle, self._known)

    def _refuse_write(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ForgottenGradientsError(WRITING_REFUSED.format(self._label))

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        """Return all rows for the histograms of `keras.callbacks.TensorBoard`, unless they are too many."""
        if callers.local(callers.KERAS_TENSORBOARD, "_log_weights", "weight") is not self:
            raise UnsupportedError(READING_REFUSED.format(self._label))
        table = self._rows()
        if table is None or table.rows is None or table.rows * table.dim > DENSE_WEIGHTS:
            raise UnsupportedError(
                f"TensorBoard(histogram_freq=...) pictures all weights, and {self._label} has too many. Leave it out, "
                "or write tf.summary.histogram of layer.table.lookup(ids) in a callback of your own."
            )
        return tf.constant(table.lookup(np.arange(table.rows)))

    assign = assign_add = assign_sub = _refuse_write


_OWN_SHAPE = ("keras.", "tensorflow.", "embedrock.")  # modules that make, read and save the variable itself

# Callers that need the shape of the rows: modules, functions, and their variables.
_ABOUT_ROWS = (
    (callers.KERAS_SUMMARY, "count_params", "weights"),
    (callers.KERAS_SUMMARY, "weight_memory_size", "weights"),
    (callers.TF_TAPE, "jacobian", "flat_sources"),
)


class _RowsResource(tf.__internal__.CompositeTensor):
    """The resource of a proxy variable. A tape converts the gradient that it has found through it."""

    def __init__(self, resource: tf.Tensor, known: Callable[[], Any]) -> None:
        self.resource, self.known = resource, known

    @property
    def __composite_gradient__(self) -> _RowsResource:
        """TensorFlow's protocol for gradients of composite tensors, which is the next two methods."""
        return self

    def get_gradient_components(self, value: _RowsResource) -> tf.Tensor:
        """Return the tensor that the tape watches."""
        return value.resource

    def replace_gradient_components(self, value: _RowsResource, component_grads: tf.Tensor) -> tf.IndexedSlices:
        """Return the gradient of the rows for the gradient of the watched tensor."""
        return value.known().gradient(component_grads)

    @property
    def _type_spec(self) -> Any:
        raise NotImplementedError("no function of TensorFlow takes or returns one")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.resource, name)
