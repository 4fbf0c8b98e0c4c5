"""``embedrock vocabulary``: built of columns, looked at, verified."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import embedrock as er
from embedrock.cli import columns, vocabularies
from embedrock.cli.main import FAILED, main

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
feather = pytest.importorskip("pyarrow.feather")

WORDS = [f"word {k}" for k in np.random.default_rng(0).integers(0, 400, 3000)]
EXPECTED = list(dict.fromkeys(WORDS))


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(columns, "BATCH_ROWS", 500)
    table = arrow.table({"item": WORDS[:1700], "n": range(1700)})
    parquet.write_table(table, "a.parquet", row_group_size=300)
    feather.write_feather(arrow.table({"item": arrow.array(WORDS[1700:]).dictionary_encode()}), "b.arrow")


def build(*words: str) -> int:
    return main(["vocabulary", "build", *words, "--path", "v.rock"])


def test_ids_are_in_the_order_of_the_files(capsys: pytest.CaptureFixture[str]):
    assert build("a.parquet", "b.arrow", "--column", "item", "--memory", "64KiB", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["rows"], told["strings"], told["new"]) == (3000, len(EXPECTED), len(EXPECTED))
    with er.Vocabulary("v.rock", mode="r") as vocabulary:
        assert vocabulary.strings(np.arange(len(EXPECTED))).tolist() == EXPECTED
    assert build("a.parquet", "b.arrow", "--column", "item") == 0  # again
    assert f"{len(EXPECTED)} strings, 0 of them new, from 3,000 rows in" in capsys.readouterr().out


def test_what_was_cut_off_goes_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    add, calls = er.Vocabulary.add, 0

    def interrupted(self: er.Vocabulary, values: object) -> np.ndarray:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return add(self, values)

    monkeypatch.setattr(er.Vocabulary, "add", interrupted)
    assert build("a.parquet", "b.arrow", "--column", "item") == 130
    with er.Vocabulary("v.rock", mode="r") as vocabulary:
        assert 0 < len(vocabulary) < len(EXPECTED)
    assert build("a.parquet", "b.arrow", "--column", "item") == 0
    with er.Vocabulary("v.rock", mode="r") as vocabulary:
        assert vocabulary.strings(np.arange(len(vocabulary))).tolist() == EXPECTED


def test_looking(capsys: pytest.CaptureFixture[str]):
    build("a.parquet", "--column", "item")
    capsys.readouterr()
    assert main(["vocabulary", "info", "v.rock"]) == 0
    assert f"{len(set(WORDS[:1700]))}" in (told := capsys.readouterr().out)
    assert repr(WORDS[0]) in told
    assert main(["vocabulary", "verify", "v.rock"]) == 0
    assert "all of them whole" in capsys.readouterr().out
    (path,) = Path("v.rock/runs").iterdir()
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    assert main(["vocabulary", "verify", "v.rock"]) == vocabularies.DAMAGED
    assert f"{path.name} is damaged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.parquet", "--column", "itme"], "expected a column 'itme' of strings; got item .* Did you mean 'item'"),
        (["a.parquet", "--column", "n"], r"expected a column 'n' of strings; got item \(string\), n \(int64\)"),
        (["none.parquet", "--column", "item"], "there is no such file"),
        (["a.docx", "--column", "item"], "expected a file called"),
        (["c.parquet", "--column", "item"], "expected a Parquet or Arrow file; got"),
        (["d.parquet", "--column", "item"], "row 1: expected a string in column 'item'; got null.*--skip-nulls"),
    ],
    ids=["near", "numbers", "missing", "docx", "damaged", "null"],
)
def test_what_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    Path("c.parquet").write_bytes(b"no such thing")
    parquet.write_table(arrow.table({"item": ["a", None, "b"]}), "d.parquet")
    assert build(*words) == FAILED
    assert re.search(message, capsys.readouterr().err)


def test_nulls_are_skipped():
    parquet.write_table(arrow.table({"item": ["a", None, "b"]}), "d.parquet")
    assert build("d.parquet", "--column", "item", "--skip-nulls") == 0
    with er.Vocabulary("v.rock", mode="r") as vocabulary:
        assert vocabulary.strings([0, 1]).tolist() == ["a", "b"]


@pytest.mark.parametrize(("name", "head", "column"), [("words.txt", b"", "0"), ("words.csv", b"id,word\n1,", "word")])
def test_text_of_another_encoding_is_named(name: str, head: bytes, column: str, capsys: pytest.CaptureFixture[str]):
    Path(name).write_bytes(head + "café\n".encode("latin-1"))
    assert main(["vocabulary", "build", name, "--column", column, "--path", "new"]) == 1
    said = capsys.readouterr().err.strip()
    assert "invalid UTF8 data" in said
    assert said.endswith("Save it in UTF-8.")
    assert "\n" not in said
    assert not Path("new").exists()


def test_a_quoted_end_of_a_line_is_in_the_string(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Within what is parsed at a time; elsewhere its line is refused."""
    Path("q.csv").write_text('n,item\n1,"a\nb"\n2,c\n')
    assert build("q.csv", "--column", "item") == 0
    with er.Vocabulary("v.rock", mode="r") as vocabulary:
        assert vocabulary.strings([0, 1]).tolist() == ["a\nb", "c"]
    monkeypatch.setattr("embedrock.cli.formats.delimited.BLOCK_BYTES", 4)
    capsys.readouterr()
    assert build("q.csv", "--column", "item") == FAILED
    assert "q.csv, line 2: expected columns, and quotes in pairs; got a quote that" in capsys.readouterr().err
