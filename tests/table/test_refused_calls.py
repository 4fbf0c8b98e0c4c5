"""A call that is refused has changed nothing, wherever it failed: each call of the system, and each array, in turn.

What counts is all that a user can tell: rows and their bytes, optimizer state, steps, rows touched, slots that are
held. The same call, made again, then gives the bits of a run in which nothing failed.
"""

from __future__ import annotations

import errno
import gc
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

import embedrock as er
from embedrock.errors import EmbedrockError
from embedrock.storage.cache import SlotCache
from embedrock.storage.commit import StorageCommit
from embedrock.storage.disk_backend import DiskBackend
from embedrock.storage.ram_layout import memory_for
from embedrock.table.stepping import HostStep, StepRequest, judge, step_all, step_judged
from embedrock.table.table import rows_of
from on_system import on
from slow import slow
from suites import FaultFS, records_of
from table_files import files_of

ROWS, DIM, SLOTS = 200, 3, 24
Tables = list[er.Table]


class Kind(NamedTuple):
    """A kind of table."""

    rule: er.Rule
    dtype: str = "float32"
    on_disk: bool = True
    options: tuple[tuple[str, Any], ...] = ()


KINDS = {
    "disk": Kind(er.Adam(lr=0.1)),
    "disk, dense": Kind(er.Adam(lr=0.1, dense=True)),
    "disk, 16 bits": Kind(er.Momentum(lr=0.1), "bfloat16"),
    "hashed": Kind(er.Adam(lr=0.1), on_disk=False, options=(("directory", "hashed"),)),
    "direct, dense": Kind(er.AdamW(lr=0.1, dense=True), on_disk=False, options=(("directory", "direct"),)),
    "hashed, 16 bits": Kind(er.Ftrl(lr=0.1), "bfloat16", False, (("directory", "hashed"),)),
}


def gradients(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)


def make(kind: Kind, system: FaultFS, name: str) -> er.Table:
    """Make a table whose cache has rows that a commit under way still needs, and room for a few more."""
    given: dict[str, Any] = {"rule": kind.rule, "seed": 1, "dtype": kind.dtype, **dict(kind.options)}
    if kind.on_disk:
        with er.Table(ROWS, DIM, rule=kind.rule, dtype=kind.dtype) as like:
            given |= {"path": f"/data/{name}", "memory": memory_for(like.spec, SLOTS)}
    table = on(system).Table(ROWS, DIM, **given)
    for start in (0, 10, 20, 30):
        ids = np.arange(start, start + 10)
        table.update(ids, gradients(start, 10))
    if kind.on_disk:
        table.commit()
        table.update(np.arange(28, 36), gradients(1, 8))
        table.commit(wait=False)
    return table


# Rows that are not in the cache, that a commit still needs, and that were never stepped.
BATCH = np.array([2, 5, 28, 33, 35, 33, 90, 91, 92, 93])


def update(tables: Tables) -> None:
    tables[0].update(BATCH, gradients(7, len(BATCH)))


def step_several(tables: Tables) -> None:
    due = []
    for number, table in enumerate(tables):
        ids = BATCH + number
        due.append(
            StepRequest(
                (rows_of(table),), table.rule or er.SGD(), table.sum(table.plan(ids), gradients(number, len(ids)))
            )
        )
    step_all(due)


def accumulate(tables: Tables) -> None:
    table = tables[0]
    first, second = (table.sum(table.plan(ids), gradients(8, len(ids))) for ids in (BATCH, BATCH[::-1] + 3))
    table.step(first.merge(second))


def assign(tables: Tables) -> None:
    if not getattr(tables[0].rule, "dense", False):
        ids = np.unique(BATCH)
        tables[0].assign(ids, gradients(9, len(ids)))


def look_up(tables: Tables) -> None:
    tables[0].lookup(BATCH)


def bring(tables: Tables) -> None:
    tables[0].bring(BATCH).release()


def prefetch(tables: Tables) -> None:
    batches = [BATCH, BATCH + 4, BATCH + 1]
    for ids in tables[0].prefetch(batches, depth=1):
        tables[0].lookup(ids)


