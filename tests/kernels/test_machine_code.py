"""Compiled kernels are kept for other processes and other clones, and never outlive a change of their sources."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import embedrock
from embedrock.kernels.cpu import machine_code
from embedrock.system import platform

PROGRAM = """
import numpy as np
from embedrock.kernels.cpu import directory
slots, bits = np.full(3, -1, np.int64), np.array([0b101], np.uint8)
direct = np.array([[bits.ctypes.data, 3, 1]])
directory.find(direct, np.empty((0, 2), np.int64), np.array([0, 1, 2]), slots, 0, 3)
print(slots.tolist(), sum(directory.find.stats.cache_hits.values()))
"""


def clone(folder: Path) -> Path:
    """Return a copy of the package's folder."""
    return shutil.copytree(
        Path(embedrock.__file__).parent, folder / "embedrock", ignore=shutil.ignore_patterns("__pycache__")
    )


def run(clone: Path, cache: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(clone.parent), "NUMBA_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.slow  # four processes import Numba
def test_clones_share_code_until_any_kernel_file_changes(tmp_path: Path) -> None:
    first, second, cache = clone(tmp_path / "a"), clone(tmp_path / "b"), tmp_path / "cache"
    assert run(first, cache) == "[0, -1, 2] 0"
    assert run(second, cache) == "[0, -1, 2] 1"
    with (second / "kernels" / "cpu" / "rows.py").open("a") as file:  # not the file of the kernel that is run
        file.write("# changed\n")
    assert run(second, cache) == "[0, -1, 2] 0"
    assert run(first, cache) == "[0, -1, 2] 1"


def test_code_lies_in_the_users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(platform, "NAME", "Linux")
    assert machine_code.user_cache_folder() == tmp_path / "embedrock"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "named"))
    assert machine_code.user_cache_folder() == tmp_path / "named"


def test_code_that_was_not_used_for_long_is_removed(tmp_path: Path) -> None:
    old, new, other = tmp_path / "kernels-old", tmp_path / "kernels-new", tmp_path / "else"
    for folder in (old, new, other):
        folder.mkdir()
    for folder in (old, other):
        os.utime(folder, (0, time.time() - 86_400 * (machine_code.UNUSED_DAYS + 1)))
    made = machine_code._made(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([new, other, made])


def test_code_lies_beside_the_sources_where_there_is_no_other_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(machine_code, "SOURCES", tmp_path)
    machine_code.code_folder.cache_clear()
    try:
        assert machine_code.code_folder().parent == tmp_path / "__pycache__"
    finally:
        machine_code.code_folder.cache_clear()


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EACCES])
def test_code_is_kept_where_there_are_no_locks_or_somebody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with machine_code._alone(tmp_path):
        pass
    monkeypatch.setattr("builtins.open", refuse)
    with machine_code._alone(tmp_path):
        pass


def test_the_folder_may_be_removed_meanwhile(tmp_path: Path) -> None:
    with machine_code._alone(tmp_path / "gone"):
        assert (tmp_path / "gone" / "LOCK").exists()
