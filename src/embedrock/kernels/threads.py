"""The number of threads that the CPU kernels use. Results do not depend on it."""

from __future__ import annotations

from embedrock import kernels


def set_threads(count: int) -> None:
    """Set the number of threads that Embedrock's CPU kernels use.

    Without it, the environment variable EMBEDROCK_THREADS decides, or the number of cores, at most 16.

    Raises:
        ArgumentError: `count` is not a whole number >= 1.
    """
    kernels.cpu.threads.set_threads(count)


def get_threads() -> int:
    """Return the number of threads that Embedrock's CPU kernels use."""
    return kernels.cpu.threads.get_threads()
