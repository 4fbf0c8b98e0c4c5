"""`RowSlices`: the gradient of rows that a tape returns."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, Union

import keras
import numpy as np
import tensorflow as tf

from embedrock.batch.gradients import RowGradients
from embedrock.batch.plan import make_plan
from embedrock.errors import ForgottenGradientsError, UnsupportedError
from embedrock.keras import callers
from embedrock.keras.training import host_calls
from embedrock.keras.training.pending import PendingGradients

# A gradient of at most this many weights (64 MiB) becomes a dense tensor if an operation needs one.
DENSE_WEIGHTS = 1 << 24

_tf: Any = tf  # TensorFlow's stubs lack its dispatched functions


class TableShape(tuple[int | None, int]):
    """The shape of all rows; None rows for open ids.

    Attributes:
        check: returns, in a program, a check that fails after the table has grown.
    """

    check: Callable[[], list[Any]] | None = None

    def checks(self) -> list[Any]:
        """Return, in a program, the check before a dense tensor is made, which has no place for new rows."""
        return [] if self.check is None or tf.executing_eagerly() else self.check()


Pair = tuple[tf.Tensor, tf.Tensor]  # values and indices
# TensorFlow's dispatch knows no other kind of union.
Scalar = Union[int, float, np.ndarray, np.generic, tf.Tensor, tf.Variable, keras.Variable]  # noqa: UP007


class RowSlices(tf.IndexedSlices):
    """The gradient of a table's rows: the sum for each row that has any.

    It is a `tf.IndexedSlices` with unique indices, so TensorFlow's norms and clipping are right. It supports sums,
    scaling by numbers, and all elementwise functions that map zero to zero. An operation that needs a dense tensor gets
    one up to `DENSE_WEIGHTS` weights; otherwise it raises an error.

    Args:
        values: float32 (n, dim).
        indices: the rows' ids, int64 (n,), each once.
        table_shape: shape of all rows.
    """

    __array_ufunc__ = None  # NumPy's arrays leave operators to it

    def __init__(self, values: tf.Tensor, indices: tf.Tensor, table_shape: TableShape) -> None:
        super().__init__(values, indices)
        self.table_shape = table_shape

    @property
    def values(self) -> tf.Tensor:
        _check_who_asks()
        return super().values

    def with_values(self, values: tf.Tensor) -> RowSlices:
        """Return other values for the same rows."""
        return RowSlices(values, self.indices, self.table_shape)

    @property
    def shape(self) -> tf.TensorShape:
        return tf.TensorShape(self.table_shape)

    @property
    def dense_shape(self) -> tf.Tensor | None:
        """The shape as a tensor; None if it is too large for a dense tensor."""
        if self.may_be_dense:
            return _tf.constant(self.table_shape, tf.int64)
        if any(callers.local(callers.KERAS_SPARSE, *asking) is not callers.MISSING for asking in _OF_ALL_ROWS):
            raise _refused_as_dense(self.table_shape)
        return None

    @property
    def may_be_dense(self) -> bool:
        rows, dim = self.table_shape
        return rows is not None and rows * dim <= DENSE_WEIGHTS

    @property
    def _type_spec(self) -> RowSlicesSpec:
        return RowSlicesSpec(self.table_shape, tf.float32, tf.int64, None, [None])

    def sent(self) -> list[tf.Tensor]:
        """Return the tensors for a step of the rows: values and indices, or a token of gradients that wait there."""
        return [self.values, self.indices]

    def __repr__(self) -> str:
        return f"<RowSlices of shape {self.table_shape}>"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the gradient of all rows, outside of a program, if it may become dense."""
        return np.array(tf.convert_to_tensor(self), dtype)

    def __add__(self, other: Any) -> Any:
        """Return the sum, row by row; of 0 as well, the start of `sum`."""
        if isinstance(other, (int, float)) and other == 0:
            return self
        return _operator(_tf.add)(self, other) if isinstance(other, _OPERANDS) else NotImplemented

    __radd__ = __add__

    def __neg__(self) -> RowSlices:
        return self.with_values(-self.values)

    def __abs__(self) -> RowSlices:
        return self.with_values(abs(self.values))

    def __len__(self) -> int:
        """Return the number of rows in the gradient of all rows."""
        rows = self.table_shape[0]
        if rows is None:
            raise TypeError("the gradient of rows with open ids has no length: len(gradient.indices) counts its rows.")
        return rows


