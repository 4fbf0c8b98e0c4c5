"""Executors that keep and step a table's rows on a GPU, for front ends that use PyTorch.

Only front ends import this package, when a model moves to a GPU. It needs PyTorch and Triton.
"""

from __future__ import annotations

from embedrock.storage.device_layout import memory_for

__all__ = ["memory_for"]
