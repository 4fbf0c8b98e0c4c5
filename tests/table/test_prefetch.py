"""`prefetch`: order, moments, errors, and that nothing is left behind however a loop ends."""

from __future__ import annotations

import gc
import itertools
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
import programs
from embedrock.errors import CacheTooSmallError
from embedrock.io.vfs import System
from embedrock.storage.backend import Pin
from embedrock.table import prefetch as module
from embedrock.table.prefetch import prefetch
from on_system import on
from slow import slow


class FakeTicket(Pin):
    def __init__(self, table: Fake, ids: Any) -> None:
        self.table, self.ids = table, ids

    def release(self) -> None:
        self.table.held.pop(id(self), None)


class Fake:
    """A table's `bring`, that notes what is held, and may wait or fail."""

    def __init__(self, before: Callable[[Any], Any] = lambda ids: None) -> None:
        self.before, self.held, self.brought, self.threads = before, {}, [], set()

    def bring(self, ids: Any) -> FakeTicket:
        self.threads.add(threading.current_thread())
        self.before(ids)
        pin = FakeTicket(self, ids)
        self.held[id(pin)] = pin
        self.brought.append(ids)
        return pin

    def room_for(self, batches: Sequence[int]) -> tuple[int, int]:
        rows = len(set(batches))
        return rows, 1000 * rows

    def holds(self) -> list[Any]:
        return sorted(pin.ids for pin in list(self.held.values()))


def same(item: Any) -> Any:
    return item


def soon(condition: Callable[[], bool]) -> bool:
    """Return whether a condition comes true, however slow the machine."""
    for _ in range(3000):
        if condition():
            return True
        time.sleep(0.01)
    return False


def prefetching_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "embedrock-prefetch"]


@pytest.fixture(autouse=True)
def nothing_is_left(small_heap: None) -> Iterator[None]:
    yield
    gc.collect()
    assert soon(lambda: not prefetching_threads())


def check_left(*tables: Fake) -> None:
    assert soon(lambda: not any(table.held for table in tables))
    assert soon(lambda: not prefetching_threads())


# ---------------------------------------------------------------- order and moments


@pytest.mark.parametrize("depth", [0, 1, 2, 5, 19, 20, 100])
def test_items_come_in_order_each_with_its_rows(depth: int):
    table, pulled = Fake(), []
    source = (pulled.append(k) or k for k in range(20))
    for k in prefetch(source, {table: same}, depth):
        assert len(pulled) == min(k + depth + 1, 20)
        if depth:
            assert k in table.holds()
            assert len(table.holds()) <= depth + 1
            assert max(table.holds()) <= k + depth
        else:
            assert not table.brought
    assert len(pulled) == 20
    assert table.brought == (list(range(20)) if depth else [])
    check_left(table)


def test_nothing_happens_before_the_first_item_is_asked_for():
    table, pulled = Fake(), []
    items = prefetch((pulled.append(k) or k for k in range(3)), {table: same})
    assert (pulled, prefetching_threads()) == ([], [])
    assert list(items) == [0, 1, 2]


def test_the_source_and_ids_of_run_in_the_callers_thread_and_bring_in_one_other():
    seen, table = set(), Fake()

    def source() -> Iterator[int]:
        for k in range(9):
            seen.add(threading.current_thread())
            yield k

    def ids_of(k: int) -> int:
        seen.add(threading.current_thread())
        return k

    assert list(prefetch(source(), {table: ids_of}, 3)) == list(range(9))
    assert seen == {threading.current_thread()}
    assert len(table.threads) == 1
    assert table.threads.isdisjoint(seen)


def test_random_numbers_are_drawn_in_one_order_however_slow_the_disk_is():
    def draws(delay: float) -> list[float]:
        random.seed(3)
        noise, table = random.Random(4), Fake(lambda ids: time.sleep(delay * noise.random()))
        source = (random.random() for _ in range(12))
        return [item + random.random() for item in prefetch(source, {table: same}, 3)]

    assert draws(0.0) == draws(0.01)


def test_rows_are_brought_while_an_item_is_worked_on():
    third_was_brought = threading.Event()
    table = Fake(lambda k: third_was_brought.set() if k == 2 else None)
    items = prefetch(range(9), {table: same}, 2)
    assert next(items) == 0
    assert third_was_brought.wait(60)
    items.close()  # pyright: ignore[reportAttributeAccessIssue]


