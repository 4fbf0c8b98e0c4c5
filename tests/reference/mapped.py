"""Records of mapped files: the specification of ``kernels/cpu/mapped.py``."""

from __future__ import annotations

from typing import Any

import numpy as np

from embedrock.kernels.constants import RUN_SHIFT
from reference import codec, storage

GONE = (1 << RUN_SHIFT) - 1


def read(
    overlay: Any,
    base: Any,
    memory: np.ndarray,
    places: np.ndarray,
    ids: np.ndarray,
    locations: np.ndarray,
    records: np.ndarray,
    words: np.ndarray,
    out: np.ndarray,
) -> None:
    """Write the location of each id's record to `locations`, its bytes to `records`, and its weights to `out`.

    -1 and zeros: no record. -2 - location: its seal does not fit. An overlay hides the base, also where a row is gone.
    `memory` has words. `places` has the first record of each run there, its salt and its step. `words` are `records`,
    uint8 (n, record_bytes), or fewer, if nobody needs the bytes.
    """
    entries, homes, salt = overlay
    lows, lasts, runs, listed, blocks, ranks = base
    storage.find_overlay(entries, homes, salt, ids, locations)
    storage.find_base(lows, lasts, runs, listed, blocks, ranks, ids, locations)
    locations[locations & GONE == GONE] = -1
    width, keeps = records.shape[1] // 4, len(records) == len(ids)
    for i, row in enumerate(ids.tolist()):
        out[i] = 0
        if (location := int(locations[i])) < 0:
            continue
        (start, salt, step), index = places[location >> RUN_SHIFT].tolist(), location & GONE
        first = start + index * (width + 1)
        slot = i if keeps else 0
        records[slot] = memory[first : first + width].view(np.uint8)
        mark = (salt + step * index) & 0xFFFFFFFF
        if int(memory[first + width]) != storage._crc(row, records[slot].tobytes()) ^ mark:
            locations[i] = -2 - location
        out[i] = codec.decode(words[slot : slot + 1, : out.shape[1]])[0]
