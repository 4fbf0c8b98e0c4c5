"""``memory="auto"``: what pays of what is left, and less again; and advice about ``memory=``."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from benchmarks import cgroups
from embedrock.storage import advice
from embedrock.storage import budget as budgets
from embedrock.storage import online_curve as watch
from embedrock.storage.budget import AutoSharedBudget, BudgetRequest
from embedrock.storage.disk_backend import DiskBackend
from embedrock.storage.table_lock import TableLock
from embedrock.system import ram
from embedrock.table.table import rows_of

MIB, ROWS, DIM = 1 << 20, 40_000, 8


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[AutoSharedBudget]:
    """Give tables a pool of their own, which looks when it is told to, at a machine with 1 GiB left."""
    made = AutoSharedBudget()
    monkeypatch.setattr(budgets, "AUTO_POOL", made)
    monkeypatch.setattr(budgets, "EVERY_S", 1e6)
    monkeypatch.setattr(budgets, "FIRST_BYTES", MIB // 2)
    leave(monkeypatch, 1 << 30)
    yield made
    made.stop()


def leave(patch: pytest.MonkeyPatch, nbytes: int, stalled: float = 0.0) -> None:
    patch.setattr(budgets, "available_bytes", lambda: nbytes)
    patch.setattr(budgets, "memory_limit", lambda: 0)
    patch.setattr(budgets, "pressure", lambda: stalled)


def made(path: Path, **options: Any) -> er.Table:
    return er.Table(ROWS, DIM, rule=er.Adam(lr=0.1), seed=0, path=path, memory="auto", **options)


def step(table: er.Table, twin: er.Table, rng: np.random.Generator) -> None:
    ids = (ROWS * rng.random(200) ** 3).astype(np.int64)
    grads = rng.standard_normal((200, DIM), dtype=np.float32)
    for each in (table, twin):
        each.update(ids, grads)


def budget_of(table: er.Table) -> int:
    return int(table.stats()["budget_bytes"])


def test_it_grows_as_rows_come_and_gives_back_under_pressure(
    pool: AutoSharedBudget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rng, twin = np.random.default_rng(0), er.Table(ROWS, DIM, rule=er.Adam(lr=0.1), seed=0)
    with made(tmp_path / "t") as table:
        budgets = [budget_of(table)]
        for left in (1 << 30, 0, 1 << 30):
            leave(monkeypatch, left, stalled=0.5 * (not left))
            for number in range(90):
                step(table, twin, rng)
                if number % 10 == 0:
                    pool.look()
            budgets.append(budget_of(table))
        ids = np.arange(ROWS)
        assert np.array_equal(table.lookup(ids), twin.lookup(ids))
        table.commit()
    assert budgets[0] == MIB // 2
    assert budgets[1] > 2 * budgets[0]
    assert budgets[2] < budgets[1] / 2
    assert budgets[3] > budgets[2]
    assert not pool.shares


def test_a_table_that_nobody_uses_gives_back(pool: AutoSharedBudget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rng, twin = np.random.default_rng(0), er.Table(ROWS, DIM, rule=er.Adam(lr=0.1), seed=0)
    with made(tmp_path / "t") as table:
        for _ in range(60):
            step(table, twin, rng)
            pool.look()
        tier = rows_of(table).tier
        assert isinstance(tier, DiskBackend)
        before = tier.bytes_used, tier.cache.count
        leave(monkeypatch, 0, stalled=1.0)
        for _ in range(12):
            pool.look()
        assert (tier.bytes_used, tier.cache.count) < tuple(count // 2 for count in before)
        assert np.array_equal(table.lookup(np.arange(ROWS)), twin.lookup(np.arange(ROWS)))
        table.commit()


def test_a_group_and_a_table_share(pool: AutoSharedBudget, tmp_path: Path):
    with made(tmp_path / "t") as table, er.Group(path=tmp_path / "g", memory="auto") as group:
        for dim in (4, 8):
            group.table(f"d{dim}", ROWS, dim, rule=er.SGD())
        assert len(pool.shares) == 3
        group.update({"d4": [1], "d8": [2]}, {"d4": np.ones((1, 4)), "d8": np.ones((1, 8))})
        group.commit()
        assert group.stats()["budget_bytes"] == sum(share.nbytes for share in pool.shares[1:])
        assert table.options["memory"] == "auto"
        assert 'memory="auto"' in str(rows_of(table).tier.budget)  # type: ignore[attr-defined]
    assert er.open(tmp_path / "t", mode="r", memory="auto").lookup([3]).shape == (1, DIM)


class Stuck:
    """A tier whose rows are all held for batches to come."""

    bytes_used = wanted_bytes = 1000

    def __init__(self) -> None:
        self.table_lock = TableLock()

    def give_up_excess(self, waits: bool) -> None:
        pass


def test_a_batch_is_not_refused_for_rows_that_others_hold(pool: AutoSharedBudget):
    tiers = Stuck(), Stuck()
    one, other = (pool.share() for _ in tiers)
    for share, tier, nbytes in zip((one, other), tiers, (1000, 100), strict=True):
        share.join(tier, BudgetRequest(100, 1000))
        share.nbytes = nbytes
    pool.total = 700
    pool.divide()
    with tiers[1].table_lock.lock:
        assert other.need(500, tiers[1])
    assert (one.nbytes, other.nbytes) == (1000, 500)
    pool.look()
    assert other.due >= 500
    with tiers[1].table_lock.lock:
        assert not other.need(500, tiers[1])  # it has them


@pytest.mark.parametrize("make", [lambda: er.Table(10, 4, memory="auto"), lambda: er.Group(memory="auto")])
def test_tables_in_ram_are_told_how_much(make: Any):
    with pytest.raises(er.ArgumentError, match=r'`memory="auto"` is for tables and groups on disk, with path=\. Pass'):
        make()


def test_the_thread_looks_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    looked = threading.Event()
    monkeypatch.setattr(budgets, "AUTO_POOL", pool := AutoSharedBudget())
    monkeypatch.setattr(budgets, "EVERY_S", 0.001)
    monkeypatch.setattr(AutoSharedBudget, "look", lambda self: looked.set())
    with made(tmp_path / "t"):
        assert looked.wait(60)
        thread = pool._thread
        assert thread is not None
    thread.join(60)
    assert not thread.is_alive()
    pool.stop()


def test_stalls(tmp_path: Path):
    (tmp_path / "proc/pressure").mkdir(parents=True)
    assert ram.pressure(tmp_path) == 0
    (tmp_path / "proc/pressure/memory").write_text("some avg10=12.50 avg60=1.00 total=5\nfull avg10=1.00 total=4\n")
    assert ram.pressure(tmp_path) == 0.125


# ---------------------------------------------------------------- in a cgroup


class Trainer:
    """In a process of its own: a table in ``memory="auto"``, its twin, and RAM that others take."""

    def __init__(self, folder: Path) -> None:
        self.table, self.taken = er.Table(400_000, 64, rule=er.Adam(), seed=0, path=folder / "t", memory="auto"), []
        self.rng = np.random.default_rng(0)

    def train(self, seconds: float) -> dict[str, float]:
        end, grads = time.monotonic() + seconds, np.ones((4000, 64), np.float32)
        while time.monotonic() < end:
            self.table.update(self.rng.integers(0, 400_000, 4000), grads)
        return self.table.stats()

    def take(self, mebibytes: int) -> dict[str, float]:
        for _ in range(mebibytes // 8):
            self.taken.append(np.ones(MIB))  # 8 MiB
            time.sleep(0.2)
        return self.table.stats()

    def peak(self) -> int:
        return cgroups.peak_bytes() or 0

    def close(self) -> None:
        self.table.commit()
        self.table.close()


@pytest.mark.slow
@pytest.mark.skipif(bool(cgroups.why_not()), reason=f"no memory cgroup: {cgroups.why_not()}")
def test_others_get_their_memory_in_a_cgroup(tmp_path: Path):
    environment = {"EMBEDROCK_THREADS": "1"}
    with cgroups.confined(512 * MIB, Trainer, tmp_path, environment=environment, timeout_s=300) as child:
        before = child.call("train", 20.0)
        assert before["bytes_used"] > 128 * MIB  # of 300 that the rows take
        child.call("take", 200)  # or the process is killed
        after = child.call("train", 10.0)
        assert after["bytes_used"] < before["bytes_used"] - 64 * MIB
        assert 0 < child.call("peak") <= 640 * MIB  # with the interpreter, which is charged to another group
        child.call("close")


# ---------------------------------------------------------------- advice


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the lines of advice, which are given early."""
    found: list[str] = []
    monkeypatch.setattr(advice, "tell", lambda text, level, name: found.append(text))
    for name, value in {"LOOKS": 20, "FIRST": 20, "SETTLED": 1.0, "_lines": 0}.items():
        monkeypatch.setattr(advice, name, value)
    monkeypatch.setattr(watch, "AT_ONCE", 8)
    monkeypatch.setattr(watch, "LEAST_BATCHES", 16)
    monkeypatch.setattr(advice, "available_bytes", lambda: 1 << 40)
    monkeypatch.delenv(advice.QUIET, raising=False)
    return found


