"""Places where records live. A new one is a file here, and a home in `embedrock.table` that makes it."""

from __future__ import annotations

from embedrock.tiers.memory import RamBackend

__all__ = ["RamBackend"]
