"""A table on a disk that fails and loses power: no commit is lost, and nothing is half done.

The workload creates a table whose cache is so small that it spills, trains, commits (waiting and not), compacts,
rolls back and collects. An oracle beside it, a table in RAM, says what each commit may hold. Then every call of the
system fails once, in every way, and after every call that changes something the power is lost, in every way.
"""

from __future__ import annotations

import copy
import errno
import gc
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import pytest

import embedrock as er
from embedrock.errors import EmbedrockError
from embedrock.storage.ram_layout import memory_for
from embedrock.store.verify import verify
from embedrock.table.table import rows_of
from on_system import on
from slow import slow
from suites import FaultFS
from suites.faultfs import CHANGES, applies
from table_files import files_of

PATH = "/data/table"
ROWS, DIM, SLOTS, BATCH, KEEP = 300, 3, 24, 8, 2
MEMORY = "1MiB"  # of tables that are only looked at
FAULTS = (errno.EIO, errno.ENOSPC, errno.EINTR, "short")
ATTEMPTS = 8  # a few calls fail, and a commit gives up after two: then the table is opened again


class Case(NamedTuple):
    """A kind of table."""

    rule: er.Rule
    rows: int | None = ROWS
    admission: er.Admission | None = None
    eviction: er.Eviction | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of its table."""
        return {**self._asdict(), "dim": DIM, "seed": 1}


CASES = {
    "adam": Case(er.Adam(lr=0.1)),
    "dense adam": Case(er.Adam(lr=0.1, dense=True)),  # has a history
    "open ids": Case(er.Momentum(lr=0.1), None),
    "come and go": Case(er.SGD(lr=0.1), None, er.Admission(2), er.Eviction(max_rows=3 * BATCH, by="recency")),
}


class Snapshot(NamedTuple):
    """All that a commit must bring back."""

    steps: int
    ids: bytes
    records: bytes


def snapshot(table: er.Table) -> Snapshot:
    """Return the state of a table, on disk or in RAM, to the bit."""
    ids = np.arange(ROWS)
    rows = rows_of(table)
    with rows.table_lock.alone():  # a step may still be running
        records, slots = rows.tier.read_through(ids)
        there = slots >= 0
        return Snapshot(table.steps, ids[there].tobytes(), records.bytes[slots[there]].tobytes())


class Oracle:
    """What the table must be now, and what each of its commits may be."""

    def __init__(self, case: Case) -> None:
        self.now = er.Table(**case.arguments)
        self.acknowledged = -1
        self._allowed: dict[int, dict[Snapshot, er.Table]] = {}

    def allow(self, commit: int, table: er.Table) -> None:
        """Note that a commit of that number is being made, which may be found from now on."""
        allowed, content = self._allowed.setdefault(commit, {}), snapshot(table)
        allowed.pop(content, None)
        allowed[content] = copy.deepcopy(table)  # as the last one

    def acknowledge(self, commit: int, content: Snapshot | None = None) -> None:
        """Note that the table said that the commit is durable: the last one of that number that was tried."""
        if commit > self.acknowledged:
            self.acknowledged = commit
            allowed = self._allowed[commit]
            content = content or list(allowed)[-1]
            self._allowed[commit] = {content: allowed[content]}

    def check(self, commit: int, found: Snapshot) -> er.Table:
        """Fail unless a table that was opened may be what it is; return the same in RAM."""
        assert commit >= self.acknowledged, f"commit {self.acknowledged} is lost: {commit} was opened"
        assert commit in self._allowed, f"commit {commit} was never made"
        assert found in self._allowed[commit], f"commit {commit} has another content"
        return self._allowed[commit][found]

    def of(self, commit: int) -> er.Table:
        """Return the content of a commit that was acknowledged."""
        (table,) = self._allowed[commit].values()
        return table


class Failed(NamedTuple):
    """An error, without the traceback that would keep files open."""

    errno: int | None
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        return cls(getattr(error, "errno", None), str(error))


class Workload:
    """A small life of a table, on a system that may fail."""

    def __init__(self, system: FaultFS, case: Case) -> None:
        self.system, self.oracle, self.case = system, Oracle(case), case
        self.on_error: Callable[[], None] = lambda: None
        self.errors: list[Failed] = []
        self._rng = np.random.default_rng(0)
        self._memory = memory_for(self.oracle.now.spec, SLOTS)
        self._first_ids = np.empty(0, np.int64)  # ids that commit 1 has rows of, or counts

    def run(self) -> None:
        """Do everything; what fails is done again."""
        try:
            self.live()
        finally:
            self.close()

    def live(self) -> None:
        """Do all that a table does between its creation and its end."""
        oracle = self.oracle
        oracle.allow(0, oracle.now)
        self.attempt(self.create)
        self.train(5)
        self.commit(name="first")
        self.train(4)
        self.commit(wait=False)
        self.train(4)
        self.commit()
        self.compact()
        self.train(3)
        self.commit(wait=False)
        self.train(2)
        self.compact()
        self.rollback(1)
        self.train(3)
        self.commit()
        self.reopen()
        self.train(3)
        self.commit()
        self.commit()

    def create(self) -> None:
        """Make the table; a second attempt may find that the first one got far enough."""
        self.table = on(self.system).Table(
            **self.case.arguments,
            path=PATH,
            memory=self._memory,
            keep=KEEP,
        )
        self.oracle.acknowledge(self.table.last_commit)

    def train(self, steps: int) -> None:
        """Make steps on the table and on the oracle's."""
        for _ in range(steps):
            ids = self._rng.integers(0, ROWS, BATCH)
            if self.oracle.acknowledged < 1:
                self._first_ids = np.union1d(self._first_ids, ids)
            grads = self._rng.standard_normal((BATCH, DIM)).astype(np.float32)

            def step(ids: np.ndarray = ids, grads: np.ndarray = grads) -> None:
                self.table.update(ids, grads)
                self.oracle.now.update(ids, grads)

            self.attempt(step)
        if self.case.eviction is not None:
            self.forget(self._rng.integers(0, ROWS, BATCH))

    def forget(self, ids: np.ndarray) -> None:
        # A rollback withholds rows and counts of forgotten ids (`test_forgetting_is_final.py`), the oracle does not.
        ids = np.setdiff1d(ids, self._first_ids)

        def forget() -> None:
            self.table.forget(ids)
            self.oracle.now.forget(ids)

        self.attempt(forget)

    def commit(self, wait: bool = True, name: str | None = None) -> None:
        def commit() -> None:
            self.oracle.allow(self.table.last_commit + 1, self.oracle.now)
            number = self.table.commit(wait=wait, name=name)
            if wait:
                self.oracle.acknowledge(number)

        self.settle()
        self.attempt(commit)

    def settle(self) -> None:
        """Wait for a commit in the background: only then is it known which number the next one has."""

        def wait() -> None:
            files_of(self.table).end_commit()
            self.oracle.acknowledge(self.table.last_commit)

        self.attempt(wait)

    def compact(self) -> None:
        def compact() -> None:
            last = self.table.last_commit
            self.oracle.allow(last + 1, self.oracle.of(last))  # what is not committed yet is not in it
            self.oracle.acknowledge(self.table.compact())

        self.settle()
        self.attempt(compact)

    def rollback(self, commit: int) -> None:
        target = self.oracle.of(commit)

        def rollback() -> None:
            self.oracle.allow(self.table.last_commit + 1, target)
            self.oracle.acknowledge(self.table.rollback(commit))
            self.oracle.now = copy.deepcopy(target)

        self.settle()
        self.attempt(rollback)

    def reopen(self) -> None:
        """Close the table and open it again. Changes that no commit has are lost."""
        self.close()

        def open_again() -> None:
            self.table = on(self.system).open(PATH, memory=self._memory, keep=KEEP)
            with closed_on_error(self.table):
                found = snapshot(self.table)
            self.oracle.now = copy.deepcopy(self.oracle.check(self.table.last_commit, found))
            self.oracle.acknowledge(self.table.last_commit, found)

        self.attempt(open_again, usable=False)

    def close(self) -> None:
        """Close the table, whatever that tells."""
        with warnings.catch_warnings(), suppress(OSError, EmbedrockError):
            warnings.simplefilter("ignore", er.UncommittedWarning)
            if hasattr(self, "table"):
                self.table.close()

    def attempt(self, act: Callable[[], None], usable: bool = True) -> None:
        """Do it, again if it fails. A failure must leave the table as it was, or so that it must be opened again."""
        for attempt in range(ATTEMPTS):
            try:
                return act()
            except (OSError, EmbedrockError) as error:
                assert attempt + 1 < ATTEMPTS, "it fails although the system works again"
                self.errors.append(Failed.of(error))
                self.on_error()
                if usable and hasattr(self, "table"):
                    self.check_unchanged(attempt)
        return None

    def check_unchanged(self, attempt: int) -> None:
        try:
            found = snapshot(self.table)
        except (OSError, EmbedrockError) as error:  # it says that it is to be opened again
            self.errors.append(Failed.of(error))
            return self.reopen()
        assert found == snapshot(self.oracle.now), "a call that failed has changed the table"
        if attempt:  # commits may be refused until it is opened again
            self.reopen()


