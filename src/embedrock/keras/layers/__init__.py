"""Layers whose rows live in tables, and their initializers."""
