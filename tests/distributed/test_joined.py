"""A table in parts read as one: `er.open(folder, mode="r")` and what the command line says of it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.cli.main import main
from embedrock.distributed.commits import ShardFolders, part_to_open
from embedrock.distributed.owners import Shard
from embedrock.table.table import rows_of
from lifecycles import whole_of

DIM, ROWS = 4, 3000


class Together:
    """A table in RAM, and parts of one on disk that are stepped alike.

    Args:
        path: of the parts.
        ranks: how many.
        rule: of all.
        seed: of all.
        policies: of all.
    """

    def __init__(self, path: Path, ranks: int, rule: er.Rule, seed: int = 3, **policies: Any) -> None:
        same: dict[str, Any] = {"seed": seed, "rule": rule, "init": er.Normal(std=0.1), **policies}
        self.path = str(path)
        self.parts = [
            er.Table(None, DIM, path=part_to_open(self.path, rank, ranks, "users"), memory="2MiB", **same)
            for rank in range(ranks)
        ]
        self.alone = er.Table(None, DIM, **same)

    def step(self, step: int) -> None:
        draw = np.random.default_rng(step)
        ids, grads = draw.integers(0, 9000, ROWS), draw.normal(size=(ROWS, DIM)).astype(np.float32)
        self.alone.update(ids, grads)
        for rank, part in enumerate(self.parts):
            own = Shard(rank, len(self.parts), segments=self.alone.spec.segments).owns(ids)
            part.update(ids[own], grads[own])

    def commit(self, step: int, ranks: slice = slice(None)) -> None:
        for part in self.parts[ranks]:
            part.commit(step=step)

    def close(self) -> None:
        for part in self.parts:
            part.close()


@pytest.mark.parametrize("rule", [er.Adam(lr=0.1), er.AdamW(lr=0.1, dense=True)])
@pytest.mark.parametrize("memory", ["300KiB", None])
def test_parts_read_as_the_table_that_they_are(tmp_path: Path, rule: er.Rule, memory: str | None) -> None:
    both = Together(tmp_path / "users.rock", 3, rule)
    both.step(0)
    both.commit(1)
    first = both.alone.export()
    both.step(1)
    both.commit(2)
    with er.open(both.path, mode="r", memory=memory) as table:
        last = both.alone.export()
        every = np.arange(9600).reshape(20, 480)
        np.testing.assert_array_equal(table.lookup(every), both.alone.lookup(every))
        np.testing.assert_array_equal(table.read(table.plan(every)), both.alone.lookup(every))
        for found, expected in zip(table.export(), last, strict=True):
            np.testing.assert_array_equal(found, expected)
        assert (table.steps, table.last_step, table.stats()["rows_touched"]) == (2, 2, len(last[0]))
        assert [commit["step"] for commit in table.commits()] == [1, 2]
        copied = er.Table(None, DIM, rule=rule, init=er.Normal(std=0.1))
        copied.load_state(table)
        assert copied.steps == 2
        np.testing.assert_array_equal(copied.export()[1], last[1])
        assert table.verify().newest_good == table.last_commit
        with pytest.raises(er.ReadOnlyTableError, match="in 3 parts, was opened with mode"):
            table.commit()
        earlier = table.commits()[0]["commit"]
    with pytest.raises(er.ClosedTableError, match=r'is closed.* Open it again, er\.open\(.*, mode="r"\)'):
        table.lookup([1])
    with er.open(both.path, mode="r", at=earlier) as table:
        np.testing.assert_array_equal(table.export()[1], first[1])
    both.close()


def test_a_snapshot_of_parts_moves_when_it_is_told_to(tmp_path: Path) -> None:
    both = Together(tmp_path / "users.rock", 2, er.Adam(lr=0.1))
    both.step(0)
    both.commit(1)
    with er.open(both.path, mode="r") as table:
        first = both.alone.export()
        both.step(1)
        both.commit(2, slice(1))  # which one part alone has
        assert not table.refresh()
        both.commit(2, slice(1, None))
        np.testing.assert_array_equal(table.export()[1], first[1])
        assert table.refresh()
        assert not table.refresh()
        for found, expected in zip(table.export(), both.alone.export(), strict=True):
            np.testing.assert_array_equal(found, expected)
        assert (table.steps, table.last_step, table.last_commit) == (2, 2, table.commits()[-1]["commit"])
        both.close()
        shutil.rmtree(both.path)
        with pytest.raises(er.TableFileError, match=r"no table in parts here any more\. Open it anew"):
            table.refresh()
        other = Together(tmp_path / "users.rock", 2, er.Adam(lr=0.1), seed=4)
        other.step(0)
        other.commit(3)
        with pytest.raises(er.TableFileError, match="holds another table: seed differ"):
            table.refresh()
        assert (table.steps, len(table.lookup([1, 2]))) == (2, 2)
        other.close()
    with pytest.raises(er.ClosedTableError):
        table.refresh()


@pytest.mark.filterwarnings("ignore::embedrock.UncommittedWarning")
def test_a_commit_that_a_part_lacks_does_not_exist(tmp_path: Path) -> None:
    both = Together(tmp_path / "users.rock", 2, er.Adam(lr=0.1))
    both.step(0)
    both.commit(1)
    expected = both.alone.export()[1]
    both.step(1)
    both.commit(2, slice(1))
    with er.open(both.path, mode="r") as table:
        np.testing.assert_array_equal(table.export()[1], expected)
        assert [commit["step"] for commit in table.commits()] == [1]
    with pytest.raises(er.ArgumentError, match=r"has no commit 7 that all of its 2 parts have: it has 1,"):
        er.open(both.path, mode="r", at=7)
    with pytest.raises(er.TableFileError, match=r"in 2 parts, each of which one rank writes.* mode=\"r\""):
        er.open(both.path)
    both.parts[0].rollback(1)  # after which the other commit is no more
    both.step(2)
    both.commit(2, slice(1, 2))
    with er.open(both.path, mode="r") as table:
        np.testing.assert_array_equal(table.export()[1], expected)
    both.close()


def test_a_table_whose_ranks_were_ended_as_they_made_it_is_told(tmp_path: Path) -> None:
    ShardFolders(str(tmp_path), 2).publish()
    er.Table(10, 2, path=tmp_path / "shard-1-of-2").close()
    with pytest.raises(er.ArgumentError, match=r"must have a commit in each of them: got none in shard-0-of-2\. Where"):
        er.open(tmp_path, mode="r")


def test_commands_see_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = Together(tmp_path / "users.rock", 2, er.Adam(lr=0.1))
    both.step(0)
    both.commit(1)
    both.close()
    ids, rows = both.alone.export()

    def told(*words: str) -> Any:
        assert main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    info = told("info", both.path)
    assert (info["parts"], info["rows_touched"], info["steps"], info["commit"]["step"]) == (2, len(ids), 1, 1)
    assert told("commits", both.path)["commits"][-1]["rows"] == len(ids)
    made = told("export", both.path, str(tmp_path / "users.npz"))
    assert made["rows"] == len(ids)
    exported = np.load(tmp_path / "users.npz")
    order = np.argsort(exported["ids"])
    np.testing.assert_array_equal(exported["vectors"][order], rows)
    assert told("verify", both.path)["newest_good"] == info["commit"]["commit"]

    (log,) = Path(ShardFolders(both.path, 2).part(1), "delta").iterdir()
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 1
    log.write_bytes(content)
    assert main(["verify", both.path, "--json"]) == 3
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["newest_good"] == 0
    assert os.path.join("shard-1-of-2", "delta") in verdict["problems"][0]


def test_parts_know_which_ids_have_rows(tmp_path: Path) -> None:
    both, every = Together(tmp_path / "users.rock", 3, er.Adam(lr=0.1)), np.arange(-5, 9600)
    both.step(0)
    both.commit(1)
    there = np.isin(every, both.alone.export()[0])
    rows = np.where(there[:, None], both.alone.lookup(every), np.float32(0.25))
    with er.open(both.path, mode="r", missing=[0.25] * DIM) as table:
        np.testing.assert_array_equal(table.contains(every), there)
        assert (len(table), -5 in table, every[there][0] in table) == (there.sum(), False, True)
        np.testing.assert_array_equal(table.lookup(every), rows)
        np.testing.assert_array_equal(table.read(table.plan(every)), rows)
        np.testing.assert_array_equal(table.lookup(every, missing="first"), both.alone.lookup(every))
        with pytest.raises(er.IdError, match=r"in 3 parts, must have rows, .*: 1 id without one, \[-5\]"):
            table.lookup([-5, *every[there][:9]], missing="raise")
    with pytest.raises(er.ArgumentError, match=r"must be a row of shape \(4,\)"):
        er.open(both.path, mode="r", missing=[0.25])
    both.close()


COUNTS = ("admitted", "evicted", "gradients_dropped", "pending", "rows_touched")


@pytest.mark.parametrize("sketch", [None, "64KiB"])
def test_parts_whose_rows_come_and_go_are_one_table(tmp_path: Path, sketch: str | None) -> None:
    policies = {"admission": er.Admission(2, sketch=sketch, default="zeros"), "eviction": er.Eviction(max_rows=1500)}
    both = Together(tmp_path / "users.rock", 3, er.Adam(lr=0.1), segments=None, **policies)
    both.step(0)
    both.commit(1)
    first = both.alone.export()
    for step in range(1, 4):
        both.step(step)
    both.commit(4)
    both.close()
    every = np.arange(9600)
    with er.open(both.path, mode="r") as table:
        np.testing.assert_array_equal(table.lookup(every), both.alone.lookup(every))
        found, expected = table.stats(), both.alone.stats()
        assert {name: found[name] for name in COUNTS} == {name: expected[name] for name in COUNTS}
        assert found["sketch_error"] == pytest.approx(expected["sketch_error"], rel=0.5)
        mirror = dict(zip(*map(np.ndarray.tolist, first), strict=True))
        for ids, rows, gone in table.changes(since=table.commits()[0]["commit"]):
            mirror |= dict(zip(ids.tolist(), rows.tolist(), strict=True))
            for each in gone.tolist():
                mirror.pop(each, None)
        ids, rows = both.alone.export()
        assert mirror == dict(zip(ids.tolist(), rows.tolist(), strict=True))
        # It is trained on as one table, with all that the parts knew.
        one = er.Table(None, DIM, rule=er.Adam(lr=0.1), init=er.Normal(std=0.1), segments=256, **policies)
        one.load_state(table)
        other = er.Table(None, DIM, rule=er.Adam(lr=0.1), init=er.Normal(std=0.1), **policies)
        with pytest.raises(er.ArgumentError, match=r"come and go in 1 segment: got 256\. Make .* with segments=256"):
            other.load_state(table)
    draw = np.random.default_rng(9)
    for _ in range(3):
        ids, grads = draw.integers(0, 9000, ROWS), draw.normal(size=(ROWS, DIM)).astype(np.float32)
        one.update(ids, grads)
        both.alone.update(ids, grads)
    for ours, theirs in zip(one.export(), both.alone.export(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert whole_of([rows_of(one).lifecycle.state()]) == whole_of([rows_of(both.alone).lifecycle.state()])  # pyright: ignore[reportOptionalMemberAccess]
