"""Memory cgroups: a bound on everything that a process holds, the page cache of the files it reads included."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from embedrock.bench.harness.processes import Child
from embedrock.machine.ram import ROOT, rss_bytes

REMOVE_S = 5.0  # a group can be removed once the system has noticed that its last process ended


class NoCgroupError(Exception):
    """This process may make no memory cgroup; the text says why."""


@dataclass(frozen=True)
class CgroupFiles:
    """How a version of cgroups names the files of its memory controller.

    Args:
        limit: the most bytes that the group may hold.
        used, peak: bytes that it holds, and the most that it ever held; page cache included. Writing to `peak`
            starts it anew (version 1).
        drop: writing 0 to it gives back page cache, or "".
    """

    limit: str
    used: str
    peak: str
    drop: str


V1 = CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes", "memory.force_empty")
V2 = CgroupFiles("memory.max", "memory.current", "memory.peak", "")


class MemoryCgroup:
    """A memory cgroup below this process's own one, so that whatever bounds this process goes on bounding its children.

    Args:
        limit_bytes: the most that its processes may hold together; None: as much as they like, but counted.
        root: of the file system.

    Raises:
        NoCgroupError: none can be made.
    """

    def __init__(self, limit_bytes: int | None, root: Path = ROOT) -> None:
        self.limit_bytes = limit_bytes
        reasons = []
        for version, parent in _parents(root):
            try:
                self.folder, self._files = _make(parent, version, limit_bytes), version
            except OSError as error:
                reasons.append(f"{error.strerror} ({parent})")
            else:
                return
        raise NoCgroupError("; ".join(reasons) or "no memory controller of cgroups is mounted")

    @property
    def peak_bytes(self) -> int:
        """The most that its processes held together; where version 2 of an old kernel does not tell, what they hold."""
        with suppress(OSError):
            return int(self._path(self._files.peak).read_text())
        return self.used_bytes

    @property
    def used_bytes(self) -> int:
        """What its processes hold together."""
        return int(self._path(self._files.used).read_text())

    def confine(self, factory: Callable[..., object], *args: Any) -> tuple[Any, ...]:
        """Return the arguments with which `Child` makes ``factory(*args)`` inside this group."""
        return enter, str(self.folder / "cgroup.procs"), factory, *args

    def close(self) -> None:
        """Give back what is left of its page cache, and remove it. Its processes must have ended."""
        if self._files.drop:
            with suppress(OSError):
                self._path(self._files.drop).write_text("0")
        deadline = time.monotonic() + REMOVE_S
        while self.folder.exists():
            try:
                self.folder.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def __enter__(self) -> MemoryCgroup:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _path(self, name: str) -> Path:
        return self.folder / name


@contextmanager
def confined(
    limit_bytes: int | None,
    factory: Callable[..., object],
    *args: Any,
    environment: Mapping[str, str],
    timeout_s: float,
) -> Iterator[tuple[Child, MemoryCgroup | None]]:
    """Yield ``Child(factory, *args)`` in a group of its own, and the group; None where none can be made."""
    with ExitStack() as stack:
        cgroup = None
        with suppress(NoCgroupError):
            cgroup = stack.enter_context(MemoryCgroup(limit_bytes))
        call = cgroup.confine(factory, *args) if cgroup else (factory, *args)
        yield stack.enter_context(Child(*call, environment=environment, timeout_s=timeout_s)), cgroup


def why_not() -> str:
    """Return why this process can make no group, or nothing where it can."""
    try:
        MemoryCgroup(None).close()
    except NoCgroupError as error:
        return str(error)
    return ""


def enter(procs: str, factory: Callable[..., object], *args: object) -> object:
    """Move this process into a group, and make an object there.

    Its interpreter and NumPy were loaded before and are charged to the group that it came from. They are told by
    `outside_bytes`, so that they can be added.
    """
    global _outside_bytes
    _outside_bytes = rss_bytes()
    Path(procs).write_text(str(os.getpid()))
    return factory(*args)


_outside_bytes = 0


def outside_bytes() -> int:
    """Return the RAM that this process held when it entered its group."""
    return _outside_bytes


def _parents(root: Path) -> Iterator[tuple[CgroupFiles, Path]]:
    """Yield the folders to try: that of this process, then those above it."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        relative = PurePosixPath(path.lstrip("/"))
        if "memory" in controllers.split(","):
            yield V1, root / "sys/fs/cgroup/memory" / relative
        elif not controllers and (root / "sys/fs/cgroup/cgroup.controllers").exists():
            # A group with processes has no groups with limits below it, so that one of those above may have to do.
            for folder in (relative, *relative.parents):
                yield V2, root / "sys/fs/cgroup" / folder


def _make(parent: Path, version: CgroupFiles, limit_bytes: int | None) -> Path:
    folder = parent / f"embedrock-{os.getpid()}-{time.monotonic_ns()}"
    if version is V2:
        _hand_down(parent)
    folder.mkdir()
    try:
        with (folder / version.limit).open("r+") as file:  # exists only where the controller does
            if limit_bytes is not None:
                file.write(str(limit_bytes))
    except OSError:
        folder.rmdir()
        raise
    return folder


def _hand_down(parent: Path) -> None:
    """Let the groups below a group of version 2 have the memory controller."""
    control = parent / "cgroup.subtree_control"
    if "memory" not in control.read_text().split():
        control.write_text("+memory")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
