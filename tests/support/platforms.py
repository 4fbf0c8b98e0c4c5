"""Other systems, as far as Python shows them: this one without what they lack.

    python tests/support/platforms.py Windows FUNCTION MODULE...

calls a function of `platform_programs`, and prints what it returns, once the modules that it names have been imported:
frameworks that were built for Linux. What is not there raises what it raises there.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import fcntl
import importlib
import io
import mmap
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Of neither: Linux alone has them, or macOS only from some release on.
LINUX_ONLY = {
    os: (
        "fdatasync preadv pwritev posix_fallocate posix_fadvise O_DIRECT O_NOATIME O_PATH copy_file_range "
        "sched_getaffinity sched_setaffinity memfd_create eventfd splice getrandom pipe2 POSIX_FADV_DONTNEED"
    ),
    mmap: "MADV_HUGEPAGE MADV_NOHUGEPAGE MAP_NORESERVE MAP_POPULATE MAP_STACK",
}
POSIX_ONLY = {
    os: (
        "pread pwrite readv writev O_CLOEXEC O_DIRECTORY O_NONBLOCK O_NOFOLLOW O_SYNC O_DSYNC fork forkpty "
        "register_at_fork getuid geteuid getgid getegid statvfs fstatvfs sysconf sysconf_names confstr getloadavg "
        "uname mkfifo mknod chown fchown killpg setsid getpgid setpgid nice wait wait3 wait4 WNOHANG sync sendfile "
        "getpriority sched_yield"
    ),
    mmap: (
        "MAP_PRIVATE MAP_SHARED MAP_ANONYMOUS MAP_ANON MAP_DENYWRITE MAP_EXECUTABLE PROT_READ PROT_WRITE PROT_EXEC "
        "MADV_DONTNEED MADV_FREE MADV_NORMAL MADV_RANDOM MADV_SEQUENTIAL MADV_WILLNEED MADV_REMOVE MADV_DONTFORK"
    ),
    signal: (
        "SIGKILL SIGHUP SIGALRM SIGUSR1 SIGUSR2 SIGCHLD SIGPIPE SIGQUIT SIGCONT SIGSTOP alarm setitimer getitimer "
        "pthread_kill pthread_sigmask sigwait sigpending siginterrupt SIG_BLOCK"
    ),
}
NO_MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "posix", "syslog")
F_FULLFSYNC = 51  # as macOS calls it


def become(name: str) -> None:
    """Take away from this process what Python does not have on "macOS" or "Windows"."""
    _hide(LINUX_ONLY)
    _hide_files_of_linux()
    {"macOS": _become_macos, "Windows": _become_windows}[name]()


def _hide(names: dict[Any, str]) -> None:
    for module, listed in names.items():
        for name in listed.split():
            vars(module).pop(name, None)


def _hide_files_of_linux() -> None:
    """Let there be neither /proc nor /sys."""

    def hidden(real: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(file, str | Path) and str(file).startswith(("/proc/", "/sys/")):
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(file))
            return real(file, *args, **kwargs)

        return opened

    builtins.open = io.open = hidden(open)
    os.open = hidden(os.open)


def _become_macos() -> None:
    real = fcntl.fcntl

    def fcntl_of_macos(fd: Any, command: int, argument: Any = 0) -> Any:
        if command != F_FULLFSYNC:
            return real(fd, command, argument)
        os.full_syncs.append(fd)  # type: ignore[attr-defined]
        return os.fsync(fd)

    class Mapping(mmap.mmap):
        def resize(self, newsize: int) -> None:
            raise SystemError("mmap: resizing not available--no mremap()")

    sys.platform = "darwin"
    os.full_syncs = []  # type: ignore[attr-defined]  # the descriptors, for tests
    fcntl.__dict__.update(F_FULLFSYNC=F_FULLFSYNC, fcntl=fcntl_of_macos)
    mmap.mmap = Mapping
    _take_from_library("sync_file_range", "syscall")
    _refuse_semaphores()


def _become_windows() -> None:
    real_open, statvfs = os.open, os.statvfs

    def disk_usage(path: Any) -> SimpleNamespace:  # Python has it on Windows, by another call
        found = statvfs(path)
        return SimpleNamespace(total=found.f_blocks * found.f_frsize, free=found.f_bavail * found.f_frsize)

    def open_no_folder(path: Any, *args: Any, **kwargs: Any) -> int:
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real_open(path, *args, **kwargs)

    class Mapping(mmap.mmap):  # which has neither flags nor madvise
        def __new__(cls, fileno: int, length: int, tagname: str | None = None, access: int = 0, offset: int = 0) -> Any:
            return super().__new__(cls, fileno, length)

        def __getattribute__(self, name: str) -> Any:
            if name == "madvise":
                raise AttributeError(name)
            return super().__getattribute__(name)

    sys.platform = "win32"
    shutil.disk_usage = disk_usage
    shutil._use_fd_functions = False  # type: ignore[attr-defined]  # as it decided when it was imported
    _hide(POSIX_ONLY)
    os.open = open_no_folder
    mmap.mmap = Mapping
    for name in NO_MODULES:
        sys.modules[name] = None  # type: ignore[assignment]  # what is None there cannot be imported
    _take_from_library()
    ctypes.windll = Windll()  # type: ignore[attr-defined]


def _take_from_library(*names: str) -> None:
    """Let the C library lack functions; without names, let there be no library of all libraries."""

    class Library(ctypes.CDLL):
        def __init__(self, name: Any, *args: Any, **kwargs: Any) -> None:
            if name is None and not names:
                raise TypeError("LoadLibrary() argument 1 must be str, not None")
            super().__init__(name, *args, **kwargs)

        def __getattr__(self, name: str) -> Any:
            if name in names:
                raise AttributeError(name)
            return super().__getattr__(name)

    ctypes.CDLL = Library


def _refuse_semaphores() -> None:
    """Do as macOS, whose sem_init fails: machine code that was compiled here would find Linux'."""
    from embedrock.kernels.cpu import pread

    pread.set_up = lambda desk: False


class Windll:
    """The part of `ctypes.windll` that tells of memory: 16 GiB, half of them free."""

    class kernel32:
        @staticmethod
        def GlobalMemoryStatusEx(status: Any) -> int:
            words = ctypes.cast(status, ctypes.POINTER(ctypes.c_uint64))
            if words[0] != 64:  # bytes of a MEMORYSTATUSEX, which whoever asks has to say
                return 0
            words[1], words[2] = 16 << 30, 8 << 30
            return 1


if __name__ == "__main__":
    _, system, function, *modules = sys.argv
    for module in ("numpy", "numba", "multiprocessing.connection", *modules):
        importlib.import_module(module)
    become(system)
    print(getattr(importlib.import_module("platform_programs"), function)())
