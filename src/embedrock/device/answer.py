"""`HostCopy`: numbers of a device that come to the host in their time."""

from __future__ import annotations

import torch
from torch import Tensor

from embedrock.device.cuda_runtime import cuda_runtime


class HostCopy:
    """Numbers of a device as they are on the host, once they have come. Nothing waits for them but `wait`.

    Args:
        shape: of the numbers, int64.
        is_cuda: they come from a GPU.

    Attributes:
        lines: the numbers.
    """

    def __init__(self, shape: tuple[int, ...], is_cuda: bool) -> None:
        self._seen = torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=is_cuda)
        self._event = torch.cuda.Event() if is_cuda else None
        self.lines = self._seen.numpy()  # which is looked at in no time

    def come(self, numbers: Tensor) -> None:
        """Copy numbers, as many, behind what was launched so far. It takes no memory."""
        self._seen.copy_(numbers, non_blocking=True)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(numbers.device))

    def has_come(self) -> bool:
        """Return whether they are here."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Return once they are here."""
        if self._event is not None:
            with cuda_runtime().beside_captures():
                self._event.synchronize()
