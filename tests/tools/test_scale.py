"""What a table costs that many ranks share: the model against ids that are drawn, and at its limits."""

from __future__ import annotations

import doctest
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
import scale
from embedrock.distributed.owners import owners
from embedrock.planner.demand import bounded_zipf
from scale import Cluster, Compute, Load, calibrated, compared, main, measured_ids, of_log, of_zipf, read_ids, simulate

LOAD = Load(rows=1_000_000, dim=16, lookups=4096, steps=10**6)
CLUSTER = Cluster(ranks=8, per_node=4)


def drawn(steps: int, load: Load, ranks: int) -> np.ndarray:
    draw = np.random.default_rng(1)
    return bounded_zipf(draw.random(steps * ranks * load.lookups), load.rows, load.zipf) * 7919


def test_zipf_has_the_traffic_of_ids_that_are_drawn_by_it() -> None:
    told = of_zipf(LOAD, 8, 4)
    counted = of_log([drawn(8, LOAD, 8)], LOAD.lookups, 8, 4, steps=8)
    for name in ("unique", "owned", "remote", "beyond"):
        assert getattr(told, name) == pytest.approx(getattr(counted, name), rel=0.02), name
    assert told.asked.sum() == pytest.approx(counted.asked.sum(), rel=0.02)
    assert 1 < told.balance < 1.1
    assert 1 < counted.balance < 1.1


def test_a_log_is_counted_exactly() -> None:
    ids = np.random.default_rng(0).integers(0, 100, (2, 3, 50))  # steps, ranks, lookups
    found = of_log([ids.reshape(-1)[:77], ids.reshape(-1)[77:]], 50, 3, 2, steps=9)
    asked, beyond, remote = np.zeros(3), 0, 0
    for step in ids:
        for rank, batch in enumerate(step):
            for owner in owners(np.unique(batch), 3):
                asked[owner] += 1
                remote += owner != rank
                beyond += owner // 2 != rank // 2
    np.testing.assert_array_equal(found.asked, asked / 2)
    assert (found.remote, found.beyond) == (remote / 6, beyond / 6)
    with pytest.raises(er.ArgumentError, match=r"ids of a step, 1000 for each of 3 ranks"):
        of_log([ids.reshape(-1)], 1000, 3, 2, steps=1)


def test_bytes_follow_rows_of_others_and_their_width() -> None:
    found = simulate(LOAD, CLUSTER)
    remote = found.unique * 7 / 8
    assert found.bytes_sent == pytest.approx(remote * (16 + 2 * 4 * 16))
    assert found.bytes_between_nodes == pytest.approx(found.bytes_sent * 4 / 7)
    halves = simulate(replace(LOAD, dtype="bfloat16"), CLUSTER)
    assert halves.bytes_sent == pytest.approx(remote * (16 + 6 * 16))
    assert simulate(LOAD, replace(CLUSTER, ranks=1)).bytes_sent == 0


def test_ram_that_has_all_rows_reads_none_and_less_reads_more() -> None:
    whole = simulate(LOAD, CLUSTER)
    assert (whole.misses, whole.disk_bytes) == (0, 0)
    few, fewer = (simulate(LOAD, replace(CLUSTER, memory=size)) for size in (2e6, 1e6))
    assert 0 < few.misses < fewer.misses
    assert few.disk_bytes > few.ram_bytes == pytest.approx(2e6, rel=1e-3)
    slow = simulate(LOAD, replace(CLUSTER, memory=1e6, reads=1e3))
    assert (slow.bound, slow.step_overlapped) == ("disk", slow.misses / 1e3)


def test_what_is_measured_of_one_and_two_is_found_again_in_two() -> None:
    compute = calibrated(10e-3, 15e-3, LOAD, cores=2)
    found = simulate(LOAD, Cluster(ranks=2, per_node=4, cores=2), compute=compute)
    assert found.seconds["compute"] == pytest.approx(15e-3, rel=0.01)
    four = simulate(LOAD, Cluster(ranks=4, per_node=4, cores=2), compute=compute)
    assert four.seconds["compute"] == pytest.approx(2 * (10e-3 + 5e-3 * 1.5), rel=0.01)  # 3/4 are others' rows, not 1/2
    assert calibrated(10e-3, 18e-3, LOAD, cores=1) == Compute(10e-3, 0.0)


