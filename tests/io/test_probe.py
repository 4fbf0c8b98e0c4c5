"""The probe of a folder's disk: random reads, in a bounded time, and nothing is left."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from embedrock.io import probe
from embedrock.io.probe import BlockReader, random_reads, write_rate


def test_random_reads_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probe, "PROBE_BYTES", 8 << 20)
    monkeypatch.setattr(probe, "PROBE_S", 0.05)
    assert random_reads(tmp_path) > 0
    assert not [*tmp_path.iterdir()]
    with pytest.raises(OSError, match="No such file"):
        random_reads(tmp_path / "none")


def test_a_slow_disk_is_probed_in_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def read(self: BlockReader, count: int) -> int:
        time.sleep(0.002 * count)
        return count

    monkeypatch.setattr(BlockReader, "_read", read)
    write_rate(tmp_path / "blocks", 1 << 20, keep=True)
    reader, start = BlockReader([tmp_path / "blocks"]), time.perf_counter()
    assert 100 < reader.best_rate(0.4) <= 500
    assert time.perf_counter() - start < 1.2
    reader.close()


def test_a_file_that_takes_too_long_is_shorter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probe, "WRITE_BYTES", 1 << 16)
    write_rate(tmp_path / "file", 1 << 30, keep=True, seconds=1e-9)
    assert (tmp_path / "file").stat().st_size == 0
