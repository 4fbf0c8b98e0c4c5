"""What the command line says of itself, and to somebody who mistypes a name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock import cli
from embedrock.cli.main import FAILED, main
from embedrock.cli.terminal.tables import format_count
from embedrock.errors import did_you_mean, nearest
from embedrock.store.reading import CHECKPOINT

USAGE = 2
COMMANDS = ["info", "verify", "commits", "rollback", "compact", "copy", "export", "import"]
COMMANDS += ["reshard", "vocabulary"]


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def made(path: str, rows: int = 1) -> Path:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with er.Table(9, 2, path=path) as table:
        table.assign(np.arange(rows), np.zeros((rows, 2), np.float32))
        table.commit()
    return Path(path)


def usage_error(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == USAGE
    told = capsys.readouterr()
    assert told.out == ""
    return told.err


def error(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == FAILED
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    return told.err


# ---------------------------------------------------------------- help


def test_the_bare_command_prints_help_with_three_examples(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    for command in COMMANDS:
        assert re.search(rf"^    {command}\s", told.out, re.MULTILINE)
    examples = re.findall(r"^  embedrock (\w+) ", told.out, re.MULTILINE)
    assert len(examples) == 3
    assert set(examples) <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(capsys: pytest.CaptureFixture[str], command: str):
    assert main(["help", command]) == 0
    told = capsys.readouterr()
    assert told.out.startswith(f"usage: embedrock {command} ")
    for words in ([command, "--help"], [command, "-h"]):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 0
        assert capsys.readouterr() == told


def test_help_alone_is_the_bare_command(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    told = capsys.readouterr()
    assert main(["help"]) == 0
    assert capsys.readouterr() == told


def test_version(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"embedrock {er.__version__}\n"


# ---------------------------------------------------------------- near misses


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["imprt"], "import"),
        (["Info", "t.rock"], "info"),
        (["help", "verfy"], "verify"),
        (["import", "a.csv", "t.rock", "--memroy", "1G"], "--memory"),
        (["import", "a.csv", "t.rock", "--memroy=1G"], "--memory"),
        (["info", "t.rock", "--jsn"], "--json"),
        (["import", "a.csv", "t.rock", "--format", "cvs"], "csv"),
        (["import", "a.csv", "t.rock", "--rule", "adma"], "adam"),
        (["import", "a.csv", "t.rock", "--table-dtype", "float23"], "float32"),
        (["--verison"], "--version"),
    ],
)
def test_near_misses_on_the_command_line(capsys: pytest.CaptureFixture[str], words: list[str], meant: str):
    assert usage_error(capsys, *words).endswith(f" Did you mean {meant!r}?\n")


def test_a_reader_that_leaves_is_no_crash():
    program = (
        "from types import SimpleNamespace as Bag\n"
        "import embedrock.cli.main as cli\n"
        "talk = Bag(run=lambda arguments: [print('a line') for _ in range(10**6)])\n"
        "cli._parser = lambda: Bag(parse_args=lambda argv: talk)\n"
        "raise SystemExit(cli.main())"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "a line\n"
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == FAILED
    assert errors == ""


@pytest.mark.parametrize("words", [["xyzzy"], ["info", "t.rock", "--xyzzy"], ["import", "a", "b", "--format", "xyzzy"]])
def test_what_is_like_nothing(capsys: pytest.CaptureFixture[str], words: list[str]):
    told = usage_error(capsys, *words)
    assert words[-1] in told
    assert "Did you mean" not in told


@pytest.mark.parametrize(
    ("name", "words", "meant"),
    [
        ("a.csv", ["--ids", "usr"], "user"),
        ("a.csv", ["--ids", "user", "--vectors", "vv"], "v"),
        ("a.cvs", [], ".csv"),
        ("a.npz", ["--ids", "keyz"], "keys"),
        ("a.npz", ["--vectors", "wieght"], "weight"),
        ("a.parquet", ["--ids", "usr"], "user"),
        ("a.parquet", ["--ids", "user", "--vectors", "vectr"], "vector"),
        ("a.arrow", ["--ids", "usr"], "user"),
    ],
)
def test_near_misses_of_columns(capsys: pytest.CaptureFixture[str], name: str, words: list[str], meant: str):
    path, vectors = Path(name), np.zeros((3, 2), np.float32)
    if name.endswith((".csv", ".cvs")):
        path.write_text("user,v0,v1\n1,2,3\n")
    elif name.endswith(".npz"):
        np.savez(path, weight=vectors, keys=np.arange(3))
    else:
        arrow: Any = pytest.importorskip("pyarrow", reason="Parquet and Arrow need pyarrow")
        table = arrow.table({"user": arrow.array([1, 2, 3]), "vector": arrow.array(list(vectors))})
        if name.endswith(".arrow"):
            pytest.importorskip("pyarrow.feather").write_feather(table, name)
        else:
            pytest.importorskip("pyarrow.parquet").write_table(table, name)
    assert error(capsys, "import", name, "t.rock", *words).endswith(f" Did you mean {meant!r}?\n")
    assert not Path("t.rock").exists()


def test_nearest():
    assert nearest("IMPORT", ["info", "import"]) == "import"
    assert nearest("x", ["info", "import"]) is None
    assert did_you_mean("x", []) == ""


# ---------------------------------------------------------------- paths that are near a table


@pytest.mark.parametrize("command", ["info", "verify", "commits", "compact", "rollback", "export", "import"])
def test_a_path_near_a_table(capsys: pytest.CaptureFixture[str], command: str):
    table = made("data/users.rock").absolute()
    np.save("a.npy", np.zeros((1, 2), np.float32))
    more = {"rollback": ["1"], "export": ["b.npy"]}.get(command, [])

    def told(path: str) -> str:
        words = ["import", "a.npy", path, "--into"] if command == "import" else [command, path, *more]
        return error(capsys, *words)

    assert told("data").endswith(f"there is no table here. There is one in {table.parent}: {table}: 'data'\n")
    for inside in ("delta", "manifest", "manifest/00000000000000000001.json", "delta/none"):
        assert f"there is no table here. It lies inside of one: {table}" in told(f"data/users.rock/{inside}")
    assert f"Did you mean {table}?" in told("data/user.rock")
    assert f"There is one in {table.parent}: {table}" in told("data/something")
    assert "look for a typing error" in told("nowhere/at/all")
    Path("a.txt").write_text("words")
    assert "A table is a folder, and this is a file." in told("a.txt")


def test_many_tables_are_listed_in_part(capsys: pytest.CaptureFixture[str]):
    here = Path.cwd()
    for name in "abcd":
        made(f"{name}.rock")
    told = error(capsys, "info", ".")
    assert f"There are some in {here}: {here}/a.rock, {here}/b.rock, {here}/c.rock, ..." in told


def test_checkpoints_of_a_model(capsys: pytest.CaptureFixture[str]):
    folder = Path("ckpt")
    folder.mkdir()
    file = folder / "step-10-0123abcd.pt"
    file.write_bytes(b"weights")
    assert "It has checkpoints of a model, whose tables lie where its layers' path= says" in error(
        capsys, "info", "ckpt"
    )
    assert "This is a checkpoint of a model: load it with the model, by ert.load(" in error(capsys, "info", str(file))
    assert CHECKPOINT.fullmatch("step-10-0123abcd.weights.h5")


# ---------------------------------------------------------------- plurals


def test_format_count():
    assert [format_count(number, "row") for number in (0, 1, 2, 1000)] == ["0 rows", "1 row", "2 rows", "1,000 rows"]


def test_one_of_each_is_said_so(capsys: pytest.CaptureFixture[str]):
    np.savez("a.npz", vectors=np.zeros((2, 1), np.float32), ids=np.array([5, 5]))
    with er.Table(9, 1, path="t.rock") as table:
        table.assign([3], np.zeros((1, 1), np.float32))
        table.commit()
    Path("t.rock/delta/mine").touch()
    for words in (
        ["info", "t.rock"],
        ["verify", "t.rock"],
        ["export", "t.rock", "b.npy"],
        ["import", "a.npz", "i.rock"],
    ):
        assert main(words) == 0
    told = capsys.readouterr().out
    found = re.findall(r"\b1 (file|row|record|problem|commit|id|byte|step|float32 weight)(s?)\b", told)
    assert {noun for noun, _ in found} >= {"row", "record", "file", "id", "float32 weight"}
    assert not [noun for noun, plural in found if plural], told


def test_no_count_of_the_command_line_is_spelled_by_hand():
    """A number of things is written by `format_count`, which knows the plural."""
    folder = Path(cli.__file__).parents[1]
    nouns = "files|rows|records|problems|commits|words|lines|ids|steps|columns|numbers"
    by_hand = re.compile(rf"\{{[^{{}}]*\}} (?:{nouns})\b(?!/s)")
    found = [
        f"{file.relative_to(folder)}: {match[0]}"
        for part in ("cli", "terminal")
        for file in sorted((folder / part).rglob("*.py"))
        for match in by_hand.finditer(file.read_text())
    ]
    assert found == []
