"""Open ids whose directory is on the device, against the reference and against tables that the CPU plans."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import race_detector
import torch
from gpu_device import DEVICE, INTERPRETED
from gpu_models import on_device
from tensors import Poisoned, one, tensor, verdicts

import embedrock as er
import embedrock.torch as ert
from embedrock.device import memory_for
from embedrock.device.hash_index import DeviceHashIndex
from embedrock.device.hashed import FIRST_SLOTS, HashedGpuExecutor
from embedrock.kernels.gpu import directory as kernels
from embedrock.kernels.gpu.addresses import TableEntryWords
from reference import device, directory
from slow import slow

DIM = 5
EXTREMES = [-(2**63), 2**63 - 1, 0, -1, 1, 2**62, -(2**31), 2**32]
MASK = 2**64 - 1

# ---------------------------------------------------------------- kernels


def unmix(h: int) -> int:
    """Return the id that is scattered to a hash: `directory.mix` backwards."""
    for factor in (0xC4CEB9FE1A85EC53, 0xFF51AFD7ED558CCD):
        h ^= h >> 33
        h = h * pow(factor, -1, 2**64) & MASK
    return h ^ (h >> 33)


def forged(hashes: Sequence[int], seed: int) -> np.ndarray:
    """Return ids that have these hashes in a directory with a seed."""
    ids = np.array([unmix(h) ^ seed for h in hashes], np.uint64).view(np.int64)
    np.testing.assert_array_equal([directory.mix(int(each) ^ seed) for each in ids], hashes)
    return ids


class Pair:
    """A directory on the device, and the reference's."""

    def __init__(self, slots: int, seed: int) -> None:
        table = torch.zeros(2 * slots, dtype=torch.int64, device=DEVICE)
        self.entries = kernels.HashIndexTensors(table, Poisoned((slots,), torch.int64).inside, seed)
        self.used = torch.zeros((), dtype=torch.int64, device=DEVICE)
        known = *(part.data_ptr() for part in self.entries[:2]), 2 * slots, seed, self.used.data_ptr(), 0
        words = TableEntryWords(0, slots, 0, 0, 0, 0, 0, 0, (0, 0, 0), -2, directory=known).words
        self.words = tensor(np.array([words], np.int64))
        self.ids, self.count = np.zeros(slots, np.int64), 0

    def step(self, ids: np.ndarray, live: bool, spare: int) -> None:
        """Look ids up and enter them; `spare` are beyond the count."""
        n = len(ids)
        keys, starts = tensor(np.append(ids, np.full(spare, 7))), torch.arange(n + spare + 1, dtype=torch.int32)
        slots, bounds = Poisoned((n + spare,), torch.int64), Poisoned((3,), torch.int32)
        counts, news, ticket = Poisoned((kernels.blocks(n + spare),), torch.int32), one(0), one(0)
        rows = keys, tensor(starts.numpy()), None, one(n), tensor(np.array([0, n + spare]))
        expected = device.search(ids, np.array([n]), self.ids, self.count)
        kernels.search(rows, self.words, slots.inside, counts.inside, news, bounds.inside)
        np.testing.assert_array_equal(slots.check(n), expected)
        assert bounds.check(3).tolist() == [0, n, -1]
        assert counts.inside.sum() == news[0] == np.count_nonzero(expected == device.NEW)
        of_new = slots.inside, counts.inside, news
        kernels.enter(rows, self.words, *of_new, ticket, verdicts([live]))
        assert int(ticket) == 0
        self.count = device.enter(ids, expected, live, self.ids, self.count)
        np.testing.assert_array_equal(slots.check(n), expected)
        assert int(self.used) == self.count
        np.testing.assert_array_equal(self.entries.ids[: self.count].cpu().numpy(), self.ids[: self.count])


@pytest.mark.parametrize("seed", [0, *slow(*range(1, 20))])
def test_ids_get_the_slots_of_the_reference(seed: int):
    rng = np.random.default_rng(seed)
    pair = Pair(3000, int(rng.integers(2**63)))
    for k in range(5):
        some = rng.integers(-(2**63), 2**63 - 1, rng.integers(1, 700)), rng.integers(-9, 9, 5), EXTREMES
        known = rng.choice(pair.ids[: max(1, pair.count)], 20)
        ids = np.unique(np.concatenate([*some, known]))
        if len(ids) + pair.count < 3000:
            pair.step(ids, k != 1, int(rng.integers(0, 600)))
    assert pair.count > 100


