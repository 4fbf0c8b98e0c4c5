"""The exactness gate: a table on disk has the bytes of one in RAM, whatever happened on the way."""

from __future__ import annotations

import errno
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from disk_pair import (
    AFTER,
    BATCH,
    EVENTS,
    EVERY,
    ROWS,
    STILL,
    TOTAL,
    TRACES,
    Act,
    Case,
    Company,
    Pair,
    perform,
    rows_stay,
    still,
    surroundings,
)
from embedrock.io.vfs import OS_SYSTEM, System
from embedrock.storage.cache import POLICIES
from on_system import on
from same_tables import RULES, check_same
from slow import examples, slow
from suites import FaultFS

DTYPES = ("float32", "bfloat16", "float16")


def play(pair: Pair, acts: list[Act]) -> None:
    """Do everything to both tables, compare them, and close the one on disk."""
    perform(pair, acts)
    pair.close()


def play_case(case: Case, acts: list[Act], folder: Any, system: System = OS_SYSTEM) -> None:
    with surroundings(case):
        play(Pair(case, folder, system), acts)


# ---------------------------------------------------------------- drawn programs

cases = st.builds(
    Case,
    rule=st.sampled_from(RULES),
    dtype=st.sampled_from(DTYPES),
    rows=st.sampled_from([TOTAL, None]),
    policy=st.sampled_from(sorted(POLICIES)),
    slots=st.sampled_from([BATCH, BATCH + 1, 3 * BATCH, TOTAL, EVERY]) | st.integers(BATCH, TOTAL),
    threads=st.integers(1, 8),
    seed=st.integers(0, 2**32),
    small=st.booleans(),
)
acts = st.builds(
    Act,
    event=st.sampled_from([*EVENTS, *AFTER]),
    trace=st.sampled_from(sorted(TRACES)),
    steps=st.integers(1, 20),
    depth=st.sampled_from([0, 1, 2, 5, 100]),
)


def check_program(case: Case, program: list[Act]) -> None:
    play_case(case, program, "/table", FaultFS())


CRASH_AFTER_COMPACTION = [Act("commit", steps=9), Act("compact", "all new", steps=9), Act("crash")]


@settings(max_examples=examples(60))
@given(case=cases, program=st.lists(acts, max_size=8))
@example(case=Case(), program=CRASH_AFTER_COMPACTION)  # rows that were spilled, and not committed, are not compacted
@example(case=Case(rows=None, slots=EVERY), program=CRASH_AFTER_COMPACTION)
def test_a_table_on_disk_has_the_bytes_of_one_in_ram(case: Case, program: list[Act]):
    check_program(case, program)


@pytest.mark.slow
@settings(max_examples=1500)
@given(case=cases, program=st.lists(acts, max_size=25))
def test_a_table_on_disk_has_the_bytes_of_one_in_ram_for_long(case: Case, program: list[Act]):
    check_program(case, program)


# ---------------------------------------------------------------- a matrix, on a real disk

STORY = [
    Act("commit", "all new", steps=20),
    Act("commit behind", "skewed", steps=12, depth=2),
    Act("rollback", "uniform", steps=8, depth=1),
    Act("compact behind", "bursts", steps=12, depth=5),
    Act("crash"),
    Act("compact", "uniform", steps=8, depth=100),
    Act("named commit", "bursts", steps=8),
    Act("rollback far", "skewed", steps=6, depth=2),
]


