"""Numba's cached machine code, where a kernel has changed since."""

from __future__ import annotations

from pathlib import Path


def purge_stale_kernels(kernels: Path) -> list[Path]:
    """Delete numba's cached machine code in `kernels` if any kernel file is newer; return what was deleted.

    Numba's cache of a function looks only at the file that defines it. A function inlined from another kernel
    file would go on running in its old version.
    """
    cached = [*kernels.rglob("*.nbi"), *kernels.rglob("*.nbc")]
    newest_source = max((path.stat().st_mtime for path in kernels.rglob("*.py")), default=0.0)
    if all(path.stat().st_mtime >= newest_source for path in cached):
        return []
    for path in cached:
        path.unlink(missing_ok=True)
    return cached