def train_in_little(path: Path, mode: str = "w") -> None:
    rng = np.random.default_rng(0)
    with er.Table(3000, 4, rule=er.SGD(), path=path, memory="40KiB", mode=mode) as table:
        for _ in range(700):
            ids = rng.integers(0, 2000, 16)
            table.update(ids, np.ones((16, 4), np.float32)) if mode == "w" else table.lookup(ids)
        if mode == "w":
            table.commit()
    for thread in threading.enumerate():
        if thread.name == advice.NAME:
            thread.join()


def test_advice_is_one_line(lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    train_in_little(tmp_path / "t")
    (line,) = lines
    assert line.startswith(f"table '{tmp_path / 't'}': ")
    assert "more memory= would save" in line
    assert " rows a step now, " in line
    assert "instead of 40.0 KiB. `embedrock top` shows more, EMBEDROCK_ADVICE=0 keeps this quiet." in line
    train_in_little(tmp_path / "t", "r")
    assert len(lines) == 1
    monkeypatch.setenv(advice.QUIET, "0")
    train_in_little(tmp_path / "u")
    assert len(lines) == 1


def test_many_tables_are_not_many_lines(lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(advice, "MOST_LINES", 2)
    for number in range(3):
        train_in_little(tmp_path / f"t{number}")
    assert len(lines) == 2
    assert lines[1].endswith("(Of other tables nothing is said: see `embedrock top`.)")


def test_half_of_the_memory_is_told(lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(advice, "LARGE_BYTES", 0)
    monkeypatch.setattr(DiskBackend, "wanted_bytes", 0)
    with er.Table(800, 4, rule=er.SGD(), path=tmp_path / "t", memory="1MiB") as table:
        for number in range(900):
            table.update(np.arange(number % 3, 24, 3), np.ones((8, 4), np.float32))
        table.commit()
    for thread in threading.enumerate():
        if thread.name == advice.NAME:
            thread.join()
    assert len(lines) == 1
    assert "less memory= would read as little from disk, 0.0 rows a step more. Set memory=" in lines[0]
