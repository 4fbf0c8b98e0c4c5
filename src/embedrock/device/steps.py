"""One step of several tables on GPUs: all of them or, where one has NaN or Inf, none."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from embedrock.device import joint
from embedrock.device.faults import step_numbers
from embedrock.device.gradients import DeviceGradients
from embedrock.device.timeline import Ordered, Timeline, enough_memory
from embedrock.kernels.gpu import gate
from embedrock.rules import Rule

if TYPE_CHECKING:
    from embedrock.device.side import DeviceSide


class DeviceDue(Protocol):
    """One table's part in a step."""

    @property
    def side(self) -> DeviceSide: ...
    @property
    def rule(self) -> Rule: ...
    @property
    def grads(self) -> DeviceGradients: ...


class Judged(NamedTuple):
    """How a step of a table is made.

    Attributes:
        verdict: int32 (LINE,), see `gate.judge`; None: the kernel that makes it decides.
        number: of the step, 0 where the host knows that it is made; int64 () where a CUDA graph makes it again.
    """

    verdict: Tensor | None
    number: int | Tensor


class DeviceStep(NamedTuple):
    """A step of several tables, and what the device decided about it.

    Attributes:
        due: the tables.
        verdicts: int32 (k, LINE), see `gate.judge`.
        number: see `Judged`.
    """

    due: Sequence[DeviceDue]
    verdicts: Tensor
    number: int | Tensor

    def step(self) -> None:
        """Make the step that was judged."""
        k = 0
        for part in joint.runs_of(self.due):
            if isinstance(part, joint.Run):
                joint.step(part, self.verdicts, self.number)
                k += len(part.due)
            else:
                part.side.step(part.rule, part.grads, Judged(self.verdicts.select(0, k), self.number))
                k += 1


class StepAlone(NamedTuple):
    """A step of one table that the device decides about as it makes it.

    Attributes:
        part: the table.
        number: of the step.
    """

    part: DeviceDue
    number: int | Tensor

    def step(self) -> None:
        """Make the step, if it can be made."""
        self.part.side.step(self.part.rule, self.part.grads, Judged(None, self.number))


def judge(due: Sequence[DeviceDue], alone: bool) -> Sequence[DeviceStep | StepAlone]:
    """Decide whether tables are stepped: all of them or, where one has NaN or Inf, none.

    Nothing waits for the devices, and what is refused is raised by a later call, but where the host must know: where
    other tables are to be stepped with these, or one of these leaves steps out that have NaN or Inf.

    Args:
        due: the tables.
        alone: whether no other tables are stepped with them.

    Returns:
        What to do of it, for each device.

    Raises:
        NonFiniteGradientError: the host waited, and a table has NaN or Inf.
        MemoryBudgetError: there is no room for the new rows of a table, or too little GPU memory.
        IdError, ArgumentError: of earlier lookups.
    """
    groups: dict[torch.device, list[DeviceDue]] = {}
    for part in due:
        part.side.check()
        groups.setdefault(part.side.device, []).append(part)
    goes_on = alone and len(groups) < 2 and all(part.side.rows.on_nonfinite == "raise" for part in due)
    is_judged = not (goes_on and len(due) == 1 and due[0].side.judges(due[0].grads))
    steps = []
    for group in groups.values():
        with Ordered([part.side.timeline for part in group], ()):  # each may have been used on a stream of its own
            _prepare(group)
            if is_judged:
                steps.append(_judge(group))
    if not is_judged:
        return [StepAlone(due[0], _next_number(due[0].side.timeline))]
    if goes_on:
        return steps
    with enough_memory("a step"), torch.inference_mode(False):
        known = [(step, step.verdicts[:, gate.FINITE].tolist()) for step in steps]
        for step, finite in known:
            _raise_what_was_refused(step, finite)
        return [_without_skipped(step, finite) for step, finite in known]


def _prepare(due: Sequence[DeviceDue]) -> None:
    rooms: dict[Any, list[DeviceDue]] = {}
    for part in due:
        rooms.setdefault(part.side.room, []).append(part)
    for parts in rooms.values():
        parts[0].side.prepare_all([(part.side, part.grads) for part in parts])


def _next_number(timeline: Timeline) -> int | Tensor:
    """Return the number of the next step, see `Judged.number`."""
    return next(step_numbers) if timeline.captured is None else timeline.captured.judge()


def _judge(due: Sequence[DeviceDue]) -> DeviceStep:
    device, count, timeline = due[0].side.device, len(due), due[0].side.timeline
    number = _next_number(timeline)
    numbers, shown = [part.grads.number for part in due], [part.grads.shown for part in due]
    if count == 1:
        numbers, shown = numbers[0], shown[0]
    else:
        numbers = torch.stack([*numbers, *shown])
        shown = numbers[count:]
    faults = _addresses(tuple(part.side.faults.tensor.data_ptr() for part in due), device)
    timeline.keep(faults)
    verdicts = torch.empty(count, gate.LINE, dtype=torch.int32, device=device)
    gate.judge(numbers, shown, faults, verdicts, number)
    return DeviceStep(due, verdicts, number)


@functools.lru_cache(maxsize=64)
def _addresses(pointers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(pointers, dtype=torch.int64, device=device)


def _raise_what_was_refused(step: DeviceStep, finite: Sequence[int]) -> None:
    for part in step.due:
        part.side.faults.raise_but_nonfinite()
    for part, is_finite in zip(step.due, finite, strict=True):
        if not is_finite and part.side.rows.on_nonfinite == "raise":
            for other in step.due:
                other.side.faults.forget(other is part)


def _without_skipped(step: DeviceStep, finite: Sequence[int]) -> DeviceStep:
    for part, is_finite in zip(step.due, finite, strict=True):
        part.side.faults.forget()
        if not is_finite:
            part.side.skip_step()
    kept = [k for k, is_finite in enumerate(finite) if is_finite]
    due, verdicts = [step.due[k] for k in kept], step.verdicts[kept]
    for k, part in enumerate(due):
        verdicts[k, gate.LIVE] = ~part.grads.is_dropped
    return DeviceStep(due, verdicts, 0)