@pytest.mark.parametrize("alike", ["place", *slow("digest")])
@pytest.mark.parametrize("count", [40, *slow(4000)])
def test_ids_that_collide(count: int, alike: str):
    # An id's place is decided by the upper half of its hash, and its digest is the lower one.
    hashes = [(7 << 32) | k if alike == "place" else (k << 32) | 7 for k in range(count)]
    ids, pair = np.unique(forged(hashes, 99)), Pair(2 * count, 99)
    for some in ids[: count // 2], ids, ids:
        pair.step(some, True, 3)
    assert pair.count == count


@pytest.mark.skipif(not INTERPRETED, reason="compute-sanitizer looks for races on a GPU: see on_gpu.py")
def test_no_program_that_enters_ids_depends_on_another(monkeypatch: pytest.MonkeyPatch):
    detector = race_detector.install(monkeypatch)
    pair = Pair(2000, 1)
    for k in range(2):
        ids = np.arange(900) * 3 - 450 * k
        pair.step(ids, True, 0)
    pair.entries.table.zero_()
    kernels.file(pair.used, 2000, pair.entries)
    assert int((pair.entries.table != 0).sum()) == pair.count
    assert detector.found == set()
    assert {"_search", "_enter", "_file"} <= detector.launched


def test_entries_are_made_of_ids_as_they_are():
    ids = np.unique(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 900))
    pair = Pair(1000, 3)
    pair.entries.ids[: len(ids)] = tensor(ids)
    pair.ids[: len(ids)], pair.count = ids, len(ids)
    pair.used.fill_(len(ids))
    kernels.file(pair.used, 2 * len(ids), pair.entries)
    assert int((pair.entries.table != 0).sum()) == len(ids)
    pair.step(ids[::3], True, 2)


# ---------------------------------------------------------------- tables


class Trained:
    """A layer of open ids on the device, and the same on the CPU."""

    def __init__(self, near: int, rule: str = "Adam", **arguments: Any) -> None:
        spec = er.Table(None, DIM, rule=getattr(er, rule)()).spec
        options = {"init": er.Normal(std=0.5), "seed": 5, **arguments}
        memories = memory_for(spec, near), None
        self.layers = [ert.Embedding(None, DIM, **options, device_memory=memory) for memory in memories]
        self.steps = [getattr(ert, rule)(layer, lr=0.1) for layer in self.layers]
        on_device(self.layers[0])

    @property
    def table(self) -> er.Table:
        return self.layers[0].table

    @property
    def executor(self) -> Any:
        return self.table.executor

    def backward(self, ids: torch.Tensor, scale: float = 1.0) -> None:
        found = [layer(ids) for layer in self.layers]
        assert torch.equal(found[0].cpu(), found[1])
        for rows in found:
            (scale * rows.float().square().sum()).backward()

    def step(self) -> None:
        for optimizer in self.steps:
            optimizer.step()
            optimizer.zero_grad()

    def train(self, ids: torch.Tensor) -> None:
        self.backward(ids)
        self.step()

    def check(self) -> None:
        """Compare all bits: which rows there are, their weights and state, and steps."""
        mine, other = (layer.table.state() for layer in self.layers)
        assert mine["steps"] == other["steps"]
        orders = [np.argsort(state["ids"]) for state in (mine, other)]
        for name in ("ids", "records"):
            got, expected = (state[name][order] for state, order in zip((mine, other), orders, strict=True))
            np.testing.assert_array_equal(got, expected)


def batch(rng: np.random.Generator, size: int = 20) -> torch.Tensor:
    kind = rng.integers(4)
    if kind == 0:
        return torch.from_numpy(rng.choice(EXTREMES, size))
    if kind == 1:
        return torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, size if rng.integers(4) else 0))
    return torch.from_numpy(rng.integers(-size, size, size)).reshape(-1, 2)


def test_steps_of_no_ids_keep_the_rows_that_there_are():
    trained = Trained(100, "SGD")
    for ids in ([7, 46], [], [0, 175], [], []):
        trained.train(torch.tensor(ids, dtype=torch.int64))
    trained.check()


