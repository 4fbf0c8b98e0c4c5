"""``python -m benchmarks published``: its tables, ids and contenders, and all of it at a tiny size."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import published
from benchmarks.published import COUNTS, FORMS, Mapped, Ours, PageCache, hits_of, ngram_ids, tokens_of_sources
from embedrock import FromSafetensors

NBYTES = 200_000


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("threads", [1, 3])
def test_mappings_copy_the_rows_that_ours_looks_up(form: str, threads: int, tmp_path: Path):
    published.write_table(tmp_path / form, form, NBYTES)
    ours = Ours("1MiB").opened(tmp_path / form)
    ids = np.unique(np.random.default_rng(0).integers(0, ours.rows, 300))
    found = Mapped(threads).opened(tmp_path / form)
    rows, column = found.lookup(ids), 0
    assert found.rows == ours.rows
    base = FromSafetensors(str(tmp_path / form), published.NAME)
    raw, decoded = base.files.read(ids), np.empty((len(ids), base.shape[1]), np.float32)
    for extents, at in base.table.parts:
        if extents.rows_each[0] == 1:  # else one scale
            mapped = rows[:, column : column + extents.nbytes]
            np.testing.assert_array_equal(mapped, raw[:, at : at + extents.nbytes])
            assert len(np.unique(mapped, axis=0)) > 100
            column += extents.nbytes
    assert column == rows.shape[1]
    base.fill(ids, np.uint64(0), decoded)
    np.testing.assert_allclose(ours.lookup(ids), decoded, rtol=1e-2)  # rounded to bfloat16
    assert np.isfinite(decoded).all()


def test_ids_are_those_of_pairs_and_triples():
    once, again = ngram_ids(np.array([7, 8, 9]), 1 << 20), ngram_ids(np.array([6, 8, 9]), 1 << 20)
    heads = published.HEADS
    assert len(once) == len(again) == 2 * heads
    assert len(np.intersect1d(once, again)) == heads  # of the pair
    own = (1 << 20) // (2 * heads)
    assert (once // own).tolist() == [*range(2 * heads)]
    tokens = tokens_of_sources(3000)
    assert len(tokens) == 3000
    assert 256 <= tokens.min() < tokens.max() < published.VOCABULARY  # all words are frequent here


def test_hits_are_those_of_the_second_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(published, "CHUNK", 10)
    np.save(tmp_path / "tokens.npy", np.arange(42))
    counts = iter([(0, 9), (0, 19), (3, 20), (6, 21)])
    assert hits_of(tmp_path / "tokens.npy", 1 << 20, lambda ids: next(counts)) == 6 / 8


def test_pages_that_were_read_are_hits(tmp_path: Path):
    published.write_table(tmp_path / "f8", "f8", 2_000_000)
    np.save(tmp_path / "tokens.npy", tokens_of_sources(2000))
    assert PageCache().hits(tmp_path / "f8", tmp_path / "tokens.npy")["ram_bytes"] > 0
    assert PageCache().hits(tmp_path / "f8", tmp_path / "tokens.npy")["hits"] == 1.0
    assert Ours("4MiB").hits(tmp_path / "f8", tmp_path / "tokens.npy")["hits"] > 0.5  # all rows fit


@pytest.mark.usefixtures("in_process")
def test_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    forms = {form: FORMS[form] for form in ("f8", "4-bit")}
    sizes = {"TOKENS": 3, "TOKEN_S": 1e-4, "CALLS": 3, "LARGE_BYTES": 2 * 160_000, "LARGE_SHARDS": 2, "FORMS": forms}
    for name, value in sizes.items():
        monkeypatch.setattr(published, name, value)
    monkeypatch.setattr("gc.collect", int)  # slow in a process that has loaded everything
    file, words = tmp_path / "found.json", [f"--size={NBYTES}", "--tokens=3000", "--rounds=1", "--threads=1"]
    assert command.main(["published", *words, f"--folder={tmp_path}", f"--json={file}"]) == 0
    document = json.loads(file.read_text())
    lines = {line["name"]: line for line in document["results"]}
    cold = {name: line for name, line in lines.items() if "rows_per_s" in line}
    assert len(cold) == len(forms) * (3 * len(COUNTS) + 1)
    assert all(line["least_us"] <= line["us"] and line["cpu_us"] > 0 for line in cold.values())
    assert {"start", "hits, ours", "f8, 16,384 warm rows", "4-bit, 16 rows a token"} < set(lines)
    assert len(document["targets"]) == len(COUNTS) + 2 * len(forms) + 1  # no cgroup, so no hits of the page cache
    assert "no memory cgroup can be made (the test has none)" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
