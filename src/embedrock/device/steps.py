"""One step of several tables on GPUs: all of them step or, if one has NaN or Inf, none."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from embedrock.batch.plan import Plan
from embedrock.device import device_errors as faults
from embedrock.device.device_errors import step_numbers
from embedrock.device.gradients import RowSums
from embedrock.device.joint import TableRowSums
from embedrock.device.plan import SteppedTables
from embedrock.device.step_constants import check_rule, count_step, draft_step
from embedrock.device.stream_order import InStreamOrder, StreamOrder, check_capture, enough_memory
from embedrock.kernels.gpu import gate, rows
from embedrock.table.rows import TableState
from embedrock.table.stepping import CheckedStep, DeferredInserts, StepRequest


class DeviceStep(CheckedStep):
    """Checked step of several tables on one device.

    Args:
        requests: of the tables.
        verdicts: int32 (k, LINE), see `gate.judge`; None: the kernels of the step decide.
        number: of the step, 0 if the host knows that it is made; int64 () in a CUDA graph.
    """

    def __init__(self, due: Sequence[StepRequest], verdicts: Tensor | None, number: int | Tensor) -> None:
        self.requests, self.verdicts, self.number = due, verdicts, number
        self.rows = [part.tables[0] for part in due]
        self.table_locks = [rows.table_lock for rows in self.rows]
        self._begun: list[Callable[[], None]] | None = None

    def are_finite(self) -> list[int]:
        """Return for each table whether its gradients are finite. Waits for the device."""
        assert self.verdicts is not None  # the step was checked
        return self.verdicts[:, gate.FINITE].tolist()

    @property
    def due(self) -> list[tuple[Sequence[TableState], Plan]]:
        found = [(part.tables, part.executor.plan_in_ram(part.grads)) for part in self.requests if part.executor.room]
        return [(tables, plan) for tables, plan in found if plan is not None]

    @property
    def elsewhere(self) -> list[DeferredInserts]:
        return [each for part in self.requests if part.executor.room for each in part.executor.elsewhere(part.grads)]

    def check(self) -> None:
        with self._ordered():
            prepare(self.requests)

    def is_prepared(self) -> bool:
        for part in self.requests:
            if part.executor.room is not None and not part.executor.is_prepared(part.grads):
                return False
        return True

    def prepare(self) -> None:
        with self._ordered():
            self._begun = self._begin()

    def _begin(self) -> list[Callable[[], None]]:
        for room in rooms_of(self.requests):
            room[0].executor.cover_all([(part.executor, part.grads) for part in room])
        begun, k = list[Callable[[], None]](), 0
        segments = segments_of(self.requests)
        is_left_to_kernels = self.verdicts is None and self.requests[0].executor.room is not None
        if is_left_to_kernels and not _is_checked_in_step(segments):  # the host has begun to plan
            self.verdicts = _verdicts(self.requests, self.number)
        for sums, due in segments:
            verdicts = None if self.verdicts is None else self.verdicts[k : k + len(due)]
            begun.append(begin_step(due, sums, verdicts, self.number))
            k += len(due)
        return begun

    def step(self) -> None:
        with self._ordered():
            begun, self._begun = self._begun or self._begin(), None
            for table_lock in self.table_locks:
                table_lock.settle_steps()  # tables of the same lock may have CPU steps under way
            for make in begun:
                make()

    def _ordered(self) -> InStreamOrder:
        # Each table may have been used on its own stream.
        return InStreamOrder([part.executor.timeline for part in self.requests], None)


def segments_of(due: Sequence[StepRequest]) -> list[tuple[TableRowSums | None, list[StepRequest]]]:
    """Return the tables of a step: neighbours of one joint sum, with the first one's part of it, and single ones."""
    segments: list[tuple[TableRowSums | None, list[StepRequest]]] = []
    last = None
    for part in due:
        sums = part.grads.sums
        if type(sums) is not TableRowSums or part.executor.joins is not sums.joint.kind:
            sums = None
        if sums is not None and last is not None and sums.follows(last):
            segments[-1][1].append(part)
        else:
            segments.append((sums, [part]))
        last = sums
    return segments


