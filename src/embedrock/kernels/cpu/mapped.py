"""Records of mapped files, on the CPU: see ``tests/reference/mapped.py`` for the specification."""

import numpy as np

from embedrock.kernels.constants import RUN_SHIFT
from embedrock.kernels.cpu import crc
from embedrock.kernels.cpu.addresses import address_of
from embedrock.kernels.cpu.packed import read_row
from embedrock.kernels.cpu.prefetch import prefetch_at
from embedrock.kernels.cpu.runtime import kernel
from embedrock.kernels.cpu.storage import find_base, find_overlay

AHEAD, FAR = 6, 24  # records whose bytes are asked for, and whose first byte is: its page must be found first
PART = 256  # ids of a thread, at least
PLACE = (1 << RUN_SHIFT) - 1  # of a record in its segment; as a place, it stands for a deleted row


@kernel(over="ids", reads=("ids",), grain=PART)
def read(overlay, base, memory, places, ids, locations, records, words, out, lo, hi):
    entries, homes, salt = overlay
    lows, lasts, chunks, listed, blocks, ranks = base
    names, copies, width = ids.view(np.uint32), records.view(np.uint32), records.shape[1] // 4
    find_overlay(entries, homes, salt, ids, locations, lo, hi)
    find_base(lows, lasts, chunks, listed, blocks, ranks, ids, locations, lo, hi)
    for i in range(lo, hi):
        for ahead, nbytes in ((AHEAD, 4 * width + 4), (FAR, 1)):
            if i + ahead < hi and locations[i + ahead] >= 0:
                later = locations[i + ahead]
                first = places[later >> RUN_SHIFT, 0] + (later & PLACE) * (width + 1)
                prefetch_at(address_of(memory) + 4 * first, nbytes)
        location = locations[i]
        if location < 0 or location & PLACE == PLACE:
            locations[i] = -1
            out[i, :] = 0.0
            continue
        slot = i if records.shape[0] == ids.shape[0] else lo // PART
        place, index = places[location >> RUN_SHIFT], location & PLACE
        first = place[0] + index * (width + 1)
        found = crc.copy(memory[first : first + width], copies[slot], names[2 * i], names[2 * i + 1])
        if memory[first + width] != found ^ np.uint32((place[1] + place[2] * index) & 0xFFFFFFFF):
            locations[i] = -2 - location
        read_row(words, slot, out[i])
