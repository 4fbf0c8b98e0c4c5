"""Initial values of rows. A new initializer is a class in a file here, and a row in `INITIALIZERS`."""

from __future__ import annotations

import sys

from embedrock.initializers.safetensors import FromSafetensors
from embedrock.initializers.values import (
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

INITIALIZERS = Zeros, Constant, Uniform, Normal, TruncatedNormal, FromArray, FromSafetensors

# Pickles of earlier versions name the modules that these classes were in.
for _module in ("constant", "from_array", "normal"):
    sys.modules[f"{__name__}.{_module}"] = sys.modules[__name__]

__all__ = [
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
]
