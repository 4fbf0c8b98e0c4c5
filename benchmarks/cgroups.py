"""Memory cgroups: a limit on all that a process holds, the page cache of the files it reads included."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import processes
from embedrock.system.ram import ROOT, cgroups, rss_bytes

REMOVE_S = 5.0  # a group can be removed once the system has noticed that its last process ended


class NoCgroupError(Exception):
    """This process may make no memory cgroup; the text says why."""


PEAKS = {"memory.usage_in_bytes": "memory.max_usage_in_bytes", "memory.current": "memory.peak"}  # by the use's file


class MemoryCgroup:
    """A memory cgroup below this process's own one, so limits of this process hold for its children as well.

    Args:
        limit_bytes: the most that its processes may hold together; None: no limit, but counted.
        root: of the file system.

    Raises:
        NoCgroupError: none can be made.
    """

    def __init__(self, limit_bytes: int | None, root: Path = ROOT) -> None:
        reasons = []
        # A group with processes has no groups with limits below it (version 2), so one of those above may have to do.
        for parent, (limit_file, use_file, _) in cgroups(root):
            try:
                self.folder = _make(parent, limit_file, limit_bytes)
            except OSError as error:
                reasons.append(f"{error.strerror} ({parent})")
            else:
                self.files = [self.folder / name for name in (PEAKS[use_file], use_file)]
                return
        raise NoCgroupError("; ".join(reasons) or "no memory controller of cgroups is mounted")

    def close(self) -> None:
        """Release the rest of its page cache, and remove it. Its processes must have ended."""
        with suppress(OSError):
            (self.folder / "memory.force_empty").write_text("0")  # only version 1 has it
        deadline = time.monotonic() + REMOVE_S
        while self.folder.exists():
            try:
                self.folder.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def confined(
    limit_bytes: int | None,
    factory: Callable[..., object],
    *args: Any,
    environment: Mapping[str, str],
    timeout_s: float,
) -> processes.Child:
    """Return ``Child(factory, *args)`` in a group of its own; in none where none can be made."""
    cleanup = None
    with suppress(NoCgroupError):
        cgroup = MemoryCgroup(limit_bytes)
        cleanup, args = cgroup.close, (cgroup.folder / "cgroup.procs", cgroup.files, factory, *args)
        factory = enter
    return processes.Child(factory, *args, environment=environment, timeout_s=timeout_s, cleanup=cleanup)


def why_not() -> str:
    """Return why this process can make no group, or "" where it can."""
    try:
        MemoryCgroup(None).close()
    except NoCgroupError as error:
        return str(error)
    return ""


_files: list[Path] = []  # of this process's group: its peak, and the bytes that it holds
_outside_bytes = 0


def enter(procs: Path, files: list[Path], factory: Callable[..., object], *args: object) -> object:
    """Move this process into a group, and make an object there."""
    global _files, _outside_bytes
    _files, _outside_bytes = files, rss_bytes()
    procs.write_text(str(os.getpid()))
    return factory(*args)


def peak_bytes() -> int | None:
    """Return the most RAM and page cache that this process held; None outside a group of its own.

    The interpreter and NumPy were loaded before, and are charged to the group that the process came from: they are
    added. An old kernel has no peak: the bytes that the group holds now count there.
    """
    found = [int(path.read_text()) for path in _files if path.exists()]
    return found[0] + _outside_bytes if found else None


def _make(parent: Path, limit_file: str, limit_bytes: int | None) -> Path:
    folder, control = parent / f"embedrock-{os.getpid()}-{time.monotonic_ns()}", parent / "cgroup.subtree_control"
    if control.exists() and "memory" not in control.read_text().split():
        control.write_text("+memory")
    folder.mkdir()
    try:
        with (folder / limit_file).open("r+") as file:  # exists only where the controller does
            if limit_bytes is not None:
                file.write(str(limit_bytes))
    except OSError:
        folder.rmdir()
        raise
    return folder
