"""What a small batch costs in Python, which no kernel makes up for: functions called, as time differs from run to run.

Each bound is what was reached, and a tenth. Whoever comes to pass one looks for work that is done twice.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from python_calls import least_calls

IDS = np.random.default_rng(0).integers(0, 1000, 32)
UNIQUE = np.unique(IDS)
GRADS = np.ones((32, 16), np.float32)
VERBS: dict[str, Callable[[er.Table], Any]] = {
    "update": lambda table: table.update(IDS, GRADS),
    "lookup": lambda table: table.lookup(IDS),
    "assign": lambda table: table.assign(UNIQUE, GRADS[: len(UNIQUE)]),
    "step": lambda table: table.step(table.sum(table.plan(IDS), GRADS)),
}


@pytest.mark.parametrize(
    ("verb", "on_disk", "most"),
    [
        ("update", False, 100),
        ("update", True, 165),
        ("lookup", False, 23),
        ("lookup", True, 26),
        ("assign", False, 95),
        ("assign", True, 155),
        ("step", False, 111),
        ("step", True, 170),
    ],
)
def test_a_warm_call_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, on_disk: bool, most: int):
    monkeypatch.setattr("embedrock.system.spans._tracers", ())  # of frameworks that other tests have loaded
    with er.Table(1000, 16, rule=er.Adam(), seed=0, path=tmp_path / "t" if on_disk else None) as table:
        table.update(IDS, GRADS)
        if on_disk:
            table.commit()
        assert least_calls(lambda: VERBS[verb](table)) <= most
        if on_disk:
            table.commit()


@pytest.mark.parametrize(("on_disk", "most_of_update", "most_of_lookup"), [(False, 327, 139), (True, 460, 141)])
def test_a_warm_call_of_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_disk: bool, most_of_update: int, most_of_lookup: int
):
    monkeypatch.setattr("embedrock.system.spans._tracers", ())
    with er.Group(path=tmp_path / "g" if on_disk else None) as group:
        for name in "abc":
            group.table(name, 1000, 16, rule=er.Adam(), seed=0)
        ids, grads = dict.fromkeys("abc", IDS), dict.fromkeys("abc", GRADS)
        group.update(ids, grads)
        if on_disk:
            group.commit()
        assert least_calls(lambda: group.update(ids, grads)) <= most_of_update
        assert least_calls(lambda: group.lookup(ids)) <= most_of_lookup
        if on_disk:
            group.commit()


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_a_member_alone_costs_hardly_more_than_a_table_alone(monkeypatch: pytest.MonkeyPatch, verb: str):
    monkeypatch.setattr("embedrock.system.spans._tracers", ())
    alone = er.Table(1000, 16, rule=er.Adam(), seed=0, directory="hashed")
    member = er.Group().table("a", 1000, 16, rule=er.Adam(), seed=0)
    calls = []
    for table in (alone, member):
        table.update(IDS, GRADS)
        calls.append(least_calls(lambda table=table: VERBS[verb](table)))
    assert calls[1] <= calls[0] + 5
