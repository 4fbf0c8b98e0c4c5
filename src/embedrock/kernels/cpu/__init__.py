"""The kernels for the CPU, compiled by Numba at first use and cached on disk."""

from __future__ import annotations

from embedrock.kernels.cpu import (
    cache,
    codec,
    directory,
    generator,
    plan,
    pooling,
    pread,
    rows,
    rules,
    runtime,
    storage,
)

__all__ = [
    "cache",
    "codec",
    "directory",
    "generator",
    "plan",
    "pooling",
    "pread",
    "rows",
    "rules",
    "runtime",
    "storage",
]
