"""Files of a benchmark: the folder that they are in, and what the page cache has of them."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from embedrock.errors import EmbedrockError
from embedrock.machine.sizes import format_bytes
from embedrock.machine.vfs import OS_SYSTEM

SPARE_BYTES = 300_000_000


class SpaceError(EmbedrockError, OSError):
    """There is too little free space for the files of a benchmark."""


@contextmanager
def scratch_folder(parent: Path, need_bytes: int) -> Iterator[Path]:
    """Yield a new folder that is removed with all that is in it.

    Raises:
        SpaceError: fewer than `need_bytes` are free.
    """
    free = shutil.disk_usage(parent).free
    if free < need_bytes:
        raise SpaceError(
            f"the benchmark needs {format_bytes(need_bytes)} of free space in {str(parent)!r}: {format_bytes(free)} "
            "are free. Choose another --folder, or fewer --rows."
        )
    folder = Path(tempfile.mkdtemp(prefix="embedrock-bench-", dir=parent))
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: object) -> None:
    """Leave by way of every `finally`: many gigabytes must not stay behind."""
    raise SystemExit(128 + number)


def forget_pages(paths: Sequence[Path]) -> None:
    """Drop files from the page cache, where they would serve a contender and be charged to another."""
    for path in paths:
        fd = OS_SYSTEM.open(str(path), os.O_RDONLY)
        try:
            OS_SYSTEM.fdatasync(fd)
            OS_SYSTEM.drop(fd)
        finally:
            OS_SYSTEM.close(fd)
