"""Benchmarks of many tables, at toy size: what they work on, who takes part, and who is left out."""

from __future__ import annotations

import json

import numpy as np
import pytest

from embedrock.bench import cli
from embedrock.bench.harness.many_tables import BAGS, CARDINALITIES, ManyTables
from embedrock.bench.tables.contenders import CONTENDERS

TINY = [
    "--max-rows=50",
    "--max-bag=3",
    "--dim=8",
    "--batch=16",
    "--batches=3",
    "--rounds=2",
    "--steps=2",
    "--threads=1",
]


def test_mlperfs_tables():
    workload = ManyTables()
    assert len(CARDINALITIES) == len(BAGS) == 26
    assert sum(workload.rows) == 204_184_588
    assert sum(workload.bags) == 214
    assert workload.lookups == 2048 * 214


def test_tables_and_bags_are_cut():
    workload = ManyTables(max_rows=1000, max_bag=5)
    assert max(workload.rows) == 1000
    assert workload.rows[5] == 3
    assert max(workload.bags) == 5
    assert workload.table_bytes == sum(workload.rows) * 64 * 4


def test_batches_are_bags_of_each_table_and_the_same_each_time():
    workload = ManyTables(batch=20, seed=3)
    one, again, other = workload.batch_at(1), workload.batch_at(1), workload.batch_at(2)
    for ids, same, rows, bag in zip(one, again, workload.rows, workload.bags, strict=True):
        assert ids.shape == (20, bag)
        assert ids.dtype == np.int64
        assert 0 <= ids.min() <= ids.max() < rows
        np.testing.assert_array_equal(ids, same)
    assert not np.array_equal(one[0], other[0])
    assert workload.gradient().shape == (26, 20, 64)


def test_the_smallest_tables_have_all_their_rows_drawn():
    ids = ManyTables().draw(np.random.default_rng(0), 2000)
    small = [number for number, rows in enumerate(CARDINALITIES) if rows <= 36]
    assert len(small) == 5
    assert [np.unique(ids[number]).size for number in small] == [CARDINALITIES[number] for number in small]


def run(tmp_path, *arguments: str) -> list[dict]:
    path = tmp_path / "found.json"
    assert cli.main(["dlrm", *TINY, *arguments, f"--json={path}"]) == 0
    return json.loads(path.read_text())["results"]


@pytest.mark.parametrize(
    "name",
    [
        "ours-adam",
        "ours-adam-side-by-side",
        "ours-side-by-side",
        "ours-one-table",
        "ours-layers-adam",
        "torch-sparse-adagrad",
    ],
)
def test_contenders_make_steps(name, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("EMBEDROCK_THREADS", str(torch.get_num_threads()))
    contender = next(one for one in CONTENDERS if one.name == name)
    step = contender.make(ManyTables(max_rows=50, max_bag=3, dim=4, batch=8, batches=2))
    for index in (0, 1, 0):
        step(index)


@pytest.mark.slow
def test_one_table_more(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "found.json"
    assert cli.main(["groups", *TINY, "--contenders=ours-rowwise-adagrad", f"--json={path}"]) == 0
    lines = json.loads(path.read_text())["results"]
    assert [line["name"] for line in lines] == ["ours-rowwise-adagrad", "27-tables"]
    assert [len(line["workload"]["cardinalities"]) for line in lines] == [26, 27]


@pytest.mark.slow
def test_ours_beside_pytorchs(tmp_path, capsys):
    pytest.importorskip("torch")
    names = ["torch-sparse-adagrad", "ours-rowwise-adagrad"]
    lines = run(tmp_path, f"--contenders={','.join(names)}")
    assert [(line["name"], line["status"]) for line in lines] == [(name, "ok") for name in names]
    assert lines[0]["workload"]["max_bag"] == 3
    assert "26 tables, 1,117 rows x 8 float32, batch 16 x 54 ids = 864 lookups" in capsys.readouterr().out


@pytest.mark.slow
def test_all_contenders(tmp_path):
    pytest.importorskip("fbgemm_gpu")
    lines = run(tmp_path)
    assert [line["name"] for line in lines] == [contender.name for contender in CONTENDERS]
    assert {line["status"] for line in lines if line["name"] != "torchrec-fused"} == {"ok"}


@pytest.mark.slow
def test_torchrec_that_does_not_import_is_skipped(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    for name in ("fbgemm_gpu", "torchrec"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise OSError('undefined symbol: x')")
    monkeypatch.syspath_prepend(tmp_path)
    (line,) = run(tmp_path, "--contenders=torchrec-fused")
    assert line["status"] == "skipped"
    assert "_gpu does not import: undefined symbol: x. pip install" in line["reason"]
