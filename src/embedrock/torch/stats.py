"""`log_stats`: numbers about the tables of a model, for whatever logs numbers."""

from __future__ import annotations

from typing import Any

from torch import nn

from embedrock.errors import ArgumentError
from embedrock.frontend.checkpoints import TableNumbers
from embedrock.table.table import Table
from embedrock.torch.layers.row_layer import RowLayer
from embedrock.torch.training.parameters import COMPILED

TAKES_ALL = ("log_metrics", "log")  # methods of loggers that take a dict: Lightning's and Comet's, W&B's

_numbers = TableNumbers()


def log_stats(model: nn.Module, writer: Any, step: int | None = None) -> dict[str, float]:
    """Log numbers about each table of a model, and return them.

    They are called ``"<name of the layer in the model>/<what>"``, by the first layer on a table:

    - ``rows``: rows that were ever stepped, and so are stored;
    - ``ram_bytes``: RAM that they take now (for a table on disk, its cache and its index);

    and for a table on disk,

    - ``disk_bytes``: its files;
    - ``hit_rate``: how many of the rows that were asked for since the last call, whatever its writer, were in the
      cache. Left out where none were asked for. A row that `ert.prefetch` reads ahead counts as a miss, and then as a
      hit;
    - ``commit_age_s``: seconds since its last commit.

    Args:
        model: with any number of embedding layers.
        writer: has `add_scalar(name, number, step)`, as TensorBoard's `SummaryWriter`; or `log_metrics` or `log`, as a
            logger of Lightning's or a run of W&B's; or is a function. The last three take a dict, and ``step=`` if it
            is given.
        step: of the loop.

    Raises:
        ArgumentError: `writer` is none of these.

    Example:
        >>> import torch, embedrock.torch as ert
        >>> model = nn.Sequential(ert.Embedding(10**9, 4), nn.Linear(4, 1))
        >>> optimizer = ert.Adam(model[0])
        >>> model(torch.tensor([3, 14])).sum().backward()
        >>> optimizer.step()
        >>> logged = ert.log_stats(model, lambda numbers, step: print(step, numbers["0/rows"]), step=1)
        1 2.0
    """
    write_one = getattr(writer, "add_scalar", None)
    write_all = next((getattr(writer, name) for name in TAKES_ALL if callable(getattr(writer, name, None))), writer)
    if not callable(write_one) and not callable(write_all):
        raise ArgumentError(
            "`writer` of ert.log_stats must have add_scalar (TensorBoard's SummaryWriter), log_metrics or log (a run), "
            f"or be a function of a dict: got {type(writer).__name__}."
        )
    numbers = _numbers.of(_tables(model))
    if callable(write_one):
        for name, number in numbers.items():
            write_one(name, number, step)
    elif numbers:
        write_all(numbers, **({} if step is None else {"step": step}))
    return numbers


def _tables(model: nn.Module) -> dict[str, Table]:
    """Return the model's tables, by the place of the first layer on each."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, RowLayer)}
    names = {layer.table: name for name, layer in reversed(layers.items())}
    return {name.replace(COMPILED, "") or type(model).__name__: table for table, name in reversed(names.items())}
