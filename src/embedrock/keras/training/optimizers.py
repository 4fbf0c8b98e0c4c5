"""`optimizer`: a Keras optimizer of the user's own class that also steps rows."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from embedrock.errors import ArgumentError, UnsupportedError, did_you_mean
from embedrock.keras.training import host_calls, steps
from embedrock.keras.training.following import FOLLOWED, check_followed
from embedrock.keras.training.handle import TableHandle, functions_of, handle_behind
from embedrock.keras.training.slices import TYPES, RowSlices, shaped
from embedrock.keras.workers.cluster import check_traced_fit, gather, has_several_workers, repair_loss_scaling

PACKAGE = "embedrock"


class RowAccumulator:
    """A replacement of Keras' accumulator variable: the sum of row gradients over micro-batches, on their executor.

    Args:
        handle: handle of the table.
        variable: Keras' variable. It holds ones while a sum exists; files of models lack the sum.
    """

    def __init__(self, handle: TableHandle, variable: Any) -> None:
        self._handle, self._variable = handle, variable
        self.shape, self.dtype = variable.shape, variable.dtype
        self._sum: Any = None

    def add(self, gradient: RowSlices) -> None:
        """Add a gradient, in a program."""
        with tf.control_dependencies(self._call(self._added, gradient, [tf.int64])):
            self._variable.assign(tf.ones(self.shape, self.dtype))

    def assign(self, zeros: Any) -> None:
        """Begin a new sum, in a program, as Keras does after a step."""
        self._variable.assign(zeros)

    def __radd__(self, gradient: RowSlices) -> RowSlices:
        """Return, in a program, a gradient plus the accumulated sum."""
        made = self._call(self._total, gradient, TYPES)
        return RowSlices(*shaped(made, self._handle.table.dim), gradient.table_shape)

    def _call(self, function: Any, gradient: RowSlices, dtypes: Any) -> list[tf.Tensor]:
        inputs = [tf.convert_to_tensor(self._variable.value), *gradient.sent()]
        return self._handle.executor.call(function, inputs, dtypes, functions=self._handle.functions)

    def _added(self, marks: Any, *arrays: Any) -> np.int64:
        self._sum = self._with(marks, arrays)
        self._handle.pending.end_step(self._handle.pending.time)
        return np.int64(0)

    def _total(self, marks: Any, *arrays: Any) -> list[Any]:
        return self._handle.executor.shown(self._with(marks, arrays), is_last=False)

    def _with(self, marks: Any, arrays: tuple[Any, ...]) -> Any:
        before, grads = (self._sum if marks.any() else None), self._handle.gradients(arrays)
        if before is None and marks.any():
            raise ArgumentError(
                "the file of the model was saved between two steps of gradient_accumulation_steps, without the "
                f"gradients of rows of {self._handle.label} that waited: training cannot go on from it. Load one that "
                "was saved after a step, by erk.TableCheckpoint for example."
            )
        return grads if before is None else self._handle.executor.sum_of([before, grads])


class RowOptimizer:
    """A mixin of an optimizer's class that also steps the rows of Embedrock's layers.

    Before Keras updates the variables, it has unscaled, accumulated and clipped their gradients. That includes
    gradients of rows (see `RowSlices`).
    """

    resets_state = False  # rows with the state of another rule are reset

    def build(self: Any, variables: Sequence[Any]) -> None:
        """Prepare for variables, and claim the rows behind proxy variables."""
        handles = [handle for variable in variables if (handle := handle_behind(variable)) is not None]
        if handles:
            self._refuse_for_rows(handles[0])
        for handle in handles:
            self._check_rule(handle)
            steps.check_constraint(handle, self)
        super().build(variables)  # pyright: ignore[reportAttributeAccessIssue]
        if handles and self.gradient_accumulation_steps:
            self._accumulated_gradients = [
                accumulator if handle is None else RowAccumulator(handle, accumulator)
                for accumulator, handle in zip(self._accumulated_gradients, map(handle_behind, variables), strict=True)
            ]
        for handle in handles:
            handle.bind(self, steps.step_rule(self, handle))
        if handles:
            self.resets_state = False  # for tables that come later

    def _check_rule(self: Any, handle: TableHandle) -> None:
        if handle.own_rule is None:
            check_followed(self, steps.decays_rows(self, handle))

    def __reduce__(self: Any) -> tuple[Any, ...]:
        _, arguments = super().__reduce__()
        return _unpickled, (type(self).__bases__[-1], *arguments)

    def _refuse_for_rows(self: Any, handle: TableHandle) -> None:
        strategy = handle.strategy
        if strategy is not self._distribution_strategy:
            raise ArgumentError(
                f"the optimizer of {handle.label}, {type(self).__name__}, must be made under the strategy that the "
                f"layer is under, {type(strategy).__name__}: got one made outside. Call erk.optimizer inside of `with "
                "strategy.scope():`, too."
            )
        repair_loss_scaling()
        if strategy.num_replicas_in_sync > 1 and self.gradient_accumulation_steps:
            raise UnsupportedError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps} of {type(self).__name__} cannot "
                f"go with several replicas: Keras {keras.__version__} fails under {type(strategy).__name__}, "
                "whatever the model. Leave it out, and make the batch of each replica larger."
            )
        if self.use_ema:
            raise UnsupportedError(
                f"use_ema=True of {type(self).__name__} cannot go with {handle.label}: an average of all rows would "
                "touch every row at each step. Leave it out."
            )

    def _use_weight_decay(self: Any, variable: Any) -> bool:
        pattern, handle = getattr(self, "_exclude_from_weight_decay_pattern", None), handle_behind(variable)
        if pattern is not None and handle is not None:
            # A proxy variable has two names in patterns, as TensorFlow's variables are named: that of Keras' own
            # weights, and its own.
            path = handle.variable.path
            names = f"{path.removesuffix(handle.variable.name)}embeddings:0", f"{path}:0"
            if any(map(pattern.search, names)):
                return False
        return super()._use_weight_decay(variable)  # pyright: ignore[reportAttributeAccessIssue]

    def _apply_weight_decay(self: Any, variables: Sequence[Any]) -> None:
        dense = [variable for variable in variables if handle_behind(variable) is None]
        super()._apply_weight_decay(dense)  # pyright: ignore[reportAttributeAccessIssue]

    def apply(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Step all variables, and the rows behind proxy variables. Gradients of rows may be of any form."""
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        grads = list(grads)
        if len(grads) == len(variables):  # otherwise Keras raises the error
            behind = [handle_behind(variable) for variable in variables]
            grads = [
                g if g is None or handle is None else handle.admit(g) for g, handle in zip(grads, behind, strict=True)
            ]
        super().apply(grads, None if trainable_variables is None else variables)  # pyright: ignore

    def _clip_gradients(self: Any, grads: Sequence[Any]) -> list[Any]:
        if not (self.clipnorm or self.global_clipnorm or self.clipvalue):
            return list(grads)
        shown = [g.values if isinstance(g, RowSlices) else g for g in grads]
        clipped = super()._clip_gradients(shown)  # pyright: ignore[reportAttributeAccessIssue]
        return [g.with_values(c) if isinstance(g, RowSlices) else c for g, c in zip(grads, clipped, strict=True)]

    def _backend_increment_gradient_accumulators(self: Any, grads: Sequence[Any], acc_grads: Sequence[Any]) -> None:
        dense = []
        for grad, accumulator in zip(grads, acc_grads, strict=True):
            if isinstance(accumulator, RowAccumulator):
                accumulator.add(grad)
            else:
                dense.append((grad, accumulator))
        super()._backend_increment_gradient_accumulators(  # pyright: ignore[reportAttributeAccessIssue]
            [grad for grad, _ in dense], [accumulator for _, accumulator in dense]
        )

    def _backend_update_step(self: Any, grads: Sequence[Any], trainable_variables: Any, learning_rate: Any) -> None:
        # This is the context of one replica: gradients are unscaled and clipped, and not yet summed over replicas.
        behind = [handle_behind(variable) for variable in trainable_variables]
        rows = [(handle, grad) for handle, grad in zip(behind, grads, strict=True) if handle is not None]
        if not rows:
            super()._backend_update_step(grads, trainable_variables, learning_rate)  # pyright: ignore
            return
        for handle, _ in rows:
            self._check_rule(handle)  # it may have changed since the build
        pairs = zip(behind, grads, trainable_variables, strict=True)
        dense = [(g, v.value if isinstance(v, keras.Variable) else v) for handle, g, v in pairs if handle is None]
        handles, sent = [handle for handle, _ in rows], [handle.sent(grad) for handle, grad in rows]
        several = has_several_workers(self._distribution_strategy)
        tf.__internal__.distribute.interim.maybe_merge_call(
            functools.partial(self._step_all, handles),
            self._distribution_strategy,
            self._gathered(handles, sent) if several else sent,
            self._all_reduce_sum_gradients(dense),
            learning_rate,
        )

    def _gathered(self: Any, handles: list[TableHandle], sent: list[list[tf.Tensor]]) -> tf.Tensor:
        """Return the messages of all workers for a step."""
        sizes = [[len(parts)] for parts in sent]
        message_of = functools.partial(steps.message_to_workers, weakref.ref(self), handles, sizes)
        inputs = [tensor for parts in sent for tensor in parts]
        return gather(host_calls.call(message_of, inputs, [tf.int32], functions=functions_of(handles))[0])

    def _step_all(
        self: Any, handles: list[TableHandle], distribution: Any, sent: Any, dense: list[Any], learning_rate: Any
    ) -> None:
        """Step rows and dense variables, in the context across replicas.

        One host call steps the rows of all tables, between the lookups before and after it.

        Args:
            handles: handles of the tables.
            sent: tensors for the rows, by handle: see `RowSlices.sent`; or the messages of all workers.
            dense: gradients and variables.
        """

        def locals_of(value: Any) -> Any:
            return distribution.experimental_local_results(value.value if isinstance(value, keras.Variable) else value)

        if distribution.num_replicas_in_sync > 1:
            check_traced_fit()
        now = [tf.cast(locals_of(learning_rate)[0], tf.float32), tf.cast(locals_of(self.iterations)[0], tf.int64)]
        if has_several_workers(distribution):
            inputs = [locals_of(sent)[0]]
            step = functools.partial(steps.step_of_workers, weakref.ref(self), handles)
        else:
            by_replica = [list(zip(*map(locals_of, parts), strict=True)) for parts in sent]
            inputs = [tensor for parts in by_replica for part in parts for tensor in part]
            sizes = [[len(part) for part in parts] for parts in by_replica]
            step = functools.partial(steps.step, weakref.ref(self), handles, sizes)
        with tf.control_dependencies(host_calls.after_earlier_lookups()):
            done = host_calls.call(step, [*now, *inputs], [tf.int64], functions=functions_of(handles))
        with tf.control_dependencies(done):
            host_calls.after_earlier_lookups()
            for count in locals_of(self.iterations):  # Keras must not advance it after a refused step
                if hasattr(count, "handle"):  # a symbolic build has none
                    tf.raw_ops.AssignAddVariableOp(resource=count.handle, value=tf.zeros((), count.dtype))
            # If the step of the rows is refused, no variable is stepped.
            self._distributed_tf_update_step(distribution, dense, learning_rate)


