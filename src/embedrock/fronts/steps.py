"""One step of several tables: all of them or, where an error is raised, none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from embedrock.batch.gradients import RowGradients
from embedrock.rules import Rule
from embedrock.table.table import Table


class Due(NamedTuple):
    """One table's part in a step."""

    table: Table
    rule: Rule
    grads: RowGradients


def step_all(due: Sequence[Due]) -> None:
    """Step tables, each by its gradients: raises what `judge` raises, before anything was stepped."""
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
    for part in due:
        if not part.grads.is_finite:
            part.table.step_by(part.rule, part.grads)  # refuses, or counts a step that is left out
    return finite


def step_judged(due: Sequence[Due]) -> None:
    """Step tables that `judge` returned."""
    for part in due:
        part.table.step_by(part.rule, part.grads)
