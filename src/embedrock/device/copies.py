"""Copies between host and device that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from embedrock.device.cuda_runtime import cuda_runtime

_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


def uploaded(array: np.ndarray, device: torch.device) -> Tensor:
    """Return a copy of an array on a device. The host does not wait for the copy."""
    return on_device(torch.from_numpy(np.array(array)), device)


def uploaded_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return copies of arrays on a device, in one allocation and by one copy. The host does not wait for it."""
    sizes = [part for array in arrays for part in (array.nbytes, -array.nbytes % 16)]
    host = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    for array, part in zip(arrays, np.split(host.numpy(), np.cumsum(sizes)[:-1])[::2], strict=True):
        part[:] = array.view(np.uint8)
    made = host.to(device, non_blocking=True).split(sizes)[::2]
    return [part.view(_DTYPES[array.dtype]) for part, array in zip(made, arrays, strict=True)]


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device. A host tensor is pinned first, so the host does not wait for the copy."""
    if tensor.device == device:
        return tensor
    return pinned_copy(tensor, device).to(device, non_blocking=True)


def pinned_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor that can be copied to a device asynchronously: of a host tensor, a pinned copy.

    The copy to the device comes later. The caller may refill its own tensor before that, pinned or not.
    """
    if tensor.device.type == "cpu" and device.type == "cuda":
        return torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor


class DeviceEvent:
    """Event after work on a device. Only `wait` blocks until it comes. On the CPU it has come already.

    Args:
        device: of the work.
    """

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def record(self, stream: torch.cuda.Stream | None) -> None:
        """Order the event after all work launched so far on a stream. Allocates no memory."""
        if self._event is not None:
            self._event.record(stream)

    def has_come(self) -> bool:
        """Return whether the work is done."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Wait until the work is done."""
        if self._event is not None:
            with cuda_runtime().beside_captures():
                self._event.synchronize()


class HostCopy(DeviceEvent):
    """Host copy of device numbers, which have arrived when the event comes.

    Args:
        shape: of the numbers, int64.
        device: they come from it.

    Attributes:
        lines: the numbers.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        super().__init__(device)
        self._seen = torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self.lines = self._seen.numpy()  # a view, so reading is free

    def come(self, numbers: Tensor) -> None:
        """Copy as many numbers, ordered after all work launched so far. Allocates no memory."""
        self._seen.copy_(numbers, non_blocking=True)
        self.record(torch.cuda.current_stream(numbers.device) if self._event is not None else None)
