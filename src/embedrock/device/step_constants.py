"""Counting of steps on a GPU, and their constants for kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedrock.device.copies import uploaded
from embedrock.device.stream_order import StreamOrder
from embedrock.optimizers import Rule
from embedrock.table.rows import TableState
from embedrock.table.stepping import next_numbers

HISTORIES = ("history", "log_fade")  # of a dense rule's step constants: arrays that grow by a row at each step


class StepConstants:
    """A rule's step constants for kernels, with device copies of its step history.

    The copies are updated by the rows added since.
    """

    def __init__(self, device: torch.device, timeline: StreamOrder) -> None:
        self._device, self._timeline = device, timeline
        self._copies: dict[str, tuple[np.ndarray, Tensor, int]] = {}

    def uploaded(self, numbers: Any) -> Any:
        """Return step constants with their history on the device. The history grows by one row a step."""
        if not hasattr(numbers, "history"):
            return numbers
        fields = [name for name in HISTORIES if hasattr(numbers, name)]  # Ftrl has no log_fade
        return numbers._replace(**{name: self._follow(name, numbers) for name in fields})

    def _follow(self, name: str, numbers: Any) -> Tensor:
        array, steps = getattr(numbers, name), numbers.steps
        known, copy, done = self._copies.get(name, (None, None, 0))
        if known is not array or copy is None or steps < done:
            if copy is not None:
                self._timeline.uses(copy)
            copy = uploaded(array, self._device)
        else:
            start = max(0, done - 1)  # an undone step may have been replaced
            copy[start : steps + 1] = uploaded(array[start : steps + 1], self._device)
        self._copies[name] = array, copy, steps
        return copy


def draft_step(executor: Any, rows: TableState, rule: Rule) -> Any:
    """Do all work of counting a step that can fail; return the rule's step constants on the device.

    Nothing changes.
    """
    if rows.history is None:
        return rule.numbers(rows.steps + 1)
    return executor.constants.uploaded(next_numbers(rows, rule))


def count_all(steps: Iterable[tuple[TableState, Any, Any]], number: Any) -> list[tuple[int, Any]]:
    """Count drafted steps that are launched now or by the next replay.

    Args:
        steps: the rows of each table, its executor, and the result of `draft_step`.
        number: see `steps.DeviceStep`.

    Returns:
        The number of each step, and the rule's step constants, for kernels.
    """
    counted: list[tuple[int, Any]] = []
    for rows, executor, draft in steps:
        if rows.history is not None:
            rows.count(draft)
        else:  # as `TableState.count` does, without a call for each table
            rows.steps += 1
            rows.version.now += 1
        executor.mark_changed()
        if number:
            executor.faults.launched.append(number)
        counted.append((rows.steps, draft))
    return counted
