"""Whether a GPU uses the rows of a table, and what is said where it cannot."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from embedrock.errors import UnsupportedError
from embedrock.table.table import Table
from embedrock.tiers.side import PlacementWarning

if TYPE_CHECKING:
    from embedrock.device.side import DeviceSide

LEAST_TRITON = (3, 4)  # older ones cannot take a rule's numbers as a tuple


def attach(table: Table, device: torch.device) -> DeviceSide | None:
    """Return the rows of a table on a GPU; None, with a warning, where only the CPU can use them.

    Raises:
        UnsupportedError: there is no Triton, and GPU memory was asked for.
    """
    if not has_triton():
        _say_there_is_no_triton(table)
        return None
    from embedrock.device.attach import side_of

    return side_of(table, device)


@functools.cache
def has_triton() -> bool:
    """Tell whether there is a Triton that compiles the kernels."""
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) >= LEAST_TRITON


def _say_there_is_no_triton(table: Table) -> None:
    least = ".".join(map(str, LEAST_TRITON))
    why = f"Triton {least} or newer, which compiles the kernels for GPUs, is not installed: {table.subject}"
    if table.device_memory is not None:
        raise UnsupportedError(
            f"{why} cannot have device_memory={table.device_memory}. Install it: pip install triton."
        )
    warnings.warn(
        f"{why} is read and stepped by the CPU, and its rows are copied to the GPU. For GPU speed: pip install triton.",
        PlacementWarning,
        stacklevel=5,
    )


def place(layers: nn.Module | Iterable[Any], device: torch.device | str) -> None:
    """Have the kernels for GPUs use the rows of layers on a device, and deliver lookups there.

    ``model.to("cuda")`` does so by itself. With "cpu", where Triton interprets its kernels (``TRITON_INTERPRET=1``),
    it tries on a machine without a GPU what happens on one; slowly.

    Raises:
        UnsupportedError: "cpu" without Triton's interpreter, or gradients are pending.
    """
    from embedrock.torch.parameters import handles

    where = torch.device(device)
    if where.type == "cpu":
        from embedrock.device.attach import check_interpreter

        check_interpreter()
    for handle in handles(layers):
        handle.place(where)
