"""Extents of files, equally long pieces at any offsets: see ``tests/reference/extents.py`` for the specification."""

import numpy as np
from numba import types

from embedrock.kernels.cpu.addresses import uint8s
from embedrock.kernels.cpu.prefetch import prefetch_at
from embedrock.kernels.cpu.runtime import kernel

AHEAD = 16
WILL_NEED = 3  # of posix_fadvise: start to read into the page cache, and do not wait

posix_fadvise = types.ExternalFunction("posix_fadvise", types.int32(types.int32, types.int64, types.int64, types.int32))


@kernel(over="ids", reads=("ids",))
def place(ids, firsts, starts, rows_each, nbytes, numbers, offsets, lo, hi):
    for i in range(lo, hi):
        number = np.searchsorted(firsts, ids[i], "right") - 1
        numbers[i] = number
        offsets[i] = starts[number] + (ids[i] - firsts[number]) // rows_each[number] * nbytes


@kernel()
def cover(files, offsets, nbytes, limits, requests, starts):
    block, gap, longest, room = limits
    count = used = file = begin = size = 0  # the last three are of the last request
    for i in range(offsets.shape[0]):
        first = offsets[i] // block * block
        end = (offsets[i] + nbytes + block - 1) // block * block
        is_near = begin <= first <= begin + size + gap and end - begin <= longest
        goes_on = count > 0 and files[i] == file and is_near
        more = max(end - begin - size, 0) if goes_on else end - first
        if used + more > room and i > 0:
            return i, count
        if not goes_on:
            count += 1
            file, begin, size = files[i], first, 0
            requests[0, count - 1], requests[1, count - 1], requests[3, count - 1] = file, begin, used
        size += more
        used += more
        requests[2, count - 1] = size
        starts[i] = requests[3, count - 1] + offsets[i] - begin
    return offsets.shape[0], count


@kernel(over="addresses", reads=("addresses", "slots"), grain=512)
def copy(addresses, nbytes, rows, slots, column, lo, hi):
    for i in range(lo, hi):
        if i + AHEAD < hi:
            prefetch_at(addresses[i + AHEAD], nbytes)
        source, row = uint8s(addresses[i], nbytes), rows[slots[i]]
        for k in range(nbytes):
            row[column + k] = source[k]


@kernel()
def ask(fds, offsets, sizes):
    for i in range(fds.shape[0]):
        posix_fadvise(fds[i], offsets[i], sizes[i], WILL_NEED)
