"""Calls of the host from TensorFlow's programs, and their names in its traces."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_v2_func_graphs as control_flow
from tensorflow.python.ops.resource_variable_ops import ResourceVariable
from tensorflow.python.profiler import trace
from tensorflow.python.util import tf_stack

from embedrock.errors import EmbedrockError, UnsupportedError
from embedrock.system.spans import PREFIX, trace_by

# XLA names the operation that it cannot compile.
NAME = "embedrock_rows_need_jit_compile_False"


class GoneError(EmbedrockError, RuntimeError):
    """A program that outlived the layers whose rows it uses."""


# TensorFlow's modules that make an operation.
_MAKING = tuple(
    f"tensorflow.python.{name}"
    for name in ("util.dispatch", "ops.script_ops", "ops.gen_script_ops", "framework.op_def_library")
)
GONE = "a tf.function looks up rows of layers that are gone. Keep the model for as long as functions that call it."
T = TypeVar("T")


def call(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    dtypes: Any,
    *,
    functions: list[Callable[..., Any]],
    stateful: bool = True,
) -> list[tf.Tensor]:
    """Call a function of arrays on the host; return its outputs as tensors.

    TensorFlow keeps a function that a program calls for ever, and with it the tables behind it. So a program gets a
    wrapper with a weak reference to the function.

    Args:
        function: a function of arrays.
        inputs: tensors.
        dtypes: dtypes of the outputs.
        functions: a list that keeps the functions of programs. It belongs to an object that must outlive them: a
            `TableHandle`.
        stateful: calls run one after the other, in the order of the program.
    """
    if tf.executing_eagerly():
        return tf.nest.flatten(tf.numpy_function(function, inputs, dtypes))  # a single output comes without its list

    def operation(called: Callable[..., Any]) -> Any:
        return tf.numpy_function(called, inputs, dtypes, stateful=stateful, name=NAME)

    return in_program(operation, function, functions)


def in_program(
    operation: Callable[[Callable[..., Any]], Any], function: Callable[..., Any], functions: list[Callable[..., Any]]
) -> list[tf.Tensor]:
    """Return the output tensors of an operation that calls a function in a program: see `call`."""
    functions.append(function)
    with _Frameless():
        return tf.nest.flatten(operation(_weakly(function)))


class _Frameless(tf_stack.StackTraceFilter):
    """A filter that removes the stack trace of an operation.

    TensorFlow prints the trace first in every error, before the layer's name: tens of lines about Keras and TensorFlow.
    """

    def get_filtered_filenames(self) -> frozenset[str]:
        """Return the files of all functions on the call stack, and of those that make an operation."""
        making = {str(sys.modules[name].__file__) for name in _MAKING if name in sys.modules}
        calling = {frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe())}
        return self.parent.get_filtered_filenames() | making | calling


@functools.cache
def _order() -> Any:
    """Return the variable that orders lookups among steps. No strategy mirrors it."""
    with tf.init_scope(), tf.device("/CPU:0"):
        return ResourceVariable(0.0, trainable=False, name="embedrock_order")


def after_earlier_steps(after: Sequence[tf.Tensor] = ()) -> list[tf.Tensor]:
    """Return, in a program, a read that waits for `after` and the steps before it; later steps wait for the read.

    TensorFlow never moves a write to a variable before an earlier read, or a read before an earlier write.
    """
    if tf.executing_eagerly() or tf.distribute.get_replica_context() is None:  # eager, or a symbolic build
        return []
    with tf.control_dependencies(after):
        return [tf.raw_ops.ReadVariableOp(resource=_order().handle, dtype=tf.float32)]


def after_earlier_lookups() -> list[tf.Operation]:
    """Return, in a program, a write that waits for the lookups before it; later lookups wait for the write."""
    if tf.executing_eagerly():
        return []
    return [tf.raw_ops.AssignAddVariableOp(resource=_order().handle, value=0.0)]


def once_differentiable(function: Callable[..., list[tf.Tensor]], refusal: str) -> Callable[..., Any]:
    """Return a function of tensors whose derivative raises an `UnsupportedError` with the text `refusal`."""

    def refuse(*grads: tf.Tensor) -> NoReturn:
        raise UnsupportedError(refusal)

    return tf.custom_gradient(lambda *inputs: (function(*inputs), refuse))


def known_to_programs(thing: T) -> Callable[[], T]:
    """Return a function that returns a thing, for gradient functions. TensorFlow keeps them for ever, as in `call`.

    In a program the caller must keep the thing alive.
    """
    return (lambda: thing) if tf.executing_eagerly() else weakly_known(thing)


def weakly_known(thing: T) -> Callable[[], T]:
    """Return a function that returns a thing, and does not keep it alive.

    Raises:
        GoneError: (from the function) the thing is gone.
    """
    reference = weakref.ref(thing)

    def known() -> T:
        found = reference()
        if found is None:
            raise GoneError(GONE)
        return found

    return known


def graphs_around() -> list[Any]:
    """Return the function that is being traced, the function around it, and so on."""
    graphs, graph = [], tf.compat.v1.get_default_graph()
    while graph is not None:
        graphs.append(graph)
        graph = getattr(graph, "outer_graph", None)
    return graphs


def place() -> int:
    """Return a number of the function, branch or loop that is being traced; 0 outside of programs."""
    return 0 if tf.executing_eagerly() else id(tf.compat.v1.get_default_graph())


def runs_at_most_once_in(graph: Any) -> bool:
    """Return whether the traced code runs at most once per run of a function: in it, or in a branch of it."""
    inner = itertools.takewhile(lambda each: each is not graph, graphs_around())
    return all(isinstance(each, control_flow.CondBranchFuncGraph) for each in inner)


def is_in_loop() -> bool:
    """Return whether the code being traced is in a loop of TensorFlow's."""
    return any(isinstance(each, control_flow.WhileBodyFuncGraph) for each in graphs_around())


def _weakly(function: Callable[..., Any]) -> Callable[..., Any]:
    known = known_to_programs(function)

    def called(*arrays: np.ndarray) -> Any:
        try:
            return known()(*arrays)
        except EmbedrockError as error:  # its text becomes a part of TensorFlow's; its traceback says nothing
            raise error.with_traceback(None) from None

    return called


def record(name: str) -> contextlib.AbstractContextManager[Any] | None:
    """Return a phase of `embedrock.system.spans` as a `tf.profiler` trace; None if the profiler is off."""
    return tf.profiler.experimental.Trace(PREFIX + name) if trace.enabled() else None


trace_by(record, trace.enabled)