def _operator(function: Any, is_reflected: bool = False) -> Callable[[RowSlices, Any], Any]:
    def operate(self: RowSlices, other: Any) -> Any:
        if isinstance(other, tf.IndexedSlices) and not isinstance(other, RowSlices):
            other = sum_of([other], self.table_shape)
        return function(other, self) if is_reflected else function(self, other)

    return operate


_OPERATORS = {
    "sub": _tf.subtract,
    "mul": _tf.multiply,
    "truediv": _tf.divide,
    "pow": _tf.pow,
    "mod": _tf.math.floormod,
    "floordiv": _tf.math.floordiv,
}
_COMPARISONS = {"lt": _tf.less, "le": _tf.less_equal, "gt": _tf.greater, "ge": _tf.greater_equal}
for _name, _function in _OPERATORS.items():
    setattr(RowSlices, f"__{_name}__", _operator(_function))
    setattr(RowSlices, f"__r{_name}__", _operator(_function, is_reflected=True))
for _name, _function in _COMPARISONS.items():
    setattr(RowSlices, f"__{_name}__", _operator(_function))

_OPERANDS = (int, float, tf.IndexedSlices, tf.Tensor, tf.Variable, keras.Variable, np.ndarray)


def _check_who_asks() -> None:
    """Raise an error if the caller that reads the values does not support rows."""
    frame = sys._getframe(2)
    while frame is not None:
        asking = frame.f_locals.get("self") if frame.f_code.co_name == "update_step" else None
        if isinstance(asking, keras.optimizers.Optimizer):  # our optimizers skip gradients of rows here
            raise ForgottenGradientsError(
                f"{type(asking).__name__} cannot step rows of Embedrock's layers. Compile with Embedrock's form of "
                'your optimizer, model.compile(optimizer=erk.optimizer("adam"), ...): it takes a name or an instance.'
            )
        if frame.f_globals.get("__name__", "").startswith(_OF_REPLICAS):
            raise UnsupportedError(
                "the gradients of rows of several replicas cannot be reduced by all_reduce, which would leave repeated "
                "rows and a wrong norm. Leave it out: the optimizer sums them, as it does those of all variables."
            )
        frame = frame.f_back


# Functions and variables behind those of `keras.ops` that make a tensor of all rows.
_OF_ALL_ROWS = (("indexed_slices_union_indices_and_values", "x1"), ("sparse_wrapper", "default_value"))
_OF_REPLICAS = "tensorflow.python.distribute.cross_device"


class RowSlicesSpec(tf.IndexedSlicesSpec):
    """The type spec with which TensorFlow passes `RowSlices` to functions and back."""

    value_type = property(lambda self: RowSlices)

    def _to_components(self, value: RowSlices) -> Pair:
        return value.values, value.indices

    def _from_components(self, tensor_list: Pair) -> RowSlices:
        return RowSlices(*tensor_list, TableShape(self._shape.as_list()))


class LazyRowSlices(RowSlices):
    """A gradient that stays with the rows until it is stepped or read.

    Args:
        token: token of the waiting gradient.
        pending: the waiting gradients of the table.
        read: returns values and indices of a token, in a program.
        table_shape: shape of all rows.
    """

    def __init__(
        self, token: tf.Tensor, pending: PendingGradients, read: Callable[[tf.Tensor], Pair], table_shape: TableShape
    ) -> None:
        self._token, self.pending, self._read, self.table_shape = token, pending, read, table_shape
        self._was_sent, self._dense_shape = False, None
        self._graph = tf.compat.v1.get_default_graph()
        self._found: Pair | None = None

    def sent(self) -> list[tf.Tensor]:
        """Return the tensors for a step of the rows: values and indices, or a token of gradients that wait there.

        A token stands for one step. In a loop, or in another function, several steps may use the gradient.
        """
        if self._found is not None or not host_calls.runs_at_most_once_in(self._graph):
            return super().sent()
        self.pending.outlives_steps |= self._was_sent
        self._was_sent = True
        return [self._token]

    def _pair(self) -> Pair:
        if self._found is None:
            self.pending.outlives_steps |= self._was_sent
            is_inside = self._graph in host_calls.graphs_around()
            with self._graph.as_default() if is_inside else contextlib.nullcontext():  # otherwise TensorFlow raises it
                found = self._read(self._token)
            if not is_inside:
                return found
            self._found = found
        return self._found

    @property
    def _values(self) -> tf.Tensor:
        return self._pair()[0]

    @property
    def _indices(self) -> tf.Tensor:
        return self._pair()[1]


