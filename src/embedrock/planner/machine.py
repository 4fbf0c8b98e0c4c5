"""`Machine`: the RAM of this machine, and the random reads of a folder's disk."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from typing import NamedTuple

from embedrock.system.ram import memory_limit, rss_bytes


class Machine(NamedTuple):
    """The machine that a plan is for.

    Attributes:
        ram_bytes: RAM that the process may use.
        base_bytes: RAM of a process with next to no rows: Python, NumPy, Numba, the kernels, and buffers of files.
        reads_per_s: random reads of 4 KiB a second of the disk; None: `plan` probes the disk if tables read from it.
    """

    ram_bytes: int
    base_bytes: int
    reads_per_s: float | None = None


EXAMPLE = Machine(8 << 30, 140 << 20, 9e4)  # for examples and tests with the same results on every machine


def this_machine() -> Machine:
    """Return the machine that this process runs on; its disk is not probed yet."""
    return Machine(memory_limit(), base_bytes())


@functools.cache
def base_bytes() -> int:
    """Measure the RAM of a process without tables: it has stepped a table on disk with very few rows.

    The first process may compile kernels, which takes 100 MiB more. The second process finds them.
    """
    return min(_small_process_bytes() for _ in range(2))


def _small_process_bytes() -> int:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-c", _SMALL, os.path.join(folder, "small.rock")]
        done = subprocess.run(words, capture_output=True, text=True, env=environment)
    return int(done.stdout) if done.returncode == 0 else rss_bytes()


# Rows leave the cache and are read again, so that all code for files is loaded.
_SMALL = """
import sys
import embedrock as er
from embedrock.system.ram import rss_bytes
with er.Table(10**6, 16, rule=er.Adam(), path=sys.argv[1], memory="256KiB") as table:
    for step in range(24):
        ids = [100 * (step % 12) + row for row in range(200)]
        table.update(ids, table.lookup(ids))
    table.commit()
    print(rss_bytes())
"""
