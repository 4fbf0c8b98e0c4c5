"""The layers' arguments: what they mean for a table, and which ones are refused."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from embedrock.errors import ArgumentError, UnknownArgumentError, UnsupportedError
from embedrock.initializers import FromArray, Initializer
from embedrock.rules import Rule
from embedrock.table import Table
from embedrock.torch.references import tell_resumed

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

REFUSED = {
    "sparse": "rows are always stepped sparsely. Leave it out",
    "device": "lookups are delivered where the handle is: call .to(device) on the layer or the model",
    "_weight": "pass init= for first values, or use from_pretrained(weights)",
    "_freeze": "call requires_grad_(False) on the layer",
}


class TableArguments(NamedTuple):
    """Those arguments of a layer that make its table, with their defaults."""

    path: str | os.PathLike[str] | None = None
    memory: int | str | None = None
    policy: str = "lfu"
    keep: int = 2
    init: Initializer | None = None
    seed: int = 0
    dtype: torch.dtype = torch.float32
    name: str | None = None
    rule: Rule | None = None
    directory: str = "auto"
    on_nonfinite: str = "raise"


def refuse(layer: str, arguments: Iterable[str]) -> None:
    """Raise an error for the first of `arguments`, names that the layer does not take."""
    for name in arguments:
        if name in REFUSED:
            raise UnsupportedError(f"`{name}` of ert.{layer}: {REFUSED[name]}.")
        raise UnknownArgumentError(f"ert.{layer} has no argument `{name}`: see help(ert.{layer}) for those it has.")


def open_table(
    layer: str, rows: int | Table | None, dim: int | None, padding_idx: int | None, arguments: TableArguments
) -> Table:
    """Return the table of a layer: a ready-made one, or one made from the layer's arguments.

    Args:
        layer: its name, for error messages.
        rows: number of rows, None for open ids, or a ready-made table.
        dim: weights in a row; None with a ready-made table.
        padding_idx: id whose row starts as zeros in a table that is made here.
        arguments: all others.
    """
    if isinstance(rows, Table):
        _refuse_table_arguments(layer, dim, arguments)
        return rows
    if dim is None:
        raise ArgumentError(f"`embedding_dim` of ert.{layer} is missing: only a ready-made er.Table brings its own.")
    options = arguments._asdict() | {"dtype": dtype_name(layer, arguments.dtype)}
    table = make_table(rows, dim, options)
    padding = resolve_padding(padding_idx, table.rows)
    if padding is not None and not table.stats()["rows_touched"]:
        _zero(table, padding)
    return table


def make_table(rows: int | None, dim: int, options: dict[str, Any]) -> Table:
    """Return a new table, or the one that there is at ``options["path"]``; of that, tell where it goes on."""
    table = Table(rows, dim, **options)
    if table.is_on_disk and table.stats()["rows_touched"]:
        tell_resumed(os.fspath(options["path"]), table.last_step, f" (commit {table.last_commit})")
    return table


def _zero(table: Table, padding: int) -> None:
    rule = table.rule
    if lags_behind(rule):  # where rows cannot be assigned
        table.set_rule(None)
    table.assign([padding], np.zeros((1, table.dim), np.float32))
    table.set_rule(rule)


def _refuse_table_arguments(layer: str, dim: int | None, arguments: TableArguments) -> None:
    changed = [name for name, value in arguments._asdict().items() if value != arguments._field_defaults[name]]
    for name in ["embedding_dim"] * (dim is not None) + changed:
        raise ArgumentError(f"`{name}` of ert.{layer} belongs to the table: pass it when you make the er.Table.")


def dtype_name(layer: str, dtype: torch.dtype) -> str:
    """Return a torch dtype as the core names it."""
    if dtype not in NAMES:
        raise ArgumentError(f"`dtype` of ert.{layer} must be one of {', '.join(map(str, NAMES))}: got {dtype!r}.")
    return NAMES[dtype]


def resolve_padding(padding_idx: int | None, rows: int | None) -> int | None:
    """Return the id that `padding_idx` means: as in PyTorch, negative ones count from the end."""
    if padding_idx is None:
        return None
    if isinstance(padding_idx, bool) or not hasattr(padding_idx, "__index__"):
        raise ArgumentError(f"`padding_idx` must be an int or None: got {padding_idx!r}.")
    padding_idx = operator.index(padding_idx)
    if rows is None:
        return padding_idx
    if not -rows <= padding_idx < rows:
        raise ArgumentError(f"`padding_idx` must lie in [{-rows}, {rows}): got {padding_idx}.")
    return padding_idx % rows


def check_norm(max_norm: float | None, norm_type: float) -> None:
    """Raise `ArgumentError` unless `max_norm` is None or a number >= 0, and `norm_type` a number."""
    if max_norm is not None and not (is_number(max_norm) and max_norm >= 0):
        raise ArgumentError(f"`max_norm` must be a number >= 0, or None: got {max_norm!r}.")
    if not is_number(norm_type):
        raise ArgumentError(f"`norm_type` must be a number, the p of the norm: got {norm_type!r}.")


def is_number(value: object) -> bool:
    """Tell whether a value is a real number: no bool, no NaN."""
    return isinstance(value, Real) and not isinstance(value, bool) and bool(value == value)


def lags_behind(rule: Rule | None) -> bool:
    """Tell whether rows lag behind under a rule, so that they cannot be assigned: dense Adam."""
    return rule is not None and rule.history() is not None


class FromBfloat16(Initializer):
    """Rows that start as those of a bfloat16 tensor, a dtype that NumPy lacks; otherwise as `FromArray`."""

    def __init__(self, weights: Tensor) -> None:
        self._weights = weights

    def fill(self, ids: np.ndarray, key: np.uint64, out: np.ndarray) -> None:
        """Write the rows `ids` to `out`."""
        out[:] = self._weights[torch.from_numpy(ids)].float().numpy()

    def __repr__(self) -> str:
        return f"FromBfloat16(weights=<bfloat16 {tuple(self._weights.shape)}>)"


def pretrained_table(
    layer: str, weights: Tensor | np.ndarray, dtype: torch.dtype | None, options: dict[str, Any]
) -> Table:
    """Return a table whose rows are read from `weights` when they are needed."""
    refuse(layer, [name for name in options if name in REFUSED])
    if getattr(weights, "ndim", None) != 2:
        got = f"shape {tuple(weights.shape)}" if hasattr(weights, "shape") else type(weights).__name__
        raise ArgumentError(f"`embeddings` of ert.{layer} must be a 2-D tensor or array (rows, dim): got {got}.")
    if isinstance(weights, Tensor) and weights.dtype == torch.bfloat16:
        init, native = FromBfloat16(weights.detach().cpu()), "bfloat16"
    else:
        init = FromArray(weights.detach().cpu().numpy() if isinstance(weights, Tensor) else weights)
        native = str(init.array.dtype)
    if dtype is None and native not in DTYPES:
        raise ArgumentError(
            f"`embeddings` of ert.{layer} are {native}, which a table cannot hold. Pass dtype=torch.float32 to "
            "have rows converted when they are read."
        )
    rows, dim = weights.shape
    made_of = {"init": init, "dtype": native if dtype is None else dtype_name(layer, dtype)}
    return make_table(rows, dim, {**options, **made_of})
