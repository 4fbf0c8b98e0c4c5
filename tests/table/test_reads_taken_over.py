"""What reads of batches brought up to date, the step of these batches takes over, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.storage.records import Records
from embedrock.table import caught_up as lease
from embedrock.table.table import rows_of

ROWS, DIM = 60, 8
RULE = er.Adam(lr=0.1, dense=True)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return, of each step, how many rows of each read it takes over."""
    found, step = [], Records.step

    def noted(self: Records, *args: Any) -> None:
        found.append([len(slots) for slots, _, _ in args[6]])
        step(self, *args)

    monkeypatch.setattr(Records, "step", noted)
    return found


def make(folder: Path | None = None) -> er.Table:
    where = {} if folder is None else {"path": folder / "table", "memory": "4MiB"}
    table = er.Table(ROWS, DIM, rule=RULE, seed=1, **where)
    for k in range(4):
        table.update(np.arange(k, ROWS, k + 1), np.full((len(range(k, ROWS, k + 1)), DIM), 0.5 + k, np.float32))
    return table


def records(table: er.Table) -> dict[int, bytes]:
    """Return the record of each row: its weights and optimizer state."""
    copy = er.Table(ROWS, DIM, rule=RULE, seed=1)
    copy.load_state(table)
    ids, found = rows_of(copy).tier.snapshot()
    return {row: record.tobytes() for row, record in zip(ids.tolist(), found, strict=True)}


def gradients(table: er.Table, batches: list[np.ndarray], read: bool) -> er.RowGradients:
    """Return the sum over batches, each of which was read before."""
    plans, parts = [table.plan(ids) for ids in batches], []
    for plan in plans:
        if read:
            table.read(plan)
    for k, plan in enumerate(plans):
        parts.append(table.sum(plan, np.full((*plan.shape, DIM), 1.0 + k, np.float32)))
    return er.RowGradients.sum_of(parts)


BATCHES = [np.array([3, 3, 9, 11, 40]), np.array([9, 12, 40, 41]), np.array([12, 3])]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("is_on_disk", [False, True], ids=["ram", "disk"])
def test_a_step_takes_over_the_reads_of_all_its_batches(
    tmp_path: Path, taken: list[list[int]], count: int, is_on_disk: bool
) -> None:
    read, unread = make(tmp_path if is_on_disk else None), make()
    for table in (read, unread):
        table.step(gradients(table, BATCHES[:count], read=table is read))
        table.lookup([0])
    assert taken[-2:] == [[4, 4, 2][:count], []]
    assert records(read) == records(unread)
    if is_on_disk:
        read.commit()


def test_a_step_takes_over_no_read_of_another_version(taken: list[list[int]]) -> None:
    table, twin = make(), make()
    grads = gradients(table, BATCHES[:2], read=True)
    table.update([9], np.ones((1, DIM), np.float32))
    table.step(grads)
    twin.update([9], np.ones((1, DIM), np.float32))
    twin.step(gradients(twin, BATCHES[:2], read=False))
    assert records(table) == records(twin)
    assert all(not reads for reads in taken[-4:])


def test_rows_without_gradients_are_left_as_they_are(taken: list[list[int]]) -> None:
    table = make()
    other = table.plan([20, 21])
    table.read(other)
    table.step(gradients(table, BATCHES[:1], read=True))
    table.lookup([0])
    assert taken[-1] == [4]


def test_what_reads_keep_goes_with_their_plans_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    table = make()
    reads = rows_of(table).reads
    plans = [table.plan([k, k + 1]) for k in range(50)]
    for k in range(50):
        table.read(plans[k])
    assert len(reads._kept) == lease.MAX_PARTS
    monkeypatch.setattr(lease, "KEPT_BYTES", 3 * reads._bytes() // lease.MAX_PARTS)
    table.read(plans[0])
    assert len(reads._kept) == 3
    plans.clear()
    assert not reads._kept
