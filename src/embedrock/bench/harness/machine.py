"""Facts of the machine that a measurement is made on, and the RAM that this process holds."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable
from importlib import metadata

from embedrock.machine.ram import ROOT, available_bytes, memory_limit, read_text, rss_bytes
from embedrock.process import platform as system

PACKAGES = ("embedrock", "numpy", "numba", "torch", "fbgemm-gpu-cpu", "keras", "tensorflow")


def machine_facts() -> dict[str, object]:
    """Return what a reader needs to judge a measurement, as plain JSON values."""
    return {
        "cpu": _cpu_model(),
        "cores": system.usable_cores(),
        "ram_bytes": memory_limit(),
        "ram_available_bytes": available_bytes(),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "huge_pages": read_text(ROOT / "sys/kernel/mm/transparent_hugepage/enabled") or "unknown",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


class RamGrowth:
    """Looks at this process's RAM while a ``with`` block runs.

    Args:
        read: returns what it holds, bytes.
        every_s: seconds between two looks.

    Attributes:
        growth_bytes: the most that it held beyond what it held before.
    """

    def __init__(self, read: Callable[[], int] = rss_bytes, every_s: float = 0.002) -> None:
        self._read, self._every_s = read, every_s
        self.growth_bytes = 0

    def __enter__(self) -> RamGrowth:
        self._before, self._done = self._read(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._done.wait(self._every_s):
            self._look()

    def _look(self) -> None:
        self.growth_bytes = max(self.growth_bytes, self._read() - self._before)


def _cpu_model() -> str:
    for line in read_text(ROOT / "proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
