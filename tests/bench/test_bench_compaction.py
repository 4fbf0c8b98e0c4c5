"""``bench compaction``, at a small size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embedrock.bench.cli import main
from embedrock.bench.disk.compaction import targets
from embedrock.bench.harness.targets import judge


def test_targets():
    for folded, is_reached in ((110.0, True), (130.0, False)):
        line = {"name": "long run", "bytes_logged": 100.0, "bytes_folded": folded}
        assert [verdict.reached for verdict in judge(targets(), [line])] == [is_reached]


@pytest.mark.slow
def test_a_small_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--rows", "300000", "--dim", "4", "--batch", "400", "--memory", "1500KiB", "--folder", str(tmp_path)]
    assert main(["compaction", *words, "--json", str(tmp_path / "found.json")]) in (0, 1)
    (line,) = json.loads((tmp_path / "found.json").read_text())["results"]
    assert line["bytes_logged"] > 0.9 * line["base_bytes"]
    assert line["bytes_folded"] > 0
    assert "were written to fold them" in capsys.readouterr().out
    assert not list(tmp_path.glob("embedrock-bench-*"))
