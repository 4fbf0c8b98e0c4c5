"""One step of several tables on GPUs: all of them step or, if one has NaN or Inf, none."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress, repeat
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embedrock.device import device_errors
from embedrock.device.batch import SteppedTables
from embedrock.device.device_errors import step_numbers
from embedrock.device.gradients import DeviceRowGradients, RowSums
from embedrock.device.step_constants import count_all, draft_step
from embedrock.device.stream_order import InStreamOrder, StreamOrder, check_capture, enough_memory
from embedrock.errors import ArgumentError
from embedrock.kernels.cpu.threads import BackgroundCall
from embedrock.kernels.gpu import gate
from embedrock.kernels.gpu import rows as kernels
from embedrock.optimizers import Rule
from embedrock.table.rows import TableState
from embedrock.table.stepping import CheckedStep, DeferredInserts, Due, StepRequest


class TableStep(NamedTuple):
    """The step of one table.

    Attributes:
        rows: state of the table.
        rule: with the table's record layout.
        executor: that has the rows.
        sums: the gradients, of which index `table` has those of this table.
        scaled: the gradients of the table, if they are scaled or clipped; else None.
    """

    rows: TableState
    rule: Rule
    executor: Any
    sums: RowSums
    table: int
    scaled: DeviceRowGradients | None = None

    @property
    def grads(self) -> DeviceRowGradients:
        """The gradients of the table."""
        return self.scaled or self.sums.of(self.table)

    def alone(self) -> TableStep:
        """Return the same step by the table's sums alone, as it has outgrown the family of the others."""
        now = replace(self.grads, sums=self.sums.alone(self.table, self.executor), table=0)
        return self._replace(sums=now.sums, table=0, scaled=now)


_table_step = functools.partial(tuple.__new__, TableStep)  # a call of Python less for each table


def steps_of(requests: Sequence[StepRequest]) -> list[TableStep]:
    """Return the step of each table of requests, for the executors that have the rows. Sums have theirs in order."""
    found: list[TableStep] = []
    for tables, rule, grads, _, executor, time in requests:
        if type(grads) is RowSums:
            parts = grads.batch.executors, repeat(grads), itertools.count(), repeat(None)
            found += map(_table_step, zip(tables, repeat(rule), *parts, strict=False))
        else:
            now = grads.for_executor(executor)
            found.append(TableStep(tables[0], rule, executor, now.sums, now.table, now))
        if time is not None and tables[-1].lifecycle is not None:  # the host plans it, alone
            found[-1].grads.batch.newest_event = time
    if len(requests) > 1:  # as of param groups, in any order
        places = {id(part.sums): place for place, part in enumerate(found)}
        found.sort(key=lambda part: (places[id(part.sums)], part.table))
    return found


