"""First values of rows. A new one is a file here and a row in `INITIALIZERS`."""

from __future__ import annotations

from embedrock.initializers._initializer import Initializer
from embedrock.initializers.constant import Constant, Zeros
from embedrock.initializers.from_array import FromArray
from embedrock.initializers.normal import Normal
from embedrock.initializers.uniform import Uniform

INITIALIZERS: tuple[type[Initializer], ...] = (Zeros, Constant, Uniform, Normal, FromArray)

__all__ = ["INITIALIZERS", "Constant", "FromArray", "Initializer", "Normal", "Uniform", "Zeros"]
