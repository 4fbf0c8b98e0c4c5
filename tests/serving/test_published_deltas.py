"""Deltas over published tables, served: subscribers read all other rows from the base, where it lies for them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.cli.main import main
from published_files import NAME, base_of, floats, table_of, written

ROWS, DIM = 900, 16
BASE = floats("BF16", ROWS, DIM)


def trained(folder: Path, **options: Any) -> er.Table:
    table = table_of(written(BASE, folder / "base"), path=folder / "ngrams.rock", rule=er.SGD(lr=1.0), **options)
    step(table, [3, 899], 1)
    return table


def step(table: er.Table, ids: list[int], number: int) -> None:
    table.update(ids, np.ones((len(ids), DIM), np.float32))
    table.commit(step=number)


def check(subscriber: er.Subscriber, rows: np.ndarray) -> None:
    with subscriber.step() as served:
        np.testing.assert_array_equal(served["ngrams"].lookup(np.arange(ROWS)), rows)
        assert served["ngrams"].contains([3, 5]).all()


@pytest.mark.parametrize("memory", ["map", "1MiB"])
def test_a_subscriber_reads_the_base_in_place(memory: str, tmp_path: Path):
    with trained(tmp_path) as table:
        assert er.publish(table, tmp_path / "served").rows == 2
        with er.Subscriber(tmp_path / "served", memory) as subscriber:
            check(subscriber, table.lookup(np.arange(ROWS)))
            step(table, [5, 3], 2)
            table.forget([899])  # it is that of the base again
            table.commit(step=3)
            assert er.publish(table, tmp_path / "served").gone == 1
            subscriber.refresh()
            rows = table.lookup(np.arange(ROWS))
            np.testing.assert_array_equal(rows[899], BASE.rows[899])
            check(subscriber, rows)
    files = [file for file in (tmp_path / "served").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 40_000


@pytest.mark.parametrize("dtype", ["int8", "int4", "bfloat16"])
def test_rows_of_the_base_are_not_rounded(dtype: str, tmp_path: Path):
    with trained(tmp_path) as table:
        er.publish(table, tmp_path / "served", dtype=dtype)
        rows = table.lookup(np.arange(ROWS))
    with er.Subscriber(tmp_path / "served") as subscriber, subscriber.step() as served:
        found = served["ngrams"].lookup(np.arange(ROWS))
    others = np.setdiff1d(np.arange(ROWS), [3, 899])
    np.testing.assert_array_equal(found[others], BASE.rows[others])
    np.testing.assert_allclose(found[[3, 899]], rows[[3, 899]], atol=0.3)
    assert (found[[3, 899]] != rows[[3, 899]]).any()


def test_a_subscriber_with_the_base_in_another_folder(tmp_path: Path):
    with trained(tmp_path) as table:
        er.publish(table, tmp_path / "served")
        rows = table.lookup(np.arange(ROWS))
    shutil.move(tmp_path / "base", tmp_path / "moved")
    with er.Subscriber(tmp_path / "served") as subscriber:
        with pytest.raises(er.TableFileError) as caught, subscriber.step():
            pass
        assert f"pass it: init=er.FromSafetensors(folder, {NAME!r})." in str(caught.value)
    moved = base_of(tmp_path / "moved")
    with er.Subscriber(tmp_path / "served", init=moved) as subscriber:
        check(subscriber, rows)
        with er.open(tmp_path / "ngrams.rock", init=moved) as table:
            step(table, [7], 2)
            er.publish(table, tmp_path / "served")
            subscriber.refresh()
            check(subscriber, table.lookup(np.arange(ROWS)))


def test_another_base_is_not_taken(tmp_path: Path):
    with trained(tmp_path) as table:
        er.publish(table, tmp_path / "served")
    shutil.rmtree(tmp_path / "base")
    other = written(floats("BF16", ROWS, DIM, seed=1), tmp_path / "other")
    no_step = pytest.raises(er.TableFileError, match="no whole step has arrived")
    with er.Subscriber(tmp_path / "served", init=other) as subscriber, no_step, subscriber.step():
        pass


def test_a_reader_with_the_base_in_another_folder_publishes(tmp_path: Path):
    trained(tmp_path).close()
    shutil.move(tmp_path / "base", tmp_path / "moved")
    with er.open(tmp_path / "ngrams.rock", mode="r", init=base_of(tmp_path / "moved")) as table:
        assert er.publish(table, tmp_path / "served").rows == 2
        rows = table.lookup(np.arange(ROWS))
    with er.Subscriber(tmp_path / "served", init=base_of(tmp_path / "moved")) as subscriber:
        check(subscriber, rows)


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with trained(tmp_path) as table:
        rows = table.lookup(np.arange(ROWS))
    delta = str(tmp_path / "ngrams.rock")
    assert main(["info", delta]) == 0
    assert f"tensor={NAME}" in capsys.readouterr().out
    assert main(["verify", delta]) == 0
    assert main(["compact", delta]) == 0
    assert main(["export", delta, str(tmp_path / "own.npy")]) == 0
    assert main(["export", delta, str(tmp_path / "all.npy"), "--all"]) == 0
    assert np.load(tmp_path / "own.ids.npy").tolist() == [3, 899]
    np.testing.assert_array_equal(np.load(tmp_path / "own.npy"), rows[[3, 899]])
    np.testing.assert_array_equal(np.load(tmp_path / "all.npy"), rows)
    assert main(["publish", delta, str(tmp_path / "served")]) == 0
    with er.Subscriber(tmp_path / "served") as subscriber:
        check(subscriber, rows)