def test_an_item_waits_for_its_rows():
    go = threading.Event()
    table = Fake(lambda k: go.wait(60) if k == 1 else None)
    items = prefetch(range(3), {table: same}, 2)
    assert next(items) == 0
    timer = threading.Timer(0.05, go.set)
    timer.start()
    assert next(items) == 1
    assert go.is_set()
    assert 1 in table.holds()
    assert list(items) == [2]


def test_several_tables():
    users, items = Fake(), Fake()
    batches = [{"user": k, "item": -k} for k in range(1, 10)]
    wanted = {users: lambda batch: batch["user"], items: lambda batch: batch["item"]}
    for k, batch in enumerate(prefetch(batches, wanted, 3), 1):
        assert batch == {"user": k, "item": -k}
        assert k in users.holds()
        assert -k in items.holds()
    check_left(users, items)


def test_inside_of_one_another():
    users, items = Fake(), Fake()
    inner = prefetch(range(10), {users: same}, 2)
    assert list(prefetch(inner, {items: same}, 3)) == list(range(10))
    for k in prefetch(range(4), {users: same}, 2):
        assert list(prefetch(range(5), {users: same}, 1)) == list(range(5))  # an evaluation, say
        assert k in users.holds()
    check_left(users, items)


def test_any_iterable_will_do():
    class Sequence:
        def __getitem__(self, index: int) -> int:
            if index == 3:
                raise IndexError
            return index

    assert list(prefetch(Sequence(), {Fake(): same})) == [0, 1, 2]  # pyright: ignore[reportArgumentType]
    assert list(prefetch([], {Fake(): same})) == []
    assert list(itertools.islice(prefetch(itertools.count(), {Fake(): same}), 3)) == [0, 1, 2]


# ---------------------------------------------------------------- errors


class Spoilt(Exception):
    pass


def spoilt_at(place: int, error: Exception | None = None) -> Callable[[int], int]:
    def function(k: int) -> int:
        if k == place:
            raise error or Spoilt(k)
        return k

    return function


@pytest.mark.parametrize("depth", [1, 100, *slow(3)])
@pytest.mark.parametrize("place", [0, 9, *slow(1, 5)])
@pytest.mark.parametrize("where", ["source", "ids_of", "bring"])
def test_an_error_comes_in_the_place_of_its_item(where: str, place: int, depth: int):
    spoilt, seen = spoilt_at(place), []
    table = Fake(spoilt if where == "bring" else same)
    source = map(spoilt, range(10)) if where == "source" else range(10)
    items = prefetch(source, {table: spoilt if where == "ids_of" else same}, depth)
    with pytest.raises(Spoilt, match=str(place)) as caught:
        seen.extend(items)
    assert seen == list(range(place))
    assert caught.traceback[-1].name == "function"  # where it came from
    check_left(table)
    assert list(items) == []


def test_after_an_error_nothing_more_is_pulled():
    pulled = []
    source = map(spoilt_at(2), (pulled.append(k) or k for k in range(10)))
    with pytest.raises(Spoilt):
        list(prefetch(source, {Fake(): same}, 5))
    assert pulled == [0, 1, 2]


def test_a_stop_iteration_of_ids_of_does_not_end_the_loop_in_silence():
    with pytest.raises(RuntimeError):
        list(prefetch(range(3), {Fake(): spoilt_at(1, StopIteration())}))


def test_an_error_of_ids_may_be_the_sources_own():
    source = map(spoilt_at(1, er.IdError("no such shard")), range(3))
    with pytest.raises(er.IdError, match="no such shard"):
        list(prefetch(source, {Fake(): same}))


def test_an_error_between_two_tables_releases_the_first():
    first, second = Fake(), Fake(spoilt_at(1))
    with pytest.raises(Spoilt):
        list(prefetch(range(9), {first: same, second: same}, 3))
    check_left(first, second)


@pytest.mark.parametrize(("place", "rows"), [(1, 5), (6, 5), (8, 5)])
def test_a_cache_that_is_too_small_says_what_to_do(place: int, rows: int):
    table = Fake(spoilt_at(place, CacheTooSmallError("too small.")))
    text = (
        rf"too small\. Looking ahead by depth=4 keeps the rows of 5 items .* {rows} rows: memory={rows}000 \(4.9 KiB\)"
    )
    with pytest.raises(CacheTooSmallError, match=text):
        list(prefetch(range(9), {Fake(): same, table: same}, 4))


