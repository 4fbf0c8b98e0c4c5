"""Open and hashed ids of a group in RAM, whose directories are on the device, against the same tables alone."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gpu_models import DrawnByHost, on_device
from test_gpu_joint import launches

import embedrock as er
import embedrock.torch as ert
from embedrock.device.hashed import HashedGpuExecutor
from embedrock.device.host_planned import HostPlannedExecutor
from embedrock.storage.ram_backend import RamBackend
from embedrock.table.table import rows_of
from slow import slow

DIM, ROWS = 4, 60
# What there may be in a group: ids in any number, hashed ones of known number, and what else shares memory with these.
KINDS: dict[str, dict[str, Any]] = {
    "open": {"rows": None},
    "hashed": {"rows": 10**12},  # in no RAM whole
    "of the CPU": {"rows": ROWS},
    "direct": {"rows": ROWS},
    "of the host": {"rows": ROWS, "init": DrawnByHost(std=0.5)},
    "come and go": {"rows": None, "eviction": er.Eviction(max_rows=45)},
}


class Grouped:
    """Layers of a group whose rows a device uses, and of tables alone that the CPU uses.

    Attributes:
        is_joint: a collection looks up those of the group.
    """

    is_joint = False

    def __init__(self, kinds: str, near: int | None, rule: str = "Adam", seed: int = 0, **group: Any) -> None:
        self.rng, self.rule = np.random.default_rng(seed), rule
        self.group = er.Group(device_memory=near, **group)
        self.kinds = {f"t{k}": kind for k, kind in enumerate(kinds.split(", "))}
        self.mine, self.alone = (
            {name: self._layer(group, name, kind) for name, kind in self.kinds.items()} for group in (self.group, None)
        )
        self.let_step()
        for name, layer in self.mine.items():
            if self.kinds[name] != "of the CPU":
                on_device(layer)

    def _layer(self, group: er.Group | None, name: str, kind: str) -> ert.Embedding:
        options = {"dim": DIM, "seed": int(name[1:]), "init": er.Normal(std=0.5), **KINDS[kind]}
        return ert.Embedding(er.Table(**options) if group is None else group.table(name, **options))

    def let_step(self) -> None:
        self.optimizers = [
            getattr(ert, self.rule)(torch.nn.ModuleList(layers.values()), lr=0.1) for layers in (self.mine, self.alone)
        ]

    def executor(self, name: str) -> Any:
        return self.mine[name].table.executor

    def batch(self, name: str, size: int = 8) -> torch.Tensor:
        most = 10**12 if self.kinds[name] in ("open", "hashed") and self.rng.random() < 0.4 else ROWS
        return torch.from_numpy(self.rng.integers(0, most, size))

    def backward(self, batches: dict[str, torch.Tensor], scale: float = 1.0) -> None:
        mine = self._looked_up(batches)
        alone = {name: self.alone[name](ids) for name, ids in batches.items()}
        assert all(torch.equal(rows.cpu(), alone[name]) for name, rows in mine.items())
        for found in (mine, alone):
            (scale * torch.stack([rows.square().sum().cpu() for rows in found.values()]).sum()).backward()

    def _looked_up(self, batches: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.is_joint:
            return ert.EmbeddingCollection({name: self.mine[name] for name in batches})(batches)
        return {name: self.mine[name](ids) for name, ids in batches.items()}

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def train(self, *names: str, size: int = 8) -> None:
        self.backward({name: self.batch(name, size) for name in names or self.mine})
        self.step()

    def check(self) -> None:
        """Compare all bits: which rows there are, their weights and state, and steps."""
        for name, layer in self.mine.items():
            mine, alone = layer.table.state(), self.alone[name].table.state()
            assert mine["steps"] == alone["steps"]
            orders = [np.argsort(state["ids"]) for state in (mine, alone)]
            for part in ("ids", "records"):
                got, expected = (state[part][order] for state, order in zip((mine, alone), orders, strict=True))
                np.testing.assert_array_equal(got, expected)
            assert layer.table.stats()["rows_touched"] == self.alone[name].table.stats()["rows_touched"]

    # ------------------------------------------------------------ acts of a trace

    def some(self) -> list[str]:
        return [name for name in self.mine if self.rng.random() < 0.6] or [next(iter(self.mine))]

    def drawn(self) -> tuple[str, np.ndarray]:
        name = str(self.rng.choice(list(self.mine)))
        return name, np.unique(self.batch(name, 4).numpy())

    def train_some(self) -> None:
        self.train(*self.some(), size=int(self.rng.choice([1, 8, 40])))

    def accumulate(self) -> None:
        for _ in range(2):
            self.backward({name: self.batch(name) for name in self.some()}, 0.5)
        self.step()

    def assign(self) -> None:
        name, ids = self.drawn()
        for layers in (self.mine, self.alone):
            layers[name].table.assign(ids, np.full((len(ids), DIM), 0.25, np.float32))

    def leave(self) -> None:
        self.mine[self.drawn()[0]].handle.leave_side()

    def forget(self) -> None:
        name, ids = self.drawn()
        if self.rng.random() < 0.3:  # from then on, the host plans
            assert self.mine[name].forget(ids) == self.alone[name].forget(ids)

    def refuse(self) -> None:
        """Take NaN for one of several tables, none of which is stepped."""
        names = self.some()
        before = {name: self.mine[name].table.steps for name in names}
        losses = [self.mine[name](self.batch(name)).square().sum().cpu() for name in names]
        (torch.stack([*losses[:-1], losses[-1] * float("nan")])).sum().backward()
        with pytest.raises(er.NonFiniteGradientError):
            self._step_and_look(names)
        self.optimizers[0].zero_grad()
        assert {name: self.mine[name].table.steps for name in names} == before
        self.train(*names)  # a batch that was found room for, and is not stepped, is not forgotten before the next one

    def _step_and_look(self, names: list[str]) -> None:
        self.optimizers[0].step()
        for name in names:
            self.mine[name].table.lookup([0])

    def rename(self) -> None:
        name, ids = self.drawn()
        self.group.rename(name, name + "x")
        self.group.rename(name + "x", name)
        copied = copy.deepcopy(self.mine[name]).table
        np.testing.assert_array_equal(copied.lookup(ids), self.alone[name].table.lookup(ids))

    def load(self) -> None:
        name, _ = self.drawn()
        self.mine[name].load_state_dict(copy.deepcopy(self.alone[name].state_dict()))

    def grow(self) -> None:
        name, _ = self.drawn()
        rows = self.mine[name].table.rows
        if rows is not None and self.kinds[name] != "of the host":
            for layers in (self.mine, self.alone):
                layers[name].grow(rows + 10)


ACTS = [
    *4 * [Grouped.train_some],
    *(Grouped.accumulate, Grouped.assign, Grouped.check, Grouped.leave, Grouped.forget, Grouped.refuse),
    *(Grouped.rename, Grouped.load, Grouped.grow),
]
NEAR = [None, 0, 2500, 8000, 10**6]


@pytest.mark.parametrize(("seed", "count"), [(3, 4), *slow(*((seed, 50) for seed in range(30)))])
def test_a_trace_of_a_group_with_hashed_ids(seed: int, count: int):
    rng = np.random.default_rng(seed)
    kinds = ", ".join(["open", *rng.choice(["open", "hashed", *KINDS], rng.integers(1, 4))])
    grouped = Grouped(kinds, NEAR[seed % len(NEAR)], str(rng.choice(["SGD", "Adam", "Adagrad"])), seed)
    grouped.is_joint = seed % 2 == 1
    for _ in range(count):
        ACTS[rng.integers(len(ACTS))](grouped)
    grouped.check()


@pytest.mark.parametrize(("near", "waits"), [(10**6, 0), *slow((0, 0), (3000, 2))])  # as the rows outgrow the memory
def test_new_rows_wait_for_nobody(near: int, waits: int):
    grouped = Grouped("open, hashed, of the CPU", near)
    for k in range(8):
        grouped.backward({name: torch.arange(k, k + 15) * 10**10 for name in ("t0", "t1")})
        grouped.step()
    stats = [grouped.group[name].stats() for name in ("t0", "t1")]
    assert sum(each["device_host_waits"] for each in stats) == waits
    assert [each["rows_touched"] for each in stats] == [22, 22]
    assert "open ids" in repr(grouped.group["t0"])
    assert "hashed ids" in repr(grouped.group["t1"])
    grouped.check()


def test_members_that_a_collection_looks_up_are_planned_together():
    grouped = Grouped("open, open, open, direct", 10**6)
    grouped.is_joint = True
    grouped.train()
    with launches() as counts:
        grouped.train()
    of_open = {name: counts[name] for name in ("_tables", "_search", "_enter")}
    assert of_open == dict.fromkeys(of_open, 1)
    grouped.check()


def test_hashed_ids_leave_the_pool_of_those_that_the_cpu_uses():
    grouped = Grouped("hashed, of the CPU, hashed", 0)
    for layer in (*grouped.mine.values(), *grouped.alone.values()):
        layer.table.assign([3, 4], np.ones((2, DIM), np.float32))
    assert grouped.group.stats()["pools"] == 1
    grouped.train("t0", "t1")
    assert grouped.group.stats()["pools"] == 2
    assert isinstance(grouped.executor("t0"), HashedGpuExecutor)
    grouped.group.drop("t2")  # whose rows were beside those of the CPU's
    del grouped.mine["t2"], grouped.alone["t2"]
    grouped.let_step()
    grouped.train()
    grouped.check()
    grouped.mine["t0"].handle.leave_side()
    assert grouped.group.stats()["pools"] == 2  # where it stays
    grouped.train("t1")
    grouped.check()


def test_what_the_group_has_no_memory_for_twice_stays_in_its_pool():
    grouped = Grouped("hashed, of the CPU", 0, "SGD", memory=25_000)
    for name, ids in ("t0", 1000 * np.arange(200)), ("t1", np.arange(ROWS)):
        for layers in (grouped.mine, grouped.alone):
            layers[name].table.assign(ids, np.ones((len(ids), DIM), np.float32))
    grouped.train("t0", "t1")
    assert type(grouped.executor("t0")) is HostPlannedExecutor
    assert grouped.group.stats()["pools"] == 1
    grouped.check()


def test_hashed_ids_on_disk_are_planned_by_the_host(tmp_path: Any):
    with er.Group(path=str(tmp_path / "g.rock"), memory="1MiB") as group:
        layer = ert.Embedding(group.table("t", None, DIM, init=er.Zeros()))
        optimizer = ert.SGD(layer, lr=1.0)
        on_device(layer)
        layer(torch.tensor([7])).sum().backward()
        optimizer.step()
        assert type(group["t"].executor) is HostPlannedExecutor
        group.commit()


# Of a group with two directories of 1,024 entries, and room for so many rows beside these.
MEMORY, ROOM = 2 * 16 * 1024 + 24 * 300, 300


class Filled:
    """A group on a device, and the same on the CPU, which have room for as many rows."""

    def __init__(self, kinds: str, memory: int, near: int = 0) -> None:
        self.device = Grouped(kinds, near, "SGD", memory=memory)
        self.cpu = Grouped(kinds, None, "SGD", memory=memory)
        for layer in self.cpu.mine.values():
            layer.handle._placed_on = None

    def step(self, ids: dict[str, torch.Tensor]) -> str:
        """Step both groups; return how it was refused, "" where it was not."""
        said = []
        for grouped in (self.device, self.cpu):
            grouped.optimizers[0].zero_grad()
            torch.stack([grouped.mine[name](own).sum().cpu() for name, own in ids.items()]).sum().backward()
            said.append(self._said(grouped))
        assert bool(said[0]) == bool(said[1]), said
        if "of the CPU" not in self.device.kinds.values():  # else the device says it before the CPU is asked
            assert said[0] == said[1]
        return said[0]

    @staticmethod
    def _said(grouped: Grouped) -> str:
        try:
            grouped.optimizers[0].step()
        except er.MemoryBudgetError as error:
            return str(error)
        return ""

    def check(self) -> None:
        for name, layer in self.device.mine.items():
            for got, expected in zip(layer.table.export(), self.cpu.mine[name].table.export(), strict=True):
                np.testing.assert_array_equal(got, expected)
            assert layer.table.steps == self.cpu.mine[name].table.steps


def ids_from(start: int, count: int) -> torch.Tensor:
    return torch.arange(start, start + count) * 10**9


@pytest.mark.parametrize("near", [0, *slow(3000, 10**6)])
@pytest.mark.parametrize("kinds", ["open, of the CPU", *slow("open, open", "open, of the host", "open, come and go")])
def test_no_more_rows_than_the_memory_of_the_group_holds(kinds: str, near: int):
    filled = Filled(kinds, MEMORY, near)
    refusals = []
    for k in range(12):
        many, few = ids_from(40 * k, 40), torch.arange(k, k + 5) % ROWS
        refusals.append(filled.step({"t0": many, "t1": few}))
        refusals.append(filled.step({"t1": ids_from(5 * k, 5) if kinds == "open, open" else few}))
    assert not refusals[0]
    refused = [said for said in refusals if said]
    assert len(refused) > 2
    assert "for all tables of the group. Raise memory= of er.Group" in refused[0]
    filled.check()


@pytest.mark.parametrize("other", ["open", *slow("of the CPU", "of the host")])
def test_one_of_two_tables_that_find_room_each_alone_is_not_stepped_without_the_other(other: str):
    filled, size = Filled(f"open, {other}", MEMORY), 150 if other == "open" else ROWS
    filled.step({"t0": ids_from(0, ROOM - size - 5)})
    said = filled.step({"t0": ids_from(10**4, 20), "t1": torch.arange(size)})  # of both, though each is asked alone
    assert f"new ones, {size} of '1'" in said
    assert ", 20 of '0'" in said
    filled.check()
    assert not filled.step({"t1": torch.arange(size)})
    assert filled.step({"t0": ids_from(10**4, 20)})
    assert not filled.step({"t0": ids_from(10**4, 5)})
    filled.check()


def test_a_table_on_the_cpu_gets_the_room_that_one_on_the_device_was_promised():
    grouped = Grouped("open, of the CPU, open", 10**6, "SGD", memory=MEMORY + 2**14)
    for k in range(ROOM // 20 - 4):
        grouped.backward({"t0": ids_from(20 * k, 20)})
        grouped.step()
    tier = rows_of(grouped.group["t0"]).tier.pool
    assert isinstance(tier, RamBackend)
    assert tier.promised > ROOM - 4 * 20  # a little more than there are
    for layers in (grouped.mine, grouped.alone):
        layers["t1"].table.assign(np.arange(ROWS), np.ones((ROWS, DIM), np.float32))
        layers["t2"].table.assign(np.arange(20), np.ones((20, DIM), np.float32))
    assert tier.promised == ROOM - 4 * 20
    grouped.check()
    with pytest.raises(er.MemoryBudgetError, match="and this batch touches new ones, 1 of"):
        grouped.mine["t2"].table.assign([-5], np.ones((1, DIM), np.float32))
