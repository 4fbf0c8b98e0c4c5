"""A group of four tables on disk, and steps of them that are functions of their numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

import embedrock as er

ADAM = er.Adam(lr=0.1)
KINDS: dict[str, dict[str, Any]] = {
    "a": {"rows": 10**9, "dim": 4, "rule": ADAM},
    "b": {"rows": 100, "dim": 4, "rule": er.Adam(lr=0.2)},
    "c": {"rows": None, "dim": 3, "rule": er.Momentum(lr=0.1, dense=True)},
    "going": {"rows": None, "dim": 4, "rule": ADAM, "admission": er.Admission(2), "eviction": er.Eviction(max_rows=40)},
}


def made(path: Any, **how: Any) -> er.Group:
    """Return a group of four tables, of which two share a pool, and the rows of one come and go."""
    options: dict[str, Any] = {"memory": "64KiB"} | how
    group = er.Group(path=path, **options)
    for seed, (name, kind) in enumerate(KINDS.items()):
        group.table(name, **kind, seed=seed)
    return group


def step(group: er.Group, number: int, names: Any = KINDS) -> None:
    """Make a step that is a function of its number."""
    rng = np.random.default_rng(number)
    ids = {name: rng.integers(0, 100, 12) for name in names}
    group.update(ids, {name: rng.standard_normal((12, group[name].dim)) for name in names})
