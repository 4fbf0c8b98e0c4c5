"""The threads of a commit: who has the table when, what they write, and what is left of them when they fail."""

from __future__ import annotations

import errno
import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.errors import CommitError
from embedrock.frontend.references import go_to, reference_to
from embedrock.io.vfs import OS_SYSTEM, System
from embedrock.storage import commit as commits
from embedrock.storage.cache import DIRTY, FROZEN, WRITING
from embedrock.storage.disk_backend import DiskBackend
from embedrock.storage.table_lock import TableLock
from embedrock.store import compaction
from embedrock.store import record_store as stores
from embedrock.store.log_index import LogIndex
from embedrock.store.record_store import RecordStore
from embedrock.store.table_folder import TableFolder
from embedrock.table import upkeep
from embedrock.table.storage import StorageManager
from embedrock.table.table import rows_of
from on_system import on
from same_tables import check_same
from slow import slow
from small_pieces import SIZES
from suites import FaultFS
from table_files import compact_in_background, files_of

DIM, ROWS, SLOTS = 3, 60, 400
PATIENCE = 60  # seconds until what should have happened has not


# ---------------------------------------------------------------- turns


def finished(*functions: Callable[[], object]) -> None:
    """Call functions, each in its own thread, and fail where one of them fails or does not end."""
    errors: list[BaseException] = []

    def call(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "threads wait for each other"


def until(predicate: Callable[[], object]) -> None:
    """Return once that holds."""
    end = time.monotonic() + PATIENCE
    while not predicate():
        assert time.monotonic() < end
        time.sleep(0.0005)


class Ahead:
    """A thread that wants its turn while another has it."""

    def __init__(self, table_lock: TableLock) -> None:
        self._table_lock, self.served = table_lock, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with self._table_lock.ahead():
            self.served.set()

    def wait(self) -> None:
        """Return once it stands in line; the caller has the lock."""
        self._thread.start()
        until(self._stands_in_line)
        assert not self.served.is_set()

    def _stands_in_line(self) -> bool:
        if not self._table_lock._next.acquire(blocking=False):
            return True
        self._table_lock._next.release()
        return False


@pytest.fixture
def table_lock() -> TableLock:
    return TableLock()


def test_who_is_ahead_is_served_before_a_loop_that_never_rests(table_lock: TableLock):
    def loop() -> None:
        for _ in range(100):
            with table_lock.alone():
                waiter = Ahead(table_lock)
                waiter.wait()
            with table_lock.alone():  # not even once more
                assert waiter.served.is_set()

    finished(loop)


def test_a_loop_lets_everybody_through(table_lock: TableLock):
    done, loops = threading.Event(), 0

    def ask() -> None:
        until(lambda: loops)
        for _ in range(200):
            with table_lock.ahead():
                pass
        done.set()

    def loop() -> None:
        nonlocal loops
        while not done.is_set():
            with table_lock.alone():
                loops += 1

    finished(ask, loop, loop)


@pytest.mark.parametrize("outer", [TableLock.alone, lambda table_lock: table_lock.lock], ids=["alone", "lock"])
def test_who_has_the_table_may_ask_for_it_again(table_lock: TableLock, outer: Callable[[TableLock], Any]):
    def again() -> None:
        with outer(table_lock):
            waiter = Ahead(table_lock)
            waiter.wait()
            for _ in range(3):
                with table_lock.alone(), table_lock.alone():
                    assert not waiter.served.is_set()
            table_lock.notify()
        assert waiter.served.wait(PATIENCE)

    finished(again)


def test_who_waits_for_something_lets_others_go_ahead(table_lock: TableLock):
    seen = []

    def other() -> None:
        until(lambda: seen)
        with table_lock.ahead():
            seen.append("other")
            table_lock.notify()

    def waiter() -> None:
        with table_lock.alone():
            seen.append("waiter")
            table_lock.wait_for(lambda: "other" in seen)
            with table_lock.alone():
                seen.append("waiter again")

    finished(other, waiter)
    assert seen == ["waiter", "other", "waiter again"]


def test_an_error_ends_a_turn(table_lock: TableLock):
    for begin in (table_lock.ahead, table_lock.alone):
        with pytest.raises(ValueError, match="wrong"), begin():
            raise ValueError("wrong")
    finished(lambda: Ahead(table_lock)._run())


# ---------------------------------------------------------------- a table on disk, and one in RAM


class Both:
    """A table on disk, and one in RAM that is treated alike."""

    def __init__(
        self, folder: Any = "/table", system: System | None = None, slots: int = SLOTS, policy: str = "lfu"
    ) -> None:
        self.folder, self.system = folder, system or FaultFS()
        arguments: dict[str, Any] = {"rule": er.Adam(lr=0.1), "seed": 1, "init": er.Uniform(-1, 1)}
        self.ram = er.Table(ROWS, DIM, **arguments)
        self.memory = self.ram.memory_for(slots)
        options: dict[str, Any] = {"memory": self.memory, "policy": policy, "keep": 50}
        self.table = on(self.system).Table(ROWS, DIM, path=folder, **arguments, **options)
        self.saved: dict[int, er.Table] = {}
        self._rng = np.random.default_rng(0)

    @property
    def tier(self) -> DiskBackend:
        tier = rows_of(self.table).tier
        assert isinstance(tier, DiskBackend)
        return tier

    @property
    def store(self) -> RecordStore:
        return self.tier.store

    def step(self, *ids: int) -> None:
        """Train those rows; all where none are given."""
        which = np.array(ids or range(ROWS))
        for part in np.array_split(self._rng.permutation(which), -(-len(which) // 12)):
            np.testing.assert_array_equal(self.table.lookup(part), self.ram.lookup(part))
            grads = self._rng.standard_normal((len(part), DIM)).astype(np.float32)
            self.table.update(part, grads)
            self.ram.update(part, grads)

    def commit(self, wait: bool = True) -> int:
        number = self.table.commit(wait=wait)
        self.saved[number] = self.copied()
        return number

    def commit_to_the_end(self, wait: bool) -> None:
        """Commit, and raise what went wrong."""
        self.table.commit(wait=wait)
        files_of(self.table).end_commit()

    def copied(self) -> er.Table:
        made = er.Table(ROWS, DIM, rule=er.Adam(lr=0.1), seed=1, init=er.Uniform(-1, 1))
        made.load_state(self.ram.state())
        return made

    def check(self) -> None:
        """Compare all, now and as of all commits that were made well."""
        check_same(self.table, self.ram)
        for number, expected in self.saved.items():
            with on(self.system).open(self.folder, mode="r", at=number, memory="1MiB") as reader:
                check_same(reader, expected)

    def close(self) -> None:
        self.check()
        self.table.close()
        with on(self.system).open(self.folder, mode="r", memory="1MiB") as reader:
            check_same(reader, self.saved[max(self.saved)])

    def flags(self) -> np.ndarray:
        return self.tier.cache.flags

    def check_ended(self, dirty: bool = False) -> None:
        """Fail unless nothing is left of a commit that has ended."""
        with rows_of(self.table).table_lock.alone():
            assert not self.store.commit_is_awaited
            assert not (self.flags() & (FROZEN | WRITING)).any()
        for thread in threading.enumerate():
            if thread.name.startswith("embedrock-commit"):
                thread.join(PATIENCE)
                assert not thread.is_alive(), thread.name
        if dirty:
            self._check_nothing_is_lost()

    def _check_nothing_is_lost(self) -> None:
        """Fail unless each row is dirty, or in a log that the next commit takes, as it is now."""
        assert self.table.uncommitted
        tier, ids = self.tier, np.arange(ROWS)
        slots = tier.cache.find(ids)
        clean = (self.flags()[slots] & DIRTY) == 0
        found = self.store.located(ids[clean])
        assert len(found.ids) == np.count_nonzero(clean)
        stored = np.empty((len(found.ids), tier.spec.record_bytes), np.uint8)
        self.store.read(found, stored, np.arange(len(stored)))
        np.testing.assert_array_equal(stored, tier.records.bytes[slots[clean]])
        assert {int(at) >> 40 for at in found.locations} <= {log.number for log in self.store.logs}


@pytest.fixture(autouse=True)
def small_pieces(small_heap: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module, sizes in SIZES.items():
        for name, size in sizes.items():
            monkeypatch.setattr(module, name, size)
    # A fold in the background would pause beside the compactions whose pauses are counted here.
    monkeypatch.setattr(upkeep, "FOLDED_AT_ONCE", 1 << 24)
    yield
    gc.collect()


def owner_of(name: str) -> type[RecordStore | TableFolder]:
    """Return what has a method that a commit calls."""
    return RecordStore if hasattr(RecordStore, name) else TableFolder


class Gate:
    """Stops a commit before one of its calls of a method of the store, until it is opened; it holds no lock there."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, calls: set[int]) -> None:
        kind = owner_of(name)
        self._through, self._calls, self._count = getattr(kind, name), calls, itertools.count(1)
        self._reached, self._open = threading.Semaphore(0), threading.Semaphore(0)
        patch.setattr(kind, name, lambda store, *args: self._call(store, *args))

    def _call(self, store: RecordStore | TableFolder, *args: Any) -> Any:
        if threading.current_thread().name.startswith("embedrock-commit") and next(self._count) in self._calls:
            self._reached.release()
            assert self._open.acquire(timeout=PATIENCE)
        return self._through(store, *args)

    def wait(self) -> None:
        """Return once the commit is there."""
        assert self._reached.acquire(timeout=PATIENCE)

    def open(self) -> None:
        self._open.release()


def frozen(both: Both) -> int:
    return int(np.count_nonzero(both.flags() & FROZEN))


# ---------------------------------------------------------------- commits have the values of their moment


@pytest.mark.parametrize("call", [1, 2, 5, 9])
def test_a_quiet_commit_has_the_values_of_its_moment(call: int, monkeypatch: pytest.MonkeyPatch):
    gate, both = Gate(monkeypatch, "place", {call}), Both()
    both.step()
    both.commit(wait=False)
    gate.wait()
    assert frozen(both) == max(0, ROWS - call * rows_in(both, commits.QUIET_BYTES)) > 0
    both.step(*range(0, ROWS, 2))  # frozen ones, written ones, and those that are on their way
    both.step(*range(0, ROWS, 3))
    assert 0 < frozen(both) < ROWS / 2
    gate.open()
    both.step()
    both.commit()
    both.check_ended()
    assert max(both.saved) == 2
    both.close()


def test_a_quiet_commit_of_many_rows_has_few_pieces(monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []
    append = RecordStore.append_sealed

    def noted(self: RecordStore, log: Any, sealed: np.ndarray, ids: np.ndarray) -> np.ndarray:
        sizes.append(len(ids))
        return append(self, log, sealed, ids)

    for name, value in {"QUIET_PIECES": 4, "PART_SLOTS": 1 << 20, "PIECE_BYTES": 1 << 20}.items():
        monkeypatch.setattr(commits, name, value)
    monkeypatch.setattr(RecordStore, "append_sealed", noted)
    both = Both()
    both.step()
    both.commit(wait=False)
    until(lambda: both.tier.commit is None or both.tier.commit.is_done)  # it was not hurried
    assert sum(sizes) == ROWS
    assert 4 <= len(sizes) <= 6 < ROWS / rows_in(both, commits.QUIET_BYTES)
    both.commit()
    both.check_ended()
    both.close()


@pytest.mark.parametrize("room", [0, 1 << 20])
def test_who_changes_rows_waits_for_no_disk_while_there_is_room(room: int, monkeypatch: pytest.MonkeyPatch):
    append, threads = RecordStore.append_sealed, set[str]()

    def noted(self: RecordStore, *args: Any) -> np.ndarray:
        threads.add(threading.current_thread().name)
        return append(self, *args)

    monkeypatch.setattr(RecordStore, "append_sealed", noted)
    gate, both = Gate(monkeypatch, "place", {1}), Both()
    both.step()
    both.store.buffer_bytes = room
    both.commit(wait=False)
    gate.wait()
    both.step()
    assert not frozen(both)
    assert ("MainThread" in threads) == (room == 0)
    gate.open()
    both.commit()
    both.check_ended()
    both.close()


@pytest.mark.parametrize("calls", [(1, 2), (3, 4), (2, 6)])
def test_a_commit_that_is_hurried_on_the_way_has_the_values_of_its_moment(
    calls: tuple[int, int], monkeypatch: pytest.MonkeyPatch
):
    gate, both = Gate(monkeypatch, "place", set(calls)), Both()
    both.step()
    both.commit(wait=False)
    gate.wait()
    both.step(*range(0, ROWS, 7))
    commit = both.tier.commit
    assert commit is not None
    commit.flush()
    assert both.store.commit_is_awaited
    gate.open()
    gate.wait()  # now by one of two threads
    both.step(*range(0, ROWS, 5))
    gate.open()
    both.step()
    commit.wait()
    both.check_ended()
    both.commit()
    both.close()


@pytest.mark.parametrize("call", [1, 3])
def test_rows_on_their_way_stay_until_they_can_be_found(call: int, monkeypatch: pytest.MonkeyPatch):
    gate, both = Gate(monkeypatch, "place", {call}), Both(slots=30, policy="lru")
    both.step(*range(24))
    both.commit(wait=False)
    gate.wait()
    writing = both.flags() & WRITING != 0
    assert np.count_nonzero(writing) == rows_in(both, commits.QUIET_BYTES)
    ids = both.tier.cache.ids_in(np.flatnonzero(writing))
    for first in (*range(24, ROWS, 6), *range(24, ROWS, 6)):  # more than there is room for
        both.step(*range(first, first + 6))
    assert (both.tier.cache.find(ids) >= 0).all()
    both.step(*ids.tolist())
    gate.open()
    both.commit()
    both.check_ended()
    both.close()


@pytest.mark.parametrize("wait", [True, False], ids=["awaited", "quiet"])
def test_after_a_commit_all_rows_are_clean_and_found(wait: bool):
    for _ in range(5):
        both = Both()
        both.step()
        both.commit_to_the_end(wait)
        both.check_ended()
        assert not both.table.uncommitted
        assert not (both.flags() & DIRTY).any()
        assert (both.store.locate(np.arange(ROWS)) >= 0).all()
        both.table.close()


@pytest.mark.parametrize("wait", [True, False], ids=["awaited", "quiet"])
def test_a_closed_table_that_somebody_has_still_takes_no_ram_for_its_rows(wait: bool, tmp_path: Path):
    table = er.Table(rows=ROWS, dim=2, path=str(tmp_path / "t.rock"), rule=er.SGD(lr=0.1))
    table.update(np.arange(9), np.ones((9, 2), np.float32))
    table.commit(wait=wait)
    tier = weakref.ref(rows_of(table).tier)
    table.close()
    gc.collect()
    assert tier() is None


def rows_in(both: Both, nbytes: int) -> int:
    return both.store.piece_rows(nbytes)


@pytest.mark.parametrize("slots", [14, 30, SLOTS])
@pytest.mark.parametrize("kind", ["memory", "os"])
def test_training_goes_on_while_commits_are_written(slots: int, kind: str, tmp_path: Path):
    both = Both(tmp_path / "table", OS_SYSTEM, slots) if kind == "os" else Both(slots=slots)
    rng = np.random.default_rng(slots)
    for _ in range(6):
        both.commit(wait=False)
        for _ in range(15):
            both.step(*rng.permutation(ROWS)[:12].tolist())
    both.commit()
    both.check_ended()
    both.close()


@pytest.mark.parametrize("changes", [True, False])
def test_a_commit_that_follows_at_once_comes_after(changes: bool):
    for wait in (True, False):
        both = Both()
        both.step()
        first = both.commit(wait=False)
        if changes:
            both.step(*range(20))
        second = both.commit(wait)
        assert second == first + 1
        both.step()
        both.table.commit()
        both.check_ended()
        check_same(both.table, both.ram)
        both.saved[second + 1] = both.copied()
        assert [line["commit"] for line in both.table.commits()] == [0, 1, 2, 3]
        both.close()


@pytest.mark.parametrize("how", ["close", "commit", "rollback"])
def test_who_waits_has_it_end_whole(how: str, monkeypatch: pytest.MonkeyPatch):
    gate, both = Gate(monkeypatch, "place", {2}), Both()
    both.step()
    both.commit(wait=False)
    gate.wait()
    store = both.store
    assert not store.commit_is_awaited

    def open_gate() -> None:
        until(lambda: store.commit_is_awaited)  # somebody waits
        gate.open()

    calls: dict[str, Callable[[], object]] = {
        "close": both.table.close,
        "commit": both.table.commit,
        "rollback": lambda: both.table.rollback(0),
    }
    finished(open_gate, calls[how])
    assert not store.commit_is_awaited
    with on(both.system).open("/table", mode="r", at=1, memory="1MiB") as reader:
        check_same(reader, both.saved[1])
    both.table.close()


# ---------------------------------------------------------------- errors


class Failing:
    """Has one call of a commit fail: a method of the store, made by its threads."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, call: int, error: BaseException) -> None:
        kind = owner_of(name)
        through, count = getattr(kind, name), itertools.count(1)
        self.failed = False

        def failing(store: RecordStore | TableFolder, *args: Any) -> Any:
            if threading.current_thread().name.startswith("embedrock-commit") and next(count) == call:
                self.failed = True
                raise error
            return through(store, *args)

        patch.setattr(kind, name, failing)


ERRORS: dict[str, tuple[BaseException, type[BaseException]]] = {
    "EIO": (OSError(errno.EIO, "the disk failed"), CommitError),
    "ENOSPC": (OSError(errno.ENOSPC, "the disk is full"), CommitError),
    "memory": (MemoryError("there is no more"), MemoryError),
}


def failing(awaited: int) -> list[Any]:
    """Return each kind of error in each call, every other commit of which is awaited."""
    pairs = itertools.product(sorted(ERRORS), ["append_sealed", "place", "seal"])
    return [(kind, name, number % 2 == awaited) for number, (kind, name) in enumerate(pairs)]


@pytest.mark.parametrize(("kind", "name", "wait"), [*failing(0), *slow(*failing(1))])
def test_whatever_call_fails(kind: str, name: str, wait: bool):
    error, expected = ERRORS[kind]
    call = 0
    for call in itertools.count(1):
        with pytest.MonkeyPatch.context() as patch:
            failing, both = Failing(patch, name, call, error), Both()
            both.step()
            if not check_failure(both, failing, expected, wait):
                break
    assert call > 5  # it was written in pieces


def check_failure(both: Both, failing: Failing, expected: type[BaseException], wait: bool) -> bool:
    """Commit, and go on after the error; return False where there was none."""
    try:
        both.commit_to_the_end(wait)
    except expected:
        assert failing.failed
    else:
        assert not failing.failed
        both.check_ended()
        both.table.close()
        return False
    both.check_ended(dirty=True)
    assert both.table.last_commit == 0
    both.step(*range(0, ROWS, 4))
    assert both.commit() == 1
    both.check_ended()
    both.close()
    return True


@pytest.mark.parametrize("name", ["place", "seal", "append_sealed"])
@pytest.mark.parametrize("call", [1, 4])
def test_rows_that_change_while_a_commit_fails(name: str, call: int, monkeypatch: pytest.MonkeyPatch):
    Failing(monkeypatch, name, call + (name != "place"), OSError(errno.EIO, "the disk failed"))
    gate, both = Gate(monkeypatch, "place", {call}), Both()  # the error comes after it
    both.step()
    both.table.commit(wait=False)
    gate.wait()
    both.step(*range(0, ROWS, 2))
    gate.open()
    with pytest.raises(CommitError, match="the disk failed"):
        files_of(both.table).end_commit()
    both.check_ended(dirty=True)
    both.step(*range(0, ROWS, 3))
    both.commit()
    both.check_ended()
    both.close()


def test_what_went_wrong_behind_is_raised_by_the_next_call_that_changes(monkeypatch: pytest.MonkeyPatch):
    failing, both = Failing(monkeypatch, "seal", 2, OSError(errno.EIO, "the disk failed")), Both()
    both.step()
    both.table.commit(wait=False)
    until(lambda: both.tier.commit is not None and both.tier.commit.is_done)
    assert failing.failed
    before = both.table.lookup(np.arange(ROWS))
    with pytest.raises(CommitError, match="commit 1 failed: the disk failed"):
        both.table.update(np.arange(3), np.ones((3, DIM), np.float32))
    np.testing.assert_array_equal(both.table.lookup(np.arange(ROWS)), before)
    both.check_ended(dirty=True)
    both.step()
    both.commit()
    both.close()


def refuse_threads(patch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Let no thread of that name start; return the names of those that were refused, and will be."""
    start, refused = threading.Thread.start, list[str]()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == name:
            refused.append(name)
            raise RuntimeError("can't start new thread")
        start(thread)

    patch.setattr(threading.Thread, "start", refuse)
    return refused


@pytest.mark.parametrize("wait", [True, False], ids=["awaited", "quiet"])
def test_no_more_threads(wait: bool, monkeypatch: pytest.MonkeyPatch):
    both = Both()
    both.step()
    with monkeypatch.context() as patch:
        refuse_threads(patch, "embedrock-commit")
        with pytest.raises(RuntimeError, match="can't start new thread"):
            both.commit_to_the_end(wait)
        both.check_ended(dirty=True)
    both.step(*range(0, ROWS, 2))
    both.commit(wait)
    both.step(*range(0, ROWS, 2))
    both.commit()
    both.check_ended()
    both.close()


def test_one_thread_does_it_all_where_there_is_no_other(monkeypatch: pytest.MonkeyPatch):
    both = Both()
    refused = refuse_threads(monkeypatch, "embedrock-commit-2")
    for _ in range(3):
        both.step()
        both.commit()
    assert len(refused) == 3
    both.check_ended()
    both.close()


def test_an_error_behind_the_pieces(monkeypatch: pytest.MonkeyPatch):
    Failing(monkeypatch, "publish", 1, OSError(errno.EIO, "the disk failed"))
    both = Both()
    both.step()
    with pytest.raises(CommitError, match="the disk failed"):
        both.table.commit()
    both.check_ended(dirty=True)
    both.commit()
    both.check_ended()
    both.close()


# ---------------------------------------------------------------- commits before compactions


class Clock:
    """In the place of a module's `time`: counts its pauses, and looks at the table in each."""

    def __init__(self, patch: pytest.MonkeyPatch, module: ModuleType, seen: Callable[[], Any]) -> None:
        self._seen, self.pauses, self.slept = seen, list[Any](), time.sleep
        patch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return time.monotonic()

    def thread_time(self) -> float:
        return time.thread_time()

    def sleep(self, seconds: float) -> None:
        if seconds == compaction.PAUSE_SECONDS:
            self.pauses.append(self._seen())
        self.slept(min(seconds, 0.001))


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> tuple[Both, Clock, StorageManager]:
    """A table whose compaction waits for a commit."""
    monkeypatch.setattr(upkeep, "LEAST_COMPACTED_BYTES", 1 << 40)  # none begins by itself
    both = Both()
    for _ in range(3):
        both.step()
        both.commit()
    durability = files_of(both.table)
    compacted = both.store.counts["bytes_compacted"]
    both.store.commit_is_awaited = True
    clock = Clock(monkeypatch, compaction, lambda: both.store.counts["bytes_compacted"] - compacted)
    compact_in_background(both.table)
    until(lambda: len(clock.pauses) >= 20)
    return both, clock, durability


def check_still(both: Both, clock: Clock) -> None:
    """Fail unless it has written one piece, and no more."""
    stride = both.tier.spec.record_bytes + 4
    assert set(clock.pauses) == {stride * rows_in(both, stores.PIECE_BYTES)}


def test_a_compaction_leaves_the_disk_to_a_commit_and_stops_when_told(paused: tuple[Both, Clock, StorageManager]):
    both, clock, durability = paused
    chunks = len(both.store.base.runs)
    finished(durability.upkeep.stop)
    check_still(both, clock)
    assert len(both.store.base.runs) == chunks
    assert durability.upkeep.failed == 0
    both.store.commit_is_awaited = False
    both.commit()
    both.close()


@pytest.mark.parametrize("name", ["commit_is_awaited", "flush"])
def test_a_compaction_goes_on_when_the_commit_has_ended_or_it_must(
    name: str, paused: tuple[Both, Clock, StorageManager]
):
    both, clock, durability = paused
    check_still(both, clock)
    thread = durability.upkeep.compaction
    assert thread is not None
    setattr(both.store, name, name == "flush")
    finished(thread.join)
    assert both.store.base.count == ROWS
    both.store.flush = both.store.commit_is_awaited = False
    both.commit()
    both.close()


def test_a_commit_that_ends_lets_the_compaction_go_on(paused: tuple[Both, Clock, StorageManager]):
    both, _, durability = paused
    both.store.commit_is_awaited = False
    both.step()
    both.commit()
    both.check_ended()
    thread = durability.upkeep.compaction
    assert thread is not None
    finished(thread.join)
    both.close()


# ---------------------------------------------------------------- tables that nobody has any more


def test_a_table_that_is_dropped_while_its_commit_waits_for_a_step(monkeypatch: pytest.MonkeyPatch):
    """The thread of the commit must not be the last that holds the table: it would close the files under itself."""
    system, inside, closed = FaultFS(), threading.Event(), list[str]()
    settle, abandon = TableLock.settle_steps, StorageManager.abandon

    def slow(table_lock: TableLock) -> None:
        if threading.current_thread().name.startswith("embedrock-commit"):
            inside.set()
            time.sleep(0.05)
        settle(table_lock)

    def noted(self: StorageManager, *args: Any, **options: Any) -> None:
        closed.append(threading.current_thread().name)
        abandon(self, *args, **options)

    monkeypatch.setattr(TableLock, "settle_steps", slow)
    monkeypatch.setattr(StorageManager, "abandon", noted)
    table = on(system).Table(ROWS, DIM, path="/table", rule=er.SGD())
    table.update([1, 2], np.ones((2, DIM), np.float32))
    number = table.commit(wait=False)
    assert inside.wait(PATIENCE)
    del table
    gc.collect()
    assert closed == ["MainThread"]
    with on(system).open("/table") as again:
        assert again.last_commit == number


def test_garbage_that_is_collected_in_a_thread_of_ours(monkeypatch: pytest.MonkeyPatch):
    """What that thread is needed for ends first; only then are the files closed."""
    gate, both = Gate(monkeypatch, "place", {1}), Both()
    both.step()
    number = both.table.commit(wait=False)
    gate.wait()
    version = rows_of(both.table).version
    collected = threading.Thread(target=files_of(both.table).abandon, args=([version],), name="embedrock-0")
    collected.start()
    collected.join(PATIENCE)
    assert not collected.is_alive()
    gate.open()
    until(lambda: not any(thread.name == "close-embedrock" for thread in threading.enumerate()))
    with on(both.system).open(both.folder) as again:
        assert again.last_commit == number


def test_a_commit_that_has_ended_hurries_nobody():
    both = Both()
    both.step()
    both.commit()
    ended = files_of(both.table)._commit
    assert ended is not None
    ended.flush()
    assert not both.store.commit_is_awaited
    both.store.commit_is_awaited = True  # a later one is
    ended.flush()
    assert both.store.commit_is_awaited
    both.store.commit_is_awaited = False
    both.close()


# ---------------------------------------------------------------- compaction makes room in time


def test_a_compaction_keeps_pace_with_what_fills_the_index(monkeypatch: pytest.MonkeyPatch):
    both = Both()
    both.step()
    both.commit()
    assert both.store.log_index.count == ROWS
    shares = itertools.chain([0.5], itertools.repeat(1.0))
    monkeypatch.setattr(LogIndex, "fullness", property(lambda _: next(shares)))
    finished(lambda: compaction.compact(both.store, 1e-3, lambda: False))  # at that rate it would take weeks
    monkeypatch.undo()
    assert both.store.log_index.count == 0
    both.close()


def test_room_is_made_once():
    """Where a compaction that was under way has made enough of it, nothing is folded anew."""
    both = Both()
    both.step()
    both.commit()
    compaction.relieve(both.store, ROWS, lambda: False)
    assert both.store.log_index.count == ROWS
    compaction.relieve(both.store, ROWS, lambda: True)
    assert both.store.log_index.count == 0
    assert not both.store.flush
    both.close()


@pytest.mark.parametrize("fails", [False, True])
def test_a_commit_under_way_is_waited_for_where_it_matters_what_the_table_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
):
    """Else a reference would be to the commit before, and a table that is to go back would seem to be there."""
    write = commits.CommitWriter.write

    def write_late(self: commits.CommitWriter) -> None:
        time.sleep(0.05)
        if fails:
            raise OSError(5, "Input/output error")
        write(self)

    monkeypatch.setattr(commits.CommitWriter, "write", write_late)
    with er.Table(10, 2, path=tmp_path / "t", rule=er.SGD(lr=1.0), init=er.Zeros()) as table:
        with monkeypatch.context() as patch:
            patch.setattr(commits.CommitWriter, "write", write)
            table.update([1], np.ones((1, 2), np.float32))
            first = table.commit(name="first")
        table.update([1], np.ones((1, 2), np.float32))
        number = table.commit(name="second", wait=False)
        assert (table.uncommitted, table.last_commit) == (fails, first if fails else number)
        if fails:
            with pytest.raises(CommitError):
                table.commit()
            monkeypatch.setattr(commits.CommitWriter, "write", write)
        else:
            table.update([1], np.ones((1, 2), np.float32))
            third = table.commit(wait=False)
            assert reference_to(table)["commit"] == third
            table.update([1], np.ones((1, 2), np.float32))
            table.commit(wait=False)
        go_to(table, {"commit": first})
        assert table.lookup([1])[0, 0] == -1.0
