"""Where ``bench gpu`` runs: on a CUDA device, or at toy size on CPU tensors with Triton's interpreter."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, NamedTuple

from embedrock.bench.harness.contenders import import_torch
from embedrock.errors import UnsupportedError
from embedrock.machine.ram import available_bytes, memory_limit

INTERPRETER = "TRITON_INTERPRET"  # the variable that Triton reads when it is imported


class Device(NamedTuple):
    """A device of torch, "cuda" or "cpu"."""

    name: str

    @property
    def is_gpu(self) -> bool:
        """Whether it is one; otherwise kernels are interpreted, and times mean nothing."""
        return self.name == "cuda"

    def synchronize(self) -> None:
        """Wait until it has done all that it was given."""
        if self.is_gpu:
            import torch

            torch.cuda.synchronize()

    def pinned(self, tensor: Any) -> Any:
        """Return a tensor of host memory that the device can reach."""
        return tensor.pin_memory() if self.is_gpu else tensor

    def pinned_floats(self, *shape: int) -> Any:
        """Return float32 zeros in such memory."""
        import torch

        return torch.zeros(shape, pin_memory=self.is_gpu)

    def new_stream(self) -> Callable[[], AbstractContextManager[Any]]:
        """Return what a ``with`` statement enters to work on a stream of its own."""
        if not self.is_gpu:
            return nullcontext
        import torch

        stream = torch.cuda.Stream()
        return lambda: torch.cuda.stream(stream)

    def seconds(self, work: Callable[[], object], times: int) -> float:
        """Return the seconds that some work takes, the mean of so many times one after another."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            work()
        self.synchronize()
        return (time.perf_counter() - start) / times

    def repeated(self, work: Callable[[], object], times: int) -> Callable[[], object]:
        """Return what does some work so many times: where it can be, recorded, so that no launch waits for the host."""
        if not self.is_gpu:
            return lambda: [work() for _ in range(times)]
        import torch

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(times):
                work()
        return graph.replay

    def peak_bytes(self) -> int:
        """Return the most memory that torch's tensors of this process had on it."""
        if not self.is_gpu:
            return 0
        import torch

        return torch.cuda.max_memory_allocated()

    def facts(self) -> dict[str, Any]:
        """Return what a reader needs to know of it, plain JSON values."""
        torch = import_torch()
        facts: dict[str, Any] = {"device": self.name, "torch": torch.__version__, "triton": _triton_version()}
        if not self.is_gpu:
            return facts | {"memory_bytes": memory_limit(), "free_bytes": available_bytes()}
        free, whole = torch.cuda.mem_get_info()
        return facts | {
            "gpu": torch.cuda.get_device_name(),
            "capability": ".".join(map(str, torch.cuda.get_device_capability())),
            "cuda": torch.version.cuda,
            "memory_bytes": whole,
            "free_bytes": free,
        }


class Probe:
    """In a process of its own, so that the caller needs no torch: says where to measure."""

    def find(self, toy: bool) -> tuple[Device, dict[str, Any]]:
        """Return the device, and facts of it.

        Args:
            toy: the user asked for a run at toy size.

        Raises:
            UnsupportedError: there is no Triton; or no CUDA device, and the interpreter was not asked for.
        """
        device = _find_device(toy)
        return device, device.facts()


def _find_device(toy: bool) -> Device:
    if _triton_version() is None:
        raise UnsupportedError(
            '`embedrock bench gpu` needs Triton, which does not import here: pip install "embedrock[gpu]".'
        )
    if toy or os.environ.get(INTERPRETER) == "1":
        return Device("cpu")
    if import_torch().cuda.is_available():
        return Device("cuda")
    raise UnsupportedError(
        "`embedrock bench gpu` needs a CUDA device, and torch finds none. Run it where there is a GPU and a CUDA build "
        "of torch; or, to see whether it works, at toy size and without times that mean something: "
        "`embedrock bench gpu --toy`."
    )


def _triton_version() -> str | None:
    try:
        return import_module("triton").__version__
    except ImportError:
        return None
