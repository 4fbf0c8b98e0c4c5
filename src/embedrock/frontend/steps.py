"""One step of several tables, on any executors: all tables are stepped or, after an error, none."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from embedrock.batch.gradients import RowGradients
from embedrock.optimizers import Rule
from embedrock.system.interrupts import held_back
from embedrock.system.spans import spanned
from embedrock.table import stepping
from embedrock.table.rows import TableState


@spanned("step")
def step_all(due: Sequence[stepping.StepRequest], is_awaited: bool = False) -> None:
    """Step tables by their gradients. Errors are raised before any table is stepped.

    Args:
        due: the steps, one for each table. Those without an executor are the CPU's.
        is_awaited: the caller waits until all checks have passed. (This waits for a GPU.)

    Raises:
        NonFiniteGradientError: gradients with NaN or Inf (unless the table has ``on_nonfinite="skip"``).
        MemoryBudgetError: the new rows of a table do not fit its memory.
        ClosedTableError: a table was closed.
    """
    for part in due:
        if part.executor is not None:
            break
    else:
        return stepping.step_all(due)
    kinds: dict[Any, list[stepping.StepRequest]] = {}
    for part in due:
        kinds.setdefault(None if part.executor is None else part.executor.judge, []).append(part)
    mark_dirty = [part for part in due if part.change is not None and part.grads.is_finite]
    with held_back():  # or Ctrl-C could interrupt between two tables
        alone = len(kinds) == 1 and not is_awaited
        # First those of the CPU: a GPU step waits for a CPU step that has the same table lock.
        judged = stepping.judge(kinds.pop(None)) if None in kinds else []
        judged += [step for judge, parts in kinds.items() for step in judge(parts, alone)]
        stepping.step_judged(judged, mark_dirty)


Part = tuple[RowGradients, Rule, int, TableState]  # joint gradients, rule, and the number and the state of a table
_TOGETHER, _NUMBERED = itemgetter(0, 1), itemgetter(2, 3)  # many parts are read by one call of `map`


def of_joint(parts: Sequence[Part]) -> list[stepping.StepRequest]:
    """Return the steps of tables whose gradients were summed together: one step, if it is of all of them.

    Parts with the same gradients and rule follow each other.
    """
    found: list[stepping.StepRequest] = []
    for (joint, rule), run in groupby(parts, _TOGETHER):
        tables = dict(map(_NUMBERED, run))
        if len(tables) >= len(joint.plan.rows) - 1:  # `rows` may be empty for one table
            found += (stepping.StepRequest(list(map(tables.__getitem__, range(len(tables)))), rule, joint),)
        else:
            found += [stepping.StepRequest((own,), rule, joint.of(k)) for k, own in tables.items()]
    return found
