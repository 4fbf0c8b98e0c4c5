"""Rules of tables that have made steps: replaced where somebody says so, never in silence."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er

IDS = np.arange(5)
GRADS = np.ones((5, 2), np.float32)


def trained(rule: er.Rule, steps: int = 3, **options: Any) -> er.Table:
    table = er.Table(50, 2, rule=rule, name="users", **options)
    for _ in range(steps):
        table.update(IDS, GRADS)
    return table


@pytest.mark.parametrize("place", [None, "users.rock"])
@pytest.mark.parametrize("new", [er.SGD(lr=0.5), er.RowwiseAdagrad(), None], ids=repr)
def test_state_is_lost_only_where_that_is_asked_for(new: er.Rule | None, place: str | None, tmp_path: Path):
    with trained(er.Adagrad(lr=0.1), path=place and tmp_path / place) as table:
        weights = table.lookup(IDS)
        with pytest.raises(
            er.ArgumentError,
            match=r"table 'users' cannot become .*: Adagrad\(.* has made 3 steps, and the state \(sum\) of 5 rows "
            r"would be lost. Pass reset_state=True to set_rule",
        ):
            table.set_rule(new)
        assert (table.rule, table.steps) == (er.Adagrad(lr=0.1), 3)
        np.testing.assert_array_equal(table.lookup(IDS), weights)
        table.set_rule(new, reset_state=True)
        assert (table.rule, table.steps) == (new, 0)
        np.testing.assert_array_equal(table.lookup(IDS), weights)
        if table.is_on_disk:
            table.commit()


def test_nothing_is_lost_without_steps_or_state_or_another_layout():
    table = trained(er.SGD(lr=0.5))
    table.set_rule(er.Adam())  # SGD keeps nothing for a row
    table.set_rule(er.Adagrad())  # no steps yet
    table.update(IDS, GRADS)
    table.set_rule(er.Adagrad(lr=0.5))
    assert table.steps == 1


@pytest.mark.parametrize("place", [None, "users.rock"])
def test_a_rule_without_steps_leaves_nothing_to_commit(place: str | None, tmp_path: Path):
    table = er.Table(50, 2, path=place and tmp_path / place)
    table.set_rule(er.Adam())
    assert not table.uncommitted  # no row is another, and no step was made
    table.update(IDS, GRADS)
    assert table.uncommitted == table.is_on_disk
    if table.is_on_disk:
        table.commit()
        assert er.open(tmp_path / "users.rock", mode="r").rule == er.Adam()
    table.close()


def test_a_copy_goes_on_by_the_same_rule():
    table = copy.deepcopy(trained(er.Adagrad()))
    with pytest.raises(er.ArgumentError, match="reset_state=True"):
        table.set_rule(er.Adam())
