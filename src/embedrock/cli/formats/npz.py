"""NumPy's .npz: arrays in a zip archive, compressed or not."""

from __future__ import annotations

import errno
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np

from embedrock.cli.formats._arrays import Array, Arrays, choose
from embedrock.cli.formats._sink import Spool
from embedrock.cli.formats._source import ReadOptions, fail
from embedrock.cli.formats.npy import parse_header

MAX_MEMBERS = 1000
NO_ZIP = "Check that it is the right file, or get it again."
BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)  # as zipfile tells of it


def read(path: Path, options: ReadOptions) -> Arrays:
    """Open a .npz file."""
    arrays: dict[str, Array] = {}
    for member in _members(path):
        with _opened(path, member.filename) as file:
            array = parse_header(file, path, member.filename.removesuffix(".npy"))
        _check(array, member)
        arrays[array.name] = replace(array, open=partial(_opened, path, member.filename))
    return choose(path, arrays, options)


def _members(path: Path) -> list[zipfile.ZipInfo]:
    with _told(path, "a .npz file"), zipfile.ZipFile(path) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
    if not 0 < len(members) <= MAX_MEMBERS:
        fail(path, f"1 to {MAX_MEMBERS} arrays", f"{len(members)}", NO_ZIP)
    return members


@contextmanager
def _told(path: Path, expected: str, name: str = "") -> Iterator[None]:
    """Say in our own words what zipfile finds wrong with a file."""
    try:
        yield
    except BROKEN as error:
        fail(path, expected, f"{error}", NO_ZIP, name)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fail(path, expected, "places outside the file", NO_ZIP, name)


@contextmanager
def _opened(path: Path, name: str) -> Iterator[IO[bytes]]:
    with _told(path, "a whole .npz file", name), zipfile.ZipFile(path) as archive, archive.open(name) as file:
        yield file


def _check(array: Array, member: zipfile.ZipInfo) -> None:
    expected = array.offset + array.dtype.itemsize * int(np.prod(array.shape, dtype=object))
    if member.file_size != expected:
        fail(array.path, f"{expected} bytes for {array.kind}", f"{member.file_size}", NO_ZIP, array.name)
    if array.fortran and len(array.shape) > 1:
        remedy = "Save numpy.ascontiguousarray(array), or a .npy file."
        fail(array.path, "rows one after the other", "columns one after the other", remedy, array.name)


class NpzSink(Spool):
    """Writes arrays "vectors" and, where rows are not numbered from 0, "ids"; not compressed."""

    def _pack(self, path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.write(self.vectors.path, "vectors.npy")
            if self.ids is not None:
                archive.write(self.ids.path, "ids.npy")