def compact(tables: Tables) -> None:
    if tables[0].is_on_disk:
        tables[0].compact()


def set_rule(tables: Tables) -> None:
    if not getattr(tables[0].rule, "dense", False):
        tables[0].set_rule(er.SGD(lr=0.5), reset_state=True)


ACTS = {
    act.__name__: act for act in (update, step_several, accumulate, assign, look_up, bring, prefetch, compact, set_rule)
}


def state(table: er.Table) -> tuple[Any, ...]:
    """Return all that a refused call must leave as it is."""
    ids, records = records_of(table)
    stats = table.stats()
    counts = {name: stats[name] for name in ("rows_touched", "steps", "skipped_steps") if name in stats}
    return counts, ids.tobytes(), records.tobytes(), table.first_scale, str(table.rule), held(table)


def held(table: er.Table) -> int:
    """Return how many rows tickets hold in the cache, besides those of the last batch."""
    tier = rows_of(table).tier
    if not isinstance(tier, DiskBackend) or not isinstance(tier.cache, SlotCache):
        return 0
    pins, used = tier.cache._pins[: tier.cache.used_slots], tier.cache._current
    held = np.where(pins == 2**16 - 1, 0, pins).astype(int)
    held[used] -= 1
    return int(held.sum())


class HeldCommits:
    """Commits in the background that begin to write when somebody waits for them, and not before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lock = threading.Lock()
        self._start, self._hurry = StorageCommit.start, StorageCommit.flush
        self._intervals: weakref.WeakKeyDictionary[StorageCommit, float] = weakref.WeakKeyDictionary()
        monkeypatch.setattr(StorageCommit, "start", lambda *args: self._intervals.__setitem__(*args))
        monkeypatch.setattr(StorageCommit, "flush", lambda commit: self._hurried(commit))

    def _hurried(self, commit: StorageCommit) -> None:
        with self._lock:
            interval = self._intervals.pop(commit, None)
        if interval is not None:
            self._start(commit, interval)
        self._hurry(commit)


@pytest.fixture(autouse=True)
def commits_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    HeldCommits(monkeypatch)


def made_system() -> FaultFS:
    system = FaultFS()
    system.mkdir("/data")
    return system


class Run:
    """Tables on a system of their own, and a call of them that is to come."""

    def __init__(self, kind: Kind, act: Callable[[Tables], None]) -> None:
        self.kind, self.act, self.system = kind, act, made_system()
        self.tables = [make(kind, self.system, f"t{number}") for number in range(3 if act is step_several else 1)]

    def states(self) -> list[tuple[Any, ...]]:
        return [state(table) for table in self.tables]

    def call(self, trouble: AbstractContextManager[Any]) -> bool:
        """Make the call in trouble; return whether it was refused, and fail where that has changed anything."""
        before = self.states()
        try:
            with trouble:
                self.act(self.tables)
        except (OSError, EmbedrockError, MemoryError):
            assert self.states() == before
            return True
        return False

    def end(self) -> list[Any]:
        """Return what the tables are, and what their last commit holds, but for its number."""
        found: list[Any] = []
        for number, table in enumerate(self.tables):
            found += state(table)[1:-1], table.steps, table.stats()["rows_touched"]
            if self.kind.on_disk:
                table.commit()
            table.close()
            if self.kind.on_disk:
                with on(self.system).open(f"/data/t{number}", mode="r", memory="1MiB") as again:
                    found += state(again)[1:-1], again.steps
                    assert again.verify().problems == []
        return found

    def must_be_opened_again(self) -> bool:
        """Return whether a commit failed so that no more are taken, and close the tables then."""
        broken = [table for table in self.tables if self.kind.on_disk and files_of(table).table_folder.broken]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", er.UncommittedWarning)
            for table in self.tables if broken else ():
                table.close()
        return bool(broken)

    def end_after(self, was_refused: bool) -> list[Any]:
        """Make the call again if it was refused, now that nothing fails, and return what `end` does."""
        for _ in range(2):  # what went wrong with a commit in the background is told once
            was_refused = was_refused and self.call(nullcontext())
        assert not was_refused
        return self.end()


@contextmanager
def failing(system: FaultFS, call: int, fault: int | str) -> Iterator[None]:
    """Let a call of the system fail, counted from now on."""
    system.fail(system.ops + call, fault)
    try:
        yield
    finally:
        system.mend()


def untroubled(kind: Kind, act: Callable[[Tables], None]) -> tuple[int, list[Any]]:
    """Return how many calls of the system it makes, and how it ends."""
    run = Run(kind, act)
    first = run.system.ops
    run.act(run.tables)
    return run.system.ops - first, run.end()


def fail_each_call(kind: Kind, act: Callable[[Tables], None], fault: int | str) -> None:
    """Let each call of the system fail in turn."""
    count, expected = untroubled(kind, act)
    refused = 0
    for call in range(count):
        run = Run(kind, act)
        was_refused = run.call(failing(run.system, call, fault))
        if not run.must_be_opened_again():
            assert run.end_after(was_refused) == expected, f"call {call} of {count}"
        refused += was_refused
    assert refused or not count or fault != errno.EIO


FEW = ("update", "step_several", "bring")


@pytest.mark.parametrize("name", [*FEW, *slow(*(name for name in ACTS if name not in FEW))])
@pytest.mark.parametrize("kind", ["disk", *slow("disk, dense", "disk, 16 bits")])
@pytest.mark.parametrize("fault", [errno.EIO, errno.ENOSPC, *slow("short")])
def test_each_call_of_the_system_fails(name: str, kind: str, fault: int | str) -> None:
    fail_each_call(KINDS[kind], ACTS[name], fault)


# ---------------------------------------------------------------- memory

MODULES = (
    "table.rows", "optimizers._rule", "storage.ram_backend", "storage.disk_backend", "storage.cache",
    "storage.slot_index", "storage.records", "storage.commit", "store.record_store", "store.segments",
    "store.log_index", "store.base", "store.reading", "io.vfs",
)  # fmt: skip
MAKERS = (
    "empty", "empty_like", "zeros", "full", "arange", "array", "concatenate", "where", "flatnonzero", "unique",
    "argsort", "isin", "tile", "ascontiguousarray",
)  # fmt: skip


class Scarce(ModuleType):
    """NumPy, but one of the next arrays finds no memory. Counts those that were made."""

    def __init__(self, fails: int) -> None:
        super().__init__("numpy")
        self.made, self.fails = 0, fails

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        if name not in MAKERS:
            return found

        def make(*args: Any, **kwargs: Any) -> Any:
            self.made += 1
            if self.made == self.fails + 1:
                raise MemoryError(f"array {self.fails}, np.{name}")
            return found(*args, **kwargs)

        return make


@contextmanager
def scarce(fails: int, patch: pytest.MonkeyPatch) -> Iterator[Scarce]:
    """Let one array that the core makes find no memory, counted from now on."""
    memory = Scarce(fails)
    with patch.context() as patched:
        for name in MODULES:
            patched.setattr(sys.modules[f"embedrock.{name}"], "np", memory)
        yield memory


# Of several tables, each is whole: the arrays of its own step are the last that can fail, after those before it.
@pytest.mark.parametrize("name", ["update", "bring", *slow(*(name for name in ACTS if name not in FEW))])
@pytest.mark.parametrize("kind", KINDS)
def test_each_array_finds_no_memory(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(KINDS[kind], ACTS[name])
    with scarce(sys.maxsize, monkeypatch) as memory:
        run.act(run.tables)
    expected, refused = run.end(), 0
    for array in range(memory.made):
        run = Run(KINDS[kind], ACTS[name])
        was_refused = run.call(scarce(array, monkeypatch))
        if not run.must_be_opened_again():
            assert run.end_after(was_refused) == expected, f"array {array} of {memory.made}"
        refused += was_refused
    assert refused or not memory.made


def test_a_warning_that_is_an_error_comes_before_the_step() -> None:
    """The step size of so large a rate is Inf as a float32, and NumPy warns of that."""
    for kind in ("disk, dense", "direct, dense"):
        table = Run(KINDS[kind]._replace(rule=er.Adam(lr=0.1, dense=True)), update).tables[0]
        before = state(table)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            with pytest.raises(RuntimeWarning, match="overflow"):
                table.update(BATCH, gradients(7, len(BATCH)), lr=3e38)
        assert state(table) == before


# ---------------------------------------------------------------- several threads


@pytest.mark.parametrize("verb", ["make_room", "bring"])
@pytest.mark.parametrize("kind", ["disk", "disk, dense"])
def test_what_one_thread_prepared_is_not_taken_by_another_which_had_the_table_meanwhile(
    kind: str, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for a commit, to make room, lets others have the table."""
    run, rest = Run(KINDS[kind], update), Run(KINDS[kind], update)
    mine, others = np.array([30, 31, 32]), np.array([33, 34, 35])
    tables = run.tables[0], rest.tables[0]
    summed = [[table.sum(table.plan(ids), gradients(5, 3)) for ids in (mine, others)] for table in tables]
    tier = rows_of(tables[0]).tier
    wait = getattr(tier, verb)

    def meanwhile(*args: Any) -> Any:
        found = wait(*args)
        with monkeypatch.context() as patched:
            patched.setattr(tier, verb, wait)
            tables[0].read(summed[0][1].plan)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(tier, verb, meanwhile)
        tables[0].read(summed[0][0].plan)
        tables[0].check_step(summed[0][0])
    for table, (_, grads) in zip(tables, summed, strict=True):
        table.check_step(grads)
        table.step(grads)
    assert state(tables[0])[1:] == state(tables[1])[1:]
    assert run.end() == rest.end()


