"""`MemberSteps`: one step of several tables of a group: one search for rows and one call of a kernel for each pool."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from embedrock.batch.gradients import RowGradients
from embedrock.batch.ids import check_range
from embedrock.batch.joint import JointGradients, run_of
from embedrock.batch.plan import Plan
from embedrock.errors import CacheTooSmallError
from embedrock.machine.sizes import format_bytes
from embedrock.rules import SGD, Rule
from embedrock.table import checks
from embedrock.table import rows as table_rows
from embedrock.table.batches import keys_of
from embedrock.table.lease import Prepared
from embedrock.table.member import part_of
from embedrock.table.rows import Rows
from embedrock.tiers.part import NewRows, Pool
from embedrock.tiers.placing import memory_for
from embedrock.tiers.pools import MOST_NAMED
from embedrock.wording import counted

NO_RULE = SGD(lr=0.0)


class MemberDue(NamedTuple):
    """One member's part in a step."""

    rows: Rows
    rule: Rule
    grads: RowGradients


class MemberSteps:
    """A step of members of one group, each once, by gradients that are finite.

    Args:
        due: what each is stepped by.
        beside: new records of other members in the same step, for which there has to be room, too.

    Attributes:
        rows: of the members.
        turns: that of the group.
        elsewhere: none.
    """

    elsewhere = ()

    def __init__(self, due: Sequence[MemberDue], beside: Sequence[NewRows] = ()) -> None:
        self._due, self._beside, self._turn = due, beside, due[0].rows.turn
        self.rows = [part.rows for part in due]
        self.turns = (self._turn,)
        self._pools: list[_PoolStep] = []
        self._versions: list[int] = []

    def check(self) -> None:
        """Raise what the step would raise. Nothing changes."""
        with self._turn.whole():
            laid_out = set[tuple[int, int]]()  # pairs of rules, by identity: most tables have one and the same
            for rows, rule, grads in self._due:
                spec, subject = rows.spec, rows.subject
                rows.check()
                rows.check_commit()
                if (pair := (id(rule), id(spec.rule))) not in laid_out:
                    checks.check_layout(rule, spec.rule, subject)
                    laid_out.add(pair)
                checks.check_gradients(grads, spec.dim, subject)
            self.find()

    @property
    def plans(self) -> Mapping[Rows, Plan]:
        """Whose rows it finds."""
        return {part.rows: part.grads.plan for part in self._due}

    def is_prepared(self) -> bool:
        """Return whether the last `find` still holds."""
        for part in self._due:
            part.rows.check_writable()
        is_current = self._versions == self._now() and all(pool.is_current for pool in self._pools)
        more = _more(self._pools)
        return is_current and all(new.part.room.has_room(more) for new in more[:1])

    def prepare(self) -> None:
        """Do all that can fail. Nothing changes."""
        self._turn.settle()
        self.find()

    def find(self) -> None:
        """Find the rows, decide who gets a record, see to room for new ones. Nothing changes.

        A step may be running on a device.
        """
        if self._pools and self.is_prepared():
            return
        by_pool: dict[Pool, list[MemberDue]] = {}
        for part in self._due:
            by_pool.setdefault(part_of(part.rows).pool, []).append(part)
        self._pools = []  # what was found before is not so any more
        pools = [_PoolStep(pool, parts) for pool, parts in by_pool.items()]
        self._make_room(pools)
        for pool in pools:
            pool.preserve()
        self._pools = pools
        for part in self._due:
            if part.rows.history is not None:
                part.rows.history.make_room()
        self._versions = self._now()

    def _make_room(self, pools: Sequence[_PoolStep]) -> None:
        """See to it that all rows are in RAM at once, with room for new ones.

        A pool that needs more of the budget than its share gets it from others, whose rows may move then, or leave. So
        that is done again until all are there; what a pool holds for the batch, others never take.
        """
        try:
            for pool in pools:
                pool.elect()
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
        """Say what the batch needs of the group, table by table, which no pool knows."""
        counts = sorted(((len(part.grads.plan.ids), part.rows) for part in self._due), key=_bytes_of, reverse=True)
        named = [
            f"{count:,} of {rows.subject} ({format_bytes(_bytes_of((count, rows)))})"
            for count, rows in counts[:MOST_NAMED]
        ]
        if (more := len(counts) - MOST_NAMED) > 0:
            named.append(f"others of {counted(more, 'table')}")
        least = sum(pool.least_memory for pool in pools)
        return CacheTooSmallError(
            f"{error} In all this batch of the group has rows of {counted(len(counts), 'table')}: {', '.join(named)}. "
            f"memory={least} ({format_bytes(least)}) of er.Group holds them all, if nothing else is in use."
        )

    def lend(self, but_to: Collection[Rows]) -> None:
        """Leave what `find` found to steps of the members that are made one by one."""
        for pool in self._pools:
            pool.lend(but_to)

    def _now(self) -> list[int]:
        return [part.rows.version.now for part in self._due]

    def step(self) -> None:
        """Make the step, which is prepared, in the background. Before anything changes, all is done that can fail."""
        self._turn.settle()
        for pool in self._pools:
            pool.preserve()  # of a commit that has begun since
        scratch = [pool.scratch() for pool in self._pools]
        drafts = [part.rows.draft(part.rule) for part in self._due]
        elections = [pool.election for pool in self._pools if pool.election is not None]
        for election in elections:
            election.draft_shared()
        _admit(self._pools)
        self._due[0].rows.home.group.lease.end()
        pairs = zip(self._due, drafts, strict=True)
        numbers = {part.rows: part.rows.count(draft) for part, draft in pairs}
        for election in elections:
            election.step_shared(numbers)
        calls = [call for pool, own in zip(self._pools, scratch, strict=True) for call in pool.calls(numbers, own)]
        has_history = any(part.rows.history is not None for part in self._due)
        is_small = sum(pool.nbytes for pool in self._pools) <= table_rows.STEP_HERE_BYTES
        self._turn.start(_make_all, calls, here=is_small and not has_history)
        for election in elections:  # while the rows are stepped
            election.note()