class DeviceStep(CheckedStep):
    """Checked step of several tables on one device.

    Args:
        steps: of the tables.
        verdicts: int32 (k, LINE), see `gate.judge`; None: the kernels of the step decide.
        number: of the step, 0 if the host knows that it is made; int64 () in a CUDA graph.
        runs: the only one of `runs_of`, whose new rows may have room already; None: `check` finds room.
    """

    def __init__(
        self, steps: Sequence[TableStep], verdicts: Tensor | None, number: int | Tensor, runs: Any = None
    ) -> None:
        self.steps, self.verdicts, self.number, self._runs = steps, verdicts, number, runs
        self.rows = list(map(_ROWS, steps))
        self.table_locks = list(map(_LOCK, self.rows))
        self._rooms = with_room(steps)
        self._begun: list[Callable[[], None]] | None = None

    def are_finite(self) -> list[int]:
        """Return for each table whether its gradients are finite. Waits for the device."""
        assert self.verdicts is not None  # the step was checked
        return self.verdicts[:, gate.FINITE].tolist()

    @property
    def due(self) -> list[Due]:
        return [each for part in self._rooms for each in part.executor.due(part.grads)]

    @property
    def elsewhere(self) -> list[DeferredInserts]:
        return [each for part in self._rooms for each in part.executor.elsewhere(part.grads)]

    def check(self) -> None:
        self._runs = None
        with self._ordered():
            prepare(self._rooms)

    def is_prepared(self) -> bool:
        if not self._rooms:
            return True
        if self._runs is not None:
            ((first, *others),) = self._runs
            return first.sums.batch.has_room((first.table, first.table + 1 + len(others)))
        return all(part.executor.is_prepared(part.grads) for part in self._rooms)

    def prepare(self) -> None:
        with self._ordered():
            self._begun = self._begin()

    def _begin(self) -> list[Callable[[], None]]:
        if self._rooms and self._runs is None:
            for parts in _by_room(self._rooms):
                parts[0][0].cover_all(parts)
        begun, k, runs = [], 0, self._runs or runs_of(self.steps)
        is_decided = self.verdicts is not None or self._runs is not None
        if not is_decided and not _are_checked_in_step(runs):  # the host has begun to plan
            self.verdicts = _verdicts(self.steps, self.number)
        for run in runs:
            verdicts = None if self.verdicts is None else self.verdicts[k : k + len(run)]
            begun.append(begin_step(run, verdicts, self.number))
            k += len(run)
        return begun

    def step(self) -> None:
        with InStreamOrder(list(map(_TIMELINE, self.steps)), None):
            begun, self._begun = self._begun or self._begin(), None
            for table_lock in self.table_locks:
                if table_lock.running and type(table_lock.running[0]) is BackgroundCall:
                    table_lock.settle_steps()  # tables of the same lock may have CPU steps under way
            for make in begun:
                make()

    def _ordered(self) -> InStreamOrder:
        # Each table may have been used on its own stream.
        return InStreamOrder(list(map(_TIMELINE, self.steps)), None)


# Many tables are read by one call of `map`.
_SUMS, _SCALED = attrgetter("sums"), attrgetter("scaled")
_ROWS, _LOCK, _TIMELINE = attrgetter("rows"), attrgetter("table_lock"), attrgetter("executor.timeline")
_EXECUTOR = attrgetter("executor")
_FAULT = attrgetter("executor.faults.address")
_ROOM, _FAULTS, _NONFINITE = attrgetter("executor.room"), attrgetter("executor.faults"), attrgetter("rows.on_nonfinite")


def with_room(steps: Sequence[TableStep]) -> list[TableStep]:
    """Return the steps that need room for new rows."""
    return [*compress(steps, map(_ROOM, steps))]


def runs_of(steps: Sequence[TableStep]) -> Sequence[Sequence[TableStep]]:
    """Return the steps in runs of neighbours of one sum, which one kernel can make."""
    sums = steps[0].sums
    is_whole = len(steps) == sums.count_of_tables and list(map(_SUMS, steps)).count(sums) == len(steps)
    if is_whole and (not sums.batch.family.is_open or sums.batch.is_of_family()):
        return [steps]
    steps = [
        part.alone() if part.sums.batch.family.is_open and not part.sums.batch.is_of_family() else part
        for part in steps
    ]
    runs: list[list[TableStep]] = []
    last: TableStep | None = None
    for part in steps:
        if last is not None and part.sums is last.sums and part.table == last.table + 1:
            runs[-1].append(part)
        else:
            runs.append([part])
        last = part
    return runs


