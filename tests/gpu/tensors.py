"""Tensors where GPU kernels take them, and poisoned ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from embedrock.kernels.gpu import gate, runtime

DEVICE = "cpu" if runtime.is_interpreted() else "cuda"
GUARD = 64  # bytes of poison before and after what a kernel may write to


def tensor(array: np.ndarray) -> torch.Tensor:
    """Return a copy on the device."""
    return torch.from_numpy(array.copy()).to(DEVICE)


def one(value: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([value], dtype=dtype, device=DEVICE)


def verdict(live: int, factor: float = 1.0) -> torch.Tensor:
    """Return a table's verdict, as `gate.judge` writes it: int32 (LINE,)."""
    made = torch.zeros(gate.LINE, dtype=torch.int32, device=DEVICE)
    made[gate.LIVE], made[gate.FACTOR] = live, int(np.float32(factor).view(np.int32))
    return made


class Poisoned:
    """Memory of a recognizable pattern with guards on both sides; `inside` is what a kernel may write to."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        size = int(np.prod(shape)) * dtype.itemsize
        self._whole = torch.full((size + 2 * GUARD,), 0xFF, dtype=torch.uint8, device=DEVICE)
        self.inside = self._whole[GUARD : GUARD + size].view(dtype).view(shape)

    def check(self, written: int) -> np.ndarray:
        """Fail where anything was written to but the first rows; return these."""
        row = self.inside[:1].numel() * self.inside.element_size()
        left, right = self._whole[:GUARD], self._whole[GUARD + written * row :]
        assert bool((left == 0xFF).all() and (right == 0xFF).all()), "a kernel wrote outside its output"
        return self.inside[:written].cpu().numpy()


def same(got: Any, expected: np.ndarray, message: str = "") -> None:
    """Compare bits."""
    got = got.cpu().numpy() if isinstance(got, torch.Tensor) else got
    assert got.dtype == expected.dtype, message
    np.testing.assert_array_equal(
        np.ascontiguousarray(got).view(np.uint8), np.ascontiguousarray(expected).view(np.uint8), message
    )
