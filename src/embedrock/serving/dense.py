"""Dense weights as a safetensors file: a header in JSON, and the bytes of the arrays."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import numpy as np

from embedrock.distributed.messages import decoded
from embedrock.errors import ArgumentError
from embedrock.io.safetensors import BITS, DTYPES, LENGTH, METADATA, header_of
from embedrock.io.vfs import System, write_whole
from embedrock.store.publication import DenseEntry, read_dense, sha256_of
from embedrock.store.segments import damaged

NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items() if name not in BITS}


class Bfloat16(NamedTuple):
    """Dense weights in bfloat16, which NumPy does not have.

    Attributes:
        bits: uint16 of any shape.
    """

    bits: np.ndarray


Dense = Mapping[str, np.ndarray | Bfloat16]


def to_bytes(arrays: Dense) -> bytes:
    """Return the bytes of a safetensors file. Equal arrays give equal bytes.

    Raises:
        ArgumentError: an array has a dtype or a name that such files do not have.
    """
    if not isinstance(arrays, Mapping) or any(not isinstance(name, str) or name == METADATA for name in arrays):
        raise ArgumentError(f"`dense` must have arrays by name, and none named {METADATA!r}: got {arrays!r:.200}.")
    tensors, parts = dict[str, tuple[str, tuple[int, ...]]](), list[bytes]()
    for name in sorted(arrays):
        given = arrays[name]
        array = np.asarray(given.bits if isinstance(given, Bfloat16) else given)
        dtype = "BF16" if isinstance(given, Bfloat16) else NAMES.get(array.dtype.newbyteorder("<"))
        if dtype is None:
            raise ArgumentError(f"`dense` must have arrays of numbers: got {array.dtype} for {name!r}.")
        parts.append(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes())
        tensors[name] = dtype, array.shape
    return b"".join([header_of(tensors), *parts])


def write(system: System, folder: str, name: str, data: bytes) -> DenseEntry:
    """Write a file of dense weights, durably."""
    write_whole(system, f"{folder}/{name}", [data])
    return DenseEntry(name, len(data), sha256_of(data))


def read(system: System, folder: str, entry: DenseEntry) -> dict[str, np.ndarray]:
    """Return the arrays of a file, read only. Those of bfloat16 are float32.

    Raises:
        CorruptTableError: the file is missing, shorter or damaged.
    """
    where, data = f"{folder}/{entry.file}", read_dense(system, folder, entry)
    try:
        return _arrays(data)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, struct.error, RecursionError) as error:
        raise damaged(where, "arrays as safetensors", f"{error!r:.200}") from error


def _arrays(data: bytes) -> dict[str, np.ndarray]:
    start, found = LENGTH.size + LENGTH.unpack_from(data)[0], dict[str, np.ndarray]()
    header = json.loads(data[LENGTH.size : start])
    header.pop(METADATA, None)
    for name, entry in header.items():
        (begin, end), shape = entry["data_offsets"], entry["shape"]
        dtype = np.dtype(DTYPES[entry["dtype"]])
        if not 0 <= begin <= end <= len(data) - start or prod(shape) * dtype.itemsize != end - begin:
            raise ValueError(f"{name!r} lies in {begin} to {end}")
        array = np.frombuffer(data, dtype, prod(shape), start + begin).reshape(shape)
        found[name] = decoded(array, "bfloat16") if entry["dtype"] == "BF16" else array
    return found
