"""Python's differences between Linux, macOS and Windows, and replacements for missing functions.

This module checks for functions by name, not for the system. So it uses functions that a later Python adds.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import select
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from embedrock.errors import UnsupportedError

fcntl: ModuleType | Any
resource: ModuleType | Any
termios: ModuleType | Any
tty: ModuleType | Any
try:
    import fcntl
    import resource
    import termios
    import tty
except ImportError:  # Windows
    fcntl = resource = termios = tty = None

NAME = {"linux": "Linux", "darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)
O_DIRECT: int = getattr(os, "O_DIRECT", 0)
O_DIRECTORY: int = getattr(os, "O_DIRECTORY", 0)
O_NONBLOCK: int = getattr(os, "O_NONBLOCK", 0)
O_NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
HAS_HUGE_PAGES = hasattr(mmap, "MADV_HUGEPAGE")
_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if NAME == "Linux" else 0)
_NO_FULL_SYNC = (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY)  # errors of network file systems for F_FULLFSYNC
_MAPS = Path("/proc/self/maps")  # memory map of this process, on Linux
_NEEDED_BY_FILES = ("pread", "pwrite", "statvfs")


# ---------------------------------------------------------------- files


def check_files(subject: str) -> None:
    """Raise `UnsupportedError` if Python lacks a function that tables on disk need."""
    missing = [f"os.{name}" for name in _NEEDED_BY_FILES if not hasattr(os, name)]
    missing += ["fcntl.flock"] if fcntl is None else []
    if missing:
        raise UnsupportedError(
            f"{subject} cannot be on disk: that takes {', '.join(missing)}, which Python does not have on {NAME}. "
            "Leave path= out for a table in RAM, or run this on Linux, in WSL for example, or on macOS."
        )


def lock(fd: int, wait: bool) -> None:
    """Lock an open file for this process alone.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is False.
        OSError: this system or file system has no locks.
    """
    if fcntl is None:
        raise OSError(errno.ENOLCK, f"Python has no fcntl.flock on {NAME}")
    fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def unlock(fd: int) -> None:
    """Release the lock of a file."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def sync(fd: int) -> None:
    """Make the written bytes of a file durable."""
    _flush(fd, getattr(os, "fdatasync", os.fsync))


def sync_folder(path: str) -> None:
    """Make the entries of a folder durable. On Windows, do nothing: it does not open folders."""
    if not O_DIRECTORY:
        return
    fd = os.open(path, os.O_RDONLY | O_DIRECTORY)
    try:
        _flush(fd, os.fsync)
    finally:
        os.close(fd)


def _flush(fd: int, otherwise: Callable[[int], None]) -> None:
    """Call F_FULLFSYNC if it exists: on macOS, `os.fsync` returns before the disk empties its cache."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is None:
        return otherwise(fd)
    try:
        fcntl.fcntl(fd, full)
    except OSError as error:
        if error.errno not in _NO_FULL_SYNC:
            raise
        otherwise(fd)


def is_direct(fd: int) -> bool:
    """Return whether a file is read and written past the page cache."""
    return bool(O_DIRECT and fcntl.fcntl(fd, fcntl.F_GETFL) & O_DIRECT)


def give_up_direct(fd: int) -> None:
    """Read and write a file through the page cache from now on."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~O_DIRECT)


def file_in_memory(label: str) -> int:
    """Return the descriptor of a new file in memory, without a name in a folder.

    Raises:
        OSError: this system has no such files.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError(f"{NAME} has no files in memory that other processes can open")
    return os.memfd_create(label)


def watch_process(process: int) -> int:
    """Return a descriptor that `select.poll` reports as readable once a process has ended.

    Raises:
        OSError: this system has no such descriptors, or the process is gone.
    """
    if not hasattr(os, "pidfd_open"):
        raise OSError(f"{NAME} has no descriptors of processes")
    return os.pidfd_open(process)


def is_running(process: int) -> bool | None:
    """Return whether a process of this machine exists; None if Python cannot find out, on Windows."""
    if not hasattr(os, "getpgid"):
        return None
    try:
        os.getpgid(process)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user, on some systems
        pass
    return True


def read_into(fd: int, memory: memoryview, offset: int) -> int:
    """Fill some or all of `memory` from a file, and return the number of bytes."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [memory], offset)
    data = os.pread(fd, len(memory), offset)
    memory[: len(data)] = data
    return len(data)


def forget_pages(fd: int, start: int, end: int) -> None:
    """Advise the system to discard a range of a file from the page cache. An `end` of 0 is the end of the file."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_DONTNEED)


CAN_ASK = hasattr(os, "posix_fadvise")  # for pages, before they are read


def block_of(fd: int) -> int:
    """Return the bytes of the blocks in which a file is read past the page cache, at most 4096."""
    least = 512
    if not is_direct(fd):
        return least
    with private_memory(4096) as memory, memoryview(memory)[:least] as view:
        try:
            read_into(fd, view, least)
        except OSError:
            return 4096
    return least


def expect_any_order(mapped: np.ndarray) -> None:
    """Advise the system that a file's bytes, mapped into memory, are read in any order: it reads no others ahead."""
    memory: Any = mapped.base
    if hasattr(mmap, "MADV_RANDOM"):
        memory.obj.madvise(mmap.MADV_RANDOM)


def stamp_of(fd: int) -> tuple[int, int]:
    """Return what changes when an open file does: its size, and the time of its last change in nanoseconds."""
    found = os.fstat(fd)
    return found.st_size, found.st_mtime_ns


