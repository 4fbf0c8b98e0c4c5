"""The trace gate: random traces of everything that a table can be asked, beside a table in RAM.

Wherever a thread lets the lock of a store go, others may get ahead, as is drawn from the seed (`Yields`).
"""

from __future__ import annotations

import copy
import pickle
import random
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import embedrock as er
from disk_pair import (
    AFTER,
    BATCH,
    BESIDE,
    DIM,
    KEEP,
    MEMBER,
    STILL,
    TOTAL,
    TRACES,
    Act,
    Case,
    Company,
    Pair,
    folder_of,
    perform,
    rows_stay,
    still,
    surroundings,
    table_in,
)
from embedrock.errors import IdError, NonFiniteGradientError, UnsupportedError
from embedrock.storage.cache import POLICIES
from embedrock.store import folder as folders
from embedrock.system import forks
from embedrock.table.stepping import StepRequest, step_all
from embedrock.table.table import rows_of
from same_tables import LAZY, RULES, check_changes, check_same
from table_files import store_of

NAMES = 4  # commits that have a name, at most
READERS = 2  # snapshots that are open, at most


ADMISSIONS = (
    None,
    er.Admission(2),
    er.Admission(3, within=20),
    er.Admission(2, sketch=256, default="zeros"),
    er.Admission(3, within=40, sketch="1KiB"),
    er.Admission(3, default="shared"),
)
EVICTIONS = (
    None,
    er.Eviction(max_rows=3 * BATCH),
    er.Eviction(max_rows=9 * BATCH, by="recency", keep=[3, 5]),
    er.Eviction(max_bytes=3000, by="age"),
    er.Eviction(idle=10),
    er.Eviction(max_rows=5 * BATCH, idle=25, half_life=7),
)

FROZEN = [1, range(4, 9), range(40, 2**40, 3)[:9]]


def drawn_case(seed: int) -> Case:
    """Return a table and how it is kept on disk, most often with a tiny cache."""
    rng = random.Random(seed)
    case = Case(
        rule=rng.choice(RULES),
        dtype=rng.choice(("float32", "bfloat16", "float16")),
        rows=rng.choice((TOTAL, None)),
        policy=rng.choice(sorted(POLICIES)),
        slots=rng.choice((BATCH, BATCH + 1, 3 * BATCH, 7 * BATCH, 12 * BATCH, TOTAL)),
        threads=rng.randint(1, 4),
        seed=seed,
        small=rng.random() < 0.8,
    )
    if seed % 3 == 1:  # slots for a batch of each, and for the rows that one of them brings beside the other
        case = replace(case, in_group=True, slots=max(case.slots, 3 * BATCH))
    if case.rule not in LAZY or (case.in_group and rng.random() < 0.5):  # others move rows that a batch does not touch
        return case
    case = replace(case, admission=rng.choice(ADMISSIONS), eviction=rng.choice(EVICTIONS))
    has_default_row = case.admission is not None and case.admission.default == "shared"
    return replace(case, frozen=None if has_default_row else rng.choice((None, FROZEN)))


# ---------------------------------------------------------------- timing


class Yields:
    """Lets other threads go on now and then: a compaction often, and until others have used the lock for a while."""

    USES = (1, 30, 200)
    LONGEST_SECONDS = 0.1

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def __call__(self, lock: YieldingLock) -> None:
        is_compaction = threading.current_thread().name == "embedrock-compact"
        if is_compaction and self._rng.random() < 0.3:
            lock.wait_for(self._rng.choice(self.USES), self.LONGEST_SECONDS)
        elif self._rng.random() < 0.02:
            time.sleep(self._rng.choice((0, 0.001)))


class YieldingLock:
    """The lock of a store: whoever lets it go lets others go on."""

    def __init__(self, yields: Callable[[YieldingLock], None]) -> None:
        self._lock, self._yields, self._depth, self._uses = threading.RLock(), yields, 0, 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        is_free = not self._depth
        self._uses += is_free
        self._lock.release()
        if is_free:
            self._yields(self)

    def wait_for(self, uses: int, seconds: float) -> None:
        """Wait until others have had it so often, or for so long."""
        uses, until = self._uses + uses, time.monotonic() + seconds
        while self._uses < uses and time.monotonic() < until:
            time.sleep(0.0005)

    @contextmanager
    def free(self) -> Iterator[None]:
        """Let others have it for a while."""
        depth, self._depth = self._depth, 0
        for _ in range(depth):
            self._lock.release()
        try:
            yield
        finally:
            for _ in range(depth):
                self._lock.acquire()
            self._depth = depth


@contextmanager
def yielding(seed: int) -> Iterator[None]:
    """Let stores that are opened meanwhile let other threads go on wherever they let their lock go."""
    yields = Yields(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "forks", SimpleNamespace(**vars(forks) | {"lock": lambda rank: YieldingLock(yields)}))
        yield