@contextmanager
def closed_on_error(table: er.Table) -> Iterator[None]:
    """Close a table where something goes wrong."""
    try:
        yield
    except BaseException:
        table.close()
        raise


def made_system() -> FaultFS:
    system = FaultFS()
    system.mkdir("/data")
    system.fsync_folder("/")
    return system


def check_table(system: FaultFS, oracle: Oracle, write: bool) -> None:
    """Open what a crash left: the last acknowledged commit or a later one, whole, and all checksums fit.

    Args:
        system: that crashed.
        oracle: knows what may be found.
        write: open it as a writer, who removes what the crash left, and go on.
    """
    try:
        table = on(system).open(PATH, "w" if write else "r", memory=MEMORY)
    except er.TableFileError:
        assert oracle.acknowledged < 0
        return
    with table:
        oracle.check(table.last_commit, snapshot(table))
        assert table.verify().problems == []
        if write:
            go_on(table, oracle)
    assert verify(system, PATH).problems == []


def go_on(table: er.Table, oracle: Oracle) -> None:
    """Train and commit after a crash."""
    expected = copy.deepcopy(oracle.check(table.last_commit, snapshot(table)))
    for t in (table, expected):
        t.update([1, 2, 3], np.ones((3, DIM), np.float32))
    table.commit()
    assert snapshot(table) == snapshot(expected)