def test_what_is_kept_when_an_item_is_brought_depends_on_no_timing():
    kept: list[list[int]] = []
    table = Fake(lambda k: kept.append(table.holds()))
    for k in prefetch(range(9), {table: same}, 3):
        time.sleep(0.01 * (k % 3))
    assert kept == [list(range(max(k - 3, 0), k)) for k in range(9)]


@pytest.mark.parametrize(
    ("source", "ids_of", "depth", "text"),
    [
        (3, {Fake(): same}, 2, "`source` of prefetch must be something to loop over: got 3"),
        (range(3), {}, 2, r"`ids_of` of prefetch must be a dict from tables to functions: got \{\}"),
        (range(3), same, 2, "must be a dict from tables to functions"),
        (range(3), {"users": same}, 2, "must have tables as its keys: got 'users'"),
        (range(3), {Fake(): "user"}, 2, "functions of an item as its values: got 'user'"),
        (range(3), {Fake(): same}, -1, "`depth` of prefetch must be a whole number of items, 0 or more: got -1"),
        (range(3), {Fake(): same}, 1.5, "got 1.5"),
        (range(3), {Fake(): same}, True, "got True"),
        (range(3), {Fake(): same}, None, "got None"),
    ],
)
def test_arguments_are_checked_at_once(source: Any, ids_of: Any, depth: Any, text: str):
    with pytest.raises(er.ArgumentError, match=text):
        prefetch(source, ids_of, depth)


def test_a_depth_of_numpy():
    assert list(prefetch(range(3), {Fake(): same}, np.int32(1))) == [0, 1, 2]  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------- ends of loops


def test_leaving_a_loop_early_releases_everything():
    table = Fake()
    for k in prefetch(range(99), {table: same}, 10):
        if k == 3:
            break
    assert not table.held  # at once: the end of the loop waited for the thread
    assert not prefetching_threads()


def test_leaving_a_loop_while_rows_are_being_brought():
    inside, go, table = threading.Event(), threading.Event(), Fake()
    table.before = lambda k: (inside.set(), go.wait(60)) if k == 2 else None
    items = prefetch(range(99), {table: same}, 5)
    assert next(items) == 0
    assert inside.wait(60)
    threading.Timer(0.05, go.set).start()
    del items
    check_left(table)
    assert table.brought == [0, 1, 2]  # what nobody waits for is not brought


def test_a_loop_that_is_closed_by_who_holds_what_its_thread_waits_for(monkeypatch: pytest.MonkeyPatch):
    # Garbage collection may do so, inside of any call.
    monkeypatch.setattr(module, "CLOSING_SECONDS", 0.05)
    lock, inside, table = threading.RLock(), threading.Event(), Fake()

    def wait_for_lock(k: int) -> None:
        if k == 1:
            inside.set()
            with lock:
                pass

    table.before = wait_for_lock
    items = prefetch(range(9), {table: same}, 3)
    with lock:
        assert next(items) == 0
        assert inside.wait(60)
        del items
        gc.collect()
    check_left(table)


def test_garbage_collection_of_a_cycle():
    table = Fake()
    items: Any = prefetch(range(9), {table: same}, 3)
    next(items)
    cycle: list[Any] = [items]
    cycle.append(cycle)
    del items, cycle
    gc.collect()
    check_left(table)


def test_an_error_in_the_loop():
    table, spoilt = Fake(), spoilt_at(2)

    def loop() -> None:
        for k in prefetch(range(9), {table: same}, 3):
            spoilt(k)

    with pytest.raises(Spoilt) as caught:
        loop()
    assert caught.value.args == (2,)  # which is still there, with the frames of the loop
    check_left(table)


def test_closing_twice_and_before_the_start():
    table = Fake()
    items: Any = prefetch(range(9), {table: same}, 3)
    items.close()
    assert list(items) == []
    again: Any = prefetch(range(9), {table: same}, 3)
    next(again)
    again.close()
    again.close()
    check_left(table)


