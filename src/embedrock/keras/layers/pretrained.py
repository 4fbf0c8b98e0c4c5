"""Tables of pretrained weights, which are read from the caller's array on demand."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from embedrock.errors import ArgumentError, UnsupportedError
from embedrock.frontend.arguments import make_table
from embedrock.initializers import FromArray, FromBfloat16
from embedrock.keras.layers.row_layer import REFUSED, TABLE_DTYPES, drawn_by
from embedrock.table.options import LayerOptions, declared
from embedrock.table.table import Table

OF_WEIGHTS = {
    "input_dim": "it is that of the weights. Leave it out",
    "output_dim": "it is that of the weights. Leave it out",
    "embeddings_initializer": "rows start as the weights. Leave it out",
    "seed": "rows start as the weights. Leave it out",
}


def pretrained_options(layer: str, weights: Any, dtype: Any, options: dict[str, Any]) -> tuple[Table, dict[str, Any]]:
    """Return a table whose rows are read from `weights` on demand, and the layer's other arguments.

    Args:
        layer: its name, such as "erk.Embedding", for error messages.
        weights: an array or a tensor, (rows, dim).
        dtype: dtype of the layer; None for that of `weights`.
        options: all other arguments, those of the table included.
    """
    for name in options:
        if remedy := (REFUSED | OF_WEIGHTS).get(name):
            raise UnsupportedError(f"`{name}` of {layer}.from_pretrained: {remedy}.")
    array = _array(weights)
    if getattr(array, "ndim", None) != 2:
        got = f"shape {tuple(weights.shape)}" if hasattr(weights, "shape") else type(weights).__name__
        raise ArgumentError(f"`weights` of {layer} must be a 2-D array or tensor (rows, dim): got {got}.")
    native = array.dtype.name
    policy = None if dtype is None else keras.dtype_policies.get(dtype)
    stored = native if policy is None else policy.variable_dtype
    if stored not in TABLE_DTYPES:
        raise ArgumentError(
            f"`weights` of {layer} are {native}, which a table cannot hold. Pass dtype='float32' to have rows "
            "converted when they are read."
        )
    if policy is None and native != keras.config.dtype_policy().variable_dtype:
        policy = keras.DTypePolicy(native)
    of_table = {name: value for name, value in options.items() if name in declared(LayerOptions)}
    init = FromBfloat16(array) if native == "bfloat16" else FromArray(array)
    rows, dim = array.shape
    first = drawn_by(init, None, rows, dim).first
    table = make_table(rows, dim, {**of_table, "init": init, "dtype": stored, "name": options.get("name")}, first)
    return table, {"dtype": policy, **{name: value for name, value in options.items() if name not in of_table}}


def _array(weights: Any) -> Any:
    """Return a tensor's values as an array, without a copy if they are in RAM. Return other values unchanged."""
    if isinstance(weights, keras.Variable):
        weights = weights.value
    if isinstance(weights, tf.Variable):
        weights = weights.read_value()
    if isinstance(weights, tf.Tensor):
        # tensor.numpy() copies. For bfloat16 no other way has a dtype.
        viewed: Any = weights
        return weights.numpy() if weights.dtype == tf.bfloat16 else np.asarray(memoryview(viewed))
    return weights