def optimizer(identifier: Any, *, reset_state: bool = False) -> Any:
    """Return a Keras optimizer that also steps the rows of Embedrock's layers, by its own rule.

    The rows follow its learning rate, schedules, clipping, loss scaling and gradient accumulation. See docs/keras.md
    for the list of optimizers, and for rows that a batch does not touch.

    Args:
        identifier: a name ("adam"), a config, or an instance, which becomes such an optimizer itself. A
            `keras.optimizers.LossScaleOptimizer` has its inner one changed.
        reset_state: reset the state of rows if it belongs to another rule. Without it that is an error. The weights
            stay as they are, and so does the rule of a layer or a table.

    Raises:
        ArgumentError: `identifier` is no optimizer, or was used already.
        UnsupportedError: an optimizer that rows cannot follow. (Give the layers a `rule` then.)

    Example:
        >>> import embedrock.keras as erk
        >>> type(erk.optimizer(keras.optimizers.Adam(1e-3, global_clipnorm=1.0))).__name__
        'Adam'
    """
    made = _get(identifier)
    inner = getattr(made, "inner_optimizer", made)
    if isinstance(inner, RowOptimizer):
        inner.resets_state |= reset_state
        return made
    if inner.built:
        raise ArgumentError(
            f"erk.optimizer must be given an optimizer that was not used yet: got {type(inner).__name__} with "
            f"{len(inner.variables)} variables. Make a new one, or pass it to erk.optimizer before compile."
        )
    object.__setattr__(inner, "__class__", row_class(type(inner)))
    inner.resets_state = reset_state
    return made