def begin_step(
    due: Sequence[StepRequest], sums: TableRowSums | None, verdicts: Tensor | None, number: int | Tensor
) -> Callable[[], None]:
    """Do all work of a step that can fail, including allocations; return a function that makes the step.

    Before that function runs, no row changes, and no step is counted. The caller holds the table locks.

    Args:
        due, sums: one of `segments_of` a step.
        verdicts: int32 (tables, LINE), see `gate.judge`; None: the kernels of the step decide.
        number: see `DeviceStep`.
    """
    grads, timeline = due[0].grads, due[0].executor.timeline
    drafts, last, draft = list[Any](), None, None
    for part in due:
        check_rule(part.rule, part.tables[0])
        part.executor.begin_step()
        what = part.rule, part.tables[0].steps
        if what != last:  # most neighbours have the same step constants
            last, draft = what, draft_step(part.executor, part.rule)
        drafts.append(draft)
    first = 0 if sums is None else sums.table
    which, plan = (first, first + len(due)), grads.plan if sums is None else sums.joint.plan
    known = verdicts if verdicts is not None else gate.VerdictCase(*_numbers(due), *which, plan.tickets, number)
    if sums is not None:
        stepped = sums.joint.ready(which, sums.joint_values, known)
        timeline.uses(stepped.tables.entries, plan.order, sums.joint.bounds)
    else:
        timeline.uses(plan.keys, plan.ids)
        stepped = due[0].executor.ready(known if verdicts is None else verdicts[0], grads)
    timeline.uses(stepped.values, stepped.keys, stepped.row_count, grads.shown if verdicts is None else verdicts)
    return functools.partial(_step, due, stepped, known, number, drafts)


def _numbers(due: Sequence[StepRequest]) -> tuple[Tensor, Tensor]:
    """Return the current numbers of gradients, and their norms as they were shown, for kernels."""
    return _in_a_row([part.grads.number for part in due]), _in_a_row([part.grads.shown for part in due])


def _in_a_row(numbers: Sequence[Tensor]) -> Tensor:
    """Return numbers as kernels read them: the first, if the others follow it in memory, or a copy of all."""
    first = numbers[0].data_ptr()
    follow = all(number.data_ptr() == first + 4 * k for k, number in enumerate(numbers))
    return numbers[0] if follow else torch.stack(list(numbers))


def _step(
    due: Sequence[StepRequest],
    stepped: SteppedTables,
    verdicts: Any,
    number: int | Tensor,
    drafts: Sequence[Any],
) -> None:
    """Step tables, by one kernel for neighbours with the same step constants."""
    tables, keys, ids, count, bounds, values, first, found, admit = stepped
    executor = due[0].executor
    weights, versions = None, ()
    if found is not None and found.weights is not None:
        weights, versions, found.weights = found.weights, found.versions, None
        executor.timeline.uses(weights)
    alike, counted, asked = [], [], []
    for table, part in enumerate(due, first):
        (state,) = part.tables
        is_known = weights is not None and versions[table] == state.version.of_rows
        alike.append((part.rule, state.steps, part.grads.clip_value, is_known))
        asked.append(part.executor.faults)
    if admit is not None:
        admit()
    for part, draft in zip(due, drafts, strict=True):
        counted.append(count_step(part.executor, part.rule, draft, number))
    if bounds is None:
        executor.step_beside(counted[0][1])
    for (_, _, clip, is_known), places in itertools.groupby(range(len(due)), key=alike.__getitem__):
        begin, *others = places
        end = begin + 1 + len(others)
        if type(verdicts) is not gate.VerdictCase:
            own = verdicts[begin:end]
        else:  # the last kernel records a refusal
            own = verdicts if end == len(due) else verdicts._replace(ticket=None)
        (step, numbers), which = counted[begin], (first + begin, first + end)
        were = weights if is_known else None
        rows.step(keys, ids, count, bounds, tables, which, values, own, clip, step, numbers, were)
    if not executor.timeline.is_recorded:
        faults.ask(asked)