@pytest.mark.parametrize(("seed", "count"), [(3, 3), *slow(*((seed, 60) for seed in range(25)))])
def test_a_trace_of_open_ids(seed: int, count: int):
    rng = np.random.default_rng(seed)
    rule, dtype = rng.choice(["SGD", "Adam", "Adagrad"]), (torch.float32, torch.bfloat16)[rng.integers(2)]
    trained = Trained(int(rng.choice([0, 1, 30, 300, 10**5])), str(rule), dtype=dtype)
    for _ in range(count):
        act = rng.integers(10)
        if act < 5:
            trained.train(batch(rng))
        elif act == 5:
            for _ in range(3):
                trained.backward(batch(rng), 0.5)
            trained.step()
        elif act == 6:
            rows = rng.standard_normal((4, DIM)).astype(np.float32)
            ids = np.unique(batch(rng).numpy())[:4]
            for layer in trained.layers:
                layer.table.assign(ids, rows[: len(ids)])
        elif act == 7:
            trained.check()
        elif act == 8 and seed % 2:
            ids = np.unique(batch(rng).numpy())[:2]
            for layer in trained.layers:
                layer.handle.leave_side()
                layer.table.forget(ids)
        else:
            bad = trained.layers[0](batch(rng))
            assert bad.isfinite().all()
    trained.check()


def test_bags_of_nothing_have_no_padding():
    bags = ert.EmbeddingBag(None, 2, seed=0, padding_idx=3, device_memory=1 << 12)
    ert.place(bags, DEVICE)
    assert bags(torch.zeros((0, 2), dtype=torch.int64)).shape == (0, 2)
    assert not bags(torch.zeros(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)).any()


def test_new_rows_wait_for_nobody():
    trained = Trained(100)
    for k in range(3):
        trained.train(torch.arange(10) * 10**15 + 5 * k)
    assert isinstance(trained.executor, HashedGpuExecutor)
    stats = trained.table.stats()
    assert stats["device_host_waits"] == 0
    assert stats["rows_touched"] == 30
    assert trained.table.executor is not None
    assert "open ids" in repr(trained.table)
    trained.check()


def test_rows_that_outgrow_the_memory_go_on_beside_a_cache():
    trained = Trained(25)
    for k in range(3):
        trained.train(torch.arange(15) - 5 * k)  # 15, 20, 25 rows: as many as there is room for
    assert "all rows" in repr(trained.table)
    trained.backward(torch.arange(30))  # whose slots are as they were
    trained.step()
    assert "rows cached" in repr(trained.table)
    assert "open ids" in repr(trained.table)
    waits = trained.table.stats()["device_host_waits"]
    for k in range(6):
        trained.train(torch.arange(20, 40) + 3 * k)
    stats = trained.table.stats()
    assert stats["device_host_waits"] == waits
    assert stats["device_hits"] > 0
    assert stats["device_evictions"] > 0
    trained.check()


@pytest.mark.parametrize("near", [17, *slow(0)])
def test_ids_in_ram_wait_for_nobody_while_the_directory_grows(near: int):
    trained = Trained(near, init=er.Zeros())
    for k in range(6):
        trained.train(torch.arange(700 if k % 2 else 30) * 10**15 + 300 * k)
    executor, stats = trained.executor, trained.table.stats()
    assert isinstance(executor, HashedGpuExecutor)
    assert executor.plans
    assert len(executor.index.ids) > FIRST_SLOTS
    assert stats["device_bytes"] >= 28 * len(executor.index.ids)
    assert stats["device_host_waits"] == (near > 0)  # as the rows outgrew the memory
    trained.check()


def test_the_directory_does_not_grow_while_no_rows_are_new():
    trained = Trained(0, "SGD")
    for _ in range(25):
        trained.train(torch.arange(50))  # 1,250 positions
    assert len(trained.executor.index.ids) == FIRST_SLOTS
    assert trained.table.stats()["device_host_waits"] == 0
    trained.check()


