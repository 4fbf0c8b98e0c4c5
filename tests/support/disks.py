"""File systems of their own, for tests that need one to be small or read-only: as root, where the machine lets us."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

BALLAST = "ballast"


@contextlib.contextmanager
def mounted(source: Path | str, target: Path, *options: str) -> Iterator[Path]:
    """Mount something, where this process may."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount")
    target.mkdir(exist_ok=True)
    made = subprocess.run(["mount", *options, str(source), str(target)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"this machine does not let us mount: {made.stderr.strip()}")
    try:
        yield target
    finally:
        subprocess.run(["umount", "--lazy", str(target)], check=True)


def memory_disk(target: Path, nbytes: int) -> contextlib.AbstractContextManager[Path]:
    """Mount a file system in memory that has so many bytes."""
    return mounted("tmpfs", target, "-t", "tmpfs", "-o", f"size={nbytes}")


def fill(disk: Path, but: int) -> None:
    """Leave only some bytes free."""
    with (disk / BALLAST).open("wb") as file, contextlib.suppress(OSError):
        while (free := os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - but) > 0:
            os.write(file.fileno(), bytes(min(free, 1 << 20)))


def check_full(error: BaseException, path: Path, about_bytes: int) -> None:
    """Fail unless the error of a full disk says where, how many bytes are needed (half to twice as many), and free."""
    assert isinstance(error, OSError)
    assert error.errno == 28
    assert str(path) in str(error.filename)
    numbers = re.search(r"\((\d+) bytes\) more are needed, and .* \((\d+) bytes\) are free\. Free some", str(error))
    assert numbers, str(error)
    assert about_bytes / 2 < int(numbers[1]) < about_bytes * 2, str(error)
    assert int(numbers[2]) < int(numbers[1])