def check_clones(system: FaultFS, oracle: Oracle, rng: np.random.Generator, seen: set[Any], share: float) -> None:
    """Lose power now, in every way that was not seen before."""
    for clone in system.crash_clones(rng):
        key = hash(frozenset(clone.files().items())), oracle.acknowledged
        if key in seen or rng.random() >= share:
            continue
        seen.add(key)
        try:
            check_table(clone, oracle, write=bool(rng.random() < 0.5))
        except BaseException as error:
            error.add_note(f"after call {system.ops - 1} ({system.journal[-1]}), {clone.kind}")
            raise


def crash_everywhere(case: Case, share: float, seed: int) -> int:
    """Run the workload, and lose power after each call that changes something. Returns in how many ways."""
    system, rng, seen = made_system(), np.random.default_rng(seed), set()
    workload = Workload(system, case)
    with after_every_change(system, lambda: check_clones(system, workload.oracle, rng, seen, share)):
        workload.run()
    assert workload.errors == []
    check_clones(system, workload.oracle, rng, seen, 1)
    del workload.table
    gc.collect()
    assert system.open_files() == []
    print(f"crash states after every call: {len(seen):,}, bad: 0")
    return len(seen)


def crash_twice(seed: int, case: Case) -> int:
    """Lose power at some moment, and again at every moment while a writer opens the table. Returns in how many ways."""
    system, rng, seen = made_system(), np.random.default_rng(seed), set()
    workload = Workload(system, case)
    changes, made = sum(call.split()[0] in CHANGES for call in journal(case)), itertools.count()
    moments = rng.choice(np.arange(10, changes), 8, replace=False)

    def crash_again(clone: FaultFS) -> None:
        with (
            after_every_change(clone, lambda: check_clones(clone, workload.oracle, rng, seen, 0.5)),
            suppress(er.TableFileError),
        ):
            on(clone).open(PATH, memory=MEMORY).close()

    def crash() -> None:
        if next(made) in moments:
            for clone in system.crash_clones(rng):
                crash_again(clone)

    with after_every_change(system, crash):
        workload.run()
    print(f"crash states while it recovers: {len(seen):,}, bad: 0")
    return len(seen)


@contextmanager
def after_every_change(system: FaultFS, check: Callable[[], None]) -> Iterator[None]:
    """Check after each call that changes something, also where a thread in the background makes it."""
    failures: list[BaseException] = []

    def after(_name: str, _path: str) -> None:
        try:
            if not failures:
                check()
        except BaseException as error:  # the table would make an error of its own of it
            failures.append(error)

    system.after = after
    yield
    system.after = None
    if failures:
        raise failures[0]


