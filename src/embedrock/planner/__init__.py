"""Costs of tables on a machine, before training, and a choice of backends and memory."""
