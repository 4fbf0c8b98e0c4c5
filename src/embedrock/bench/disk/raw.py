"""What the disk gives to a program that wants nothing else: random reads of 4 KiB, at each depth."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from embedrock.bench.harness.processes import Child, ChildError
from embedrock.machine.probe import BlockReader
from embedrock.machine.vfs import BLOCK
from embedrock.process.platform import O_DIRECT

DEPTHS = (1, 4, 16, 32, 64, 128)  # reads in flight
PROBE_S = 2.0
FIO_CHARACTERS = 4000  # of an option
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Rate:
    """Random reads of 4 KiB past the page cache, by one reader at one depth."""

    reader: str
    depth: int
    reads_per_s: float


def probe(paths: Sequence[Path], seconds: float = PROBE_S) -> list[Rate]:
    """Measure random reads of files at every depth, by fio where it is installed, else by our own reader.

    Args:
        paths: files of about the same size, together larger than what the disk itself caches.
        seconds: for each depth.
    """
    reader = fio if shutil.which("fio") else own
    return [again(Rate(reader.__name__, depth, 0.0), paths, seconds) for depth in DEPTHS]


def again(rate: Rate, paths: Sequence[Path], seconds: float = PROBE_S) -> Rate:
    """Measure a rate once more."""
    reader = {"fio": fio, "own": own}[rate.reader]
    return Rate(rate.reader, rate.depth, reader(paths, rate.depth, seconds))


def fio(paths: Sequence[Path], depth: int, seconds: float) -> float:
    """Return the reads/s of `depth` threads of fio, each with one read in flight."""
    folder = os.path.commonpath([path.parent for path in paths])
    arguments = {
        "name": "random",
        "filename": _listed([os.path.relpath(path, folder) for path in paths]),
        "rw": "randread",
        "bs": BLOCK,
        "direct": 1 if O_DIRECT else 0,
        "ioengine": "psync",
        "numjobs": depth,
        "runtime": f"{max(1, round(seconds * 1000))}ms",
        "output-format": "json",
    }
    flags = ["--thread", "--time_based", "--group_reporting", "--readonly", "--norandommap", "--randrepeat=0"]
    command = ["fio", *(f"--{key}={value}" for key, value in arguments.items()), *flags]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=folder
    )
    if done.returncode:
        raise ChildError("Died", f"fio ended with exit status {done.returncode}", done.stderr)
    report = done.stdout[done.stdout.index("{") :]  # warnings may come first
    return json.loads(report)["jobs"][0]["read"]["iops"]


def _listed(names: Sequence[str]) -> str:
    """Return names as fio takes them: as many as it does, some from every part of the list."""
    escaped = [name.replace(":", r"\:") for name in names]
    count = max(1, FIO_CHARACTERS // (1 + max(map(len, escaped))))
    return ":".join(escaped[:: -(-len(escaped) // count)])


def own(paths: Sequence[Path], depth: int, seconds: float) -> float:
    """Return the reads/s of `depth` threads of our own reader, in a process whose pool has as many."""
    environment = {"EMBEDROCK_IO_THREADS": str(depth)}
    with Child(BlockReader, list(paths), environment=environment, timeout_s=TIMEOUT_S) as child:
        return child.call("rate", seconds)
