"""The trace gate: whatever a table on disk is asked, and whoever gets ahead, it has the bytes of one in RAM.

So have all commits that it keeps, each of which is opened and verified after every commit.
"""

from __future__ import annotations

import inspect
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

import disk_pair
import embedrock as er
from disk_pair import AFTER, BATCH, TOTAL, Act, Case
from embedrock.errors import MissingFileError
from embedrock.storage import budget as budgets
from embedrock.storage.disk_backend import DiskBackend
from embedrock.storage.ram_layout import memory_for
from embedrock.store import folder as folders
from embedrock.store.pieces import CompactionGoal
from embedrock.store.record_store import RecordStore
from embedrock.table.stored import StoredVerbs
from slow import slow
from traced_pair import ASKED, YieldingLock, drawn_acts, drawn_case, play


@pytest.mark.parametrize("seed", [0, *slow(*range(1, 6))])
def test_a_trace(seed: int, tmp_path: Path):
    play(drawn_case(seed), drawn_acts(seed, 60), tmp_path / "table")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_long_traces(part: int, tmp_path: Path):
    seeds = range(1000 + 20 * part, 1020 + 20 * part)
    for seed in seeds:
        play(drawn_case(seed), drawn_acts(seed, 250), tmp_path / f"table {seed}")
    print(f"traces: {len(seeds)}, of 250 operations each, bad: 0")


def resize_at_random(patch: pytest.MonkeyPatch, seed: int) -> Counter[int]:
    """Let what there is for tables with ``memory="auto"`` change with every batch; return the budgets."""
    rng, begin, seen = random.Random(seed), DiskBackend.begin_batch, Counter[int]()
    pool = budgets.AutoSharedBudget()

    def measure(self: budgets.AutoSharedBudget) -> None:
        least = sum(share.claim.least for share in self.shares)
        self.total = least + rng.choice((0, 0, 500, 2000, 8000, 32_000)) * len(self.shares)

    def begin_batch(self: DiskBackend) -> None:
        pool.look()
        begin(self)
        seen[self.budget.nbytes] += 1

    def wanted_bytes(self: DiskBackend) -> int:
        return memory_for(self.spec, rng.choice((1, BATCH, 3 * BATCH, TOTAL)))

    patch.setattr(budgets, "AUTO_POOL", pool)
    patch.setattr(budgets, "EVERY_S", 1e6)
    patch.setattr(budgets.AutoSharedBudget, "measure", measure)
    patch.setattr(DiskBackend, "begin_batch", begin_batch)
    patch.setattr(DiskBackend, "wanted_bytes", property(wanted_bytes))
    return seen


@pytest.mark.parametrize("seed", [0, *slow(1)])
def test_a_trace_in_memory_that_comes_and_goes(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = resize_at_random(monkeypatch, seed)
    play(replace(drawn_case(seed), memory="auto"), drawn_acts(seed, 20), tmp_path / "table")
    budgets.AUTO_POOL.stop()
    assert len(seen) > 2


@pytest.mark.slow
def test_many_traces_in_memory_that_comes_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = resize_at_random(monkeypatch, 0)
    for seed in range(3000, 3040):
        play(replace(drawn_case(seed), memory="auto"), drawn_acts(seed, 120), tmp_path / f"table {seed}")
    budgets.AUTO_POOL.stop()
    assert len(seen) > 20


# ---------------------------------------------------------------- a gate that stops nothing proves nothing


def test_all_public_methods_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    public: dict[str, tuple[type, Any]] = {
        name: (kind, value)
        for kind in (StoredVerbs, er.Table)
        for name, value in vars(kind).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property))
    }
    asked = set[str]()

    def noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **options: Any) -> Any:
            asked.add(name)
            return method(*args, **options)

        return note

    for name, (kind, value) in public.items():
        made = noted(name, getattr(value, "fget", value))
        monkeypatch.setattr(kind, name, property(made) if isinstance(value, property) else made)
    play(Case(slots=TOTAL), [Act(event, steps=2) for event in (*ASKED, *AFTER)], tmp_path / "table")
    assert asked == public.keys()


FOLDED = [
    Act("commit", "all new", steps=20),
    Act("commit behind", "uniform", steps=4),
    *(Act(event, "uniform", steps=4) for event in ("compact behind", "named behind") * 3),
]


def forget_too_early(patch: pytest.MonkeyPatch) -> None:
    """Let the lock of a store go between the installation of a base and the removal of what only it has replaced.

    And ask the last commit only whether it names a file: that is right as long as none is published in between.
    """
    forget, compact = RecordStore.forget, disk_pair.compact_in_background
    reached, published = threading.Event(), threading.Event()

    def at_the_gap(table: er.Table, goal: CompactionGoal | None) -> None:
        compact(table)
        assert reached.wait(60)  # so that the commits that follow meet it there, however quick they are

    def late(self: RecordStore, runs: Any) -> None:
        if threading.current_thread().name == "embedrock-compact" and not published.is_set():
            lock = cast(YieldingLock, self.lock)
            folded, until = {run.path for run in runs}, time.monotonic() + 60
            reached.set()
            with lock.free():
                while folded & committed_files(self) and time.monotonic() < until:
                    time.sleep(0.001)
            published.set()  # once is enough
        forget(self, runs)

    patch.setattr(RecordStore, "forget", late)
    patch.setattr(disk_pair, "compact_in_background", at_the_gap)
    ask_the_last_commit_only(patch)


def committed_files(store: RecordStore) -> set[str]:
    return {run.file for run in (*store.content.base, *store.content.delta)}


def ask_the_last_commit_only(patch: pytest.MonkeyPatch) -> None:
    unlink = folders.Folder.unlink

    def hasty(self: folders.Folder[Any], *args: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(folders, "named_files", lambda *where: set(folders.newest(*where[:2]).files))
            unlink(self, *args)

    patch.setattr(folders.Folder, "unlink", hasty)


@pytest.mark.slow  # what a compaction in the background has done by then depends on time: once in some runs it fails
def test_files_that_are_forgotten_too_early_are_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ask_the_last_commit_only(monkeypatch)
    case = Case(slots=36, small=False)  # so that no step waits for the compaction
    play(case, FOLDED, tmp_path / "whole")  # without the gap between the two, nothing is wrong
    forget_too_early(monkeypatch)
    with pytest.raises(MissingFileError, match="is missing"):
        play(case, FOLDED, tmp_path / "table")
