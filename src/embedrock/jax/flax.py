"""`Embed`: names a table, in models of Flax (nnx)."""

from __future__ import annotations

from embedrock.frontend.requirements import require
from embedrock.jax.tables import PathLookup

require("embedrock.jax.flax", "flax", {"flax": "0.11"})

from flax import nnx


class Embed(PathLookup, nnx.Module):
    """Module that looks ids up in a batch, by the path of `Batch.lookup`. It has no parameters.

    Example:
        >>> import embedrock as er, embedrock.jax as ej
        >>> Embed("item")(ej.Tables({"item": er.Table(rows=9, dim=4)}).fetch({"item": [7, 3, 7]})).shape
        (3, 4)
    """
