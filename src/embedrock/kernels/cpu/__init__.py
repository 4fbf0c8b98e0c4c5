"""Kernels for the CPU, compiled by Numba at first use and cached on disk."""

from __future__ import annotations

from embedrock.kernels.cpu import (
    aio,
    cache,
    codec,
    directory,
    generator,
    plan,
    pooling,
    pread,
    residents,
    rows,
    rules,
    runtime,
    storage,
    strings,
    threads,
    vocabulary,
)
from embedrock.kernels.cpu.runtime import launch

__all__ = [
    "aio",
    "cache",
    "codec",
    "directory",
    "generator",
    "launch",
    "plan",
    "pooling",
    "pread",
    "residents",
    "rows",
    "rules",
    "runtime",
    "storage",
    "strings",
    "threads",
    "vocabulary",
]