def begin_step(steps: Sequence[TableStep], verdicts: Tensor | None, number: int | Tensor) -> Callable[[], None]:
    """Do all work of a step that can fail, including allocations; return a function that makes the step.

    Before that function runs, no row changes, and no step is counted. The caller holds the table locks.

    Args:
        steps: one of `runs_of` a step.
        verdicts: int32 (tables, LINE), see `gate.judge`; None: the kernels of the step decide.
        number: see `DeviceStep`.
    """
    drafts, last, draft = list[Any](), None, None
    sums, first, executor = steps[0].sums, steps[0].table, steps[0].executor
    layout = sums.batch.layout
    if not layout.is_quiet():
        for part in steps:
            part.executor.begin()
    layout.wait_for_copies()
    for rows, rule, own, *_ in steps:
        what = rule, rows.steps
        if what != last or rows.history is not None:  # most neighbours have the same step constants
            if not rule.same_layout(rows.spec.rule):
                raise ArgumentError(f"`rule` must be laid out as that of {rows.subject}: got {rule}.")
            last, draft = what, draft_step(own, rows, rule)
        drafts.append(draft)
    which, found = (first, first + len(steps)), _numbers(steps) if verdicts is None else (verdicts, None)
    case = gate.VerdictCase(*found, *which, sums.batch.tickets, number)
    scaled = steps[0].scaled
    stepped = sums.batch.ready(which, sums.values, case, scaled and scaled.clip_value)
    executor.timeline.uses(sums.values, stepped.keys, sums.norms if verdicts is None else verdicts)
    return functools.partial(_step, steps, stepped, case, number, drafts)


def _numbers(steps: Sequence[TableStep]) -> tuple[Tensor, Tensor]:
    """Return the current numbers of the tables' gradients, and their norms as they were shown, for kernels."""
    sums, count = steps[0].sums, len(steps)
    are_whole = count == sums.count_of_tables and list(map(_SUMS, steps)).count(sums) == count
    if are_whole and {None}.issuperset(map(_SCALED, steps)):
        return sums.norms, sums.norms
    grads = [part.grads for part in steps]
    return _in_a_row([own.number for own in grads]), _in_a_row([own.shown for own in grads])


def _in_a_row(numbers: Sequence[Tensor]) -> Tensor:
    """Return numbers as kernels read them: one after the other in memory."""
    return numbers[0] if len(numbers) == 1 else torch.stack(list(numbers))


def _step(
    steps: Sequence[TableStep],
    stepped: SteppedTables,
    case: gate.VerdictCase,
    number: int | Tensor,
    drafts: Sequence[Any],
) -> None:
    """Step tables, by one kernel for neighbours with the same step constants."""
    tables, keys, ids, count, bounds, found, admit = stepped
    executor, sums, first = steps[0].executor, steps[0].sums, case.first
    weights, versions = None, ()
    if found is not None and found.weights is not None:
        weights, versions, found.weights = found.weights, found.versions, None
        executor.timeline.uses(weights)
    alike = []
    for table, part in enumerate(steps, first):
        is_known = weights is not None and versions[table] == part.rows.version.of_rows
        alike.append((part.rule, part.rows.steps, part.scaled and part.scaled.clip_value, is_known))
    if admit is not None:
        admit()
    captured = executor.timeline.captured
    if captured is None:
        counted = count_all(zip(map(_ROWS, steps), map(_EXECUTOR, steps), drafts, strict=True), number)
    else:
        counted = [captured.begin_step(part.executor, part.rule) for part in steps]
    if not executor.plans:
        executor.step_beside(counted[0][1])
    for (_, _, clip, is_known), places in itertools.groupby(range(len(steps)), key=alike.__getitem__):
        begin, *others = places
        end = begin + 1 + len(others)
        own = case if end == len(steps) else case._replace(ticket=None)  # the last kernel records a refusal
        (step, numbers), run = counted[begin], (first + begin, first + end)
        were = weights if is_known else None
        kernels.step(keys, ids, count, bounds, tables, run, sums.values, own, clip, step, numbers, were)
    if not executor.timeline.is_recorded:
        device_errors.ask(list(map(_FAULTS, steps)))


