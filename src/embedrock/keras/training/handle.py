"""The handle: a small proxy variable for all rows of a table in Keras' machinery."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state  # Keras shows a symbolic build in no other way

from embedrock.errors import ArgumentError, ForgottenGradientsError, UnsupportedError
from embedrock.frontend.arguments import written
from embedrock.keras.training import host_calls
from embedrock.keras.training.pending import SLOTS, PendingGradients
from embedrock.keras.training.placement import executor_of
from embedrock.keras.training.slices import ONCE, TYPES, LazyRowSlices, RowSlices, TableShape, shaped, sum_of
from embedrock.keras.training.variable import WRITING_REFUSED, RowsVariable, may_read
from embedrock.keras.workers.shards import shard_of
from embedrock.optimizers import Rule
from embedrock.system.scopes import set_within
from embedrock.table.changes import RuleTaker, bind_rule
from embedrock.table.table import Table, rows_of

LOADED = "shared_objects/id_to_obj_map"  # the dict shared by all objects of a model during a save or load
_GRADIENT = "_embedrock_gradient"  # attribute of a token, outside of programs

# Handles by table: layers on one table share its handle, as tied layers share a variable. So its rows count once in a
# norm, and are stepped once.
_handles: weakref.WeakKeyDictionary[Table, weakref.ref[TableHandle]] = weakref.WeakKeyDictionary()
_numbers = itertools.count()


class TableHandle:
    """A proxy of a table's rows among the variables of a model.

    The variable is a vector of zeros that never changes. TensorFlow sees its gradient as a sum of tokens, one for each
    backward pass (see `PendingGradients`). A tape returns the gradients of rows (see `RowSlices`).

    Attributes:
        table: the table.
        state: the table's rows.
        shard: the part of all rows that the table is; None: all.
        executor: the executor that programs use.
        variable: the Keras variable, float32 (SLOTS,).
        strategy: the `tf.distribute` strategy that it was made under.
        label: name of the layer in error messages.
        brought: arguments of the layers on the table, by name: `rule` (absent if the rows follow the optimizer),
            `embeddings_regularizer`, `embeddings_constraint`.
        pending: gradients that wait for a step.
        functions: host functions of programs, for lookups and steps. See `host_calls.call`.
    """

    def __init__(self, table: Table, label: str) -> None:
        self.table, self.label, self.state, self.shard = table, label, rows_of(table), shard_of(table)
        self.brought: dict[str, Any] = {}
        self.executor = executor_of(table, label)
        self.pending = PendingGradients(self.executor.sum_of)
        self.functions: list[Callable[..., Any]] = []
        self.state.name_by(label)
        self._number = next(_numbers)
        self.strategy = tf.distribute.get_strategy()
        with _outside_of_programs():
            self.variable = RowsVariable(np.zeros(SLOTS, np.float32), self)
        self._owners: list[weakref.ref[Any]] = []
        self._is_shared = False  # whether some layer has set `trainable`

    def cells(self) -> tuple[Any, ...]:
        """Return the TensorFlow variables behind `variable`: one for each local replica."""
        return self.strategy.experimental_local_results(self.variable.value)

    @property
    def owner(self) -> Any:
        """The optimizer that steps the rows, or that was built last; None if none is alive."""
        return next((each for owner in reversed(self._owners) if (each := owner()) is not None), None)

    def claim(self, optimizer: Any) -> bool:
        """Return whether an optimizer may step the rows.

        Several may take turns if their steps leave no state, or if the rows have their own rule. Otherwise the
        optimizer built last owns the rows, and earlier ones may not step them.
        """
        owns = [owner for owner in self._owners if owner() is optimizer]
        if owns and owns == self._owners:
            return True
        rule = self.table.rule
        if self.own_rule is not None or rule is None or not rule.state():
            return True
        if owns:
            self._owners = owns
        return bool(owns)

    def bring(self, name: str, given: Any) -> None:
        """Record an argument of a layer on the table, or None.

        Raises:
            ArgumentError: another layer has a different value.
            UnsupportedError: a constraint of rows that a GPU steps.
        """
        if given is None:
            return
        if name == "embeddings_constraint" and self.executor.is_on_gpu:
            raise UnsupportedError(
                f"`embeddings_constraint` of {self.label} cannot go with device_memory=, as the CPU applies it between "
                "a step and its end. Leave one of them out."
            )
        known = self.brought.setdefault(name, given)
        if not _is_same(known, given):
            raise ArgumentError(
                f"`{name}` of layers that share a table must be the same: {self.label} has {described(known)}, got "
                f"{described(given)}. Give it to one of them only, or the same to each."
            )

    def share_trainable(self, trainable: bool) -> None:
        """Record whether a layer on the table, which is being built, is trained.

        Raises:
            ArgumentError: another layer differs.
        """
        if not self._is_shared:
            self.variable.trainable = trainable
        elif self.variable.trainable != trainable:
            raise ArgumentError(
                f"`trainable` of layers that share a table must be the same: {self.label} has "
                f"{self.variable.trainable}, got {trainable}. For a layer that passes no gradient on, use "
                "tf.stop_gradient on its output."
            )
        self._is_shared = True

    @property
    def own_rule(self) -> Rule | None:
        """The rule of a layer on the table, or of the table; None if the rows follow the optimizer."""
        return self.brought.get("rule") or self.state.given_rule

    def bind(self, owner: Any, rule: Rule) -> None:
        """Record the optimizer that steps the rows, and set its rule. (Rows of a snapshot are not stepped.)

        In a loading model, the rows may keep another rule: then the first step raises the error.
        """
        if rule.same_layout(self.table.rule) or global_state.get_global_attribute(LOADED) is None:
            bind_rule(self.state, rule, self._taken_by(owner))
        # If a model and its loaded copy share rows, the first one trained continues with them.
        self._owners = [each for each in self._owners if each() not in (None, owner)] + [weakref.ref(owner)]

    def check_rule(self, owner: Any, rule: Rule) -> None:
        """Raise `ArgumentError` unless the rows have the record layout of a bound optimizer's rule.

        They lack it if the table got another rule later, or if the model's file has another one.
        """
        if not rule.same_layout(self.state.spec.rule):
            bind_rule(self.state, rule, self._taken_by(owner))

    def _taken_by(self, owner: Any) -> RuleTaker:
        own = self.table.rule
        go_on = "" if own is None else f"To go on so, give the layer rule={written(own)}."
        return RuleTaker(
            f"erk.optimizer({type(owner).__name__})", self.label, go_on, owner.resets_state, "rule" in self.brought
        )

    def check_strategy(self) -> None:
        if tf.distribute.has_strategy() and tf.distribute.get_strategy() is not self.strategy:
            raise ArgumentError(
                f"{self.label} was built before {type(tf.distribute.get_strategy()).__name__} was entered, and is "
                "called under it. Make and build the model inside of `with strategy.scope():`."
            )

    def check_untouched(self, value: np.ndarray) -> None:
        """Raise `ForgottenGradientsError` if the variable's value shows that it was written to."""
        if value.any():
            raise ForgottenGradientsError(WRITING_REFUSED.format(self.label))

    def value(self) -> tf.Tensor:
        """Return, in a program, the variable's value, which lookups are functions of."""
        with set_within(may_read, True):
            return tf.convert_to_tensor(self.variable.value)

    def gradient(self, token: tf.Tensor) -> RowSlices:
        """Return, in a program, the gradient of the rows from a sum of tokens."""
        shape, known = self.shape, host_calls.known_to_programs(self)

        def found(token: tf.Tensor) -> list[tf.Tensor]:
            handle = known()
            read = functools.partial(handle._read, tf.executing_eagerly())
            return handle.executor.call(read, [token], TYPES, functions=handle.functions)

        def read(token: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return shaped(host_calls.once_differentiable(found, ONCE)(token), shape[1])

        if tf.executing_eagerly():
            if not hasattr(token, _GRADIENT):  # a variable that is watched twice has one token
                setattr(token, _GRADIENT, RowSlices(*read(token), shape))
            return getattr(token, _GRADIENT)
        return LazyRowSlices(token, self.pending, read, shape)

    @property
    def shape(self) -> TableShape:
        """The shape of all rows, which programs check when they run."""
        rows = self.table.rows
        shape, known = TableShape((rows, self.table.dim)), host_calls.known_to_programs(self)
        if not tf.executing_eagerly():
            check = functools.partial(self._check_rows, rows)
            shape.check = lambda: host_calls.call(check, [], [tf.int64], functions=known().functions)
        return shape

    def _check_rows(self, rows: int | None) -> np.int64:
        if self.table.rows != rows:
            raise ArgumentError(
                f"{self.label} has grown since a tf.function was traced that makes dense tensors of its gradients: "
                f"they have {rows} rows, in which new ones have no place. Trace it anew: make the tf.function again, "
                "or call model.make_train_function(force=True). Or do without dense gradients: docs/keras.md says what "
                "needs them."
            )
        return np.int64(0)

    def _read(self, is_last: bool, token: Any) -> list[Any]:
        grads = self.pending.read(self.executor.host_array(token), is_last) or self.no_gradients()
        return self.executor.shown(grads, is_last)  # TensorFlow writes to these arrays

    def admit(self, gradient: Any) -> RowSlices:
        """Return, in a program, a gradient of the rows of any form, as a step takes it.

        Raises:
            ArgumentError: it is no gradient of these rows.
        """
        shape = self.shape
        if isinstance(gradient, RowSlices) and gradient.table_shape[1] == shape[1]:
            is_of_another = isinstance(gradient, LazyRowSlices) and gradient.pending is not self.pending
            return gradient.with_values(gradient.values) if is_of_another else gradient
        if not isinstance(gradient, tf.IndexedSlices):
            gradient = tf.convert_to_tensor(gradient)
            if gradient.shape.rank is None and shape[0] is not None:  # from a tf.py_function
                gradient = tf.ensure_shape(gradient, shape)
            if shape[0] is not None and gradient.shape.rank == 2 and gradient.shape.is_compatible_with(shape):
                with tf.control_dependencies(shape.checks()):
                    return RowSlices(tf.cast(gradient, tf.float32), tf.range(shape[0], dtype=tf.int64), shape)
        elif tf.TensorShape(gradient.values.shape).is_compatible_with([None, shape[1]]):
            return sum_of([gradient], shape)
        raise ArgumentError(
            f"a gradient for the rows of {self.label} must be what a tape returns for layer.rows, or for all of "
            f"model.trainable_variables: got {type(gradient).__name__} of shape {gradient.shape}."
        )

    def sent(self, gradient: RowSlices) -> list[tf.Tensor]:
        """Return, in a program, the tensors for a step: see `RowSlices.sent`. GPU values stay on the GPU."""
        parts = gradient.sent()
        if len(parts) == 1 or not self.executor.is_on_gpu:
            return parts
        return self.executor.call(self._received, parts, [tf.float32], functions=self.functions)

    def _received(self, *arrays: Any) -> np.ndarray:
        return self.pending.add((0, 0), 0, self.gradients(arrays))

    def gradients(self, arrays: Sequence[Any]) -> Any:
        """Return the gradients of the tensors sent to a step: see `RowSlices.sent`.

        A token of zeros has no rows, but still makes a step, as it would for a variable.
        """
        if len(arrays) == 2:
            values, indices = arrays
            return self.executor.of_rows(values, indices, self.pending.plans)
        return self.pending.take(self.executor.host_array(arrays[0])) or self.no_gradients()

    def leave_gpu(self) -> None:
        """Write rows back from a GPU until the next lookup. Then a step by gradients that wait there is an error."""
        if self.executor.is_on_gpu:
            self.pending.drop()
            self.state.leave_side()

    def no_gradients(self) -> Any:
        return self.executor.of_rows(np.empty((0, self.table.dim), np.float32), np.empty(0, np.int64), ())


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is type(other) and isinstance(one, (keras.regularizers.Regularizer, keras.constraints.Constraint)):
        return one.get_config() == other.get_config()
    return one == other


def described(made: Any) -> str:
    """Return a rule, a regularizer or a constraint as users write it."""
    if isinstance(made, Rule):
        return written(made)
    if not hasattr(made, "get_config"):
        return getattr(made, "__name__", type(made).__name__)
    return f"{type(made).__name__}({', '.join(f'{name}={value!r}' for name, value in made.get_config().items())})"


@contextmanager
def _outside_of_programs() -> Iterator[None]:
    """Leave the traced function, or the symbolic build of a model, in which a layer may be built.

    Variables made there are made later, or belong to the function. A handle needs its variable at once.
    """
    scope = global_state.get_global_attribute("stateless_scope")
    global_state.set_global_attribute("stateless_scope", None)
    try:
        with tf.init_scope():
            yield
    finally:
        global_state.set_global_attribute("stateless_scope", scope)


def functions_of(handles: Iterable[TableHandle]) -> list[Callable[..., Any]]:
    """Return the list that keeps the host functions of a program that uses these handles.

    It is the newest handle's. An old handle may be on a table of many models, and would keep all their tables.
    """
    return max(handles, key=lambda handle: handle._number).functions


def handle_of(table: Table, label: str) -> TableHandle:
    """Return the one handle of a table. Make it if it is missing."""
    reference = _handles.get(table)
    handle = None if reference is None else reference()
    if handle is None:
        handle = TableHandle(table, label)
        _handles[table] = weakref.ref(handle)
    return handle


def handle_behind(variable: Any) -> TableHandle | None:
    """Return the handle of a variable of Keras' or TensorFlow's; None for all other variables."""
    value = variable.value if isinstance(variable, keras.Variable) else variable
    reference = getattr(value, "_embedrock_handle", None)
    return None if reference is None else reference()


def handles_of(model: Any) -> list[TableHandle]:
    """Return the handles among the variables of a model, each once."""
    found = [handle_behind(variable) for variable in model.variables]
    return list(dict.fromkeys(handle for handle in found if handle is not None))
