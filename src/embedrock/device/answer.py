"""`HostCopy`: device numbers that the host reads after an asynchronous copy."""

from __future__ import annotations

import torch
from torch import Tensor

from embedrock.device.cuda_runtime import cuda_runtime


class HostCopy:
    """Host copy of device numbers. Only `wait` blocks until the numbers arrive.

    Args:
        shape: of the numbers, int64.
        is_cuda: the numbers come from a GPU.

    Attributes:
        lines: the numbers.
    """

    def __init__(self, shape: tuple[int, ...], is_cuda: bool) -> None:
        self._seen = torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=is_cuda)
        self._event = torch.cuda.Event() if is_cuda else None
        self.lines = self._seen.numpy()  # a view, so reading is free

    def come(self, numbers: Tensor) -> None:
        """Copy as many numbers, ordered after all work launched so far. Allocates no memory."""
        self._seen.copy_(numbers, non_blocking=True)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(numbers.device))

    def has_come(self) -> bool:
        """Return whether the copy has arrived."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Wait until the copy has arrived."""
        if self._event is not None:
            with cuda_runtime().beside_captures():
                self._event.synchronize()
