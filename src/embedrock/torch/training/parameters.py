"""Which parameters of a model are handles, and which are dense; where the rows behind the handles are used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from embedrock.errors import ArgumentError
from embedrock.table.table import Table
from embedrock.torch.training.handle import Handle

COMPILED = "_orig_mod."  # what torch.compile puts before the names of a model's modules


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model that `torch.compile` made one of; others as they are. The two share everything but names."""
    return getattr(model, COMPILED.removesuffix("."), model)


def handles(layers: nn.Module | Handle | Iterable[Any]) -> list[Handle]:
    """Return the handles of the embedding layers in a model, each once.

    They stand for the rows in whatever takes gradients of parameters, as in
    ``clip_grad_norm_([*ert.dense_parameters(model), *ert.handles(model)], 1.0)``.

    Args:
        layers: a model, a layer, a handle, or any number of these.

    Raises:
        ArgumentError: there is something else among them.
    """
    if isinstance(layers, Handle):
        return [layers]
    if isinstance(layers, nn.Module):
        return [parameter for parameter in layers.parameters() if isinstance(parameter, Handle)]
    if isinstance(layers, Tensor | str | dict) or not isinstance(layers, Iterable):
        raise ArgumentError(
            f"expected a model, embedding layers or handles, got {_describe(layers)}. Pass the model itself, and "
            "give ert.dense_parameters(model) to an optimizer of PyTorch's."
        )
    return list({id(handle): handle for layer in layers for handle in handles(layer)}.values())


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return all parameters of a model but the handles of its embedding layers, for an optimizer of PyTorch's.

    Example:
        >>> import embedrock.torch as ert
        >>> model = nn.Sequential(ert.Embedding(10, 4), nn.Linear(4, 1))
        >>> [tuple(parameter.shape) for parameter in ert.dense_parameters(model)]
        [(1, 4), (1,)]
    """
    return [parameter for parameter in model.parameters() if not isinstance(parameter, Handle)]


def num_parameters(model: nn.Module, touched: bool = False) -> int:
    """Return how many weights a model has: those of all rows, each table counted once, and of all other parameters.

    ``sum(p.numel() for p in model.parameters())`` counts a table as 1, its handle.

    Args:
        model: with any number of embedding layers.
        touched: count only rows that have records. Of tables of open ids, only these are counted in any case.

    Example:
        >>> import embedrock.torch as ert
        >>> ert.num_parameters(nn.Sequential(ert.Embedding(10**9, 64), nn.Linear(64, 1)))
        64000000065
    """
    dense = sum(parameter.numel() for parameter in dense_parameters(model))
    return dense + sum(_rows_of(handle.table, touched) * handle.table.dim for handle in handles(model))


def _rows_of(table: Table, touched: bool) -> int:
    return int(table.stats()["rows_touched"]) if touched or table.rows is None else table.rows


def place(layers: nn.Module | Handle | Iterable[Any], device: torch.device | str) -> None:
    """Let the kernels for GPUs use the rows of layers on a device, and deliver lookups there.

    ``model.to("cuda")`` does so by itself. With "cpu", where Triton interprets its kernels (``TRITON_INTERPRET=1``),
    it tries on a machine without a GPU what happens on one; slowly.

    Raises:
        ArgumentError: `device` is none.
        UnsupportedError: "cpu" without Triton's interpreter, or gradients are pending.
    """
    where = _device_of(device)
    if where.type == "cpu":
        from embedrock.device.attach import check_interpreter

        check_interpreter()
    for handle in handles(layers):
        handle.place(where)


def _device_of(given: Any) -> torch.device:
    try:
        return torch.device(given)
    except TypeError as error:
        raise ArgumentError(
            f"`device` of ert.place must be one of PyTorch's, such as 'cuda' or torch.device('cuda', 1): got {given!r}."
        ) from error
