"""`Given`: rows that somebody made, and those of arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from embedrock.errors import ArgumentError
from embedrock.initializers.formulas import Initializer
from embedrock.system import forks

# Most rows of an array in its digest, evenly spread: saving a table does not read a file of terabytes.
DIGEST_BYTES = 64 << 20
DIGEST_ROWS = 1024


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


@dataclass(frozen=True, eq=False)
class FromArray(Given):
    """Rows of an array: row ``i`` starts as ``array[i]``. The array is never copied: rows are read from it when needed.

    Args:
        array: 2-D (rows, dim), of floats; a `np.memmap` stays on disk. It must not change while a table uses it.

    Example:
        >>> FromArray(np.ones((3, 2), np.float32))
        FromArray(array=<float32 (3, 2)>)
    """

    array: np.ndarray
    subject = "`array` of FromArray"

    def __post_init__(self) -> None:
        self._check_array("floats", lambda dtype: dtype.kind == "f")

    def _check_array(self, values: str, fits: Callable[[np.dtype], bool]) -> None:
        if not isinstance(self.array, np.ndarray) or self.array.ndim != 2 or not fits(self.array.dtype):
            got = f"{getattr(self.array, 'dtype', type(self.array).__name__)} {getattr(self.array, 'shape', '')}"
            raise ArgumentError(
                f"`array` of {type(self).__name__} must be a 2-D NumPy array of {values}: got {got.strip()}."
            )

    @property
    def shape(self) -> tuple[int, int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.array.shape

    @property
    def dtype(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return str(self.array.dtype)

    def fill(self, ids: np.ndarray, key: np.uint64, out: np.ndarray) -> None:
        # In id order, because a file is read fastest in its own order.
        order = np.argsort(ids)
        out[order] = self._floats(self.array[ids[order]])

    def _floats(self, rows: np.ndarray) -> np.ndarray:
        return rows

    @forks.cached_property
    def digest(self) -> str | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        spread = np.linspace(0, len(self.array) - 1, DIGEST_ROWS).astype(np.int64)
        content = self.array if self.array.nbytes <= DIGEST_BYTES else self.array[spread]
        return hashlib.blake2b(np.ascontiguousarray(content).tobytes(), digest_size=8).hexdigest()

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "name": "FromArray"}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(array=<{self.dtype} {self.shape}>)"


class FromBfloat16(FromArray):
    """Rows of a bfloat16 array: row ``i`` starts as the values with the bits ``array[i]``.

    Saved tables record a `FromArray`.

    Args:
        array: 2-D (rows, dim), of any dtype of two bytes: ``tensor.view(torch.int16).numpy()``, or an array of
            ml_dtypes' bfloat16.

    Example:
        >>> FromBfloat16(np.ones((3, 2), np.uint16))
        FromBfloat16(array=<bfloat16 (3, 2)>)
    """

    def __post_init__(self) -> None:
        self._check_array("2-byte values", lambda dtype: dtype.itemsize == 2)

    def _floats(self, rows: np.ndarray) -> np.ndarray:
        # The bits of a bfloat16 are the upper half of a float32's.
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)

    @property
    def dtype(self) -> str:
        return "bfloat16"
