"""The kernels for the CPU, compiled by Numba at first use and cached on disk."""

from __future__ import annotations

from embedrock.kernels.cpu import codec, directory, generator, plan, pooling, rows, rules, runtime

__all__ = ["codec", "directory", "generator", "plan", "pooling", "rows", "rules", "runtime"]
