"""One step of several tables: all of them or, where an error is raised, none. Those of a group are stepped as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple, Protocol

import numpy as np

from embedrock.batch.gradients import RowGradients
from embedrock.batch.joint import counting
from embedrock.batch.plan import Plan
from embedrock.process.interrupts import held_back
from embedrock.rules import Rule
from embedrock.table.checks import check_layout
from embedrock.table.member_steps import Elsewhere, MemberDue, MemberSteps, prepare_each
from embedrock.table.rows import Rows, rounded
from embedrock.table.table import Table, rows_of
from embedrock.tiers.records import Records
from embedrock.tiers.turn import Turn, together

# Makes weights of those that a step leaves its rows with, float32 (unique, dim).
Change = Callable[[np.ndarray], np.ndarray]


class Due(NamedTuple):
    """One table's part in a step; `change`, if any, has the last word on the weights of its rows."""

    table: Table
    rule: Rule
    grads: RowGradients
    change: Change | None = None


class Judged(Protocol):
    """A step of tables, which nothing refuses any more."""

    @property
    def rows(self) -> Sequence[Rows]:
        """Of the tables."""
        ...

    @property
    def turns(self) -> Sequence[Turn]:
        """Who has the tables."""
        ...

    @property
    def plans(self) -> Mapping[Rows, Plan]:
        """The batches of tables in RAM that share a turn, and so the room for their rows, with others of the step."""
        ...

    @property
    def elsewhere(self) -> Sequence[Elsewhere]:
        """The new rows of such tables whose batches are planned elsewhere."""
        ...

    def check(self) -> None:
        """Raise what the step would raise. Nothing changes. Takes the turns by itself."""
        ...

    def is_prepared(self) -> bool:
        """Return whether the last check holds still. The caller has the locks."""
        ...

    def prepare(self) -> None:
        """Do all that can fail. Nothing changes. The caller has the locks."""
        ...

    def step(self) -> None:
        """Make it; prepare it first, where that was not done. The caller has the locks."""
        ...


class _OneTable:
    """The step of one table."""

    elsewhere = ()

    def __init__(self, due: Due) -> None:
        self._due, self._rows = due, rows_of(due.table)
        self.rows, self.turns, self.plans = (self._rows,), (self._rows.turn,), dict[Rows, Plan]()

    def check(self) -> None:
        table, rule, grads, _ = self._due
        table.check_step(grads)
        check_layout(rule, table.rule, table.subject)

    def is_prepared(self) -> bool:
        self._rows.check_writable()
        return self._rows.known(self._due.grads.plan) is not None

    def prepare(self) -> None:
        self._rows.turn.settle()
        self._rows.prepare(self._due.grads.plan)

    def step(self) -> None:
        self._rows.turn.settle()
        self._rows.step(self._due.rule, self._due.grads)


def step_all(due: Sequence[Due]) -> None:
    """Step tables, each once, by its gradients: raises what `judge` and changes raise, before anything was stepped."""
    with held_back():
        step_judged(judge(due), [part for part in due if part.change is not None and part.grads.is_finite])


def judge(due: Sequence[Due]) -> list[Judged]:
    """Return the steps of those tables that are to be stepped: all but such as leave out steps with NaN or Inf.

    Raises:
        NonFiniteGradientError: gradients with NaN or Inf (unless the table has ``on_nonfinite="skip"``).
        MemoryBudgetError: the new rows of a table do not fit its memory.
        ClosedTableError, ReadOnlyTableError: a table was closed, or opened with ``mode="r"``.
    """
    judged = _joined([part for part in due if part.grads.is_finite])
    for step in judged:
        step.check()
    others = [part for part in due if not part.grads.is_finite]
    for part in sorted(others, key=lambda part: part.table.on_nonfinite != "raise"):
        part.table.step_by(part.rule, part.grads)  # refuses, or counts a step that is left out
    return judged


def _joined(due: Sequence[Due]) -> list[Judged]:
    """Return the steps of tables: one for all of a group."""
    groups: dict[Turn, list[Due]] = {}
    alone: list[Judged] = []
    seen = set[Table]()
    for part in due:
        if part.table.group is None or part.table in seen:
            alone.append(_OneTable(part))
        else:
            groups.setdefault(rows_of(part.table).turn, []).append(part)
        seen.add(part.table)
    grouped = ([MemberDue(rows_of(part.table), part.rule, part.grads) for part in parts] for parts in groups.values())
    return [*map(MemberSteps, grouped), *alone]


