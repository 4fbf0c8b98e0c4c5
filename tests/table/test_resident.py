"""RAM follows the rows touched: what the system counts, in a process of its own, never `stats()` alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/statm")

ROWS_TOUCHED = 1250
MIB = 1 << 20

HEAD = """
import os, sys, warnings
import numpy as np, embedrock as er
warnings.simplefilter("ignore", er.UncommittedWarning)
random, folder = np.random.default_rng(0), sys.argv[1]

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def made(number, dim=16, **options):
    return er.Table(dim=dim, seed=0, rule=er.Adam(lr=0.1), **options)

def on_disk(name, rows, **options):
    return made(0, rows=rows, path=f"{folder}/{name}.rock", **options)

def train(table, rows, touched=1250, steps=5):
    for _ in range(steps):
        ids = random.integers(0, rows, touched // steps)
        table.update(ids, np.ones((len(ids), table.spec.dim), np.float32))
    table.lookup(random.integers(0, rows, 1000))

for name, table in (("ram", made(0, rows=1000)), ("disk", on_disk("small", 1000, memory="1MiB"))):
    train(table, 1000)  # what is compiled and imported on the way
    if name == "disk":
        table.commit()
"""

ONE_BY_ONE = """
for name, make, rows in (
    ("direct", lambda: made(0, rows=10**8, directory="direct", memory="24GiB"), 10**8),
    ("hashed", lambda: made(0, rows=10**9), 10**9),
    ("open", lambda: made(0, rows=None, dim=128), 2**62),
    ("whole on disk", lambda: on_disk("a", 10**6), 10**6),
    ("on disk", lambda: on_disk("b", 10**8), 10**8),
    ("wide on disk", lambda: on_disk("c", 10**9, dim=128), 10**9),
):
    before = rss()
    table = make()
    train(table, rows)
    if "disk" in name:
        table.commit()
    print(name, rss() - before, table.stats()["bytes_used"], sep=",")
    table.close()
"""

MANY = """
before, tables = rss(), []
for number in range(26):
    tables.append(on_disk(f"t{number}", 10**7) if number % 2 else made(number, rows=10**7))
    train(tables[-1], 10**7, 200, 1)
print("26", rss() - before, sum(table.stats()["bytes_used"] for table in tables), sep=",")
"""


def measured(script: str, folder: Path) -> dict[str, tuple[int, int]]:
    """Return, of each table or group of tables, the RAM that came with it and what it says itself."""
    output = subprocess.run(
        [sys.executable, "-c", HEAD + script, str(folder)], check=True, capture_output=True, text=True
    ).stdout
    return {name: (int(grown), int(told)) for name, grown, told in (line.split(",") for line in output.splitlines())}


def test_ram_follows_the_rows_touched(tmp_path: Path) -> None:
    tables = measured(ONE_BY_ONE, tmp_path)
    assert len(tables) == 6
    page = 4096
    for name, (grown, told) in tables.items():
        bitmap = 10**8 // 8 if name == "direct" else 0
        assert grown < ROWS_TOUCHED * 4 * page + bitmap, (name, grown)
        assert abs(told - grown) < 8 * MIB, (name, grown, told)


def test_many_large_tables_of_which_little_is_touched(tmp_path: Path) -> None:
    ((grown, told),) = measured(MANY, tmp_path).values()
    assert grown < 128 * MIB
    assert abs(told - grown) < 64 * MIB
