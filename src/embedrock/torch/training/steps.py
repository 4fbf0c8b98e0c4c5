"""One step of several tables, wherever their rows are used: all of them or, where an error is raised, none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from embedrock.process.interrupts import held_back
from embedrock.process.spans import span
from embedrock.rules import Rule
from embedrock.torch.training.side import RowSide


class DueStep(NamedTuple):
    """One table's part in a step.

    Attributes:
        side: where the rows are used.
        rule: laid out as the table's.
        grads: from that side, clipped.
    """

    side: RowSide
    rule: Rule
    grads: Any


def step_all(due: Sequence[DueStep]) -> None:
    """Step tables, each by its gradients. What is refused is refused before anything was stepped.

    Raises:
        NonFiniteGradientError: gradients with NaN or Inf (unless the table has ``on_nonfinite="skip"``).
        MemoryBudgetError: the new rows of a table do not fit its memory.
        ClosedTableError: a table was closed.
    """
    kinds: dict[Any, list[DueStep]] = {}
    for part in due:
        kinds.setdefault(part.side.judge, []).append(part)
    with span("step"), held_back():  # or Ctrl-C might come when some of them are stepped
        prepared = [step for judge, parts in kinds.items() for step in judge(parts, len(kinds) == 1)]
        for step in prepared:
            step.step()