def _get(identifier: Any) -> Any:
    try:
        made, cause = keras.optimizers.get(identifier), None
    except (ValueError, TypeError, KeyError) as error:
        made, cause = None, error
    if isinstance(made, keras.optimizers.Optimizer):
        return made
    lacks = f" Without {cause} Keras cannot make it: pass an instance." * isinstance(cause, KeyError)
    raise ArgumentError(
        f'erk.optimizer must be given an optimizer, by name ("adam") or as an instance: got {identifier!r}.{lacks}'
        f"{did_you_mean(identifier, [each.__name__.lower() for each in FOLLOWED]) * isinstance(identifier, str)}"
    ) from cause


@functools.cache
def row_class(base: type) -> Any:
    """Return the class of optimizers that are of class `base` and also step rows. Keras can save and load it."""
    made = type(base.__name__, (RowOptimizer, base), {"__doc__": base.__doc__, "__module__": base.__module__})
    is_keras = base.__module__.startswith("keras.")
    name = base.__name__ if is_keras else f"{base.__module__}.{base.__qualname__}"
    return keras.saving.register_keras_serializable(PACKAGE, name)(made)


def _unpickled(base: type, *arguments: Any) -> Any:
    # The class of an optimizer is made here and cannot be imported.
    return row_class(base)._unpickle_model(*arguments)


for _kind in FOLLOWED:  # so that a saved model loads once this package is imported
    row_class(_kind)
