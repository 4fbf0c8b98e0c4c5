"""One step of several tables: all of them or, where an error is raised, none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from embedrock.batch.gradients import RowGradients
from embedrock.process.interrupts import held_back
from embedrock.rules import Rule
from embedrock.table.table import Table, rows_of
from embedrock.tiers.turn import together


class Due(NamedTuple):
    """One table's part in a step."""

    table: Table
    rule: Rule
    grads: RowGradients


def step_all(due: Sequence[Due]) -> None:
    """Step tables, each once, by its gradients: raises what `judge` raises, before anything was stepped."""
    with held_back():
        step_judged(judge(due))


def judge(due: Sequence[Due]) -> list[Due]:
    """Return those of the tables that are to be stepped: all but such as leave out steps with NaN or Inf.

    Raises:
        NonFiniteGradientError: gradients with NaN or Inf (unless the table has ``on_nonfinite="skip"``).
        MemoryBudgetError: the new rows of a table do not fit its memory.
        ClosedTableError, ReadOnlyTableError: a table was closed, or opened with ``mode="r"``.
    """
    finite = [part for part in due if part.grads.is_finite]
    for part in finite:
        part.table.check_step(part.grads)
    others = [part for part in due if not part.grads.is_finite]
    for part in sorted(others, key=lambda part: part.table.on_nonfinite != "raise"):
        part.table.step_by(part.rule, part.grads)  # refuses, or counts a step that is left out
    return finite


def step_judged(due: Sequence[Due]) -> None:
    """Step tables that `judge` returned."""
    while not _stepped(due):  # another thread was at work with one of them
        for part in due:
            part.table.check_step(part.grads)


def _stepped(due: Sequence[Due]) -> bool:
    """Step tables if each is prepared still, while nobody else has one of them: Ctrl-C comes before or after all."""
    parts = [(rows_of(part.table), part.grads.plan) for part in due]
    with held_back(), together(rows.turn for rows, _ in parts):
        if not all(rows.is_prepared(plan) for rows, plan in parts):
            return False
        if len(parts) > 1:  # that of one table prepares it before it changes anything
            for rows, plan in parts:
                rows.prepare(plan)
        for part in due:
            part.table.step_by(part.rule, part.grads)
        return True
