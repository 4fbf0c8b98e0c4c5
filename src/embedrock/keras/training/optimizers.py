"""`optimizer`: a Keras optimizer of the user's own class that also steps rows."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from embedrock.errors import ArgumentError, UnsupportedError
from embedrock.keras.training import host_calls, steps
from embedrock.keras.training.following import FOLLOWED, check_followed
from embedrock.keras.training.handle import Handle, handle_behind, keeper_of
from embedrock.keras.workers.cluster import check_traced_fit, has_several_workers, repair_loss_scaling
from embedrock.keras.workers.exchange import gather
from embedrock.wording import did_you_mean

PACKAGE = "embedrock"


class RowOptimizer:
    """What is added to the class of an optimizer so that it also steps the rows of Embedrock's layers.

    By the time that Keras asks for the update of variables, it has unscaled, accumulated, clipped and reduced their
    gradients, those of the handles among them. What became of a handle's gradient is done to those of its rows.
    """

    # What all workers of a cluster bring to the step that is being traced; None where there is one process.
    _gathered: Any = None
    resets_state = False  # rows whose state is that of another rule begin anew

    def build(self: Any, variables: Sequence[Any]) -> None:
        """Prepare for variables, and take the rows that some of them stand for."""
        handles = [handle for variable in variables if (handle := handle_behind(variable)) is not None]
        if handles:
            self._refuse_for_rows(handles[0])
        for handle in handles:
            if handle.own_rule is None:
                check_followed(self, steps.decays(self, handle))
        super().build(variables)  # pyright: ignore[reportAttributeAccessIssue]
        for handle in handles:
            steps.bind(handle, self)
        if handles:
            self.resets_state = False  # of tables that come later

    def __reduce__(self: Any) -> tuple[Any, ...]:
        _, arguments = super().__reduce__()
        return _unpickled, (type(self).__bases__[-1], *arguments)

    def _refuse_for_rows(self: Any, handle: Handle) -> None:
        strategy = handle.strategy
        if strategy is not self._distribution_strategy:
            raise ArgumentError(
                f"the optimizer of {handle.label}, {type(self).__name__}, must be made under the strategy that the "
                f"layer is under, {type(strategy).__name__}: got one made outside. Call erk.optimizer inside of `with "
                "strategy.scope():`, too."
            )
        if strategy.num_replicas_in_sync > 1:
            repair_loss_scaling()
            if self.gradient_accumulation_steps:
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

    def _apply_weight_decay(self: Any, variables: Sequence[Any]) -> None:
        dense = [variable for variable in variables if handle_behind(variable) is None]
        super()._apply_weight_decay(dense)  # pyright: ignore[reportAttributeAccessIssue]

    def _backend_apply_gradients(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        # Keras clips gradients without saying whose they are.
        self._behind = [handle_behind(variable) for variable in trainable_variables]
        super()._backend_apply_gradients(grads, trainable_variables)  # pyright: ignore[reportAttributeAccessIssue]

    def _clip_gradients(self: Any, grads: Sequence[Any]) -> list[Any]:
        if self.clipvalue:  # every element of a gradient: the step does that to those of rows
            clipped = super()._clip_gradients(grads)  # pyright: ignore[reportAttributeAccessIssue]
            return [c if handle is None else g for c, g, handle in zip(clipped, grads, self._behind, strict=True)]
        if not (self.clipnorm or self.global_clipnorm):
            return list(grads)
        shown = [g if handle is None else _true_norm(g, handle) for g, handle in zip(grads, self._behind, strict=True)]
        clipped = super()._clip_gradients(shown)  # pyright: ignore[reportAttributeAccessIssue]
        both = zip(grads, shown, clipped, self._behind, strict=True)
        return [c if handle is None else _clipped_as(g, s, c) for g, s, c, handle in both]

    def _backend_update_step(self: Any, grads: Sequence[Any], trainable_variables: Any, learning_rate: Any) -> None:
        # Here, in the context of a replica, its gradients are unscaled and clipped, and not yet summed with others'.
        rows = [(handle_behind(v), grad) for v, grad in zip(trainable_variables, grads, strict=True)]
        rows = [(handle, grad) for handle, grad in rows if handle is not None]
        if rows and has_several_workers(self._distribution_strategy):
            message_of = functools.partial(steps.message_to_workers, weakref.ref(self), [handle for handle, _ in rows])
            message = host_calls.call(
                message_of, [grad for _, grad in rows], [tf.int32], keeper=keeper_of(handle for handle, _ in rows)
            )
            self._gathered = gather(message[0])
        try:
            super()._backend_update_step(grads, trainable_variables, learning_rate)  # pyright: ignore
        finally:
            self._gathered = None

    def _distributed_tf_update_step(self: Any, distribution: Any, grads_and_vars: Any, learning_rate: Any) -> None:
        pairs = [(grad, variable, handle_behind(variable)) for grad, variable in grads_and_vars]
        rows = [(handle, grad) for grad, _, handle in pairs if handle is not None]
        dense = [(grad, variable) for grad, variable, handle in pairs if handle is None]
        done = [self._step_rows(distribution, rows, learning_rate)] if rows else []
        # A step that is refused for the rows' sake is refused as a whole.
        with tf.control_dependencies(done):
            super()._distributed_tf_update_step(distribution, dense, learning_rate)  # pyright: ignore

    def _step_rows(self: Any, distribution: Any, rows: list[tuple[Handle, Any]], learning_rate: Any) -> tf.Tensor:
        """Step the rows of all tables in one call of the host: after all lookups before it, before all after it."""

        def local(value: Any) -> Any:
            value = value.value if isinstance(value, keras.Variable) else value
            return distribution.experimental_local_results(value)[0]

        if distribution.num_replicas_in_sync > 1:
            check_traced_fit()
        now = [tf.cast(local(learning_rate), tf.float32), tf.cast(local(self.iterations), tf.int64)]
        handles = [handle for handle, _ in rows]
        if self._gathered is None:
            function, inputs = steps.step, [local(grad) for _, grad in rows]
        else:
            function, inputs = steps.step_of_workers, [local(self._gathered)]
        step = functools.partial(function, weakref.ref(self), handles)
        cells = [cell for handle, _ in rows for cell in handle.cells()]
        with tf.control_dependencies(_touch(cells)):
            done = host_calls.call(step, [*now, *inputs], [tf.int64], keeper=keeper_of(handles))
        with tf.control_dependencies(done):
            _touch(cells)
        return done[0]


def _touch(cells: list[Any]) -> list[Any]:
    """Write to variables what they hold: TensorFlow keeps reads and writes of a variable in the program's order."""
    zeros = [tf.zeros(cell.shape, cell.dtype) for cell in cells]
    ops = [
        tf.raw_ops.AssignAddVariableOp(resource=cell.handle, value=zero)
        for cell, zero in zip(cells, zeros, strict=True)
    ]
    return [op for op in ops if op is not None]  # eager ops return None


