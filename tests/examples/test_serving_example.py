"""The example that serves while it trains: its carrier, its indexes, and all of it with kills."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import embedrock as er
import serving
from common import DataError
from serving import INDEXES, IndexInStep, carry, files_in

DIM = 4


def table_at(folder: Path) -> er.Table:
    return er.Table(rows=None, dim=DIM, path=folder / "items.rock", rule=er.SGD(lr=0.1), init=er.Zeros())


def trained(table: er.Table, ids: list[int], seed: int) -> None:
    table.update(ids, np.random.default_rng(seed).normal(size=(len(ids), DIM)))
    table.commit()


def assert_in_step(items: IndexInStep, step: er.ServedStep) -> None:
    items.follow(step)
    ids, rows = step["items"].export()
    assert len(items.index) == len(ids)
    np.testing.assert_array_equal(items.index.rows(ids), rows)
    best = ids[np.argsort(-(rows @ rows.T), axis=1, kind="stable")[:, 0]]
    np.testing.assert_array_equal(items.index.search(rows, 1)[:, 0], best)


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_follows_steps_forgets_and_other_chains(name: str, tmp_path: Path):
    if name != "exact":
        pytest.importorskip(name)
    items = IndexInStep(INDEXES[name], "items")
    table, folder = table_at(tmp_path), tmp_path / "served"
    trained(table, [1, 2, 3, 40], seed=1)
    er.publish(table, folder, dtype="int8")
    with er.Subscriber(folder) as served:
        for number, ids in enumerate([[2, 5], [6], [1, 7, 8]]):
            with served.step() as step:
                assert_in_step(items, step)
            trained(table, ids, seed=2 + number)
            er.publish(table, folder, dtype="int8")
            assert served.refresh()
        with served.step() as step:
            assert_in_step(items, step)
        assert (items.built, items.updated) == (1, 3)

        table.forget([7])  # whose id leaves the lists, too
        table.commit()
        er.publish(table, folder, dtype="int8")
        assert served.refresh()
        with served.step() as step:
            assert_in_step(items, step)
            assert 7 not in items.index.search(np.ones((1, DIM), np.float32), 9)
        assert (items.built, items.updated) == (2, 3)

        table.close()
        for part in (folder, tmp_path / "items.rock"):  # all of it anew, with the same numbers
            shutil.rmtree(part)
        table = table_at(tmp_path)
        for number in range(7):
            trained(table, [100 + number], seed=number)
            er.publish(table, folder, dtype="int8")
        assert served.refresh()
        with served.step() as step:
            assert step.number > (items.number or 0)
            assert_in_step(items, step)
        assert (items.built, items.updated) == (3, 3)


def test_an_index_that_failed_half_way_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    items, table, folder = IndexInStep(INDEXES["exact"], "items"), table_at(tmp_path), tmp_path / "served"
    trained(table, [1, 2], seed=1)
    er.publish(table, folder)
    with er.Subscriber(folder) as served:
        with served.step() as step:
            items.follow(step)
        trained(table, [2, 3], seed=2)
        er.publish(table, folder)
        served.refresh()
        with monkeypatch.context() as patch:
            patch.setattr(serving.ExactIndex, "add", lambda *_: 1 / 0)
            with served.step() as step, pytest.raises(ZeroDivisionError):
                items.follow(step)
        with served.step() as step:
            assert_in_step(items, step)
    assert items.built == 2


def test_the_carrier_copies_again_what_has_grown(tmp_path: Path):
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "base").mkdir(parents=True)
    (here / "base" / "a").write_text("half")
    (here / "b").write_text("b")
    carry(here, there)
    (here / "base" / "a").write_text("half and half")
    (here / "b").unlink()
    carry(here, there)
    assert files_in(here) == files_in(there)
    assert (there / "base" / "a").read_text() == "half and half"
    assert not (there / "b").exists()


def test_an_index_that_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(DataError, match=r"--index faiss needs a package: pip install faiss-cpu"):
        serving.main(["--index", "faiss"])


@pytest.mark.slow
@pytest.mark.parametrize("with_log", [False, True], ids=["planted", "log"])
def test_all_of_it_with_kills(tmp_path: Path, with_log: bool):
    pytest.importorskip("torch")
    words = ["--steps", "120", "--users", "2k", "--items", "500", "--batch-size", "128", "--dim", "8", "--every", "0.2"]
    if with_log:
        random = np.random.default_rng(0)
        lines = [f"u{user}\ti{item}\n" for user, item in random.integers(0, 300, (3000, 2))]
        (tmp_path / "log.tsv").write_text("".join(lines))
        words += ["--data", str(tmp_path / "log.tsv")]
    program = Path(serving.__file__)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    made = subprocess.run(
        [sys.executable, program, *words, "--kills", "1"], capture_output=True, text=True, timeout=500, env=environment
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.count("killed ") == 1
    for text in ("training step 120; made of all rows", "items have left: no search finds them", "100.0% of the best"):
        assert text in made.stdout
    number = re.search(r"the rows of published step (\d+),", made.stdout)
    assert number is not None
    assert f"newest   published step {number[1]}, training step 120\n" in made.stdout
    assert list(tmp_path.glob("tmp*")) == []
