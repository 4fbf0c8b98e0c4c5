"""JAX front end: rows of tables as arguments of jitted steps."""

from __future__ import annotations

from embedrock.frontend.requirements import require

require("embedrock.jax", "jax", {"jax": "0.6"})

from embedrock.jax.prefetch import prefetch
from embedrock.jax.tables import Batch, Embed, Tables, all_finite, where

__all__ = ["Batch", "Embed", "Tables", "all_finite", "prefetch", "where"]

__dir__ = __all__.copy  # what dir() lists
