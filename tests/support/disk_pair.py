"""`Pair`: a table on disk and one in RAM that is treated alike, which must stay the same, byte by byte."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.io.vfs import OS_SYSTEM, System
from embedrock.table.table import rows_of
from on_system import on
from same_tables import LAGGING, LAZY, RULES, check_same
from small_pieces import cut_small, files_replaced, some_goal
from table_files import compact_in_background, files_of, store_of

BATCH, DIM, ROWS = 12, 3, 500  # an odd dim, so that 16-bit records have a gap
STILL = 40  # rows above those that are trained, for those who want rows that stay as they are
TOTAL = ROWS + STILL
EVERY = 101 * BATCH  # slots: more than there are rows, and a window of 100 batches may be without repeats
KEEP = 3
MEMBER, BESIDE = "member", "beside"  # of a group


def folder_of(table: er.Table) -> er.Table | er.Group:
    """Return what is opened, closed and committed as one: a table alone, or the group that it is a member of."""
    return table.group or table


def table_in(folder: er.Table | er.Group) -> er.Table:
    """Return the table that is looked at."""
    return folder if isinstance(folder, er.Table) else folder[MEMBER]


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
    admission: er.Admission | None = None
    eviction: er.Eviction | None = None
    frozen: Any = None
    memory: str | None = None  # else what `slots` need
    in_group: bool = False  # a member of a group, beside another one


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
    """A table on disk, and one in RAM that is treated alike.

    Attributes:
        events: what can be done to them between two steps.
        saved: what each commit has, by its number.
        first: the first commit that one may go back to.
        most: rows that they may grow to, with room for the cache of the case still.
    """

    events: Mapping[str, Callable[[Any], None]]
    most = TOTAL

    def __init__(self, case: Case, folder: Any, system: System = OS_SYSTEM) -> None:
        self.case, self.folder, self.system = case, folder, system
        self.rng = np.random.default_rng(case.seed)
        arguments: dict[str, Any] = {
            "rule": case.rule,
            "dtype": case.dtype,
            "seed": case.seed,
            "init": er.Uniform(-1, 1),
            "admission": case.admission,
            "eviction": case.eviction,
            "frozen": case.frozen,
        }
        self.ram = er.Table(case.rows, DIM, **arguments)
        self.options: dict[str, Any] = {"policy": case.policy, "keep": KEEP}
        largest = None if case.rows is None else self.most
        slots = case.slots + BATCH * case.in_group  # which the other member may take
        self.options["memory"] = case.memory or er.Table(largest, DIM, **arguments).memory_for(slots)
        if not case.in_group:
            self.table = on(system).Table(case.rows, DIM, path=folder, **arguments, **self.options)
            self.saved, self.first = {0: copy.deepcopy(self.ram)}, 0
            return
        group = on(system).Group(path=folder, **self.options)
        group.table(BESIDE, BATCH, DIM, **{**arguments, "admission": None, "eviction": None})
        self.table = group.table(MEMBER, case.rows, DIM, **arguments)
        # The first commit of a group has no members: so many, and it is not kept any more.
        self.saved, self.first = {group.commit(): copy.deepcopy(self.ram) for _ in range(KEEP)}, KEEP

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
        if self.case.in_group:
            others = np.arange(BATCH // 3)
            self.table.group[BESIDE].update(others, self.grads(others), lr=lr)

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
            table.set_rule(rule, reset_state=True)

    def read_all(self) -> None:
        """Read more rows at once than the cache holds."""
        ids = self.ids(self.rng.permutation(ROWS))
        np.testing.assert_array_equal(self.table.lookup(ids), self.ram.lookup(ids))

    # ---- what changes nothing, or goes back

    def commit(self, wait: bool = True, name: str | None = None) -> None:
        with files_replaced() if self.ram.steps % 3 == 0 else nullcontext():
            number = self.table.commit(step=self.ram.steps, wait=wait, name=name)
        self.saved[number] = copy.deepcopy(self.ram)

    def settle(self) -> None:
        """Wait for a commit in the background."""
        rows = rows_of(self.table)
        with rows.table_lock.alone():
            files_of(self.table).end_commit()

    def compact(self) -> None:
        before = self.saved[max(self.saved)]
        self.saved[self.table.compact()] = before

    def compact_behind(self) -> None:
        compact_in_background(self.table, some_goal(store_of(self.table), self.rng.random()))

    def rollback(self, newest: bool = True) -> None:
        """Go back, to the last commit or to any."""
        self.settle()  # or it may drop the commit that is chosen
        numbers = [commit["commit"] for commit in self.table.commits() if commit["commit"] >= self.first]
        number = max(self.saved) if newest else int(self.rng.choice(numbers))
        made = self.table.rollback(number)
        self.ram = copy.deepcopy(self.saved[number])
        self.saved[made] = self.saved[number]
        self.check()

    def reopen(self, committed: bool) -> None:
        """Close the table, with or without a commit, and open it again."""
        if committed:
            self.commit()
        folder = folder_of(self.table)
        if folder.uncommitted:
            with pytest.warns(er.UncommittedWarning):
                folder.close()
        else:
            folder.close()
        self.ram = copy.deepcopy(self.saved[max(self.saved)])
        self.table = table_in(on(self.system).open(self.folder, **self.options))
        self.check()

    def window(self, event: str) -> int:
        """Return how many batches may be brought up ahead, where something happens in the midst of them."""
        return self.case.slots // BATCH - 1 - (event == "assign")  # which needs room beside the window

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
        folder_of(self.table).close()


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
Pair.events = EVENTS
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


def perform(pair: Pair, acts: list[Act]) -> None:
    """Do everything to both tables, and compare them."""
    for act in acts:
        depth, middle = max(0, min(act.depth, pair.window(act.event))), act.steps // 2
        for number, ids in enumerate(pair.table.prefetch(pair.batches(act.trace, act.steps), depth)):
            pair.step(ids)
            if number == middle and act.event in pair.events:
                pair.events[act.event](pair)
        if act.event in AFTER:
            AFTER[act.event](pair)
    pair.check()


@contextmanager
def surroundings(case: Case) -> Iterator[None]:
    """Set threads and pieces as a case wants them."""
    before = er.get_threads()
    with cut_small() if case.small else nullcontext():
        er.set_threads(case.threads)
        try:
            yield
        finally:
            er.set_threads(before)


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
            while not self.calls or not self._done.is_set():
                self._call(self._rng.integers(0, STILL, BATCH // 2))
                self.calls += 1
        except BaseException as error:
            self.error = error

    def _call(self, which: np.ndarray) -> None:
        pin = self._table.bring(self._rng.choice(self._all, BATCH // 2))
        np.testing.assert_array_equal(self._table.lookup(self._still[which]), self._expected[which])
        self._table.lookup(self._rng.choice(self._all, BATCH))
        assert self._table.stats()["rows_touched"] >= STILL
        pin.release()

    def leave(self) -> None:
        self._done.set()
        self.join()
        if self.error is not None:
            raise self.error
        assert self.calls


def rows_stay(case: Case) -> bool:
    """Return whether rows that no batch has stay as they are, and two threads have room."""
    comes_and_goes = case.admission is not None or case.eviction is not None
    return case.rule not in LAGGING and case.slots >= 6 * BATCH and not comes_and_goes


def still(pair: Pair) -> np.ndarray:
    return pair.ids(np.arange(ROWS, TOTAL))
