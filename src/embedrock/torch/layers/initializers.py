"""PyTorch's initializers as initializers of rows: names, functions of `torch.nn.init`, and partials of these.

A weight of shape (rows, dim) has fan_in = dim and fan_out = rows, as in `torch.nn.init`. Keras swaps the two.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch.nn import init as functions

from embedrock.errors import ArgumentError, UnsupportedError, did_you_mean
from embedrock.frontend.arguments import OTHERS, needs_rows, scaled
from embedrock.initializers import Constant, Initializer, Normal, TruncatedNormal, Uniform, Zeros

NEVER_BEYOND = 6.34  # standard deviations: `Normal` draws no value beyond


def _kaiming(distribution: str, a: float, mode: str, nonlinearity: Any, rows: int | None, dim: int) -> Initializer:
    fans = {"fan_in": dim, "fan_out": rows}
    if mode not in fans:
        raise ArgumentError(f"`mode` of kaiming initialization must be one of {', '.join(fans)}: got {mode!r}.")
    fan = fans[mode]
    assert fan is not None  # the caller has checked it
    try:
        gain = functions.calculate_gain(nonlinearity, a)
    except ValueError as error:
        raise ArgumentError(f"`nonlinearity` of kaiming initialization: {error}.") from error
    return scaled(distribution, gain**2 / fan)


def _truncated(mean: float, std: float, a: float, b: float) -> Initializer:
    below, above = ((mean - a) / std, (b - mean) / std) if std > 0 else (NEVER_BEYOND, NEVER_BEYOND)
    if min(below, above) >= NEVER_BEYOND:
        return Normal(mean, std)
    if abs(below - above) > 1e-6 * above:
        raise UnsupportedError(
            f"trunc_normal_ of rows must be cut off as far below the mean as above it: got mean={mean}, a={a}, b={b}. "
            "Use er.TruncatedNormal(mean, std, cut), which is."
        )
    return TruncatedNormal(mean, std, above)


# By name of the function of `torch.nn.init`: makes an initializer from its arguments, rows and dim.
FORMULAS: dict[str, Callable[[dict[str, Any], Any, int], Initializer]] = {
    "zeros_": lambda given, rows, dim: Zeros(),
    "ones_": lambda given, rows, dim: Constant(1.0),
    "constant_": lambda given, rows, dim: Constant(given["val"]),
    "uniform_": lambda given, rows, dim: Uniform(given["a"], given["b"]),
    "normal_": lambda given, rows, dim: Normal(given["mean"], given["std"]),
    "trunc_normal_": lambda given, rows, dim: _truncated(**given),
    "xavier_uniform_": lambda given, rows, dim: scaled("uniform", given["gain"] ** 2 * 2.0 / (dim + rows)),
    "xavier_normal_": lambda given, rows, dim: scaled("normal", given["gain"] ** 2 * 2.0 / (dim + rows)),
    "kaiming_uniform_": lambda given, rows, dim: _kaiming("uniform", rows=rows, dim=dim, **given),
    "kaiming_normal_": lambda given, rows, dim: _kaiming("normal", rows=rows, dim=dim, **given),
}
LINEAR = {"nonlinearity": "linear"}
NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name.rstrip("_"): (name, {}) for name in FORMULAS if name != "constant_"},
    "truncated_normal": ("trunc_normal_", {}),
    **{f"glorot_{kind}": (f"xavier_{kind}_", {}) for kind in ("uniform", "normal")},
    **{f"he_{kind}": (f"kaiming_{kind}_", {}) for kind in ("uniform", "normal")},
    **{f"lecun_{kind}": (f"kaiming_{kind}_", LINEAR) for kind in ("uniform", "normal")},
}


def initializer_of(layer: str, given: Any, rows: Any, dim: Any) -> Any:
    """Return a layer's `init` in the form that a table takes. The table checks rows and dim.

    Args:
        layer: its name in error messages, such as "ert.Embedding".
        given: one of Embedrock's initializers, a name, a function of `torch.nn.init`, a `functools.partial` of one, or
            None.
        rows: number of rows of the table, None for open ids.
        dim: dim of the table.

    Raises:
        ArgumentError: the name is unknown, the function does not take an argument, or it needs the number of open ids.
        UnsupportedError: the function is no formula for each weight alone.
    """
    if given is None or isinstance(given, Initializer):
        return given
    name, arguments = _named(layer, given)
    if not (isinstance(dim, int) and dim > 0 and (rows is None or (isinstance(rows, int) and rows > 0))):
        return None
    if rows is None and (name.startswith("xavier") or arguments.get("mode") == "fan_out"):
        raise ArgumentError(needs_rows(f"`init` of {layer}:", given))
    return FORMULAS[name](arguments, rows, dim)


def _named(layer: str, given: Any) -> tuple[str, dict[str, Any]]:
    """Return the name of a function of `torch.nn.init`, and its arguments without the tensor."""
    if isinstance(given, str):
        if given.rstrip("_") not in NAMES:
            near = did_you_mean(given.rstrip("_"), NAMES)
            raise ArgumentError(f"`init` of {layer} must be one of {', '.join(NAMES)}: got {given!r}.{near}")
        name, keywords = NAMES[given.rstrip("_")]
        return name, _arguments(layer, name, keywords)
    function, keywords = (given.func, given.keywords) if isinstance(given, functools.partial) else (given, {})
    name = next((name for name in FORMULAS if getattr(functions, name) is function), None)
    if name is None or (isinstance(given, functools.partial) and given.args):
        takes = ", ".join(name for name in FORMULAS)
        raise UnsupportedError(
            f"`init` of {layer} must be a name, a function of torch.nn.init ({takes}), functools.partial of one with "
            f"arguments by name, or one of Embedrock's, such as er.Normal(std=0.05): got {given!r}. {OTHERS}."
        )
    return name, _arguments(layer, name, keywords)


def _arguments(layer: str, name: str, keywords: dict[str, Any]) -> dict[str, Any]:
    signature = inspect.signature(getattr(functions, name))
    try:
        bound = signature.bind(None, **keywords)
    except TypeError as error:
        raise ArgumentError(f"`init` of {layer}: torch.nn.init.{name} takes other arguments: {error}.") from error
    bound.apply_defaults()
    arguments = {key: value for key, value in bound.arguments.items() if key not in ("tensor", "generator")}
    if bound.arguments.get("generator") is not None:
        raise UnsupportedError(f"`generator` of torch.nn.init.{name} cannot draw rows of {layer}: pass seed= instead.")
    return arguments
