"""What a step reads of a small table follows the rows that it misses, not the table."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import embedrock as er
from embedrock.io import vfs

ROWS, DIM, BATCH = 40_000, 16, 2000
RULE = er.Adam(lr=0.1)


def read_by_process() -> int:
    """Return how many bytes this process has had from calls that read."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/io")
@pytest.mark.parametrize("where", ["logs", "base", "base read directly"])
def test_a_step_reads_what_it_misses(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if where == "base read directly":
        monkeypatch.setattr("embedrock.store.record_store.DIRECT_BYTES", 1 << 20)
    # The commit would compact in the background, and what that reads is counted for the process, too
    monkeypatch.setattr("embedrock.table.upkeep.FULLNESS", 2.0)
    rng, twin = np.random.default_rng(0), er.Table(ROWS, DIM, rule=RULE, seed=0)
    table_bytes = ROWS * twin.spec.record_bytes
    with er.Table(ROWS, DIM, path=tmp_path / "t.rock", rule=RULE, seed=0, memory=table_bytes // 4) as table:
        for ids in np.array_split(rng.permutation(ROWS), 20):
            for each in (table, twin):
                each.update(ids, np.ones((len(ids), DIM), np.float32))
        table.commit()
        if where != "logs":
            table.compact()
        for _ in range(4):  # what is loaded on the way
            table.lookup(rng.integers(0, ROWS, BATCH))
        before, counted = table.stats(), 0
        for _ in range(4):
            ids = rng.integers(0, ROWS, BATCH)
            counted -= read_by_process()
            found = table.lookup(ids)
            counted += read_by_process()
            np.testing.assert_array_equal(found, twin.lookup(ids))
        after = table.stats()
        missed = (after["misses"] - before["misses"]) * (twin.spec.record_bytes + 4)
        assert missed > 4 * BATCH * 100
        read = after["bytes_read"] - before["bytes_read"]
        assert read >= missed
        if where != "base read directly":  # there it is whole blocks of 4 KiB
            assert read < 3 * missed
            assert read < 0.6 * 4 * table_bytes
            assert counted < read + vfs.BLOCK * 100
