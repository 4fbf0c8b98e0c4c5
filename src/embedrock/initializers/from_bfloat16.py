"""Rows that start as those of a bfloat16 array: PyTorch's and TensorFlow's dtype, which NumPy lacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from embedrock.initializers.from_array import FromArray


@dataclass(frozen=True, eq=False)
class FromBfloat16(FromArray):
    """Row ``i`` starts as the bfloat16 values whose bits are ``array[i]``; otherwise as `FromArray`, and saved as that.

    Args:
        array: 2-D (rows, dim), of any dtype of two bytes: ``tensor.view(torch.int16).numpy()``, or an array of
            ml_dtypes' bfloat16.

    Example:
        >>> FromBfloat16(np.ones((3, 2), np.uint16))
        FromBfloat16(array=<bfloat16 (3, 2)>)
    """

    array: np.ndarray

    def __post_init__(self) -> None:
        self._check_array("2-byte values", lambda dtype: dtype.itemsize == 2)

    def fill(self, ids: np.ndarray, key: np.uint64, out: np.ndarray) -> None:
        # In id order, as FromArray does. The bits of a bfloat16 are the upper half of a float32's.
        order = np.argsort(ids)
        out[order] = (self.array[ids[order]].view(np.uint16).astype(np.uint32) << 16).view(np.float32)

    def describe(self) -> dict[str, Any]:
        return {"name": FromArray.__name__, "dtype": "bfloat16", "shape": list(self.array.shape)}

    def __repr__(self) -> str:
        return f"FromBfloat16(array=<bfloat16 {self.array.shape}>)"
