"""`DeviceErrors`: errors of GPU work, which the host learns later."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedrock.batch.wrong_ids import OPEN_IDS
from embedrock.device.copies import DeviceEvent
from embedrock.device.stream_order import wait_for_caller
from embedrock.errors import ArgumentError, IdError, NonFiniteGradientError
from embedrock.table.rows import TableState

BAD_ID, NONFINITE, BESIDE, BAD_OFFSETS = 1, 2, 3, 4  # error codes; BESIDE: another table of the same step was refused


# All instances. When one raises, the other tables of the refused step undo their steps, too.
_all: weakref.WeakSet[DeviceErrors] = weakref.WeakSet()

step_numbers = itertools.count(1)  # of all GPU steps in this process


def in_use() -> list[TableState]:
    """Return the rows of all tables of this process that are, or were, on devices."""
    return [rows for rows in (faults._rows_of() for faults in list(_all)) if rows is not None]


LINES = 64
_free: dict[torch.device, list[tuple[Tensor, np.ndarray]]] = {}
_kept: list[Any] = []  # all lines and flags, as work on a device may outlive its tables
_events: dict[Any, DeviceEvent] = {}  # of each stream


def _line_of(device: torch.device) -> tuple[Tensor, np.ndarray]:
    """Return memory for the error of one more table on a device, and its flag in RAM, which kernels raise with it.

    So the host learns of errors without a copy, once a `DeviceEvent` after the kernels has come.
    """
    free = _free.setdefault(device, [])
    if not free:
        flags = torch.zeros(LINES, 1, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        lines = torch.zeros(LINES, 4, dtype=torch.int64, device=device)
        lines[:, 1] = flags.data_ptr() + flags.itemsize * torch.arange(LINES, device=device)
        wait_for_caller(device)  # tables may be on other streams
        free += zip(lines.unbind(), flags.numpy(), strict=True)
        _kept.append((lines, flags))
    return free.pop()


class DeviceErrors:
    """First error of a table's rows on a device.

    The host does not wait for it. Kernels write the error and skip all steps from then on. A later call on the host
    reads the error and raises it. The table is then as it was before the first skipped step.

    Args:
        rows: of a table.
        device: of the rows.

    Attributes:
        tensor: int64 (4,) on the device: code, address of the flag, value, first refused step.
        address: of the tensor.
        device: see above.
        launched: numbers of steps that may turn out to be refused.
    """

    def __init__(self, rows: TableState, device: torch.device) -> None:
        # A weak reference, as the rows own the executor, and the executor owns these errors.
        self._rows_of, self.device = weakref.ref(rows), device
        self.tensor, self._flag = _line_of(device)
        self.address = self.tensor.data_ptr()
        self._answer: DeviceEvent | None = None  # of the last request, until it is checked
        self.launched: deque[int] = deque()
        self._asked_at = 0
        _all.add(self)

    @property
    def _rows(self) -> TableState:
        rows = self._rows_of()
        assert rows is not None  # the caller holds the rows
        return rows

    def ask_again(self) -> None:
        """Ask for the error once more if it was asked for, as later work may have found one."""
        if self._answer is not None:
            self._answer = None
            ask([self])

    def raise_but_nonfinite(self) -> None:
        """Raise an error that is not about gradients of a step. Waits for the device."""
        if self.tensor[0] in (BAD_ID, BAD_OFFSETS):
            self._take()

    def look(self) -> None:
        """Make the next check raise the current error. Waits for the device."""
        self._answer = None
        ask([self])
        assert self._answer is not None  # it was asked for
        self._answer.wait()

    def forget(self, is_culprit: bool = False) -> None:
        """Clear a refused step that the host knows of; raise the error if it is the table's own."""
        if is_culprit:
            self._take()
        self._clear()

    def _clear(self) -> None:
        self.tensor[:1].zero_()
        self.tensor[2:].zero_()
        self._flag[0] = 0

    def _take(self) -> None:
        code, value, first, refused = self._take_back()
        for other in [other for other in list(_all) if other._rows_of() is not None]:
            its, _, _, since = other.tensor.tolist()
            if code == BESIDE and its not in (0, BESIDE) and since == first:  # its error has refused the step
                other._take()
            elif code != BESIDE and (its == BESIDE or (its == NONFINITE and since == first)):  # it has no other error
                other._take_back()
        if code == BESIDE:
            raise NonFiniteGradientError(
                f"a step of {self._rows.subject} was refused on the GPU. Another table of that step, which is gone "
                f"since, had NaN or Inf in its gradients, or wrong ids or offsets. {_undone(refused)} Keep all tables "
                "until a later step or lookup has raised their errors.",
                0,
                np.empty(0, np.int64),
            )
        if code == BAD_ID:
            raise IdError(
                f"`ids` of {self._rows.subject} must lie in [0, {self._rows.spec.rows}): got {value} in an "
                f"earlier batch, on the GPU. {_undone(refused)} {OPEN_IDS}"
            )
        if code == BAD_OFFSETS:
            raise ArgumentError(
                f"`offsets` of {self._rows.subject} must start at 0, not decrease, and not exceed the ids: those of "
                f"an earlier batch, on the GPU, do not. {_undone(refused)}"
            )
        if code == NONFINITE:
            is_earlier = " in an earlier step" * (refused > 0)  # 0: the host waited and counted no step
            raise NonFiniteGradientError(
                f"gradients of {self._rows.subject} must be finite: got NaN or Inf{is_earlier}, on the GPU. "
                f"{_undone(refused) if is_earlier else 'The step was refused, nothing has changed.'} Lower the "
                'learning rate, clip or scale the gradients, or pass on_nonfinite="skip" to leave such steps out.',
                0,
                np.empty(0, np.int64),
            )

    def _take_back(self) -> tuple[int, int, int, int]:
        """Undo the count of refused steps.

        Returns:
            The code, a value, the first refused step, and the number of refused steps.
        """
        code, _, value, first = self.tensor.tolist()  # waits: later steps are not refused
        refused = sum(number >= first for number in self.launched) if first else 0
        self._clear()
        self.launched.clear()
        self._answer = None
        self._rows.undo_steps(refused)
        return code, value, first, refused


def check(faults: Sequence[DeviceErrors]) -> None:
    """Raise the error of a table if one has arrived on the host.

    Raises:
        IdError: ids of a lookup lie outside the table.
        ArgumentError: offsets of bags are invalid.
        NonFiniteGradientError: a step had gradients with NaN or Inf.
    """
    answer, has_come = None, False  # tables share an answer
    for each in faults:
        if each._answer is not answer and each._answer is not None:
            answer = each._answer
            has_come = answer.has_come()
        if answer is None or each._answer is None or not has_come:
            continue
        each._answer = None
        if each._flag[0]:
            each._take()
        launched, last = each.launched, each._asked_at
        while launched and launched[0] <= last:
            launched.popleft()


def ask(faults: Sequence[DeviceErrors]) -> None:
    """Make later checks raise the errors of tables on one device, once all work launched so far is done."""
    asked = [each for each in faults if each._answer is None]
    if not asked:
        return
    device = asked[0].device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    event = _events.get(stream)
    if event is None:
        event = _events[stream] = DeviceEvent(device)
    event.record(stream)  # events of one stream follow each other: a later one serves those who asked before
    for each in asked:
        each._answer, each._asked_at = event, each.launched[-1] if each.launched else 0


def _undone(steps: int) -> str:
    return f"Steps from then on were refused ({steps} so far): rows are as they were before."