# ---------------------------------------------------------------- the pair


class TracedPair(Pair):
    """A pair that is asked everything that there is, and whose commits are all looked at after each."""

    most = 4 * TOTAL

    def __init__(self, case: Case, folder: Any) -> None:
        super().__init__(case, folder)
        self.names: dict[str, int] = {}
        self._looked_at = 0
        self._forgotten: list[np.ndarray] = []  # since the last commit or rollback
        self._whole = weakref.WeakKeyDictionary[er.Table, tuple[er.Table, np.ndarray]]()  # and what they lack since
        self._readers: list[tuple[er.Table | er.Group, er.Table]] = []
        self._ticket: Any = None
        self._company: list[Company] = []
        self._companions = min(2, case.slots // (6 * BATCH)) if rows_stay(case) and case.seed % 2 == 0 else 0

    # ---- reads and steps

    def by_plan(self) -> None:
        """Make a step from its parts."""
        (ids,) = self.batches(self._trace(), 1)
        grads, out = self.grads(ids), np.empty((*ids.shape, DIM), np.float32)
        sums = []
        for table in (self.table, self.ram):
            plan = table.plan(ids)
            np.testing.assert_array_equal(table.read(plan, out if table is self.table else None), self.ram.lookup(ids))
            np.testing.assert_array_equal(table.read_rows(plan), self.ram.lookup(plan.ids))
            table.read_parts(plan, parts := np.split(np.empty((len(plan.inverse), table.dim), np.float32), [1]))
            np.testing.assert_array_equal(np.concatenate(parts), self.ram.lookup(plan.ids[plan.inverse]))
            sums.append(table.sum(plan, grads))
            table.check_step(sums[-1])
        for table, summed in zip((self.table, self.ram), sums, strict=True):
            table.step(summed, scale=0.5, clip_value=0.4, lr=0.02)

    def by_apply(self) -> None:
        (ids,) = self.batches(self._trace(), 1)
        grads = self.grads(ids)
        for table in (self.table, self.ram):
            table.apply(table.plan(ids), grads, lr=0.03)

    def by_rule(self) -> None:
        (ids,) = self.batches(self._trace(), 1)
        grads = self.grads(ids)
        for table in (self.table, self.ram):
            assert table.rule is not None
            step_all([StepRequest((rows_of(table),), table.rule, table.sum(table.plan(ids), grads))])

    def export(self) -> None:
        found = [np.concatenate(parts) for parts in zip(*self.table.export_batches(70), strict=True)]
        expected = self.ram.export()
        if not found:
            assert not len(expected[0])
            return
        order = np.argsort(found[0])
        for got, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(got[order], wanted)

    def bring(self) -> None:
        """Hold rows for a while, and others after them."""
        if self._ticket is not None:
            self._ticket.release()
            self._ticket = None
        elif self._has_room():
            (ids,) = self.batches(self._trace(), 1)
            self._ticket = self.table.bring(ids)

    def grow(self, to_open: bool = False) -> None:
        """Get more rows, or open ids: those that there are by now may be open already, as it goes back too."""
        if self.table.rows is not None:
            if self.case.memory == "auto" and self._ticket is not None:
                self.bring()  # or there may be no room for larger slots just now
            rows = None if to_open else int(self.rng.integers(self.table.rows, self.most + 1))
            for table in (self.table, self.ram):
                table.grow(rows)

    def shrink(self) -> None:
        """Have fewer rows, but those that batches have."""
        if self.case.rows is not None:
            rows = int(self.rng.integers(TOTAL, (self.table.rows or self.most) + 1))
            assert len({table.shrink(rows) for table in (self.table, self.ram)}) == 1

    def forget(self) -> None:
        (ids,) = self.batches(self._trace(), 1)
        assert len({table.forget(ids) for table in (self.table, self.ram)}) == 1
        self._forgotten.append(ids)
        np.testing.assert_array_equal(self.table.lookup(ids), self.ram.lookup(ids))

    def load(self) -> None:
        """Take the state of a table in RAM, row by row, in the place of all that is there."""
        self.table.load_state(self.ram.state())

    def refused(self) -> None:
        """Ask what a table on disk refuses."""
        ids, below = self.ids(np.arange(BATCH)), self.table.stats()
        grads = self.grads(ids)
        grads[0, 0] = np.nan
        with pytest.raises(NonFiniteGradientError):
            self.table.update(ids, grads)
        if self.table.rows is not None:
            with pytest.raises(IdError):
                self.table.lookup([self.table.rows])
        for ask in (self.table.state, lambda: copy.deepcopy(self.table)):
            with pytest.raises(UnsupportedError):
                ask()
        if self.case.in_group:
            with suppress(UnsupportedError):  # where a reader has opened the member too, which has its name then
                assert pickle.loads(pickle.dumps(self.table)) is self.table
        else:
            with pytest.raises(UnsupportedError):
                pickle.dumps(self.table)
        assert self.table.stats()["rows_touched"] == below["rows_touched"]

    def facts(self) -> None:
        """Compare what the two say of themselves."""
        table, ram = self.table, self.ram
        assert repr(table.spec) == repr(ram.spec)
        for name in ("rows", "dim", "rule", "steps", "first_scale", "on_nonfinite", "executor"):
            assert getattr(table, name) == getattr(ram, name), name
        assert table.memory_for(7) == ram.memory_for(7)
        count, memory = table.room_for([[3, 4], [4]])
        assert count == 2
        assert memory >= table.memory_for(2)  # of a member: what its pool needs
        assert (table.is_on_disk, ram.is_on_disk, table.mode) == (True, False, "w")
        assert str(self.folder) == table.path == table.options["path"]
        assert table.is_open_here
        called = f"name={MEMBER!r}, " if self.case.in_group else ""
        assert repr(table).startswith(f"Table({called}rows={table.rows}, dim={table.dim}, dtype={table.spec.dtype!r}")
        if self.case.in_group:
            assert (table.name, table.subject, list(table.group)) == (MEMBER, f"table {MEMBER!r}", [BESIDE, MEMBER])
        else:
            assert (table.name, table.group) == (None, None)
            assert repr(table.path) in table.subject
        assert (table.device_memory, len(table.uuid)) == (None, 32)
        assert table.last_step is None or table.last_step <= max(saved.steps for saved in self.saved.values())
        some = self.ids(np.arange(TOTAL))
        np.testing.assert_array_equal(table.contains(some), np.isin(some, ram.export()[0]))
        assert len(table) == len(ram.export()[0])
        stats = table.stats()
        assert stats["rows_touched"] == ram.stats()["rows_touched"]
        stored = stats["rows_touched"] + BATCH * self.case.in_group
        store = store_of(table)  # which may have rows, in logs, of what a member was before
        assert stats["overlay_rows"] <= stored or store.some_are_gone or store.dropped

    # ---- commits

    def _withhold(self) -> None:
        """Take forgotten rows from all commits, as the next commit or rollback does."""
        if not self._forgotten:
            return
        ids = np.concatenate(self._forgotten)
        self._forgotten.clear()
        for number, table in self.saved.items():  # open snapshots still have the rows
            whole, gone = self._whole.get(table, (table, ids))
            gone = np.union1d(gone, ids)
            self.saved[number] = made = copy.deepcopy(whole)
            made.forget(gone)  # all at once, as their order decides about later evictions
            self._whole[made] = whole, gone

    def commit(self, wait: bool = True, name: str | None = None) -> None:
        self._withhold()
        super().commit(wait, name)

    def named(self, wait: bool = True) -> None:
        if len(self.names) < NAMES:
            name = f"after {len(self.saved)}"
            self.commit(wait=wait, name=name)
            self.names[name] = max(self.saved)

    def release(self) -> None:
        if self.names:
            self.settle()
            name = str(self.rng.choice(sorted(self.names)))
            del self.names[name]
            self.table.release(name)

    def rollback(self, newest: bool = True) -> None:
        self.settle()  # or retention might drop that commit meanwhile
        self._withhold()
        super().rollback(newest)

    def look_at_commits(self) -> None:
        """Check commits soon after each, but do not always wait for those in the background."""
        new = sum(number > self._looked_at for number in self.saved)
        if new > 1 or (new and self.rng.random() < 0.5):
            self.check_commits()
            self._looked_at = max(self.saved)

    def check_commits(self) -> None:
        """Open every commit that is kept, and verify them all."""
        self.settle()
        commits = {commit["commit"]: commit["name"] for commit in self.table.commits()}
        assert commits.keys() >= {*sorted(self.saved)[-KEEP:], *self.names.values()}
        assert {name: number for number, name in commits.items() if name is not None} == self.names
        assert self.table.last_commit == max(self.saved)
        for number in commits:
            with self._reader(number) as reader:
                check_same(table_in(reader), self.saved[number])
        verdict = self.table.verify()
        assert (verdict.problems, verdict.newest_good) == ([], max(commits))
        self.saved = {number: self.saved[number] for number in commits}

    def _reader(self, number: int) -> er.Table | er.Group:
        return er.open(self.folder, mode="r", at=number, memory=self.options["memory"])

    def snapshot(self) -> None:
        """Open a reader, or look at one that has been open for a while, and let it go on with the newest commit."""
        self.settle()
        if len(self._readers) < READERS:
            number = int(self.rng.choice([commit["commit"] for commit in self.table.commits()]))
            self._readers.append((self._reader(number), self.saved[number]))
        else:
            self._look_at(*self._readers.pop(0))

    def changes(self) -> None:
        """Compare what changed since a commit with the difference of the two, as far as lists reach."""
        self.settle()
        since, last = int(self.rng.choice(sorted(self.saved))), max(self.saved)
        check_changes(self.table, since, self.saved[since], self.saved[last])

    def _look_at(self, reader: er.Table | er.Group, expected: er.Table) -> None:
        with reader:
            check_same(table_in(reader), expected)
            at = reader.last_commit
            assert reader.refresh() == (at != self.table.last_commit)
            check_same(table_in(reader), self.saved[self.table.last_commit])

    # ---- others

    def join(self) -> None:
        """Let one more thread read the table."""
        if len(self._company) < self._companions:
            self._company.append(Company(self, self.ram.lookup(still(self))))
            self._company[-1].start()

    def leave(self) -> None:
        while self._company:
            self._company.pop().leave()

    def begin(self) -> None:
        """Step the rows that stay as they are afterwards."""
        assert isinstance(store_of(self.table).lock, YieldingLock)
        if self._companions:
            for first in range(0, STILL, BATCH // 2):
                self.step(still(self)[first : first + BATCH // 2])
            self.commit()
            self.first = max(self.saved)

    def end(self) -> None:
        self.leave()
        self.settle()
        while self._readers:
            self._look_at(*self._readers.pop())
        if self._ticket is not None:
            self.bring()
        self.check_commits()
        with folder_of(self.table):
            self.close()

    def give_up(self) -> None:
        """Close all, whatever that tells: something went wrong before."""
        with suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for folder in (*(reader for reader, _ in self._readers), folder_of(self.table)):
                folder.close()
            self.leave()

    def reopen(self, committed: bool) -> None:
        self.leave()
        if self._ticket is not None:
            self.bring()
        self.settle()
        super().reopen(committed)
        self._forgotten.clear()

    # ---- what is drawn

    def _trace(self) -> str:
        return str(self.rng.choice(sorted(TRACES)))

    def _has_room(self) -> bool:
        """Return whether a ticket may be held beside a window, a batch, and the company's."""
        return self.case.slots >= (3 + 4 * self._companions) * BATCH

    def window(self, event: str) -> int:
        return self.case.slots // BATCH - 2 - (self._ticket is not None) - 3 * self._companions


ASKED: dict[str, Callable[[TracedPair], None]] = {
    "by plan": TracedPair.by_plan,
    "by apply": TracedPair.by_apply,
    "by rule": TracedPair.by_rule,
    "assign": Pair.assign,
    "set rule": Pair.set_rule,
    "read all": Pair.read_all,
    "export": TracedPair.export,
    "bring": TracedPair.bring,
    "grow": TracedPair.grow,
    "shrink": TracedPair.shrink,
    "forget": TracedPair.forget,
    "load": TracedPair.load,
    "open": lambda pair: pair.grow(to_open=True),
    "refused": TracedPair.refused,
    "facts": TracedPair.facts,
    "commit": TracedPair.commit,
    "commit behind": lambda pair: pair.commit(wait=False),
    "named": TracedPair.named,
    "named behind": lambda pair: pair.named(wait=False),
    "release": TracedPair.release,
    "compact": Pair.compact,
    "compact behind": Pair.compact_behind,
    "rollback": TracedPair.rollback,
    "rollback far": lambda pair: pair.rollback(newest=False),
    "snapshot": TracedPair.snapshot,
    "changes": TracedPair.changes,
    "join": TracedPair.join,
    "leave": TracedPair.leave,
}
COMMITS = ("commit", "commit behind", "named", "named behind")
TracedPair.events = ASKED


def drawn_acts(seed: int, operations: int) -> list[Act]:
    """Draw a trace of so many steps and events."""
    rng, acts, left, event = random.Random(seed), list[Act](), operations, ""
    while left > 0:
        steps = rng.choice((1, 1, 2, 3, 5, 9))
        meets_compaction = event == "compact behind" and rng.random() < 0.7
        event = rng.choice(COMMITS if meets_compaction else [*ASKED, *AFTER])
        acts.append(Act(event, rng.choice(sorted(TRACES)), steps, rng.choice((0, 1, 2, 5))))
        left -= steps + 1
    return acts


def play(case: Case, acts: list[Act], folder: Any, kind: type[TracedPair] = TracedPair) -> None:
    """Do a trace to a pair, and look at all commits after each."""
    with surroundings(case), yielding(case.seed):
        pair, number = kind(case, folder), 0
        try:
            pair.begin()
            for number, act in enumerate(acts):  # noqa: B007
                perform(pair, [act])
                pair.look_at_commits()
            pair.end()
        except BaseException as error:
            error.add_note(f"{case}, in act {number}, {acts[number]}")
            pair.give_up()
            raise
