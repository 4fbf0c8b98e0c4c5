"""A cache in GPU memory over the cache in RAM of a table on disk: the bits, commits and files of one without."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fake_cuda
import late_copies
import numpy as np
import over_disk_loop
import pytest
import torch
from gpu_device import DEVICE, INTERPRETED
from test_gpu_limits import until_it_fits
from triton.runtime import interpreter

import embedrock as er
import embedrock.torch as ert
from embedrock.batch.plan import Plan
from embedrock.device import memory_for
from embedrock.device.cache import DeviceCache
from embedrock.device.host_planned import HostPlannedExecutor
from embedrock.device.stream_order import StreamOrder
from embedrock.storage.disk_backend import DiskBackend
from embedrock.store.record_store import RecordStore
from embedrock.table import reading
from embedrock.table.rows import TableState
from embedrock.table.table import rows_of
from pages import keys_of
from slow import slow

ROWS, DIM, BATCH = 400, 16, 24
MEMORY, SLOTS = "16KiB", 51  # for the rows of some batches


def ids_of(count: int, seed: int = 0) -> list[torch.Tensor]:
    """Return batches of ids, half of them of a few rows."""
    rng = np.random.default_rng(seed)
    hot, cold = rng.integers(0, 20, (count, BATCH // 2)), rng.integers(0, ROWS, (count, BATCH // 2))
    return list(torch.from_numpy(np.concatenate([hot, cold], 1)))


class Both:
    """A table on disk with rows on the device, and one in RAM that the CPU uses."""

    def __init__(self, folder: Path, near: int, device: str = DEVICE) -> None:
        self.path, self.near = str(folder / "rows.rock"), near
        options: dict[str, Any] = {"seed": 1, "init": er.Normal(std=0.5)}
        self.other = ert.Embedding(ROWS, DIM, **options)
        spec = er.Table(ROWS, DIM, rule=er.Adam()).spec
        memory = near and memory_for(spec, near, SLOTS)
        self.mine = ert.Embedding(ROWS, DIM, path=self.path, memory=MEMORY, device_memory=memory, **options)
        self.optimizers = [ert.Adam(layer, lr=0.1) for layer in (self.mine, self.other)]
        ert.place(self.mine, device)

    def step(self, ids: torch.Tensor) -> None:
        for layer, optimizer in zip((self.mine, self.other), self.optimizers, strict=True):
            layer(ids).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def expect(self, ids: torch.Tensor | None) -> None:
        executor = self.mine.handle.executor()
        assert isinstance(executor, HostPlannedExecutor)
        executor.expect(ids)

    def check(self) -> None:
        every = np.arange(ROWS)
        np.testing.assert_array_equal(self.mine.table.lookup(every), self.other.table.lookup(every))
        for got, expected in zip(self.mine.table.export(), self.other.table.export(), strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.fixture
def both(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Both]:
    made = Both(tmp_path, getattr(request, "param", 12))
    yield made
    made.mine.table.commit()
    made.mine.table.close()


@pytest.mark.parametrize("both", [12, *slow(0, 1, 1000)], indirect=True)
def test_it_trains_to_the_same_bits_and_commits_them(both: Both):
    for k, ids in enumerate(ids_of(6)):
        both.step(ids)
        if k in (0, 4):
            both.mine.table.commit(wait=k == 0)
    told = both.mine.table.stats()
    assert min(told["evictions"], told["spilled"]) > 0
    assert (told["cache_slots"], told["device_slots"]) == (SLOTS, min(SLOTS, both.near))
    assert told.keys() >= keys_of("Every table", "On a GPU")
    assert told.keys() <= keys_of("Every table", "On disk", "On a GPU")
    both.check()
    both.mine.table.commit()
    with er.open(both.path, mode="r", memory=MEMORY, device_memory="3KiB") as table:
        np.testing.assert_array_equal(table.lookup(np.arange(ROWS)), both.other.table.lookup(np.arange(ROWS)))
        snapshot, some = ert.Embedding(table), torch.arange(25)
        ert.place(snapshot, DEVICE)
        for ids in some, some + 10:  # which others leave RAM for
            assert torch.equal(snapshot(ids).cpu(), both.other(ids))


@pytest.mark.parametrize("depth", [1, *slow(0, 2)])
def test_no_depth_of_prefetch_changes_a_bit(both: Both, depth: int):
    for ids in ert.prefetch(ids_of(4), {both.mine: lambda ids: ids}, depth=depth):
        both.step(ids)
    assert both.mine.table.stats()["evictions"] > 0
    both.check()


def test_rows_stay_near_while_others_leave_and_commits_come(both: Both):
    """A commit, and rows that leave, cost the rows that they are about, not the cache."""
    hot = torch.arange(8)
    for ids in [hot, *(torch.cat([hot, torch.arange(30 + 20 * k, 50 + 20 * k)]) for k in range(3))]:
        both.step(ids)
        both.mine.table.commit()
    told = both.mine.table.stats()
    assert told["evictions"] > 0
    assert told["device_hits"] >= 2 * len(hot)


def test_a_batch_that_the_cache_in_ram_has_no_room_for_is_read_and_not_stepped(both: Both):
    both.step(torch.arange(30))
    every = torch.arange(ROWS)
    found = both.mine(every)
    assert torch.equal(found.detach().cpu(), both.other(every).detach())
    found.square().sum().backward()
    with pytest.raises(er.CacheTooSmallError, match=r"memory=\d+ .* is enough: raise memory=, or use smaller batches"):
        both.optimizers[0].step()
    both.optimizers[0].zero_grad()
    both.check()


def test_what_is_written_to_files_has_come_back_before(both: Both, monkeypatch: pytest.MonkeyPatch):
    """Nothing that was launched is under way as rows are written that leave, or read into their slots."""
    launched, finish, append = [0], StreamOrder.finish, RecordStore.append
    run = interpreter.GridExecutor.__call__

    def noted(executor: Any, *args: Any, **options: Any) -> None:
        launched[0] += 1
        run(executor, *args, **options)

    def waited(timeline: StreamOrder) -> None:
        finish(timeline)
        launched[0] = 0

    appended: list[int] = []
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", noted)
    monkeypatch.setattr(StreamOrder, "finish", waited)
    monkeypatch.setattr(RecordStore, "append", lambda *args: (appended.append(launched[0]), append(*args))[1])
    for ids in ids_of(4):
        both.step(ids)
    assert appended
    assert not any(appended)


@pytest.mark.skipif(not INTERPRETED, reason="on_gpu.py delays the copies of a GPU")
@pytest.mark.parametrize("seed", [None, *slow(0, 1, 2)])
def test_copies_ahead_that_come_late_change_nothing(both: Both, seed: int | None, monkeypatch: pytest.MonkeyPatch):
    copies, ids = late_copies.install(monkeypatch, seed), ids_of(4)
    for now, later in itertools.zip_longest(ids, ids[1:]):
        both.expect(later)
        both.step(now)
    both.check()
    assert copies.late > 0


@pytest.mark.skipif(not INTERPRETED, reason="its GPU is a fake")
def test_all_that_has_to_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with fake_cuda.install(monkeypatch) as gpu:
        both, streams, ids = Both(tmp_path, 12, "cuda"), [gpu.new_stream() for _ in range(2)], ids_of(4)
        for k, (now, later) in enumerate(itertools.zip_longest(ids, ids[1:])):
            with gpu.on(streams[k % 2]):
                streams[k % 2].wait_stream(streams[1 - k % 2])
                both.expect(later)
                both.step(now)
        assert rows_of(both.mine.table).tier.stats()["evictions"] > 0
        both.check()
        both.mine.table.commit()
        assert gpu.races == []
        both.mine.table.close()


class Elsewhere:
    """Lets another thread have the table, and do something, wherever rows are brought for the `number`th time."""

    def __init__(self, rows: TableState, number: int, work: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
        self._rows, self._number, self._work, self._located = rows, number, work, reading.located
        self.calls, self._done = 0, threading.Event()
        patch.setattr(reading, "located", self)

    def __call__(self, tables: Sequence[TableState], plan: Plan) -> Plan:
        self.calls += 1
        if self.calls == self._number:
            threading.Thread(target=self._do).start()
            self._rows.table_lock.wait_for(self._done.is_set)  # which lets the lock go, as to wait for room does
        return self._located(tables, plan)

    def _do(self) -> None:
        self._work()
        self._done.set()
        self._rows.table_lock.notify()


@pytest.mark.parametrize("number", [2, *slow(1, 3)])  # as it is read; planned; stepped
def test_a_step_elsewhere_while_rows_are_brought_is_seen(both: Both, number: int, monkeypatch: pytest.MonkeyPatch):
    ids, grads = torch.arange(12), np.ones((12, DIM), np.float32)
    both.step(ids)  # they are near now
    with monkeypatch.context() as patch:
        seam = Elsewhere(rows_of(both.mine.table), number, lambda: both.mine.table.update(ids.numpy(), grads), patch)
        found = both.mine(ids)
        if number < 3:
            both.other.table.update(ids.numpy(), grads)
        expected = both.other(ids)
        assert torch.equal(found.cpu(), expected)
        found.square().sum().backward()
        both.optimizers[0].step()
    assert seam.calls >= number
    if number == 3:
        both.other.table.update(ids.numpy(), grads)
    expected.square().sum().backward()
    both.optimizers[1].step()
    both.check()


def test_nobody_asks_a_side_for_rows_before_it_is_whole(both: Both, monkeypatch: pytest.MonkeyPatch):
    """Others leave RAM for the rows that another thread brings there, while a side is made."""
    made, (others, ids) = DeviceCache.__init__, (np.arange(100, 112), torch.arange(12))
    grads, tables = np.ones((12, DIM), np.float32), [both.mine.table, both.other.table]
    for first in range(0, 48, 12):
        for table in tables:
            table.update(np.arange(first, first + 12), grads)
    leaving = threading.Thread(target=lambda: both.mine.table.update(others, grads))

    def waits(near: DeviceCache, *args: Any) -> None:
        leaving.start()
        leaving.join(0.05)
        made(near, *args)

    monkeypatch.setattr(DeviceCache, "__init__", waits)
    assert torch.equal(both.mine(ids).cpu(), both.other(ids))
    leaving.join()
    both.other.table.update(others, grads)
    assert both.mine.table.stats()["evictions"] > 0
    both.check()


@pytest.mark.slow
def test_no_allocation_that_fails_loses_a_row(both: Both):
    *before, last = ids_of(5)
    for ids in before:
        both.step(ids)
    every = np.arange(ROWS)

    def step() -> None:
        both.mine(last).square().sum().backward()
        both.optimizers[0].step()

    def is_as_before() -> None:
        both.optimizers[0].zero_grad()
        np.testing.assert_array_equal(both.mine.table.lookup(every), both.other.table.lookup(every))

    assert until_it_fits(step, is_as_before) >= 10
    both.optimizers[0].zero_grad()
    both.other(last).square().sum().backward()
    both.optimizers[1].step()
    both.check()


def test_too_little_memory_for_a_row_is_said(tmp_path: Path):
    layer = ert.Embedding(ROWS, DIM, path=str(tmp_path / "rows.rock"), memory=MEMORY, device_memory=300)
    ert.place(layer, DEVICE)
    with pytest.warns(ert.PlacementWarning, match=r"device_memory=300 of .* has room for no row: .* [\d.]+ .* for one"):
        layer(torch.arange(3))
    assert "rows used in RAM" in repr(layer.table)
    layer.table.close()


def test_the_cache_in_ram_may_be_made_anew_while_rows_are_near(both: Both):
    *before, last = ids_of(3)
    for ids in before:
        both.step(ids)
    tier = rows_of(both.mine.table).tier
    assert isinstance(tier, DiskBackend)
    tier.budget.nbytes = tier.budget.due = 2 * tier.budget.nbytes  # as that of a table with memory="auto"
    arena, ids = tier.arena, torch.arange(SLOTS + 5)
    both.step(ids)
    both.step(last)
    assert tier.arena is not arena
    assert both.mine.table.stats()["device_slots"] > 0
    both.check()


LOOP = Path(over_disk_loop.__file__)
KILLS = 3


@pytest.mark.slow
@pytest.mark.parametrize("in_group", [False, True])
def test_what_was_committed_survives_kills(in_group: bool, tmp_path: Path):
    """Each time it goes on from its last commit, which has all that was acknowledged, and the bits of the CPU."""
    path, rng, acknowledged, before = str(tmp_path / "rows.rock"), random.Random(0), 0, 0
    other = over_disk_loop.layers() if in_group else ert.Embedding(over_disk_loop.ROWS, over_disk_loop.DIM, seed=1)
    for _ in range(KILLS):
        command = [sys.executable, LOOP, path, *(["group"] if in_group else [])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for _ in range(rng.randint(1, 3)):
                acknowledged = int(child.stdout.readline())
            time.sleep(rng.random() * 0.3)
            child.kill()
            told = child.stdout.read().split("\n")[:-1]  # what comes after the last newline may be half a number
        acknowledged = max([acknowledged, *map(int, told)])
        with er.open(path, mode="r") as found:
            steps = found.last_step
            assert steps is not None
            assert steps >= acknowledged
            over_disk_loop.train(other, range(before, steps))
            before = steps
            every = np.arange(over_disk_loop.ROWS)
            tables = [found[name] for name in found] if isinstance(found, er.Group) else [found]
            for table, layer in zip(tables, over_disk_loop.layers_in(other), strict=True):
                np.testing.assert_array_equal(table.lookup(every), layer.table.lookup(every))
            assert found.verify().problems == []


def test_a_snapshot_that_moves_shows_the_newest_commit(tmp_path: Path):
    ids = torch.arange(BATCH)
    with er.Table(ROWS, DIM, path=tmp_path / "t", rule=er.SGD(lr=1.0), init=er.Zeros()) as table:
        table.commit()
        with er.open(tmp_path / "t", mode="r", memory=MEMORY, device_memory="3KiB") as snapshot:
            layer = ert.Embedding(snapshot).requires_grad_(False)
            ert.place(layer, DEVICE)
            for step in range(3):
                assert (layer(ids) == step).all()
                table.update(ids.numpy(), -np.ones((BATCH, DIM), np.float32))
                table.commit()
                assert (layer(ids) == step).all()
                assert snapshot.refresh()
            assert isinstance(layer.handle.executor(), HostPlannedExecutor)
