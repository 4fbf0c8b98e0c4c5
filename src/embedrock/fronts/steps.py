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
    """Step tables, each by its gradients.

    Raises:
        NonFiniteGradientError: gradients with NaN or Inf (unless the table has ``on_nonfinite="skip"``).
        MemoryBudgetError: the new rows of a table do not fit its memory.
        ClosedTableError, ReadOnlyTableError: a table was closed, or opened with ``mode="r"``.
    """
    # What is refused must be refused before anything was stepped: by this check, or (NaN and Inf) by coming first.
    for part in due:
        if part.grads.is_finite:
            part.table.check_step(part.grads)
    for part in sorted(due, key=lambda part: part.grads.is_finite):
        part.table.step_by(part.rule, part.grads)
