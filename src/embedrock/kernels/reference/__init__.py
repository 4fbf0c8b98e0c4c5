"""The specification: every kernel as NumPy that a reader believes at sight."""

from __future__ import annotations

from embedrock.kernels.reference import codec, directory, generator, plan, pooling, rows, rules

__all__ = ["codec", "directory", "generator", "plan", "pooling", "rows", "rules"]
