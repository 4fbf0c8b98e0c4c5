"""Files of a rule's history: what it must remember of past steps, for rows that lag behind."""

from __future__ import annotations

import io
import zlib

import numpy as np

from embedrock.errors import CorruptTableError, EmbedrockError
from embedrock.store import folder as folders
from embedrock.store.manifest import HistoryFile
from embedrock.store.runs import HEADER_BYTES, damaged, make_header
from embedrock.vfs import System, read_whole, write_whole

MAX_BYTES = 1 << 32


def write_history(system: System, folder: str, name: str, uuid: str, arrays: dict[str, np.ndarray]) -> HistoryFile:
    """Write arrays to a new file, durably: the header page of a run without records, then an .npz of them."""
    held = io.BytesIO()
    np.savez(held, allow_pickle=False, **arrays)
    data = make_header(uuid, 0) + held.getvalue()
    write_whole(system, folders.join(folder, name), data)
    return HistoryFile(name, len(data), zlib.crc32(data), 0)


def read_history(system: System, folder: str, part: HistoryFile) -> dict[str, np.ndarray]:
    """Return the arrays of a file.

    Raises:
        CorruptTableError: it is damaged.
    """
    where = folders.join(folder, part.file)
    data = read_whole(system, where, min(part.size, MAX_BYTES))
    if len(data) != part.size or zlib.crc32(data) != part.crc:
        raise damaged(
            where, f"{part.size} bytes with CRC-32 {part.crc:#010x}", f"{len(data)}, {zlib.crc32(data):#010x}"
        )
    with np.load(io.BytesIO(data[HEADER_BYTES:]), allow_pickle=False) as arrays:
        return dict(arrays)


def check_history(system: System, folder: str, part: HistoryFile) -> list[str]:
    """Return what is wrong with a file, in a sentence or none."""
    try:
        read_history(system, folder, part)
    except (CorruptTableError, EmbedrockError, OSError, ValueError) as error:
        return [str(error)]
    return []
