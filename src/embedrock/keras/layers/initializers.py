"""Keras' initializers as those of rows, whose first values are a pure function of (seed, id, column)."""

from __future__ import annotations

import math
from typing import Any

from keras import initializers

from embedrock.errors import ArgumentError, UnsupportedError
from embedrock.initializers import Constant, Initializer, Normal, Uniform, Zeros


def initializer_of(given: Any, rows: int | None, dim: int) -> tuple[Initializer, int | None]:
    """Return what draws first values, and the seed that it brings (None: none).

    Args:
        given: a name, a config or an instance of Keras', or one of Embedrock's.
        rows: of the table, None for open ids.
        dim: of the table.

    Raises:
        UnsupportedError: an initializer that no row can be drawn by alone.
    """
    if isinstance(given, Initializer):
        return given, None
    try:
        made = initializers.get(given)
    except (ValueError, TypeError) as error:
        raise ArgumentError(
            f"`embeddings_initializer` must be one of Keras' or of Embedrock's, such as er.Uniform(-0.05, 0.05): got "
            f"{given!r}."
        ) from error
    seed = getattr(made, "_init_seed", None)
    return _translated(made, given, rows, dim), seed if isinstance(seed, int) else None


def _translated(made: Any, given: Any, rows: int | None, dim: int) -> Initializer:
    match made:
        case initializers.Zeros():
            return Zeros()
        case initializers.Ones():
            return Constant(1.0)
        case initializers.Constant():
            return Constant(made.value)
        case initializers.RandomUniform():
            return Uniform(made.minval, made.maxval)
        case initializers.RandomNormal():
            return Normal(made.mean, made.stddev)
        case initializers.VarianceScaling() if made.distribution in ("uniform", "untruncated_normal") and rows:
            fans = {"fan_in": rows, "fan_out": dim, "fan_avg": (rows + dim) / 2}
            variance = made.scale / max(1.0, fans[made.mode])
            if made.distribution == "uniform":
                return Uniform(-math.sqrt(3 * variance), math.sqrt(3 * variance))
            return Normal(0.0, math.sqrt(variance))
    raise UnsupportedError(
        f"`embeddings_initializer` must draw each row by itself: got {given!r}. Use zeros, ones, constant, "
        "random_uniform, random_normal, glorot_uniform, he_uniform or lecun_uniform, or one of Embedrock's: "
        "er.Normal(std=0.05)."
    )
