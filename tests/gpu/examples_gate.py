"""Calls of the kernel that judges steps, for the test that compiles them all."""

from __future__ import annotations

import torch

from embedrock.kernels.gpu import gate


def example_judge() -> None:
    faults = torch.zeros(1, dtype=torch.int64)
    numbers, shown = torch.empty(2, 1)
    for number in (3, torch.empty((), dtype=torch.int64)):
        gate.judge(numbers, shown, faults, torch.empty(1, gate.LINE, dtype=torch.int32), number)
