"""One step of several tables: all of them or, on an error, none. Members of a group are stepped as one.

Members of a group share a table lock. So a step of them takes one search for rows, and one kernel call, for each pool.
"""

from __future__ import annotations

import copy
import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from embedrock.batch.gradients import RowGradients, run_of
from embedrock.batch.ids import check_range
from embedrock.batch.plan import Plan, bounds_of, counting, plan_of_rows
from embedrock.errors import ArgumentError, CacheTooSmallError, counted
from embedrock.optimizers import SGD, Rule
from embedrock.storage.backend import Backend
from embedrock.storage.ram_layout import memory_for
from embedrock.storage.record_pools import MOST_NAMED, NewRows, RecordRange
from embedrock.storage.records import Records
from embedrock.storage.table_lock import TableLock, together
from embedrock.system.interrupts import held_back
from embedrock.system.sizes import format_bytes
from embedrock.table import checks
from embedrock.table import rows as table_rows
from embedrock.table.prepared import PreparedStep
from embedrock.table.rows import TableState, part_of, rounded

# Returns new weights from the stepped weights, float32 (unique, dim).
Change = Callable[[np.ndarray], np.ndarray]
NO_RULE = SGD(lr=0.0)


class StepRequest(NamedTuple):
    """One table's part in a step.

    Attributes:
        rows: of the table.
        rule: with the table's record layout.
        grads: `RowGradients`, or the sums of an executor on a device.
        change: function of the stepped weights that returns the final ones, if the CPU steps them.
        executor: of a front end, if it uses the rows.
    """

    rows: TableState
    rule: Rule
    grads: Any
    change: Change | None = None
    executor: Any = None

    def check(self) -> None:
        """Raise an error if the table cannot be stepped so. Caller holds the table lock."""
        rows, rule = self.rows, self.rule
        if rows.executor is not None:
            rows.check()
        rows.check_commit()
        if rule is not rows.spec.rule and not rule.same_layout(rows.spec.rule):
            raise ArgumentError(f"`rule` must be laid out as the rule of {rows.subject}, {rows.spec.rule}: got {rule}.")
        checks.check_gradients(self.grads, rows.spec.dim, rows.subject)


class DeferredInserts(NamedTuple):
    """New rows of a step that is planned elsewhere, so that their number is not known yet.

    Attributes:
        rows: state of the table.
        count_new: returns the number of records to make. It may wait for a device.
        keep_room: reserves room for a number of records, which exists.
    """

    rows: TableState
    count_new: Callable[[], int]
    keep_room: Callable[[int], None]


class CheckedStep(ABC):
    """A step of tables that passed all checks.

    Attributes:
        rows: states of the tables.
        table_locks: locks of the tables.
    """

    rows: Sequence[TableState]
    table_locks: Sequence[TableLock]

    @property
    def plans(self) -> Mapping[TableState, Plan]:
        """Batches of tables in RAM that share a lock, and so the room for rows, with other steps."""
        return {}

    @property
    def elsewhere(self) -> Sequence[DeferredInserts]:
        """New rows of such tables with batches planned elsewhere."""
        return ()

    @abstractmethod
    def check(self) -> None:
        """Raise the errors of the step. Nothing changes. Takes the table locks."""

    @abstractmethod
    def is_prepared(self) -> bool:
        """Return whether the last check is still valid. Caller holds the table locks."""

    @abstractmethod
    def prepare(self) -> None:
        """Do all work that can fail. Nothing changes. Caller holds the table locks."""

    @abstractmethod
    def step(self) -> None:
        """Make the step, and prepare it first if needed. Caller holds the table locks."""


class _SingleStep(CheckedStep):
    def __init__(self, request: StepRequest) -> None:
        self._request, self._rows = request, request.rows
        self.rows, self.table_locks = (request.rows,), (request.rows.table_lock,)

    def check(self) -> None:
        with self._rows.table_lock.whole():
            self._request.check()
            self._rows.prepare(self._request.grads.plan)

    def is_prepared(self) -> bool:
        self._rows.check_writable()
        return self._rows.known(self._request.grads.plan) is not None

    def prepare(self) -> None:
        self._rows.table_lock.wait_for_step()
        self._rows.prepare(self._request.grads.plan)

    def step(self) -> None:
        self._rows.table_lock.wait_for_step()
        self._rows.step(self._request.rule, self._request.grads)


