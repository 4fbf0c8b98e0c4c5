"""`embedrock info | verify | commits | rollback | compact | export | import` from the command line."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from benchmarks.processes import child_environment
from embedrock.cli import exports, imports
from embedrock.cli.formats import FORMATS, base
from embedrock.cli.main import FAILED, INTERRUPTED, main
from embedrock.cli.tables import DAMAGED
from embedrock.spec.codecs import CODECS
from slow import slow

USAGE = 2  # argparse's exit status
ROWS, DIM = 60, 4
SUFFIXES = {one.name: one.suffix for one in FORMATS if one.sink is not None}


class StoppedError(Exception):
    """Ends a command in the middle."""


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(base, "MAX_BATCH_ROWS", 7)


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


Run = Callable[..., dict[str, Any]]
Refused = Callable[..., str]


def vectors_of(rows: int = ROWS, dim: int = DIM, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, dim), dtype=np.float32)


def write_csv(file: str, vectors: np.ndarray):
    lines = ["id,a,b,c,d", *(f"{k},{','.join(map(str, row))}" for k, row in enumerate(vectors.tolist()))]
    Path(file).write_text("\n".join(lines) + "\n")


def make_table(path: str = "t.rock", ids: np.ndarray | None = None, rows: int | None = ROWS) -> np.ndarray:
    """Make a table with two commits, and return the vectors of `ids`."""
    ids = np.arange(ROWS) if ids is None else ids
    vectors = vectors_of(len(ids))
    with er.Table(rows, DIM, path=path, rule=er.SGD(lr=0.5), init=er.Normal(std=0.1), seed=3) as table:
        table.assign(ids, vectors_of(len(ids), seed=9))
        table.commit(step=10, name="first")
        table.assign(ids, vectors)
        table.commit(step=20)
    return vectors


def rows_of(path: str) -> tuple[np.ndarray, np.ndarray]:
    with er.open(path, mode="r") as table:
        return table.export()


def assert_rows(path: str, ids: np.ndarray, vectors: np.ndarray):
    got_ids, got = rows_of(path)
    order = np.argsort(ids)
    np.testing.assert_array_equal(got_ids, ids[order])
    np.testing.assert_array_equal(got, vectors[order])


@contextmanager
def stopped_after(rows: int, where: Any) -> Iterator[None]:
    """End an import or export once it has done so many rows."""
    seen = 0

    @contextmanager
    def progress(label: str, total: int, done: int) -> Iterator[Callable[..., None]]:
        def advance(count: int, note: str = ""):
            nonlocal seen
            seen += count
            if seen >= rows:
                raise StoppedError

        yield advance

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, "progress", progress)
        yield


# ---------------------------------------------------------------- looking


def test_info(run: Run, capsys: pytest.CaptureFixture[str]):
    make_table(ids=np.arange(40))
    told = run("info", "t.rock")
    expected = {"rows": ROWS, "dim": DIM, "dtype": "float32", "seed": 3, "rows_touched": 40, "steps": 0, "commits": 2}
    assert {name: told[name] for name in expected} == expected
    assert told["rule"] == {"name": "SGD", "lr": 0.5}
    assert told["commit"]["step"] == 20
    assert told["bytes"]["delta"] == sum(path.stat().st_size for path in Path("t.rock/delta").iterdir())
    assert (
        sum(told["bytes"].values())
        == sum(path.stat().st_size for path in Path("t.rock").rglob("*.*")) + Path("t.rock/LOCK").stat().st_size
    )
    assert run("info", "t.rock", "--at", 1)["commit"]["name"] == "first"
    assert main(["info", "t.rock"]) == 0
    text = capsys.readouterr().out
    for part in ("60; 40 with records", "SGD(lr=0.5)", "Normal(mean=0.0, std=0.1), seed 3", "step 20", "delta "):
        assert part in text


def test_info_of_open_ids(capsys: pytest.CaptureFixture[str]):
    make_table(rows=None)
    assert main(["info", "t.rock"]) == 0
    assert "any int64 as id; 60 with records" in capsys.readouterr().out


def test_commits(run: Run, capsys: pytest.CaptureFixture[str]):
    make_table()
    found = run("commits", "t.rock")["commits"]
    assert [(one["commit"], one["step"], one["name"]) for one in found][-2:] == [(1, 10, "first"), (2, 20, None)]
    assert main(["commits", "t.rock"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["commit", "time", "rows", "size", "step", "name"]
    assert [(line[0], line[2], *line[5:]) for line in lines[-2:]] == [("1", "60", "10", "'first'"), ("2", "60", "20")]


@pytest.mark.parametrize("command", ["info", "verify", "commits", "compact"])
def test_no_table(refused: Refused, command: str):
    assert "there is no table here" in refused(command, "nothing.rock")
    assert not Path("nothing.rock").exists()


def test_a_reader_changes_nothing(run: Run):
    make_table()
    before = {path: path.stat().st_mtime_ns for path in Path("t.rock").rglob("*")}
    run("info", "t.rock")
    run("commits", "t.rock")
    run("verify", "t.rock")
    run("export", "t.rock", "a.npy")
    assert {path: path.stat().st_mtime_ns for path in Path("t.rock").rglob("*")} == before


def test_a_table_in_use_can_be_looked_at(run: Run, refused: Refused):
    make_table()
    with er.open("t.rock"):
        assert run("verify", "t.rock")["problems"] == []
        run("info", "t.rock")
        run("export", "t.rock", "a.npy")
        for command in (["rollback", "t.rock", 1], ["compact", "t.rock"], ["import", "a.npy", "t.rock", "--into"]):
            assert "this process has it open for writing already" in refused(*command)


# ---------------------------------------------------------------- verify


def flip(path: Path, at: int):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_verify_names_file_rows_and_newest_good_commit(run: Run, capsys: pytest.CaptureFixture[str]):
    make_table()
    told = run("verify", "t.rock")
    assert told["problems"] == []
    assert told["newest_good"] == 2
    newest = sorted(Path("t.rock/delta").iterdir())[-1]
    flip(newest, 4096 + 5 * (4 * DIM + 4))
    told = run("verify", "t.rock", status=DAMAGED)
    assert told["newest_good"] == 1
    assert len(told["problems"]) == 1
    assert newest.name in told["problems"][0]
    assert "1 of 60 records do not fit, of ids 5" in told["problems"][0]
    assert main(["verify", "t.rock"]) == DAMAGED
    assert "1 problem; newest good commit: 1" in capsys.readouterr().out


@pytest.mark.parametrize("part", ["manifest", "delta", "truncated", "missing"])
def test_a_damaged_last_commit_is_told_and_rolled_back(run: Run, refused: Refused, part: str):
    make_table()
    newest = sorted(path for path in Path("t.rock", "manifest" if part == "manifest" else "delta").iterdir())[-1]
    if part == "missing":
        newest.unlink()
    elif part == "truncated":
        os.truncate(newest, newest.stat().st_size - 1)
    else:
        flip(newest, 4096 if part == "delta" else 30)
    told = run("verify", "t.rock", status=DAMAGED)
    assert newest.name in " ".join(told["problems"])
    assert told["newest_good"] == 1
    assert run("rollback", "t.rock", 1) == {"commit": 3, "content_of": 1}
    assert_rows("t.rock", np.arange(ROWS), vectors_of(seed=9))
    with er.open("t.rock") as table:  # which goes on
        table.assign([0], np.ones((1, DIM), np.float32))
        assert table.commit() == 4


def test_a_newer_format_is_no_damage(refused: Refused, monkeypatch: pytest.MonkeyPatch):
    make_table()
    from embedrock.store import folder

    def newer(*_: object):
        raise er.NewerFormatError("the table is of format 2")

    monkeypatch.setattr(folder, "newest", newer)
    assert "format 2" in refused("verify", "t.rock")


# ---------------------------------------------------------------- changing


def test_rollback_and_compact(run: Run, refused: Refused):
    vectors = make_table()
    assert run("rollback", "t.rock", 1) == {"commit": 3, "content_of": 1}
    assert_rows("t.rock", np.arange(ROWS), vectors_of(seed=9))
    assert run("rollback", "t.rock", 2)["commit"] == 4
    assert_rows("t.rock", np.arange(ROWS), vectors)
    told = run("compact", "t.rock")
    assert told["commit"] == 5
    assert told["bytes"] > 0
    assert_rows("t.rock", np.arange(ROWS), vectors)
    assert "has no commit 77" in refused("rollback", "t.rock", 77)


# ---------------------------------------------------------------- tables of another dtype


@pytest.mark.parametrize("dtype", CODECS)
def test_export_of_a_table_that_is_only_read(dtype: str, run: Run, refused: Refused):
    vectors = make_table(ids=np.arange(0, ROWS, 2))
    told = run("export", "t.rock", "small.rock", "--dtype", dtype)
    assert (told["rows"], told["dim"], told["commit"], told["format"]) == (len(vectors), DIM, 2, dtype)
    assert told["files"] == [str(Path("small.rock").absolute())]
    with er.open("t.rock", mode="r") as table, er.open("small.rock") as made:
        assert (made.spec.dtype, made.rule, made.last_step) == (dtype, None, 20)
        np.testing.assert_array_equal(made.lookup(range(1, ROWS, 2)), table.lookup(range(1, ROWS, 2)))
        np.testing.assert_allclose(made.lookup(range(0, ROWS, 2)), vectors, atol=0.01 if dtype == "int8" else 0.2)
        assert not np.array_equal(made.lookup([0]), vectors[:1])
    assert run("verify", "small.rock")["records"] == len(vectors)
    run("export", "t.rock", "first.rock", "--dtype", dtype, "--at", 1)
    assert not np.array_equal(rows_of("first.rock")[1], rows_of("small.rock")[1])
    run("export", "small.rock", "rows.npz")  # and back to floats, by way of a file
    run("import", "rows.npz", "again.rock")
    np.testing.assert_array_equal(rows_of("again.rock")[1], rows_of("small.rock")[1])
    assert "expected a file that is not there yet" in refused("export", "t.rock", "small.rock", "--dtype", dtype)
    for option in (["--all"], ["--format", "npy"]):
        assert "Leave --all, --format and --words out" in refused("export", "t.rock", "x", "--dtype", dtype, *option)
    assert sorted(path.name for path in Path().iterdir()) == [
        "again.rock",
        "first.rock",
        "rows.npz",
        "small.rock",
        "t.rock",
    ]


def test_an_export_of_a_table_leaves_nothing_half_done(run: Run, refused: Refused):
    make_table()
    with er.open("t.rock") as table:
        table.set_rule(er.SGD(lr=1.0))
        for _ in range(2):
            table.update([7], np.full((1, DIM), -3e38, np.float32))
        table.commit()
    text = refused("export", "t.rock", "small.rock", "--dtype", "int8")
    assert "must be finite as int8: got NaN, Inf or values too large in 1 row, first ids [7]." in text
    assert [path.name for path in Path().iterdir()] == ["t.rock"]
    (Path("small.rock" + base.PART) / "base").mkdir(parents=True)  # as a killed process would leave it
    text = refused("export", "t.rock", "small.rock", "--dtype", "int8", "--at", 1)
    assert "expected no such folder; got one, perhaps of an export that was cut off. Begin anew: --restart." in text
    run("export", "t.rock", "small.rock", "--dtype", "int8", "--at", 1, "--restart")
    assert sorted(path.name for path in Path().iterdir()) == ["small.rock", "t.rock"]


# ---------------------------------------------------------------- import and export


@pytest.mark.parametrize("name", SUFFIXES)
@pytest.mark.parametrize("own_ids", [False, True])
def test_round_trip(run: Run, name: str, own_ids: bool):
    if name in ("parquet", "arrow"):
        pytest.importorskip("pyarrow", reason="Parquet and Arrow need pyarrow")
    ids = np.random.default_rng(1).permutation(ROWS) * 10**9 - 7 if own_ids else np.arange(ROWS)
    vectors = make_table(ids=ids, rows=None if own_ids else ROWS)
    file = f"out{SUFFIXES[name]}"
    told = run("export", "t.rock", file)
    assert (told["rows"], told["all"], told["commit"]) == (ROWS, not own_ids, 2)
    options = ["--dim", DIM] if name == "raw" else ["--ids", "word"] if name in ("glove", "word2vec") else []
    told = run("import", file, "again.rock", *options)
    assert (told["rows"], told["format"], told["repeated"]) == (ROWS, name, 0)
    assert_rows("again.rock", ids, vectors)
    assert run("verify", "again.rock")["problems"] == []
    assert not list(Path().glob("*.part*"))
    assert not list(Path().glob("*.json"))


def test_words(run: Run, refused: Refused):
    words = [f"wörd{k}" for k in range(ROWS)]
    lines = [f"{word} " + " ".join(map(str, row.tolist())) for word, row in zip(words, vectors_of(), strict=True)]
    Path("glove.txt").write_text("\n".join(lines) + "\n")
    told = run("import", "glove.txt", "t.rock")
    assert Path(told["words"]).name == "t.rock.words.txt"
    assert Path("t.rock.words.txt").read_text().splitlines() == words
    assert_rows("t.rock", np.arange(ROWS), vectors_of())
    run("export", "t.rock", "out.vec")
    assert Path("out.vec").read_text().splitlines()[1].split()[0] == "wörd0"
    run("export", "t.rock", "ids.vec", "--words", "")
    assert Path("ids.vec").read_text().splitlines()[1].split()[0] == "0"
    run("import", "out.vec", "again.rock")
    assert Path("again.rock.words.txt").read_bytes() == Path("t.rock.words.txt").read_bytes()
    into = refused("import", "out.vec", "again.rock", "--into")
    assert "expected rows with ids or numbers, as --into is given; got words. Pass --only-words FOLDER" in into
    run("import", "out.vec", "again.rock", "--into", "--ids", "row-number")
    told = run("import", "out.vec", "numbered.rock", "--ids", "row-number")
    assert (told["words"], told["vocabulary"]) == (None, None)
    assert_rows("numbered.rock", np.arange(ROWS), vectors_of())
    shutil.rmtree("again.rock")
    shutil.rmtree("again.rock.vocabulary")
    assert "again.rock.words.txt: expected no words of rows yet" in refused("import", "out.vec", "again.rock")
    assert "a format with words" in refused("export", "t.rock", "out.npy", "--words", "t.rock.words.txt")


def test_export_of_all_rows_and_of_an_earlier_commit(run: Run, refused: Refused):
    ids = np.arange(0, ROWS, 2)
    vectors = make_table(ids=ids)
    run("export", "t.rock", "all.npy", "--all")
    found = np.load("all.npy")
    np.testing.assert_array_equal(found[ids], vectors)
    with er.open("t.rock", mode="r") as table:
        np.testing.assert_array_equal(found, table.lookup(np.arange(ROWS)))
    run("export", "t.rock", "before.npy", "--at", 1)
    order = np.argsort(np.load("before.ids.npy"))
    np.testing.assert_array_equal(np.load("before.npy")[order], vectors_of(len(ids), seed=9))
    make_table("open.rock", rows=None)
    assert "expected a table with a number of rows" in refused("export", "open.rock", "x.npy", "--all")
    er.Table(ROWS, DIM, path="empty.rock").close()
    assert "expected rows that were stepped or assigned; got none." in refused("export", "empty.rock", "x.npy")
    assert "expected a file that is not there yet" in refused("export", "t.rock", "all.npy")


def test_what_a_new_table_is(run: Run):
    np.save("a.npy", vectors_of())
    options = ["--rows", "1k", "--rule", "adam", "--std", "0.5", "--table-dtype", "bfloat16", "--seed", 7]
    run("import", "a.npy", "t.rock", *options)
    with er.open("t.rock", mode="r") as table:
        assert (table.rows, table.rule, table.spec.init) == (1000, er.Adam(), er.Normal(std=0.5))
        assert (table.spec.dtype, table.spec.seed) == ("bfloat16", 7)
    run("import", "a.npy", "open.rock", "--rows", "open")
    with er.open("open.rock", mode="r") as table:
        assert (table.rows, table.rule, table.spec.init) == (None, None, er.Zeros())


def test_into_a_table(run: Run, refused: Refused):
    vectors = make_table(rows=ROWS + 40)
    with er.open("t.rock") as table:
        table.update([1], np.ones((1, DIM), np.float32))
        table.commit(step=30)
    np.savez("a.npz", vectors=vectors_of(30, seed=5), ids=np.arange(50, 80))
    run("import", "a.npz", "t.rock", "--into")
    with er.open("t.rock", mode="r") as table:
        np.testing.assert_array_equal(table.lookup(np.arange(50, 80)), vectors_of(30, seed=5))
        np.testing.assert_array_equal(table.lookup(np.arange(2, 50)), vectors[2:50])
        assert (table.last_step, table.steps) == (30, 1)
    np.save("wide.npy", vectors_of(dim=DIM + 1))
    assert "expected vectors of 4 numbers" in refused("import", "wide.npy", "t.rock", "--into")
    np.save("long.npy", vectors_of(rows=101))
    assert "expected at most 100 rows" in refused("import", "long.npy", "t.rock", "--into")
    np.savez("b.npz", vectors=vectors_of(30), ids=np.arange(71, 101))
    assert "row 29 (from 0): expected ids in [0, 100); got 100." in refused("import", "b.npz", "t.rock", "--into")


def test_the_last_of_repeated_ids_holds(run: Run):
    np.savez("a.npz", vectors=vectors_of(6), ids=np.array([3, 1, 3, 2, 1, 3]))
    assert run("import", "a.npz", "t.rock")["repeated"] == 3
    assert_rows("t.rock", np.array([1, 2, 3]), vectors_of(6)[[4, 3, 5]])


def test_a_bad_file_makes_no_table(refused: Refused):
    Path("a.npy").write_bytes(b"nothing")
    assert "expected a .npy file of numbers" in refused("import", "a.npy", "t.rock")
    assert "No such file" in refused("import", "missing.npy", "t.rock")
    assert "expected one of .npy (npy)" in refused("import", "missing", "t.rock")
    np.save("a.npy", vectors_of())
    assert "expected vectors of 9 numbers, as --dim says; got 4" in refused("import", "a.npy", "t.rock", "--dim", 9)
    assert [path.name for path in Path().iterdir()] == ["a.npy"]
    make_table()
    assert "Import to another path; or pass --into, which writes over rows of this one." in refused(
        "import", "a.npy", "t.rock"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["import", "a.npy"],
        ["import", "a.npy", "t.rock", "--into", "--rows", "5"],
        ["import", "a.npy", "t.rock", "--rows", "-1"],
        ["import", "a.npy", "t.rock", "--std", "nan"],
        ["import", "a.npy", "t.rock", "--memory", "much"],
        ["import", "a.npy", "t.rock", "--format", "xls"],
        ["export", "t.rock", "a.bin", "--format", "word2vec-binary"],
        ["rollback", "t.rock", "last"],
        ["rollback", "t.rock"],
        ["info"],
    ],
)
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == USAGE
    assert "usage: embedrock" in capsys.readouterr().err


def test_without_tqdm_there_is_no_bar(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    np.save("a.npy", vectors_of())
    assert run("import", "a.npy", "t.rock")["rows"] == ROWS
    assert run("export", "t.rock", "b.npy")["rows"] == ROWS


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("command", [["import", "a.{}", "new.rock"], ["export", "t.rock", "b.{}"]])
def test_without_pyarrow(refused: Refused, monkeypatch: pytest.MonkeyPatch, command: list[str], kind: str):
    make_table()
    Path(f"a.{kind}").write_bytes({"parquet": b"PAR1\x15", "arrow": b"ARROW1\0\0"}[kind])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "pyarrow.ipc", None)
    assert 'pip install "embedrock[files]"' in refused(*[word.format(kind) for word in command])
    assert not Path("new.rock").exists()


@pytest.mark.parametrize("command", [["export", "t.rock", "b.csv"], ["import", "a.csv", "new.rock"]])
def test_csv_without_pyarrow(refused: Refused, monkeypatch: pytest.MonkeyPatch, command: list[str]):
    make_table()
    Path("a.csv").write_text("id,v0\n1,2\n")
    monkeypatch.setitem(sys.modules, "pyarrow.csv", None)
    assert "CSV needs pyarrow, which does not import: " in (told := refused(*command))
    assert 'pip install "embedrock[files]"' in told
    assert not [one for one in ("b.csv", "b.csv.part", "new.rock") if Path(one).exists()]


def test_the_summary_says_how_much_and_how_fast(run: Run, capsys: pytest.CaptureFixture[str]):
    np.save("a.npy", vectors_of())
    assert main(["import", "a.npy", "t.rock"]) == 0
    told = capsys.readouterr()
    numbers = r"[\d.,]+"
    wanted = rf"60 rows, 4 dim, {numbers} s, {numbers} rows/s, {numbers} MB/s: .*/t\.rock, commit \d \(npy\)\n"
    assert re.fullmatch(wanted, told.out)
    assert told.err == ""  # which is no terminal
    told = run("import", "a.npy", "again.rock")
    assert told["bytes"] == Path("a.npy").stat().st_size
    assert told["seconds"] > 0


# ---------------------------------------------------------------- cut off, and continued


def interrupted_import(*arguments: object, after: int = 40):
    with stopped_after(after, imports), pytest.raises(StoppedError):
        main(["import", *map(str, arguments), "--commit-every", "15"])


@pytest.mark.parametrize("kind", ["npy", "glove", "csv"])
@pytest.mark.parametrize("after", [1, 21, 22, 43, ROWS])
def test_import_continues(run: Run, kind: str, after: int):
    file = {"npy": "a.npy", "glove": "a.txt", "csv": "a.csv"}[kind]
    if kind == "npy":
        np.save(file, vectors_of())
    elif kind == "csv":
        write_csv(file, vectors_of())
    else:
        Path(file).write_text(
            "".join(f"w{k} " + " ".join(map(str, v)) + "\n" for k, v in enumerate(vectors_of().tolist()))
        )
    interrupted_import(file, "t.rock", after=after)
    told = run("import", file, "t.rock", "--commit-every", 15)
    assert told["continued_at"] == (after - 1) // 7 // 3 * 21  # batches of 7, commits after 3 of them
    assert_rows("t.rock", np.arange(ROWS), vectors_of())
    if kind == "glove":
        assert Path("t.rock.words.txt").read_text() == "".join(f"w{k}\n" for k in range(ROWS))
    assert not list(Path().glob("*.json"))
    assert not list(Path().glob("*.part"))


def test_import_continues_only_the_same(run: Run, refused: Refused):
    np.save("a.npy", vectors_of())
    np.save("b.npy", vectors_of(seed=1))
    interrupted_import("a.npy", "t.rock")
    text = refused("import", "b.npy", "t.rock")
    assert "expected to continue the earlier run, with source=" in text
    assert "Begin anew: --restart." in text
    told = run("import", "b.npy", "t.rock", "--restart")
    assert told["continued_at"] == 0
    assert_rows("t.rock", np.arange(ROWS), vectors_of(seed=1))


def test_a_restarted_import_has_no_rows_of_the_earlier_one(run: Run):
    write_csv("a.csv", vectors_of())
    interrupted_import("a.csv", "t.rock")
    Path("a.csv").write_text("id,v0\n1000,2\n")  # other rows, and of another dim
    assert run("import", "a.csv", "t.rock", "--restart", "--rule", "sgd")["continued_at"] == 0
    assert_rows("t.rock", np.array([1000]), np.array([[2]], np.float32))


@pytest.mark.parametrize(
    ("wrong", "told", "options"),
    [
        ("id,name,v0\n1,bob,2\n", "--vectors NAME takes NAME0", ["--vectors", "v"]),
        ("id,v0\n,2\n", "or none: --ids row-number", ["--ids", "row-number", "--vectors", "v"]),
        ("id,v0\n9,2\n", "Pass a larger --rows", ["--rows", "10"]),
    ],
    ids=["dim", "ids", "rows"],
)
def test_a_file_at_fault_leaves_nothing_in_the_way(
    run: Run, refused: Refused, wrong: str, told: str, options: list[str]
):
    Path("a.csv").write_text(wrong)
    rows = ["--rows", "5"] if "--rows" in options else []
    assert told in refused("import", "a.csv", "t.rock", *rows)
    assert os.listdir() == ["a.csv"]
    assert run("import", "a.csv", "t.rock", *options)["dim"] == 1


def test_words_at_fault_leave_nothing_in_the_way(run: Run, refused: Refused):
    Path("a.txt").write_text("a 1 2\nb 3\n")
    assert "line 2: expected a word and 2 numbers" in refused("import", "a.txt", "t.rock")
    assert os.listdir() == ["a.txt"]
    Path("a.txt").write_text("a 1 2\nb 3 4\nc 5 6\n")
    assert run("import", "a.txt", "t.rock")["rows"] == 3


def test_a_file_is_no_table_to_make(refused: Refused):
    np.save("a.npy", vectors_of())
    assert "a.npy: expected the path of a new folder; got a file. Choose another path" in refused(
        "import", "a.npy", "a.npy"
    )


def test_import_does_not_overwrite_what_was_trained_since(run: Run, refused: Refused):
    np.save("a.npy", vectors_of())
    interrupted_import("a.npy", "t.rock", "--rule", "sgd")
    with er.open("t.rock") as table:
        table.update([1], np.ones((1, DIM), np.float32))
        table.commit()
    assert "expected the table as the earlier import left it" in refused("import", "a.npy", "t.rock")
    assert "one that was trained. Somebody has changed it since. Import to another path." in refused(
        "import", "a.npy", "t.rock", "--restart"
    )
    with er.open("t.rock", mode="r") as table:
        assert table.steps == 1
    run("import", "a.npy", "u.rock")
    assert_rows("u.rock", np.arange(ROWS), vectors_of())


@pytest.mark.parametrize("saves", [0, 1])
def test_import_continues_without_any_note(run: Run, monkeypatch: pytest.MonkeyPatch, saves: int):
    np.save("a.npy", vectors_of())
    save = imports.Journal.save

    def crash(journal: imports.Journal, state: dict[str, Any]):
        if state["rows"] or not saves:
            raise StoppedError
        save(journal, state)

    with monkeypatch.context() as patch:
        patch.setattr(imports.Journal, "save", crash)
        with pytest.raises(StoppedError):
            main(["import", "a.npy", "t.rock", "--commit-every", "15"])
    assert Path("t.rock").exists() == bool(saves)
    assert run("import", "a.npy", "t.rock")["continued_at"] == 0
    assert_rows("t.rock", np.arange(ROWS), vectors_of())


def test_import_continues_after_a_commit_without_note(run: Run, monkeypatch: pytest.MonkeyPatch):
    """A crash between a commit and the journal: rows are imported twice, which changes nothing."""
    np.save("a.npy", vectors_of())

    def crash(*_: object):
        raise StoppedError

    interrupted_import("a.npy", "t.rock", after=22)
    with monkeypatch.context() as patch:
        patch.setattr(imports.Journal, "save", crash)
        with pytest.raises(StoppedError):
            main(["import", "a.npy", "t.rock", "--commit-every", "15"])
    with er.open("t.rock", mode="r") as table:
        assert table.stats()["rows_touched"] == 42
    assert run("import", "a.npy", "t.rock")["continued_at"] == 21
    assert_rows("t.rock", np.arange(ROWS), vectors_of())


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"job": 1, "state": {"rows": -1}}', '{"job": 1, "state": {"rows": 3}}']
)
def test_a_journal_that_is_none(run: Run, refused: Refused, content: str):
    np.save("a.npy", vectors_of())
    interrupted_import("a.npy", "t.rock")
    Path("t.rock.import.json").write_text(content)
    assert "Begin anew: --restart." in refused("import", "a.npy", "t.rock")
    run("import", "a.npy", "t.rock", "--restart")
    assert_rows("t.rock", np.arange(ROWS), vectors_of())


@pytest.mark.parametrize(("name", "after"), [*((name, 30) for name in SUFFIXES), ("npy", 1), ("npy", ROWS)])
@pytest.mark.parametrize("own_ids", [False, True])
def test_export_continues(run: Run, monkeypatch: pytest.MonkeyPatch, name: str, own_ids: bool, after: int):
    if name in ("parquet", "arrow"):
        pytest.importorskip("pyarrow", reason="Parquet and Arrow need pyarrow")
    ids = np.random.default_rng(1).permutation(ROWS) * 11 if own_ids else np.arange(ROWS)
    make_table(ids=ids, rows=None if own_ids else ROWS)
    file, whole = f"out{SUFFIXES[name]}", f"whole{SUFFIXES[name]}"
    run("export", "t.rock", whole)
    monkeypatch.setattr(exports, "SYNC_BYTES", 1)
    with stopped_after(after, exports), pytest.raises(StoppedError):
        main(["export", "t.rock", file])
    assert not Path(file).exists()
    told = run("export", "t.rock", file)
    assert told["continued_at"] == (after - 1) // 7 * 7
    if name != "npz":  # which has times in it
        assert Path(file).read_bytes() == Path(whole).read_bytes()
    assert not list(Path().glob("*.part*"))


def test_export_continues_only_the_same(run: Run, refused: Refused, monkeypatch: pytest.MonkeyPatch):
    make_table()
    monkeypatch.setattr(exports, "SYNC_BYTES", 1)
    with stopped_after(30, exports), pytest.raises(StoppedError):
        main(["export", "t.rock", "a.npy"])
    flip(Path("a.npy.part"), 128 + 20 * 4 * DIM)
    assert "as an earlier run wrote them; got something else. Begin anew: --restart." in refused(
        "export", "t.rock", "a.npy"
    )
    with er.open("t.rock") as table:
        table.assign([0], np.zeros((1, DIM), np.float32))
        table.commit()
    text = refused("export", "t.rock", "a.npy")
    assert "to continue the earlier run, with commit=2; got commit=3. Begin anew: --restart." in text
    run("export", "t.rock", "a.npy", "--restart")
    assert not np.load("a.npy")[0].any()
    Path("b.npy.part").write_text("mine")
    assert "one that this command did not begin" in refused("export", "t.rock", "b.npy")
    assert Path("b.npy.part").read_text() == "mine"


# ---------------------------------------------------------------- the page


def test_the_commands_of_the_page(capsys: pytest.CaptureFixture[str]):
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    blocks = re.findall(r"^```(python|bash)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python", "bash"] * 3 + ["bash"]
    np.savetxt("log.csv", np.random.default_rng(0).zipf(1.1, 10_000) % 10**6, "%d")  # as the page's, but small
    names = dict[str, Any]()
    for kind, block in blocks:
        if kind == "python":
            exec(block, names)
            continue
        for line in block.splitlines():
            if line.startswith("embedrock"):
                words = shlex.split(line.split(" && ")[0], comments=True)
                assert main(words[1:]) == 0, capsys.readouterr().err
    assert np.load("matrix.npy").shape == (3000, 8)
    with er.open("mine-rows.rock", mode="r") as table:
        assert table.lookup([0, 1, 2]).tolist() == np.array([[0.7, 0.8], [0, 0], [0.5, 0.6]], np.float32).tolist()


# ---------------------------------------------------------------- as a program


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "embedrock", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env=child_environment(), start_new_session=True
    )


def wait_for_rows(journal: Path, process: subprocess.Popen[str]):
    """Wait until an import has committed rows."""
    while process.poll() is None:
        if journal.exists() and json.loads(journal.read_text())["state"]["rows"]:
            return
        time.sleep(0.002)
    pytest.fail(f"it ended before: {process.communicate()}")


@pytest.mark.parametrize(("sent", "file"), [(signal.SIGKILL, "a.npy"), *slow((signal.SIGINT, "a.csv"))])
def test_killed_and_continued(run: Run, sent: signal.Signals, file: str, capsys: pytest.CaptureFixture[str]):
    vectors = vectors_of(200_000)
    if file == "a.npy":
        np.save(file, vectors)
    else:
        write_csv(file, vectors)
    with start("import", file, "t.rock", "--commit-every", "20000") as process:
        wait_for_rows(Path("t.rock.import.json"), process)
        process.send_signal(sent)
        _, errors = process.communicate(timeout=300)
    if sent == signal.SIGINT:
        assert process.returncode == INTERRUPTED
        assert errors == "\nembedrock: interrupted\n"
    capsys.readouterr()
    assert main(["import", file, "t.rock", "--json"]) == 0
    output, errors = capsys.readouterr()
    assert errors == ""  # no bar where there is no terminal
    assert json.loads(output)["continued_at"] > 0
    assert_rows("t.rock", np.arange(len(vectors)), vectors)
    assert run("verify", "t.rock")["problems"] == []


def test_a_full_disk_is_one_line(capsys: pytest.CaptureFixture[str]):
    make_table()
    assert main(["export", "t.rock", "/dev/full/a.npy"]) == FAILED
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith("embedrock: error: ")
    assert errors.count("\n") == 1


PEAK = """
import json, resource, sys
from embedrock.cli.main import main
assert main(sys.argv[1:]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=sys.stderr)
"""


def peak_bytes(*arguments: str) -> int:
    command = [sys.executable, "-c", PEAK, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), check=True)
    return int(done.stderr.split()[-1])


@pytest.mark.slow
def test_ram_does_not_follow_the_file(run: Run):
    """Files of 200 and 600 MB through a table with 64 MiB of RAM."""
    dim, part = 64, vectors_of(100_000, 64)
    for name, copies in (("small.raw", 8), ("large.raw", 24)):
        with open(name, "wb") as file:
            for _ in range(copies):
                file.write(part.tobytes())
    memory = ("--memory", "64MiB")
    small = peak_bytes("import", "small.raw", "small.rock", "--dim", str(dim), *memory)
    large = peak_bytes("import", "large.raw", "large.rock", "--dim", str(dim), *memory)
    assert large < small + 100e6, f"import: {small / 1e6:.0f} and {large / 1e6:.0f} MB"
    small = peak_bytes("export", "small.rock", "small.npy", *memory)
    large = peak_bytes("export", "large.rock", "large.npy", *memory)
    assert large < small + 100e6, f"export: {small / 1e6:.0f} and {large / 1e6:.0f} MB"
    assert Path("large.npy").read_bytes()[128:] == Path("large.raw").read_bytes()


def test_help_says_in_a_line_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    paragraphs = capsys.readouterr().out.split("\n\n")
    assert paragraphs[1].replace("\n", " ") == (er.__doc__ or "").partition("\n")[0]


def test_frozen_rows_are_counted(tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]):
    with er.Table(None, 2, path=tmp_path / "t", frozen=[7, range(10**9)], eviction=er.Eviction(max_rows=9)):
        pass
    assert run("info", tmp_path / "t")["frozen"] == {"ranges": [[0, 10**9]]}
    assert main(["info", str(tmp_path / "t")]) == 0
    assert "frozen         1,000,000,000 ids\n" in capsys.readouterr().out
