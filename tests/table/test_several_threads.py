"""Several threads step the same tables, beside commits and compaction: no step is lost, or made in another row."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import embedrock as er
from embedrock.table.stepping import StepRequest, step_all
from embedrock.table.table import rows_of
from slow import slow

ROWS, DIM, BATCH, THREADS = 2000, 4, 60, 4
RULE = er.SGD(lr=1.0)


def make(folder: Path) -> list[er.Table]:
    """Return tables of zeros, every other one on disk behind a cache of some of its rows."""
    with er.Table(ROWS, DIM, rule=RULE) as like:
        memory = like.memory_for(5 * BATCH)
    places = [{"path": folder / f"{k}", "memory": memory, "keep": 2} if k % 2 else {} for k in range(4)]
    return [er.Table(ROWS, DIM, rule=RULE, init=er.Zeros(), **place) for place in places]


def work(tables: list[er.Table], seed: int, rounds: int) -> np.ndarray:
    """Step some of the tables at a time; return how often each row of each one was in a batch."""
    rng, counts = np.random.default_rng(seed), np.zeros((len(tables), ROWS))
    for _ in range(rounds):
        due = []
        for k in rng.permutation(len(tables))[: rng.integers(1, len(tables) + 1)]:
            ids, table = rng.integers(0, ROWS, BATCH), tables[k]
            np.add.at(counts[k], ids, 1)
            plan = table.plan(ids)
            table.read(plan)
            due.append(StepRequest((rows_of(table),), RULE, table.sum(plan, np.ones((BATCH, DIM), np.float32))))
        step_all(due)
        stored, act = tables[rng.choice([1, 3])], rng.random()
        if act < 0.1:
            stored.commit(wait=bool(rng.integers(2)))
        elif act < 0.12:
            stored.compact()
    return counts


@pytest.mark.parametrize("rounds", [60, *slow(3000)])
def test_every_row_has_made_the_steps_of_all_threads(rounds: int, tmp_path: Path) -> None:
    tables = make(tmp_path)
    with ThreadPoolExecutor(THREADS) as pool:
        counts = np.sum(list(pool.map(lambda seed: work(tables, seed, rounds), range(THREADS))), axis=0)
    for table, expected in zip(tables, counts, strict=True):
        np.testing.assert_array_equal(table.lookup(np.arange(ROWS)), -np.repeat(expected[:, None], DIM, axis=1))
        if table.is_on_disk:
            table.commit()
            assert table.verify().problems == []
        table.close()
