"""Layers whose rows live in tables, and what they are made from."""

from __future__ import annotations
