"""Rows on a GPU: beside the table, a side of it that PyTorch's lookups and steps use.

Only front ends import it, when a model is moved to a GPU: it needs PyTorch and Triton.
"""

from __future__ import annotations

from embedrock.storage.device_layout import memory_for

__all__ = ["memory_for"]
