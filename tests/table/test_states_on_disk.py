"""States of tables in RAM that go on on disk: to the bit, and in RAM for a part of the rows."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from same_tables import RULES, check_same
from slow import slow

ROWS, DIM, BATCH = 3000, 6, 40
FAST = RULES[5], RULES[-1]


def trained(rule: er.Rule, rows: int | None = ROWS, **options: Any) -> er.Table:
    table = er.Table(rows, DIM, rule=rule, seed=7, **options)
    train(table, 0)
    return table


def train(table: er.Table, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(30):
        table.update(rng.integers(0, ROWS, BATCH), rng.standard_normal((BATCH, DIM)).astype(np.float32))


@pytest.mark.parametrize("rule", [*FAST, *slow(*(rule for rule in RULES if rule not in FAST))], ids=repr)
@pytest.mark.parametrize("memory", ["40KiB", "64MiB"])
def test_a_state_goes_on_on_disk_to_the_bit(rule: er.Rule, memory: str, tmp_path: Path):
    ram = trained(rule)
    state = ram.state()
    with er.Table(ROWS, DIM, rule=rule, path=tmp_path / "t", memory=memory) as table:
        train(table, 5)  # what there is, is replaced
        before = copy.deepcopy(ram)
        table.commit(name="before")
        table.load_state(state)
        assert table.uncommitted
        assert table.spec.seed == 7
        for each in (table, ram):
            train(each, 1)
        check_same(table, ram)
        table.commit()
    with er.open(tmp_path / "t", memory=memory) as table:
        check_same(table, ram)
        np.testing.assert_array_equal(table.lookup(np.arange(ROWS)), ram.lookup(np.arange(ROWS)))
        for each in (table, ram):
            train(each, 2)
        check_same(table, ram)
        assert table.verify().problems == []
        table.load_state(before.state())
        check_same(table, before)
        table.commit()


def test_a_state_that_is_refused_leaves_all_as_it_is(tmp_path: Path):
    ram = trained(er.Adam(lr=0.1), rows=None)
    state = ram.state()
    with er.Table(None, DIM, rule=er.Adam(lr=0.1), path=tmp_path / "t", memory="40KiB") as table:
        train(table, 5)
        table.commit()
        expected = table.export()
        repeated = {**state, "ids": np.concatenate([state["ids"][:-1], state["ids"][:1]])}
        for wrong, problem in (
            (repeated, "must be 1-D and not repeat"),
            ({**state, "records": state["records"][:-1]}, "must be uint8"),
            ({**state, "dim": 3}, "must have dim"),
            (trained(er.SGD(), rows=None).state(), "must be that of its rule Adam"),
        ):
            with pytest.raises(er.ArgumentError, match=problem):
                table.load_state(wrong)
        for got, wanted in zip(table.export(), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)
        assert not table.uncommitted
    with er.open(tmp_path / "t", mode="r") as reader, pytest.raises(er.ReadOnlyTableError):
        reader.load_state(state)


@pytest.mark.parametrize("rule", FAST, ids=repr)
def test_tables_take_over_each_other(rule: er.Rule, tmp_path: Path):
    ram = trained(rule)
    with er.Table(ROWS, DIM, rule=rule, path=tmp_path / "t", memory="40KiB") as table:
        table.load_state(ram)
        check_same(table, ram)
        train(table, 1)
        train(ram, 1)
        number = table.commit()
        train(table, 2)
        table.commit(wait=False)
        back = er.Table(ROWS, DIM)  # which gets the rule
        with er.open(tmp_path / "t", mode="r", at=number) as reader:
            back.load_state(reader)
        check_same(back, ram)
        with er.Table(ROWS, DIM, path=tmp_path / "other", memory="64KiB") as other:
            other.load_state(table)
            train(ram, 2)
            check_same(other, ram)
            other.load_state(other)
            table.load_state(other)
            check_same(table, ram)
            other.commit()
        with pytest.raises(er.ArgumentError, match=f"must have rows {ROWS}: got {ROWS + 1}"):
            table.load_state(er.Table(ROWS + 1, DIM))
        with pytest.raises(er.UnsupportedError, match=r"load_state\(table\) of a table in RAM takes its rows over"):
            table.state()
        table.commit()


def test_tables_that_take_over_each_other_at_once_do_not_wait_for_ever():
    one, two = trained(FAST[0]), trained(FAST[0])
    threads = [
        threading.Thread(target=lambda a=a, b=b: [a.load_state(b) for _ in range(20)])
        for a, b in ((one, two), (two, one))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    check_same(one, two)
