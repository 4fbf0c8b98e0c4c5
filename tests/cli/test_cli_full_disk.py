"""`embedrock export` on a full disk."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

import embedrock as er
from disks import BALLAST, fill, memory_disk
from embedrock.cli import exports
from embedrock.cli.formats import FORMATS
from embedrock.cli.main import FAILED, main
from slow import slow

ROWS, DIM = 20_000, 16


ENDINGS = [one.suffix for one in FORMATS if one.sink is not None]


@pytest.mark.parametrize("ending", [".npy", ".txt", *slow(*sorted({*ENDINGS} - {".npy", ".txt"}))])
def test_an_export_says_what_is_missing_and_continues(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(exports, "SYNC_BYTES", 1)  # after each batch
    values = np.random.default_rng(0).standard_normal((ROWS, DIM)).astype(np.float32)
    with er.Table(ROWS, DIM, path=tmp_path / "users.rock") as table:
        table.assign(np.arange(ROWS), values)
        table.commit()
    command = ["export", str(tmp_path / "users.rock"), str(tmp_path / "disk" / f"rows{ending}")]
    with memory_disk(tmp_path / "disk", 16 << 20) as disk:
        fill(disk, but=500_000)
        assert main(command) == FAILED
        told = capsys.readouterr().err
        assert f"20,000 rows of table '{tmp_path}/users.rock' could not be exported: " in told
        numbers = re.search(
            r"\((\d+) bytes\) more are needed, and .* \((\d+) bytes\) are free\. Free some space and", told
        )
        assert numbers
        assert ROWS * DIM * 2 < int(numbers[1]) < ROWS * DIM * 16
        assert not (disk / f"rows{ending}").exists()
        (disk / BALLAST).unlink()
        assert main(command) == 0
        assert os.listdir(disk) == [f"rows{ending}"]
        assert main(["import", command[2], str(tmp_path / "again.rock"), "--dim", str(DIM)]) == 0
    with er.open(tmp_path / "again.rock", mode="r") as table:
        assert (table.lookup(np.arange(ROWS)) == values).all()
