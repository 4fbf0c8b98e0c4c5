"""Weights that `from_pretrained` of all front ends takes by the name of a file or a folder."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from embedrock.distributed.reader import open_table
from embedrock.errors import ArgumentError, MemoryBudgetError, TableFileError
from embedrock.initializers import FromArray, FromBfloat16, FromSafetensors
from embedrock.initializers.published import ENDING
from embedrock.system.paths import local_path
from embedrock.system.ram import available_bytes
from embedrock.system.sizes import format_bytes
from embedrock.table.table import Table

ROWS_AT_ONCE = 65_536
BFLOAT16 = "bfloat16"


def weights_of(weights: Any, tensor: str | None, subject: str) -> Any:
    """Return the weights that a path names: a mapped array, or an initializer. Return others as they are.

    Args:
        weights: path of a ``.npy`` file, which is mapped; of a ``.safetensors`` file or a folder of them, read
            in place; or of a table, whose rows of the last commit are copied to RAM. Or weights.
        tensor: name of the tensor in safetensors files that have several matrices.
        subject: the weights, for error messages.

    Raises:
        ArgumentError: no such file, another format, or `tensor` without a use.
        MemoryBudgetError: the rows of a table do not fit in free RAM.
        TableFileError: the file is damaged, or has no such tensor.
    """
    path = local_path(weights, subject, "file") if isinstance(weights, str | os.PathLike) else ""
    is_folder, suffix = os.path.isdir(path), os.path.splitext(path)[1].lower()
    if suffix == ENDING or (is_folder and any(name.endswith(ENDING) for name in os.listdir(path))):
        return FromSafetensors(path, tensor or "")
    if tensor is not None:
        raise ArgumentError(
            f"`tensor` names a tensor of {ENDING} files: got {tensor!r}, and {subject} are no such files."
        )
    if not path:
        return weights
    if is_folder:
        return _rows_of(path, subject)
    if suffix != ".npy" or not os.path.isfile(path):
        got = f"a file {suffix!r}" if os.path.isfile(path) else "no file or folder of this name"
        raise ArgumentError(
            f"{subject} must be a .npy file, {ENDING} files or a table: got {path!r}, {got}. `embedrock import FILE "
            "TABLE` makes tables of files of other formats; pass TABLE."
        )
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError) as error:
        raise TableFileError(f"{path} must hold one array of numbers: got {error}. Get the file again.") from error


def _rows_of(path: str, subject: str) -> FromArray:
    """Return the rows of a table's last commit, in RAM."""
    with open_table(path, mode="r") as table:
        if not isinstance(table, Table) or table.rows is None:
            raise ArgumentError(
                f"{subject} must be one table with a number of rows: got {table}. Pass an array of the rows that are "
                'needed: er.open(path, mode="r") reads them.'
            )
        dtype = table.spec.value_dtype
        bits = np.dtype(np.uint16 if dtype == BFLOAT16 else dtype)
        needed, free = table.rows * table.dim * bits.itemsize, available_bytes()
        if needed > free:
            raise MemoryBudgetError(
                f"{subject} are {format_bytes(needed)} in {path!r}, and {format_bytes(free)} of RAM are free. Write "
                f"them to a file, which is mapped: `embedrock export {path} rows.npy --all`; and pass 'rows.npy'."
            )
        rows = np.empty((table.rows, table.dim), bits)
        for first in range(0, table.rows, ROWS_AT_ONCE):
            part = rows[first : first + ROWS_AT_ONCE]
            found = table.lookup(np.arange(first, first + len(part)))
            part[:] = found.view(np.uint32) >> 16 if dtype == BFLOAT16 else found
    return FromBfloat16(rows) if dtype == BFLOAT16 else FromArray(rows)
