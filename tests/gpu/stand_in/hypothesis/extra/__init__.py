"""See above."""

from __future__ import annotations

from hypothesis import strategies as numpy  # has everything, and does nothing

__all__ = ["numpy"]
