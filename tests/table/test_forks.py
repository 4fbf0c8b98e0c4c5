"""Forks while other threads work: no child waits for what it does not have, and rows are those of whole steps."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import embedrock as er
import fork_loop
from embedrock.errors import EmbedrockError, UnsupportedError
from embedrock.kernels.cpu import threads as pool
from embedrock.system import forks
from embedrock.system.interrupts import held_back
from embedrock.table.table import rows_of
from forked import child, ended, in_child
from slow import slow

# From Python 3.12 on, it warns where a process with threads forks.
pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),
]

IDS, ONES = np.arange(50), np.ones((50, 2), np.float32)
PATIENCE = 60


def make() -> er.Table:
    """Return a table whose rows, once they have made s steps, are -s; they have made one."""
    table = er.Table(50, 2, rule=er.SGD(lr=1.0), init=er.Zeros())
    table.update(IDS, ONES)
    return table


def check_rows(table: er.Table, steps: int) -> None:
    """Fail unless all rows have made so many steps."""
    np.testing.assert_array_equal(table.lookup(IDS), -steps * ONES)


def run(*arguments: object) -> str:
    """Run a program of Python, and return what it prints."""
    result = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=3000)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Exception ignored" not in result.stderr
    return result.stdout


# ---------------------------------------------------------------- many forks


@pytest.mark.parametrize(
    ("work", "count"),
    [
        ("train", 10),
        *slow(
            ("compact", 8),
            *((work, 200) for work in sorted(fork_loop.WORKS)),
            ("commit", 8),
            ("prefetch", 8),
            ("read", 8),
        ),
    ],
)
def test_no_child_hangs(work: str, count: int, tmp_path: Path):
    assert f"{count} forks" in run(fork_loop.__file__, work, count, tmp_path)


# ---------------------------------------------------------------- the moment between the hooks and the fork

# Hooks that were registered first run last before a fork: so this one runs when those of Embedrock are done.
WINDOW = """
import faulthandler, os, signal, sys, threading
go, begun, end = threading.Event(), threading.Event(), threading.Event()
def last():
    go.set()
    begun.wait(1)
os.register_at_fork(before=last)
import numpy as np
import embedrock as er
from embedrock.storage.records import Records
table = er.Table(50, 2, rule=er.SGD(lr=1.0), init=er.Zeros())
ids, ones = np.arange(50), np.ones((50, 2), np.float32)
table.update(ids, ones)
table.lookup(ids)
whole = Records.step
def step(*args):
    begun.set()
    end.wait(60)
    whole(*args)
Records.step = step
def train():
    go.wait()
    table.update(ids, ones)
go.clear()
thread = threading.Thread(target=train)
thread.start()
child = os.fork()
if child == 0:
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(120)
    if sys.argv[1] == "close":
        table.close()
    if sys.argv[1] == "lookup":
        assert (table.lookup(ids) == -1).all(), table.lookup(ids)
    sys.exit(0)
end.set()
thread.join()
assert (table.lookup(ids) == -2).all()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("action", ["lookup", *slow("exit", "close")])
def test_no_step_begins_between_the_hooks_and_the_fork(action: str):
    assert run("-c", WINDOW, action) == "0\n"


