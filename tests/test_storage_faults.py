"""A table on a disk that fails and loses power: no commit is lost, and nothing is half done.

The workload creates a table whose cache is so small that it spills, trains, commits (waiting and not), compacts,
rolls back and collects. An oracle beside it, a table in RAM, says what each commit may hold. Then every call of the
system fails once, in every way, and after every call that changes something the power is lost, in every way.
"""

from __future__ import annotations

import copy
import errno
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import pytest

import embedrock as er
from embedrock.errors import EmbedrockError
from embedrock.store.verify import verify
from embedrock.testing import FaultFS
from embedrock.testing.faultfs import applies
from embedrock.tiers.disk import Disk, memory_for

PATH = "/data/table"
ROWS, DIM, SLOTS, BATCH, KEEP = 300, 3, 24, 8, 2
RULES = {"adam": er.Adam(lr=0.1), "dense adam": er.Adam(lr=0.1, dense=True)}
FAULTS = (errno.EIO, errno.ENOSPC, errno.EINTR, "short")
ATTEMPTS = 5  # one call fails, and a commit gives up after two: then the table is opened again


class Snapshot(NamedTuple):
    """All that a commit must bring back."""

    steps: int
    ids: bytes
    records: bytes


def snapshot(table: er.Table) -> Snapshot:
    """Return the state of a table, on disk or in RAM, to the bit."""
    ids = np.arange(ROWS)
    with table._turn.alone():  # a step may still be running
        tier = table._tier
        if isinstance(tier, Disk):
            ids = ids[tier.existing(ids)]
            records = tier.copies(ids).bytes
        else:
            ids = ids[tier.find(ids) >= 0]
            records = tier.records.bytes[tier.find(ids)]
        return Snapshot(table.steps, ids.tobytes(), records.tobytes())


class Oracle:
    """What the table must be now, and what each of its commits may be."""

    def __init__(self, rule: er.Rule) -> None:
        self.rule = rule
        self.now = er.Table(ROWS, DIM, rule=rule, seed=1)
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


class Workload:
    """A small life of a table, on a system that may fail."""

    def __init__(self, system: FaultFS, rule: er.Rule) -> None:
        self.system, self.oracle, self.rule = system, Oracle(rule), rule
        self.on_error: Callable[[], None] = lambda: None
        self.errors: list[BaseException] = []
        self._rng = np.random.default_rng(0)
        self._memory = memory_for(self.oracle.now.spec, SLOTS)

    def run(self) -> None:
        """Do everything; what fails is done again."""
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
        self.close()

    def create(self) -> None:
        """Make the table; a second attempt may find that the first one got far enough."""
        self.table = er.Table(
            ROWS, DIM, rule=self.rule, seed=1, path=PATH, memory=self._memory, keep=KEEP, system=self.system
        )
        self.oracle.acknowledge(self.table.last_commit)

    def train(self, steps: int) -> None:
        """Make steps on the table and on the oracle's."""
        for _ in range(steps):
            ids = self._rng.integers(0, ROWS, BATCH)
            grads = self._rng.standard_normal((BATCH, DIM)).astype(np.float32)

            def step(ids: np.ndarray = ids, grads: np.ndarray = grads) -> None:
                self.table.update(ids, grads)
                self.oracle.now.update(ids, grads)

            self.attempt(step)

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
            self.table._end_commit(self.table._disk()[1])
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
            self.table = er.open(PATH, memory=self._memory, keep=KEEP, system=self.system)
            with closed_on_error(self.table):
                found = snapshot(self.table)
            self.oracle.now = copy.deepcopy(self.oracle.check(self.table.last_commit, found))
            self.oracle.acknowledge(self.table.last_commit, found)

        self.attempt(open_again, usable=False)

    def close(self) -> None:
        """Close the table, whatever that tells."""
        with warnings.catch_warnings(), suppress(OSError, EmbedrockError):
            warnings.simplefilter("ignore", er.UncommittedWarning)
            self.table.close()

    def attempt(self, act: Callable[[], None], usable: bool = True) -> None:
        """Do it, again if it fails. A failure must leave the table as it was, or so that it must be opened again."""
        for attempt in range(ATTEMPTS):
            try:
                return act()
            except (OSError, EmbedrockError) as error:
                assert attempt + 1 < ATTEMPTS, "it fails although the system works again"
                self.errors.append(error)
                self.on_error()
                if usable and hasattr(self, "table"):
                    self.check_unchanged(attempt)
        return None

    def check_unchanged(self, attempt: int) -> None:
        try:
            found = snapshot(self.table)
        except (OSError, EmbedrockError) as error:  # it says that it is to be opened again
            self.errors.append(error)
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
    """Open what a crash left: the last acknowledged commit or a later one, whole, and all checksums fit."""
    try:
        # A writer also removes what the crash left.
        table = er.open(PATH, "w" if write else "r", system=system)
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


