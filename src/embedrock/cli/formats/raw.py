"""Raw little-endian numbers, row after row; the user says how many there are in a row, and of which type."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from embedrock.cli.formats._arrays import FLOATS, Array, Arrays, file_size
from embedrock.cli.formats._sink import Region
from embedrock.cli.formats._source import ReadOptions, fail
from embedrock.cli.formats.npy import NpySink, ids_beside
from embedrock.terminal.tables import format_count


def read(path: Path, options: ReadOptions) -> Arrays:
    """Open a file of raw numbers."""
    name = options.dtype or "float32"
    if options.dim is None:
        fail(path, "the width of its rows", "none", "Pass --dim N.")
    dtype = np.dtype(FLOATS[name])
    rows, rest = divmod(file_size(path), dtype.itemsize * options.dim)
    if rest:
        expected = f"rows of {options.dim} {name}, {dtype.itemsize * options.dim} bytes each"
        fail(path, expected, f"{format_count(file_size(path), 'byte')} in all", "Check --dim and --dtype.")
    shape = rows, options.dim
    vectors = Array(path, "", partial(open, path, "rb"), 0, dtype, shape, bfloat16=name == "bfloat16")
    return Arrays(path, vectors, ids_beside(path, options.ids))


class RawSink(NpySink):
    """Writes raw float32 numbers, and the ids beside them in a .npy file where rows are not numbered from 0."""

    def _vectors(self, path: Path) -> Region:
        return Region(path, b"", 0, "<f4", (self.output.rows, self.output.dim))
