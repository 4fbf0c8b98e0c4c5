"""Changes of a table's rule: the origin of the rule, and the state that a change would lose.

A table's maker *gives* it a rule (``rule=``, `set_rule`). An optimizer of a front end *binds* a rule to it. Otherwise
its files have the rule. An optimizer replaces that of another optimizer. A rule that was given or found stays, and so
does the state of rows, until `reset_state` is passed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from embedrock.errors import ArgumentError, UnsupportedError, counted, plural
from embedrock.optimizers import Rule
from embedrock.spec.spec import Spec
from embedrock.storage.backend import Backend
from embedrock.storage.records import SharedRow
from embedrock.table import reading
from embedrock.table.rows import TableState


class RuleTaker(NamedTuple):
    """An optimizer of a front end that takes over a table, in the words of its error messages.

    Attributes:
        name: such as "ert.SGD".
        label: its name for the rows.
        go_on: a sentence that says how to keep the table's rule.
        resets_state: state may be lost.
        is_chosen: it uses a rule that a layer was given, which has priority over the table's.
    """

    name: str
    label: str
    go_on: str
    resets_state: bool = False
    is_chosen: bool = False


def set_rule(rows: TableState, rule: Rule | None) -> None:
    """Set another rule, and change the record layout if needed."""
    if rule == rows.spec.rule:
        return
    try:
        spec = rows.spec.with_rule(rule)
    except UnsupportedError as error:
        raise UnsupportedError(f"{rows.subject}: {error}") from None
    if rule is not None and rule.same_layout(rows.spec.rule):
        rows.spec = spec
        return
    if first_scale(rows) != 1.0:
        raise UnsupportedError(
            f"the rule of {rows.subject} cannot be replaced after {counted(rows.steps, 'step')} by "
            f"{rows.spec.rule}: that also moved rows without records, whose first values would come back. Look up "
            "the rows that you need, and assign them to a new table."
        )
    is_as_committed = rows.version.is_committed and not rows.steps
    _lay_out(rows, spec)
    if is_as_committed:  # no row has changed
        rows.version.commit()


def _lay_out(rows: TableState, spec: Spec) -> None:
    """Change the record layout: weights stay, and optimizer state begins anew."""
    made = rows.location.idle_pools().replaced(rows.tier, spec, lambda made: _refill(rows, spec, made), rows.subject)
    lifecycle = rows.lifecycle
    if lifecycle is not None:
        shared = rows.shared
        lifecycle.change_layout(spec)
        if shared is not None:
            lifecycle.shared = SharedRow.begun(spec, shared.weights())
    rows.install(spec, made, keeps_rows=True, lifecycle=lifecycle)


def _refill(rows: TableState, spec: Spec, made: Backend) -> None:
    """Fill an empty backend with the same rows, in the new record layout, with initial optimizer state."""
    for ids in rows.tier.id_batches(reading.EXPORT_BATCH_ROWS):
        while len(ids):
            made.begin_batch()  # sets `batch_rows`
            part, ids = np.split(ids, [made.batch_rows])
            slots = made.make_room(part, np.full(len(part), -1, np.int64))
            made.admit(part, slots, reading.weights_of(rows, part), spec.first_state)


def first_scale(rows: TableState) -> float:
    """Return the factor of initial values in rows without records: 1, except under dense AdamW and Ftrl."""
    return 1.0 if rows.history is None else rows.history.first_scale()


def give_rule(rows: TableState, rule: Rule | None, reset_state: bool) -> None:
    """Set the rule that the user chose: see `Table.set_rule`."""
    if not reset_state and (lost := lost_state(rows, rule)):
        raise ArgumentError(
            f"the rule of {rows.subject} cannot become {rule}: {rows.spec.rule} {lost}. Pass reset_state=True to "
            "set_rule to begin that state anew, with the weights as they are."
        )
    set_rule(rows, rule)
    rows.given_rule, rows.is_rule_bound = rule, False


def bind_rule(rows: TableState, rule: Rule, taker: RuleTaker) -> None:
    """Set the rule of an optimizer. It must have the table's record layout, or may replace its rule.

    Raises:
        ArgumentError: it may not replace it.
    """
    had = rows.spec.rule
    if not rule.same_layout(had):
        if not taker.resets_state:
            check_may_bind(rows, rule, taker)
        rows.given_rule = None
    set_rule(rows, rule)
    rows.is_rule_bound = True


def check_may_bind(rows: TableState, rule: Rule, taker: RuleTaker) -> None:
    """Raise `ArgumentError` if an optimizer would replace a chosen rule, or lose state of rows."""
    had = rows.spec.rule
    if had is None or rule.same_layout(had):
        return
    origin = "came with its rows" if rows.given_rule is None else "was given to the table"
    reasons = [] if rows.given_rule is None and rows.is_rule_bound else [origin]
    lost = lost_state(rows, rule)
    if lost or (reasons and not taker.is_chosen):
        reasons += [lost] * bool(lost)
        raise ArgumentError(
            f"rows of {taker.label} step by {had}, which {' and '.join(reasons)}: got {taker.name}, which would step "
            f"them by {rule}. {taker.go_on} To take that instead, with the weights as they are, pass reset_state=True "
            f"to {taker.name}."
        )


def lost_state(rows: TableState, rule: Rule | None) -> str:
    """Return a clause that names the state lost if a rule replaces a table's; "" for none."""
    had = rows.spec.rule
    if had is None or not had.state() or not rows.steps or (rule is not None and rule.same_layout(had)):
        return ""
    if first_scale(rows) != 1.0:  # `set_rule` refuses this in any case
        return ""
    names = ", ".join(column.name for column in had.state())
    steps, count = rows.steps, rows.tier.count
    made, of = f"{steps:,} {plural(steps, 'step')}", f"{count:,} {plural(count, 'row')}"
    return f"has made {made}, and the state ({names}) of {of} would be lost"
