"""Embedrock on macOS and Windows, as far as Python shows them here: see `platforms`."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import embedrock
import platform_programs
import platforms
from embedrock.kernels.cpu import machine_code
from embedrock.system import platform
from slow import slow

SOURCES = Path(embedrock.__file__).parent


@pytest.fixture(scope="module", autouse=True)
def code_of_linux(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the other systems a copy of the machine code that is here: to compile it takes each of them 20 s."""
    here, folder = machine_code.code_folder(), tmp_path_factory.mktemp("code")
    shutil.copytree(here, folder / here.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_CACHE_DIR", str(folder))
        yield


def run(system: str, function: str, *modules: str) -> str:
    """Call a function of `platform_programs` on another system; return what it returned."""
    command = [sys.executable, platforms.__file__, system, function, *modules]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ---------------------------------------------------------------- what people do


@pytest.mark.parametrize("system", ["Windows", *slow("macOS")])  # which has tables on disk, too
def test_tables_in_ram_work_to_the_same_bits(system: str):
    assert run(system, "ram") == platform_programs.ram()


@pytest.mark.slow  # see `code_of_linux`
@pytest.mark.parametrize(("system", "folder"), [("macOS", "Library/Caches"), ("Windows", "AppData/Local")])
def test_kernels_are_compiled(system: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("NUMBA_CACHE_DIR", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run(system, "ram") == platform_programs.ram()
    assert any((tmp_path / folder / "embedrock").glob("kernels-*/*.nbi"))


def test_tables_on_disk_work_on_macos_to_the_same_bits():
    assert run("macOS", "disk") == platform_programs.disk()


def test_a_commit_on_macos_waits_for_the_cache_of_the_disk():
    """Its log, its list of changes, its manifest, and the folders in which these have names."""
    assert int(run("macOS", "full_syncs")) == 6


def test_tables_on_disk_are_refused_on_windows_at_once():
    *told, left = run("Windows", "refused_on_disk").splitlines()
    assert left == "left: []"
    assert len(told) == 3
    for text in told:
        assert "table '/users.rock' cannot be on disk: that takes os.pread, os.pwrite, os.statvfs, fcntl.flock" in text
        assert "which Python does not have on Windows. Leave path= out for a table in RAM, or run this on Linux" in text


@pytest.mark.parametrize(
    ("system", "refused"),
    [
        ("macOS", "there is no table here"),
        ("Windows", "argument TABLE: a table cannot be on disk: that takes os.pread"),
    ],
)
def test_the_command_line_starts(system: str, refused: str):
    told = run(system, "command_line")
    assert told.startswith(f"embedrock {embedrock.__version__}\n")
    assert "verify" in told
    assert refused in told


@pytest.mark.parametrize("system", slow("macOS", "Windows"))  # as the next one
def test_pytorch_trains_rows_in_ram(system: str):
    pytest.importorskip("torch")
    assert run(system, "torch_layers", "torch") == platform_programs.torch_layers()


@pytest.mark.parametrize("system", slow("macOS", "Windows"))  # 12 s each; the front end has nothing of the system
def test_keras_trains_rows_in_ram(system: str):
    pytest.importorskip("tensorflow")
    assert run(system, "keras_fit", "tensorflow", "keras") == platform_programs.keras_fit()


# ---------------------------------------------------------------- what stands in for what is missing


def test_a_full_sync_that_a_file_system_does_not_have_is_a_plain_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    code, calls = errno.ENOTSUP, []

    def refuse(fd: int, command: int) -> None:
        calls.append(command)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    monkeypatch.setattr(os, "fdatasync", calls.append)
    with open(tmp_path / "file", "wb") as file:
        platform.sync(file.fileno())
        assert calls == [51, file.fileno()]
        code = errno.EIO
        with pytest.raises(OSError, match="Input/output error"):  # once is all that can be asked of it
            platform.sync(file.fileno())
        assert calls == [51, file.fileno(), 51]


def test_memory_that_cannot_be_resized_is_copied(monkeypatch: pytest.MonkeyPatch):
    class Fixed(mmap.mmap):
        def resize(self, newsize: int) -> None:
            raise SystemError("mmap: resizing not available--no mremap()")

    monkeypatch.setattr(mmap, "mmap", Fixed)
    memory = platform.private_memory(4096)
    memory[:] = bytes(range(256)) * 16
    for nbytes in (12288, 4096, 8192):
        memory = platform.resized(memory, nbytes)
        assert len(memory) == nbytes
        assert memory[:4096] == bytes(range(256)) * 16
        assert not any(memory[4096:])


def test_memory_with_a_view_is_copied():
    """The traceback of an interrupted call refers to arrays of its frames."""
    memory = platform.private_memory(4096)
    memory[:] = bytes(range(256)) * 16
    view = np.frombuffer(memory, np.uint8)
    made = platform.resized(memory, 8192)
    assert made[:] == bytes(view) + bytes(4096)
    memory = platform.resized(made, 12288)
    assert memory is made  # without views, it stays the same object
    assert memory[:4096] == bytes(view)


def test_memory_is_given_back_where_the_system_can(monkeypatch: pytest.MonkeyPatch):
    platform.give_back_memory()
    monkeypatch.setattr(platform, "_from_libc", lambda name: None)
    platform.give_back_memory()


def test_pages_count_as_resident_where_the_system_does_not_say(monkeypatch: pytest.MonkeyPatch):
    memory = np.frombuffer(platform.private_memory(8 * mmap.PAGESIZE), np.uint8)
    assert platform.resident_pages(memory.ctypes.data, memory.nbytes).tolist() == [0] * 8
    monkeypatch.setattr(platform, "_from_libc", lambda name: None)
    assert platform.resident_pages(memory.ctypes.data, memory.nbytes - 1).tolist() == [1] * 8


# ---------------------------------------------------------------- one place


@pytest.mark.parametrize(
    "word", [r"\bfcntl\b", r"import resource", r"sys\.platform", r"ctypes\.CDLL", r"getattr\(os,", r"hasattr\(os,"]
)
def test_systems_are_told_apart_in_one_place(word: str):
    found = {str(file.relative_to(SOURCES)) for file in SOURCES.rglob("*.py") if re.search(word, file.read_text())}
    assert found - {"system/forks.py"} == {"system/platform.py"}
