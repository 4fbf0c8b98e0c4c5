"""``bench groups-disk``: how splits of a budget are searched for, and the whole of it at toy size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from embedrock.bench import cli
from embedrock.bench.disk.groups import GROUP, TARGETS, Job, by_weight, corrected, options_of
from embedrock.bench.harness.many_tables import ManyTables
from embedrock.bench.harness.targets import judge
from embedrock.planner.split import SplitOption, split

OPTIONS = [[SplitOption(10, 9.0), SplitOption(20, 5.0)], [SplitOption(10, 4.0), SplitOption(40, 1.0)]]


def test_ram_by_weights_is_what_a_table_needs_and_can_use() -> None:
    assert by_weight(OPTIONS, [1, 1], 100) == pytest.approx([20, 40], abs=1)
    assert by_weight(OPTIONS, [1, 1], 50) == pytest.approx([20, 30], abs=1)
    assert by_weight(OPTIONS, [1, 100], 30) == pytest.approx([10, 20], abs=1)


def test_what_was_read_corrects_what_was_thought() -> None:
    found = corrected(OPTIONS, [OPTIONS[0][1], OPTIONS[1][0]], [11.0, 4.0])
    assert [[one.cost for one in some] for some in found] == [[18.0, 10.0], [4.0, 1.0]]


@pytest.mark.slow
def test_curves_of_the_very_batches_give_ram_to_who_misses(tmp_path: Path) -> None:
    workload = ManyTables(cardinalities=(3000, 40), bag_sizes=(6, 1), dim=8, batch=64)
    options = options_of(Job(workload, tmp_path, 200_000, warmup=6, steps=4))
    for some in options:
        assert [one.cost for one in some] == sorted((one.cost for one in some), reverse=True)
        assert some[-1].cost < some[0].cost or some[0].cost == 0
    chosen = split(options, 120_000)
    assert chosen is not None
    assert chosen[0].nbytes > 4 * chosen[1].nbytes


def test_the_best_split_is_what_one_budget_is_judged_by() -> None:
    lines: list[dict[str, Any]] = [
        {"name": name, "read": read} for name, read in ((GROUP, 90.0), ("even", 120.0), ("searched, 1", 100.0))
    ]
    (verdict,) = judge(TARGETS, lines)
    assert verdict.measured == 0.9
    assert "the best split (searched, 1)" in verdict.what
    assert not list(judge(TARGETS, [{**line, "read": 0.0} for line in lines]))


@pytest.mark.slow
def test_all_of_it_at_toy_size(tmp_path: Path) -> None:
    tiny = ["--max-rows=2000", "--max-bag=3", "--dim=8", "--batch=16", "--memory=1MiB", "--steps=3", "--warmup=3"]
    found = tmp_path / "found.json"
    assert cli.main(["groups-disk", *tiny, f"--folder={tmp_path}", f"--json={found}"]) in (0, 1)
    told = json.loads(found.read_text())
    assert [line["name"] for line in told["results"][:3]] == [GROUP, "by ids", "even"]
    assert len(told["verdicts"]) == 4  # all rows fit the RAM, so nothing is read
    (full,) = [line for line in told["results"] if line["name"] == "full size"]
    assert full["syncs_a_file"] == 1
    assert 1 <= full["bytes_over_dirty"] < 1.1
