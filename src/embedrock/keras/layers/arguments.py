"""Arguments of Keras' layers: their options, initializers in Keras' words, and pretrained weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import keras
import numpy as np
import tensorflow as tf
from keras import initializers

from embedrock.errors import ArgumentError, UnsupportedError, did_you_mean
from embedrock.frontend.arguments import OTHERS, check_no_codes, make_table, needs_rows, scaled
from embedrock.frontend.pretrained import weights_of
from embedrock.initializers import (
    Constant,
    FromArray,
    FromBfloat16,
    Given,
    Initializer,
    Normal,
    TruncatedNormal,
    Uniform,
    Zeros,
)
from embedrock.keras.workers.cluster import WorkerGroup
from embedrock.table.group import Group
from embedrock.table.opening import InitialValuesOf
from embedrock.table.options import LayerOptions, TableOption, declared
from embedrock.table.table import Table

REFUSED = {
    "weights": "use from_pretrained(weights), which copies nothing",
    **dict.fromkeys(("lora_rank", "lora_alpha"), "rows are trained themselves. Leave it out"),
    "quantization_config": 'use dtype="bfloat16" for rows of half the size',
    "input_length": "it is not needed. Leave it out",
    **dict.fromkeys(("input_shape", "batch_shape", "batch_input_shape", "batch_size"), "use keras.Input"),
}
# Of keras.layers.Embedding.
REFUSED_METHODS = {
    "quantize": 'use dtype="bfloat16" for rows of half the size',
    "enable_lora": "rows are trained themselves, and a step touches only those of its batch",
}
TABLE_DTYPES = ("float32", "bfloat16", "float16")


class RowOptions(LayerOptions, total=False):
    """Options of `Embedding` and `EmbeddingBag` for their table."""

    group: Annotated[Group | None, TableOption(16, None)]
    sharded: Annotated[bool, TableOption(17, False)]
    wire: Annotated[str, TableOption(21, "float32")]
    missing: Annotated[Any, TableOption(23, None)]


class RowLayerOptions(RowOptions, total=False):
    """Options of `Embedding` and `EmbeddingBag`: those of a table, and those of all layers of Keras."""

    name: str | None
    trainable: bool
    dtype: Any
    autocast: bool
    activity_regularizer: Any


OF_KERAS = RowLayerOptions.__annotations__.keys() - RowOptions.__annotations__.keys()
KNOWN = (
    *("input_dim", "output_dim", "embeddings_initializer", "embeddings_regularizer", "embeddings_constraint"),
    *("mask_zero", "mode", *declared(RowOptions), *OF_KERAS),
)


# ---------------------------------------------------------------- initial values

DEFAULT = "uniform"  # as in `keras.layers.Embedding`
KINDS = ("uniform", "normal")
NAMES = (
    *("zeros", "ones", "truncated_normal"),
    *(f"{name}_{kind}" for name in ("random", "glorot", "he", "lecun") for kind in KINDS),
)
OTHER_NAMES = (("xavier", "glorot"), ("kaiming", "he"))  # PyTorch's, and Keras' of the same
ALIASES = {f"{theirs}_{kind}": f"{ours}_{kind}" for theirs, ours in OTHER_NAMES for kind in KINDS}


def drawn_by(given: Any, seed: int | None, rows: int | None, dim: int) -> tuple[Any, dict[str, Any], InitialValuesOf]:
    """Return a layer's initializer, and the initial values of its rows.

    Without a seed, Keras draws one for the initializer, once for each layer. So a model's other layers start as they do
    beside `keras.layers.Embedding`. All workers take the first worker's seed.

    Args:
        given: a name, a config or an instance of Keras', or one of Embedrock's; None: `DEFAULT`.
        seed: the layer's seed. The initializer's seed wins over 0, the seed of layers in files of 0.1.
        rows: rows of the table, None for open ids.
        dim: weights in a row of the table.

    Returns:
        The given initializer, of Keras' or of Embedrock's. The options `init` and `seed` of a table, as far as they are
        given. Initializer and seed of a new table without these options.

    Raises:
        UnsupportedError: an initializer that cannot draw each row by itself.
    """
    made = given if isinstance(given, Initializer) else _keras_initializer(DEFAULT if given is None else given)
    init = made if isinstance(made, Initializer) else _translated(made, given, rows, dim)
    brought = getattr(made, "_init_seed", None)
    if isinstance(brought, int) and not seed:
        seed = brought
    # An instance drew its seed when it was made. All layers that share the instance would share that seed.
    first = InitialValuesOf(init, _drawn_seed(None if made is given else made) if seed is None else seed)
    if given is None:
        return None, {"init": None, "seed": seed}, first
    return made, {"init": init, "seed": seed}, first


def _drawn_seed(made: Any) -> int:
    """Return the seed that Keras drew for its initializer; without one, draw a seed as Keras does."""
    drawn = getattr(made, "seed", None)
    own: Any = drawn if isinstance(drawn, int) else initializers.RandomUniform().seed
    return WorkerGroup(tf.distribute.get_strategy()).first(own)


def _keras_initializer(given: Any) -> Any:
    try:
        return initializers.get(ALIASES.get(given, given) if isinstance(given, str) else given)
    except KeyError as error:  # "constant", or a config that lacks an argument
        raise ArgumentError(
            f"`embeddings_initializer` {given!r} lacks its {error}. Pass an instance: keras.initializers.Constant(0.1)."
        ) from error
    except (ValueError, TypeError) as error:
        near = did_you_mean(given, [*NAMES, *ALIASES]) if isinstance(given, str) else ""
        raise ArgumentError(
            f"`embeddings_initializer` must be one of Keras' or of Embedrock's, such as er.Uniform(-0.05, 0.05): got "
            f"{given!r}.{near}"
        ) from error


# By Keras' class of an initializer: makes the table's.
_FORMULAS: dict[type, Callable[[Any], Initializer]] = {
    initializers.Zeros: lambda made: Zeros(),
    initializers.Ones: lambda made: Constant(1.0),
    initializers.Constant: lambda made: Constant(made.value),
    initializers.RandomUniform: lambda made: Uniform(made.minval, made.maxval),
    initializers.RandomNormal: lambda made: Normal(made.mean, made.stddev),
    initializers.TruncatedNormal: lambda made: TruncatedNormal(made.mean, made.stddev),
}


def _translated(made: Any, given: Any, rows: int | None, dim: int) -> Initializer:
    kind = type(made)  # a user's class draws as it likes, whatever its base
    if kind in _FORMULAS:
        return _FORMULAS[kind](made)
    if not isinstance(made, initializers.VarianceScaling) or kind not in vars(initializers).values():
        raise UnsupportedError(
            f"`embeddings_initializer` must draw each row by itself: got {given!r}. Use {', '.join(NAMES)}, or one of "
            f"Embedrock's: er.Normal(std=0.05). {OTHERS}."
        )
    if rows is None and made.mode != "fan_out":
        raise ArgumentError(needs_rows("`embeddings_initializer`", given))
    fans = {"fan_in": rows or 0, "fan_out": dim, "fan_avg": ((rows or 0) + dim) / 2}  # of a weight (rows, dim)
    distribution = "normal" if made.distribution == "untruncated_normal" else made.distribution
    return scaled(distribution, made.scale / max(1.0, fans[made.mode]))


# ---------------------------------------------------------------- pretrained weights

OF_WEIGHTS = {
    **dict.fromkeys(("input_dim", "output_dim"), "it is that of the weights. Leave it out"),
    **dict.fromkeys(("embeddings_initializer", "seed"), "rows start as the weights. Leave it out"),
}


def pretrained_options(
    layer: str, weights: Any, tensor: str | None, dtype: Any, options: dict[str, Any]
) -> tuple[Table, dict[str, Any]]:
    """Return a table whose rows are read from `weights` (rows, dim) on demand, and the layer's other arguments."""
    for name in options:
        if remedy := (REFUSED | OF_WEIGHTS).get(name):
            raise UnsupportedError(f"`{name}` of {layer}.from_pretrained: {remedy}.")
    weights = weights_of(weights, tensor, f"`weights` of {layer}")
    init = weights if isinstance(weights, Given) else _given(layer, weights)
    native = init.dtype
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
    rows, dim = init.shape
    first = InitialValuesOf(init, _drawn_seed(None))
    table = make_table(rows, dim, {**of_table, "init": init, "dtype": stored, "name": options.get("name")}, first)
    return table, {"dtype": policy, **{name: value for name, value in options.items() if name not in of_table}}


def _given(layer: str, weights: Any) -> Given:
    """Return the initializer that reads the rows of a tensor or array."""
    array = _array(weights)
    if getattr(array, "ndim", None) != 2:
        got = f"shape {tuple(weights.shape)}" if hasattr(weights, "shape") else type(weights).__name__
        raise ArgumentError(f"`weights` of {layer} must be a 2-D array or tensor (rows, dim): got {got}.")
    check_no_codes(f"`weights` of {layer}", array.dtype.name)
    return FromBfloat16(array) if array.dtype.name == "bfloat16" else FromArray(array)


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
