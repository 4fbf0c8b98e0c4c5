"""One step of several tables, wherever their rows are used: all of them or, where an error is raised, none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from embedrock.process.interrupts import held_back
from embedrock.process.spans import span
from embedrock.rules import Rule
from embedrock.table import stepping


class PreparedStep(Protocol):
    """A step of tables that nothing refuses any more."""

    def step(self) -> None:
        """Make it."""
        ...


class Side(Protocol):
    """Where the rows of a table are used: see `RowSide` of a front end."""

    @property
    def judge(self) -> Callable[[Sequence[Any], bool], Sequence[PreparedStep]]:
        """Prepares a step of tables: all of them are stepped or, where it raises an error, none.

        It takes the tables, all of this kind, and whether no others are stepped with them, and nobody waits for them.
        """
        ...


class DueStep(NamedTuple):
    """One table's part in a step.

    Attributes:
        side: where the rows are used.
        rule: laid out as the table's.
        grads: from that side, clipped.
        change: if any, has the last word on the weights of the rows, where the CPU steps them.
    """

    side: Side
    rule: Rule
    grads: Any
    change: stepping.Change | None = None


def step_all(due: Sequence[DueStep], is_awaited: bool = False) -> None:
    """Step tables, each by its gradients. What is refused is refused before anything was stepped.

    Args:
        due: the tables.
        is_awaited: whether the caller has to know that nothing is refused. (It waits for a GPU then.)

    Raises:
        NonFiniteGradientError: gradients with NaN or Inf (unless the table has ``on_nonfinite="skip"``).
        MemoryBudgetError: the new rows of a table do not fit its memory.
        ClosedTableError: a table was closed.
    """
    kinds: dict[Any, list[DueStep]] = {}
    for part in due:
        kinds.setdefault(part.side.judge, []).append(part)
    with span("step"), held_back():  # or Ctrl-C might come when some of them are stepped
        alone = len(kinds) == 1 and not is_awaited
        prepared = [step for judge, parts in kinds.items() for step in judge(parts, alone)]
        for step in prepared:
            step.step()


class HostStep(NamedTuple):
    """A step of tables that nothing refuses any more.

    Attributes:
        judged: the steps.
        changing: those that have the last word on some rows.
    """

    judged: Sequence[stepping.Judged]
    changing: Sequence[stepping.Due]

    def step(self) -> None:
        """Make it."""
        stepping.step_judged(self.judged, self.changing)


def judge_on_host(due: Sequence[Any], alone: bool) -> list[HostStep]:
    """Prepare a step of tables that the CPU makes: see `stepping.judge`, which finds out whatever else is stepped."""
    parts = [stepping.Due(part.side.table, part.rule, part.grads, part.change) for part in due]
    judged = stepping.judge(parts)
    return [HostStep(judged, [part for part in parts if part.change is not None and part.grads.is_finite])]
