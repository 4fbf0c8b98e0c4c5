"""`Initializer`: gives the first value of a row, a pure function of (seed, id, column)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from embedrock.errors import ArgumentError


class Initializer(ABC):
    """Gives the first value of a row. Subclasses are frozen dataclasses."""

    @abstractmethod
    def fill(self, ids: np.ndarray, seed: int, out: np.ndarray) -> None:
        """Write the first values of rows ``ids`` int64 (n,) to ``out`` float32 (n, dim)."""

    def check(self, rows: int | None, dim: int) -> None:
        """Raise `ArgumentError` where it cannot serve a table of `rows` rows (None: open ids) of `dim` columns."""
        return None


def check_number(subject: str, value: Any) -> None:
    """Raise `ArgumentError` unless `value` is a finite float32."""
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or abs(value) > np.finfo(np.float32).max:
        raise ArgumentError(f"{subject} must be a finite number: got {value!r}.")
