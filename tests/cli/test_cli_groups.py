"""The command line looks after groups on disk, and after single tables of theirs: FOLDER#NAME."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import embedrock as er
from embedrock.cli.main import main

IDS = np.arange(50)


@pytest.fixture
def group(tmp_path: Path) -> str:
    """Return the path of a group of two tables, with three commits."""
    path = str(tmp_path / "m.rock")
    with er.Group(path=path, memory="1MiB") as made:
        for name, dim in (("users", 4), ("items", 3)):
            made.table(name, 1000, dim, rule=er.SGD(lr=0.1), init=er.Zeros())
        for step in range(3):
            made.update(dict.fromkeys(made, IDS), {name: np.ones((50, made[name].dim)) for name in made})
            made.commit(step=step)
    return path


def test_info_shows_members(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", group]) == 0
    text = capsys.readouterr().out
    assert "2, in 2 pools" in text
    assert "users  1,000            50    4  float32  SGD(lr=0.1)      3" in text
    assert main(["info", group, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in told["members"]] == ["users", "items"]
    assert told["rows_touched"] == 100
    assert main(["info", f"{group}#items", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dim"] == 3


def test_one_table_is_exported_and_imported(group: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "users.npz")
    assert main(["export", f"{group}#users", file]) == 0
    with er.Group(path=group, memory="1MiB") as made:
        made["users"].assign(IDS, np.zeros((50, 4)))
        made.commit()
    assert main(["import", file, f"{group}#users", "--into"]) == 0
    assert "m.rock#users" in capsys.readouterr().out
    for name in ("users", "new"):
        assert main(["import", file, f"{group}#{name}"]) == 1  # which made a folder of that name, in the table's way
        assert f"got a table of the group {group}. Pass --into" in capsys.readouterr().err
    with er.open(group, mode="r", kind=er.Group) as found:
        np.testing.assert_allclose(found["users"].lookup(IDS), -0.3, rtol=1e-6)
        assert found["items"].steps == 3
    ids = tmp_path / "ids.txt"
    ids.write_text("1\n2\n")
    assert main(["forget", f"{group}#items", str(ids)]) == 0
    with er.open(group, mode="r", kind=er.Group) as found:
        assert found["items"].stats()["rows_touched"] == 48
        assert found["users"].stats()["rows_touched"] == 50


def test_what_is_of_all_tables(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["verify"], ["commits"], ["compact"]):
        assert main([command[0], group, *command[1:]]) == 0
        assert main([command[0], f"{group}#users", *command[1:]]) == 1
        assert f"pass {group}, without #users" in capsys.readouterr().err
    assert main(["rollback", group, "3"]) == 0
    assert main(["verify", group]) == 0


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("{}", "holds a group of tables. Name one of them: {0}#users, {0}#items"),
        ("{}#user", "has no table 'user': it has 'users', 'items'. Did you mean 'users'?"),
        ("{}x#users", "there is no table here"),
    ],
)
def test_what_is_no_table(
    table: str, said: str, group: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", table.format(group), str(tmp_path / "out.npz")]) == 1
    assert said.format(group) in capsys.readouterr().err


def test_a_table_alone_has_no_members(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    er.Table(10, 4, path=tmp_path / "t").close()
    assert main(["info", f"{tmp_path / 't'}#users"]) == 1
    assert "holds a table alone, no group: leave #users out" in capsys.readouterr().err


def test_a_damaged_group_is_rescued(group: str) -> None:
    last = sorted(Path(group, "manifest").glob("*.json"))[-1]
    last.write_bytes(last.read_bytes()[:-5])
    assert main(["verify", group]) == 3
    assert main(["rollback", group, "2"]) == 0
    with er.open(group, mode="r", kind=er.Group) as found:
        assert found["users"].steps == found["items"].steps == 2


def test_a_group_is_copied_as_a_whole(group: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "copy")
    assert main(["copy", f"{group}#users", target]) == 1
    assert f"pass {group}, without #users" in capsys.readouterr().err
    with er.open(group):  # as a trainer has it
        assert main(["copy", group, target]) == 0
    told = capsys.readouterr().out
    assert "commit 3: " in told
    assert "0 written (0 B), 0 there before" in told
    assert "rows that the table forgets from now on stay in this copy until you copy again" in told
    assert main(["copy", group, target, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["commit"], again["linked"], again["written"], again["bytes"]) == (3, 0, 0, 0)
    with er.open(target, mode="r", kind=er.Group) as copied:
        np.testing.assert_allclose(copied["items"].lookup(IDS), -0.3, rtol=1e-6)