# Whoever has the table needs the lock of `logging`, as imports and compilers do. The hook of `logging` was registered
# after those of Embedrock, and so runs before them.
LOGGING = """
import os, sys, threading
import embedrock as er
from embedrock.table.table import rows_of
import logging
table, has = er.Table(50, 2, rule=er.SGD(lr=1.0), init=er.Zeros()), threading.Event()
def log():
    with rows_of(table).table_lock.alone():
        has.set()
        forking.wait(0.5)
        logging.getLogger("x")
forking = threading.Event()
thread = threading.Thread(target=log)
thread.start()
has.wait()
os.register_at_fork(before=forking.set)
child = os.fork()
if child == 0:
    os._exit(int(rows_of(table).table_lock.is_torn))
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_thread_that_is_waited_for_may_log():
    started = time.monotonic()
    assert run("-W", "error::RuntimeWarning", "-c", LOGGING) == "0\n"
    assert time.monotonic() - started < PATIENCE


# ---------------------------------------------------------------- where forks come from


def test_a_fork_by_a_thread_that_has_the_table():
    table, other = make(), make()
    with rows_of(table).table_lock.alone():
        table.update(IDS, ONES)
        number = child(lambda: (check_rows(table, 2), check_rows(other, 1), table.update(IDS, ONES)))
        check_rows(table, 2)
    assert ended(number) == 0
    table.update(IDS, ONES)
    check_rows(table, 3)


def test_a_fork_by_a_worker_in_the_middle_of_a_call():
    table, codes = make(), []
    call = pool.start(lambda: codes.append(ended(child(lambda: check_rows(table, 1)))))
    if call is not None:
        call.finish()
    assert codes == [0]


def test_a_fork_by_a_handler_of_signals_in_the_middle_of_a_wait():
    table, codes = make(), []
    table_lock = rows_of(table).table_lock
    before = signal.signal(signal.SIGUSR1, lambda *_: codes.append(ended(child(lambda: check_rows(table, 1)))))
    try:
        table_lock.wait_for(lambda: signal.raise_signal(signal.SIGUSR1) is None and bool(codes))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert codes == [0]


def test_a_child_that_goes_on_with_a_wait_is_told_so():
    """Its parent's handler of signals forked, and the threads that it waits for are the parent's."""
    table_lock, parent, forked = rows_of(make()).table_lock, os.getpid(), []

    def fork(*args: object) -> None:
        forked.append(os.fork())
        if os.getpid() != parent:
            signal.alarm(120)

    before = signal.signal(signal.SIGUSR1, fork)
    threading.Timer(0.1, os.kill, (parent, signal.SIGUSR1)).start()
    try:
        with table_lock.lock:
            if os.getpid() == parent:
                threading.Thread(target=lambda: [time.sleep(0.3), table_lock.notify()]).start()
            table_lock.wait_for(lambda: bool(forked) and os.getpid() == parent)
    except EmbedrockError as error:
        os._exit(7 if "a fork came while process" in str(error) else 1)
    finally:
        if os.getpid() == parent:
            signal.signal(signal.SIGUSR1, before)
    assert ended(forked[0]) == 7


def test_a_fork_before_a_process_is_started():
    table = make()
    ran = subprocess.run([sys.executable, "-c", "print(7)"], capture_output=True, preexec_fn=lambda: None, check=True)
    assert ran.stdout == b"7\n"
    check_rows(table, 1)


def test_a_fork_in_a_loop_that_looks_ahead():
    table = make()
    batches = iter(table.prefetch([IDS[k : k + 5] for k in range(0, 50, 5)], depth=3))
    next(batches)

    def go_on() -> None:
        assert [batch[0] for batch in batches] == list(range(5, 50, 5))

    in_child(go_on)
    go_on()


# ---------------------------------------------------------------- what cannot be waited for


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "PATIENCE", 0.2)
    monkeypatch.setattr(forks, "SLICE", 0.05)


@pytest.fixture
def busy() -> Iterator[er.Table]:
    """A table that another thread has, for as long as it likes."""
    table, has, end = make(), threading.Event(), threading.Event()

    def keep() -> None:
        with rows_of(table).table_lock.alone():
            has.set()
            end.wait()

    thread = threading.Thread(target=keep)
    thread.start()
    has.wait()
    yield table
    end.set()
    thread.join()


def test_a_table_that_another_thread_does_not_let_go_is_refused_in_the_child(impatient: None, busy: er.Table):
    other = make()

    def look() -> None:
        check_rows(other, 1)
        text = (
            f"cannot be used in process {os.getpid()}: when that was forked, another thread of its parent had been at "
            "work with the table for over 0.2 seconds, and the copy here may be half changed."
        )
        for _ in range(2):
            with pytest.raises(EmbedrockError, match=re.escape(text)):
                busy.lookup(IDS)
        busy.close()

    with pytest.warns(RuntimeWarning, match=r"forked while other threads were at work with Embedrock for over 0\.2"):
        in_child(look)


def test_a_call_that_does_not_end_is_lost_in_the_child(impatient: None):
    end, begun = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        end.wait()

    pool.set_threads(2)  # with one, it would be made here
    call = pool.start(wait)
    assert call is not None
    begun.wait()

    def finish() -> None:
        with pytest.raises(EmbedrockError, match="this process was forked while a thread of its parent"):
            call.finish()
        pool._finish_all()

    try:
        with pytest.warns(RuntimeWarning, match="forked while"):
            in_child(finish)
    finally:
        end.set()
    call.finish()


def test_locks_are_let_go_where_their_holder_waits_for_one_of_them(monkeypatch: pytest.MonkeyPatch):
    """As where a step of two tables takes them in another order. No table is refused then."""
    monkeypatch.setattr(forks, "SLICE", 0.05)
    first, second, has = make(), make(), threading.Event()

    def take_both() -> None:
        with rows_of(second).table_lock.lock:
            has.set()
            time.sleep(0.3)  # so that whoever forks has the other one
            with rows_of(first).table_lock.lock:
                pass

    thread = threading.Thread(target=take_both)
    thread.start()
    has.wait()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*forked while", RuntimeWarning)
        in_child(lambda: (check_rows(first, 1), check_rows(second, 1)))
    thread.join()


def test_locks_that_are_made_while_others_are_waited_for_are_waited_for_too():
    """As where another thread makes the first step of all: with that come the workers, and Numba's compiler."""
    first, made, has = forks.lock(forks.LockRank.TABLE), list[forks.Lock](), threading.Event()

    def work() -> None:
        made.append(forks.lock(forks.LockRank.WORKER))
        with made[0]:
            has.set()
            time.sleep(0.5)

    def begin() -> None:
        with first:
            has.set()
            time.sleep(0.2)
            has.clear()
            threading.Thread(target=work).start()
            has.wait()

    threading.Thread(target=begin).start()
    has.wait()
    missed = []
    forks.in_child(missed.extend)
    try:
        in_child(lambda: missed == [] or os._exit(2))
    finally:
        forks._in_child.remove(missed.extend)


