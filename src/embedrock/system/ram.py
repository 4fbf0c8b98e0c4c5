"""RAM that this process may use, and RAM that is free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from embedrock.system import forks, platform

ROOT = Path("/")
LOOKS = 64  # free RAM is measured again whenever this fraction of RAM was taken; as much stays free for others
# File names of cgroups, versions 1 and 2: limit, use, and page cache that the system can reclaim.
_CGROUP_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def memory_limit(root: Path = ROOT) -> int:
    """Return the bytes of RAM that this process may use.

    The result is the least of the machine's RAM and the limits of this process's cgroup and those above it.
    """
    limits = (read_text(folder / limit_file) for folder, (limit_file, _, _) in cgroups(root))
    return min([platform.physical_memory(), *(int(limit) for limit in limits if limit.isdigit())])


def available_bytes(root: Path = ROOT) -> int:
    """Return the bytes of RAM that new processes can take.

    The result is the least free RAM of the machine, this process's cgroup, and each cgroup above it.
    """
    kilobytes = named_number(root / "proc/meminfo", "MemAvailable:")
    machine = memory_limit() if kilobytes is None else kilobytes * 1024
    free = [machine]
    for folder, (limit_file, use_file, cache_key) in cgroups(root):
        limit, used = read_text(folder / limit_file), read_text(folder / use_file)
        if limit.isdigit() and used.isdigit():
            free.append(int(limit) - int(used) + (named_number(folder / "memory.stat", cache_key) or 0))
    return max(0, min(free))


def pressure(root: Path = ROOT) -> float:
    """Return the share of the last ten seconds in which processes waited for RAM. 0 if unknown.

    The result is the largest share of the machine, this process's cgroup, and each cgroup above it.
    """
    groups = (folder / "memory.pressure" for folder, _ in cgroups(root))
    lines = (read_text(path).split(maxsplit=2) for path in (root / "proc/pressure/memory", *groups))
    shares = (float(words[1].removeprefix("avg10=")) / 100 for words in lines if words[:1] == ["some"])
    return max(shares, default=0.0)  # of a line ``some avg10=1.23 ...``, in percent


def rss_bytes() -> int:
    """Return the current RAM of this process in bytes, or its peak if the system reports only that."""
    text = read_text(ROOT / "proc/self/statm")
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE") if text else peak_rss_bytes()


def peak_rss_bytes() -> int:
    """Return the peak RAM of this process in bytes."""
    # Prefer this to getrusage, which starts from the parent's RAM at the fork.
    if (kilobytes := named_number(ROOT / "proc/self/status", "VmHWM:")) is not None:
        return kilobytes * 1024
    return platform.peak_rss_bytes()


class FreeMemory:
    """Free RAM for tables without a memory limit.

    Tables take it for new rows. So they fail with an error before the system, which overcommits RAM, kills the process.
    """

    def __init__(self) -> None:
        self._lock = forks.lock(forks.LockRank.SECTION)
        self._left = 0

    def take(self, nbytes: int) -> bool:
        """Take bytes and return True, or return False if too few are free."""
        with self._lock:
            if nbytes > self._left:
                part = memory_limit() // LOOKS
                self._left = min(available_bytes() - part, nbytes + part)
            if nbytes > self._left:
                return False
            self._left -= nbytes
            return True


def cgroups(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the folder and file names of this process's cgroup and of each one above it."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            base, version = root / "sys/fs/cgroup/memory", 1
        elif not controllers:
            base, version = root / "sys/fs/cgroup", 2
        else:
            continue
        relative = PurePosixPath(path.lstrip("/"))
        for folder in (relative, *relative.parents):
            yield base / folder, _CGROUP_FILES[version]


def named_number(path: Path, name: str) -> int | None:
    """Return the number beside `name` in a file of lines "name number", or None."""
    lines = (line.split() for line in read_text(path).splitlines())
    return next((int(words[1]) for words in lines if words[:1] == [name]), None)


def read_text(path: Path) -> str:
    """Return the text of a system file, or "" if it does not exist."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