def free_bytes(path: str) -> int:
    """Return the free bytes of a folder's file system."""
    if not hasattr(os, "statvfs"):
        return shutil.disk_usage(path).free
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def open_file_limit() -> int | None:
    """Return how many files this process may have open, or None if unknown."""
    return None if resource is None else resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def allow_more_files_than(fd: int) -> None:
    """Raise this process's soft limit of open files in time. A large table has a file per 128 MiB."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    more = soft * 4 if hard == resource.RLIM_INFINITY else min(soft * 4, hard)
    if fd >= soft // 2 and more > soft:
        with contextlib.suppress(ValueError, OSError):  # macOS has another limit, and no call returns it
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))


def find_sync_file_range() -> Callable[[int, int, int, int], None] | None:
    """Return Linux' `sync_file_range` of (descriptor, start, end, flags), or None elsewhere."""
    function = _from_libc("sync_file_range")
    if function is None:
        return None
    function.argtypes = ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint
    function.restype = ctypes.c_int

    def sync_file_range(fd: int, start: int, end: int, flags: int) -> None:
        while function(fd, start, end - start, flags):
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))

    return sync_file_range


def user() -> str:
    """Return the user's id or name, as part of a file name."""
    return str(os.getuid()) if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")


def user_cache_folder() -> Path:
    """Return the user's folder for caches."""
    if NAME == "Windows":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if NAME == "macOS":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


# ---------------------------------------------------------------- memory and processors


def private_memory(nbytes: int, sparse: bool = False) -> mmap.mmap:
    """Return zeroed memory that forked children do not share.

    Args:
        nbytes: size in bytes.
        sparse: whether most of it may stay unused. If so, the system reserves no RAM for it, where it can.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return mmap.mmap(-1, nbytes, flags=flags | _NORESERVE if sparse else flags)


def resized(memory: mmap.mmap, nbytes: int) -> mmap.mmap:
    """Return memory of another size with the same bytes: the same object where the system can, else a copy."""
    try:
        memory.resize(nbytes)
        return memory
    except (SystemError, AttributeError, BufferError):  # no mremap: macOS; or the traceback of a Ctrl-C has a view
        pass
    made, kept = private_memory(nbytes), min(nbytes, len(memory))
    made[:kept] = memory[:kept]
    with contextlib.suppress(BufferError):  # the last view frees it
        memory.close()
    return made


def resident_pages(address: int, nbytes: int) -> np.ndarray:
    """Return which pages from an address on are in RAM, uint8 (pages,): 0 or 1. All are 1 if unknown."""
    pages = np.ones(-(-nbytes // mmap.PAGESIZE), np.uint8)
    mincore = _from_libc("mincore")
    if mincore is None:
        return pages
    if mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_void_p(pages.ctypes.data)):
        if ctypes.get_errno() == errno.ENOMEM:  # in a child without these pages: see `share_with_children`
            return np.zeros_like(pages)
        raise OSError(ctypes.get_errno(), "mincore")
    return np.bitwise_and(pages, 1, out=pages)


def give_back_memory() -> None:
    """Return freed memory to the system. glibc keeps it for each thread that there was."""
    trim = _from_libc("malloc_trim")
    if trim is not None:
        trim(0)


def share_with_children(is_shared: bool, address: int, nbytes: int) -> None:
    """Include the whole pages of some memory in later forks, or exclude them, where the system can."""
    name = "MADV_DOFORK" if is_shared else "MADV_DONTFORK"
    advice, madvise = getattr(mmap, name, None), _from_libc("madvise")
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    rest = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if advice is None or madvise is None or rest <= 0:
        return
    if madvise(ctypes.c_void_p(start), ctypes.c_size_t(rest), advice):
        raise OSError(ctypes.get_errno(), name)


def physical_memory() -> int:
    """Return the machine's RAM in bytes."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    status = _WindowsMemory(size=ctypes.sizeof(_WindowsMemory))
    if not getattr(ctypes, "windll").kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):  # noqa: B009  # not on Linux
        raise OSError("GlobalMemoryStatusEx failed")
    return status.physical


class _WindowsMemory(ctypes.Structure):
    """MEMORYSTATUSEX."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("physical", ctypes.c_uint64),
        ("free", ctypes.c_uint64),
        ("others", ctypes.c_uint64 * 5),
    )


def peak_rss_bytes() -> int:
    """Return the peak RAM of this process in bytes. A peak of its parent before the fork may count.

    Raises:
        UnsupportedError: Python cannot measure it, on Windows.
    """
    if resource is None:
        raise UnsupportedError(
            f"the RAM that a process has held cannot be told: Python has no resource.getrusage on {NAME}. Run this on "
            "Linux, in WSL for example, or on macOS."
        )
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if NAME == "macOS" else 1024)


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def loaded_libraries(name: str) -> list[str]:
    """Return the paths of loaded libraries whose file names begin with `name`. Empty if unknown."""
    if not _MAPS.exists():
        return []
    paths = {line.split(maxsplit=5)[5].strip() for line in _MAPS.read_text().splitlines() if f"/{name}" in line}
    return sorted(path for path in paths if os.path.basename(path).startswith(name))


def library(path: str) -> Any:
    """Return the functions of a loaded library."""
    return ctypes.CDLL(path)


@functools.cache
def _from_libc(name: str) -> Any:
    try:
        return getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError, TypeError):  # TypeError: on Windows, `CDLL(None)` does not work
        return None


# ---------------------------------------------------------------- the terminal


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """Read keys of the terminal as they are pressed, without Enter. Ctrl-C raises `KeyboardInterrupt` as ever.

    Yields:
        A function that waits at most some seconds and returns a key, or "". Without a terminal as standard input, and
        on Windows, it only waits.
    """
    if termios is None or sys.stdin is None or not sys.stdin.isatty():
        yield lambda seconds: time.sleep(seconds) or ""
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield lambda seconds: os.read(fd, 1).decode(errors="replace") if select.select([fd], [], [], seconds)[0] else ""
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