def test_a_property_that_another_thread_computes_is_computed_in_the_child():
    class Slow:
        @forks.cached_property
        def value(self) -> int:
            if threading.current_thread() is not threading.main_thread():
                has.set()
                time.sleep(0.3)
            return 7

    has = threading.Event()
    threading.Thread(target=lambda: Slow().value).start()
    has.wait()
    in_child(lambda: Slow().value == 7 or os._exit(2))


def test_two_threads_fork_at_once():
    table, codes = make(), []

    def fork() -> None:
        for _ in range(5):
            table.update(IDS, ONES)
            codes.append(ended(child(lambda: table.lookup(IDS))))

    several = [threading.Thread(target=fork) for _ in range(2)]
    for thread in several:
        thread.start()
    for thread in several:
        thread.join(PATIENCE)
    assert codes == [0] * 10


# ---------------------------------------------------------------- what a child has


def test_ctrl_c_reaches_a_child_although_the_parents_main_thread_holds_it_back():
    codes: list[int] = []

    def be_interrupted() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            return
        raise AssertionError("it was not")

    with held_back(), held_back():
        thread = threading.Thread(target=lambda: codes.append(ended(child(be_interrupted))))
        thread.start()
        thread.join()
    assert codes == [0]


def test_ctrl_c_waits_in_a_child_of_the_thread_that_holds_it_back():
    def hold() -> None:
        signal.raise_signal(signal.SIGINT)

    with held_back():
        number = child(hold)
    assert ended(number) == 0


def test_locks_of_tables_that_are_gone_are_not_kept():
    make().close()
    before = weakref.WeakSet(forks._ranks)
    tables = [make() for _ in range(5)]
    made = weakref.WeakSet(forks._ranks) - before
    assert len(made) >= 5
    while tables:
        tables.pop().close()
    gc.collect()
    assert not made


class OnGpu:
    """Rows in another memory."""

    def __init__(self, table: er.Table) -> None:
        self.rows = rows_of(table)

    def finish(self) -> None:
        self.rows.check_process()

    def check(self) -> None: ...

    def may_forget(self) -> bool:
        return False

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        assert os.getpid() == self.rows.process


def test_rows_on_a_gpu_are_refused_in_the_child():
    table = make()
    with rows_of(table).table_lock.alone():
        rows_of(table).attach(executor := OnGpu(table))
        rows_of(table).table_lock.running = [executor]

    def look() -> None:
        for _ in range(2):
            with pytest.raises(UnsupportedError, match=r"are on a GPU, in process \d+, and this is its child"):
                table.lookup(IDS)
        table.close()

    in_child(look)
    check_rows(table, 1)
    table.close()
