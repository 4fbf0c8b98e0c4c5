"""Guards of the TensorFlow variables behind a handle: errors for reads and writes, which would not reach the rows."""

from __future__ import annotations

import contextvars
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import tensorflow as tf
from tensorflow.python.ops import custom_gradient

from embedrock.errors import UnsupportedError
from embedrock.keras.training.pending import ForgottenGradientsError

BEGIN_ANEW = (
    "For rows that begin anew make a new model, by keras.models.clone_model(model), or, where rows are on disk, with "
    "another path=."
)

_may_read = contextvars.ContextVar("embedrock_may_read", default=False)


def guard(variable: Any, handle: Any, label: str, *, is_cell: bool) -> None:
    """Mark a TensorFlow variable as a handle's, and make it refuse actions that would not reach the rows.

    Args:
        variable: a variable of TensorFlow.
        handle: its handle. The variable does not keep it alive.
        label: name of the layer in error messages.
        is_cell: it holds numbers itself, and is not made of the variables of several replicas.
    """
    variable.__class__ = _guarded(GuardedCell if is_cell else GuardedVariable, type(variable))
    variable._embedrock_handle, variable._embedrock_label = weakref.ref(handle), label


@contextmanager
def reading() -> Iterator[None]:
    """Allow reads of guarded variables."""
    token = _may_read.set(True)
    try:
        yield
    finally:
        _may_read.reset(token)


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
        if no_copy or _may_read.get() or _in_gradient_function("tensorflow."):
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
