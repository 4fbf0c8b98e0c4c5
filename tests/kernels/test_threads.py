"""The thread pool: parts cover the range once, errors arrive, forks and changes of size do no harm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.kernels.cpu import threads as pool
from slow import slow


@pytest.fixture(autouse=True)
def threads() -> Any:
    before = er.get_threads()
    yield
    er.set_threads(before)


@pytest.mark.parametrize("count", [0, 1, 7, 1000, 1001])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_parts_cover_the_range_once(count: int, threads: int) -> None:
    er.set_threads(threads)
    seen = np.zeros(count, int)

    def add(array: np.ndarray, lo: int, hi: int) -> None:
        array[lo:hi] += 1

    pool.run(add, count, (seen,), grain=3)
    assert (seen == 1).all()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_one_thread_makes_a_call_of_little_work(threads: int) -> None:
    er.set_threads(threads)
    for work in (pool.LEAST_WORK // 4 - 1, pool.LEAST_WORK // 4, pool.LEAST_WORK):
        parts: list[tuple[int, int]] = []
        pool.run(lambda lo, hi, parts=parts: parts.append((lo, hi)), 100, (), grain=10, work=work)
        assert sorted(parts)[-1][1] == 100
        assert len(parts) == (threads if work * (threads - 1) >= pool.LEAST_WORK else 1)


def test_errors_of_any_part_arrive_after_all_parts_ended() -> None:
    er.set_threads(4)
    ended = []

    def fail(lo: int, hi: int) -> None:
        time.sleep(0.01 * lo)
        ended.append(lo)
        if lo == 2:
            raise ValueError("part 2")

    with pytest.raises(ValueError, match="part 2"):
        pool.run(fail, 4, (), grain=1)
    assert sorted(ended) == [0, 1, 2, 3]


def test_the_pool_may_be_replaced_while_it_works() -> None:
    done: list[int] = []

    def work() -> None:
        for _ in range(200):
            pool.run(lambda lo, hi: done.append(hi - lo), 8, (), grain=1)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for threads in [1, 3, 2, 5, 1, 4] * 10:
        er.set_threads(threads)
    for worker in workers:
        worker.join(60)
    assert not any(worker.is_alive() for worker in workers)
    assert sum(done) == 3 * 200 * 8


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2"])
def test_bad_thread_counts(bad: Any) -> None:
    before = er.get_threads()
    with pytest.raises(er.ArgumentError, match="the number of threads must be a whole number >= 1"):
        er.set_threads(bad)
    assert er.get_threads() == before


@pytest.mark.parametrize(
    ("value", "expected"),
    [("3", "3"), ("0", "EMBEDROCK_THREADS must be a positive whole number: got '0'"), *slow(("x", "got 'x'"))],
)
def test_the_environment_sets_the_threads(value: str, expected: str) -> None:
    code = "import embedrock as er\ntry: print(er.get_threads())\nexcept er.ArgumentError as error: print(error)"
    environment = {**os.environ, "EMBEDROCK_THREADS": value}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert expected in out.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_pool_of_its_own() -> None:
    er.set_threads(3)
    table = er.Table(10**6, 16, rule=er.SGD(lr=1.0), init=er.Zeros())
    ids, grads = np.arange(50_000), np.ones((50_000, 16), np.float32)
    table.update(ids, grads)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        table.update(ids, grads)
        os._exit(0 if (table.lookup(ids) == -2).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (table.lookup(ids) == -1).all()


def test_an_interrupt_lets_the_parts_end() -> None:
    er.set_threads(2)
    ended = []

    def part(lo: int, hi: int) -> None:
        if lo == 0:
            signal.raise_signal(signal.SIGINT)
        time.sleep(0.05)
        ended.append(lo)

    with pytest.raises(KeyboardInterrupt):
        pool.run(part, 2, (), grain=1)
    assert 1 in ended
