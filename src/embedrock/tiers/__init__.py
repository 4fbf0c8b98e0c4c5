"""Places where records live. A new one is a file here."""

from __future__ import annotations

from embedrock.tiers.memory import Memory

__all__ = ["Memory"]
