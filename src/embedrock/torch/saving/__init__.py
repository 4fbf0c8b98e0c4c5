"""Checkpoints of a model and its tables on disk."""