def test_waiting_hides_behind_the_work_of_others_where_ranks_share_cores() -> None:
    compute = calibrated(4e-3, 19e-3, LOAD, cores=2, work=8e-3)
    assert compute.wait == pytest.approx(11e-3)
    cluster = Cluster(ranks=2, per_node=8, cores=2)
    assert simulate(LOAD, cluster, compute=compute).seconds["compute"] == pytest.approx(19e-3, rel=0.01)
    four = simulate(LOAD, replace(cluster, ranks=4), compute=compute).seconds["compute"]
    assert four == pytest.approx(4e-3 + 1.5 * 4e-3 + 11e-3, rel=0.01)  # longer than 10 ms of each on 2 cores
    eight = simulate(LOAD, replace(cluster, ranks=8), compute=compute).seconds["compute"]
    assert eight == pytest.approx(8 / 2 * (4e-3 + 1.75 * 4e-3), rel=0.01)
    assert simulate(LOAD, replace(cluster, ranks=1), compute=compute).seconds["compute"] == 4e-3


def measured_lines() -> list[dict[str, Any]]:
    workload = {"rows": 10_000, "dim": 8, "batch": 100, "features": 2, "zipf": 1.05, "batches": 9, "seed": 0}
    lines = [
        ("ours-alone", 1, 4.0, 4.0),
        ("ours-sharded-1", 1, 4.0, 4.0),
        ("ours-sharded-2", 2, 10.0, 8.0),
        ("ours-sharded-4", 4, 22.0, 10.0),
    ]
    return [
        {"name": name, "status": "ok", "workload": workload, "ranks": ranks, "median_ms": ms, "cpu_ms": cpu}
        | ({"sent_bytes": 0.0} if ranks > 1 else {})
        for name, ranks, ms, cpu in lines
    ]


def test_steps_that_a_bench_measured_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "shards.json"
    file.write_text(json.dumps({"machine": {"cores": 2}, "results": measured_lines()}))
    main(["--measured", str(file), "--json"])
    two, four = json.loads(capsys.readouterr().out)
    assert two["simulated ms"] == pytest.approx(10.0)
    assert four["simulated ms"] == pytest.approx(2 * (4 + 4 * four["simulated bytes"] / two["simulated bytes"]))
    assert four["off %"] == pytest.approx((four["simulated ms"] / 22 - 1) * 100)
    batches = measured_ids(measured_lines()[0]["workload"], 2)
    others = [int((owners(np.unique(ids), 2) != k % 2).sum()) for k, ids in enumerate(batches)]
    assert two["simulated bytes"] == pytest.approx(80 * np.mean(others[:16]))  # of the first 8 steps
    file.write_text(json.dumps({"machine": {"cores": 2}, "results": measured_lines()[:1]}))
    with pytest.raises(er.ArgumentError, match="must have ours-sharded-2: got ours-alone"):
        compared(json.loads(file.read_text()))


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".tsv"])
def test_ids_of_files_are_read(tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    pyarrow, csv = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.csv")
    ids = np.arange(5000) % 100
    table, file = pyarrow.table({"other": ids, "item": ids}), tmp_path / f"log{suffix}"
    if suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, file)
    else:
        csv.write_csv(table, file, csv.WriteOptions(delimiter="," if suffix == ".csv" else "\t"))
    np.testing.assert_array_equal(np.concatenate([*read_ids([file, file], "item")]), np.tile(ids, 2))
    main(["--ranks", "2", "--lookups", "200", "--log", str(file), "--column", "item", "--json"])
    assert json.loads(capsys.readouterr().out)["ranks"]["2"]["unique"] == 100


def test_commits_losses_and_the_largest_part_add_up() -> None:
    found = simulate(replace(LOAD, commit_every=10), replace(CLUSTER, append=1e8), timeout=30)
    record = LOAD.spec.record_bytes
    assert found.table_bytes == found.records * record
    assert found.rows_most - found.rows_mean == pytest.approx(math.sqrt(2 * found.rows_mean * math.log(8)))
    assert found.commit_seconds <= found.rows_mean * (record + 12) / 1e8
    assert found.loss_seconds == pytest.approx(5 * found.step_overlapped + 30 + found.rows_most * 8 / 1e8)
    assert found.reshard_seconds == pytest.approx(2 * found.rows_most * (record + 12) / 1e8)
    assert found.step_in_turn == pytest.approx(sum(found.seconds.values()))


def test_ten_to_the_twelve_rows_over_thousands_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--ranks", "1024", "4096", "--alone-ms", "101", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["load"]["rows"] == 10**12
    for found in told["ranks"].values():
        assert 1 < found["balance"] < 1.5
        assert found["records"] < 10**12
    main(["--ranks", "2", "--rows", "1e6", "--alone-ms", "8", "--two-ms", "9"])
    assert "ranks  records" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cluster", "said"),
    [(Cluster(ranks=0), "`ranks` of a simulation must be above 0: got 0"), (Cluster(10**6), "up to 65,536 ranks")],
)
def test_what_cannot_be_is_told(cluster: Cluster, said: str) -> None:
    with pytest.raises(er.ArgumentError, match=said):
        simulate(LOAD, cluster)


def test_docstrings() -> None:
    found = doctest.testmod(scale)
    assert found.attempted
    assert not found.failed
