"""`RowsVariable`: the proxy variable of rows, for tapes, for Keras' summaries and for its old files.

Guards of the TensorFlow variables behind it raise errors for reads and writes, which would not reach the rows.
"""

from __future__ import annotations

import contextvars
import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import custom_gradient

from embedrock.errors import ForgottenGradientsError, UnsupportedError
from embedrock.keras import callers
from embedrock.keras.training import host_calls
from embedrock.keras.training.slices import DENSE_WEIGHTS
from embedrock.table.table import rows_of

BEGIN_ANEW = (
    "For rows that begin anew make a new model, by keras.models.clone_model(model), or, where rows are on disk, with "
    "another path=."
)
# Error texts, for the name of a layer.
READING_REFUSED = (
    "something reads the variable that stands for the rows of {}, and would get zeros: a norm, a penalty, a "
    "picture of all weights. Leave it out: [v for v in model.trainable_variables if v is not layer.rows]. Rows are "
    "read by layer.table.lookup(ids); with gradients they are what the layer returns, all rows of a small table: "
    "layer(tf.range(n))."
)
WRITING_REFUSED = (
    "something writes to the variable that stands for the rows of {}, which would do nothing to them: an "
    "optimizer that cannot step rows, or set_weights. Compile with Embedrock's form of your optimizer, "
    'model.compile(optimizer=erk.optimizer("adam"), ...), which takes a name or an instance. Rows are written by '
    "layer.table.assign(ids, values), and saved and restored by model.save, save_weights and erk.TableCheckpoint. "
    f"{BEGIN_ANEW}"
)

may_read = contextvars.ContextVar("embedrock_may_read", default=False)  # guarded variables


class GuardedVariable:
    """A mixin of a proxy variable's TensorFlow class: it cannot be written to, or exported."""

    _embedrock_handle: weakref.ref[Any]
    _embedrock_label: str

    def _refuse_write(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ForgottenGradientsError(WRITING_REFUSED.format(self._embedrock_label))

    assign = assign_add = assign_sub = _strided_slice_assign = count_up_to = _refuse_write
    scatter_add = scatter_sub = scatter_mul = scatter_div = scatter_min = scatter_max = _refuse_write
    scatter_update = batch_scatter_update = _refuse_write
    scatter_nd_add = scatter_nd_sub = scatter_nd_min = scatter_nd_max = scatter_nd_update = _refuse_write

    def _export_to_saved_model_graph(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(
            f"a model with {self._embedrock_label} cannot be exported by model.export or tf.saved_model.save: what "
            "they write would look rows up in the memory of this process, and fail in every other. Use "
            "erk.export(model, folder)."
        )


class GuardedCell(GuardedVariable):
    """A variable that holds numbers. They say nothing about rows, so only `reading` allows reads."""

    _handle: Any

    def _read_variable_op(self: Any, no_copy: bool = False) -> Any:
        # Reads by model files, by lookups, and by TensorFlow's gradient functions, which record their variables.
        if no_copy or may_read.get() or _in_gradient_function("tensorflow."):
            return super()._read_variable_op(no_copy)  # pyright: ignore[reportAttributeAccessIssue]
        self._refuse_read()

    def _refuse_read(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(READING_REFUSED.format(self._embedrock_label))

    sparse_read = gather_nd = _refuse_read


class _HiddenResource:
    """A wrapper of a resource that TensorFlow's operations do not recognize."""

    def __init__(self, resource: tf.Tensor) -> None:
        self._resource = resource

    def __getattr__(self, name: str) -> Any:
        return getattr(self._resource, name)


def _handle_for_tapes(resource: Callable[[Any], Any]) -> property:
    """Return a `handle` property that gives a tape the proxy with the rows' gradient instead of the resource.

    A user's gradient function gets the resource itself. It returns TensorFlow's own gradients, to be added to others.
    """

    def handle(variable: Any) -> Any:
        if sys._getframe(1).f_code.co_name != "_handle_or_self" or (found := variable._embedrock_handle()) is None:
            return resource(variable)
        return resource(variable) if _in_gradient_function() else found.variable.handle

    return property(handle)


def _in_gradient_function(within: str = "") -> bool:
    """Return whether a user's gradient function is on the call stack.

    Args:
        within: prefix of modules. Frames beyond the first other module do not count.
    """
    frame = sys._getframe(2)
    while frame is not None and (name := frame.f_globals.get("__name__", "")).startswith(within):
        if name == custom_gradient.__name__:
            return True
        frame = frame.f_back
    return False


def _guard(kind: type, variable: Any, handle: Any) -> None:
    """Mark a TensorFlow variable as a handle's, and make it refuse actions that would not reach the rows."""
    variable.__class__ = _guarded(kind, type(variable))
    variable._embedrock_handle, variable._embedrock_label = weakref.ref(handle), handle.label


@functools.cache
def _guarded(kind: type, base: type) -> Any:
    """Return a TensorFlow class of variables with `GuardedVariable` or `GuardedCell` added."""
    more = {"__module__": base.__module__, "__doc__": base.__doc__, "handle": _handle_for_tapes(base.handle.fget)}
    if kind is GuardedCell:
        # Outside of programs, TensorFlow's operations read a resource directly, past all methods of the variable. They
        # ignore an object that is no resource, and call the variable for its value.
        hidden = property(lambda variable: _HiddenResource(variable.__dict__["_handle"]))
        more |= {"_handle": hidden, "handle": _handle_for_tapes(lambda variable: variable.__dict__["_handle"])}
    return type(base)(base.__name__, (kind, base), more)


class RowsVariable(keras.Variable):
    """A small proxy variable. Keras counts it as all weights of the rows, and its gradient is that of the rows."""

    def __init__(self, value: np.ndarray, handle: Any) -> None:
        # Programs keep variables longer than models.
        self._known, self._rows = host_calls.weakly_known(handle), weakref.ref(handle.table)
        self._label = self._embedrock_label = handle.label
        super().__init__(value, trainable=True, autocast=False, name="rows")
        cells = handle.strategy.experimental_local_results(self.value)
        for cell in cells:
            _guard(GuardedCell, cell, handle)
        if self.value is not cells[0]:  # it is made of the variables of several replicas
            _guard(GuardedVariable, self.value, handle)

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
        if (given := callers.local(callers.KERAS_LAYER, "set_weights", "value")) is not callers.MISSING:
            if hasattr(given, "put_back"):
                return given.shape
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

    def assign(self, value: Any) -> None:
        """Put rows back that `EarlyStopping` has kept. Refuse all other values."""
        if not hasattr(value, "put_back"):
            self._refuse(value)
        value.put_back()

    assign_add = assign_sub = _refuse = GuardedVariable._refuse_write
    __array__ = GuardedCell._refuse_read  # Keras' own does not take NumPy's `copy`, and reads nothing in a graph


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
