"""Places where records live. A new one is a file here, and a home in `embedrock.table` that makes it."""

from __future__ import annotations

from embedrock.storage.ram_backend import RamBackend

__all__ = ["RamBackend"]
