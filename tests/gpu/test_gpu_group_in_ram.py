"""Tables of a group in RAM, of a pool or with one each: a GPU uses them with the bits of the tables alone."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gpu_device import DEVICE

import embedrock as er
import embedrock.torch as ert
from embedrock.device.host_planned import HostPlannedExecutor
from embedrock.device.mirror import DeviceMirror
from slow import slow

ROWS, DIM, BATCH = 60, 4, 8


class Which(NamedTuple):
    """The tables of a group.

    Attributes:
        near: GPU memory of the group.
        open_ids: how many have open ids. (Each has a pool of its own.)
        known: how many have rows whose first values are an array's. (They share a pool.)
        on_cpu: those that the CPU uses.
    """

    near: int | str | None = "2KiB"
    open_ids: int = 1
    known: int = 2
    on_cpu: tuple[str, ...] = ()


class Both:
    """A group whose tables a device uses, and the same tables alone on the CPU."""

    def __init__(self, which: Which, **group: Any) -> None:
        self.group = er.Group(device_memory=which.near, **group)
        names = [f"t{k}" for k in range(which.open_ids + which.known)]
        self.mine, self.others = (
            {name: ert.Embedding(self._table(group, name, k < which.open_ids)) for k, name in enumerate(names)}
            for group in (self.group, None)
        )
        for name, layer in self.mine.items():
            if name not in which.on_cpu:
                ert.place(layer, DEVICE)
        self.rng = np.random.default_rng(0)
        self.let_step()

    def _table(self, group: er.Group | None, name: str, is_open: bool) -> er.Table:
        seed = int(name[1:])
        array = np.random.default_rng(seed).standard_normal((ROWS, DIM)).astype(np.float32)
        options: dict[str, Any] = {"rows": None if is_open else ROWS, "dim": DIM, "seed": seed}
        options["init"] = er.Normal(std=0.5) if is_open else er.FromArray(array)
        return er.Table(**options) if group is None else group.table(name, **options)

    def let_step(self) -> None:
        both = self.mine, self.others
        self.optimizers = [ert.Adam(torch.nn.ModuleList(layers.values()), lr=0.1) for layers in both]

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            ids = {name: torch.from_numpy(self.rng.integers(0, ROWS, BATCH)) for name in self.mine}
            for layers, optimizer in zip((self.mine, self.others), self.optimizers, strict=True):
                torch.stack([layers[name](own).square().sum().cpu() for name, own in ids.items()]).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    def drop(self, name: str) -> None:
        del self.mine[name], self.others[name]
        self.group.drop(name)
        self.let_step()

    def check(self) -> None:
        for name, layer in self.mine.items():
            other = self.others[name].table
            assert (layer.table.steps, layer.table.stats()["rows_touched"]) == (
                other.steps,
                other.stats()["rows_touched"],
            )
            for mine, theirs in zip(layer.table.export(), other.export(), strict=True):
                np.testing.assert_array_equal(mine, theirs)

    def annexes(self) -> set[DeviceMirror]:
        executors = [layer.table.executor for layer in self.mine.values()]
        return {executor.mirror for executor in executors if isinstance(executor, HostPlannedExecutor)}


@pytest.mark.parametrize(
    "which",
    [
        Which(),
        *slow(
            Which(near=None),
            Which(near=0),
            Which(near="100KiB"),
            Which(near="32KiB", open_ids=26, known=0),
            Which(open_ids=0, known=4, on_cpu=("t1", "t3")),
            Which(near=None, open_ids=0, known=4, on_cpu=("t0",)),
        ),
    ],
    ids=str,
)
def test_a_group_that_the_host_plans_trains_on_a_device_to_the_bits_of_its_tables_alone(which: Which):
    with warnings.catch_warnings():
        warnings.simplefilter("error", ert.PlacementWarning)
        both = Both(which)
        both.step(2)
    assert len(both.annexes()) == which.open_ids + bool(which.known)
    for mine in (both.mine, both.others):  # the records of its pool move, or those of others do
        mine["t1"].table.assign([1, 2], np.ones((2, DIM), np.float32))
    both.drop("t2")
    both.step(2)
    both.check()


def test_rows_that_another_table_of_the_pool_forgets_move_and_are_found():
    both = Both(Which(open_ids=0, known=2, on_cpu=("t0",)))
    both.step(2)
    for layers in (both.mine, both.others):
        layers["t0"].table.forget(layers["t0"].table.export()[0][:5])
    both.step(2)
    both.check()


def test_the_pools_of_a_group_share_its_gpu_memory():
    both = Both(Which(near="4KiB", open_ids=2, known=2))
    both.step()
    executors: list[Any] = [both.group[name].executor for name in ("t0", "t1", "t2")]  # whose pools share it
    most = max(executor.cache.placement.bytes for executor in executors)
    record = both.group["t0"].spec.record_bytes
    for executor in executors:
        assert most - 2 * record < executor.cache.placement.bytes <= 4096 // 3


def test_what_members_of_a_pool_were_given_is_added_up():
    group, array = er.Group(), np.zeros((ROWS, DIM), np.float32)
    made = [group.table(name, ROWS, DIM, init=er.FromArray(array), device_memory=1000) for name in "ab"]
    for table in made:
        layer = ert.Embedding(table)
        ert.place(layer, DEVICE)
        layer(torch.arange(3))
        assert table.stats()["device_slots"] == 2000 // (table.spec.record_bytes + 21)


@pytest.mark.parametrize(("memory", "near"), [(4250, "2KiB"), *slow((4500, None), (6000, 0))])
def test_tables_of_a_pool_on_disk_step_together_on_the_cpu_and_on_a_device(memory: int, near: Any, tmp_path: Path):
    both = Both(Which(near, open_ids=0, known=4, on_cpu=("t1", "t2")), path=str(tmp_path / "g.rock"), memory=memory)
    both.step(4)
    both.check()
    assert both.group["t0"].stats()["evictions"] > 0
    both.group.commit()
    both.group.close()


def test_a_batch_of_a_pool_that_is_too_large_steps_neither_what_the_cpu_has_nor_what_a_device_has(tmp_path: Path):
    both = Both(Which(open_ids=0, known=4, on_cpu=("t1", "t2")), path=str(tmp_path / "g.rock"), memory=3500)
    with pytest.raises(
        er.CacheTooSmallError, match=r"holds 25 rows.* In all this batch of the group has rows of 4 tab"
    ):
        both.step()
    assert [(layer.table.steps, layer.table.stats()["rows_touched"]) for layer in both.mine.values()] == 4 * [(0, 0)]
    both.group.commit()
    both.group.close()