def test_a_fork_in_the_loop():
    program = """
import os, sys
from embedrock.table.prefetch import prefetch
from embedrock.storage.backend import Pin
class MyTicket(Pin):
    def release(self): pass
class Table:
    def bring(self, ids): return MyTicket()
items = prefetch(range(9), {Table(): lambda k: k}, 3)
next(items)
child = os.fork()
if child == 0:
    items.close()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), list(items))
"""
    result = programs.run(program)
    assert result.stdout == "7 [1, 2, 3, 4, 5, 6, 7, 8]\n", result.stderr


INTERRUPTED = """
import gc, signal, sys, threading, time
from embedrock.table.prefetch import prefetch
from embedrock.storage.backend import Pin

held, inside = set(), threading.Event()
def doze():
    for _ in range(6000):
        time.sleep(0.01)
class MyTicket(Pin):
    def release(self): held.discard(self)
class Table:
    def bring(self, k):
        if k == 2 and sys.argv[1] == "bring":
            inside.set()
            time.sleep(0.3)
        ticket = MyTicket()
        held.add(ticket)
        return ticket
def source():
    for k in range(5):
        yield k
        if k == 2 and sys.argv[1] == "source":
            inside.set()
            doze()
def left():
    gc.collect()
    for _ in range(1000):
        threads = [thread.name for thread in threading.enumerate() if thread.name == "embedrock-prefetch"]
        if not threads and not held:
            break
        time.sleep(0.01)
    return threads, len(held)

def interrupt():
    inside.wait()
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
seen = []
try:
    for k in prefetch(source(), {Table(): lambda k: k}, 1):
        seen.append(k)
        if k == 2 and sys.argv[1] == "body":
            inside.set()
            doze()
except KeyboardInterrupt:
    print("interrupted", *left(), seen)
"""


@pytest.mark.parametrize(("where", "seen"), [("body", [0, 1, 2]), ("source", [0, 1]), ("bring", [0, 1])])
def test_ctrl_c(where: str, seen: list[int]):
    result = programs.run(INTERRUPTED, programs.CORE, where)
    assert result.stdout == f"interrupted [] 0 {seen}\n", result.stderr


def test_ctrl_c_at_any_moment():
    """
    Interrupted again and again at moments of its own choosing, nothing is ever left behind.

    Python itself loses an interrupt that falls into a weak reference's callback ("Exception ignored in"), so a loop
    that still runs a second later counts as one that met it.
    """
    program = (
        INTERRUPTED.split("def interrupt")[0]
        + """
import random
noise = random.Random(5)
signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
interrupted = lost = 0
for _ in range(300):
    try:
        over = time.monotonic() + 1
        signal.setitimer(signal.ITIMER_REAL, 1e-5 + noise.random() * 3e-3)
        for k in prefetch(range(10**9), {Table(): lambda k: k, Table(): lambda k: k}, noise.randrange(1, 9)):
            if time.monotonic() > over:
                lost += 1
                break
    except KeyboardInterrupt:
        interrupted += 1
print(interrupted + lost, interrupted >= 250, *left())
"""
    )
    result = programs.run(program, programs.CORE, "x")
    assert result.stdout == "300 True [] 0\n", result.stderr


def test_the_end_of_python_with_a_loop_that_never_ended():
    program = (
        INTERRUPTED.split("def interrupt")[0]
        + """
items = prefetch(range(9), {Table(): lambda k: k}, 2)
print(next(items))
"""
    )
    result = programs.run(program, programs.CORE, "x")
    assert (result.stdout, result.stderr, result.returncode) == ("0\n", "", 0)


def test_a_script_that_ends_in_the_loop(tmp_path: Path):
    # Python would end the thread inside of a kernel, and sometimes abort: it has ended before.
    program = f"""
import atexit, sys, threading
atexit.register(lambda: print([t.name for t in threading.enumerate() if t.name == "embedrock-prefetch"]))
import numpy as np, embedrock as er
from embedrock.table.prefetch import prefetch
from embedrock.storage.backend import Pin
table = er.Table(300_000, 4, path={str(tmp_path / "t.rock")!r})
batches = prefetch([np.arange(300_000)] * 20, {{table: lambda ids: ids}}, 19)
sys.kept = sys.modules["__main__"]  # so its names, a loop among them, go after those of `threading`
print(table.lookup(next(batches)).shape)
"""
    command = [sys.executable, "-c", program]  # which imports anew: what `atexit` calls is in order of imports
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (result.stdout, result.stderr, result.returncode) == ("(300000, 4)\n[]\n", "", 0)


