"""Checks of the software that GPU kernels need, before a table's rows are attached to a GPU."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sysconfig
import warnings
from typing import TYPE_CHECKING, NamedTuple

import torch

from embedrock.errors import UnsupportedError
from embedrock.storage.listeners import PlacementWarning
from embedrock.table.group import device_memory_of
from embedrock.table.table import Table

if TYPE_CHECKING:  # without Triton the import fails
    from embedrock.device.executor import GpuExecutor

LEAST_TRITON = (3, 4)  # older ones cannot take step constants as a tuple


def device_side(table: Table, device: torch.device) -> GpuExecutor | None:
    """Return the executor of a table on a GPU; None, with a warning, where only the CPU can use the rows.

    Raises:
        UnsupportedError: the table has `device_memory=`, and a requirement of GPU kernels is missing, or its rows are
            int8 or int4.
    """
    if table.spec.codec is not None:
        return _decoded_by_cpu(table)
    lack = lack_for_kernels(device.type)
    if lack is None:
        from embedrock.device.attach import side_of

        return side_of(table, indexed(device))
    if (given := device_memory_of(table)) is not None:
        asked = f"{table.subject} cannot have device_memory={given}"
        raise UnsupportedError(f"{lack.what}: {asked}. Install it: {lack.remedy}.")
    warnings.warn(
        f"{lack.what}: {table.subject} is read and stepped by the CPU, and its rows are copied to the GPU. For GPU "
        f"speed: {lack.remedy}.",
        PlacementWarning,
        stacklevel=3,
    )
    return None


def _decoded_by_cpu(table: Table) -> None:
    what = f"{table.subject} has rows of {table.spec.dtype}, which the CPU decodes"
    if (given := device_memory_of(table)) is not None:
        raise UnsupportedError(f"{what}: it cannot have device_memory={given}. Leave that out.")
    warnings.warn(f"{what}: weights are copied to the GPU, as float32.", PlacementWarning, stacklevel=4)


class MissingRequirement(NamedTuple):
    """A missing requirement of GPU kernels, in words, and its remedy."""

    what: str
    remedy: str


def indexed(device: torch.device) -> torch.device:
    """Return a device with its index, as tensors report it: "cuda" is the current device."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


@functools.cache
def lack_for_kernels(device_type: str) -> MissingRequirement | None:
    """Return the missing requirement of kernels for a type of device; None if nothing is missing.

    Nothing is compiled, as Triton would fail in the middle of a lookup. On CPU tensors, Triton interprets kernels.
    """
    if not has_triton():
        least = ".".join(map(str, LEAST_TRITON))
        what = f"Triton {least} or newer, which compiles the kernels for GPUs, is not installed"
        return MissingRequirement(what, 'pip install "embedrock[gpu]"')
    if device_type == "cpu" or os.name != "posix":  # on other systems, Triton includes a compiler
        return None
    if os.environ.get("CC") is None and shutil.which("gcc") is None and shutil.which("clang") is None:
        what = "there is no C compiler, gcc or clang, with which Triton makes what launches kernels on GPUs"
        return MissingRequirement(what, "apt-get install gcc, or name one by the environment's CC")
    header = os.path.join(sysconfig.get_paths(scheme="posix_prefix")["include"], "Python.h")  # as Triton finds it
    if not os.path.exists(header):
        what = f"Python's headers are missing ({header}), with which Triton makes what launches kernels on GPUs"
        return MissingRequirement(what, "apt-get install python3-dev")
    return None


@functools.cache
def has_triton() -> bool:
    """Return whether a Triton is installed that can compile the kernels."""
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) >= LEAST_TRITON