def fail_at(ops: Sequence[int], fault: int | str, late: bool, case: Case, share: float) -> None:
    """Run the workload with some calls failing, and lose power whenever the table says that something failed."""
    system, rng = made_system(), np.random.default_rng(ops)
    for op in ops:
        system.fail(op, fault, late)
    workload = Workload(system, case)
    workload.on_error = lambda: check_clones(system, workload.oracle, rng, set(), share)
    try:
        workload.run()
        check_end(workload, rng, share)
    except BaseException as error:
        failed = [system.journal[op] for op in ops if op < system.ops]
        error.add_note(f"calls {list(ops)} failed: {failed}, {fault}, late={late}; errors: {workload.errors}")
        raise


def check_end(workload: Workload, rng: np.random.Generator, share: float) -> None:
    """Check what a workload leaves that ended in spite of all."""
    system = workload.system
    system.mend()
    del workload.table
    gc.collect()
    assert f"{PATH}/LOCK" not in system.open_files()
    check_clones(system, workload.oracle, rng, set(), share)
    check_table(system, workload.oracle, write=True)


def fill_disk(op: int, more: int, case: Case, share: float) -> int:
    """Run the workload; at some call the disk is full but for some bytes, until the table has failed three times.

    Returns how often it failed.
    """
    system, rng = made_system(), np.random.default_rng(op)
    workload = Workload(system, case)

    def before(_name: str, _path: str) -> None:
        if system.ops == op:
            system.capacity = more + sum(map(len, system.files().values()))

    def on_error() -> None:
        code, text = workload.errors[-1]
        assert code == errno.ENOSPC
        if "commit" in text:
            needed = r"(\S+ \S+ \(\d+ bytes\) more are|more is) needed"
            assert re.search(rf"the disk is full: {needed}, and \S+ \S+ \(\d+ bytes\) are free", text)
        check_clones(system, workload.oracle, rng, set(), share)
        if len(workload.errors) == 3:
            system.mend()

    system.before, workload.on_error = before, on_error
    workload.run()
    system.before = None  # the workload may have ended before that call
    check_end(workload, rng, share)
    return len(workload.errors)


def journal(case: Case) -> list[str]:
    system = made_system()
    Workload(system, case).run()
    return system.journal


class TestTheOracle:
    """A checker that finds nothing proves nothing."""

    @pytest.fixture
    def workload(self):
        workload = Workload(made_system(), CASES["adam"])
        workload.oracle.allow(0, workload.oracle.now)
        workload.create()
        workload.train(3)
        workload.commit()
        yield workload
        workload.close()

    def test_sees_a_lost_commit(self, workload):
        workload.table.close()
        workload.oracle.allow(2, workload.oracle.now)
        workload.oracle.acknowledge(2)
        with pytest.raises(AssertionError, match="commit 2 is lost: 1 was opened"):
            check_table(workload.system, workload.oracle, write=False)

    def test_sees_other_content(self, workload):
        workload.train(1)
        workload.table.commit()
        workload.table.close()
        workload.oracle.allow(2, er.Table(ROWS, DIM, rule=workload.case.rule, seed=1))
        with pytest.raises(AssertionError, match="commit 2 has another content"):
            check_table(workload.system, workload.oracle, write=False)

    def test_sees_a_call_that_is_half_done(self, workload):
        def half() -> None:
            workload.table.update([1], np.ones((1, DIM), np.float32))
            raise OSError(errno.EIO, "as if")

        with pytest.raises(AssertionError, match="a call that failed has changed the table"):
            workload.attempt(half)

    def test_sees_a_sync_that_was_left_out(self, monkeypatch):
        monkeypatch.setattr(FaultFS, "fdatasync", lambda *_: None)
        with pytest.raises((AssertionError, EmbedrockError)):
            crash_everywhere(CASES["adam"], 0.2, 0)

    def test_sees_a_sync_of_a_folder_that_was_left_out(self, monkeypatch):
        real = FaultFS.fsync_folder
        monkeypatch.setattr(FaultFS, "fsync_folder", lambda s, path: path.endswith("/delta") or real(s, path))
        with pytest.raises((AssertionError, EmbedrockError)):
            crash_everywhere(CASES["adam"], 0.2, 0)

    def test_the_workload_does_what_it_should(self):
        stats: dict[str, float] = {}

        class Observed(Workload):
            def rollback(self, commit: int) -> None:
                stats.update(self.table.stats())
                super().rollback(commit)

        system = made_system()
        Observed(system, CASES["adam"]).run()
        calls = {call.split()[0] for call in system.journal}
        assert stats["spilled"] > 0
        assert stats["bytes_compacted"] > 0
        assert {"create", "pwrite", "pread", "fdatasync", "fsync_folder", "mkdir", "link", "unlink", "lock"} <= calls
        assert any(call.startswith(f"unlink {PATH}/delta") for call in system.journal)
        assert any(call.startswith(f"unlink {PATH}/manifest/0") for call in system.journal)