# ---------------------------------------------------------------- sums

TYPES = [tf.float32, tf.int64]  # of values and indices
INSTEAD = "It is on the host, where the rows are. Differentiate with respect to the layer's output instead."
ONCE = f"the gradient of a gradient of rows cannot be computed. {INSTEAD}"


def shaped(made: list[tf.Tensor], dim: int) -> Pair:
    """Return values and indices of a host call, with their static shapes."""
    values, indices = made
    values.set_shape([None, dim])
    indices.set_shape([None])
    return values, indices


def sum_of(slices: Sequence[tf.IndexedSlices], table_shape: TableShape) -> RowSlices:
    """Return the sum of several gradients of rows. Indices may repeat, also in one of them."""

    def summed(*parts: tf.Tensor) -> list[tf.Tensor]:
        return host_calls.call(_sum_arrays, parts, TYPES, functions=[])

    pairs = [(tf.cast(each.values, tf.float32), tf.cast(each.indices, tf.int64)) for each in slices]
    made = host_calls.once_differentiable(summed, ONCE)(*(part for pair in pairs for part in pair))
    return RowSlices(*shaped(made, table_shape[1]), table_shape)


def _sum_arrays(*parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    summed = RowGradients.sum(make_plan(np.concatenate(parts[1::2])), np.concatenate(parts[::2]))
    return summed.values, summed.plan.ids


# ---------------------------------------------------------------- TensorFlow's functions


def _refused_as_dense(table_shape: TableShape) -> UnsupportedError:
    rows, dim = table_shape
    all_rows = "any id" if rows is None else f"{rows:,} rows"
    return UnsupportedError(
        f"a gradient of rows cannot become a dense tensor for {all_rows} of {dim} weights, which this operation "
        "needs. Use one that goes without (docs/keras.md lists them), or change the values of the rows of the "
        "batch: gradient.with_values(f(gradient.values)), one row for each of gradient.indices."
    )


def _dense(slices: RowSlices, dtype: Any = None, name: str | None = None, as_ref: bool = False) -> tf.Tensor:
    if not slices.may_be_dense:
        raise _refused_as_dense(slices.table_shape)
    with tf.control_dependencies(slices.table_shape.checks()):
        values = tf.identity(slices.values)
    rows = slices.table_shape[0]
    return tf.cast(tf.math.unsorted_segment_sum(values, slices.indices, rows), dtype or tf.float32, name)


tf.register_tensor_conversion_function(RowSlices, _dense, priority=50)  # before that of tf.IndexedSlices


def _leaves_zero(function: Callable[[tf.Tensor], Any]) -> bool | None:
    """Return whether an elementwise function maps zero to zero; None if only a run of the program can show it."""
    with tf.init_scope():
        try:
            out = function(tf.zeros((1, 1)))
        except (TypeError, ValueError):  # it uses tensors of the program that is being traced
            return None
        return bool(out.dtype == tf.float32 and out.shape == (1, 1) and tf.reduce_all(tf.equal(out, 0.0)))


def _map(slices: RowSlices, function: Callable[[tf.Tensor], Any]) -> Any:
    """Apply an elementwise function. If it maps zero elsewhere, apply it to the gradient of all rows."""
    leaves_zero = _leaves_zero(function)
    if leaves_zero is None:
        told = "a function of a gradient of rows must leave zero as it is: most rows have none."
        with tf.control_dependencies([tf.debugging.assert_equal(function(tf.zeros((1, 1))), 0.0, told)]):
            return slices.with_values(tf.identity(function(slices.values)))
    return slices.with_values(function(slices.values)) if leaves_zero else function(tf.convert_to_tensor(slices))


@tf.experimental.dispatch_for_unary_elementwise_apis(RowSlices)
def _unary(function: Any, x: Any) -> Any:
    return _map(x, function)


@tf.experimental.dispatch_for_binary_elementwise_apis(RowSlices, RowSlices)
def _of_two(function: Any, x: Any, y: Any) -> Any:
    if function.__name__ not in ("add", "subtract"):
        return function(tf.convert_to_tensor(x), tf.convert_to_tensor(y))
    shape = max(x.table_shape, y.table_shape, key=lambda shape: shape[0] or 0)  # the table may have grown in between
    return sum_of([x, -y if function.__name__ == "subtract" else y], shape)


# Binary functions that map zero as first argument to zero, for any number. (If that is NaN or Inf, the rows of the
# batch get NaN, and no step.)
_SCALING = ("multiply", "multiply_no_nan", "divide", "truediv", "div", "div_no_nan", "realdiv", "scalar_mul")


@tf.experimental.dispatch_for_binary_elementwise_apis(RowSlices, Scalar)
def _by_scalar(function: Any, x: Any, y: Any) -> Any:
    if function.__name__ in _SCALING and _is_scalar(y):
        return x.with_values(function(x.values, y))
    return _map(x, lambda values: function(values, y)) if _is_scalar(y) else function(tf.convert_to_tensor(x), y)


@tf.experimental.dispatch_for_binary_elementwise_apis(Scalar, RowSlices)
def _of_scalar(function: Any, x: Any, y: Any) -> Any:
    if function.__name__ == "multiply" and _is_scalar(x):
        return y.with_values(function(x, y.values))
    return _map(y, lambda values: function(x, values)) if _is_scalar(x) else function(x, tf.convert_to_tensor(y))


Mixed = list[Union[tf.Tensor, RowSlices, None]]  # noqa: UP007


def _is_scalar(given: Any) -> bool:
    """Return whether something is one number, for all weights alike."""
    shape = tf.TensorShape(getattr(given, "shape", ()))
    return shape.rank in (0, 1, 2) and shape.num_elements() == 1


@tf.experimental.dispatch_for_api(tf.add_n, {"inputs": list[Union[RowSlices, tf.IndexedSlices]]})  # noqa: UP007
def _add_n(inputs: Any, name: str | None = None) -> Any:
    shape = next((each.table_shape for each in inputs if isinstance(each, RowSlices)), None)
    return NotImplemented if shape is None else sum_of(inputs, shape)


@tf.experimental.dispatch_for_api(tf.clip_by_norm, {"t": RowSlices})
def _clip_by_norm(t: Any, clip_norm: Any, axes: Any = None, name: str | None = None) -> RowSlices:
    return t.with_values(tf.clip_by_norm(t.values, clip_norm, axes, name))


@tf.experimental.dispatch_for_api(tf.clip_by_global_norm, {"t_list": Mixed})
def _clip_by_global_norm(t_list: Any, clip_norm: Any, use_norm: Any = None, name: str | None = None) -> Any:
    if not any(isinstance(each, RowSlices) for each in t_list):
        return NotImplemented
    values = [each.values if isinstance(each, RowSlices) else each for each in t_list]
    clipped, norm = tf.clip_by_global_norm(values, clip_norm, use_norm, name)
    both = zip(t_list, clipped, strict=True)
    return [each.with_values(c) if isinstance(each, RowSlices) else c for each, c in both], norm


@tf.experimental.dispatch_for_api(tf.reduce_sum, {"input_tensor": RowSlices})
def _reduce_sum(input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None) -> tf.Tensor:
    summed = input_tensor.values if axis is None and not keepdims else tf.convert_to_tensor(input_tensor)
    return tf.reduce_sum(summed, axis, keepdims, name)


@tf.experimental.dispatch_for_api(tf.norm, {"tensor": RowSlices})
def _norm(
    tensor: Any,
    ord: Any = "euclidean",  # noqa: A002
    axis: Any = None,
    keepdims: Any = None,
    name: str | None = None,
) -> tf.Tensor:
    if axis is not None or keepdims:
        return tf.norm(tf.convert_to_tensor(tensor), ord, axis, keepdims, name)
    return tf.norm(tf.reshape(tensor.values, [-1]), ord, name=name)