@pytest.mark.parametrize("memory", [1 << 11, *slow(0, 1 << 16)])
def test_a_table_all_of_whose_rows_are_there_waits_for_nobody(memory: int):
    layers = [ert.Embedding(40, DIM, seed=5, directory="hashed", device_memory=given) for given in (memory, None)]
    steps = [ert.SGD(layer, lr=0.1) for layer in layers]
    on_device(layers[0])
    for _ in range(4):
        for layer, optimizer in zip(layers, steps, strict=True):
            layer(torch.arange(40)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    stats = layers[0].table.stats()
    assert stats["device_host_waits"] == (memory == 1 << 11)  # as they outgrew it
    assert stats["rows_touched"] == 40
    mine, theirs = (layer.table.lookup(np.arange(40)) for layer in layers)
    np.testing.assert_array_equal(mine, theirs)


def test_memory_that_the_directory_does_not_find_lets_the_host_plan(monkeypatch: pytest.MonkeyPatch):
    trained = Trained(0)
    trained.train(torch.arange(9))

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(DeviceHashIndex, "grow", fails)
    trained.train(torch.arange(2000))
    assert "planned by the host" in repr(trained.table)
    trained.train(torch.arange(1500, 2500))
    trained.check()


def test_ids_outside_of_a_hashed_table_are_found_on_the_device():
    layer = ert.Embedding(10**9, DIM, directory="hashed", device_memory=0)
    optimizer = ert.SGD(layer, lr=0.1)
    on_device(layer)
    for ids in [5, 10**9 - 1], [7, 10**9]:
        layer(torch.tensor(ids)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(er.IdError, match=r"must lie in \[0, 1000000000\): got 1000000000 in an earlier batch"):
        layer.table.lookup([0])
    assert layer.table.export()[0].tolist() == [5, 10**9 - 1]
    assert layer.table.steps == 1


@pytest.mark.slow
def test_gradients_of_both_plans_are_added_where_the_host_begins_to_plan_in_between():
    trained = Trained(20)
    trained.train(torch.arange(20))
    trained.backward(torch.arange(15, 25))
    executor = trained.executor
    with executor.working:
        executor._finish()
        executor._give_up()
    trained.backward(torch.arange(10, 30))
    trained.step()
    assert "planned by the host" in repr(trained.table)
    trained.check()


@pytest.mark.slow
def test_gradients_that_were_zeroed_are_not_added():
    trained = Trained(50)
    trained.backward(torch.arange(4))
    for optimizer in trained.steps:
        optimizer.zero_grad(set_to_none=False)
    trained.backward(torch.arange(2, 6))
    trained.step()
    trained.check()


def test_a_step_that_is_refused_makes_no_rows():
    trained = Trained(50)
    trained.train(torch.arange(4))
    (trained.layers[0](torch.arange(8)) * float("nan")).sum().backward()
    trained.steps[0].step()
    trained.steps[0].zero_grad()
    with pytest.raises(er.NonFiniteGradientError):
        trained.table.lookup([0])
    assert trained.table.stats()["rows_touched"] == 4
    trained.train(torch.arange(20, 25))
    trained.check()


@pytest.mark.slow
def test_the_row_of_padding_gets_no_gradient():
    trained = Trained(50, padding_idx=-3)
    trained.train(torch.tensor([-3, 5, -3, 9]))
    trained.train(torch.tensor([5, 7]))
    trained.check()
    assert not trained.layers[0](torch.tensor([-3])).any()


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 3])
def test_batches_are_planned_ahead(depth: int):
    trained = Trained(200)
    rng = np.random.default_rng(1)
    for ids in ert.prefetch([batch(rng) for _ in range(5)], {trained.layers[0]: lambda ids: ids}, depth=depth):
        trained.train(ids)
    assert trained.executor.ahead is None
    trained.check()


@pytest.mark.slow
def test_checkpoints_and_copies():
    trained = Trained(60)
    trained.train(torch.arange(-9, 9))
    twin = Trained(60)
    for layer, other in zip(twin.layers, trained.layers, strict=True):
        layer.load_state_dict(copy.deepcopy(other.state_dict()))
    twin.steps[0].load_state_dict(trained.steps[0].state_dict())
    for each in (trained, twin):
        each.train(torch.arange(5, 30))
        each.check()


@pytest.mark.slow
def test_the_memory_that_the_table_may_take_in_ram_is_a_bound_on_the_device_too():
    trained = Trained(10**4, memory="24KiB")
    trained.train(torch.arange(50))
    with pytest.raises(er.MemoryBudgetError, match=r"has 50 rows in RAM and this batch touches 200 new ones"):
        trained.train(torch.arange(50, 250))
    assert len(trained.table.export()[0]) == 50
