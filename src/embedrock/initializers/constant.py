"""Rows that start with one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from embedrock import kernels
from embedrock.initializers._initializer import Initializer, check_number


@dataclass(frozen=True)
class Constant(Initializer):
    """Initial values that are all `value`.

    Example:
        >>> Constant(0.5)
        Constant(value=0.5)
    """

    value: float

    def __post_init__(self) -> None:
        check_number("`value` of Constant", self.value)

    def fill(self, ids: np.ndarray, key: np.uint64, out: np.ndarray) -> None:
        kernels.cpu.launch(kernels.cpu.generator.constant_values, ids, float(self.value), out)


@dataclass(frozen=True)
class Zeros(Constant):
    """Initial values that are all 0.

    Example:
        >>> Zeros()
        Zeros()
    """

    value: float = 0.0

    def __init__(self) -> None:
        super().__init__(0.0)

    def describe(self) -> dict[str, Any]:
        return {"name": "Zeros"}

    def __repr__(self) -> str:
        return "Zeros()"
