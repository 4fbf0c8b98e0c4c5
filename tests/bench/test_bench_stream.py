"""``bench stream``, at a small size."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from embedrock.bench.cli import main
from embedrock.bench.disk.stream import ids_of
from embedrock.bench.harness.workload import Workload


def test_ids_are_born_and_asked_for_again():
    workload = Workload(rows=1000, batch=500, features=1)
    seen = [ids_of(workload, step, 10) for step in range(10)]
    assert all(len(ids) == 500 for ids in seen)
    assert len(np.intersect1d(seen[0], seen[1])) > 10
    assert len(np.setdiff1d(seen[9], seen[0])) > len(np.setdiff1d(seen[1], seen[0]))
    np.testing.assert_array_equal(ids_of(workload, 3, 10), seen[3])


@pytest.mark.slow
def test_a_small_one(tmp_path: Path):
    words = ["--lookups", "600k", "--rows", "600k", "--most-rows", "5k", "--batch", "1000", "--memory", "4MiB"]
    assert main(["stream", *words, "--folder", str(tmp_path), "--json", str(tmp_path / "found.json")]) in (0, 1)
    (line,) = json.loads((tmp_path / "found.json").read_text())["results"]
    assert line["rows"] == 5000 == line["admitted"] - line["evicted"]
    assert line["lookups"] == 600_000 >= line["lookups_full"] > 0
    assert not list(tmp_path.glob("embedrock-bench-*"))
