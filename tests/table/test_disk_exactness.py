"""The exactness gate: a table on disk has the bytes of one in RAM, whatever happened on the way."""

from __future__ import annotations

import copy
import errno
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import embedrock as er
from embedrock.machine.vfs import OS_SYSTEM, OSSystem, System
from embedrock.testing import FaultFS
from embedrock.tiers.cache import POLICIES
from same_tables import LAGGING, LAZY, RULES, check_same
from small_pieces import SIZES
from table_files import files_of

BATCH, DIM, ROWS = 12, 3, 500  # an odd dim, so that 16-bit records have a gap
STILL = 40  # rows above those that are trained, for those who want rows that stay as they are
TOTAL = ROWS + STILL
EVERY = 101 * BATCH  # slots: more than there are rows, and a window of 100 batches may be without repeats
KEEP = 3

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Case:
    """A table, and how it is kept on disk."""

    rule: er.Rule = RULES[5]
    dtype: str = "float32"
    rows: int | None = TOTAL
    policy: str = "lfu"
    slots: int = BATCH
    threads: int = 1
    seed: int = 0
    small: bool = True  # many small pieces where there would be a large one


# ---------------------------------------------------------------- traces


def skewed(rng: np.random.Generator, slots: int) -> Iterator[np.ndarray]:
    while True:
        yield np.minimum(rng.zipf(1.2, BATCH) - 1, ROWS - 1)


def uniform(rng: np.random.Generator, slots: int) -> Iterator[np.ndarray]:
    while True:
        yield rng.integers(0, ROWS, BATCH)


