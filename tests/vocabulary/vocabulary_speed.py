"""What a large vocabulary costs to build and to open: `PYTHONPATH=src python tests/vocabulary/vocabulary_speed.py`.

`build FOLDER [STRINGS]` makes one of distinct strings of 10 base-32 characters, `read FOLDER [STRINGS]` opens it five
times with nothing of it in the page cache, and looks 8,192 of its strings up twice, then others. The results are in
docs/notes/vocabulary.md.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

import embedrock as er

SYMBOLS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz234567", "S1")
ODD = np.uint64(0x9E3779B97F4A7C15)  # times which all numbers of 50 bits are distinct, and in an order of no use
ADDED, COMMITTED, LOOKED_UP, MEMORY = 100_000, 1_000_000, 8192, "64MiB"


def strings(numbers: np.ndarray) -> np.ndarray:
    digits = (numbers.astype(np.uint64) * ODD)[:, None] >> np.arange(0, 50, 5, dtype=np.uint64) & np.uint64(31)
    return np.ascontiguousarray(SYMBOLS[digits.astype(np.intp)]).view("S10").reshape(-1)


def seconds(words: er.Vocabulary, batch: np.ndarray) -> float:
    started = time.perf_counter()
    words.lookup(batch, "raise")
    return time.perf_counter() - started


def build(folder: Path, count: int) -> None:
    with er.Vocabulary(folder, memory=MEMORY) as words:
        for first in range(0, count, ADDED):
            words.add(strings(np.arange(first, min(first + ADDED, count))))
            if first % COMMITTED == 0:
                words.commit()
        words.commit()
        print(words.stats())


def forget(folder: Path) -> None:
    """Drop the files from the page cache."""
    for path in folder.rglob("*.*"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(folder: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    er.Vocabulary(folder, memory=MEMORY, mode="r").lookup(strings(np.arange(LOOKED_UP)))  # compiles kernels
    for _ in range(5):
        batches = [strings(rng.integers(0, count, LOOKED_UP)) for _ in range(24)]
        forget(folder)
        started = time.perf_counter()
        words = er.Vocabulary(folder, memory=MEMORY, mode="r")
        opened = time.perf_counter() - started
        first, again = (seconds(words, batch) for batch in batches[:1] * 2)
        others = [seconds(words, batch) for batch in batches[1:]]
        print(f"opened in {opened:.3f} s, first lookup {first:.3f} s, again {again:.3f} s", end=", ")
        print(f"23 others {np.mean(others):.3f} s each, the last {others[-1]:.3f}; {words.stats()}")
        words.close()


if __name__ == "__main__":
    run = {"build": build, "read": read}[sys.argv[1]]
    run(Path(sys.argv[2]), int(float(sys.argv[3])) if len(sys.argv) > 3 else 10**7)