def crash_everywhere(rule: er.Rule, share: float, seed: int) -> int:
    """Run the workload, and lose power after each call that changes something. Returns in how many ways."""
    system, rng, seen, failures = made_system(), np.random.default_rng(seed), set(), []
    workload = Workload(system, rule)

    def after(_name: str, _path: str) -> None:
        # The background thread would keep an error to itself.
        try:
            if not failures:
                check_clones(system, workload.oracle, rng, seen, share)
        except BaseException as error:
            failures.append(error)

    system.after = after
    workload.run()
    if failures:
        raise failures[0]
    assert workload.errors == []
    check_clones(system, workload.oracle, rng, seen, 1)
    return len(seen)


def fail_at(op: int, fault: int | str, late: bool, rule: er.Rule, share: float) -> FaultFS:
    """Run the workload with one call failing, and lose power whenever the table says that something failed."""
    system, rng = made_system(), np.random.default_rng(op)
    system.fail(op, fault, late)
    workload = Workload(system, rule)
    workload.on_error = lambda: check_clones(system, workload.oracle, rng, set(), share)
    try:
        workload.run()
        system.mend()
        check_clones(system, workload.oracle, rng, set(), share)
        check_table(system, workload.oracle, write=True)
    except BaseException as error:
        error.add_note(f"call {op} failed: {system.journal[op]}, {fault}, late={late}; errors: {workload.errors}")
        raise
    return system


def journal(rule: er.Rule) -> list[str]:
    system = made_system()
    Workload(system, rule).run()
    return system.journal


class TestTheOracle:
    """A checker that finds nothing proves nothing."""

    @pytest.fixture
    def workload(self):
        workload = Workload(made_system(), RULES["adam"])
        workload.oracle.allow(0, workload.oracle.now)
        workload.create()
        workload.train(3)
        workload.commit()
        return workload

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
        workload.oracle.allow(2, er.Table(ROWS, DIM, rule=workload.rule))
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
            crash_everywhere(RULES["adam"], 0.2, 0)

    def test_sees_a_sync_of_a_folder_that_was_left_out(self, monkeypatch):
        real = FaultFS.fsync_folder
        monkeypatch.setattr(FaultFS, "fsync_folder", lambda s, path: path.endswith("/delta") or real(s, path))
        with pytest.raises((AssertionError, EmbedrockError)):
            crash_everywhere(RULES["adam"], 0.2, 0)

    def test_the_workload_does_what_it_should(self):
        stats: dict[str, float] = {}

        class Observed(Workload):
            def rollback(self, commit: int) -> None:
                stats.update(self.table.stats())
                super().rollback(commit)

        system = made_system()
        Observed(system, RULES["adam"]).run()
        calls = {call.split()[0] for call in system.journal}
        assert stats["spilled"] > 0
        assert stats["bytes_compacted"] > 0
        assert {"create", "pwrite", "pread", "fdatasync", "fsync_folder", "mkdir", "link", "unlink", "lock"} <= calls
        assert any(call.startswith(f"unlink {PATH}/delta") for call in system.journal)
        assert any(call.startswith(f"unlink {PATH}/manifest/0") for call in system.journal)


def test_crashes_after_some_calls():
    assert crash_everywhere(RULES["adam"], 0.25, 1) > 50


@pytest.mark.parametrize("part", range(4))
def test_some_calls_fail(part):
    calls = journal(RULES["adam"])
    rng = np.random.default_rng(part)
    for op in rng.permutation(np.arange(2, len(calls)))[:12].tolist():
        fault = FAULTS[int(rng.integers(len(FAULTS)))]
        if applies(fault, calls[op]):
            fail_at(op, fault, bool(rng.random() < 0.2), RULES["adam"], 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rule", RULES)
def test_crashes_after_every_call(rule, seed):
    assert crash_everywhere(RULES[rule], 1, seed) > 200


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rule", RULES)
def test_every_call_fails(rule, fault, late):
    if late and fault in (errno.EINTR, "short"):
        pytest.skip("a call that was made is neither interrupted nor short")
    for op, call in enumerate(journal(RULES[rule])):
        if op >= 2 and applies(fault, call):
            fail_at(op, fault, late, RULES[rule], 0.3)
