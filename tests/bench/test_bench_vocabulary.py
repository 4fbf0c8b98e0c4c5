"""``bench vocabulary``, at a small size: its strings, the order of a stream, and what it reports."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from embedrock.bench.cli import main
from embedrock.bench.disk.effort import DiskEffort
from embedrock.bench.disk.vocabulary import DIGITS, first_seen, strings_of, targets
from embedrock.bench.harness.targets import judge
from embedrock.bench.harness.workload import Workload, bounded_zipf


def test_strings_differ():
    strings = strings_of(np.array([0, 1, 2, 10**11, 10**12 - 1]))
    assert strings.dtype == f"S{DIGITS}"
    assert len(set(strings.tolist())) == 5
    assert len(np.unique(strings_of(np.arange(100_000)))) == 100_000
    assert all(string.isdigit() and len(string) == DIGITS for string in strings.tolist())


def test_the_order_is_that_of_a_stream():
    """Of the first distinct strings of a stream, as many are popular ones as of those of `first_seen`."""
    rows, random = 2000, np.random.default_rng(0)
    orders = [first_seen(Workload(rows=rows, seed=seed)) for seed in range(40)]
    assert all(np.array_equal(np.sort(order), np.arange(rows)) for order in orders)
    streams = [bounded_zipf(random.random(3000), rows, 1.05) for _ in range(40)]
    drawn = [np.array(list(dict.fromkeys(stream.tolist())))[:200] for stream in streams]
    expected, got = (np.mean([(ranks[:200] < 100).sum() for ranks in some]) for some in (drawn, orders))
    assert abs(expected - got) < 6


def test_targets():
    line = {"name": "restart", "open_s": 0.5, "first_ms": 30.0, "popular_ms": 10.0, "uniform_ms": 100.0}
    found = judge(targets(DiskEffort(memory=64 << 20)), [line | {"uniform_over_raw": 1.2, "rss_growth_bytes": 50e6}])
    assert [verdict.reached for verdict in found] == [True, False, True, False, True, True]


@pytest.mark.slow
def test_a_small_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--rows", "30000", "--rounds", "1", "--folder", str(tmp_path), "--memory", "256KiB"]
    assert main(["vocabulary", *words, "--batch", "500", "--json", str(tmp_path / "found.json")]) == 0
    made, restart = json.loads((tmp_path / "found.json").read_text())["results"]
    assert made["strings"] == restart["strings"] == 30_000
    assert restart["popular_reads"] > 0
    assert "30,000 strings: made in" in capsys.readouterr().out
    assert not list(tmp_path.glob("embedrock-bench-*"))
