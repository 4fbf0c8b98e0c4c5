"""Initial values of rows. A new initializer is a file here, a row in `INITIALIZERS`, and arithmetic in the kernels."""

from __future__ import annotations

from typing import Any

from embedrock.errors import not_one_of
from embedrock.initializers._initializer import Initializer
from embedrock.initializers.constant import Constant, Zeros
from embedrock.initializers.from_array import FromArray, FromBfloat16
from embedrock.initializers.normal import Normal, TruncatedNormal, Uniform

INITIALIZERS: tuple[type[Initializer], ...] = (Zeros, Constant, Uniform, Normal, TruncatedNormal, FromArray)


def read_initializer(description: dict[str, Any]) -> Initializer:
    """Return the initializer of an `Initializer.describe` description.

    Raises:
        ArgumentError: it cannot be made from plain data (`FromArray`), or its kind is unknown.
    """
    kinds = {kind.__name__: kind for kind in INITIALIZERS if kind is not FromArray}
    arguments = {key: value for key, value in description.items() if key != "name"}
    if description.get("name") not in kinds:
        raise not_one_of("a saved initializer", description.get("name"), kinds)
    return kinds[description["name"]](**arguments)


__all__ = [
    "INITIALIZERS",
    "Constant",
    "FromArray",
    "FromBfloat16",
    "Initializer",
    "Normal",
    "TruncatedNormal",
    "Uniform",
    "Zeros",
    "read_initializer",
]
