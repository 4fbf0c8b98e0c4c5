"""A step of training: lookups and their gradients, the handles that stand for rows, optimizers that step them."""

from __future__ import annotations
