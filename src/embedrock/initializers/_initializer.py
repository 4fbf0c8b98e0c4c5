"""`Initializer`: the initial values of rows. `Given`: rows that somebody else made."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import Any

import numpy as np

from embedrock.errors import ArgumentError

FLOAT32_MAX = float(np.finfo(np.float32).max)


class Initializer(ABC):
    """A function for the initial value of a row. Subclasses are frozen dataclasses."""

    @abstractmethod
    def fill(self, ids: np.ndarray, key: np.uint64, out: np.ndarray) -> None:
        """Write initial values of rows ``ids`` int64 (n,) to ``out`` float32 (n, dim); `key` is the table's seed."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:  # pyright: ignore[reportAttributeAccessIssue]
            check_number(f"`{name}` of {type(self).__name__}", getattr(self, name))

    def check(self, rows: int | None, dim: int) -> None:
        """Raise `ArgumentError` if it cannot serve a table of `rows` rows (None: open ids) of `dim` columns."""
        return None

    @property
    def digest(self) -> str | None:
        """Digest of values that `describe` leaves out; None: it describes them all."""
        return None

    def describe(self) -> dict[str, Any]:
        """Return plain data for `read_initializer`."""
        return {"name": type(self).__name__, **asdict(self)}  # pyright: ignore[reportArgumentType]


def check_number(subject: str, value: Any) -> None:
    """Raise `ArgumentError` unless `value` is a finite float32."""
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or abs(float(value)) > FLOAT32_MAX:
        raise ArgumentError(f"{subject} must be a finite number: got {value!r}.")


class Given(Initializer):
    """Initial values that somebody made, for all rows of a table. A saved table does not have them, but knows them.

    Attributes:
        shape: rows and columns.
        dtype: name of the values' dtype, "bfloat16" too.
        subject: name of the values in error messages.
    """

    shape: tuple[int, int]
    dtype: str
    subject: str

    def check(self, rows: int | None, dim: int) -> None:
        if (rows, dim) != self.shape:
            raise ArgumentError(f"{self.subject} must have the table's shape ({rows}, {dim}): got {self.shape}.")

    def describe(self) -> dict[str, Any]:
        return {"name": type(self).__name__, "dtype": self.dtype, "shape": list(self.shape)}