class Elsewhere(Protocol):
    """The rows that a step makes of a table that is not planned here, so that nobody here knows how many they are."""

    @property
    def rows(self) -> Rows:
        """Of the table."""
        ...

    def count(self) -> int:
        """Return how many records are to be made. It may wait for a device."""
        ...

    def keep_room(self) -> None:
        """Keep room for so many, and no more. There is such room."""
        ...


def prepare_each(
    plans: Mapping[Rows, Plan], together: Collection[Rows] = (), elsewhere: Sequence[Elsewhere] = ()
) -> None:
    """Do what `Rows.prepare` does, for steps that are made one by one: of a table alone, or of members of one group.

    Args:
        plans: of the batch of each table.
        together: those that `MemberSteps` steps: it finds their rows again.
        elsewhere: other members of the group that are stepped as well, and have to find room with these.
    """
    beside = [NewRows(part_of(each.rows), each.count()) for each in elsewhere]
    if plans:
        _prepare_each(plans, together, beside)
    else:
        _check_room(beside)
    for each in elsewhere:
        each.keep_room()


def _prepare_each(plans: Mapping[Rows, Plan], together: Collection[Rows], beside: Sequence[NewRows]) -> None:
    first = next(iter(plans))
    if first.home.group is None:
        ((_, plan),) = plans.items()
        first.prepare(plan)
        return
    # Their gradients are elsewhere, with their rules.
    nothing = [RowGradients(plan, np.empty((len(plan.ids), 0), np.float32), 0.0) for plan in plans.values()]
    due = [MemberDue(rows, NO_RULE, grads) for rows, grads in zip(plans, nothing, strict=True)]
    step = MemberSteps(due, beside)
    step.find()
    step.lend(together)


def _check_room(new: Sequence[NewRows]) -> None:
    """Raise `MemoryBudgetError` unless there is room for new records of members of one group."""
    for first in new[:1]:
        first.part.room.check_room(new)


def _bytes_of(rows: tuple[int, Rows]) -> int:
    count, table = rows
    return count * table.spec.record_bytes


def _make_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _more(pools: Sequence[_PoolStep]) -> list[NewRows]:
    """Return how many records there are more of after the step."""
    return [each for pool in pools for each in pool.more]


def _joined(parts: Sequence[RowGradients]) -> JointGradients:
    """Return the gradients of several tables as one: without a copy, where they are as they were summed together."""
    together = run_of(parts)
    if together is not None:
        return together
    plans = [part.plan for part in parts]
    epoch = plans[0].epoch if len({plan.epoch for plan in plans}) == 1 else -1
    rows = [0, *itertools.accumulate(len(plan.ids) for plan in plans)]
    ids, slots = (_one_after_another([getattr(plan, name) for plan in plans]) for name in ("ids", "slots"))
    may_miss = any(plan.missing for plan in plans)
    return JointGradients(ids, slots, epoch, may_miss, _one_after_another([part.values for part in parts]), rows)


