"""One step of several tables, on any executors: all tables are stepped or, after an error, none."""

from __future__ import annotations

from collections.abc import Sequence
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
        due: the steps, one for each table.
        is_awaited: the caller waits until all checks have passed. (This waits for a GPU.)

    Raises:
        NonFiniteGradientError: gradients with NaN or Inf (unless the table has ``on_nonfinite="skip"``).
        MemoryBudgetError: the new rows of a table do not fit its memory.
        ClosedTableError: a table was closed.
    """
    for part in due:
        if part.executor.judge is not judge_on_host:
            break
    else:
        return stepping.step_all(due)
    kinds: dict[Any, list[stepping.StepRequest]] = {}
    for part in due:
        kinds.setdefault(part.executor.judge, []).append(part)
    ordered = [*kinds.items()]
    if len(kinds) > 1:  # a GPU step waits for a CPU step that has the same table lock
        ordered.sort(key=lambda kind: kind[0] is not judge_on_host)
    mark_dirty = [part for part in due if part.change is not None and part.grads.is_finite]
    with held_back():  # or Ctrl-C could interrupt between two tables
        alone = len(kinds) == 1 and not is_awaited
        stepping.step_judged([step for judge, parts in ordered for step in judge(parts, alone)], mark_dirty)


Part = tuple[RowGradients, Rule, Any, int, TableState]  # joint gradients, rule, executor, the table's number and state


def of_joint(parts: Sequence[Part]) -> list[stepping.StepRequest]:
    """Return the steps of tables whose gradients were summed together: one step, if it is of all of them.

    Parts with the same gradients and rule follow each other.
    """
    runs, last, by = list[tuple[RowGradients, Rule, Any, dict[int, TableState]]](), None, None
    tables: dict[int, TableState] = {}
    for joint, rule, executor, number, rows in parts:
        if joint is not last or rule is not by:
            last, by, tables = joint, rule, {}
            runs.append((joint, rule, executor, tables))
        tables[number] = rows
    found: list[stepping.StepRequest] = []
    for joint, rule, executor, tables in runs:
        if len(tables) >= len(joint.plan.rows) - 1:  # `rows` may be empty for one table
            found += (stepping.StepRequest([tables[k] for k in range(len(tables))], rule, joint, None, executor),)
        else:
            found += [stepping.StepRequest((own,), rule, joint.of(k), None, executor) for k, own in tables.items()]
    return found


def judge_on_host(due: Sequence[Any], alone: bool) -> list[stepping.CheckedStep]:
    """Prepare a step of tables on the CPU by `stepping.judge`, which always checks everything."""
    return stepping.judge(due)
