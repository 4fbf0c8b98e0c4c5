"""One cache in GPU memory for each pool of a group on disk, within one budget: the bits of the tables alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_device import DEVICE

import embedrock as er
import embedrock.torch as ert
from embedrock.device.host_planned import HostPlannedExecutor
from embedrock.device.mirror import DeviceMirror
from embedrock.table.table import Table
from slow import slow

ROWS = {"users": 200, "films": 90, "shops": 60}  # the last one has a pool of its own
DIMS = {"users": 8, "films": 8, "shops": 4}
SMALL = "2KiB"  # of GPU memory: for some rows
BATCH = 10


Layers = dict[str, ert.Embedding]


def loss_of(layers: Layers, ids: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([layers[name](own).square().sum() for name, own in ids.items()]).sum()


def seed_of(name: str) -> int:
    return ROWS[name]


class Both:
    """A group on disk whose rows are near a device, and its tables alone, in RAM, which the CPU uses."""

    def __init__(self, folder: Path, memory: str = "16KiB", near: Any = SMALL, names: Any = tuple(ROWS)) -> None:
        self.path = str(folder / "model.rock")
        self.group = er.Group(path=self.path, memory=memory, device_memory=near)
        self.mine, self.others = Layers(), Layers()
        for name in names:
            self.add(name)
        self.let_step()

    def add(self, name: str) -> None:
        options: dict[str, Any] = {"seed": seed_of(name), "init": er.Normal(std=0.5)}
        for layers, group in ((self.mine, {"group": self.group, "name": name}), (self.others, {})):
            layers[name] = ert.Embedding(ROWS[name], DIMS[name], **options, **group)
        ert.place(self.mine[name], DEVICE)

    def let_step(self) -> None:
        both = self.mine, self.others
        self.optimizers = [ert.Adam(torch.nn.ModuleList(layers.values()), lr=0.1) for layers in both]

    def step(self, ids: dict[str, torch.Tensor]) -> None:
        for layers, optimizer in zip((self.mine, self.others), self.optimizers, strict=True):
            loss_of(layers, ids).backward()
            optimizer.step()
            optimizer.zero_grad()

    def table(self, name: str) -> Table:
        return self.group[name]

    def check(self) -> None:
        for name in self.mine:
            got, expected = self.table(name).export(), self.others[name].table.export()
            for mine, other in zip(got, expected, strict=True):
                np.testing.assert_array_equal(mine, other)

    def mirror(self, name: str) -> DeviceMirror:
        executor = self.table(name).executor
        assert isinstance(executor, HostPlannedExecutor)
        return executor.mirror

    def annexes(self) -> set[DeviceMirror]:
        return {self.mirror(name) for name in self.mine}


def batches(count: int, names: Any = tuple(ROWS)) -> list[dict[str, torch.Tensor]]:
    rng = np.random.default_rng(0)
    return [{name: torch.from_numpy(rng.integers(0, ROWS[name], BATCH)) for name in names} for _ in range(count)]


@pytest.fixture
def both(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Both]:
    made = Both(tmp_path, **getattr(request, "param", {}))
    yield made
    made.group.commit()
    made.group.close()


@pytest.mark.parametrize("both", [{}, *slow({"near": "1MiB"}, {"near": "1300"})], indirect=True)
def test_a_group_trains_to_the_bits_of_its_tables_alone_and_commits_them_as_one(both: Both):
    for k, ids in enumerate(batches(5)):
        both.step(ids)
        if k == 2:
            both.group.commit(step=3)
    assert len(both.annexes()) == 2  # of two pools
    told = both.table("users").stats()
    assert min(told["evictions"], told["device_slots"], told["device_hits"]) > 0
    both.check()
    both.group.commit(step=5)  # the rows that are newer near, of all tables
    with er.open(both.path, mode="r", device_memory="64KiB", kind=er.Group) as snapshot:
        assert snapshot.last_step == 5
        for name, layer in both.others.items():
            ids = torch.arange(20)
            read = ert.Embedding(snapshot[name])
            ert.place(read, DEVICE)
            assert torch.equal(read(ids).cpu(), layer(ids))
    assert both.group.verify().problems == []


def test_all_pools_share_one_budget(both: Both):
    both.step(batches(1)[0])
    used = [mirror.cache.nbytes for mirror in both.annexes()]
    assert min(used) > 0
    assert sum(used) <= 2048 + 2 * 8 * 8  # and what counts


def test_a_collection_of_members_is_used_together(both: Both):
    collections = [ert.EmbeddingCollection(layers) for layers in (both.mine, both.others)]
    for ids in batches(2):
        for collection, optimizer in zip(collections, both.optimizers, strict=True):
            torch.cat([found.flatten() for found in collection(ids).values()]).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    both.check()


def test_a_member_that_is_dropped_leaves_its_share_to_others(both: Both):
    names = "users", "films"
    for ids in batches(2, names):
        both.step(ids)
    mirror = both.mirror("users")
    assert mirror is both.mirror("films")
    both.group.drop("films")
    for layers in both.mine, both.others:
        del layers["films"]
    both.let_step()
    ids = torch.arange(mirror.cache.placement.near_rows)
    for _ in range(3):
        both.step({"users": ids})
    assert int((mirror.cache.slots.owner >= 0).sum()) == len(ids)  # all that is near is of the member that is left
    both.add("films")  # another table, in slots of the one before
    both.let_step()
    for ids in batches(2, names):
        both.step(ids)
    both.check()


def test_the_cache_in_ram_is_made_anew_for_a_member_that_comes_late(both: Both):
    names = "users", "films"
    both.step(batches(1, names)[0])
    tier = both.mirror("users").backend
    arena = tier.arena
    both.group.table("late", rows=150, dim=8, rule=er.Adam(lr=0.1)).update([1], np.ones((1, 8), np.float32))
    both.group.table("alone", rows=None, dim=2, rule=er.SGD(lr=1.0)).update([1], np.ones((1, 2), np.float32))
    for ids in batches(3, names):
        both.step(ids)
    assert tier.arena is not arena
    both.check()


def test_a_batch_that_the_group_has_no_room_for_is_refused_whole(both: Both):
    before = batches(1)[0]
    both.step(before)
    every = {name: torch.arange(rows) for name, rows in ROWS.items()}
    loss_of(both.mine, every).backward()
    said = r"200 of .*Embedding\(200, 8.*memory=\d+ .* of er\.Group holds them all"
    with pytest.raises(er.CacheTooSmallError, match=said):
        both.optimizers[0].step()
    both.optimizers[0].zero_grad()
    both.step(before)
    both.check()


def test_a_rollback_goes_on_with_the_rows_of_a_commit(both: Both):
    ids = batches(1)[0]
    both.group.commit()
    both.step(ids)
    both.group.rollback(1)
    for name, own in ids.items():
        assert torch.equal(both.mine[name](own).cpu(), torch.from_numpy(both.table(name).lookup(own.numpy())))
    assert both.table("users").steps == 0


def test_a_member_has_no_gpu_memory_of_its_own(both: Both):
    said = r"`device_memory` of table 'more' of group .* must be None or 0: got '1MiB'.* device_memory='1MiB'\)"
    with pytest.raises(er.UnsupportedError, match=said):
        both.group.table("more", rows=3, dim=2, device_memory="1MiB")
    assert "more" not in both.group
