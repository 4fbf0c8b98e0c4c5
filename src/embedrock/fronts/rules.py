"""Whose rule steps the rows of a table: one that was given to it, or that of an optimizer. See `table.rule_changes`."""

from __future__ import annotations

from dataclasses import fields

from embedrock.errors import ArgumentError
from embedrock.rules import Rule
from embedrock.table import rule_changes
from embedrock.table.rule_changes import RuleTaker
from embedrock.table.table import Table, rows_of

__all__ = ["RuleTaker", "bind_rule", "check_may_bind", "given_rule", "may_bind", "written"]


def written(rule: Rule) -> str:
    """Return what to write for a rule whose learning rate is the optimizer's.

    Example:
        >>> import embedrock as er
        >>> written(er.Adam(lr=0.5, dense=True))
        'er.Adam(dense=True)'
    """
    given = {field.name: getattr(rule, field.name) for field in fields(rule) if field.name != "lr"}  # pyright: ignore
    parts = [f"{name}={value!r}" for name, value in given.items() if value != getattr(type(rule), name)]
    return f"er.{type(rule).__name__}({', '.join(parts)})"


def given_rule(table: Table) -> Rule | None:
    """Return the rule that a table was given by its maker; None where it has none, or that of an optimizer."""
    return rows_of(table).given_rule


def bind_rule(table: Table, rule: Rule, taker: RuleTaker) -> None:
    """Let an optimizer's rule step the rows of a table. A snapshot has none that are stepped.

    Raises:
        ArgumentError: a rule that was chosen, or state of rows, would be lost.
    """
    if table.mode == "w":
        with (rows := rows_of(table)).table_lock.whole():
            rows.check()
            rule_changes.bind_rule(rows, rule, taker)


def check_may_bind(table: Table, rule: Rule, taker: RuleTaker) -> None:
    """Raise what `bind_rule` would raise."""
    if table.mode == "w" and not taker.resets_state:
        rule_changes.check_may_bind(rows_of(table), rule, taker)


def may_bind(table: Table, rule: Rule, taker: RuleTaker) -> bool:
    """Return whether `check_may_bind` raises nothing."""
    try:
        check_may_bind(table, rule, taker)
    except ArgumentError:
        return False
    return True
