"""One step of several tables, wherever their rows are used: all of them or, where an error is raised, none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from embedrock.system.interrupts import held_back
from embedrock.system.spans import spanned
from embedrock.table import stepping


class SteppingExecutor(Protocol):
    """Where the rows of a table are stepped: what a front end's side of a table has for that."""

    @property
    def judge(self) -> Callable[[Sequence[Any], bool], Sequence[stepping.CheckedStep]]:
        """Prepares one step of tables: all are stepped or, if it raises an error, none.

        It takes the tables, all of this kind; and whether they are alone: no other kind steps with them, and no caller
        has to know that nothing is refused.
        """
        ...


@spanned("step")
def step_all(due: Sequence[stepping.StepRequest], is_awaited: bool = False) -> None:
    """Step tables, each by its gradients. What is refused is refused before anything was stepped.

    Args:
        due: the tables.
        is_awaited: whether the caller has to know that nothing is refused. (Then it waits for a GPU.)

    Raises:
        NonFiniteGradientError: gradients with NaN or Inf (unless the table has ``on_nonfinite="skip"``).
        MemoryBudgetError: the new rows of a table do not fit its memory.
        ClosedTableError: a table was closed.
    """
    kinds: dict[Any, list[stepping.StepRequest]] = {}
    for part in due:
        kinds.setdefault(part.executor.judge, []).append(part)
    ordered = [*kinds.items()]
    if len(kinds) > 1:  # a step on a device waits for one of the CPU that has the same turn
        ordered.sort(key=lambda kind: kind[0] is not judge_on_host)
    mark_dirty = [part for part in due if part.change is not None and part.grads.is_finite]
    with held_back():  # or Ctrl-C might come when some of them are stepped
        alone = len(kinds) == 1 and not is_awaited
        stepping.step_judged([step for judge, parts in ordered for step in judge(parts, alone)], mark_dirty)


def judge_on_host(due: Sequence[Any], alone: bool) -> list[stepping.CheckedStep]:
    """Prepare a step of tables that the CPU makes: see `stepping.judge`, which finds out whatever else is stepped."""
    return stepping.judge(due)
