"""The step phase: one step of several tables, all of them or, on an error, none. One table is the usual case.

Tables that share a lock are stepped as one: one search for rows, and one kernel call, for each pool.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from itertools import groupby
from operator import attrgetter, ge, itemgetter
from typing import Any, NamedTuple

import numpy as np

from embedrock import kernels
from embedrock.admission.lifecycle import AdmissionDecision
from embedrock.batch.gradients import RowGradients, as_one
from embedrock.batch.plan import Plan, counting
from embedrock.errors import ArgumentError, CacheTooSmallError, counted
from embedrock.optimizers import SGD, Rule
from embedrock.storage.backend import Backend
from embedrock.storage.ram_layout import memory_for
from embedrock.storage.record_pools import NewRows, largest
from embedrock.storage.records import Records
from embedrock.storage.table_lock import TableLock, together
from embedrock.system.buffers import buffers
from embedrock.system.interrupts import held_back
from embedrock.system.sizes import format_bytes
from embedrock.system.spans import spanned
from embedrock.table import checks
from embedrock.table.reading import BACKEND, HISTORY, is_reading, keys_of, missing_ids, present_slots
from embedrock.table.rows import NOBODY, TableState, rounded

STEP_HERE_BYTES = 1 << 20  # of records: handing a smaller step to a thread takes as long as the step, 0.1 ms

# Returns new weights from the stepped weights, float32 (unique, dim).
Change = Callable[[np.ndarray], np.ndarray]
NO_RULE = SGD(lr=0.0)
# Joint gradients, rule and time, and the number and the state of a table.
Part = tuple[Any, Rule, float | None, int, TableState]
_TOGETHER, _NUMBERED = itemgetter(0, 1, 2), itemgetter(3, 4)
# Many tables are read by one call of `map`.
_CHANGE, _IS_FINITE = attrgetter("change"), attrgetter("grads.is_finite")
_EXECUTOR, _LIFECYCLE, _RULE = attrgetter("executor"), attrgetter("lifecycle"), attrgetter("spec.rule")
_POOL, _STEPS, _DUE, _VERSION = attrgetter("pool"), attrgetter("steps"), attrgetter("due"), attrgetter("version.now")


class StepRequest(NamedTuple):
    """A part of a step: tables that one rule steps by gradients that were summed together.

    Attributes:
        tables: states of the tables, in the order of the gradients' rows.
        rule: with the tables' record layout.
        grads: `RowGradients`, or the sums of an executor on a device.
        change: function of the stepped weights that returns the final ones, if the CPU steps them. Of one table.
        executor: of a front end, if it uses the rows.
        time: of the newest event of the gradients, in seconds since 1970; None: it is not known.
    """

    tables: Sequence[TableState]
    rule: Rule
    grads: Any
    change: Change | None = None
    executor: Any = None
    time: float | None = None

    def check(self) -> None:
        """Raise an error if a table cannot be stepped so. Caller holds the table lock."""
        first = self.tables[0]
        first.check_commit()
        if not self.grads.has_width(first.spec.dim):
            raise checks.wrong_width(self.grads, first.spec.dim, first.subject)
        if not all(map(BACKEND, self.tables)) or any(map(_EXECUTOR, self.tables)):
            for rows in self.tables:
                rows.check_open()
                rows.check()
        rule, rules = self.rule, list(map(_RULE, self.tables))
        if not rule.same_layout(rules[0]) or rules.count(rules[0]) < len(rules):
            for rows, own in zip(self.tables, rules, strict=True):
                if not rule.same_layout(own):
                    raise ArgumentError(f"`rule` must be laid out as the rule of {rows.subject}, {own}: got {rule}.")

    @staticmethod
    def of_joint(parts: Sequence[Part]) -> list[StepRequest]:
        """Return the steps of tables whose gradients were summed together: one step, if it is of all of them.

        Parts with the same gradients, rule and time follow each other.
        """
        found: list[StepRequest] = []
        for (joint, rule, time), run in groupby(parts, _TOGETHER):
            tables = dict(map(_NUMBERED, run))
            executor = joint.executor
            if len(tables) >= joint.count_of_tables:
                whole = list(map(tables.__getitem__, range(len(tables))))
                found += (StepRequest(whole, rule, joint, None, executor, time),)
            else:
                found += [
                    StepRequest((own,), rule, part := joint.of(k), None, part.executor, time)
                    for k, own in tables.items()
                ]
        return found

    def split(self) -> list[StepRequest]:
        """Return a request for each table."""
        if len(self.tables) == 1:
            return [self]
        return [self._replace(tables=(rows,), grads=self.grads.of(k)) for k, rows in enumerate(self.tables)]


# Tables of a batch, its plan, and its time: see `StepRequest`.
Due = tuple[Sequence[TableState], Plan, float | None]


class DeferredInserts(NamedTuple):
    """New rows of a step that is planned elsewhere, so that their number is not known yet.

    Attributes:
        count_new: returns the number of records to make. It may wait for a device.
        keep_room: reserves room for a number of records, which exists.
    """

    rows: TableState
    count_new: Callable[[], int]
    keep_room: Callable[[int], None]


class CheckedStep(ABC):
    """A step of tables that passed all checks."""

    __slots__ = ("rows", "table_locks")

    rows: Sequence[TableState]
    table_locks: Sequence[TableLock]

    @property
    def due(self) -> Sequence[Due]:
        """Batches of tables whose rows are found in RAM."""
        return ()

    @property
    def elsewhere(self) -> Sequence[DeferredInserts]:
        """New rows of tables with batches planned elsewhere."""
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


# -------------------------------------------------------------------- steps of any tables


@spanned("step")
def step_all(requests: Sequence[StepRequest], is_awaited: bool = False) -> None:
    """Step tables by their gradients. Errors are raised before any table is stepped.

    Args:
        requests: the steps of all tables. Those without an executor are the CPU's.
        is_awaited: the caller waits until all checks have passed. (This waits for a GPU.)

    Raises:
        NonFiniteGradientError: gradients with NaN or Inf (unless the table has ``on_nonfinite="skip"``).
        MemoryBudgetError: the new rows of a table do not fit its memory.
        ClosedTableError: a table was closed.
    """
    if _share_a_lock(requests):  # nothing happens between the checks and the step
        with requests[0].tables[0].table_lock.whole():
            return _step_at_once(requests)
    kinds: dict[Any, list[StepRequest]] = {}
    for each in requests:
        kinds.setdefault(None if each.executor is None else each.executor.judge, []).append(each)
    with held_back():  # or Ctrl-C could interrupt between two tables
        alone = len(kinds) == 1 and not is_awaited
        # First those of the CPU: a GPU step waits for a CPU step that has the same table lock.
        judged = judge(kinds.pop(None)) if None in kinds else []
        for judge_kind, own in kinds.items():
            judged += judge_kind(own, alone)
        changing = list(filter(_CHANGE, requests))
        step_judged(judged, changing and [each for each in changing if each.grads.is_finite])


def _share_a_lock(requests: Sequence[StepRequest]) -> bool:
    """Return whether the CPU steps tables with one lock, each once, and nothing changes the stepped weights."""
    for each in requests:
        is_plain = each.change is None and each.executor is None
        if not is_plain or each.tables[0].table_lock is not requests[0].tables[0].table_lock:
            return False
    return len(requests) == 1 or len(set(tables := tables_of(requests))) == len(tables) > 0


def judge(requests: Sequence[StepRequest]) -> list[CheckedStep]:
    """Return the checked steps of all tables, without those that skip NaN or Inf.

    Raises:
        NonFiniteGradientError: gradients with NaN or Inf (unless the table has ``on_nonfinite="skip"``).
        MemoryBudgetError: the new rows of a table do not fit its memory.
        ClosedTableError, ReadOnlyTableError: a table was closed, or opened with ``mode="r"``.
    """
    finite, others = _by_finiteness(requests)
    judged = _joined(finite)
    for step in judged:
        step.check()
    refuse_nonfinite(others)
    return judged


def _by_finiteness(requests: Sequence[StepRequest]) -> tuple[Sequence[StepRequest], Sequence[StepRequest]]:
    """Return requests with finite gradients, and others with NaN or Inf: of one table each."""
    if all(map(_IS_FINITE, requests)):
        return requests, ()
    each_table = [own for each in requests for own in each.split()]
    finite = [each for each in each_table if each.grads.is_finite]
    return finite, [each for each in each_table if not each.grads.is_finite]


def refuse_nonfinite(requests: Sequence[StepRequest]) -> None:
    """Raise the error of steps by gradients with NaN or Inf. If all tables skip such steps, count them."""
    for each in sorted(requests, key=lambda each: each.tables[0].on_nonfinite != "raise"):
        (rows,) = each.tables
        with rows.table_lock.whole():
            each.check()
            if rows.on_nonfinite != "skip":
                raise checks.nonfinite(each.grads, rows.subject)
    for each in requests:
        with each.tables[0].table_lock.whole():
            each.tables[0].skipped_steps += 1


def _joined(requests: Sequence[StepRequest]) -> list[CheckedStep]:
    """Return the steps of tables: one for each table lock. Further requests of a table get steps of their own."""
    locks: dict[TableLock, list[StepRequest]] = {}
    again: list[list[StepRequest]] = []
    seen = set[TableState]()
    for each in requests:
        if seen.isdisjoint(each.tables):
            locks.setdefault(each.tables[0].table_lock, []).append(each)
        else:
            again.append([each])
        seen.update(each.tables)
    return [*map(HostStep, (*locks.values(), *again))]


def step_judged(steps: Sequence[CheckedStep], mark_dirty: Sequence[StepRequest] = ()) -> None:
    """Make the steps that `judge` returned, and apply the changes of some. Caller holds Ctrl-C back."""
    if len(steps) == 1 and not mark_dirty:
        step = steps[0]
        with together(step.table_locks):
            if step.is_prepared():
                step.step()
                tell(step.rows)
                return look(step.rows)
    while not _stepped(steps, mark_dirty):  # another thread has changed one of the tables
        for step in steps:
            step.check()
    return look([rows for step in steps for rows in step.rows])


def look(tables: Sequence[TableState]) -> None:
    """Start automatic commits that are due."""
    if any(map(ge, map(_STEPS, tables), map(_DUE, tables))):
        for rows in tables:
            if rows.steps >= rows.due:
                rows.location.look()


def _find_together(steps: Sequence[CheckedStep]) -> None:
    """Find the rows, and room for new ones, of all steps that share a lock, together.

    Several steps share a lock if some of their tables are on a device. Otherwise one step could evict rows of another,
    or take their room.
    """
    batches = [(step, each) for step in steps for each in step.due]
    others = [(step, each) for step in steps for each in step.elsewhere]
    for table_lock in {tables[0].table_lock for _, (tables, *_) in batches}:
        own = [batch for batch in batches if batch[1][0][0].table_lock is table_lock]
        elsewhere = [(step, each) for step, each in others if each.rows.table_lock is table_lock]
        if len({id(step) for step, *_ in (*own, *elsewhere)}) > 1:
            with table_lock.whole():
                prepare_each([each for _, each in own], [each for _, each in elsewhere])


def _stepped(steps: Sequence[CheckedStep], mark_dirty: Sequence[StepRequest]) -> bool:
    """Make steps if all are still prepared, under all table locks; return whether they were made."""
    with together([table_lock for step in steps for table_lock in step.table_locks]):
        if len(steps) > 1:
            _find_together(steps)
        if not all(step.is_prepared() for step in steps):
            return False
        if len(steps) > 1:  # a single step prepares itself first
            for step in steps:
                step.prepare()
        changed = [each.change(previewed(each.tables[0], *each[1:3])) for each in mark_dirty if each.change is not None]
        for step in steps if mark_dirty else ():  # previews may have moved rows
            step.prepare()
        for step in steps:
            step.step()
        for each, values in zip(mark_dirty, changed, strict=True):
            _rewrite(each.tables[0], each.grads.plan, values)
        tell([rows for step in steps for rows in step.rows])
        return True


def tell(tables: Sequence[TableState]) -> None:
    """Report the evicted rows of all tables. An error in one report is raised after all of them."""
    if not any(map(_LIFECYCLE, tables)):  # as usual: making a stack takes longer
        return
    with ExitStack() as told:
        for rows in reversed(tables):
            told.callback(rows.tell)


def previewed(rows: TableState, rule: Rule, grads: RowGradients) -> np.ndarray:
    """Return the weights of rows after a step, float32 (unique, dim). Nothing changes."""
    rows.table_lock.wait_for_step()
    ready, spec, ids = prepare(rows, grads.plan, is_step=False), rows.spec, grads.plan.ids
    slots, places = ready.plan.slots, np.arange(len(ids))
    is_new = slots < 0
    twins = Records(spec, np.zeros(len(ids) * spec.record_bytes, np.uint8))
    twins.bytes[~is_new] = ready.pool.records.bytes[slots[~is_new]]
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
    ready = prepare(rows, plan, is_step=False)  # all have records, because they were stepped
    ready.pool.mark_dirty(ready.plan.slots)
    ready.pool.records.write(ready.plan.slots, rounded(values, rows.spec))
    rows.version.advance()


# -------------------------------------------------------------------- steps of the CPU


class HostStep(CheckedStep):
    """A step of tables that share a lock, each once, by finite gradients.

    Args:
        beside: new records of other tables in the same step, which need room, too.
        is_step: the rule steps the rows, and admits some of them. False: all of them get records.
    """

    __slots__ = ("_beside", "_requests", "_table_lock", "_versions", "is_step", "pools")

    def __init__(self, requests: Sequence[StepRequest], beside: Sequence[NewRows] = (), is_step: bool = True) -> None:
        self._requests, self._beside, self.is_step = requests, beside, is_step
        self.rows = requests[0].tables if len(requests) == 1 else tables_of(requests)
        self._table_lock = self.rows[0].table_lock
        self.table_locks = (self._table_lock,)
        self.pools: list[PoolStep] = []
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
    def due(self) -> Sequence[Due]:
        return [(each.tables, each.grads.plan, each.time) for each in self._requests]

    def is_prepared(self) -> bool:
        self.rows[0].check_writable()
        for rows in self.rows:
            if rows.backend is None:
                rows.check_open()
        return bool(self.pools) and self._is_current()

    def _is_current(self) -> bool:
        if self._versions != list(map(_VERSION, self.rows)):
            return False
        if not all(pool.is_current for pool in self.pools):
            return False
        return self.rows[0].location.pools.has_room([each for pool in self.pools if pool.new for each in pool.more])

    def prepare(self) -> None:
        self._table_lock.wait_for_step()
        if not self.is_prepared():
            self.find()

    def find(self) -> None:
        """Find the rows, decide admissions, and make room for new rows. No row changes.

        A step may be running on a device.
        """
        known = self.rows[0].location.prepared
        if known is None or not known.goes_on_as(self):
            self.pools = []  # the previous result is no longer valid
            pools = [PoolStep(pool, own, self.is_step) for pool, own in _by_pool(self._requests)]
            for pool in pools:
                if pool.new or pool.pool.evicts or pool.tables[0].lifecycle is not None or self._beside:
                    self._make_room(pools)
                    break
            self.pools = pools
            self._versions = list(map(_VERSION, self.rows))
        for pool in self.pools:
            if pool.pool.evicts:
                pool.copy_before_write()
        if any(map(HISTORY, self.rows)):
            for rows in self.rows:
                if rows.history is not None:
                    rows.history.make_room()

    def goes_on_as(self, other: HostStep) -> bool:
        """Give another step of the same batch what was found for this one, if that is still valid."""
        if self.is_step is not other.is_step or self._beside or other._beside or self.rows != other.rows:
            return False
        pairs = zip(self._requests, other._requests, strict=False)
        is_same = all(mine.grads.plan.ids is its.grads.plan.ids and mine.time == its.time for mine, its in pairs)
        if not (self.pools and is_same and self._is_current()):
            return False
        other.pools, other._versions = self.pools, self._versions
        for pool, (_, own) in zip(other.pools, _by_pool(other._requests), strict=True):
            pool.take(own)
        return True

    def part(self, rows: TableState, plan: Plan) -> PoolStep | None:
        """Return what was found for the batch of one table; None if that is no longer valid."""
        for pool in self.pools:
            part = pool.part(rows, plan)
            if part is not None:
                number = self.rows.index(rows)
                is_current = pool.is_current and self._versions[number] == rows.version.now
                return part if is_current and rows.location.pools.has_room(part.more) else None
        return None

    def _make_room(self, pools: Sequence[PoolStep]) -> None:
        """Load all rows at once, with room for new ones.

        A pool that needs more than its share of the budget borrows from others. Their rows may then move or leave. So
        it repeats until all are loaded; other pools never take room reserved for the batch.
        """
        location = self.rows[0].location
        try:
            more, late = [*self._beside], []
            for pool in pools:
                if pool.tables[0].lifecycle is not None:
                    pool.decide_admission()
                if pool.new:
                    more += pool.more
                if pool.pool.evicts:
                    late.append(pool)
            if more:
                location.pools.check_room(more)
            for pool in late:
                pool.make_room()
            while late and not all(pool.is_current for pool in late):
                for pool in late:
                    if not pool.is_current:
                        pool.find_again()
                        pool.make_room()
        except CacheTooSmallError as error:
            if location.is_alone:
                raise
            raise self._explained(error, pools) from error

    def _explained(self, error: CacheTooSmallError, pools: Sequence[PoolStep]) -> CacheTooSmallError:
        counts = [(own.tables[0], len(own.grads.plan.ids)) for each in self._requests for own in each.split()]
        least = sum(memory_for(own.pool.spec, len(own.plan.ids)) for own in pools)
        return CacheTooSmallError(
            f"{error} In all this batch of the group has rows of {counted(len(counts), 'table')}: {largest(counts)}. "
            f"memory={least} ({format_bytes(least)}) of er.Group holds them all, if nothing else is in use."
        )

    def step(self) -> None:
        """Make the prepared step, in the background. All work that can fail is done before any change."""
        self.prepare()
        for pool in self.pools:
            pool.copy_before_write()  # for a commit that has begun since
        self.make()

    def make(self) -> None:
        """Make the step. Nothing has changed since it was found."""
        pools, calls, nbytes, catches_up = self.pools, [], 0, False
        for pool in pools:
            pool.draft()
        if len(pools) == 1:
            pools[0].admit()
        else:
            _admit(pools)
        self.rows[0].location.prepared = None  # it does not have the records that are made now
        for pool in pools:
            calls += pool.count()
            nbytes += pool.plan.ids.size * pool.pool.spec.layout.record_bytes
            catches_up |= pool.catches_up
        is_small = nbytes <= STEP_HERE_BYTES and not catches_up
        function, *args = calls[0] if len(calls) == 1 else (_call_all, calls)
        self._table_lock.start(function, *args, here=is_small)
        for pool in pools:  # runs while the rows are stepped
            if pool.decision is not None:
                pool.note()


NO_ROWS = np.empty((0, 0), np.float32)


def _call_all(calls: Sequence[tuple[Any, ...]]) -> None:
    for function, *args in calls:
        function(*args)


def tables_of(requests: Sequence[StepRequest]) -> Sequence[TableState]:
    """Return the tables of all requests."""
    return requests[0].tables if len(requests) == 1 else [rows for each in requests for rows in each.tables]


def _by_pool(requests: Sequence[StepRequest]) -> Iterable[tuple[Backend, Sequence[StepRequest]]]:
    """Return the requests of each pool. Tables may have moved since their gradients were summed together."""
    if len(requests) == 1 and len(requests[0].tables) == 1:
        return ((requests[0].tables[0].tier.pool, requests),)
    found: dict[Backend, list[StepRequest]] = {}
    for each in requests:
        backends = list(map(BACKEND, each.tables))
        pools = [] if None in backends else list(map(_POOL, backends))
        are_one = pools.count(pool := each.tables[0].tier.pool) == len(backends)
        for own in (each,) if are_one else each.split():
            found.setdefault(pool if are_one else own.tables[0].tier.pool, []).append(own)
    return found.items()


def step_checked(requests: Sequence[StepRequest]) -> None:
    """Step tables that share a lock, each once, or skip NaN and Inf. Caller holds the table lock."""
    with held_back():
        requests[0].tables[0].table_lock.wait_for_step()
        _step_at_once(requests)


def _step_at_once(requests: Sequence[StepRequest]) -> None:
    """Do `step_checked`. No step is running, and Ctrl-C is held back."""
    finite, others = _by_finiteness(requests)
    step = HostStep(finite) if finite else None
    if step is not None:
        step.find_checked()
    if others:
        refuse_nonfinite(others)
    if step is not None:
        step.make()
        tell(step.rows)
        look(step.rows)


def prepare(rows: TableState, plan: Plan, is_step: bool = True, time: float | None = None) -> PoolStep:
    """Do all work of changing a plan's rows of a table that can fail, and return it. No row changes.

    The change of the same batch reuses it, unless the table changes before. The caller has checked that the table can
    change.

    Args:
        is_step: it is a step of the rule, which admits rows.
        time: see `StepRequest`.
    """
    ready = known(rows, plan, is_step, time)
    if ready is None:
        step = HostStep([_without_values((rows,), plan, time)], is_step=is_step)
        step.find()
        rows.location.prepared = step
        (ready,) = step.pools
    ready.copy_before_write()
    if rows.history is not None:
        rows.history.make_room()
    return ready


def known(rows: TableState, plan: Plan, is_step: bool = True, time: float | None = None) -> PoolStep | None:
    """Return the result of the last `prepare` if it is of this batch and time, and still valid."""
    step = rows.location.prepared
    ready = None if step is None else step.part(rows, plan)
    if ready is None or step is None or ready.decision is None:
        return ready
    return ready if (step.is_step, ready.requests[0].time) == (is_step, time) else None


def prepare_each(due: Sequence[Due], elsewhere: Sequence[DeferredInserts] = ()) -> None:
    """Prepare steps of tables that share a lock together, for `prepare` of each.

    Args:
        due: tables of each batch, its plan and its time.
        elsewhere: other tables in the same step, which need room as well.
    """
    beside = [NewRows(each.rows.tier, each.count_new()) for each in elsewhere]
    if due:
        step = HostStep([_without_values(*each) for each in due], beside)
        step.find()
        due[0][0][0].location.prepared = step
    elif elsewhere:
        elsewhere[0].rows.location.pools.check_room(beside)
    for each, new in zip(elsewhere, beside, strict=True):
        each.keep_room(new.rows)


def _without_values(tables: Sequence[TableState], plan: Plan, time: float | None) -> StepRequest:
    """Return a request whose gradients are not known here."""
    nothing, squares = np.empty((len(plan.ids), 0), np.float32), [0.0] * len(tables) if len(tables) > 1 else ()
    return StepRequest(tables, NO_RULE, RowGradients(plan, nothing, 0.0, squares), time=time)


def _admit(pools: Sequence[PoolStep]) -> None:
    with ExitStack() as undo:
        for pool in sorted(pools, key=lambda pool: pool.decision is not None):  # reversible ones first
            pool.admit()
            undo.callback(pool.undo_steps)
        undo.pop_all()


def _drafts(request: StepRequest, are_apart: bool) -> Sequence[tuple[int, Any]]:
    """Return the step constants of consecutive tables that share them, with the number of these tables.

    With `are_apart`, each table has its own.
    """
    tables, known = request.tables, dict[int, Any]()
    if len(tables) == 1 or not (are_apart or len(set(map(_STEPS, tables))) > 1 or any(map(HISTORY, tables))):
        return ((len(tables), tables[0].draft(request.rule)),)
    found: list[tuple[int, Any]] = []
    for rows in tables:
        # Tables of one rule have the same constants in their n-th step.
        draft = known.get(rows.steps) if rows.history is None else None
        known[rows.steps] = draft = rows.draft(request.rule) if draft is None else draft
        found.append((1, draft))
    return found


def _are_equal(draft: Any, other: Any) -> bool:
    """Return whether tables with these step constants may be stepped by one call."""
    return draft is other or (type(draft) is type(other) and draft == other)


class PoolStep:
    """The part of a step in one pool. The rows of its tables come one after the other.

    Args:
        is_step: see `HostStep`.

    Attributes:
        plan: of the rows to change, with present slots.
        fresh: float32 (missing, dim), initial weights of rows without records.
        new: number of records to make, for each table that has any.
        decision: of a pool's only table, if its rows are dynamic: the rows of the batch that the plan has.
        left: ids of the rows that are evicted for it.
        catches_up: rows catch up in the step, as no read has caught them up.
    """

    __slots__ = (
        "_grads", "_is_step", "_keys", "_of_others", "_runs", "_slots", "catches_up", "decision", "fresh", "left",
        "new", "plan", "pool", "requests", "tables",
    )  # fmt: skip

    def __init__(self, pool: Backend, requests: Sequence[StepRequest], is_step: bool) -> None:
        self.pool, self._is_step, self._keys = pool, is_step, None
        self.decision: AdmissionDecision | None = None
        self.left, self.catches_up, self.fresh = NOBODY, False, NO_ROWS
        self.new: list[NewRows] = []
        self.take(requests)
        self.plan = plan = self._grads.plan
        is_known = is_reading(self.tables, plan)
        if not (is_known or (pool.evicts and pool.is_shared and pool.goes_on_with(self.keys))):
            pool.begin_batch()
        if plan.missing or plan.epoch != pool.epoch:
            self._found(present_slots(pool, self.tables, plan, self.keys))

    @property
    def keys(self) -> np.ndarray:
        """The pool's keys of the rows."""
        if self._keys is None:
            self._keys = keys_of(self.tables, self.plan)
        return self._keys

    def take(self, requests: Sequence[StepRequest]) -> None:
        """Take the gradients of requests of the same batch."""
        self.requests = requests
        if len(requests) == 1:
            self.tables, self._grads = requests[0].tables, requests[0].grads
        else:
            self.tables, self._grads = tables_of(requests), as_one([each.grads for each in requests])

    def part(self, rows: TableState, plan: Plan) -> PoolStep | None:
        """Return the part of one table, if the batch is of this plan."""
        start = 0
        for each in self.requests:
            own = each.grads.plan
            if own.ids is plan.ids and each.tables[0] is rows and len(each.tables) == 1:
                return self if len(self.requests) == 1 else self._cut(each, slice(start, start + len(own.ids)))
            start += len(own.ids)
        return None

    def _cut(self, request: StepRequest, own: slice) -> PoolStep:
        part, plan = copy.copy(self), request.grads.plan
        part.take([request])
        part.plan, part._keys = plan.with_slots(self.plan.slots[own], self.plan.epoch), self.keys[own]
        done = int(np.count_nonzero(self.plan.slots[: own.start] < 0))
        part.new = [NewRows(request.tables[0].tier, part.plan.missing)] if part.plan.missing else []
        part.fresh = self.fresh[done : done + part.plan.missing]
        return part

    def _found(self, slots: np.ndarray) -> None:
        self.plan = self.plan.with_slots(slots, self.pool.epoch)
        if not self.pool.evicts:
            self._count_new()

    def _count_new(self) -> None:
        self.new, self.fresh = [], NO_ROWS
        if self.plan.missing:
            missing, fresh = (self.plan.slots < 0).nonzero()[0], []
            for rows, ids in missing_ids(self.tables, self.plan, missing):
                fresh.append(rows.first_values(ids))
                self.new.append(NewRows(rows.tier, len(ids)))
            self.fresh = np.concatenate(fresh)

    # ---------------------------------------------------------------- rows that come and go

    def decide_admission(self) -> None:
        """Decide which rows of a table with dynamic rows get records, and which other ones leave."""
        rows, pool = self.tables[0], self.pool  # a pool of dynamic rows has one table
        assert rows.lifecycle is not None
        plan = self.plan.with_slots(pool.bring(self.keys, self.plan.slots), pool.epoch)
        self.decision = rows.lifecycle.vote(plan.ids, plan.slots < 0, self._is_step, self.requests[0].time)
        of_default = self._grads.of_default
        if of_default is not None and not np.array_equal(of_default.ids, self.decision.turned_away):
            raise ArgumentError(
                f"rows of {rows.subject} got or lost records since backward(), which has told all processes whose "
                "gradients train the default row. Nothing has changed. Call zero_grad() and backward() again."
            )
        self.left = rows.lifecycle.victims(self.decision)
        if self.decision.rows is not None:
            plan, self._keys = plan.of_rows(np.flatnonzero(self.decision.rows)), None
        self.plan = plan
        self._count_new()

    def _values(self) -> np.ndarray:
        """Return the gradients of the rows to change: without rows that are not admitted."""
        values = self._grads.values
        if self.decision is None or self.decision.rows is None:
            return values
        rows = np.flatnonzero(self.decision.rows)
        out = buffers.empty((len(rows), values.shape[1]), np.float32)
        kernels.cpu.launch(kernels.cpu.rows.gather, values, rows, counting(len(rows)), values[:0], out)
        return out

    def _gradient_of_others(self) -> np.ndarray | None:
        """Return the gradient of the default row: the sum over rows that are not admitted. None without such rows."""
        shared, of_default = self.tables[0].shared, self._grads.of_default
        if of_default is not None:
            return of_default.values
        if shared is None or self.decision is None or self.decision.rows is None:
            return None
        return shared.gradient(self._grads.values, np.flatnonzero(~self.decision.rows))

    def note(self) -> None:
        """Record the effect of a step: evicted, admitted and used rows."""
        lifecycle = self.tables[0].lifecycle
        if lifecycle is not None and self.decision is not None:
            lifecycle.note(self.decision, self.left)

    # ---------------------------------------------------------------- room

    @property
    def is_current(self) -> bool:
        return self.pool.epoch == self.plan.epoch

    def find_again(self) -> None:
        self._found(self.pool.find(self.keys))

    def make_room(self) -> None:
        """Load the rows, and free slots for new ones."""
        pool = self.pool
        if not self.is_current:  # another pool took some of its room
            self.find_again()
        self._found(pool.make_room(self.keys, self.plan.slots))
        self._count_new()

    @property
    def more(self) -> list[NewRows]:
        """Number of additional records of each table after the step, if any."""
        # On disk, evicted rows may not have had a slot.
        leaving = 0 if self.pool.evicts else len(self.left)
        return [NewRows(part, max(0, count - leaving)) for part, count in self.new]

    def copy_before_write(self) -> None:
        if self.pool.evicts:
            slots = self.plan.slots
            self.pool.copy_before_write(slots[slots >= 0] if self.plan.missing else slots)

    # ---------------------------------------------------------------- the step

    def begin(self) -> np.ndarray:
        """Begin a change; return the slots of its rows, all of which have records.

        Admissions and evictions are recorded. Once the step is made, `TableState.tell` reports them.
        """
        self.tables[0].location.prepared = None  # it does not have the records that are made now
        self.admit()
        self.note()
        return self._slots

    def draft(self) -> None:
        """Do all work of counting a step that can fail: step constants and buffers of each run of tables."""
        self._runs: list[tuple[int, Any, Any]] = []  # one past the last table of each, constants and buffers
        start, are_apart = 0, self.pool.spec.dtype != "float32"  # rounding is per table
        for each in self.requests:
            for count, draft in _drafts(each, are_apart):
                scratch = None
                if are_apart:
                    own = self.plan.of(start)
                    scratch = each.tables[0].tier.records.scratch(own.stop - own.start)
                elif self._runs and _are_equal(draft, self._runs[-1][1]):
                    self._runs.pop()
                start += count
                self._runs.append((start, draft, scratch))
        self._of_others = None if self.decision is None else self._gradient_of_others()

    def admit(self) -> None:
        """Evict rows, then make the missing records."""
        if self.left.size:
            self.tables[0].tier.discard(self.left)
        self._slots = slots = self.plan.slots
        if self.new:
            first_state = self.tables[0].spec.first_state  # all have the same record layout
            self._slots = self.pool.admit(self.keys, slots, self.fresh, first_state)
            for part, count in self.new:
                part.admitted(count)
        if self.pool.evicts:
            self.pool.mark_dirty(self._slots)
        for rows in self.tables:
            rows.last_read = ()

    def undo_steps(self) -> None:
        if self.new:
            self.pool.remove(self.keys[self.plan.slots < 0])
            for part, count in self.new:
                part.admitted(-count)

    def count(self) -> list[tuple[Any, ...]]:
        """Count the drafted step of each table. Return the calls that step the records, one for each run of tables.

        A call is a function and its arguments.
        """
        made, start, numbers = [], 0, None
        values = self._grads.values if self.decision is None else self._values()
        ids, slots, is_whole = self.plan.ids, self._slots, len(self._runs) == 1
        for end, draft, scratch in self._runs:
            rows, *others = self.tables[start:end]
            refreshed: list[Any] = []
            if rows.history is not None:
                for each in (rows, *others):
                    refreshed += each.reads.take(self._grads.plan, self.plan.slots)
                self.catches_up |= not refreshed
            numbers = rows.count(draft)
            for each in others:  # see `TableState.count`
                each.steps += 1
                each.version.now += 1
                if each.history is not None:
                    each.history.append()
            of_rows = ids, slots, values
            if not is_whole:
                own = slice(*self.plan.rows[[start, end]].tolist())
                of_rows = ids[own], slots[own], values[own]
            made.append((rows.tier.records.step, *of_rows, numbers, rows.steps, scratch, refreshed))
            start = end
        rows = self.tables[0]
        if self._of_others is not None and (shared := rows.shared) is not None:
            shared.step(self._of_others, numbers, rows.steps)
        return made
