"""Models without Embedrock: rows as variables of TensorFlow, looked up by its own operations."""

from __future__ import annotations
