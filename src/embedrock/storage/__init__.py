"""Storage backends of records. A new backend is a file here, and a location in `embedrock.table` that makes it."""

from __future__ import annotations

from embedrock.storage.ram_backend import RamBackend

__all__ = ["RamBackend"]