def step_all(requests: Sequence[StepRequest]) -> None:
    """Step tables, each once. Errors of `judge` and of changes are raised before any step."""
    with held_back():
        step_judged(judge(requests), [each for each in requests if each.change is not None and each.grads.is_finite])


def judge(requests: Sequence[StepRequest]) -> list[CheckedStep]:
    """Return the checked steps of all tables, without those that skip NaN or Inf.

    Raises:
        NonFiniteGradientError: gradients with NaN or Inf (unless the table has ``on_nonfinite="skip"``).
        MemoryBudgetError: the new rows of a table do not fit its memory.
        ClosedTableError, ReadOnlyTableError: a table was closed, or opened with ``mode="r"``.
    """
    judged = _joined([each for each in requests if each.grads.is_finite])
    for step in judged:
        step.check()
    refuse_nonfinite([each for each in requests if not each.grads.is_finite])
    return judged


def refuse_nonfinite(requests: Iterable[StepRequest]) -> None:
    """Raise the error of steps by gradients with NaN or Inf. If all tables skip such steps, count them."""
    for each in sorted(requests, key=lambda each: each.rows.on_nonfinite != "raise"):
        with each.rows.table_lock.whole():
            each.check()
            make_step(each.rows, each.rule, each.grads)


def make_step(rows: TableState, rule: Rule, grads: RowGradients) -> None:
    """Make a checked step. Caller holds the table lock exclusively, with Ctrl-C held back."""
    if grads.is_finite:
        rows.step(rule, grads)
        if rows.lifecycle is not None:
            rows.tell()
        if rows.steps >= rows.due:
            rows.location.look()
    elif rows.on_nonfinite == "skip":
        rows.skipped_steps += 1
    else:
        raise checks.nonfinite(grads, rows.subject)


def _joined(requests: Sequence[StepRequest]) -> list[CheckedStep]:
    """Return the steps of tables: one for each group."""
    groups: dict[TableLock, list[StepRequest]] = {}
    alone: list[CheckedStep] = []
    seen = set[TableState]()
    for each in requests:
        if each.rows.location.is_alone or each.rows in seen:
            alone.append(_SingleStep(each))
        else:
            groups.setdefault(each.rows.table_lock, []).append(each)
        seen.add(each.rows)
    return [*map(MemberSteps, groups.values()), *alone]


def step_judged(steps: Sequence[CheckedStep], mark_dirty: Sequence[StepRequest] = ()) -> None:
    """Make the steps that `judge` returned, and apply the changes of some. Caller holds Ctrl-C back."""
    while not _stepped(steps, mark_dirty):  # another thread has changed one of the tables
        for step in steps:
            step.check()
    look([rows for step in steps for rows in step.rows])


def look(tables: Iterable[TableState]) -> None:
    """Start automatic commits that are due."""
    for rows in tables:
        if rows.steps >= rows.due:
            rows.location.look()


def _find_together(steps: Sequence[CheckedStep]) -> None:
    """Find the rows, and room for new ones, of all steps that share a lock, together.

    Several steps share a lock if some of their tables are on a device. Otherwise one step could evict rows of another,
    or take their room.
    """
    members = [(step, rows, plan) for step in steps for rows, plan in step.plans.items()]
    others = [(step, each) for step in steps for each in step.elsewhere]
    for table_lock in {rows.table_lock for _, rows, _ in members}:
        own = [member for member in members if member[1].table_lock is table_lock]
        elsewhere = [(step, each) for step, each in others if each.rows.table_lock is table_lock]
        if len({id(step) for step, *_ in (*own, *elsewhere)}) > 1:
            together = [rows for step, rows, _ in own if isinstance(step, MemberSteps)]
            with table_lock.whole():
                plans = {rows: plan for _, rows, plan in own}
                prepare_each(plans, together, [each for _, each in elsewhere])


def _stepped(steps: Sequence[CheckedStep], mark_dirty: Sequence[StepRequest]) -> bool:
    """Make steps if all are still prepared, under all table locks; return whether they were made."""
    with together([table_lock for step in steps for table_lock in step.table_locks]):
        if len(steps) > 1:
            _find_together(steps)
        for step in steps:
            if not step.is_prepared():
                return False
        if len(steps) > 1:  # a single step prepares itself first
            for step in steps:
                step.prepare()
        changed = [each.change(previewed(*each[:3])) for each in mark_dirty if each.change is not None]
        for step in steps:
            if mark_dirty:  # previews may have moved rows
                step.prepare()
        for step in steps:
            step.step()
        for each, values in zip(mark_dirty, changed, strict=True):
            _rewrite(each.rows, each.grads.plan, values)
        tell([rows for step in steps for rows in step.rows])
        return True


