"""What errors of tables on disk and in RAM say to do, done: to the state that the error left. No row is lost."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.cli.main import main
from embedrock.errors import CorruptTableError, TableFileError, TableLockedError

ONES = np.ones((1, 4), np.float32)


def trained(path: Path, **options: Any) -> np.ndarray:
    """Make a table of three commits, whose rows 0 to 2 were stepped; return these rows."""
    with er.Table(100, 4, path=path, rule=er.SGD(lr=0.5), keep=5, **options) as table:
        for row in range(3):
            table.update([row], ONES)
            table.commit()
        return table.lookup([0, 1, 2])


def pasted(text: str, pattern: str, **names: Any) -> Any:
    """Return what the code in a text gives that a pattern finds."""
    found = re.search(pattern, text)
    assert found is not None, text
    return eval(found[0], {"np": np, "er": er, **names})


def run(text: str, **names: str) -> int:
    """Run the command in a text, with what stands for something filled in."""
    found = re.search(r"`embedrock (rollback [^`]*)`", text)
    assert found is not None, text
    return main([names.get(word, word) for word in shlex.split(found[1])])


# ---------------------------------------------------------------- folders that have something


def a_table(path: Path) -> None:
    trained(path)


def a_group(path: Path) -> None:
    with er.Group(path=path) as group:
        group.table("users", rows=100, dim=4)
        group.commit()


def a_vocabulary(path: Path) -> None:
    with er.Vocabulary(path) as words:
        words.add(["red"])
        words.commit()


def a_table_in_parts(path: Path) -> None:
    path.mkdir()
    for rank in range(2):
        trained(path / f"shard-{rank}-of-2", seed=0)
    (path / "SHARDED").write_text('{"format": 1, "ranks": 2}')


HELD = {"table": a_table, "group": a_group, "vocabulary": a_vocabulary, "parts": a_table_in_parts}


def by_torch(path: Path) -> Any:
    pytest.importorskip("torch")
    import embedrock.torch as ert

    return ert.Embedding(100, 4, path=path, name="users")


def by_keras(path: Path) -> Any:
    pytest.importorskip("keras")
    import embedrock.keras as erk

    layer = erk.Embedding(100, 4, path=path)
    layer.build((None,))
    return layer


OPENERS: dict[str, Callable[[Path], Any]] = {
    "er.Table": lambda path: er.Table(100, 4, path=path),
    "er.Table to read": lambda path: er.Table(100, 4, path=path, mode="r"),
    "er.open": er.open,
    "er.open to read": lambda path: er.open(path, mode="r"),
    "er.Group": lambda path: er.Group(path=path),
    "er.Vocabulary": er.Vocabulary,
    "er.Vocabulary to read": lambda path: er.Vocabulary(path, mode="r"),
    "torch": by_torch,
    "keras": by_keras,
}


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("held", HELD)
def test_a_folder_of_ours_says_what_opens_it(held: str, opener: str, tmp_path: Path):
    path = tmp_path / "it's here"
    HELD[held](path)
    before = {file: file.read_bytes() for file in path.glob("**/*") if file.is_file() and file.name != "LOCK"}
    try:
        opened = OPENERS[opener](path)
    except TableFileError as error:
        text = str(error)
        assert "empty it" not in text
        if "er.open(" in text or "er.Vocabulary(" in text:
            made = pasted(text, r"er\.(?:open|Vocabulary)\((?:'[^']*'|\"[^\"]*\")(?:, mode=\"r\")?\)")
            assert type(made).__name__.lower() == held.replace("parts", "table")
            made.close()
        else:
            raise AssertionError(text) from error
    else:
        getattr(opened, "table", opened).close() if opener in ("torch", "keras") else opened.close()
    assert {file: file.read_bytes() for file in before} == before


# ---------------------------------------------------------------- damage


def test_a_commit_that_is_damaged(tmp_path: Path):
    path = tmp_path / "users of today.rock"
    rows = trained(path)
    file = path / "manifest/0000000003.json"
    file.write_bytes(file.read_bytes()[:-9])
    for open_it in (er.open, lambda path: er.open(path, mode="r")):
        with pytest.raises(CorruptTableError, match="the newest whole commit is 2") as caught:
            open_it(path)
    with pasted(str(caught.value), r"er\.open\(.*?at=2\)") as table:
        assert (table.lookup([0, 1]) == rows[:2]).all()
    assert run(str(caught.value)) == 0
    with er.open(path) as table:
        assert (table.lookup([0, 1]) == rows[:2]).all()
        table.update([2], ONES)
        table.commit()


def test_a_record_that_is_damaged(tmp_path: Path):
    path = tmp_path / "users.rock"
    rows = trained(path)
    file = max((path / "delta").iterdir())
    data = bytearray(file.read_bytes())
    data[4096 + 5] ^= 255
    file.write_bytes(data)
    with er.open(path) as table, pytest.raises(CorruptTableError, match="do not fit their checksums") as caught:
        table.lookup([2])
    assert main(["verify", str(path)]) == 3
    with pasted(str(caught.value), r"er\.open\(path, .*?at=N\)", path=path, N=2) as table:
        assert (table.lookup([0, 1]) == rows[:2]).all()
    assert run(str(caught.value), PATH=str(path), N="2") == 0
    with er.open(path) as table:
        assert (table.lookup([0, 1]) == rows[:2]).all()
        assert table.lookup([2]).shape == (1, 4)


# ---------------------------------------------------------------- one writer


@pytest.mark.parametrize("remedy", ["go on", "close"])
def test_a_path_that_is_open_already(remedy: str, tmp_path: Path):
    path = tmp_path / "users.rock"
    table = er.Table(100, 4, path=path, rule=er.SGD(lr=0.5))
    table.update([1], ONES)
    row = table.lookup([1])
    with pytest.raises(TableLockedError) as caught:
        er.open(path)
    text = str(caught.value)
    if remedy == "go on":
        assert pasted(text, r"er\.opened\([^)]*\)(?=, or)") is table
    else:
        for code in re.findall(r"er\.opened\([^)]*\)\.commit\(\)|er\.close\([^)]*\)", text):
            eval(code, {"er": er})
        table = er.open(path)
    assert (table.lookup([1]) == row).all()
    table.commit()
    table.close()
    with pasted(f"er.open(path, {re.findall('mode=.r.', text)[0]})", "er.*", path=path) as reader:
        assert reader.rows == 100


# ---------------------------------------------------------------- another table than was asked for


def test_more_rows_than_a_table_has(tmp_path: Path):
    path = tmp_path / "users.rock"
    rows = trained(path)
    with pytest.raises(TableFileError, match="holds another table") as caught:
        er.Table(1000, 4, path=path)
    with er.open(path) as table:
        pasted(str(caught.value), r"table\.grow\(1000\)", table=table)
        table.commit()
    with er.Table(1000, 4, path=path) as table:
        assert (table.lookup([0, 1, 2]) == rows).all()


def test_another_admission(tmp_path: Path):
    path = tmp_path / "users.rock"
    made: dict[str, Any] = {"rule": er.SGD(lr=0.5)}
    with er.Table(None, 4, path=path, admission=er.Admission(min_count=2), **made) as table:
        for _ in range(3):
            table.update([7, 2**60 + 1], np.ones((2, 4)))
        rows = table.lookup([7, 2**60 + 1])
        table.commit()
    with pytest.raises(er.ArgumentError, match="by which it has counted ids") as caught:
        er.Table(None, 4, path=path, admission=er.Admission(min_count=3), **made)
    new = er.Table(None, 4, admission=er.Admission(min_count=3), **made)
    pasted(str(caught.value), r"table\.assign\(.*\)(?=\.)", table=new, path=path)
    assert (new.lookup([7, 2**60 + 1]) == rows).all()
    with er.open(path) as table:
        assert (table.lookup([7, 2**60 + 1]) == rows).all()


def test_a_group_where_a_table_is(tmp_path: Path):
    path = tmp_path / "users.rock"
    rows = trained(path, seed=0)
    with pytest.raises(TableFileError, match="holds a table alone") as caught:
        er.Group(path=path)
    with pasted(str(caught.value), r"er\.open\('[^']*'\)") as table:
        member = er.Group().table("users", rows=100, dim=4, rule=er.SGD(lr=0.5), seed=0)
        pasted(str(caught.value), r"load_state\(table\)", load_state=member.load_state, table=table)
    assert (member.lookup([0, 1, 2]) == rows).all()


def test_a_state_of_another_rule():
    table = er.Table(100, 4, rule=er.Adam(), seed=0)
    table.update([1], ONES)
    state, rows = table.state(), table.lookup([1])
    other = er.Table(100, 4, rule=er.SGD(lr=0.5), seed=0)
    with pytest.raises(er.ArgumentError, match="must be that of its rule") as caught:
        other.load_state(state)
    pasted(str(caught.value), r"set_rule\(.*?\)", set_rule=other.set_rule)
    other.load_state(state)
    assert (other.lookup([1]) == rows).all()
    assert other.rule == er.Adam()


def test_at_of_a_writer(tmp_path: Path):
    path = tmp_path / "users.rock"
    rows = trained(path)
    with pytest.raises(er.ArgumentError, match='goes with mode="r"') as caught:
        er.open(path, at=2)
    with er.open(path) as table:
        pasted(str(caught.value), r"rollback\(2\)", rollback=table.rollback)
        assert (table.lookup([0, 1]) == rows[:2]).all()
        assert 3 in [commit["commit"] for commit in table.commits()]  # which is not lost


# ---------------------------------------------------------------- numbers that are said to be enough


def test_memory_that_is_enough(tmp_path: Path):
    with pytest.raises(er.MemoryBudgetError, match="its cache must hold one") as caught:
        er.Table(100, 4, path=tmp_path / "a", memory=1)
    least = int(re.findall(r"Raise memory= to (\d+) bytes", str(caught.value))[0])
    with er.Table(100, 4, path=tmp_path / "a", memory=least, rule=er.SGD(lr=0.5)) as table:
        with pytest.raises(er.CacheTooSmallError) as caught:
            table.update(np.arange(50), np.ones((50, 4)))
        assert not table.steps
    least = int(re.findall(r"memory=(\d+) \(", str(caught.value))[0])
    with er.open(tmp_path / "a", memory=least) as table:
        table.update(np.arange(50), np.ones((50, 4)))
        table.commit()


def test_out_of_a_lookup():
    table = er.Table(100, 4)
    with pytest.raises(er.ArgumentError) as caught:
        table.lookup([1, 2], out=np.empty((3, 4)))
    out = pasted(str(caught.value), r"np\.empty\(.*?np\.float32\)")
    assert table.lookup([1, 2], out=out) is out
