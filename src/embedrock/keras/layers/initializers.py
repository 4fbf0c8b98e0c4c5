"""Keras' initializers as those of rows, whose first values are a pure function of (seed, id, column)."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf
from keras import initializers

from embedrock.errors import ArgumentError, UnsupportedError
from embedrock.fronts.initializers import OTHERS, needs_rows, scaled
from embedrock.initializers import Constant, Initializer, Normal, TruncatedNormal, Uniform, Zeros
from embedrock.keras.workers.exchange import WorkerGroup
from embedrock.table.opening import InitialValuesOf
from embedrock.wording import did_you_mean

DEFAULT = "uniform"  # as in `keras.layers.Embedding`
KINDS = ("uniform", "normal")
NAMES = (
    *("zeros", "ones", "truncated_normal"),
    *(f"{name}_{kind}" for name in ("random", "glorot", "he", "lecun") for kind in KINDS),
)
OTHER_NAMES = (("xavier", "glorot"), ("kaiming", "he"))  # PyTorch's, and Keras' of the same
ALIASES = {f"{theirs}_{kind}": f"{ours}_{kind}" for theirs, ours in OTHER_NAMES for kind in KINDS}


class Drawn(NamedTuple):
    """What draws the rows of a layer.

    Attributes:
        initializer: that was given, of Keras' or of Embedrock's.
        init: the same, as a table has it.
        seed: that was given to the layer, or to its initializer.
        first: what a new table takes where these are None, which means that they were not given.
    """

    initializer: Any
    init: Initializer | None
    seed: int | None
    first: InitialValuesOf


def drawn_by(given: Any, seed: int | None, rows: int | None, dim: int) -> Drawn:
    """Return what draws the rows of a layer.

    A seed that was not given is what Keras draws for an initializer, once for each layer: so the other layers of a
    model start as they do beside `keras.layers.Embedding`. Workers take that of the first of them.

    Args:
        given: a name, a config or an instance of Keras', or one of Embedrock's; None: `DEFAULT`.
        seed: of the layer. That of an initializer goes before 0, the seed of layers that files of 0.1 describe.
        rows: of the table, None for open ids.
        dim: of the table.

    Raises:
        UnsupportedError: an initializer that no row can be drawn by alone.
    """
    made = given if isinstance(given, Initializer) else _keras_initializer(DEFAULT if given is None else given)
    init = made if isinstance(made, Initializer) else _translated(made, given, rows, dim)
    brought = getattr(made, "_init_seed", None)
    if isinstance(brought, int) and not seed:
        seed = brought
    # An instance drew its own when it was made, which would be that of all the layers that it is given to.
    first = InitialValuesOf(init, _drawn_seed(None if made is given else made) if seed is None else seed)
    return Drawn(None if given is None else made, None if given is None else init, seed, first)


def _drawn_seed(made: Any) -> int:
    """Return the seed that Keras drew for an initializer that it made, or else draws for another one."""
    drawn = getattr(made, "seed", None)
    own: Any = drawn if isinstance(drawn, int) else initializers.RandomUniform().seed
    return WorkerGroup(tf.distribute.get_strategy()).first(own)


def _keras_initializer(given: Any) -> Any:
    try:
        return initializers.get(ALIASES.get(given, given) if isinstance(given, str) else given)
    except KeyError as error:  # "constant", or a config without what it needs
        raise ArgumentError(
            f"`embeddings_initializer` {given!r} lacks its {error}. Pass an instance: keras.initializers.Constant(0.1)."
        ) from error
    except (ValueError, TypeError) as error:
        near = did_you_mean(given, [*NAMES, *ALIASES]) if isinstance(given, str) else ""
        raise ArgumentError(
            f"`embeddings_initializer` must be one of Keras' or of Embedrock's, such as er.Uniform(-0.05, 0.05): got "
            f"{given!r}.{near}"
        ) from error


def _translated(made: Any, given: Any, rows: int | None, dim: int) -> Initializer:
    if type(made) in vars(initializers).values():  # a class of somebody's own draws as it likes, whatever it is made of
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
            case initializers.TruncatedNormal():
                return TruncatedNormal(made.mean, made.stddev)
            case initializers.VarianceScaling():
                return _scaled(made, given, rows, dim)
    raise UnsupportedError(
        f"`embeddings_initializer` must draw each row by itself: got {given!r}. Use {', '.join(NAMES)}, or one of "
        f"Embedrock's: er.Normal(std=0.05). {OTHERS}."
    )


def _scaled(made: Any, given: Any, rows: int | None, dim: int) -> Initializer:
    """Return what is scaled by the fans of a weight (rows, dim): for Keras, that is (fan_in, fan_out)."""
    if rows is None and made.mode != "fan_out":
        raise ArgumentError(needs_rows("`embeddings_initializer`", given))
    fans = {"fan_in": rows or 0, "fan_out": dim, "fan_avg": ((rows or 0) + dim) / 2}
    distribution = "normal" if made.distribution == "untruncated_normal" else made.distribution
    return scaled(distribution, made.scale / max(1.0, fans[made.mode]))