def tell(tables: Iterable[TableState]) -> None:
    """Report the evicted rows of all tables. An error in one report is raised after all of them."""
    come_and_go = [rows for rows in tables if rows.lifecycle is not None]
    if not come_and_go:  # the usual case, checked because making a stack takes longer
        return
    with ExitStack() as told:
        for rows in reversed(come_and_go):
            told.callback(rows.tell)


def previewed(rows: TableState, rule: Rule, grads: RowGradients) -> np.ndarray:
    """Return the weights of rows after a step, float32 (unique, dim). Nothing changes."""
    rows.table_lock.wait_for_step()
    ready, spec, ids = rows.prepare(grads.plan, is_step=False), rows.spec, grads.plan.ids
    slots, places = ready.plan.slots, np.arange(len(ids))
    is_new = slots < 0
    twins = Records(spec, np.zeros(len(ids) * spec.record_bytes, np.uint8))
    twins.bytes[~is_new] = rows.tier.records.bytes[slots[~is_new]]
    twins.begin(places[is_new], ready.fresh, spec.first_state)
    twins.step(ids, places, grads.values, next_numbers(rows, rule), rows.steps + 1, twins.scratch(len(ids)))
    values = np.empty((len(ids), spec.dim), np.float32)
    twins.read(places, counting(len(ids)), values[:0], values)
    return values


def next_numbers(rows: TableState, rule: Rule) -> Any:
    """Draft the next step, for `TableState.count`, and return its kernel's arguments. Nothing changes."""
    draft = rows.draft(rule)
    if rows.history is None:
        return draft
    ahead = copy.copy(rows.history)
    ahead.append()
    return ahead.numbers()


def _rewrite(rows: TableState, plan: Plan, values: np.ndarray) -> None:
    """Replace the weights of rows of the last step, none of which is stale: float32 (unique, dim)."""
    rows.table_lock.wait_for_step()
    if rows.lifecycle is not None:  # rows that were not admitted get no record
        stepped = np.flatnonzero(rows.tier.holds(plan.ids))
        plan, values = plan.of_rows(stepped), values[stepped]
    slots = rows.prepare(plan, is_step=False).plan.slots  # all have records, because they were stepped
    rows.tier.mark_dirty(slots)
    rows.tier.records.write(slots, rounded(values, rows.spec))
    rows.version.advance()


# -------------------------------------------------------------------- members of a group