# ---------------------------------------------------------------- tables on disk


ROWS, DIM, SIZE = 2000, 4, 48


class Jittery(System):
    """A disk whose reads take random times."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = random.Random(3)

    def read_many(self, fds: Any, offsets: Any, sizes: Any, out: Any, starts: Any) -> None:
        time.sleep(self.noise.random() * 2e-3)
        super().read_many(fds, offsets, sizes, out, starts)


def table_of(path: Path | None, memory: str | int | None = None, **more: Any) -> er.Table:
    return er.Table(ROWS, DIM, rule=er.Adam(lr=0.1), init=er.Normal(), seed=3, path=path, memory=memory, **more)


def batches_of(kind: str, count: int = 50) -> list[np.ndarray]:
    """Batches whose neighbours share rows: a few hot ones, hardly any, or all but some."""
    rng = np.random.default_rng(5)
    if kind == "skewed":
        return [rng.zipf(1.3, SIZE) * 7919 % ROWS for _ in range(count)]
    if kind == "uniform":
        return [rng.integers(0, ROWS, SIZE) for _ in range(count)]
    return [np.arange(k, k + SIZE) % ROWS for k in range(0, 3 * count, 3)]


def train(table: er.Table, batches: list[np.ndarray], depth: int, commit_every: int = 0) -> None:
    for k, ids in enumerate(table.prefetch(batches, depth)):
        table.update(ids, table.lookup(ids) * 0.1 + 1)
        if commit_every and k % commit_every == 0:
            table.commit(step=k, wait=k % 2 == 0)


def check_equal(table: er.Table, other: er.Table) -> None:
    assert table.steps == other.steps
    assert all(map(np.array_equal, table.export(), other.export()))


@pytest.mark.parametrize("depth", [0, 2, 100, *slow(1, 3, 7)])
@pytest.mark.parametrize("kind", ["skewed", "uniform", "sliding"])
def test_training_gives_the_bits_of_a_table_in_ram(kind: str, depth: int, tmp_path: Path):
    batches, in_ram = batches_of(kind), table_of(None)
    least = (min(depth, 50) + 2) * SIZE  # slots
    with on(Jittery())(table_of, tmp_path / "t.rock", min(least, 1000) * 90 + 20_000) as table:
        for _ in range(2):  # the second time, all rows are on disk
            train(in_ram, batches, 0)
            train(table, batches, min(depth, 12) if kind == "uniform" else depth, commit_every=7)
            check_equal(table, in_ram)
        table.commit()
    check_left()


@pytest.mark.parametrize("policy", ["lru", "clock", "lfu"])
@pytest.mark.parametrize("depth", [1, 5])
def test_every_policy(policy: str, depth: int, tmp_path: Path):
    in_ram = table_of(None)
    with table_of(tmp_path / "t.rock", "60KB", policy=policy) as table:
        for each in (in_ram, table):
            train(each, batches_of("skewed"), depth)
            train(each, batches_of("sliding"), depth)
        check_equal(table, in_ram)
        table.commit()


def test_the_rows_of_a_window_are_read_once(tmp_path: Path):
    with table_of(tmp_path / "t.rock") as table:
        train(table, batches_of("uniform"), 0)
        table.commit()
    with table_of(tmp_path / "t.rock", "1MB", directory="hashed") as table:
        train(table, batches_of("uniform"), 100)
        stats = table.stats()
        assert stats["reads"] == stats["rows_touched"]
        table.commit()


def test_a_budget_that_is_too_small_for_the_depth_names_one_that_is_not(tmp_path: Path):
    batches = [np.arange(k, k + 200) for k in range(0, 2000, 200)]
    with table_of(tmp_path / "t.rock") as table:
        train(table, batches, 0)
        table.commit()
    with table_of(tmp_path / "t.rock", "60KB") as table:
        with pytest.raises(CacheTooSmallError, match=r"depth=4.*here 1000 rows") as caught:
            list(table.prefetch(batches, 4))
        memory = int(re.findall(r"memory=(\d+) \([^()]*\) is enough for them", str(caught.value))[-1])
        check_left()
        train(table, batches, 0)  # nothing is left in the cache
        table.commit()
    with table_of(tmp_path / "t.rock", memory) as table:
        train(table, batches, 4)
        table.commit()
    with table_of(tmp_path / "t.rock", memory * 8 // 10) as table, pytest.raises(CacheTooSmallError):
        list(table.prefetch(batches, 4))


def test_errors_of_ids_come_in_their_place(tmp_path: Path):
    with table_of(tmp_path / "t.rock", "1MB") as table:
        items = table.prefetch([[1], [2], [ROWS], [3]], 2)
        assert [next(items), next(items)] == [[1], [2]]
        with pytest.raises(er.IdError, match=rf"got {ROWS} at \[0\] of ids of shape"):
            next(items)
        items = table.prefetch([[1], [0.5]], 1)
        assert next(items) == [1]
        with pytest.raises(er.IdTypeError, match="float64"):
            next(items)


def test_a_table_that_is_closed_in_the_loop(tmp_path: Path):
    table = table_of(tmp_path / "t.rock", "1MB")
    items = table.prefetch([[1], [2], [3], [4], [5]], 1)
    next(items)
    table.close()
    with pytest.raises(er.ClosedTableError):
        list(items)
    check_left()


def test_a_rollback_in_the_loop(tmp_path: Path):
    batches = batches_of("skewed", 20)
    with table_of(tmp_path / "t.rock", "80KB") as table:
        train(table, batches, 2)
        first, before = table.commit(), table.export()
        for k, ids in enumerate(table.prefetch(batches, 3)):
            table.update(ids, table.lookup(ids))
            if k == 10:
                table.rollback(first)
                assert all(map(np.array_equal, table.export(), before))
        in_ram = table_of(None)
        train(in_ram, batches, 0)
        for ids in batches[11:]:
            in_ram.update(ids, in_ram.lookup(ids))
        check_equal(table, in_ram)
        table.commit()


def test_tables_in_ram_and_on_disk_together(tmp_path: Path):
    in_ram, batches = table_of(None), batches_of("skewed", 20)
    with table_of(tmp_path / "t.rock", "60KB") as table:
        for ids in prefetch(batches, {in_ram: same, table: same}, 3):
            for each in (in_ram, table):
                each.update(ids, each.lookup(ids))
        check_equal(table, in_ram)
        table.commit()


def test_what_a_reader_looks_ahead_to(tmp_path: Path):
    batches = batches_of("uniform", 20)
    with table_of(tmp_path / "t.rock") as table:
        train(table, batches, 2)
        table.commit()
        with er.open(tmp_path / "t.rock", mode="r", memory="50KB") as reader:
            for ids in reader.prefetch(batches, 3):
                assert np.array_equal(reader.lookup(ids), table.lookup(ids))


@pytest.mark.parametrize("moved", [0, 1, 5000])
def test_a_function_of_other_ids_is_told_once(tmp_path: Path, moved: int, recwarn: pytest.WarningsRecorder):
    """Not where some of the ids are the batch's, or nothing is looked up, or rows have no record yet."""
    with er.Table(10_000, 16, path=tmp_path / "t", memory="4MiB", rule=er.SGD(lr=0.5)) as table:
        table.update(np.arange(10_000), np.ones((10_000, 16)))
        table.commit()
    items = [np.arange(start, start + 50) for start in range(0, 1000, 50)]
    for reads in (False, True):
        with er.open(tmp_path / "t", memory="4MiB") as table:
            for item in prefetch(items, {table: lambda item: (item + moved) % 10_000}):
                if reads:
                    table.lookup(item)
    told = [str(one.message) for one in recwarn if "prefetch brings" in str(one.message)]
    assert len(told) == (moved == 5000)
    assert all("return the ids that the loop looks up." in text for text in told)


def test_rows_of_a_new_table_are_not_taken_for_other_ids(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    with er.Table(None, 4, path=tmp_path / "t", rule=er.SGD(lr=0.5)) as table:
        for item in prefetch(np.arange(1000).reshape(20, 50), {table: lambda item: item}):
            table.update(item, table.lookup(item))
    assert not [one for one in recwarn if "prefetch brings" in str(one.message)]
