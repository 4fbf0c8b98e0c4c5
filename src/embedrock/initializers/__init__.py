"""Initial values of rows. A new initializer is a class in a file here, and a row in `INITIALIZERS`."""

from __future__ import annotations

import sys

from embedrock.initializers._initializer import FLOAT32_MAX, Given, Initializer, check_number
from embedrock.initializers.arrays import FromArray, FromBfloat16
from embedrock.initializers.formulas import Constant, Normal, TruncatedNormal, Uniform, Zeros
from embedrock.initializers.safetensors import FromSafetensors

INITIALIZERS: tuple[type[Initializer], ...] = (
    Zeros,
    Constant,
    Uniform,
    Normal,
    TruncatedNormal,
    FromArray,
    FromSafetensors,
)

# Pickles of earlier versions name the modules that these classes were in.
for _module in ("constant", "from_array", "normal"):
    sys.modules[f"{__name__}.{_module}"] = sys.modules[__name__]

__all__ = [
    "FLOAT32_MAX",
    "INITIALIZERS",
    "Constant",
    "FromArray",
    "FromBfloat16",
    "FromSafetensors",
    "Given",
    "Initializer",
    "Normal",
    "TruncatedNormal",
    "Uniform",
    "Zeros",
    "check_number",
]
