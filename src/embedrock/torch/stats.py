"""`log_stats`: numbers about the tables of a model, for loggers."""

from __future__ import annotations

from typing import Any

from torch import nn

from embedrock.errors import ArgumentError
from embedrock.frontend.checkpoints import TableNumbers
from embedrock.torch.layers.row_layer import RowLayer
from embedrock.torch.training.parameters import COMPILED

TAKES_ALL = ("log_metrics", "log")  # methods of loggers that take a dict: Lightning's and Comet's, W&B's

_numbers = TableNumbers()


def log_stats(model: nn.Module, writer: Any, step: int | None = None, *, per_table: bool = True) -> dict[str, float]:
    """Log numbers about each table of a model, or about all of them together, and return them.

    Keys are ``"<name of the layer in the model>/<number>"``, by the first layer on a table:

    - ``rows``: stored rows, which are those ever stepped.
    - ``ram_bytes``: RAM of the rows now. For a table on disk, this is its cache and its index.

    A table on disk adds:

    - ``disk_bytes``: bytes of its files.
    - ``hit_rate``: share of requested rows in the cache, since the last call with any writer. The key is missing
      without requests. A row that `ert.prefetch` reads ahead counts as a miss, then as a hit.
    - ``commit_age_s``: seconds since its last commit.

    Args:
        model: has any number of embedding layers.
        writer: an object with `add_scalar(name, number, step)`, such as TensorBoard's `SummaryWriter`. Or an object
            with `log_metrics` or `log`, such as Lightning's loggers or a run of W&B. Or a function. The last three take
            a dict, and ``step=`` unless `step` is None.
        step: step of the training loop.
        per_table: False: log all tables together, by keys ``"tables/<number>"``. The `commit_age_s` is then that of
            the oldest last commit.

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
    layers = [(name, layer.table) for name, layer in model.named_modules() if isinstance(layer, RowLayer)]
    own = type(model).__name__
    numbers = _numbers.of([(name.replace(COMPILED, "") or own, table) for name, table in layers], per_table)
    if callable(write_one):
        for name, number in numbers.items():
            write_one(name, number, step)
    elif numbers:
        write_all(numbers, **({} if step is None else {"step": step}))
    return numbers
