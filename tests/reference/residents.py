"""Sightings of ids, id by id: the specification of ``kernels/cpu/residents.py``.

A *sketch* (Cormode and Muthukrishnan, 2005, with conservative update) is lines of 64 bytes, each cut into cells of
1, 2, 4 or 8 bits. An id has one of the `lines` of its segment, which begin at `firsts`, and `SKETCH_DEPTH` cells in it.
Its count is the least of these, and at most what a cell can hold: never less than it was seen, up to that.
"""

from __future__ import annotations

import numpy as np

from embedrock.kernels.constants import SKETCH_DEPTH as DEPTH
from embedrock.kernels.constants import SKETCH_LINE_BYTES as LINE_BYTES
from reference.directory import mix


def _cells(lines: int, bits: int, key: int, row: int) -> tuple[int, list[int]]:
    h = mix(row ^ key)
    count, line = LINE_BYTES * 8 // bits, ((h >> 32) * lines) >> 32
    h = mix(h)
    return line, [(h >> (9 * j)) % count for j in range(DEPTH)]


def _get(line: np.ndarray, bits: int, cell: int) -> int:
    return int(line[cell * bits // 8]) >> (cell * bits % 8) & ((1 << bits) - 1)


def count_seen(
    sketch: np.ndarray, lines: int, bits: int, key: np.uint64, firsts: np.ndarray, ids: np.ndarray, counts: np.ndarray
) -> None:
    """Write the count of each id in ``sketch`` (n, 64) uint8, int64."""
    for i, (first, row) in enumerate(zip(firsts.tolist(), ids.tolist(), strict=True)):
        line, cells = _cells(lines, bits, int(key), row)
        counts[i] = min(_get(sketch[first + line], bits, cell) for cell in cells)


def lines_of(lines: int, key: np.uint64, firsts: np.ndarray, ids: np.ndarray, numbers: np.ndarray) -> None:
    """Write the number of each id's line."""
    for i, (first, row) in enumerate(zip(firsts.tolist(), ids.tolist(), strict=True)):
        numbers[i] = first + _cells(lines, 1, int(key), row)[0]


def see(
    sketch: np.ndarray,
    changed: np.ndarray,
    lines: int,
    bits: int,
    key: np.uint64,
    firsts: np.ndarray,
    ids: np.ndarray,
) -> None:
    """Count each id once more, one after the other; write 1 to ``changed`` (n,) uint8 for lines that change."""
    for first, row in zip(firsts.tolist(), ids.tolist(), strict=True):
        line, cells = _cells(lines, bits, int(key), row)
        line += first
        least = min(_get(sketch[line], bits, cell) for cell in cells)
        if least < (1 << bits) - 1:
            changed[line] = 1
            for cell in cells:
                if _get(sketch[line], bits, cell) == least:
                    sketch[line, cell * bits // 8] += 1 << (cell * bits % 8)


def touch(
    last: np.ndarray, marks: np.ndarray, numbers: np.ndarray, step: int, half_life: int, one: int, most: int
) -> None:
    """Note that a step uses rows: their ``marks``, halved once for each half life that began since, grow by ``one``."""
    halvings = step // half_life - last[numbers] // half_life
    marks[numbers] = np.minimum((marks[numbers] >> np.minimum(halvings, 62)) + one, most)
    last[numbers] = step
