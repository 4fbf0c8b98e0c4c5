"""Who chose the rule of a table, and what is lost where another one takes its place.

A rule is *given* to a table by its maker (``rule=``, `set_rule`), *bound* to it by an optimizer of a front end, or
found in its files. An optimizer takes the place of another one. A rule that was given or found stays, and so does the
state of rows, until somebody says `reset_state`.
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
    """An optimizer of a front end that is to step a table, in the words of its error messages.

    Attributes:
        name: such as "ert.SGD".
        label: what it calls the rows that it is to step.
        go_on: how to go on by the rule that the table has: a sentence.
        resets_state: it was told that state may be lost.
        is_chosen: it steps by a rule that a layer was given, which goes before one that the table was given.
    """

    name: str
    label: str
    go_on: str
    resets_state: bool = False
    is_chosen: bool = False


def set_rule(rows: TableState, rule: Rule | None) -> None:
    """Step by another rule from now on; records are laid out anew where they must be."""
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
    if is_as_committed:  # no row is another
        rows.version.commit()


def _lay_out(rows: TableState, spec: Spec) -> None:
    """Replace the records by those of another layout: weights stay, and optimizer state begins anew."""
    made = rows.location.replaced(rows.tier, spec, lambda made: _refill(rows, spec, made), rows.subject)
    lifecycle = rows.lifecycle
    if lifecycle is not None:
        shared = rows.shared
        lifecycle.change_layout(spec)
        if shared is not None:
            lifecycle.shared = SharedRow.begun(spec, shared.weights())
    rows.install(spec, made, keeps_rows=True, lifecycle=lifecycle)


def _refill(rows: TableState, spec: Spec, made: Backend) -> None:
    """Fill an empty tier with the same rows, in records of another layout, with their first optimizer state."""
    for ids in rows.tier.id_batches(reading.EXPORT_BATCH_ROWS):
        while len(ids):
            made.begin_batch()  # from then on it is known how many rows it is good for
            part, ids = np.split(ids, [made.batch_rows])
            slots = made.make_room(part, np.full(len(part), -1, np.int64))
            made.admit(part, slots, reading.weights_of(rows, part), spec.first_state)


def first_scale(rows: TableState) -> float:
    """Return what first values have been multiplied by in rows without records: 1, but under dense AdamW and Ftrl."""
    return 1.0 if rows.history is None else rows.history.first_scale()


def give_rule(rows: TableState, rule: Rule | None, reset_state: bool) -> None:
    """Step by a rule that somebody chose: see `Table.set_rule`."""
    if not reset_state and (lost := lost_state(rows, rule)):
        raise ArgumentError(
            f"the rule of {rows.subject} cannot become {rule}: {rows.spec.rule} {lost}. Pass reset_state=True to "
            "set_rule to begin that state anew, with the weights as they are."
        )
    set_rule(rows, rule)
    rows.given_rule, rows.is_rule_bound = rule, False


def bind_rule(rows: TableState, rule: Rule, taker: RuleTaker) -> None:
    """Step by the rule of an optimizer, which is laid out as the one that the table has, or may take its place.

    Raises:
        ArgumentError: it may not.
    """
    had = rows.spec.rule
    if not rule.same_layout(had):
        if not taker.resets_state:
            check_may_bind(rows, rule, taker)
        rows.given_rule = None
    set_rule(rows, rule)
    rows.is_rule_bound = True


def check_may_bind(rows: TableState, rule: Rule, taker: RuleTaker) -> None:
    """Raise `ArgumentError` where an optimizer would take the place of a rule that was chosen, or has state of rows."""
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
    """Return what is lost where a rule takes the place of a table's; "" for nothing."""
    had = rows.spec.rule
    if had is None or not had.state() or not rows.steps or (rule is not None and rule.same_layout(had)):
        return ""
    if first_scale(rows) != 1.0:  # which `set_rule` refuses, whatever else
        return ""
    names = ", ".join(column.name for column in had.state())
    steps, count = rows.steps, rows.tier.count
    made, of = f"{steps:,} {plural(steps, 'step')}", f"{count:,} {plural(count, 'row')}"
    return f"has made {made}, and the state ({names}) of {of} would be lost"
