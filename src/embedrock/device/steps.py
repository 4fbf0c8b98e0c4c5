"""One step of several tables on GPUs: all of them step or, if one has NaN or Inf, none."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embedrock.batch.plan import Plan
from embedrock.device import device_errors
from embedrock.device.batch import SteppedTables
from embedrock.device.device_errors import step_numbers
from embedrock.device.gradients import DeviceRowGradients, RowSums
from embedrock.device.step_constants import check_rule, count_step, draft_step
from embedrock.device.stream_order import InStreamOrder, StreamOrder, check_capture, enough_memory
from embedrock.kernels.gpu import gate, rows
from embedrock.optimizers import Rule
from embedrock.table.rows import TableState
from embedrock.table.stepping import CheckedStep, DeferredInserts, StepRequest


class TableStep(NamedTuple):
    """The step of one table.

    Attributes:
        rows: state of the table.
        rule: with the table's record layout.
        grads: for the executor that has the rows.
    """

    rows: TableState
    rule: Rule
    grads: DeviceRowGradients

    @property
    def executor(self) -> Any:
        return self.grads.executor


def steps_of(requests: Sequence[StepRequest]) -> list[TableStep]:
    """Return the step of each table of requests, for the executors that have the rows."""
    found: list[TableStep] = []
    for tables, rule, grads, _, executor in requests:
        if type(grads) is RowSums:
            found += [TableStep(own, rule, grads.of(k)) for k, own in enumerate(tables)]
        else:
            found.append(TableStep(tables[0], rule, grads.for_executor(executor)))
    return found


class DeviceStep(CheckedStep):
    """Checked step of several tables on one device.

    Args:
        steps: of the tables.
        verdicts: int32 (k, LINE), see `gate.judge`; None: the kernel of the step decides.
        number: of the step, 0 if the host knows that it is made; int64 () in a CUDA graph.
    """

    def __init__(self, steps: Sequence[TableStep], verdicts: Tensor | None, number: int | Tensor) -> None:
        self.steps, self.verdicts, self.number = steps, verdicts, number
        self.rows = [part.rows for part in steps]
        self.table_locks = [rows.table_lock for rows in self.rows]
        self._rooms = [part for part in steps if part.executor.room is not None]
        self._begun: list[Callable[[], None]] | None = None

    def are_finite(self) -> list[int]:
        """Return for each table whether its gradients are finite. Waits for the device."""
        assert self.verdicts is not None  # the step was checked
        return self.verdicts[:, gate.FINITE].tolist()

    @property
    def due(self) -> list[tuple[Sequence[TableState], Plan]]:
        found = [((part.rows,), part.executor.plan_in_ram(part.grads)) for part in self._rooms]
        return [(tables, plan) for tables, plan in found if plan is not None]

    @property
    def elsewhere(self) -> list[DeferredInserts]:
        return [each for part in self._rooms for each in part.executor.elsewhere(part.grads)]

    def check(self) -> None:
        with self._ordered():
            prepare(self._rooms)

    def is_prepared(self) -> bool:
        return all([part.executor.is_prepared(part.grads) for part in self._rooms])

    def prepare(self) -> None:
        with self._ordered():
            self._begun = self._begin()

    def _begin(self) -> list[Callable[[], None]]:
        for room in _by_room(self._rooms):
            room[0].executor.cover_all([(part.executor, part.grads) for part in room])
        begun, k = list[Callable[[], None]](), 0
        for steps in segments_of(self.steps):
            verdicts = None if self.verdicts is None else self.verdicts[k : k + len(steps)]
            begun.append(begin_step(steps, verdicts, self.number))
            k += len(steps)
        return begun

    def step(self) -> None:
        with self._ordered():
            begun, self._begun = self._begun or self._begin(), None
            for table_lock in self.table_locks:
                if table_lock.running:
                    table_lock.settle_steps()  # tables of the same lock may have CPU steps under way
            for make in begun:
                make()

    def _ordered(self) -> InStreamOrder:
        # Each table may have been used on its own stream.
        return InStreamOrder([part.executor.timeline for part in self.steps], None)


def segments_of(steps: Sequence[TableStep]) -> list[list[TableStep]]:
    """Return the steps in runs of neighbours of one sum, which one kernel can make."""
    segments: list[list[TableStep]] = []
    last: DeviceRowGradients | None = None
    for part in steps:
        grads = part.grads
        sums = grads.sums
        if sums.count_of_tables > 1 and sums.batch.family.is_open and not sums.batch.is_of_family():
            grads = replace(grads, sums=grads.alone, table=0)  # tables that outgrow the family step alone
            part = part._replace(grads=grads)
        if last is not None and grads.sums is last.sums and grads.table == last.table + 1:
            segments[-1].append(part)
        else:
            segments.append([part])
        last = grads
    return segments


def begin_step(steps: Sequence[TableStep], verdicts: Tensor | None, number: int | Tensor) -> Callable[[], None]:
    """Do all work of a step that can fail, including allocations; return a function that makes the step.

    Before that function runs, no row changes, and no step is counted. The caller holds the table locks.

    Args:
        steps: one of `segments_of` a step.
        verdicts: int32 (tables, LINE), see `gate.judge`; None: the kernel of the step decides.
        number: see `DeviceStep`.
    """
    drafts, last, draft = list[Any](), None, None
    for part in steps:
        executor = part.executor
        executor.begin_step()
        what = part.rule, part.rows.steps
        if what != last or part.rows.history is not None:  # most neighbours have the same step constants
            check_rule(part.rule, part.rows)
            last, draft = what, draft_step(executor, part.rule)
        drafts.append(draft)
    grads = steps[0].grads
    sums, which = grads.sums, (grads.table, grads.table + len(steps))
    stepped = sums.batch.ready(which, sums.values, verdicts, grads.clip_value)
    executor = steps[0].executor
    executor.timeline.uses(sums.values, stepped.keys, *([] if verdicts is None else [verdicts]))
    return functools.partial(_step, steps, sums, stepped, which, verdicts, number, drafts)


def _step(
    steps: Sequence[TableStep],
    sums: RowSums,
    stepped: SteppedTables,
    which: tuple[int, int],
    verdicts: Tensor | None,
    number: int | Tensor,
    drafts: Sequence[Any],
) -> None:
    """Step tables, by one kernel for neighbours with the same step constants."""
    tables, keys, ids, count, bounds, found, admit = stepped
    executor, grads, (first, _) = steps[0].executor, steps[0].grads, which
    weights, versions = None, ()
    if found is not None and found.weights is not None:
        weights, versions, found.weights = found.weights, found.versions, None
        executor.timeline.uses(weights)
    alike, counted = [], []
    for table, (state, rule, own) in enumerate(steps, first):
        is_known = weights is not None and versions[table] == state.version.of_rows
        alike.append((rule, state.steps, own.clip_value, is_known))
    if admit is not None:
        admit()
    for part, draft in zip(steps, drafts, strict=True):
        counted.append(count_step(part.executor, part.rows, part.rule, draft, number))
    executor.step_beside(counted[0][1])
    for (_, _, clip, is_known), places in itertools.groupby(range(len(steps)), key=alike.__getitem__):
        begin, *others = places
        end = begin + 1 + len(others)
        if verdicts is None:
            own = gate.VerdictCase(grads.number, grads.shown, executor.faults.tensor, sums.batch.tickets, number)
        else:
            own = verdicts[begin:end]
        (step, numbers), run = counted[begin], (first + begin, first + end)
        were = weights if is_known else None
        rows.step(keys, ids, count, bounds, tables, run, sums.values, own, clip, step, numbers, were)
    if not executor.timeline.is_recorded:
        device_errors.ask([part.executor.faults for part in steps])


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
    goes_on = alone
    for part in due:
        executor = part.executor
        groups.setdefault(executor.device, []).append(part)
        goes_on &= part.rows.on_nonfinite == "raise"
    device_errors.check([part.executor.faults for part in due if not part.executor.timeline.is_recorded])
    goes_on &= len(groups) < 2
    if goes_on and len(due) == 1 and _is_checked_in_step(due[0].grads):
        return [DeviceStep(due, None, _next_number(due[0].executor.timeline))]
    steps = []
    for group in groups.values():
        with InStreamOrder([part.executor.timeline for part in group], None):
            prepare([part for part in group if part.executor.room is not None])
            steps.append(_judge(group))
    if goes_on:
        return steps
    with enough_memory("a step"), torch.inference_mode(False):
        known = [(step, step.are_finite()) for step in steps]
        for step, finite in known:
            _raise_what_was_refused(step, finite)
        return [made for step, finite in known if (made := _without_skipped(step, finite)).steps]


def _by_room(due: Sequence[TableStep]) -> list[list[TableStep]]:
    """Return the tables of a step that need room, grouped by shared room."""
    rooms: dict[Any, list[TableStep]] = {}
    for part in due:
        rooms.setdefault(part.executor.room, []).append(part)
    return [*rooms.values()]


def _is_checked_in_step(grads: DeviceRowGradients) -> bool:
    # Not for one of several tables, or an empty batch, for which no kernel runs.
    return grads.executor.checks_in_step and grads.sums.count_of_tables == 1 and len(grads.sums.values) > 0


def prepare(due: Sequence[TableStep]) -> None:
    """Find the rows of a step, and make room for new ones. Takes the table locks itself."""
    for parts in _by_room(due):
        parts[0].executor.prepare_all([(part.executor, part.grads) for part in parts])


def _next_number(timeline: StreamOrder) -> int | Tensor:
    if timeline.captured is None:
        return next(step_numbers)
    if timeline.is_cuda:
        check_capture([timeline])  # a step by a thread that does not capture would become part of the graph
    return timeline.captured.judge()


def _judge(due: Sequence[TableStep]) -> DeviceStep:
    first, count = due[0].executor, len(due)
    number = _next_number(first.timeline)
    numbers = shown = None
    sums = due[0].grads.sums
    if len(segments_of(due)) == 1 and count == sums.count_of_tables:
        shown = sums.norms
        if all([part.grads.scaled_to is None for part in due]):
            numbers = shown
    if numbers is None:
        numbers = torch.stack([part.grads.number for part in due])
        shown = torch.stack([part.grads.shown for part in due]) if shown is None else shown
    faults = _addresses(tuple([part.executor.faults.tensor.data_ptr() for part in due]), first.device)
    first.timeline.keep(faults)
    verdicts = torch.empty(count, gate.LINE, dtype=torch.int32, device=first.device)
    gate.judge(numbers, shown, faults, verdicts, number)
    return DeviceStep(due, verdicts, number)


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
