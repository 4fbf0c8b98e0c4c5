"""Facts of the machine that a measurement was made on, and how much RAM a benchmark may take."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path, PurePosixPath

from embedrock.sizes import memory_limit

PACKAGES = ("embedrock", "numpy", "numba", "torch", "fbgemm-gpu-cpu", "keras", "tensorflow")
ROOT = Path("/")
# How cgroups of version 1 and 2 name the same things: limit, use, and page cache that can be given back.
_CGROUP_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def machine_facts() -> dict[str, object]:
    """Return what a reader needs to judge a measurement, as plain JSON values."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "ram_bytes": memory_limit(),
        "ram_available_bytes": available_bytes(),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "huge_pages": _read(ROOT / "sys/kernel/mm/transparent_hugepage/enabled") or "unknown",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def available_bytes(root: Path = ROOT) -> int:
    """Return the RAM that new processes can take.

    What is left on the machine, in this process's cgroup, and in every cgroup above it, whichever is least.
    """
    return max(0, min([_machine_available(root), *_cgroups_available(root)]))


def rss_bytes() -> int:
    """Return the RAM that this process holds now (where the system does not tell: the most it ever held)."""
    text = _read(ROOT / "proc/self/statm")
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE") if text else peak_rss_bytes()


def peak_rss_bytes() -> int:
    """Return the most RAM that this process ever held."""
    # Not getrusage where there is better: it starts from what the parent held when it made this process.
    if (kilobytes := _named_number(ROOT / "proc/self/status", "VmHWM:")) is not None:
        return kilobytes * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _machine_available(root: Path) -> int:
    kilobytes = _named_number(root / "proc/meminfo", "MemAvailable:")
    return memory_limit() if kilobytes is None else kilobytes * 1024


def _cgroups_available(root: Path) -> Iterator[int]:
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield from _chain_available(root / "sys/fs/cgroup/memory", path, version=1)
        elif not controllers:
            yield from _chain_available(root / "sys/fs/cgroup", path, version=2)


def _chain_available(base: Path, path: str, version: int) -> Iterator[int]:
    limit_file, use_file, cache_key = _CGROUP_FILES[version]
    relative = PurePosixPath(path.lstrip("/"))
    for folder in (base / relative, *(base / parent for parent in relative.parents)):
        limit, used = _read(folder / limit_file), _read(folder / use_file)
        if limit.isdigit() and used.isdigit():
            yield int(limit) - int(used) + (_named_number(folder / "memory.stat", cache_key) or 0)


def _named_number(path: Path, name: str) -> int | None:
    """Return the number beside `name` in a file of lines "name number", or None."""
    lines = (line.split() for line in _read(path).splitlines())
    return next((int(words[1]) for words in lines if words[:1] == [name]), None)


def _cpu_model() -> str:
    for line in _read(ROOT / "proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
