"""Bringing the rows of a table to a GPU."""

from __future__ import annotations

import torch

from embedrock.device import placement
from embedrock.device.direct import DirectSide
from embedrock.device.hosted import HostedSide
from embedrock.device.pinned import PinningError, warn_of
from embedrock.device.side import DeviceSide, drawn_by
from embedrock.device.timeline import enough_memory
from embedrock.errors import UnsupportedError
from embedrock.kernels.gpu.runtime import is_interpreted
from embedrock.sizes import memory_limit
from embedrock.table import Table

LEAST_CAPABILITY = (7, 0)  # what Triton compiles for
MAX_ROWS = 2**31 - 1  # that a GPU can plan: slots of near records are int32


def side_of(table: Table, device: torch.device) -> DeviceSide | None:
    """Return the rows of a table on a device, brought there if they are not; None where the CPU has to use them.

    Raises:
        UnsupportedError: the device has not the features that kernels need.
        MemoryBudgetError: it has too little memory.
    """
    device = _indexed(device)
    side = table.side
    if isinstance(side, DeviceSide) and side.is_current and side.device == device:
        return side
    _check_capability(device)
    table.leave_side()
    try:
        with torch.inference_mode(False), enough_memory(f"{table.subject}, to keep its rows on {device},"):
            made = _made(table, device)
    except PinningError as error:
        warn_of(error, table.subject)
        return None
    table.attach(made)
    return made


def _indexed(device: torch.device) -> torch.device:
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def _made(table: Table, device: torch.device) -> DeviceSide:
    tier = table.lay_out_direct() if drawn_by(table.spec.init) is not None else None
    if tier is None or not tier.is_direct or (table.rows or 0) > MAX_ROWS:
        return HostedSide(table, table.tier_beside(), device)
    budget = table.device_memory if table.device_memory is not None else _free_bytes(device) // placement.FREE_SHARE
    return DirectSide(table, tier, device, placement.choose(table.spec, budget))


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory_limit()


def _check_capability(device: torch.device) -> None:
    if device.type == "cpu":
        return check_interpreter()
    has = torch.cuda.get_device_capability(device)
    if has < LEAST_CAPABILITY:
        need = ".".join(map(str, LEAST_CAPABILITY))
        raise UnsupportedError(
            f"{device} has compute capability {has[0]}.{has[1]}, and kernels of embedding rows need {need}. "
            "Leave the embedding layers on the CPU."
        )


def check_interpreter() -> None:
    """Raise `UnsupportedError` unless kernels are interpreted, on CPU tensors."""
    if not is_interpreted():
        raise UnsupportedError(
            "kernels for GPUs run on CPU tensors in Triton's interpreter only. Set TRITON_INTERPRET=1 before Python "
            "starts, or place the rows on a GPU."
        )
