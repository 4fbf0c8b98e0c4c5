"""Rows that come and go on a device: the bits, counts and ids of the same table on the CPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import late_copies
import numpy as np
import over_disk_loop
import pytest
import torch
from gpu_device import DEVICE, INTERPRETED
from test_gpu_limits import until_it_fits

import embedrock as er
import embedrock.torch as ert
from embedrock.device.host_planned import HostPlannedExecutor
from embedrock.table.table import rows_of
from same_tables import check_same
from slow import slow

DIM, BATCH = 8, 24
SHARED = er.Admission(2, default="shared")
BOTH: dict[str, Any] = {"admission": er.Admission(2, default="zeros"), "eviction": er.Eviction(max_rows=26, idle=4)}
ALL: dict[str, Any] = {**BOTH, "admission": SHARED}


class Ways(NamedTuple):
    """How a table is spread on the device."""

    near: int | str | None
    on_disk: bool


IN_PLACE, CACHED, ON_DISK = Ways(0, False), Ways("4KiB", False), Ways("3KiB", True)
ELSEWHERE = IN_PLACE, ON_DISK, Ways(None, False), Ways("1MiB", False), Ways(0, True)


@dataclass(frozen=True)
class Case:
    """A table whose rows come and go, and more options of its layer."""

    way: Ways
    policies: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


def cases(policies: dict[str, Any]) -> list[Any]:
    """Return one table in RAM, and slow ones."""
    return [Case(CACHED, policies), *slow(*(Case(way, policies) for way in ELSEWHERE))]


class Twins:
    """A layer whose rows are used on a device, and one that the CPU uses, which are treated alike."""

    def __init__(self, way: Ways, folder: Path, policies: dict[str, Any], **options: Any) -> None:
        self.layers, self.optimizers = list[ert.Embedding](), list[ert.RowOptimizer]()
        self.left: list[list[list[int]]] = [[], []]
        for left, path in zip(self.left, ("mine", "other"), strict=True):
            own = dict(policies)
            if own.get("eviction") is not None:
                own["eviction"] = replace(own["eviction"], evicted=lambda ids, told=left: told.append(ids.tolist()))
            place = {"path": str(folder / path), "memory": "16KiB"} if way.on_disk else {}
            given = {"seed": 1, "init": er.Normal(std=0.5), "device_memory": way.near, **own, **place, **options}
            self.layers.append(ert.Embedding(None, DIM, **given))
            self.optimizers.append(ert.Adam(self.layers[-1], lr=0.1))
        ert.place(self.layers[0], DEVICE)

    def each(self) -> Iterator[tuple[ert.Embedding, ert.RowOptimizer]]:
        return zip(self.layers, self.optimizers, strict=True)

    def reads(self, ids: torch.Tensor) -> None:
        """Look rows up, without a step."""
        with torch.no_grad():
            mine, other = (layer(ids) for layer in self.layers)
        assert torch.equal(mine.cpu(), other)

    def step(self, ids: torch.Tensor, before_step: Callable[[ert.Embedding], object] = lambda layer: None) -> None:
        for layer, optimizer in self.each():
            layer(ids).square().sum().backward()
            before_step(layer)
            optimizer.step()
            optimizer.zero_grad()

    def check(self) -> None:
        mine, other = (layer.table for layer in self.layers)
        executor = mine.executor
        assert isinstance(executor, HostPlannedExecutor)
        self.reads(torch.arange(-10, 90))
        check_same(mine, other)
        assert self.left[0] == self.left[1]


@pytest.fixture
def twins(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Twins]:
    case: Case = request.param
    made = Twins(case.way, tmp_path, case.policies, **case.options)
    yield made
    for layer in made.layers:
        if layer.table.is_on_disk and not rows_of(layer.table).is_closed:
            layer.table.commit()
            layer.table.close()


def scale(layer: ert.Embedding, factor: float) -> None:
    """Scale the gradients that wait."""
    assert layer.handle.grad is not None
    layer.handle.grad.mul_(factor)


def batches(count: int, seed: int = 0) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    return [
        torch.from_numpy(np.r_[rng.zipf(1.3, BATCH // 3) % 9, rng.integers(0, 50, 2 * BATCH // 3)])
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    "twins",
    [
        Case(ON_DISK, ALL),
        *slow(
            Case(CACHED, BOTH),
            *(Case(way, policies) for way in (IN_PLACE, ON_DISK) for policies in (BOTH, {"admission": SHARED})),
        ),
    ],
    indirect=True,
)
def test_training_on_a_device_is_to_the_bit_that_on_the_cpu(twins: Twins):
    """Batches that are expected, accumulated, clipped and zeroed among them."""
    (mine, _), ids = twins.layers, batches(9)
    for batch in ert.prefetch(ids[:4], {mine: lambda ids: ids}):
        twins.step(batch)
    for k, batch in enumerate(ids[4:]):
        twins.reads(batch)
        for layer, optimizer in twins.each():
            layer(batch).square().sum().backward()
            if k % 3 == 1:
                scale(layer, 0.5)
            if k % 4 == 2:
                optimizer.zero_grad(set_to_none=False)  # a step that no row takes part in
            if k % 2:
                torch.nn.utils.clip_grad_value_(layer.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
    twins.check()
    told = mine.table.stats()
    assert told["device_host_waits"] > 0
    assert min(told["admitted"], told["pending"]) > 0
    if mine.table.spec.eviction is not None:
        assert min(told["evicted"], len(twins.left[0])) > 0
    if mine.table.is_on_disk:
        numbers = [layer.table.commit(wait=False) for layer in twins.layers]
        twins.step(ids[0])  # beside it
        for layer in twins.layers:
            layer.table.commit()
        (mine, one), (other, another) = zip(twins.layers, numbers, strict=True)
        opened = [er.open(str(each.table.path), mode="r", at=at) for each, at in ((mine, one), (other, another))]
        with opened[0] as got, opened[1] as expected:
            check_same(got, expected)


@pytest.mark.parametrize("twins", [Case(CACHED, {"admission": SHARED})], indirect=True)
def test_a_step_that_is_refused_is_no_sighting(twins: Twins):
    ids = batches(5)
    twins.step(ids[0])
    for layer, optimizer in twins.each():
        (layer(ids[1]).sum() * float("nan")).backward()
        with pytest.raises(er.NonFiniteGradientError):  # on a device the next call tells
            assert optimizer.step() is None and layer(ids[1]) is None  # noqa: PT018
        optimizer.zero_grad()
    for batch in ids[1:]:
        twins.step(batch)
    twins.check()


@pytest.mark.parametrize("twins", cases(BOTH), indirect=True)
def test_rows_of_a_batch_that_was_refused_for_another_table_are_forgotten(twins: Twins):
    ids, others = batches(3), [ert.Embedding(None, DIM, seed=2) for _ in twins.layers]
    ert.place(others[0], DEVICE)
    both = [ert.SGD([layer, other], lr=0.1) for layer, other in zip(twins.layers, others, strict=True)]
    for layer, other, optimizer in zip(twins.layers, others, both, strict=True):
        for _ in range(2):
            layer(ids[0]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        (layer(ids[0]).sum() + other(ids[0]).sum() * float("nan")).backward()
        with pytest.raises(er.NonFiniteGradientError):  # on a device the next call tells
            assert optimizer.step() is None and other(ids[1]) is None  # noqa: PT018
        optimizer.zero_grad()
        assert layer.forget(ids[0]) == len(ids[0].unique())
        layer(ids[2]).sum().backward()
        optimizer.step()
    twins.check()


@pytest.mark.parametrize("twins", [Case(CACHED, BOTH, {"on_nonfinite": "skip"})], indirect=True)
def test_a_step_that_is_left_out_is_no_sighting(twins: Twins):
    for k, batch in enumerate(batches(5)):
        twins.step(batch, lambda layer, k=k: scale(layer, float("inf") if k == 2 else 1.0))
    twins.check()
    assert twins.layers[0].table.stats()["skipped_steps"] == 1


@pytest.mark.parametrize("twins", cases(BOTH), indirect=True)
def test_rows_are_forgotten_while_they_are_near(twins: Twins):
    ids = batches(6)
    for k, batch in enumerate(ids):
        twins.step(batch)
        if k % 2:
            assert len({layer.table.forget(ids[k - 1][:8].numpy()) for layer in twins.layers}) == 1
    twins.check()
    assert twins.layers[0].table.stats()["forgotten"] > 0
    twins.layers[0](ids[0]).sum().backward()
    with pytest.raises(er.ArgumentError, match="of a batch that was read and is not stepped yet"):
        twins.layers[0].table.forget(ids[0].numpy())


def test_rows_that_the_device_plans_are_not_forgotten_there():
    layer = ert.Embedding(50, DIM)
    ert.place(layer, DEVICE)
    layer(torch.arange(5)).sum().backward()
    with pytest.raises(er.UnsupportedError, match=r"while they are used on .*: the host does not know which of them a"):
        layer.table.forget([1])


@pytest.mark.parametrize("twins", cases(ALL), indirect=True)
def test_no_allocation_that_fails_lets_a_row_come_or_leave(twins: Twins):
    ids = batches(3)
    for batch in ids[:2]:
        twins.step(batch)
    mine, optimizer = next(twins.each())
    before = mine.table.stats()

    def is_as_before() -> None:
        optimizer.zero_grad()
        now = mine.table.stats()
        for name in ("admitted", "evicted", "gradients_shared", "rows_touched", "steps"):
            assert now[name] == before[name], name

    def step() -> None:
        mine(ids[2]).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert until_it_fits(step, is_as_before) > 5
    other, its = list(twins.each())[1]
    other(ids[2]).square().sum().backward()
    its.step()
    twins.check()


@pytest.mark.parametrize("places", ["", "01", *slow("0")])
def test_tables_that_step_together_all_step_where_one_cannot_tell_who_left(places: str):
    told: list[list[int]] = []

    def fail(ids: np.ndarray) -> None:
        raise RuntimeError("nobody listens")

    layers = torch.nn.ModuleList(
        ert.Embedding(None, DIM, eviction=er.Eviction(max_rows=2, by="recency", evicted=evicted))
        for evicted in (fail, lambda ids: told.append(ids.tolist()))
    )
    optimizer = ert.Adam(layers, lr=0.1)
    for place in places:
        ert.place(layers[int(place)], DEVICE)
    for ids, expected in ((torch.tensor([1, 2]), False), (torch.tensor([3]), True)):
        torch.stack([layer(ids).sum() for layer in layers]).sum().backward()
        if expected:
            with pytest.raises(RuntimeError, match="nobody listens"):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
    assert [layer.table.steps for layer in layers] == [2, 2]  # pyright: ignore[reportAttributeAccessIssue]
    assert len(told) == 1  # the other one's


@pytest.mark.parametrize("rows", [None, *slow(50)])
def test_two_layers_with_other_paddings_have_one_table(rows: int | None):
    """A row that is padding for one of them gets the gradient of the other, whichever comes first, and no other one."""
    tables = []
    for device in (None, DEVICE):
        first = ert.Embedding(rows, DIM, seed=0, padding_idx=3, directory="hashed")
        second = ert.Embedding(first.table)
        first.table.forget([3])
        both = torch.nn.ModuleList([first, second])
        optimizer = ert.SGD(both, lr=0.1)
        if device is not None:
            ert.place(both, device)
        for order in ([first, first], [first, second], [second, first]):
            for layer in order:
                layer(torch.tensor([1, 3] if layer is first else [3, 4])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            tables.append(first.table.export())
    for mine, other in zip(tables[3:], tables[:3], strict=True):
        for got, expected in zip(mine, other, strict=True):
            np.testing.assert_array_equal(got, expected)
    assert tables[0][0].tolist() == [1]


def test_members_of_a_group_on_disk_come_and_go(tmp_path: Path):
    """One that does and one that does not, and one that has all alone."""
    policies: list[dict[str, Any]] = [{}, {"eviction": er.Eviction(max_rows=26)}, ALL]
    models, optimizers, groups = [], [], []
    for path, near in (("mine", "8KiB"), ("other", None)):
        group = er.Group(path=str(tmp_path / path), memory="64KiB", device_memory=near)
        groups.append(group)
        named = {str(k): ert.Embedding(200, DIM, group=group, name=str(k), seed=k, **p) for k, p in enumerate(policies)}
        models.append(ert.EmbeddingCollection(named))
        optimizers.append(ert.Adam(models[-1], lr=0.1))
    ert.place(models[0], DEVICE)
    rng = np.random.default_rng(0)
    for _ in range(4):
        ids = {str(k): torch.from_numpy(rng.integers(0, 50, BATCH)) for k in range(3)}
        found = []
        for model, optimizer in zip(models, optimizers, strict=True):
            found.append(model(ids))
            torch.stack([rows.square().sum() for rows in found[-1].values()]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for name in ids:
            assert torch.equal(found[0][name].cpu(), found[1][name])
    for name in "012":
        check_same(groups[0][name], groups[1][name])
        assert isinstance(groups[0][name].executor, HostPlannedExecutor)
    assert groups[0]["1"].stats()["evicted"] > 0
    for group in groups:
        group.commit()
        group.close()


@pytest.mark.skipif(not INTERPRETED, reason="on_gpu.py delays the copies of a GPU")
@pytest.mark.parametrize("twins", [Case(CACHED, ALL), *slow(Case(ON_DISK, ALL))], indirect=True)
@pytest.mark.parametrize("seed", [0, *slow(None, 1, 2, 3)])
def test_late_copies_of_rows_that_leave_change_nothing(twins: Twins, seed: int | None, monkeypatch: pytest.MonkeyPatch):
    copies = late_copies.install(monkeypatch, seed)
    for batch in ert.prefetch(batches(3) * 2, {twins.layers[0]: lambda ids: ids}):
        twins.step(batch)
    twins.check()
    assert copies.late > 0


@pytest.mark.slow
def test_a_killed_training_goes_on_with_the_same_rows(tmp_path: Path):
    path = str(tmp_path / "rows.rock")
    done = 0
    for _ in range(3):
        command = [sys.executable, over_disk_loop.__file__, path, "comes and goes"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for line in child.stdout:
                done = int(line)
                if done % 12 < 3:
                    break
            child.kill()
    with er.open(path) as table:
        steps = table.last_step
        assert steps is not None
        assert steps >= done
        other = over_disk_loop.coming_and_going()
        over_disk_loop.train(other, range(steps))
        check_same(table, other.table)
        assert table.stats()["evicted"] > 0