def bursts(rng: np.random.Generator, slots: int) -> Iterator[np.ndarray]:
    """Scan a little more than the cache holds, again and again, and between scans hammer on a few rows of them."""
    period = min(slots + BATCH // 2, ROWS)
    while True:
        for start in range(0, 2 * period, BATCH):
            yield np.arange(start, start + BATCH) % period
        hot = rng.integers(0, period, 3)
        for _ in range(3):
            yield rng.choice(hot, BATCH)


def all_new(rng: np.random.Generator, slots: int) -> Iterator[np.ndarray]:
    for start in itertools.count(int(rng.integers(0, ROWS)), BATCH):
        yield np.arange(start, start + BATCH) % ROWS


TRACES: dict[str, Callable[[np.random.Generator, int], Iterator[np.ndarray]]] = {
    "skewed": skewed,
    "uniform": uniform,
    "bursts": bursts,
    "all new": all_new,
}


# ---------------------------------------------------------------- the pair


class Pair:
    """A table on disk, and one in RAM that is treated alike."""

    def __init__(self, case: Case, folder: Any, system: System = OS_SYSTEM) -> None:
        self.case, self.folder, self.system = case, folder, system
        self.rng = np.random.default_rng(case.seed)
        arguments: dict[str, Any] = {
            "rule": case.rule,
            "dtype": case.dtype,
            "seed": case.seed,
            "init": er.Uniform(-1, 1),
        }
        self.ram = er.Table(case.rows, DIM, **arguments)
        self.options: dict[str, Any] = {"policy": case.policy, "keep": KEEP, "system": system}
        self.options["memory"] = self.ram.memory_for(case.slots)
        self.table = er.Table(case.rows, DIM, path=folder, **arguments, **self.options)
        self.saved = {0: copy.deepcopy(self.ram)}

    def ids(self, numbers: np.ndarray) -> np.ndarray:
        """Return row numbers as ids of this table: the open ones lie far apart, negative ones among them."""
        if self.case.rows is not None:
            return numbers
        with np.errstate(over="ignore"):
            return numbers.astype(np.int64) * np.int64(-7046029254386353131)

    def batches(self, trace: str, count: int) -> list[np.ndarray]:
        found = itertools.islice(TRACES[trace](self.rng, self.case.slots), count)
        return [self.ids(numbers) for numbers in found]

    def grads(self, ids: np.ndarray) -> np.ndarray:
        return self.rng.standard_normal((*ids.shape, DIM)).astype(np.float32)

    # ---- what is done to both

    def step(self, ids: np.ndarray) -> None:
        """Look rows up, as a model would, and step them."""
        np.testing.assert_array_equal(self.table.lookup(ids), self.ram.lookup(ids))
        grads, lr = self.grads(ids), float(self.rng.choice([0.1, 0.05]))
        for table in (self.table, self.ram):
            table.update(ids, grads, lr=lr)

    def assign(self) -> None:
        """Overwrite some rows."""
        if self.ram.rule in LAGGING:
            return
        ids = self.ids(self.rng.permutation(ROWS)[:BATCH])
        values = self.grads(ids)
        for table in (self.table, self.ram):
            table.assign(ids, values)

    def set_rule(self) -> None:
        """Lay records out anew."""
        if self.ram.first_scale != 1:  # which is refused
            return
        width = 0 if self.ram.rule is None else self.ram.rule.state_width(DIM)
        rules = [rule for rule in LAZY if rule.state_width(DIM) <= width]  # as many rows as before must fit
        rule = rules[int(self.rng.integers(len(rules)))]
        for table in (self.table, self.ram):
            table.set_rule(rule)

    def read_all(self) -> None:
        """Read more rows at once than the cache holds."""
        ids = self.ids(self.rng.permutation(ROWS))
        np.testing.assert_array_equal(self.table.lookup(ids), self.ram.lookup(ids))

    # ---- what changes nothing, or goes back

    def commit(self, wait: bool = True, name: str | None = None) -> None:
        self.saved[self.table.commit(step=self.ram.steps, wait=wait, name=name)] = copy.deepcopy(self.ram)

    def compact(self) -> None:
        before = self.saved[max(self.saved)]
        self.saved[self.table.compact()] = before

    def compact_behind(self) -> None:
        files_of(self.table).compact_in_background(self.case.rows)

    def rollback(self, newest: bool = True) -> None:
        """Go back, to the last commit or to any."""
        numbers = [commit["commit"] for commit in self.table.commits()]
        number = max(self.saved) if newest else int(self.rng.choice(numbers))
        made = self.table.rollback(number)
        self.ram = copy.deepcopy(self.saved[number])
        self.saved[made] = self.saved[number]
        self.check()

    def reopen(self, committed: bool) -> None:
        """Close the table, with or without a commit, and open it again."""
        if committed:
            self.commit()
        if self.table.uncommitted:
            with pytest.warns(er.UncommittedWarning):
                self.table.close()
        else:
            self.table.close()
        self.ram = copy.deepcopy(self.saved[max(self.saved)])
        self.table = er.open(self.folder, **self.options)
        self.check()

    # ---- how they are compared

    def check(self) -> None:
        """Fail unless both have the same rows, byte by byte."""
        check_same(self.table, self.ram)

    def close(self) -> None:
        """Check all that can be, on disk too."""
        self.check()
        self.reopen(committed=True)
        verdict = self.table.verify()
        assert verdict.problems == []
        assert verdict.newest_good == self.table.last_commit
        self.table.close()


EVENTS: dict[str, Callable[[Pair], None]] = {
    "nothing": lambda pair: None,
    "commit": Pair.commit,
    "named commit": lambda pair: pair.commit(name=f"commit {pair.ram.steps}"),
    "commit behind": lambda pair: pair.commit(wait=False),
    "compact": Pair.compact,
    "compact behind": Pair.compact_behind,
    "rollback": Pair.rollback,
    "rollback far": lambda pair: pair.rollback(newest=False),
    "assign": Pair.assign,
    "set rule": Pair.set_rule,
    "read all": Pair.read_all,
}
AFTER: dict[str, Callable[[Pair], None]] = {
    "reopen": lambda pair: pair.reopen(committed=True),
    "crash": lambda pair: pair.reopen(committed=False),
}


@dataclass(frozen=True)
class Act:
    """Some steps, something in the midst of them, or at their end."""

    event: str = "nothing"
    trace: str = "skewed"
    steps: int = 6
    depth: int = 0


def play(pair: Pair, acts: list[Act]) -> None:
    """Do everything to both tables, compare them, and close the one on disk."""
    perform(pair, acts)
    pair.close()


def play_case(case: Case, acts: list[Act], folder: Any, system: System = OS_SYSTEM) -> None:
    with surroundings(case):
        play(Pair(case, folder, system), acts)


def perform(pair: Pair, acts: list[Act]) -> None:
    """Do everything to both tables, and compare them."""
    for act in acts:
        others = act.event == "assign"  # it needs room beside the window
        depth = max(0, min(act.depth, pair.case.slots // BATCH - 1 - others))
        middle = act.steps // 2
        for number, ids in enumerate(pair.table.prefetch(pair.batches(act.trace, act.steps), depth)):
            pair.step(ids)
            if number == middle and act.event in EVENTS:
                EVENTS[act.event](pair)
        if act.event in AFTER:
            AFTER[act.event](pair)
    pair.check()


@contextmanager
def surroundings(case: Case) -> Iterator[None]:
    """Set threads and pieces as a case wants them."""
    before = er.get_threads()
    with pytest.MonkeyPatch.context() as patch:
        for module, sizes in SIZES.items() if case.small else ():
            for name, size in sizes.items():
                patch.setattr(module, name, size)
        er.set_threads(case.threads)
        try:
            yield
        finally:
            er.set_threads(before)


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


@settings(max_examples=60)
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


@pytest.mark.parametrize("case", list(matrix()), ids=name_of)
def test_every_rule_dtype_policy_and_size(case: Case, tmp_path: Path):
    play_case(case, STORY, tmp_path / "table")


# ---------------------------------------------------------------- slow disks


class Jittery(OSSystem):
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


class Company(threading.Thread):
    """A thread that looks rows up and brings them up while others are trained: rows that nobody changes."""

    def __init__(self, pair: Pair, expected: np.ndarray) -> None:
        super().__init__(name="company")
        self._table, self._rng = pair.table, np.random.default_rng(pair.case.seed)
        self._still, self._all = still(pair), pair.ids(np.arange(TOTAL))
        self._expected, self.error = expected, None
        self._done = threading.Event()
        self.calls = 0

    def run(self) -> None:
        try:
            while not self._done.is_set():
                self._call(self._rng.integers(0, STILL, BATCH // 2))
                self.calls += 1
        except BaseException as error:
            self.error = error

    def _call(self, which: np.ndarray) -> None:
        ticket = self._table.bring(self._rng.choice(self._all, BATCH // 2))
        np.testing.assert_array_equal(self._table.lookup(self._still[which]), self._expected[which])
        self._table.lookup(self._rng.choice(self._all, BATCH))
        ticket.release()

    def leave(self) -> None:
        self._done.set()
        self.join()
        if self.error is not None:
            raise self.error
        assert self.calls


def still(pair: Pair) -> np.ndarray:
    return pair.ids(np.arange(ROWS, TOTAL))


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


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_other_threads_change_nothing(policy: str, tmp_path: Path):
    case = Case(policy=policy, slots=6 * BATCH, threads=2, seed=3)
    with surroundings(case):
        keep_company(Pair(case, tmp_path / "table", Jittery(3, longest_seconds=0.001)), COMPANY_STORY)


def rows_stay(case: Case) -> bool:
    """Return whether rows that no batch has stay as they are, and two threads have room."""
    return case.rule not in LAGGING and case.slots >= 6 * BATCH


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
    with er.open("/table", mode="r", at=number, **pair.options) as reader:
        check_same(reader, frozen)
    pair.close()
