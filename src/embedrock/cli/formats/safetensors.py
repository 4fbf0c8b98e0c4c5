"""Safetensors: tensors by name behind a JSON header (https://huggingface.co/docs/safetensors).

Read here and not by the package of that name, which maps the whole file into memory and has no bfloat16 for NumPy.
"""

from __future__ import annotations

import json
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from embedrock.cli.formats._arrays import Array, Arrays, choose, file_size
from embedrock.cli.formats._sink import Output, Region, Regions, part_of, publish
from embedrock.cli.formats._source import ReadOptions, fail

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
LENGTH = struct.Struct("<Q")
# The types of tensors that can be vectors or ids.
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1"}
DTYPES |= {"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1"}
REMEDY = "Check that it is the right file, or get it again."


def read(path: Path, options: ReadOptions) -> Arrays:
    """Open a .safetensors file."""
    header, start = _header(path)
    tensors = {name: value for name, value in header.items() if name != "__metadata__"}
    arrays = {name: _array(path, name, value, start) for name, value in tensors.items() if _is_known(value)}
    return choose(path, arrays, options)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header, and where data begin."""
    size = file_size(path)
    with open(path, "rb") as file:
        length = LENGTH.unpack(file.read(LENGTH.size).ljust(LENGTH.size, b"\0"))[0]
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - LENGTH.size):
            fail(path, "a safetensors file", f"a header of {length} bytes in a file of {size}", REMEDY)
        text = file.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        fail(path, "a header in JSON", f"{error}", REMEDY)
    if not isinstance(header, dict):
        fail(path, "a header that names tensors", f"{type(header).__name__}", REMEDY)
    return header, LENGTH.size + length


def _is_known(tensor: Any) -> bool:
    return not isinstance(tensor, dict) or tensor.get("dtype") in DTYPES or not isinstance(tensor.get("dtype"), str)


def _array(path: Path, name: str, tensor: Any, start: int) -> Array:
    try:
        (begin, end), shape = tensor["data_offsets"], tuple(tensor["shape"])
        numbers = begin, end, *shape
        dtype = np.dtype(DTYPES[tensor["dtype"]])
    except (TypeError, KeyError, ValueError):
        fail(path, "dtype, shape and data_offsets", f"{str(tensor)[:200]}", REMEDY, f"tensor {name!r}")
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        fail(path, "whole numbers as shape and offsets", f"{str(tensor)[:200]}", REMEDY, f"tensor {name!r}")
    nbytes = dtype.itemsize * int(np.prod(shape, dtype=object))
    if end - begin != nbytes or start + end > file_size(path):
        got = f"bytes {begin} to {end} of {file_size(path) - start}"
        fail(path, f"{nbytes} bytes for {tensor['dtype']} {shape}", got, REMEDY, f"tensor {name!r}")
    bfloat16 = tensor["dtype"] == "BF16"
    return Array(path, name, partial(open, path, "rb"), start + begin, dtype, shape, bfloat16=bfloat16)


class SafetensorsSink(Regions):
    """Writes tensors "ids", where rows are not numbered from 0, and "vectors"."""

    def __init__(self, output: Output, done: int) -> None:
        super().__init__(output, done)
        part, rows, dim = part_of(output.path), output.rows, output.dim
        end_of_ids = 8 * rows if output.has_ids else 0
        tensors = {"vectors": _described("F32", (rows, dim), end_of_ids, end_of_ids + 4 * rows * dim)}
        if output.has_ids:
            tensors = {"ids": _described("I64", (rows,), 0, end_of_ids)} | tensors
        text = json.dumps(tensors).encode()
        text += b" " * (-len(text) % LENGTH.size)
        header = LENGTH.pack(len(text)) + text
        self.ids = Region(part, header, len(header), "<i8", (rows,)) if output.has_ids else None
        self.vectors = Region(part, header, len(header) + end_of_ids, "<f4", (rows, dim))

    def finish(self) -> list[Path]:
        self.sync()
        self.vectors.end()  # the last in the file
        return [publish(self.vectors.path, self.output.path)]


def _described(dtype: str, shape: tuple[int, ...], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
