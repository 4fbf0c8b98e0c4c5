"""`Region`: an array in a file in the making; `Regions`: vectors and ids, each in one."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from embedrock.cli.formats._arrays import Array
from embedrock.cli.formats._sink import Sink
from embedrock.process import platform


class Region:
    """An array in a file in the making.

    Args:
        path: of the file; it is made unless it is there.
        header: its first bytes, if they are this region's to write.
        offset: of the first element.
        dtype: of the elements.
        shape: of the array.
    """

    def __init__(self, path: Path, header: bytes, offset: int, dtype: str, shape: tuple[int, ...]) -> None:
        self.path, self.offset, self.dtype, self.shape = path, offset, np.dtype(dtype), shape
        self._row_bytes = self.dtype.itemsize * int(np.prod(shape[1:]))
        self._file = _open_to_change(path)
        self._file.write(header)

    def write(self, first: int, values: np.ndarray) -> None:
        """Write rows `first` and on."""
        self._file.seek(self.offset + first * self._row_bytes)
        self._file.write(np.ascontiguousarray(values, self.dtype).data)

    def holds(self, first: int, values: np.ndarray) -> bool:
        """Return whether rows `first` and on are these."""
        wanted = np.ascontiguousarray(values, self.dtype).tobytes()
        self._file.seek(self.offset + first * self._row_bytes)
        return self._file.read(len(wanted)) == wanted

    def sync(self) -> None:
        """Make durable what was written."""
        self._file.flush()
        platform.sync(self._file.fileno())

    def end(self) -> None:
        """Give the file its final size, in case it was longer."""
        self._file.truncate(self.offset + self.shape[0] * self._row_bytes)
        self.sync()

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def array(self) -> Array:
        """Return it, to be read."""
        return Array(self.path, "", partial(open, self.path, "rb"), self.offset, self.dtype, self.shape)


def _open_to_change(path: Path) -> BinaryIO:
    # Neither truncated nor appended to: what is there is continued.
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")


class Regions(Sink):
    """Vectors, and perhaps ids, each in a `Region`."""

    vectors: Region
    ids: Region | None

    def write(self, ids: np.ndarray, vectors: np.ndarray) -> None:
        self.vectors.write(self.done, vectors)
        if self.ids is not None:
            self.ids.write(self.done, ids)
        self.done += len(ids)

    def holds(self, ids: np.ndarray, vectors: np.ndarray) -> bool:
        first = self.done - len(ids)
        return self.vectors.holds(first, vectors) and (self.ids is None or self.ids.holds(first, ids))

    def sync(self) -> None:
        for region in self._regions():
            region.sync()

    def close(self) -> None:
        for region in self._regions():
            region.close()

    def _regions(self) -> list[Region]:
        return [self.vectors] if self.ids is None else [self.vectors, self.ids]
