"""Parameters of a model: handles and dense parameters, and the device of rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from embedrock.errors import ArgumentError
from embedrock.torch.training.handle import Handle

COMPILED = "_orig_mod."  # prefix of torch.compile for the names of a model's modules


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the original of a model from `torch.compile`, which differs in names. Other models stay as they are."""
    return getattr(model, COMPILED.removesuffix("."), model)


def handles(layers: nn.Module | Handle | Iterable[Any]) -> list[Handle]:
    """Return the handles of the embedding layers in a model, each once.

    Functions of parameters' gradients reach the rows through the handles, as in
    ``clip_grad_norm_([*ert.dense_parameters(model), *ert.handles(model)], 1.0)``.

    Args:
        layers: a model, a layer, a handle, or an iterable of these.

    Raises:
        ArgumentError: `layers` has something else.

    Example:
        >>> import embedrock.torch as ert
        >>> model = nn.Sequential(ert.Embedding(10, 4), nn.Linear(4, 1))
        >>> [tuple(handle.shape) for handle in ert.handles(model)]
        [()]
    """
    if isinstance(layers, Handle):
        return [layers]
    if isinstance(layers, nn.Module):
        return [parameter for parameter in layers.parameters() if isinstance(parameter, Handle)]
    if isinstance(layers, Tensor | str | dict) or not isinstance(layers, Iterable):
        got = f"a tensor of shape {tuple(layers.shape)}" if isinstance(layers, Tensor) else repr(layers)
        raise ArgumentError(
            f"expected a model, embedding layers or handles, got {got}. Pass the model itself, and "
            "give ert.dense_parameters(model) to an optimizer of PyTorch's."
        )
    return list({id(handle): handle for layer in layers for handle in handles(layer)}.values())


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return all parameters of a model except the handles of its embedding layers, for an optimizer of PyTorch's.

    Args:
        model: has any number of embedding layers.

    Example:
        >>> import embedrock.torch as ert
        >>> model = nn.Sequential(ert.Embedding(10, 4), nn.Linear(4, 1))
        >>> [tuple(parameter.shape) for parameter in ert.dense_parameters(model)]
        [(1, 4), (1,)]
    """
    return [parameter for parameter in model.parameters() if not isinstance(parameter, Handle)]


def num_parameters(model: nn.Module, touched: bool = False) -> int:
    """Return the number of weights of a model: of all rows and all other parameters. Each table counts once.

    ``sum(p.numel() for p in model.parameters())`` counts a table as 1, its handle.

    Args:
        model: has any number of embedding layers.
        touched: count only rows with records. Tables of open ids always count only these rows.

    Example:
        >>> import embedrock.torch as ert
        >>> ert.num_parameters(nn.Sequential(ert.Embedding(10**9, 64), nn.Linear(64, 1)))
        64000000065
    """
    weights = sum(parameter.numel() for parameter in dense_parameters(model))
    for table in (handle.table for handle in handles(model)):
        rows = int(table.stats()["rows_touched"]) if touched or table.rows is None else table.rows
        weights += rows * table.dim
    return weights


def device_of(subject: str, device: Any) -> torch.device:
    """Return one of PyTorch's devices. Raise `ArgumentError` if it is none."""
    try:
        return torch.device(device)
    except (TypeError, RuntimeError) as error:
        raise ArgumentError(
            f"`device` of {subject} must be one of PyTorch's, such as 'cuda' or torch.device('cuda', 1): got "
            f"{device!r}."
        ) from error


def place(layers: nn.Module | Handle | Iterable[Any], device: torch.device | str) -> None:
    """Move the rows and outputs of layers to a GPU.

    ``model.to("cuda")`` calls it. "cpu" runs the GPU kernels on a machine without a GPU, slowly. Triton must interpret
    its kernels then (``TRITON_INTERPRET=1``).

    Args:
        layers: a model, a layer, a handle, or an iterable of these.
        device: one of PyTorch's, such as "cuda" or ``torch.device("cuda", 1)``.

    Raises:
        ArgumentError: `device` is no device.
        UnsupportedError: `device` is "cpu" without Triton's interpreter, or gradients are pending.

    Example:
        >>> import embedrock.torch as ert
        >>> layer = ert.Embedding(10**6, 4)
        >>> if torch.cuda.is_available():
        ...     ert.place(layer, "cuda")
    """
    where = device_of("ert.place", device)
    if where.type == "cpu":
        from embedrock.device.attach import check_interpreter

        check_interpreter()
    for handle in handles(layers):
        handle.place(where)
