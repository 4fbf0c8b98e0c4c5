"""Safetensors files: a header in JSON, and the bytes of the arrays."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any, NamedTuple, NoReturn

import numpy as np

from embedrock.system import platform

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1"}
DTYPES |= {"U8": "|u1", "U16": "<u2", "U32": "<u4", "U64": "<u8", "BOOL": "|b1"}
BITS = {"BF16": "<u2", "F8_E4M3": "|u1", "F8_E5M2": "|u1", "F8_E8M0": "|u1"}  # NumPy has them as bits only
DTYPES |= BITS
METADATA = "__metadata__"  # not the name of an array
LENGTH = struct.Struct("<Q")  # of the header
MAX_HEADER_BYTES = 100_000_000  # the format's own limit

Fail = Callable[..., NoReturn]  # raises an error, given (expected, got, where="")


class StoredTensor(NamedTuple):
    """Place of a tensor in a file.

    Attributes:
        path: file.
        name: of the tensor.
        dtype: its name in the format, perhaps one that `DTYPES` lacks.
        shape: of the tensor.
        start: offset of its first byte in the file.
        stamp: of the file as its header was read, see `platform.stamp_of`.
    """

    path: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stamp: tuple[int, int]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, of all dimensions but the first."""
        return np.dtype(DTYPES[self.dtype]).itemsize * prod(self.shape[1:])


def read_header(path: str, fail: Fail) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name. Those of a known dtype lie in the file. `fail` raises the errors."""
    with open(path, "rb") as file:
        size, _ = stamp = platform.stamp_of(file.fileno())
        length = LENGTH.unpack(file.read(LENGTH.size).ljust(LENGTH.size, b"\0"))[0]
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - LENGTH.size):
            fail("a safetensors file", f"a header of {length} bytes in a file of {size}")
        text = file.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        fail("a header in JSON", f"{error}")
    if not isinstance(header, dict):
        fail("a header that names tensors", f"{type(header).__name__}")
    header.pop(METADATA, None)
    start = LENGTH.size + length
    return {name: _tensor(path, name, entry, (start, stamp), fail) for name, entry in header.items()}


def _tensor(path: str, name: str, entry: Any, data: tuple[int, tuple[int, int]], fail: Fail) -> StoredTensor:
    refuse, (start, stamp) = partial(fail, where=f"tensor {name!r}"), data
    try:
        (begin, end), shape, dtype = entry["data_offsets"], tuple(entry["shape"]), entry["dtype"]
    except (TypeError, KeyError, ValueError):
        refuse("dtype, shape and data_offsets", f"{str(entry)[:200]}")
    if not isinstance(dtype, str):
        refuse("dtype, shape and data_offsets", f"{str(entry)[:200]}")
    if not all(type(number) is int and 0 <= number < 2**63 for number in (begin, end, *shape)):
        refuse("whole numbers as shape and offsets", f"{str(entry)[:200]}")
    if dtype in DTYPES:
        nbytes = np.dtype(DTYPES[dtype]).itemsize * prod(shape)
        if end - begin != nbytes or start + end > stamp[0]:
            refuse(f"{nbytes} bytes for {dtype} {shape}", f"bytes {begin} to {end} of {stamp[0] - start}")
    return StoredTensor(path, name, dtype, shape, start + begin, stamp)


def header_of(tensors: Mapping[str, tuple[str, tuple[int, ...]]], about: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a file before those of its arrays, which have these types and shapes; `about` the file."""
    header, end = dict[str, Any]({METADATA: about} if about else {}), 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + np.dtype(DTYPES[dtype]).itemsize * prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % LENGTH.size)
    return LENGTH.pack(len(text)) + text
