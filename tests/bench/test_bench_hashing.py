"""``bench hash-ids``: what its contenders hash, and what it wants."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import embedrock as er
from embedrock.bench.cli import main
from embedrock.bench.harness.targets import judge
from embedrock.bench.harness.workload import Workload
from embedrock.bench.step.hashing import CONTENDERS, DIGITS, HASH_IDS, our_hash, python_hash, strings_of

SMALL = Workload(rows=10**9, features=1, batch=1000, batches=2, zipf=0)


def test_all_hash_the_same_strings():
    first, second = strings_of(SMALL)
    assert first.dtype == second.dtype == f"S{DIGITS}"
    assert all(len(string) == DIGITS and string.isdigit() for string in first.tolist())
    assert len(set(first.tolist()) | set(second.tolist())) > 1990
    for form in ("array", "arrow", "list"):
        np.testing.assert_array_equal(np.asarray(our_hash(SMALL, form)(1)), er.hash_ids(second))
    np.testing.assert_array_equal(np.asarray(python_hash(SMALL)(0)), [hash(string) for string in first.tolist()])


def test_targets():
    line = {"workload": {"rows": 10**9, "batch": 1000, "features": 1}, "group": 1, "ratio": 1.0}
    lines = [
        line | {"name": one.name, "median_ms": ms}
        for one, ms in zip(CONTENDERS, (0.02, 0.06, 0.04, 0.03), strict=False)
    ]
    found = judge(HASH_IDS.targets, [{**each, "ratio": each["median_ms"] / 0.02} for each in lines])
    assert [verdict.measured for verdict in found] == pytest.approx([50.0, 1e3 / 60, 25.0, 1.5])
    assert [verdict.reached for verdict in found] == [True, False, True, True]


@pytest.mark.slow
def test_a_small_one(tmp_path: Path):
    words = ["--batch", "1000", "--rounds", "1", "--steps", "1", "--json", str(tmp_path / "found.json")]
    assert main(["hash-ids", *words]) == 0
    lines = json.loads((tmp_path / "found.json").read_text())["results"]
    assert [(line["name"], line["status"]) for line in lines] == [(one.name, "ok") for one in CONTENDERS]
