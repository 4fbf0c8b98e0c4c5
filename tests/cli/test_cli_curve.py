"""``embedrock curve``: what more memory would buy, told from a log."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from embedrock.cli import columns
from embedrock.cli.main import FAILED, main

arrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

IDS = (np.random.default_rng(0).zipf(1.3, 20_000) % 3000).astype(np.int64)


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(columns, "BATCH_ROWS", 700)


def curve(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["curve", *words, "--batch-size", "300", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_each_kind_of_file_tells_the_same(capsys: pytest.CaptureFixture[str]):
    parquet.write_table(arrow.table({"item": IDS}), "a.parquet")
    parquet.write_table(
        arrow.table({"item": arrow.array([f"item {name}" for name in IDS]).dictionary_encode()}), "s.parquet"
    )
    for first, rest in ((0, 9_999), (9_999, None)):
        parquet.write_table(arrow.table({"item": IDS[first:rest]}), f"{first}.parquet")
    Path("a.csv").write_text("user,item\n" + "".join(f"u,{name}\n" for name in IDS))
    Path("a.txt").write_text("".join(f"{k} {name}\n" for k, name in enumerate(IDS)))
    told = curve(capsys, "a.parquet", "--column", "item")
    misses = [point["misses"] for point in told["points"]]
    assert (told["ids"], told["batches"], told["distinct"]) == (20_000, 33, len(np.unique(IDS)))
    assert misses == sorted(misses, reverse=True)
    assert misses[0] > misses[-1] == told["rows_new"]
    assert told["points"][-2]["slots"] < told["distinct"] <= told["points"][-1]["slots"]
    for words in (["0.parquet", "9999.parquet"], ["a.csv"], ["a.txt", "--column", "1"]):
        again = curve(capsys, *words, *(() if "--column" in words else ("--column", "item")))
        assert again["points"] == told["points"]
    strings = curve(capsys, "s.parquet", "--column", "item")
    assert (strings["distinct"], strings["rows_used"]) == (told["distinct"], told["rows_used"])


def test_memory_that_was_asked_for(capsys: pytest.CaptureFixture[str]):
    np.savetxt("a.csv", IDS, "%d", header="item", comments="")
    words = ["a.csv", "--column", "item", "--memory", "1MiB", "300KiB", "--rows", "3000", "--rule", "adagrad"]
    told = curve(capsys, *words, "--dim", "16", "--warm-up", "0")
    assert [point["memory"] for point in told["points"]] == [300 << 10, 1 << 20]
    assert (told["batches"], told["record_bytes"]) == (67, 128)
    assert told["points"][1]["misses"] * 67 == pytest.approx(len(np.unique(IDS)))  # all rows fit
    assert main(["curve", *words]) == 0
    assert "1.0 MiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("item\n1\n\n2000\n", ["--rows", "100"], "csv, row 1: expected ids from 0 to 99; got 2000. Pass --rows"),
        ("item\n1\n2\n", ["--column", "itme"], "expected a column 'itme' of ids; got item .*Did you mean 'item'"),
        ("item\n1.5\n2\n", [], r"expected a column 'item' of ids; got item \(double\)"),
        ("item,n\n1,1\n,2\n", [], "row 1: expected an id in column 'item'; got null.*--skip-nulls"),
        ("item\n", [], "expected ids; got none"),
        ("item\na\nb\n", ["--rows", "100"], r"csv: expected ids of 'item' from 0 to 99; got strings\. .* er\.hash_ids"),
        ("item\n1\n2\n", ["--memory", "1KiB"], "a row of the table takes 768 bytes, and its cache must hold one"),
        ("item,n\n1,1\n2\n", [], r"a\.csv: expected a CSV file; got .*Expected 2 columns, got 1"),
    ],
    ids=["range", "near", "floats", "null", "empty", "strings", "memory", "ragged"],
)
def test_what_is_refused(text: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    Path("a.csv").write_text(text)
    assert main(["curve", "a.csv", "--column", "item", *words]) == FAILED
    said = capsys.readouterr()
    assert re.search(message, said.err), said.err
    assert not said.out
