"""Layers: `torch.nn`'s embedding layers with their rows in a table."""
