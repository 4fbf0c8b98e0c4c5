"""Files of step history: past steps, for stale rows."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from math import prod
from typing import Any, NamedTuple

import numpy as np

from embedrock.io.vfs import Data, System, write_whole
from embedrock.store import folder as folders
from embedrock.store.manifest import HistoryFile
from embedrock.store.segments import HEADER_BYTES, check_header, damaged, make_header, open_needed

MAX_BYTES = 1 << 32
PIECE_BYTES = 4 << 20  # bytes read at once to verify the checksum
JOINED_BYTES = 1 << 20  # smaller content is copied, so that one system call writes it
DTYPES = ("<f4", "<f8", "<i8")
_SIZE = struct.Struct("<I")  # size of the list of arrays


class PiecewiseArray(NamedTuple):
    """Array that is written piece by piece, because it is large or changes meanwhile.

    Attributes:
        dtype, shape: of the array.
        pieces: yields the array in pieces of some rows.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[np.ndarray]]


Written = np.ndarray | PiecewiseArray


def write_history(system: System, folder: str, name: str, uuid: str, arrays: Mapping[str, Written]) -> HistoryFile:
    """Write arrays to a new file, durably: a header page, their list in JSON, and their bytes."""
    listed = json.dumps([[key, array.dtype.str, array.shape] for key, array in arrays.items()]).encode("ascii")
    size, crc = 0, 0

    def told(parts: Iterable[Data]) -> Iterator[Data]:
        nonlocal size, crc
        for part in parts:
            size, crc = size + len(part), zlib.crc32(part, crc)
            yield part

    parts = _bytes_of(make_header(uuid, 0, name) + _SIZE.pack(len(listed)) + listed, arrays)
    if sum(prod(array.shape) * array.dtype.itemsize for array in arrays.values()) < JOINED_BYTES:
        parts = [b"".join(parts)]
    write_whole(system, folders.join(folder, name), told(parts))
    return HistoryFile(name, size, crc, 0)


def _bytes_of(head: bytes, arrays: Mapping[str, Written]) -> Iterator[Data]:
    yield head
    for array in arrays.values():
        for piece in (array,) if isinstance(array, np.ndarray) else array.pieces():
            yield np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data


def read_history(system: System, folder: str, part: HistoryFile, uuid: str) -> dict[str, np.ndarray]:
    """Return the arrays of a file.

    Raises:
        CorruptTableError: the file is missing or damaged, or belongs to another table.
    """
    where = folders.join(folder, part.file)
    with closing(open_needed(system, where, "it")) as file:
        if file.size != part.size or part.size > MAX_BYTES:
            raise damaged(where, f"{min(part.size, MAX_BYTES)} bytes", file.size)
        data, crc = b"", 0
        for start in range(0, file.size, PIECE_BYTES):  # in pieces: a forged file may be larger than RAM
            data = file.read(start, min(PIECE_BYTES, file.size - start))
            crc = zlib.crc32(data, crc)
        if crc != part.crc:
            raise damaged(where, f"bytes with CRC-32 {part.crc:#010x}", f"{crc:#010x}")
        data = data if file.size <= PIECE_BYTES else file.read(0, file.size)
    check_header(data[:HEADER_BYTES], where, uuid, 0, part.file)
    try:
        return _arrays(memoryview(data)[HEADER_BYTES:])
    except (ValueError, TypeError, OverflowError, struct.error, RecursionError) as error:
        raise damaged(where, "a list of arrays, and their bytes", f"{error!r:.200}") from error


def _arrays(content: memoryview) -> dict[str, np.ndarray]:
    (size,) = _SIZE.unpack_from(content)
    start, arrays = _SIZE.size + size, dict[str, np.ndarray]()
    listed: Any = json.loads(bytes(content[_SIZE.size : start]))
    for key, dtype, shape in listed:
        is_array = dtype in DTYPES and all(type(n) is int and 0 <= n < MAX_BYTES for n in shape)
        if not is_array or not isinstance(key, str) or key in arrays:
            raise ValueError(f"no array: {key!r}, {dtype}, {shape}")
        stop = start + prod(shape) * np.dtype(dtype).itemsize
        if stop > len(content):
            raise ValueError("more than the file has")
        arrays[key] = np.frombuffer(content[start:stop], dtype).reshape(shape)
        start = stop
    if start != len(content):
        raise ValueError("bytes are left")
    return arrays
