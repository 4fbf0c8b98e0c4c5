"""Reads of many pieces of files."""

from __future__ import annotations

import os


def read_pieces(fds, offsets, sizes, out, starts, got, lo, hi):
    for i in range(lo, hi):
        try:
            got[i] = os.preadv(fds[i], [memoryview(out)[starts[i] : starts[i] + sizes[i]]], offsets[i])
        except OSError:
            got[i] = -1
