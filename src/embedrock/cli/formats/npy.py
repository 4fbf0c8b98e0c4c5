"""NumPy's .npy: one array. Ids lie beside it in ``NAME.ids.npy``, where rows are not numbered from 0."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tokenize import TokenError
from typing import IO

import numpy as np

from embedrock.batch.wrong_ids import OF_STRINGS
from embedrock.cli.formats._arrays import Array, Arrays, file_size
from embedrock.cli.formats._kinds import check_kind
from embedrock.cli.formats._sink import Output, Region, Regions, npy_region, part_of, publish
from embedrock.cli.formats._source import ROW_NUMBERS, ReadOptions, fail

MAX_HEADER_BYTES = 10_000
# What NumPy raises where a header is damaged: it has the parser and the tokenizer of Python look at it.
BROKEN = (ValueError, TypeError, SyntaxError, RecursionError, TokenError, UserWarning)
READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read(path: Path, options: ReadOptions) -> Arrays:
    """Open a .npy file."""
    return Arrays(path, npy_array(path), ids_beside(path, options.ids))


def beside(path: Path) -> Path:
    """Return where the ids of a file without ids are: ``vectors.ids.npy`` beside ``vectors.npy``."""
    return path.with_suffix(".ids.npy")


def ids_beside(path: Path, ids: str | None) -> Array | None:
    """Return the ids of a file that has none: those of file `ids`, or of the one that lies beside it, if there is."""
    if ids == ROW_NUMBERS:
        return None
    if ids is None:
        return npy_array(beside(path)) if beside(path).exists() else None
    return npy_array(Path(ids))


def npy_array(path: Path) -> Array:
    """Return the array of a .npy file, whose size fits what its header says."""
    check_kind(path, "a .npy file of numbers", (".npy",))
    with open(path, "rb") as file:
        array = parse_header(file, path)
    expected = array.offset + array.dtype.itemsize * int(np.prod(array.shape, dtype=object))
    if file_size(path) != expected:
        fail(path, f"{expected} bytes for {array.kind}", f"{file_size(path)}", "Get or write the file again.")
    return array


def parse_header(file: IO[bytes], path: Path, name: str = "") -> Array:
    """Read what a .npy file, at its start, says of its array. Nothing is unpickled."""
    try:
        version = np.lib.format.read_magic(file)
        if version not in READERS:
            raise ValueError(f"version {version} of the format")
        shape, fortran, dtype = READERS[version](file, max_header_size=MAX_HEADER_BYTES)
    except BROKEN as error:
        fail(path, "a .npy file of numbers", f"{error}", "Write it by numpy.save.", name)
    if dtype.kind in "US":
        fail(path, "numbers", f"an array of {dtype}, which are strings", f"If they are ids: {OF_STRINGS}", name)
    if dtype.kind not in "fiu":
        fail(path, "numbers", f"an array of {dtype}", "Nothing is unpickled. Convert it to float32.", name)
    return Array(path, name, partial(open, path, "rb"), file.tell(), dtype, shape, fortran)


class NpySink(Regions):
    """Writes a .npy file, and the ids beside it where rows are not numbered from 0."""

    def __init__(self, output: Output, done: int) -> None:
        super().__init__(output, done)
        self.ids = npy_region(self._ids_path(), "<i8", (output.rows,)) if output.has_ids else None
        self.vectors = self._vectors(part_of(output.path))

    def _ids_path(self) -> Path:
        path = beside(self.output.path)
        if not path.exists():
            return part_of(path)
        if self.done and not part_of(path).exists():
            return path  # an earlier run came as far as giving it its name
        fail(path, "no file of this name yet", "one", "Move it away, or choose another name.")

    def _vectors(self, path: Path) -> Region:
        return npy_region(path, "<f4", (self.output.rows, self.output.dim))

    def finish(self) -> list[Path]:
        path = self.output.path
        for region in self._regions():
            region.end()
        if self.ids is None:
            return [publish(self.vectors.path, path)]
        if self.ids.path != beside(path):
            publish(self.ids.path, beside(path))
        return [publish(self.vectors.path, path), beside(path)]
