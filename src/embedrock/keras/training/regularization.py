"""Regularizers and constraints, applied to the rows of a batch. Keras applies them to all weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common.symbolic_scope import in_symbolic_scope  # Keras shows a symbolic build in no other way

from embedrock.errors import ArgumentError, UnsupportedError
from embedrock.keras import callers
from embedrock.keras.training import host_calls
from embedrock.keras.training.handle import TableHandle, described
from embedrock.keras.training.lookup import look_up
from embedrock.keras.training.requests import LookupRequest

# Rows that a constraint is tried on: large and small ones, of both signs.
TRIED = np.array([[100.0], [-100.0], [1e-3], [-1.0]], np.float32)


def batch_regularizer(handle: TableHandle, regularizer: Callable[[tf.Tensor], tf.Tensor]) -> Callable[[Any], tf.Tensor]:
    """Return a regularizer for Keras' losses: a table's regularizer, over each row of the batch once.

    These are the rows looked up by the model whose `losses` Keras computes.

    Args:
        handle: handle of the table. The returned function does not keep it alive.
        regularizer: one of Keras', or a function of weights (rows, dim).
    """
    reference = weakref.ref(handle)

    def loss(variable: Any) -> tf.Tensor:
        if in_symbolic_scope():  # a symbolic build traces outputs and losses apart
            return tf.zeros(())
        handle = reference()
        model = callers.local(callers.KERAS_LAYER, "_get_regularization_losses", "self")
        if handle is None or model is callers.MISSING:
            raise UnsupportedError("the regularizer of rows is for those of a batch: use layer.losses or model.losses.")
        ids = [part for layer in model._flatten_layers() for part in _looked_up(layer, handle)]
        if not ids:
            return tf.zeros(())
        flat = tf.concat([tf.reshape(tf.cast(part, tf.int64), [-1]) for part in ids], 0)
        rows = look_up([LookupRequest(handle, tf.sort(tf.unique(flat).y))])[0]
        return regularizer(tf.cast(rows, handle.table.spec.value_dtype))

    return loss


def _looked_up(layer: Any, handle: TableHandle) -> list[tf.Tensor]:
    """Return the ids of a handle's rows that a layer of any kind has looked up."""
    if getattr(layer, "_handle", None) is not handle:
        return []
    graphs, ids = host_calls.graphs_around(), layer.looked_up
    if any(tf.is_symbolic_tensor(part) and part.graph not in graphs for part in ids):
        where = "in a loop, a branch or another tf.function, whose tensors stay in there"
        remedy = "Call the layer outside of it, or add losses inside."
        if tf.executing_eagerly():
            where = "in a tf.function, such as that of fit or evaluate, which has ended"
            remedy = "Call the model, and ask for its losses then."
        raise UnsupportedError(
            f"`embeddings_regularizer` of {layer.label} needs the ids of the batch where the losses are added up: got "
            f"a lookup {where}. {remedy}"
        )
    return ids


def constraint_on(handle: TableHandle) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return the table's constraint as a function of the stepped weights; None without one."""
    constraint = handle.brought.get("embeddings_constraint")
    if constraint is None:
        return None

    def constrained(weights: np.ndarray) -> np.ndarray:
        changed = np.array(tf.cast(constraint(tf.cast(weights, handle.table.spec.value_dtype)), tf.float32))
        if changed.shape != weights.shape or not np.isfinite(changed).all():
            raise ArgumentError(
                f"`embeddings_constraint` of {handle.label} must return finite weights {weights.shape}: got "
                f"{changed.shape}{' with NaN or Inf' * (not np.isfinite(changed).all())}. No step was made."
            )
        return changed

    return constrained


def regularizer_of(given: Any, kind: str) -> Any:
    """Return the regularizer of a layer from Keras' forms of it.

    Raises:
        ArgumentError: Keras does not accept it.
    """
    return _made(keras.regularizers.get, "embeddings_regularizer", given, kind, 'keras.regularizers.L2(1e-4), or "l2"')


def constraint_of(given: Any, kind: str, dim: Any) -> Any:
    """Return the constraint of a layer from Keras' forms of it.

    Raises:
        ArgumentError: Keras does not accept it, or it maps a row by the values of other rows.
    """
    example = 'keras.constraints.MaxNorm(2.0, axis=1), or "non_neg"'
    made = _made(keras.constraints.get, "embeddings_constraint", given, kind, example)
    if made is None or not isinstance(dim, int) or dim < 1:  # `dim` has an error of its own
        return made
    with tf.init_scope():
        rows = tf.constant(TRIED * (1 + np.arange(dim, dtype=np.float32)))
        together = np.asarray(made(rows))
        alone = [np.asarray(made(rows[k : k + 1])) for k in range(len(TRIED))]
    if together.shape != rows.shape or not np.allclose(together, np.concatenate(alone), rtol=1e-5, atol=1e-6):
        raise ArgumentError(
            f"`embeddings_constraint` of {kind} must do to each row what depends on that row only, as it sees those of "
            f"a batch: got {described(made)}. Those of Keras that have an axis need axis=1, "
            "keras.constraints.UnitNorm(axis=1) for rows of length 1; axis=0 is over all rows of a column."
        )
    return made


def _made(get: Callable[[Any], Any], name: str, given: Any, kind: str, example: str) -> Any:
    try:
        return get(given)
    except (ValueError, TypeError) as error:
        raise ArgumentError(f"`{name}` of {kind} must be one of Keras', such as {example}: got {given!r}.") from error