def judge(due: Sequence[StepRequest], alone: bool) -> list[DeviceStep]:
    """Check whether tables can step: all of them do or, if one has NaN or Inf, none.

    The host does not wait for the devices, and a later call raises the error of a refused step. It waits in two cases:
    other tables step with these ones, or one of these ones skips nonfinite steps.

    Args:
        due: step requests of the tables.
        alone: no other tables step with them.

    Returns:
        The checked steps, one for each device.

    Raises:
        NonFiniteGradientError: the host waited, and a table has NaN or Inf.
        MemoryBudgetError: there is no room for the new rows of a table, or too little GPU memory.
        IdError, ArgumentError: of earlier lookups.
    """
    groups: dict[torch.device, list[StepRequest]] = {}
    goes_on = alone
    for part in due:
        executor = part.executor
        executor.check()
        groups.setdefault(executor.device, []).append(part)
        goes_on &= part.tables[0].on_nonfinite == "raise"
    goes_on &= len(groups) < 2
    if goes_on and not rooms_of(due) and _is_checked_in_step(segments_of(due)):
        return [DeviceStep(due, None, _next_number(due[0].executor.timeline))]
    steps = []
    for group in groups.values():
        with InStreamOrder([part.executor.timeline for part in group], None):
            prepare(group)
            steps.append(_judge(group, goes_on))
    if goes_on:
        return steps
    with enough_memory("a step"), torch.inference_mode(False):
        known = [(step, step.are_finite()) for step in steps]
        for step, finite in known:
            _raise_what_was_refused(step, finite)
        return [made for step, finite in known if (made := _without_skipped(step, finite)).requests]


def rooms_of(due: Sequence[StepRequest]) -> list[list[StepRequest]]:
    """Return the tables of a step that need room, grouped by shared room."""
    rooms: dict[Any, list[StepRequest]] = {}
    for part in due:
        if (room := part.executor.room) is not None:
            rooms.setdefault(room, []).append(part)
    return [*rooms.values()]


def _is_checked_in_step(segments: Sequence[tuple[TableRowSums | None, list[StepRequest]]]) -> bool:
    # Only where one plan has all rows. No kernel runs for an empty plan.
    (sums, due), *others = segments
    if others or not due[0].executor.checks_in_step:
        return False
    if sums is not None:
        return sums.joint.plan.keys.shape[0] > 0
    grads = due[0].grads
    return type(grads.sums) is RowSums and grads.plan.keys.shape[0] > 0


def prepare(due: Sequence[StepRequest]) -> None:
    """Find the rows of a step, and make room for new ones. Takes the table locks itself."""
    for parts in rooms_of(due):
        parts[0].executor.prepare_all([(part.executor, part.grads) for part in parts])


def _next_number(timeline: StreamOrder) -> int | Tensor:
    if timeline.captured is None:
        return next(step_numbers)
    if timeline.is_cuda:
        check_capture([timeline])  # a step by a thread that does not capture would become part of the graph
    return timeline.captured.judge()


def _judge(due: Sequence[StepRequest], goes_on: bool) -> DeviceStep:
    number = _next_number(due[0].executor.timeline)
    is_checked_later = goes_on and _is_checked_in_step(segments_of(due))
    return DeviceStep(due, None if is_checked_later else _verdicts(due, number), number)


def _verdicts(due: Sequence[StepRequest], number: int | Tensor) -> Tensor:
    device, count, timeline = due[0].executor.device, len(due), due[0].executor.timeline
    numbers, shown = _numbers(due)
    faults = _addresses(tuple([part.executor.faults.tensor.data_ptr() for part in due]), device)
    timeline.keep(faults)
    verdicts = torch.empty(count, gate.LINE, dtype=torch.int32, device=device)
    gate.judge(numbers, shown, faults, verdicts, number)
    return verdicts


@functools.lru_cache(maxsize=64)
def _addresses(pointers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(pointers, dtype=torch.int64, device=device)


def _raise_what_was_refused(step: DeviceStep, finite: Sequence[int]) -> None:
    for part in step.requests:
        part.executor.faults.raise_but_nonfinite()
    for part, is_finite in zip(step.requests, finite, strict=True):
        if not is_finite and part.executor.rows.on_nonfinite == "raise":
            for other in step.requests:
                other.executor.faults.forget(other is part)


def _without_skipped(step: DeviceStep, finite: Sequence[int]) -> DeviceStep:
    assert step.verdicts is not None  # the step was checked
    kept = [k for k, is_finite in enumerate(finite) if is_finite]
    due, verdicts = [step.requests[k] for k in kept], step.verdicts[kept]
    for k, part in enumerate(due):
        verdicts[k, gate.LIVE] = ~part.grads.is_dropped
    for part, is_finite in zip(step.requests, finite, strict=True):
        part.executor.faults.forget()
        if not is_finite:
            with part.executor.rows.table_lock.lock:
                part.executor.rows.skipped_steps += 1
    return DeviceStep(due, verdicts, 0)