def _one_after_another(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _admit(pools: Sequence[_PoolStep]) -> None:
    """Make the new records of all pools, or none."""
    done: list[_PoolStep] = []
    try:
        for pool in sorted(pools, key=lambda pool: pool.election is not None):  # first those that can be taken back
            pool.admit()
            done.append(pool)
    except BaseException:
        for pool in done:
            pool.take_back()
        raise


class _Election:
    """Which rows of a member take part in a step, where not every row that is stepped has a record and keeps it.

    Args:
        due: the member's part in the step.
        plan: of its batch, with the slots of now.

    Attributes:
        batch: the plan of all rows.
        due: what the rows that take part are stepped by.
        ready: which these are, and which others leave for them.
    """

    def __init__(self, due: MemberDue, plan: Plan) -> None:
        self.batch, self._of_all = due.grads.plan, due.grads.values
        self.ready, self._shared = due.rows.ready(*due.rows.elected(plan)), None
        values = self.ready.taking_part(self._of_all)
        self.due = due._replace(grads=RowGradients(self.ready.plan, values, due.grads.square_norm))

    def draft_shared(self) -> None:
        """Decide what the row that others share is stepped by."""
        self._shared = self.ready.gradient_of_others(self.due.rows.shared, self._of_all)

    @property
    def excess(self) -> int:
        """How many rows leave, at least."""
        return self.ready.leaving

    def let_leave(self) -> None:
        """Let them leave."""
        if len(self.ready.left):
            self.due.rows.tier.discard(self.ready.left)

    def step_shared(self, numbers: Mapping[Rows, Any]) -> None:
        """Step the row that others share."""
        self.due.rows.step_shared(self._shared, numbers[self.due.rows])

    def note(self) -> None:
        """Note which rows have come, left, or were used."""
        self.due.rows.note(self.ready)


class _PoolStep:
    """The part that members of one pool have in a step. Their rows come one after the other.

    Attributes:
        new: how many records are to be made, for each member that has some.
        election: of the only member of a pool, where its rows come and go.
    """

    def __init__(self, pool: Pool, due: Sequence[MemberDue]) -> None:
        self._pool, self._due, tier = pool, due, pool.tier
        self.election: _Election | None = None
        if not (tier.evicts and tier.goes_on_with(self._keys())):
            tier.begin_batch()
        self._epoch, self._grads = tier.epoch, _joined([part.grads for part in due])
        self._spans = [slice(*pair) for pair in itertools.pairwise(self._grads.rows)]
        is_current = self._grads.epoch == self._epoch
        for part in [] if is_current else due:
            check_range(part.grads.plan.ids, part.rows.spec.rows, part.rows.subject)
        self._is_found = is_current and not self._grads.may_miss
        self._slots = self._grads.slots if self._is_found else tier.find(self._keys())
        self.new, self._fresh = self._to_be_made()

    def elect(self) -> None:
        """Leave those rows out that get no record in this step."""
        if self._due[0].rows.residents is None:
            return
        (due,), tier = self._due, self._pool.tier  # a pool whose rows come and go has no other member
        slots = tier.bring(self._keys(), self._slots)  # so that only rows without a record have none
        self.election = _Election(due, due.rows.with_slots(due.grads.plan, slots))
        self._due, self._slots = [self.election.due], self.election.ready.plan.slots
        self._grads = _joined([self.election.due.grads])
        self._spans, self._epoch = [slice(0, len(self._slots))], tier.epoch
        self._is_found = not (self._slots < 0).any()
        self.new, self._fresh = self._to_be_made()

    def find_again(self) -> None:
        """Look for rows that may have moved."""
        self._is_found, self._slots = False, self._pool.tier.find(self._keys())

    def make_room(self) -> None:
        """Bring all rows to where they can be stepped, with room for those without a record."""
        tier = self._pool.tier
        if not tier.evicts:
            return
        if not self.is_current:  # another pool took some of its room
            self.find_again()
        self._slots = tier.make_room(self._keys(), self._slots, self._leaving)
        self._epoch, self._is_found = tier.epoch, not (self._slots < 0).any()
        self.new, self._fresh = self._to_be_made()

    @property
    def _leaving(self) -> int:
        """How many slots are free once others have left. Those that leave a table on disk need not have had one."""
        return 0 if self.election is None or self._pool.tier.evicts else self.election.excess

    @property
    def more(self) -> list[NewRows]:
        """How many records each member, that gets some, has more of after the step."""
        return [NewRows(part, max(0, count - self._leaving)) for part, count in self.new]

    @property
    def least_memory(self) -> int:
        """The smallest budget that holds its rows."""
        return memory_for(self._pool.tier.spec, len(self._slots))

    def preserve(self) -> None:
        """Save what a commit under way still needs of the records."""
        if self._pool.tier.evicts:
            self._pool.tier.preserve(self._slots[self._slots >= 0])

    def _keys(self) -> np.ndarray:
        return keys_of([(part.rows, part.grads.plan.ids) for part in self._due])

    def _to_be_made(self) -> tuple[list[NewRows], np.ndarray]:
        """Return how many records are to be made, and their first weights."""
        new, fresh = list[NewRows](), [np.empty((0, self._pool.dim), np.float32)]
        for part, own in [] if self._is_found else zip(self._due, self._spans, strict=True):
            missing = self._slots[own] < 0
            if missing.any():
                fresh.append(part.rows.first_values(part.grads.plan.ids[missing]))
                new.append(NewRows(part_of(part.rows), len(fresh[-1])))
        return new, np.concatenate(fresh)

    @property
    def is_current(self) -> bool:
        """Whether rows still are where they were found."""
        return self._pool.tier.epoch == self._epoch

    @property
    def nbytes(self) -> int:
        """How large the records are."""
        return len(self._slots) * self._pool.tier.spec.record_bytes

    def scratch(self) -> list[Any]:
        """Return what each member's step needs besides: the last that can fail, but for `admit`."""
        counts = (own.stop - own.start for own in self._spans)
        return [part_of(part.rows).records.scratch(count) for part, count in zip(self._due, counts, strict=True)]

    def admit(self) -> None:
        """Make the records that there are not yet, once others have left."""
        if self.election is not None:
            self.election.let_leave()
        if self.new:
            self._made, keys = self._slots < 0, self._keys()
            first_state = self._due[0].rows.spec.first_state  # as records are laid out alike
            self._slots = self._pool.tier.admit(keys, self._slots, self._fresh, first_state)
            for part, count in self.new:
                part.count += count
        self._pool.tier.changing(self._slots)

    def take_back(self) -> None:
        """Forget the records that `admit` made."""
        if self.new:
            self._pool.tier.remove(self._keys()[self._made])
            for part, count in self.new:
                part.count -= count

    def lend(self, but_to: Collection[Rows]) -> None:
        """Let the steps that members make by themselves go on from here."""
        done = 0
        for (rows, _, grads), own in zip(self._due, self._spans, strict=True):
            plan = rows.with_slots(grads.plan, self._slots[own])
            ready = Prepared(rows.version.now, plan, self._fresh[done : done + plan.missing])
            if self.election is not None:
                ready = ready._replace(ballot=self.election.ready.ballot, left=self.election.ready.left)
            if rows not in but_to:
                rows.go_on_from(grads.plan if self.election is None else self.election.batch, ready)
            done += plan.missing

    def calls(self, numbers: Mapping[Rows, Any], scratch: Sequence[Any]) -> list[Callable[[], None]]:
        """Return what steps the records: one call for neighbours whose numbers are the same."""
        made, parts = list[Callable[[], None]](), list(zip(self._due, self._spans, scratch, strict=True))
        for _, alike in itertools.groupby(enumerate(parts), lambda item: self._cohort(item, numbers)):
            due, spans, room = zip(*(part for _, part in alike), strict=True)
            first, own = due[0].rows, slice(spans[0].start, spans[-1].stop)
            rows = self._grads.ids[own], self._slots[own], self._grads.values[own]
            args = *rows, numbers[first], first.steps, room[0]
            made.append(functools.partial(part_of(first).records.step, *args))
        return made

    def _cohort(self, item: tuple[int, Any], numbers: Mapping[Rows, Any]) -> Any:
        """Return what tells neighbours apart that are not stepped in one call."""
        index, (due, _, scratch) = item
        rows = due.rows
        is_alone = scratch is not None or rows.history is not None  # rounding has keys, and a history rows, of its own
        return index if is_alone else (type(numbers[rows]), *numbers[rows])
