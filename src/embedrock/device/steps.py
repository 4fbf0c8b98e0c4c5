"""One step of several tables on GPUs: all of them or, where one has NaN or Inf, none."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from embedrock.device.faults import step_numbers
from embedrock.device.gradients import DeviceGradients
from embedrock.device.side import DeviceSide, Judged, Room
from embedrock.device.timeline import enough_memory
from embedrock.kernels.gpu import gate
from embedrock.rules import Rule


class DeviceDue(NamedTuple):
    """One table's part in a step."""

    side: DeviceSide
    rule: Rule
    grads: DeviceGradients


class Verdict(NamedTuple):
    """What the device decided about a step of several tables.

    Attributes:
        due: the tables.
        rooms: what each table's step needs.
        factors: float32 (k,), what each table's gradients are to be multiplied by.
        live: int32 (k,), 1 where rows are stepped.
        finite: int32 (k,), 1 where the table's own gradients are finite.
        number: of the step; 0 where the host knows that it is made.
    """

    due: Sequence[DeviceDue]
    rooms: Sequence[Room]
    factors: Tensor
    live: Tensor
    finite: Tensor
    number: int

    def step(self) -> None:
        """Make the step that was judged."""
        for k, (side, rule, grads) in enumerate(self.due):
            judged = Judged(self.factors[k : k + 1], self.live[k : k + 1], self.number)
            side.step(rule, grads, self.rooms[k], judged)


def judge(due: Sequence[DeviceDue], alone: bool) -> list[Verdict]:
    """Decide whether tables are stepped: all of them or, where one has NaN or Inf, none.

    Nothing waits for the devices, and what is refused is raised by a later call, but where the host must know: where
    other tables are to be stepped with these, or one of these leaves steps out that have NaN or Inf.

    Args:
        due: the tables.
        alone: whether no other tables are stepped with them.

    Returns:
        A verdict for each device.

    Raises:
        NonFiniteGradientError: the host waited, and a table has NaN or Inf.
        MemoryBudgetError: there is no room for the new rows of a table, or too little GPU memory.
        IdError, ArgumentError: of earlier lookups.
    """
    groups: dict[torch.device, list[DeviceDue]] = {}
    for part in due:
        part.side.check()
        groups.setdefault(part.side.device, []).append(part)
    with enough_memory("a step"), torch.inference_mode(False):
        verdicts = []
        for group in groups.values():
            with group[0].side.timeline.ordered():
                verdicts.append(_judge(group))
        if alone and len(groups) < 2 and all(part.side.table.on_nonfinite == "raise" for part in due):
            return verdicts
        known = [(verdict, verdict.finite.tolist()) for verdict in verdicts]
        for verdict, finite in known:
            _raise_what_was_refused(verdict, finite)
        return [_without_skipped(verdict, finite) for verdict, finite in known]


def _judge(due: Sequence[DeviceDue]) -> Verdict:
    rooms = [part.side.prepare(part.grads.plan) for part in due]
    device, count, number = due[0].side.device, len(due), next(step_numbers)
    numbers = torch.stack([*(part.grads.number for part in due), *(part.grads.shown for part in due)])
    faults = _addresses(tuple(part.side.faults.tensor.data_ptr() for part in due), device)
    flags = torch.empty(2, count, dtype=torch.int32, device=device)
    factors = torch.empty(count, dtype=torch.float32, device=device)
    gate.judge(numbers, faults, factors, flags[0], flags[1], number)
    return Verdict(due, rooms, factors, flags[0], flags[1], number)


@functools.lru_cache(maxsize=64)
def _addresses(pointers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(pointers, dtype=torch.int64, device=device)


def _raise_what_was_refused(verdict: Verdict, finite: Sequence[int]) -> None:
    for part in verdict.due:
        part.side.faults.raise_but_nonfinite()
    for part, is_finite in zip(verdict.due, finite, strict=True):
        if not is_finite and part.side.table.on_nonfinite == "raise":
            for other in verdict.due:
                other.side.faults.forget(other is part)


def _without_skipped(verdict: Verdict, finite: Sequence[int]) -> Verdict:
    for part, is_finite in zip(verdict.due, finite, strict=True):
        part.side.faults.forget()
        if not is_finite:
            part.side.skip_step()
    kept = [k for k, is_finite in enumerate(finite) if is_finite]
    due, rooms = [verdict.due[k] for k in kept], [verdict.rooms[k] for k in kept]
    live = [(~part.grads.is_dropped).to(torch.int32).reshape(1) for part in due]
    empty = verdict.live[:0]
    return Verdict(due, rooms, verdict.factors[kept], torch.cat([empty, *live]), verdict.finite[kept], 0)
