"""The trace gate with rows of one of the tables used on a device: of that on disk, or of that in RAM with open ids.

There is a cache of any size of the one's, or none; and room for any number of the other's. All else that a table can be
asked comes in between, from this thread and from others.
"""

from __future__ import annotations

import copy
import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from gpu_device import DEVICE

import embedrock as er
from disk_pair import BATCH, BESIDE, MEMBER, TOTAL, Case
from embedrock.device import attach, memory_for
from embedrock.device.lookup import DeviceLookup
from embedrock.device.requirements import indexed
from embedrock.optimizers import RULES
from embedrock.table.stepping import StepRequest, step_all
from embedrock.table.table import rows_of
from same_tables import LAZY
from slow import slow
from traced_pair import ADMISSIONS, ASKED, EVICTIONS, TracedPair, drawn_acts, drawn_case, play

TO_THE_BIT = tuple(kind for kind in RULES if not kind.__name__.startswith("Rowwise"))  # they sum in another order


class DevicePair(TracedPair):
    """A pair whose table on disk is stepped on a device."""

    def __init__(self, case: Case, folder: Any) -> None:
        super().__init__(case, folder)
        self._near = random.Random(case.seed).choice((case.in_group * 2, 1, BATCH // 2, 2 * BATCH, TOTAL))

    def on_device(self) -> er.Table:
        """Return the table that is used on the device, with the memory that it has there."""
        slots = rows_of(self.table).tier.used_slots
        given = self._near and memory_for(self.table.spec, self._near, slots)
        if self.table.group is None:
            self.table.device_memory = given
        else:  # which has several pools at times
            most = max(tier.used_slots for tier in self.table.group.pools.tiers)
            given = memory_for(self.table.spec, self._near, most) * len(self.table.group.pools)
            self.table.group.device_memory = given
        return self.table

    def step(self, ids: np.ndarray) -> None:
        if not isinstance(self.ram.rule, TO_THE_BIT):
            return super().step(ids)
        there = self.on_device()
        other = self.ram if there is self.table else self.table
        executor = attach.side_of(there, indexed(torch.device(DEVICE)))
        assert executor is not None
        grads, lr = self.grads(ids), float(self.rng.choice([0.1, 0.05]))
        if self.rng.random() < 0.5:
            (later,) = self.batches(self._trace(), 1)
            executor.expect(torch.from_numpy(later))
        padding = int(ids[0]) if self.rng.random() < 0.2 else None  # whose row gets no gradient, and no record
        lookup = DeviceLookup(executor.layout(padding), [torch.from_numpy(ids)], trains=True)
        (found,) = lookup.read()
        np.testing.assert_array_equal(found.cpu().numpy(), other.lookup(ids))
        ((summed, _),) = lookup.sums([torch.from_numpy(grads).to(DEVICE)])
        step_all([StepRequest((executor.rows,), replace(cast(Any, there.rule), lr=lr), summed, executor=executor)])
        others = np.full(ids.shape, True) if padding is None else ids != padding
        other.update(ids[others], grads[others], lr=lr)

    def leave_device(self) -> None:
        """Use the rows on the CPU for what a device cannot, or would tell otherwise."""
        rows_of(self.table).leave_side()
        rows_of(self.ram).leave_side()
        if self.table.group is None:
            self.table.device_memory = None

    def grow(self, to_open: bool = False) -> None:
        self.leave_device()
        super().grow(to_open)

    def forget(self) -> None:
        executor = rows_of(self.on_device()).executor
        if executor is not None and not executor.may_forget():
            self.leave_device()
        super().forget()

    def facts(self) -> None:
        self.leave_device()
        super().facts()


class RamPair(DevicePair):
    """A pair whose table in RAM is stepped on a device, where some of its rows may be near."""

    def on_device(self) -> er.Table:
        self.ram.device_memory = self._near and memory_for(self.ram.spec, self._near)
        return self.ram


class OpenPair(DevicePair):
    """A pair of open ids, whose table in RAM is stepped on a device, where its directory is, and any number of rows."""

    def __init__(self, case: Case, folder: Any) -> None:
        super().__init__(case, folder)
        self._near = random.Random(case.seed).choice((0, 1, BATCH, 8 * BATCH, TOTAL // 2, TOTAL))

    def on_device(self) -> er.Table:
        self.ram.device_memory = self._near and memory_for(self.ram.spec, self._near)
        return self.ram


class HashedPair(OpenPair):
    """The same, but it is known how many rows there are, and that in RAM has a hashed directory."""

    def __init__(self, case: Case, folder: Any) -> None:
        super().__init__(case, folder)
        spec = self.ram.spec
        options: dict[str, Any] = {"rule": spec.rule, "dtype": spec.dtype, "seed": case.seed, "init": spec.init}
        self.ram = er.Table(case.rows, spec.dim, directory="hashed", **options)
        self.saved = {0: copy.deepcopy(self.ram)}


class GroupedPair(OpenPair):
    """The same, of a table in RAM that is of a group, beside a member that the CPU uses."""

    @property
    def ram(self) -> er.Table:
        """The member."""
        return self._ram

    @ram.setter
    def ram(self, table: er.Table) -> None:
        spec, group = table.spec, er.Group()
        options: dict[str, Any] = {"rule": spec.rule, "dtype": spec.dtype, "init": spec.init, "seed": spec.seed}
        group.table(BESIDE, BATCH, spec.dim, **options).assign(np.arange(BATCH), np.ones((BATCH, spec.dim)))
        self._ram = group.table(MEMBER, spec.rows, spec.dim, **options, on_nonfinite=table.on_nonfinite)
        self._ram.load_state(table.state())


DevicePair.events = {
    **ASKED,
    "grow": DevicePair.grow,
    "open": lambda pair: pair.grow(to_open=True),
    "forget": DevicePair.forget,
    "facts": DevicePair.facts,
}


RamPair.events = OpenPair.events = HashedPair.events = GroupedPair.events = DevicePair.events


def case_of(seed: int, in_group: bool) -> Case:
    rule = [rule for rule in LAZY if isinstance(rule, TO_THE_BIT)][seed % len(TO_THE_BIT)]
    return replace(drawn_case(seed), rule=rule, in_group=in_group, admission=None, eviction=None)


def coming_and_going(seed: int, in_group: bool) -> Case:
    """Return a case whose rows come and go, by policies of which each meets each other one."""
    admission, eviction = list(itertools.product(ADMISSIONS, EVICTIONS))[1 + seed % 35]
    return replace(case_of(seed, in_group), admission=admission, eviction=eviction)


@pytest.mark.parametrize(("seed", "operations"), [(0, 6), *slow(*((seed, 100) for seed in range(1, 41)))])
@pytest.mark.parametrize("in_group", [False, *slow(True)])
def test_a_trace_on_a_device(seed: int, operations: int, in_group: bool, tmp_path: Path):
    play(case_of(seed, in_group), drawn_acts(seed, operations), tmp_path / "table", DevicePair)


@pytest.mark.parametrize(("seed", "operations"), [(8, 6), *slow(*((seed, 100) for seed in range(1, 41)))])
@pytest.mark.parametrize("in_group", [False, *slow(True)])
def test_a_trace_of_rows_that_come_and_go_on_a_device(seed: int, operations: int, in_group: bool, tmp_path: Path):
    play(coming_and_going(seed, in_group), drawn_acts(seed, operations), tmp_path / "table", DevicePair)


@pytest.mark.parametrize("seed", slow(*range(1, 41)))
def test_a_trace_of_rows_that_come_and_go_in_ram_on_a_device(seed: int, tmp_path: Path):
    play(coming_and_going(seed, in_group=False), drawn_acts(seed, 100), tmp_path / "table", RamPair)


@pytest.mark.parametrize(("seed", "operations"), [(0, 3), *slow(*((seed, 100) for seed in range(1, 41)))])
def test_a_trace_of_open_ids_on_a_device(seed: int, operations: int, tmp_path: Path):
    case = replace(case_of(seed, in_group=False), rows=None)
    play(case, drawn_acts(seed, operations), tmp_path / "table", OpenPair)


@pytest.mark.parametrize("seed", slow(*range(1, 41)))
def test_a_trace_of_hashed_ids_on_a_device(seed: int, tmp_path: Path):
    play(case_of(seed, in_group=False), drawn_acts(seed, 100), tmp_path / "table", HashedPair)


@pytest.mark.parametrize("seed", slow(*range(1, 41)))
def test_a_trace_of_open_ids_of_a_group_on_a_device(seed: int, tmp_path: Path):
    case = replace(case_of(seed, in_group=False), rows=None)
    play(case, drawn_acts(seed, 100), tmp_path / "table", GroupedPair)


@pytest.mark.parametrize("seed", slow(*range(1, 41)))
def test_a_trace_of_hashed_ids_of_a_group_on_a_device(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attach, "_dense_layout", lambda *_: None)  # as of tables that no RAM holds whole
    play(case_of(seed, in_group=False), drawn_acts(seed, 100), tmp_path / "table", GroupedPair)
