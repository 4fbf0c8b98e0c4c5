"""The layers' arguments: what they mean for a table, and which ones are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedrock.errors import ArgumentError, UnknownArgumentError, UnsupportedError
from embedrock.initializers import FromArray, Initializer
from embedrock.table import Table

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

REFUSED = {
    "path": "tables on disk are not in this release, only tables in RAM. Leave it out",
    "sparse": "rows are always stepped sparsely. Leave it out",
    "device": "the handle's device is where lookups are delivered: call .to(device) on the layer or the model",
    "_weight": "pass init= for first values, or use from_pretrained(weights)",
    "_freeze": "call requires_grad_(False) on the layer",
}


def refuse(layer: str, arguments: dict[str, Any]) -> None:
    """Raise an error for the first of `arguments`, which the layer does not take."""
    for name in arguments:
        if name in REFUSED:
            raise UnsupportedError(f"`{name}` of ert.{layer}: {REFUSED[name]}.")
        raise UnknownArgumentError(f"ert.{layer} has no argument `{name}`: see help(ert.{layer}) for those it has.")


def open_table(layer: str, rows: int | Table | None, dim: int | None, arguments: dict[str, Any]) -> Table:
    """Return the table of a layer: a ready-made one, or one made from the layer's arguments.

    Args:
        layer: its name, for error messages.
        rows: number of rows, None for open ids, or a ready-made table.
        dim: None with a ready-made table.
        arguments: of the table by name, where given; `dtype` as a torch.dtype.
    """
    if arguments.pop("path") is not None:
        refuse(layer, {"path": None})
    dtype = arguments["dtype"]
    if dtype not in NAMES:
        raise ArgumentError(f"`dtype` of ert.{layer} must be one of {', '.join(map(str, NAMES))}: got {dtype!r}.")
    if not isinstance(rows, Table):
        if dim is None:
            raise ArgumentError(f"`embedding_dim` of ert.{layer} is missing: only a ready-made er.Table brings its own.")
        return Table(rows, dim, **arguments | {"dtype": NAMES[dtype]})
    defaults = {"seed": 0, "dtype": torch.float32, "directory": "auto", "on_nonfinite": "raise"}
    given = [name for name, value in arguments.items() if value != defaults.get(name)] + ["embedding_dim"] * (dim is not None)
    if given:
        raise ArgumentError(f"`{given[0]}` of ert.{layer} belongs to the table: pass it when you make the er.Table.")
    return rows


def resolve_padding(padding_idx: int | None, rows: int | None) -> int | None:
    """Return the id that `padding_idx` means: as in PyTorch, negative ones count from the end."""
    if padding_idx is None or rows is None:
        return padding_idx
    if not -rows <= padding_idx < rows:
        raise ArgumentError(f"`padding_idx` must lie in [{-rows}, {rows}): got {padding_idx}.")
    return padding_idx % rows


def check_max_norm(max_norm: float | None) -> None:
    """Raise `ArgumentError` unless `max_norm` is None or not negative."""
    if max_norm is not None and not max_norm >= 0:
        raise ArgumentError(f"`max_norm` must be a number >= 0, or None: got {max_norm!r}.")


class FromBfloat16(Initializer):
    """Rows that start as those of a bfloat16 tensor, a dtype that NumPy lacks. Like `FromArray`, it copies nothing."""

    def __init__(self, weights: Tensor) -> None:
        self._weights = weights

    def fill(self, ids: np.ndarray, seed: int, out: np.ndarray) -> None:
        """Write the rows `ids` to `out`."""
        out[:] = self._weights[torch.from_numpy(ids)].float().numpy()

    def check(self, rows: int | None, dim: int) -> None:
        """Raise `ArgumentError` where the tensor has not the table's shape."""
        if tuple(self._weights.shape) != (rows, dim):
            raise ArgumentError(f"weights must have the table's shape ({rows}, {dim}): got {tuple(self._weights.shape)}.")

    def __repr__(self) -> str:
        return f"FromArray(array=<bfloat16 {tuple(self._weights.shape)}>)"


def pretrained(weights: Tensor | np.ndarray, dtype: torch.dtype | None) -> tuple[Initializer, torch.dtype]:
    """Return an initializer that reads rows from `weights` when they are needed, and the dtype for their table."""
    if isinstance(weights, Tensor) and weights.dtype == torch.bfloat16:
        return FromBfloat16(weights.detach().cpu()), dtype or torch.bfloat16
    init = FromArray(weights.detach().cpu().numpy() if isinstance(weights, Tensor) else weights)
    if dtype is None and str(init.array.dtype) not in DTYPES:
        raise ArgumentError(
            f"weights are {init.array.dtype}, which a table cannot hold. Pass dtype=torch.float32 to have rows "
            "converted when they are read."
        )
    return init, dtype or DTYPES[str(init.array.dtype)]
