"""Extents of files, equally long pieces at any offsets: the specification of ``kernels/cpu/extents.py``."""

from __future__ import annotations

import ctypes

import numpy as np


def place(
    ids: np.ndarray,
    firsts: np.ndarray,
    starts: np.ndarray,
    rows_each: np.ndarray,
    nbytes: int,
    numbers: np.ndarray,
    offsets: np.ndarray,
) -> None:
    """Write the shard of each row to `numbers`, and the offset of its bytes in the shard's file to `offsets`.

    Args:
        ids: int64 (n,), as are `numbers` and `offsets`.
        firsts: int64 (shards + 1,), first row of each shard, and the end.
        starts: int64 (shards,), offset of each shard in its file.
        rows_each: int64 (shards,), rows that share the same bytes.
        nbytes: bytes of a row.
    """
    numbers[:] = np.searchsorted(firsts, ids, "right") - 1
    offsets[:] = starts[numbers] + (ids - firsts[numbers]) // rows_each[numbers] * nbytes


def cover(
    files: np.ndarray,
    offsets: np.ndarray,
    nbytes: int,
    limits: tuple[int, int, int, int],
    requests: np.ndarray,
    starts: np.ndarray,
) -> tuple[int, int]:
    """Cover extents by reads of whole blocks into one memory. Return how many extents, and by how many requests.

    The first one is always covered; the next ones while there is room.

    Args:
        files, offsets: int64 (n,), of the extents.
        nbytes: length of each extent.
        limits: bytes of a block; most bytes between two extents that one request reads through; longest request; room.
        requests: int64 (4, n), for file, offset, size and start in memory of each request.
        starts: int64 (n,), for the start of each extent in memory.
    """
    block, gap, longest, room = limits
    made: list[list[int]] = []
    used = 0
    for i, (file, offset) in enumerate(zip(files.tolist(), offsets.tolist(), strict=True)):
        first, end = offset // block * block, -(-(offset + nbytes) // block) * block
        joins = False
        if made and made[-1][0] == file:
            _, begin, size, _ = made[-1]
            joins = begin <= first <= begin + size + gap and end - begin <= longest
        more = max(0, end - made[-1][1] - made[-1][2]) if joins else end - first
        if i and used + more > room:
            break
        if joins:
            made[-1][2] += more
        else:
            made.append([file, first, more, used])
        used += more
        starts[i] = made[-1][3] + offset - made[-1][1]
    else:
        i = len(files)
    requests[:, : len(made)] = np.array(made, np.int64).reshape(-1, 4).T
    return i, len(made)


def copy(addresses: np.ndarray, nbytes: int, rows: np.ndarray, slots: np.ndarray, column: int) -> None:
    """Copy `nbytes` bytes from each address to ``rows[slots[i], column:]``, uint8."""
    for address, slot in zip(addresses.tolist(), slots.tolist(), strict=True):
        rows[slot, column : column + nbytes] = np.frombuffer(ctypes.string_at(address, nbytes), np.uint8)


def ask(fds: np.ndarray, offsets: np.ndarray, sizes: np.ndarray) -> None:
    """Ask the system to read extents into the page cache. Nothing waits for it."""
