"""Rows that start uniformly distributed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embedrock import kernels
from embedrock.errors import ArgumentError
from embedrock.initializers._initializer import Initializer, check_number


@dataclass(frozen=True)
class Uniform(Initializer):
    """Weights start uniformly distributed in ``[low, high]``; ``docs/first-values.md`` has the exact definition.

    Example:
        >>> Uniform(-0.05, 0.05)
        Uniform(low=-0.05, high=0.05)
    """

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        check_number("`low` of Uniform", self.low)
        check_number("`high` of Uniform", self.high)
        if self.low > self.high:
            raise ArgumentError(f"`low` of Uniform must not exceed `high`: got {self.low!r} and {self.high!r}.")
        check_number("`high - low` of Uniform", float(self.high) - float(self.low))

    def fill(self, ids: np.ndarray, key: np.uint64, out: np.ndarray) -> None:
        kernels.cpu.launch(kernels.cpu.generator.uniform_values, ids, key, float(self.low), float(self.high), out)
