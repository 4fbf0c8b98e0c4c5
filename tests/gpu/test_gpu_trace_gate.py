"""The trace gate with the rows of the table on disk, alone or in a group, used on a device, behind any cache there.

All else that a table can be asked comes in between, from this thread and from others.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from gpu_device import DEVICE

import embedrock as er
from disk_pair import BATCH, TOTAL, Case
from embedrock.device import attach, memory_for
from embedrock.device.side import DeviceSide
from embedrock.rules import RULES
from embedrock.table.table import rows_of
from embedrock.torch.training.steps import DueStep, step_all
from same_tables import LAZY
from slow import slow
from traced_pair import ASKED, TracedPair, drawn_acts, drawn_case, play

TO_THE_BIT = tuple(kind for kind in RULES if kind is not er.RowwiseAdagrad)  # which sums in another order


class DevicePair(TracedPair):
    """A pair whose table on disk is stepped on a device."""

    def __init__(self, case: Case, folder: Any) -> None:
        super().__init__(case, folder)
        self._near = random.Random(case.seed).choice((case.in_group * 2, 1, BATCH // 2, 2 * BATCH, TOTAL))

    def _side(self) -> DeviceSide:
        slots = rows_of(self.table).tier.used_slots
        given = self._near and memory_for(self.table.spec, self._near, slots)
        if self.table.group is None:
            self.table.device_memory = given
        else:  # which has several pools at times
            most = max(tier.used_slots for tier in self.table.group.pools.tiers)
            given = memory_for(self.table.spec, self._near, most) * len(self.table.group.pools)
            self.table.group.device_memory = given
        side = attach.side_of(self.table, torch.device(DEVICE))
        assert side is not None
        return side

    def step(self, ids: np.ndarray) -> None:
        if not isinstance(self.ram.rule, TO_THE_BIT):
            return super().step(ids)
        side, grads, lr = self._side(), self.grads(ids), float(self.rng.choice([0.1, 0.05]))
        if self.rng.random() < 0.5:
            (later,) = self.batches(self._trace(), 1)
            side.expect(torch.from_numpy(later))
        plan = side.plan(torch.from_numpy(ids), trains=True)
        np.testing.assert_array_equal(side.read(plan).cpu().numpy(), self.ram.lookup(ids))
        summed = side.sum(plan, torch.from_numpy(grads).to(DEVICE), None, False)
        step_all([DueStep(side, replace(cast(Any, self.ram.rule), lr=lr), summed)])
        self.ram.update(ids, grads, lr=lr)

    def grow(self, to_open: bool = False) -> None:
        rows_of(self.table).leave_side()
        super().grow(to_open)

    def forget(self) -> None:
        rows_of(self.table).leave_side()
        super().forget()

    def facts(self) -> None:
        rows_of(self.table).leave_side()
        if self.table.group is None:
            self.table.device_memory = None
        super().facts()


DevicePair.events = {
    **ASKED,
    "grow": DevicePair.grow,
    "open": lambda pair: pair.grow(to_open=True),
    "forget": DevicePair.forget,
    "facts": DevicePair.facts,
}


def case_of(seed: int, in_group: bool) -> Case:
    rule = [rule for rule in LAZY if isinstance(rule, TO_THE_BIT)][seed % len(TO_THE_BIT)]
    return replace(drawn_case(seed), rule=rule, in_group=in_group, admission=None, eviction=None)


@pytest.mark.parametrize(("seed", "operations"), [(0, 6), *slow(*((seed, 100) for seed in range(1, 41)))])
@pytest.mark.parametrize("in_group", [False, *slow(True)])
def test_a_trace_on_a_device(seed: int, operations: int, in_group: bool, tmp_path: Path):
    play(case_of(seed, in_group), drawn_acts(seed, operations), tmp_path / "table", DevicePair)
