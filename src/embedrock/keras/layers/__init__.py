"""Layers whose rows live in tables, and their initializers."""

from __future__ import annotations