class MemberSteps(CheckedStep):
    """A step of members of one group, each once, by finite gradients.

    Args:
        requests: one for each member.
        beside: new records of other members in the same step, which need room, too.
    """

    def __init__(self, requests: Sequence[StepRequest], beside: Sequence[NewRows] = ()) -> None:
        self._requests, self._beside, self._table_lock = requests, beside, requests[0].rows.table_lock
        self.rows = [each.rows for each in requests]
        self.table_locks = (self._table_lock,)
        self.pools: list[_PoolStep] = []
        self._versions: list[int] = []

    def check(self) -> None:
        with self._table_lock.whole():
            self.find_checked()

    def find_checked(self) -> None:
        """Check the step. Caller holds the table lock exclusively."""
        for each in self._requests:
            each.check()
        self.find()

    @property
    def plans(self) -> Mapping[TableState, Plan]:
        return {each.rows: each.grads.plan for each in self._requests}

    def is_prepared(self) -> bool:
        for rows in self.rows:
            rows.check_writable()
        is_current = self._versions == [rows.version.now for rows in self.rows]
        is_current = is_current and all(pool.is_current for pool in self.pools)
        more = _more(self.pools)
        return is_current and all(new.part.room.has_room(more) for new in more[:1])

    def prepare(self) -> None:
        self._table_lock.wait_for_step()
        if not (self.pools and self.is_prepared()):
            self.find()

    def find(self) -> None:
        """Find the rows, decide admissions, and make room for new rows. No row changes.

        A step may be running on a device.
        """
        by_pool: dict[Backend, list[tuple[StepRequest, RecordRange]]] = {}
        for each in self._requests:
            part = part_of(each.rows)
            by_pool.setdefault(part.pool, []).append((each, part))
        self.pools = []  # the previous result is no longer valid
        pools = [_PoolStep(pool, members) for pool, members in by_pool.items()]
        self._make_room(pools)
        for pool in pools:
            pool.copy_before_write()
        self.pools = pools
        for rows in self.rows:
            if rows.history is not None:
                rows.history.make_room()
        self._versions = [rows.version.now for rows in self.rows]

    def _make_room(self, pools: Sequence[_PoolStep]) -> None:
        """Load all rows at once, with room for new ones.

        A pool that needs more than its share of the budget borrows from others. Their rows may then move or leave. So
        it repeats until all are loaded; other pools never take room reserved for the batch.
        """
        try:
            for pool in pools:
                pool.decide_admission()
            _check_room([*_more(pools), *self._beside])
            for pool in pools:
                pool.make_room()
            while not all(pool.is_current for pool in pools):
                for pool in pools:
                    if not pool.is_current:
                        pool.find_again()
                        pool.make_room()
        except CacheTooSmallError as error:
            raise self._explained(error, pools) from error

    def _explained(self, error: CacheTooSmallError, pools: Sequence[_PoolStep]) -> CacheTooSmallError:
        counts = [(len(each.grads.plan.ids), each.rows) for each in self._requests]
        counts.sort(key=lambda each: each[0] * each[1].spec.record_bytes, reverse=True)
        named = [
            f"{count:,} of {rows.subject} ({format_bytes(count * rows.spec.record_bytes)})"
            for count, rows in counts[:MOST_NAMED]
        ]
        if (more := len(counts) - MOST_NAMED) > 0:
            named.append(f"others of {counted(more, 'table')}")
        least = sum(pool.least_memory for pool in pools)
        return CacheTooSmallError(
            f"{error} In all this batch of the group has rows of {counted(len(counts), 'table')}: {', '.join(named)}. "
            f"memory={least} ({format_bytes(least)}) of er.Group holds them all, if nothing else is in use."
        )

    def step(self) -> None:
        """Make the prepared step, in the background. All work that can fail is done before any change."""
        self._table_lock.wait_for_step()
        for pool in self.pools:
            pool.copy_before_write()  # for a commit that has begun since
        scratch = [pool.scratch() for pool in self.pools]
        drafts = [each.rows.draft(each.rule) for each in self._requests]
        admissions = [pool for pool in self.pools if pool.admission is not None]
        for pool in admissions:
            pool.draft_shared()
        _admit(self.pools)
        self.rows[0].location.read_together = []
        numbers = {rows: rows.count(draft) for rows, draft in zip(self.rows, drafts, strict=True)}
        for pool in admissions:
            pool.step_shared(numbers)
        calls = [call for pool, own in zip(self.pools, scratch, strict=True) for call in pool.calls(numbers, own)]
        has_history = any(rows.history is not None for rows in self.rows)
        is_small = sum(pool.nbytes for pool in self.pools) <= table_rows.STEP_HERE_BYTES
        self._table_lock.start(lambda: [call() for call in calls], here=is_small and not has_history)
        for pool in admissions:  # runs while the rows are stepped
            pool.note()


def step_members(requests: Sequence[StepRequest]) -> None:
    """Step members of one group, each once, or skip NaN and Inf. Caller holds the table lock."""
    finite = [each for each in requests if each.grads.is_finite]
    with held_back():
        requests[0].rows.table_lock.wait_for_step()
        step = MemberSteps(finite) if finite else None
        if step is not None:
            step.find_checked()
        if len(finite) < len(requests):
            refuse_nonfinite([each for each in requests if not each.grads.is_finite])
        if step is not None:
            step.step()
            tell(step.rows)
            look(step.rows)


def keys_of(parts: Sequence[tuple[RecordRange, np.ndarray]]) -> np.ndarray:
    """Return the keys of the rows of several members of a pool, one after the other."""
    return np.concatenate([part.keys(ids) for part, ids in parts])


def prepare_each(
    plans: Mapping[TableState, Plan], together: Collection[TableState] = (), elsewhere: Sequence[DeferredInserts] = ()
) -> None:
    """Prepare single steps as `TableState.prepare` does: of a table alone, or of members of one group.

    Args:
        plans: of the batch of each table.
        together: members that `MemberSteps` steps: it finds their rows again.
        elsewhere: other members of the group in the same step, which need room as well.
    """
    beside = [NewRows(part_of(each.rows), each.count_new()) for each in elsewhere]
    if any(rows.location.is_alone for rows in plans):
        for rows, plan in plans.items():
            rows.prepare(plan)
    elif plans:  # gradients and rules are with the single steps
        nothing = [RowGradients(plan, np.empty((len(plan.ids), 0), np.float32), 0.0) for plan in plans.values()]
        step = MemberSteps([StepRequest(rows, NO_RULE, own) for rows, own in zip(plans, nothing, strict=True)], beside)
        step.find()
        for pool in step.pools:
            pool.lend(together)
    else:
        _check_room(beside)
    for each, new in zip(elsewhere, beside, strict=True):
        each.keep_room(new.rows)