def judge(requests: Sequence[StepRequest], alone: bool) -> list[DeviceStep]:
    """Check whether tables can step: all of them do or, if one has NaN or Inf, none.

    The host does not wait for the devices, and a later call raises the error of a refused step. It waits in two cases:
    other tables step with these ones, or one of these ones skips nonfinite steps.

    Args:
        requests: of the tables.
        alone: no other tables step with them.

    Returns:
        The checked steps, one for each device.

    Raises:
        NonFiniteGradientError: the host waited, and a table has NaN or Inf.
        MemoryBudgetError: there is no room for the new rows of a table, or too little GPU memory.
        IdError, ArgumentError: of earlier lookups.
    """
    due, groups = steps_of(requests), dict[torch.device, list[TableStep]]()
    for part in due:
        groups.setdefault(part.executor.device, []).append(part)
    if not due[0].executor.timeline.is_recorded:
        device_errors.check(list(map(_FAULTS, due)))
    goes_on = alone and len(groups) < 2 and {"raise"}.issuperset(map(_NONFINITE, due))
    if goes_on and _are_checked_in_step(runs := runs_of(due)):
        return [DeviceStep(due, None, _next_number(due[0].executor.timeline), runs)]
    steps = []
    for group in groups.values():
        with InStreamOrder(list(map(_TIMELINE, group)), None):
            prepare(with_room(group))
            number = _next_number(group[0].executor.timeline)
            is_checked_later = goes_on and _are_checked_in_step(runs_of(group))
            steps.append(DeviceStep(group, None if is_checked_later else _verdicts(group, number), number))
    if goes_on:
        return steps
    with enough_memory("a step"), torch.inference_mode(False):
        known = [(step, step.are_finite()) for step in steps]
        for step, finite in known:
            _raise_what_was_refused(step, finite)
        return [made for step, finite in known if (made := _without_skipped(step, finite)).steps]


def _by_room(due: Sequence[TableStep]) -> list[list[tuple[Any, DeviceRowGradients]]]:
    """Return the executors and gradients of tables that need room, grouped by shared room."""
    rooms = dict[Any, list[tuple[Any, DeviceRowGradients]]]()
    for part in due:
        rooms.setdefault(part.executor.room, []).append((part.executor, part.grads))
    return [*rooms.values()]


def _are_checked_in_step(runs: Sequence[Sequence[TableStep]]) -> bool:
    # Only where one batch has all rows. No kernel runs for an empty one.
    (first, *_), *others = runs
    return not others and first.executor.plans and first.sums.values.shape[0] > 0


def prepare(due: Sequence[TableStep]) -> None:
    """Find the rows of a step, and make room for new ones. Takes the table locks itself."""
    for parts in _by_room(due):
        parts[0][0].prepare_all(parts)


def _next_number(timeline: StreamOrder) -> int | Tensor:
    if timeline.captured is None:
        return next(step_numbers)
    if timeline.is_cuda:
        check_capture([timeline])  # a step by a thread that does not capture would become part of the graph
    return timeline.captured.judge()


def _verdicts(due: Sequence[TableStep], number: int | Tensor) -> Tensor:
    """Check the gradients on the device; return int32 (k, LINE), see `gate.judge`."""
    first, count = due[0].executor, len(due)
    faults = _addresses(tuple(map(_FAULT, due)), first.device)
    first.timeline.keep(faults)
    verdicts = torch.empty(count, gate.LINE, dtype=torch.int32, device=first.device)
    gate.judge(*_numbers(due), faults, verdicts, number)
    return verdicts


@functools.lru_cache(maxsize=64)
def _addresses(pointers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(pointers, dtype=torch.int64, device=device)


def _raise_what_was_refused(step: DeviceStep, finite: Sequence[int]) -> None:
    for part in step.steps:
        part.executor.faults.raise_but_nonfinite()
    for part, is_finite in zip(step.steps, finite, strict=True):
        if not is_finite and part.rows.on_nonfinite == "raise":
            for other in step.steps:
                other.executor.faults.forget(other is part)


def _without_skipped(step: DeviceStep, finite: Sequence[int]) -> DeviceStep:
    assert step.verdicts is not None  # the step was checked
    kept = [k for k, is_finite in enumerate(finite) if is_finite]
    due, verdicts = [step.steps[k] for k in kept], step.verdicts[kept]
    for k, part in enumerate(due):
        verdicts[k, gate.LIVE] = ~part.grads.is_dropped
    for part, is_finite in zip(step.steps, finite, strict=True):
        part.executor.faults.forget()
        if not is_finite:
            with part.rows.table_lock.lock:
                part.rows.skipped_steps += 1
    return DeviceStep(due, verdicts, 0)