# ---------------------------------------------------------------- several tables


def due_of(tables: Tables) -> list[StepRequest]:
    batches = [BATCH + number for number in range(len(tables))]
    return [
        StepRequest((rows_of(table),), table.rule or er.SGD(), table.sum(table.plan(ids), gradients(3, len(ids))))
        for table, ids in zip(tables, batches, strict=True)
    ]


def test_several_tables_are_stepped_or_none_though_another_thread_took_what_was_prepared() -> None:
    run = Run(KINDS["disk"], step_several)
    judged = judge(due_of(run.tables))
    before = run.states()
    others = threading.Thread(target=lambda: run.tables[1].update(np.arange(100, 120), gradients(5, 20)))
    others.start()
    others.join()
    before[1] = state(run.tables[1])
    run.system.capacity = 0  # the last table cannot write what has to leave its cache
    with pytest.raises(OSError, match="No space left"):
        step_judged(judged)
    run.system.mend()
    assert run.states() == before
    step_judged(judged)
    assert [table.steps for table in run.tables] == [found[0]["steps"] + 1 for found in before]
    run.end()


def test_ctrl_c_comes_before_or_after_the_step_of_all_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    run, step = Run(KINDS["hashed"], step_several), HostStep.step

    def interrupted(due: HostStep) -> None:
        step(due)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(HostStep, "step", interrupted)
    steps = [table.steps for table in run.tables]
    with pytest.raises(KeyboardInterrupt):
        step_all(due_of(run.tables))
    assert [table.steps for table in run.tables] == [count + 1 for count in steps]


def test_a_step_that_some_refuse_is_no_step_that_others_leave_out() -> None:
    skips, refuses = (er.Table(ROWS, DIM, rule=er.SGD(), on_nonfinite=what) for what in ("skip", "raise"))
    due = [
        StepRequest((rows_of(table),), er.SGD(), table.sum(table.plan([1]), np.full((1, DIM), np.nan)))
        for table in (skips, refuses)
    ]
    with pytest.raises(er.NonFiniteGradientError):
        step_all(due)
    assert [table.stats()["skipped_steps"] for table in (skips, refuses)] == [0, 0]


def test_a_table_whose_step_was_only_checked_goes_at_once() -> None:
    table = er.Table(10, 4, rule=er.SGD(), seed=0)
    table.check_step(table.sum(table.plan([1]), np.ones((1, 4), np.float32)))
    rows = weakref.ref(rows_of(table))
    gc.disable()
    try:
        del table
        assert rows() is None
    finally:
        gc.enable()