def step_judged(steps: Sequence[Judged], changing: Sequence[Due] = ()) -> None:
    """Make the steps that `judge` returned; change weights after those of some tables. The caller holds Ctrl-C back."""
    while not _stepped(steps, changing):  # another thread was at work with one of the tables
        for step in steps:
            step.check()
    for step in steps:
        for rows in step.rows:
            if rows.steps >= rows.due:
                rows.home.look(rows)


def _find_together(steps: Sequence[Judged]) -> None:
    """Find the rows of tables that share a turn, and room for new ones, at once, where not one step is of all.

    So it is where some are on a device. Else rows of one step could drive out those of another, or take their room.
    """
    members = [(step, rows, plan) for step in steps for rows, plan in step.plans.items()]
    others = [(step, each) for step in steps for each in step.elsewhere]
    for turn in {rows.turn for _, rows, _ in members}:
        own = [member for member in members if member[1].turn is turn]
        elsewhere = [(step, each) for step, each in others if each.rows.turn is turn]
        if len({id(step) for step, *_ in (*own, *elsewhere)}) > 1:
            together = [rows for step, rows, _ in own if isinstance(step, MemberSteps)]
            with turn.whole():
                plans = {rows: plan for _, rows, plan in own}
                prepare_each(plans, together, [each for _, each in elsewhere])


def _stepped(steps: Sequence[Judged], changing: Sequence[Due]) -> bool:
    """Make steps if each is prepared still, while nobody else has one of the tables."""
    with together([turn for step in steps for turn in step.turns]):
        if len(steps) > 1:
            _find_together(steps)
        for step in steps:
            if not step.is_prepared():
                return False
        if len(steps) > 1:  # that of one prepares itself before it changes anything
            _prepare(steps)
        changed = [_changed(part) for part in changing]
        if changing:  # rehearsing may have moved rows
            _prepare(steps)
        for step in steps:
            step.step()
        for part, values in zip(changing, changed, strict=True):
            _rewrite(rows_of(part.table), part.grads.plan, values)
        _tell(steps)
        return True


def _prepare(steps: Sequence[Judged]) -> None:
    for step in steps:
        step.prepare()


def _tell(steps: Sequence[Judged]) -> None:
    """Name the rows that have left, of all tables, also where telling of one fails: its error is raised at the end."""
    come_and_go = [rows for step in steps for rows in step.rows if rows.residents is not None]
    if not come_and_go:  # as a rule, and a stack takes longer to make than to find out
        return
    with ExitStack() as told:
        for rows in reversed(come_and_go):
            told.callback(rows.tell)


def _changed(part: Due) -> np.ndarray:
    assert part.change is not None
    return part.change(rehearsed(rows_of(part.table), part.rule, part.grads))


def rehearsed(rows: Rows, rule: Rule, grads: RowGradients) -> np.ndarray:
    """Return the weights with which a step would leave its rows, float32 (unique, dim). Nothing changes."""
    rows.turn.settle()
    ready, spec, ids = rows.prepare(grads.plan, is_step=False), rows.spec, grads.plan.ids
    slots, places = ready.plan.slots, np.arange(len(ids))
    is_new = slots < 0
    twins = Records(spec, np.zeros(len(ids) * spec.record_bytes, np.uint8))
    twins.bytes[~is_new] = rows.tier.records.bytes[slots[~is_new]]
    twins.begin(places[is_new], ready.fresh, spec.first_state)
    twins.step(ids, places, grads.values, rows.next_numbers(rule), rows.steps + 1, twins.scratch(len(ids)))
    values = np.empty((len(ids), spec.dim), np.float32)
    twins.read(places, counting(len(ids)), values[:0], values)
    return values


def _rewrite(rows: Rows, plan: Plan, values: np.ndarray) -> None:
    """Replace the weights of rows that the last step stepped, none of which lags behind: float32 (unique, dim)."""
    rows.turn.settle()
    if rows.residents is not None:  # some rows of the batch were not stepped, and get no record by this
        stepped = np.flatnonzero(rows.tier.holds(plan.ids))
        plan, values = plan.of_rows(stepped), values[stepped]
    slots = rows.prepare(plan, is_step=False).plan.slots  # all have records: the step has used them
    rows.tier.changing(slots)
    rows.tier.records.write(slots, rounded(values, rows.spec))
    rows.version.advance()