def _true_norm(vector: tf.Tensor, handle: Handle) -> tf.Tensor:
    """Return a handle's gradient, scaled so that its norm is that of the sum of what it stands for."""

    def scaled(values: np.ndarray) -> np.ndarray:
        shown, norm = float(np.linalg.norm(values.astype(np.float64))), handle.pending.norm(values)
        is_true = not np.isfinite(shown) or shown == 0.0 or abs(norm - shown) <= 1e-6 * shown
        return values if is_true else (values * (norm / shown)).astype(np.float32)

    out = host_calls.call(scaled, [vector], [tf.float32], keeper=handle.functions)[0]
    out.set_shape(vector.shape)
    return out


def _clipped_as(vector: tf.Tensor, shown: tf.Tensor, clipped: tf.Tensor) -> tf.Tensor:
    """Return a vector multiplied by what clipping made of `shown`."""
    return tf.where(clipped == shown, vector, vector * tf.math.divide_no_nan(clipped, shown))


def optimizer(identifier: Any, *, reset_state: bool = False) -> Any:
    """Return a Keras optimizer that also steps the rows of Embedrock's layers, by its own rule.

    The rows follow its learning rate, schedules, clipping, loss scaling and gradient accumulation. See
    docs/keras.md for which optimizers there are, and what each does to rows that a batch does not touch.

    Args:
        identifier: a name ("adam"), a config, or an instance, which becomes such an optimizer itself. A
            `keras.optimizers.LossScaleOptimizer` has its inner one changed.
        reset_state: begin the state of rows anew where it is that of another rule than they will be stepped by; without
            it that is an error. The weights stay as they are, and so does a rule that a layer or a table was given.

    Raises:
        ArgumentError: it is no optimizer, or one that was used already.
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
    except (ValueError, TypeError) as error:
        made, cause = None, error
    if isinstance(made, keras.optimizers.Optimizer):
        return made
    raise ArgumentError(
        f'erk.optimizer must be given an optimizer, by name ("adam") or as an instance: got {identifier!r}.'
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
    """Return an optimizer as it was pickled: its class is made here, and nobody can import it."""
    return row_class(base)._unpickle_model(*arguments)


for _kind in FOLLOWED:  # so that a saved model loads once this package is imported
    row_class(_kind)
