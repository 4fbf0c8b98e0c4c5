"""One step of several tables on GPUs: all of them or, where one has NaN or Inf, none."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from embedrock.device.faults import step_numbers
from embedrock.device.gradients import DeviceGradients
from embedrock.device.side import DeviceSide
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
        factors: float32 (k,), what each table's gradients are to be multiplied by.
        live: int32 (k,), 1 where rows are stepped.
        finite: int32 (k,), 1 where the table's own gradients are finite.
        number: of the step; 0 where the host knows that it is made.
    """

    due: Sequence[DeviceDue]
    factors: Tensor
    live: Tensor
    finite: Tensor
    number: int

    def step(self) -> None:
        """Make the step that was judged."""
        for k, (side, rule, grads) in enumerate(self.due):
            if self.number:
                side.faults.note_step(self.number)
            side.step(rule, grads, self.factors[k : k + 1], self.live[k : k + 1])


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
    """
    groups: dict[torch.device, list[DeviceDue]] = {}
    for part in due:
        part.side.check()
        groups.setdefault(part.side.device, []).append(part)
    verdicts = [_judge(group) for group in groups.values()]
    if alone and len(groups) < 2 and all(part.side.table.on_nonfinite == "raise" for part in due):
        return verdicts
    for verdict in verdicts:
        _raise_what_was_refused(verdict)
    return [_without_skipped(verdict) for verdict in verdicts]


def _judge(due: Sequence[DeviceDue]) -> Verdict:
    device, count, number = due[0].side.device, len(due), next(step_numbers)
    numbers = torch.stack([*(part.grads.number for part in due), *(part.grads.shown for part in due)])
    faults = _addresses(tuple(part.side.faults.tensor.data_ptr() for part in due), device)
    flags = torch.empty(2, count, dtype=torch.int32, device=device)
    verdict = Verdict(due, torch.empty(count, device=device), flags[0], flags[1], number)
    gate.judge(numbers, faults, verdict.factors, verdict.live, verdict.finite, number)
    return verdict


@functools.lru_cache(maxsize=64)
def _addresses(pointers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(pointers, dtype=torch.int64, device=device)


def _raise_what_was_refused(verdict: Verdict) -> None:
    for part, is_finite in zip(verdict.due, verdict.finite.tolist(), strict=True):
        if not is_finite and part.side.table.on_nonfinite == "raise":
            for other in verdict.due:
                other.side.faults.forget(other is part)


def _without_skipped(verdict: Verdict) -> Verdict:
    finite = verdict.finite.tolist()
    for part, is_finite in zip(verdict.due, finite, strict=True):
        part.side.faults.forget()
        if not is_finite:
            part.side.skip_step()
    kept = [k for k, is_finite in enumerate(finite) if is_finite]
    factors = verdict.factors[kept]
    live = (factors != 0).to(torch.int32)
    return Verdict([verdict.due[k] for k in kept], factors, live, verdict.finite[kept], 0)