def matrix() -> Iterator[Case]:
    """Go through all rules and dtypes, and through all else beside them."""
    others = itertools.cycle(
        itertools.product([TOTAL, None], sorted(POLICIES), [BATCH, 2 * BATCH, 4 * BATCH + 1, ROWS // 4, EVERY])
    )
    for number, (rule, dtype) in enumerate(itertools.product(RULES, DTYPES)):
        rows, policy, slots = next(itertools.islice(others, 6, None))  # 7 and their number, 30, have no common factor
        yield Case(rule, dtype, rows, policy, slots, 1 + number % 8, seed=number, small=number % 4 > 0)


def name_of(case: Case) -> str:
    return f"{case.rule!r}-{case.dtype}-{case.rows}-{case.policy}-{case.slots}-{case.threads}"


CASES = list(matrix())


# Every other one has all rules, dtypes, policies, sizes and numbers of threads.
@pytest.mark.parametrize("case", [*CASES[::4], *slow(*CASES[1::4], *CASES[2::4], *CASES[3::4])], ids=name_of)
def test_every_rule_dtype_policy_and_size(case: Case, tmp_path: Path):
    play_case(case, STORY, tmp_path / "table")


# ---------------------------------------------------------------- slow disks


class Jittery(System):
    """A disk that takes its time, and never the same."""

    def __init__(self, seed: int, longest_seconds: float) -> None:
        super().__init__()
        self._rng, self._longest, self._lock = np.random.default_rng(seed), longest_seconds, threading.Lock()

    def __getattribute__(self, name: str) -> Any:
        if name in ("read_many", "pread", "pwrite", "fdatasync", "fsync_folder", "link"):
            with self._lock:
                seconds = self._rng.exponential(self._longest / 4)
            time.sleep(min(seconds, self._longest))
        return super().__getattribute__(name)


SLOW_STORY = [
    Act("commit behind", "all new", steps=20, depth=1),
    Act("commit behind", "uniform", steps=10, depth=5),
    Act("rollback", "skewed", steps=8, depth=2),
    Act("compact behind", "uniform", steps=8, depth=100),
    Act("commit behind", "bursts", steps=8, depth=2),
    Act("crash", "uniform", steps=4, depth=2),
]


@pytest.mark.parametrize(("policy", "slots"), [("lfu", 2 * BATCH), ("lru", 4 * BATCH), ("clock", ROWS // 4)])
def test_a_slow_disk_changes_nothing(policy: str, slots: int, tmp_path: Path):
    case = Case(policy=policy, slots=slots, threads=2, seed=slots)
    play_case(case, SLOW_STORY, tmp_path / "table", Jittery(slots, longest_seconds=0.002))


@pytest.mark.slow
@pytest.mark.parametrize("case", list(matrix()), ids=name_of)
def test_a_very_slow_disk_changes_nothing(case: Case, tmp_path: Path):
    system = Jittery(case.seed, longest_seconds=0.01)
    play_case(replace(case, slots=max(case.slots, 3 * BATCH)), SLOW_STORY + STORY, tmp_path / "table", system)


# ---------------------------------------------------------------- company


def keep_company(pair: Pair, program: list[Act]) -> None:
    """Play with others at the same table all the time."""
    for first in range(0, STILL, BATCH // 2):
        pair.step(still(pair)[first : first + BATCH // 2])
    pair.commit()
    company = Company(pair, pair.ram.lookup(still(pair)))
    company.start()
    try:
        perform(pair, program)
    finally:
        company.leave()
    pair.close()


COMPANY_STORY = [
    Act("commit behind", "all new", steps=20),
    Act("commit behind", "uniform", steps=20, depth=2),
    Act("rollback", "uniform", steps=10, depth=2),
    Act("compact", "skewed", steps=10, depth=1),
    Act("commit behind", "bursts", steps=20, depth=2),
    Act("assign", "uniform", steps=10),
    Act("compact behind", "uniform", steps=10, depth=2),
]


@pytest.mark.parametrize("policy", ["lfu", *slow(*sorted({*POLICIES} - {"lfu"}))])
def test_other_threads_change_nothing(policy: str, tmp_path: Path):
    case = Case(policy=policy, slots=6 * BATCH, threads=2, seed=3)
    with surroundings(case):
        keep_company(Pair(case, tmp_path / "table", Jittery(3, longest_seconds=0.001)), COMPANY_STORY)


@pytest.mark.slow
@settings(max_examples=300)
@given(
    case=cases.filter(rows_stay),
    program=st.lists(acts.filter(lambda act: act.event not in {*AFTER, "rollback far"}), min_size=2, max_size=12),
)
def test_other_threads_change_nothing_for_long(case: Case, program: list[Act]):
    with surroundings(case):
        keep_company(Pair(case, "/table", FaultFS()), [replace(act, depth=min(act.depth, 2)) for act in program])


# ---------------------------------------------------------------- moments


class Gate:
    """Stops a thread at a call of its file system until it is let through."""

    def __init__(self, call: str, thread: str) -> None:
        self._call, self._thread = call, thread
        self._reached, self._open = threading.Event(), threading.Event()

    def __call__(self, call: str, path: str) -> None:
        if call == self._call and threading.current_thread().name.startswith(self._thread) and not self._open.is_set():
            self._reached.set()
            assert self._open.wait(60)

    def wait(self) -> None:
        """Return once the thread is there."""
        assert self._reached.wait(60)

    def open(self) -> None:
        self._open.set()


def stepped(slots: int, system: FaultFS) -> Pair:
    """Return a pair whose rows have all been stepped and committed."""
    pair = Pair(Case(slots=slots), "/table", system)
    for first in range(0, ROWS, BATCH):
        pair.step(np.arange(first, first + BATCH))
    pair.commit()
    return pair


@pytest.mark.parametrize("change", [Pair.rollback, Pair.set_rule], ids=["rollback", "set_rule"])
def test_rows_that_are_on_their_way_up_bring_nothing_back(change: Callable[[Pair], None]):
    system = FaultFS()
    pair = stepped(3 * BATCH, system)
    pair.step(np.arange(BATCH))
    pair.step(np.arange(BATCH, 2 * BATCH))  # the cache is full of rows that no commit has
    gate = system.before = Gate("pread", "brings")
    brings = threading.Thread(target=lambda: pair.table.bring(np.arange(200, 200 + 3 * BATCH)), name="brings")
    brings.start()
    gate.wait()
    changes = threading.Thread(target=change, args=(pair,), name="changes")
    changes.start()
    changes.join(0.1)  # it waits; and where it does not, it is through
    gate.open()
    brings.join()
    changes.join()
    pair.close()


def test_a_commit_that_is_written_again_has_what_it_froze():
    system = FaultFS()
    pair = stepped(BATCH, system)
    pair.step(np.arange(BATCH))
    gate = Gate("fdatasync", "embedrock-commit")

    def fail_once(call: str, path: str) -> None:
        gate(call, path)
        if call == "fdatasync" and path.endswith(".dlt"):
            system.before = None
            raise OSError(errno.EIO, "the disk failed", path)

    system.before = fail_once
    pair.commit(wait=False)
    gate.wait()
    number, frozen = max(pair.saved), pair.saved[max(pair.saved)]
    pair.step(np.arange(BATCH))  # newer values of the same rows ...
    pair.step(np.arange(100, 100 + BATCH))  # ... that are spilled while the commit fails
    gate.open()
    pair.commit()
    with on(system).open("/table", mode="r", at=number, **pair.options) as reader:
        check_same(reader, frozen)
    pair.close()
