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
GRADS = np.ones((32, 16), np.float32)
VERBS: dict[str, Callable[[er.Table], Any]] = {
    "update": lambda table: table.update(IDS, GRADS),
    "lookup": lambda table: table.lookup(IDS),
}


@pytest.mark.parametrize(
    ("verb", "on_disk", "most"),
    [("update", False, 187), ("update", True, 250), ("lookup", False, 33), ("lookup", True, 36)],
)
def test_a_warm_call_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, on_disk: bool, most: int):
    monkeypatch.setattr("embedrock.process.spans._tracers", ())  # of frameworks that other tests have loaded
    with er.Table(1000, 16, rule=er.Adam(), seed=0, path=tmp_path / "t" if on_disk else None) as table:
        table.update(IDS, GRADS)
        if on_disk:
            table.commit()
        assert least_calls(lambda: VERBS[verb](table)) <= most
        if on_disk:
            table.commit()
