"""`Embedding`: names a table, in models of Equinox."""

from __future__ import annotations

from embedrock.frontend.requirements import require
from embedrock.jax.tables import PathLookup

require("embedrock.jax.equinox", "equinox", {"equinox": "0.12"})

import equinox as eqx


class Embedding(PathLookup, eqx.Module):
    """Module that looks ids up in a batch, by the path of `Batch.lookup`. It has no parameters.

    Example:
        >>> import embedrock as er, embedrock.jax as ej
        >>> Embedding("item")(ej.Tables({"item": er.Table(rows=9, dim=4)}).fetch({"item": [7, 3, 7]})).shape
        (3, 4)
    """

    path: tuple[str | int, ...] = eqx.field(static=True)

    def __init__(self, *path: str | int) -> None:
        self.path = path
