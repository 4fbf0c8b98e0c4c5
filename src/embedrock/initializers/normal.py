"""Rows that start normally distributed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embedrock import kernels
from embedrock.errors import ArgumentError
from embedrock.initializers._initializer import Initializer, check_number


@dataclass(frozen=True)
class Normal(Initializer):
    """Weights start normally distributed; ``docs/first-values.md`` has the exact definition.

    Example:
        >>> Normal(std=0.01)
        Normal(mean=0.0, std=0.01)
    """

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        check_number("`mean` of Normal", self.mean)
        check_number("`std` of Normal", self.std)
        if self.std < 0:
            raise ArgumentError(f"`std` of Normal must not be negative: got {self.std!r}.")

    def fill(self, ids: np.ndarray, key: np.uint64, out: np.ndarray) -> None:
        kernels.cpu.launch(kernels.cpu.generator.normal_values, ids, key, float(self.mean), float(self.std), out)