@pytest.mark.slow
def test_crashes_after_every_call():
    assert crash_everywhere(CASES["adam"], 1, 0) > 200


def test_crashes_while_it_recovers():
    assert crash_twice(0, CASES["adam"]) > 10


@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3)])
def test_some_calls_fail(seed):
    calls, rng, runs = journal(CASES["adam"]), np.random.default_rng(seed), 0
    for op in rng.permutation(np.arange(2, len(calls)))[:15].tolist():
        fault = FAULTS[int(rng.integers(len(FAULTS)))]
        if applies(fault, calls[op]):
            fail_at([op], fault, bool(rng.random() < 0.2), CASES["adam"], 0.1)
            runs += 1
    print(f"calls that failed, one in each run: {runs:,}, bad: 0")


def test_several_calls_fail():
    last, rng = len(journal(CASES["adam"])), np.random.default_rng(0)
    for _ in range(8):
        first = int(rng.integers(2, last))
        fail_at([first, first + int(rng.integers(1, 12))], errno.EIO, False, CASES["adam"], 0.1)


def test_a_commit_that_was_found_is_durable(monkeypatch):
    """A commit whose folder could not be synced was refused: it is there when the table is opened, and stays."""
    system, rng = made_system(), np.random.default_rng(0)
    sync, table = system.fsync_folder, on(system).Table(ROWS, DIM, path=PATH, memory=MEMORY)

    def fail(path: str) -> None:
        if "manifest" in path:
            raise OSError(errno.EIO, "the disk")
        sync(path)

    with monkeypatch.context() as patch:
        patch.setattr(system, "fsync_folder", fail)
        with pytest.raises(er.CommitError, match="commit 1 was made, but may not survive a loss of power"):
            table.commit(step=1)
    with pytest.warns(er.UncommittedWarning):
        table.close()
    with on(system).open(PATH, memory=MEMORY) as table:
        assert table.last_commit == 1
        for clone in system.crash_clones(rng):
            with on(clone).open(PATH, "r", memory=MEMORY) as found:
                assert found.last_commit == 1, clone.kind


def test_a_full_disk():
    last, rng = len(journal(CASES["adam"])), np.random.default_rng(0)
    failures = [
        fill_disk(int(rng.integers(40, last)), int(rng.integers(0, 3000)), CASES["adam"], 0.1) for _ in range(5)
    ]
    assert sum(failures) > 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("case", CASES)
def test_crashes_after_every_call_in_other_ways(case, seed):
    assert crash_everywhere(CASES[case], 1, seed) > 200
    assert crash_twice(seed, CASES[case]) > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "late"), [*((fault, False) for fault in FAULTS), (errno.EIO, True), (errno.ENOSPC, True)]
)
@pytest.mark.parametrize("case", CASES)
def test_every_call_fails(case, fault, late):
    ops = [op for op, call in enumerate(journal(CASES[case])) if op >= 2 and applies(fault, call)]
    for op in ops:
        fail_at([op], fault, late, CASES[case], 0.3)
    print(f"calls that failed, one in each run: {len(ops):,}, bad: 0")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_any_calls_fail(case):
    last, rng = len(journal(CASES[case])), np.random.default_rng(1)
    for _ in range(300):
        first = int(rng.integers(2, last))
        ops = first + np.append(0, rng.integers(1, 30, rng.integers(1, 4)).cumsum())
        fail_at(ops.tolist(), FAULTS[int(rng.integers(3))], False, CASES[case], 0.1)
        fill_disk(first, int(rng.integers(0, 6000)), CASES[case], 0.1)
    print("runs in which several calls failed: 300; with a full disk: 300; bad: 0")
