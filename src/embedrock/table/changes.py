"""Changes of what a table is: its rule, its number of rows, its policies; and deletion of rows.

A table's maker *gives* it a rule (``rule=``, `set_rule`). An optimizer of a front end *binds* a rule to it. Otherwise
its files have the rule. An optimizer replaces that of another optimizer. A rule that was given or found stays, and so
does the state of rows, until `reset_state` is passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from embedrock.admission.lifecycle import RowLifecycle
from embedrock.errors import ArgumentError, ReadOnlyTableError, UnsupportedError, counted, plural
from embedrock.initializers import FromArray, FromSafetensors, Given, Initializer
from embedrock.optimizers import Rule, StepHistory
from embedrock.spec.description import describe_spec
from embedrock.spec.frozen import FrozenRows
from embedrock.spec.spec import OPEN_IDS, Spec, check_count
from embedrock.storage.backend import Backend
from embedrock.storage.record_pools import MOVED_BYTES
from embedrock.storage.records import SharedRow
from embedrock.table import reading
from embedrock.table.rows import NOBODY, TableState


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
    pool = made.pool
    for ids in rows.tier.id_batches(reading.EXPORT_BATCH_ROWS):
        while len(ids):
            pool.begin_batch()  # sets `batch_rows`
            part, ids = np.split(ids, [pool.batch_rows])
            made.check_room(len(part))
            keys = made.keys(part)
            slots = pool.make_room(keys, np.full(len(part), -1, np.int64))
            pool.admit(keys, slots, reading.weights_of(rows, part), spec.first_state)
            made.admitted(len(part))


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
    """Set the rule of an optimizer. Rows of a snapshot are never stepped.

    Raises:
        ArgumentError: a chosen rule, or optimizer state of rows, would be lost.
    """
    if not rows.location.writes:
        return
    with rows.table_lock.whole():
        rows.check()
        if not rule.same_layout(rows.spec.rule):
            check_may_bind(rows, rule, taker)
            rows.given_rule = None
        set_rule(rows, rule)
        rows.is_rule_bound = True


def check_may_bind(rows: TableState, rule: Rule, taker: RuleTaker) -> None:
    """Raise the error that `bind_rule` would raise, if any."""
    rule.check_dim(rows.spec.dim, taker.label)
    had = rows.spec.rule
    if had is None or rule.same_layout(had) or taker.resets_state or not rows.location.writes:
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


# -------------------------------------------------------------------- rows and policies


def forget(rows: TableState, ids: np.ndarray) -> int:
    """Delete rows for good: see `Table.forget`."""
    rows.check()
    rows.check_commit()
    if rows.executor is not None and not rows.executor.may_forget():  # it plans: the rows of a batch are not known
        raise UnsupportedError(
            f"{rows.subject} cannot forget rows while they are used {rows.executor!r}: the host does not know which of "
            "them a batch has that is not stepped yet. Call forget(ids) of a layer, which brings them back to the CPU "
            "first, and to the GPU again at its next call."
        )
    ids = np.unique(ids)
    unfinished = np.intersect1d(ids, rows.unfinished)
    if len(unfinished):
        raise ArgumentError(
            f"{rows.subject} cannot forget rows of a batch that was read and is not stepped yet: got "
            f"{counted(len(unfinished), 'row')}, first ids {unfinished[:8].tolist()}. Step the batch first, or "
            "drop its plan and what was computed from it."
        )
    count = _discard(rows, ids, ids[rows.tier.holds(ids)])
    rows.tell()
    return count


def _discard(rows: TableState, ids: np.ndarray, there: np.ndarray) -> int:
    if len(there):
        rows.tier.discard(there, is_final=True)
    if rows.lifecycle is not None:
        rows.lifecycle.forget(ids, there)
        rows.lifecycle.leave(there)
    is_told = bool(len(ids)) and rows.location.bury(rows.name, rows.version, ids, len(there))
    if len(there) or rows.lifecycle is not None or is_told:
        rows.forget_batches()
        rows.version.advance()
    return len(there)


def _check_here(rows: TableState, verb: str, count: int | None) -> None:
    if rows.executor is not None:
        raise UnsupportedError(
            f"{rows.subject} cannot {verb} while its rows are used {rows.executor!r}. Call {verb}({count}) of a layer, "
            "which brings them back to the CPU first, and to the GPU again at its next call."
        )


def grow(rows: TableState, count: int | None, init: Initializer | None) -> None:
    """Grow to `count` rows, None for open ids: see `Table.grow`."""
    rows.check_commit()
    _check_here(rows, "grow", count)
    rows.location.wait_for_quiet()  # the lock may have been released meanwhile
    if count == rows.spec.rows and init is None:
        return
    rows.grow(grown_spec(rows.spec, count, init, rows.subject))


def has_more(spec: Spec, count: int | None) -> bool:
    """Return whether a table has more rows than `count`. Open ids are more than any number."""
    return isinstance(count, int) and (spec.rows is None or spec.rows > count)


def outside(ids: np.ndarray, count: int | None) -> np.ndarray:
    """Return which ids a table of `count` rows does not have, bool of their shape."""
    return np.zeros(ids.shape, bool) if count is None else (ids < 0) | (ids >= count)


def shrink(rows: TableState, count: int) -> int:
    """Shrink to `count` rows: see `Table.shrink`."""
    spec, lifecycle = rows.spec, rows.lifecycle
    check_count("`rows`", count)
    rows.check_commit()
    _check_here(rows, "shrink", count)
    if spec.rows == count:
        return 0
    if not has_more(spec, count):
        raise ArgumentError(
            f"`rows` of {rows.subject} must shrink: got {count}, and it has {spec.rows}. Call grow({count})."
        )
    if isinstance(spec.init, FromSafetensors):
        raise ArgumentError(
            f"{rows.subject} cannot shrink: its rows are those of {spec.init}. Leave them: they take no RAM."
        )
    frozen = None if spec.frozen is None else spec.frozen.below(count)
    fewer = replace(spec, rows=count, init=cut_values(spec.init, count), frozen=frozen)
    pools, old = rows.location.idle_pools(), rows.tier
    gone = np.concatenate([NOBODY, *(ids[outside(ids, count)] for ids in old.id_batches(reading.EXPORT_BATCH_ROWS))])

    def fill(made: Backend) -> None:
        made.check_room(old.count - len(gone))
        for ids, records in old.record_batches(max(1, MOVED_BYTES // spec.record_bytes)):
            stay = ~outside(ids, count)
            made.bulk_insert(ids[stay], records[stay])

    made = pools.replaced(old, fewer, fill, rows.subject)
    if lifecycle is not None:
        known = [ids[outside(ids, count)] for name, ids in lifecycle.state().items() if name.endswith("_ids")]
        lifecycle.forget(np.unique(np.concatenate([gone, *known])), gone)
        lifecycle.leave(gone)
    rows.install(fewer, made, rows.history, rows.steps, rows.skipped_steps, lifecycle=lifecycle)
    rows.tell()
    return len(gone)


def cut_values(init: Initializer, count: int) -> Initializer:
    """Return the initial values of the first `count` rows."""
    return type(init)(init.array[:count]) if isinstance(init, FromArray) else init


def grown_spec(spec: Spec, count: int | None, init: Initializer | None, subject: str) -> Spec:
    """Return the spec of a table with more rows, None for open ids. Raise `ArgumentError` if it has as many."""
    had = spec.rows
    if count is not None:
        check_count("`rows`", count, OPEN_IDS)
    if had is None or (count is not None and count < had):
        has = "takes any int64 as an id" if had is None else f"has {had}"
        raise ArgumentError(
            f"`rows` of {subject} can only grow: got {count}, and it {has}. For fewer, call shrink({count})."
        )
    return replace(spec, rows=count, init=_first_values(spec.init, had, count, init, subject))


def _first_values(own: Initializer, had: int, count: int | None, init: Initializer | None, subject: str) -> Initializer:
    if not isinstance(own, Given):
        if init is not None:
            raise ArgumentError(f"`init` of {subject} stays {own} when it grows: got {init}. Leave it out.")
        return own
    if isinstance(init, FromArray) and type(init) is type(own) and len(init.array) == count:
        first = cut_values(init, had)
        if first.describe() == own.describe() and first.digest == own.digest:
            return init
    if isinstance(own, FromSafetensors):
        raise ArgumentError(
            f"first values of {subject} are those of a published table, {own}, which has no further rows: got "
            f"{'open ids' if count is None else counted(count, 'row')}. Make another table for new rows."
        )
    rows, got = "any id" if count is None else counted(count, "row"), "no other one" if init is None else init
    raise ArgumentError(
        f"first values of {subject} come from an array of {counted(had, 'row')}: got {got} for {rows}. Pass "
        f"init=er.{type(own).__name__}(array) with an array of {count or 'so many'} rows, of which the first {had} are "
        "those of the old one."
    )


def check_may_freeze(subject: str, spec: Spec, before: FrozenRows | None, history: StepHistory | None) -> None:
    """Raise `UnsupportedError` if a spec freezes more rows than `before`, and a dense rule may go on moving them."""
    if spec.frozen is None or history is None or not history.moves_weights or not history.steps:
        return
    if not spec.frozen <= (before or FrozenRows(())):
        raise UnsupportedError(
            f"`frozen` of {subject} cannot have more rows after {counted(history.steps, 'step')} by {spec.rule}, which "
            "goes on moving rows that it has stepped. Leave frozen= out, or give the rows that were frozen before; or "
            "begin the rule's state anew before, table.set_rule(None, reset_state=True)."
        )


def change_policies(rows: TableState, given: Mapping[str, Any], writes: bool) -> None:
    """Replace the admission, the eviction or the frozen rows.

    Raises:
        ArgumentError: the counts belong to another admission.
        ReadOnlyTableError: the table cannot change.
    """
    spec, changed = rows.spec, {name: policy for name, policy in given.items() if policy is not None}
    if not changed:
        return
    if not writes:
        raise ReadOnlyTableError(
            f'`{next(iter(changed))}` is for training, and {rows.subject} was opened with mode="r". Leave it out, or '
            'open it with mode="w".'
        )
    wanted, had = changed.get("admission", spec.admission), rows.lifecycle
    is_other = wanted != spec.admission
    if is_other and had is not None and spec.admission is not None and had.has_counts:
        raise ArgumentError(
            f"`admission` of {rows.subject} must be that by which it has counted ids, {spec.admission}: got {wanted}. "
            "Leave it out; or make a new table, of which the weights of rows that have a record are taken over, and "
            'nothing else: table.assign(*er.open(path, mode="r").export()).'
        )
    now = replace(spec, **changed)
    check_may_freeze(rows.subject, now, spec.frozen, rows.history)
    made = RowLifecycle.of(now, rows.subject)
    if had is not None and made is not None:
        if "eviction" in changed and not changed["eviction"].has_mirror:
            had.end_mirror()
        made.take_over(had, keeps_counts=not is_other)
    if made is not None and made.usage is not None and not made.usage.count and rows.tier.count:
        ids = np.concatenate([np.empty(0, np.int64), *rows.tier.id_batches(reading.EXPORT_BATCH_ROWS)])
        made.usage.adopt(ids, made.steps)
    if "frozen" in changed and describe_spec(now) != describe_spec(spec):
        rows.version.advance(keeps_rows=True)
        rows.attach(None)  # a GPU plans by them
    rows.spec = now
    rows.let(made)
