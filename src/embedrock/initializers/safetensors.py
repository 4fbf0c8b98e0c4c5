"""Placeholder while the package is split."""

from __future__ import annotations

from embedrock.initializers._initializer import Given


class FromSafetensors(Given):
    """Not there yet."""