def _check_room(new: Sequence[NewRows]) -> None:
    for first in new[:1]:
        first.part.room.check_room(new)


def _more(pools: Sequence[_PoolStep]) -> list[NewRows]:
    return [each for pool in pools for each in pool.more]


def _as_one(parts: Sequence[RowGradients]) -> RowGradients:
    """Return the gradients of several tables as one, without a copy if they were summed together."""
    run = parts[0] if len(parts) == 1 else run_of(parts)
    if run is not None:
        return run
    plans = [part.plan for part in parts]
    epoch = plans[0].epoch if len({plan.epoch for plan in plans}) == 1 else -1
    ids, slots = (np.concatenate([getattr(plan, name) for plan in plans]) for name in ("ids", "slots"))
    rows, may_miss = bounds_of([len(plan.ids) for plan in plans]), any(plan.missing for plan in plans)
    plan, values = plan_of_rows(ids, slots, epoch, rows, may_miss), np.concatenate([part.values for part in parts])
    return RowGradients(plan, values, sum(part.square_norm for part in parts))


def _one_after_another(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _admit(pools: Sequence[_PoolStep]) -> None:
    done: list[_PoolStep] = []
    try:
        for pool in sorted(pools, key=lambda pool: pool.admission is not None):  # reversible ones first
            pool.admit()
            done.append(pool)
    except BaseException:
        for pool in done:
            pool.undo_steps()
        raise


class _PoolStep:
    """The part of a step in one pool. The rows of its members come one after the other.

    Attributes:
        new: number of records to make, for each member that has any.
        admission: admission and eviction of a pool's only member, if its rows are dynamic.
    """

    def __init__(self, pool: Backend, members: Sequence[tuple[StepRequest, RecordRange]]) -> None:
        self._pool, tier = pool, pool
        self._requests, self._parts = [each for each, _ in members], [part for _, part in members]
        self.admission: PreparedStep | None = None
        if not (tier.evicts and tier.goes_on_with(self._keys())):
            tier.begin_batch()
        self._take([each.grads for each in self._requests])
        plan = self._grads.plan
        is_current = plan.epoch == self._epoch
        for each in () if is_current else self._requests:
            check_range(each.grads.plan.ids, each.rows.spec.rows, each.rows.subject)
        self._is_found = is_current and not plan.missing
        self._slots = plan.slots if self._is_found else tier.find(self._keys())
        self._count_new()

    def _take(self, grads: Sequence[RowGradients]) -> None:
        self._epoch, self._grads = self._pool.epoch, _as_one(grads)
        self._spans = [slice(*pair) for pair in itertools.pairwise(self._grads.plan.rows.tolist())]

    def decide_admission(self) -> None:
        rows = self._requests[0].rows
        if rows.lifecycle is None:
            return
        (self._of_all,), tier = self._requests, self._pool  # a pool of dynamic rows has one member
        grads = self._of_all.grads
        slots = tier.bring(self._keys(), self._slots)  # only rows without a record have no slot then
        self.admission = ready = rows.ready(*rows.elected(rows.with_slots(grads.plan, slots)))
        own = RowGradients(ready.plan, ready.taking_part(grads.values), grads.square_norm)
        self._requests, self._slots = [self._of_all._replace(grads=own)], ready.plan.slots
        self._take([own])
        self._is_found = not (self._slots < 0).any()
        self._count_new()

    def draft_shared(self) -> None:
        assert self.admission is not None  # only dynamic rows
        self._shared = self.admission.gradient_of_others(self._of_all.rows.shared, self._of_all.grads.values)

    def step_shared(self, numbers: Mapping[TableState, Any]) -> None:
        rows = self._of_all.rows
        if self._shared is not None and (shared := rows.shared) is not None:
            shared.step(self._shared, numbers[rows], rows.steps)

    def note(self) -> None:
        assert self.admission is not None  # only dynamic rows
        self._of_all.rows.note(self.admission)

    def find_again(self) -> None:
        self._is_found, self._slots = False, self._pool.find(self._keys())

    def make_room(self) -> None:
        tier = self._pool
        if not tier.evicts:
            return
        if not self.is_current:  # another pool took some of its room
            self.find_again()
        self._slots = tier.make_room(self._keys(), self._slots, self._leaving)
        self._epoch, self._is_found = tier.epoch, not (self._slots < 0).any()
        self._count_new()

    @property
    def _leaving(self) -> int:
        """Number of slots that evictions free. On disk, evicted rows may not have had one."""
        return 0 if self.admission is None or self._pool.evicts else self.admission.leaving

    @property
    def more(self) -> list[NewRows]:
        """Number of additional records of each member after the step, if any."""
        return [NewRows(part, max(0, count - self._leaving)) for part, count in self.new]

    @property
    def least_memory(self) -> int:
        return memory_for(self._pool.spec, len(self._slots))

    def copy_before_write(self) -> None:
        if self._pool.evicts:
            self._pool.copy_before_write(self._slots[self._slots >= 0])

    def _keys(self) -> np.ndarray:
        return keys_of([(part, each.grads.plan.ids) for part, each in zip(self._parts, self._requests, strict=True)])

    def _count_new(self) -> None:
        self.new, fresh = list[NewRows](), [np.empty((0, self._pool.spec.dim), np.float32)]
        if not self._is_found:
            for each, part, own in zip(self._requests, self._parts, self._spans, strict=True):
                missing = self._slots[own] < 0
                if missing.any():
                    fresh.append(each.rows.first_values(each.grads.plan.ids[missing]))
                    self.new.append(NewRows(part, len(fresh[-1])))
        self._fresh = _one_after_another(fresh)

    @property
    def is_current(self) -> bool:
        return self._pool.epoch == self._epoch

    @property
    def nbytes(self) -> int:
        return len(self._slots) * self._pool.spec.record_bytes

    def scratch(self) -> list[Any]:
        """Return the buffers of each member's step. Only `admit` can fail after it."""
        if self._pool.spec.dtype == "float32":
            return [None] * len(self._parts)
        return [part.records.scratch(own.stop - own.start) for part, own in zip(self._parts, self._spans, strict=True)]

    def admit(self) -> None:
        """Evict rows, then make the missing records."""
        if self.admission is not None and len(self.admission.left):
            self._of_all.rows.tier.discard(self.admission.left)
        if self.new:
            self._made, keys = self._slots < 0, self._keys()
            first_state = self._requests[0].rows.spec.first_state  # all have the same record layout
            self._slots = self._pool.admit(keys, self._slots, self._fresh, first_state)
            for part, count in self.new:
                part.count += count
        self._pool.mark_dirty(self._slots)

    def undo_steps(self) -> None:
        if self.new:
            self._pool.remove(self._keys()[self._made])
            for part, count in self.new:
                part.count -= count

    def lend(self, but_to: Collection[TableState]) -> None:
        done = 0
        for (rows, _, grads, *_), own in zip(self._requests, self._spans, strict=True):
            plan = rows.with_slots(grads.plan, self._slots[own])
            ready = PreparedStep(rows.version.now, plan, self._fresh[done : done + plan.missing])
            if self.admission is not None:
                ready = ready._replace(decision=self.admission.decision, left=self.admission.left)
            if rows not in but_to:
                rows.go_on_from(grads.plan if self.admission is None else self._of_all.grads.plan, ready)
            done += plan.missing

    def calls(self, numbers: Mapping[TableState, Any], scratch: Sequence[Any]) -> list[Callable[[], None]]:
        """Return the calls that step the records: one for consecutive members with equal step constants."""
        made, members = [], list(zip(self._requests, self._parts, self._spans, scratch, strict=True))
        cohorts = [self._cohort(k, numbers, scratch[k]) for k in range(len(members))]
        for _, alike in itertools.groupby(range(len(members)), cohorts.__getitem__):
            of = list(alike)
            (first, part, own, room), last = members[of[0]], members[of[-1]][2]
            own = slice(own.start, last.stop)
            rows = self._grads.plan.ids[own], self._slots[own], self._grads.values[own]
            made.append(functools.partial(part.records.step, *rows, numbers[first.rows], first.rows.steps, room))
        return made

    def _cohort(self, index: int, numbers: Mapping[TableState, Any], scratch: Any) -> Any:
        """Return a key that is equal for members that one call can step."""
        rows = self._requests[index].rows
        is_alone = scratch is not None or rows.history is not None  # rounding and histories are per member
        return index if is_alone else (type(numbers[rows]), *numbers[rows])
