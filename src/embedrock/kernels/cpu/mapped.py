"""Records of mapped files, on the CPU: see ``tests/reference/mapped.py`` for the specification."""

import numpy as np

from embedrock.kernels.constants import RUN_SHIFT
from embedrock.kernels.cpu import crc
from embedrock.kernels.cpu.addresses import address_of
from embedrock.kernels.cpu.packed import read_row
from embedrock.kernels.cpu.prefetch import prefetch_at
from embedrock.kernels.cpu.runtime import kernel
from embedrock.kernels.cpu.storage import find_base, find_overlay

AHEAD = 8
PLACE = (1 << RUN_SHIFT) - 1  # of a record in its segment; as a place, it stands for a deleted row


@kernel(over="ids", reads=("ids",), grain=256)
def read(overlay, base, memory, places, ids, locations, records, words, out, lo, hi):
    entries, homes, salt = overlay
    lows, lasts, chunks, listed, blocks, ranks = base
    names, width, start = ids.view(np.uint32), records.shape[1], address_of(memory)
    find_overlay(entries, homes, salt, ids, locations[1], lo, hi)
    find_base(lows, lasts, chunks, listed, blocks, ranks, ids, locations[0], lo, hi)
    for i in range(lo, hi):
        if locations[1, i] >= 0:
            locations[0, i] = locations[1, i] if locations[1, i] & PLACE != PLACE else -1
    for i in range(lo, hi):
        if i + AHEAD < hi and locations[0, i + AHEAD] >= 0:
            later = locations[0, i + AHEAD]
            prefetch_at(start + 4 * (places[later >> RUN_SHIFT, 0] + (later & PLACE) * (width + 1)), 4 * width + 4)
        location = locations[0, i]
        if location < 0:
            for d in range(out.shape[1]):
                out[i, d] = 0.0
            continue
        place, index = places[location >> RUN_SHIFT], location & PLACE
        first = place[0] + index * (width + 1)
        found = crc.copy(memory[first : first + width], records[i], names[2 * i], names[2 * i + 1])
        if memory[first + width] != found ^ np.uint32((place[1] + place[2] * index) & 0xFFFFFFFF):
            locations[0, i] = -2 - location
        read_row(words, i, out[i])
