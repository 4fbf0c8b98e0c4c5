"""A program that forks while its threads are at work with a table. Run as: fork_loop.py WORK FORKS FOLDER.

Every row makes every step, by 1. So wherever rows are looked up, all of them must be the same, whole number. A child
that does not end in time prints its stacks, and that ends the program with an error.
"""

from __future__ import annotations

import atexit
import faulthandler
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.errors import ReadOnlyTableError, TableLockedError

ROWS, DIM, LIMIT = 400, 8, 60
IDS, ONES = np.arange(ROWS), np.ones((ROWS, DIM), np.float32)
OPTIONS: dict[str, Any] = {"rule": er.SGD(lr=1.0), "init": er.Zeros()}


def steps_of(table: er.Table) -> int:
    """Return how many steps all rows have made; fail where some have made more."""
    values = table.lookup(IDS)
    steps = -int(values[0, 0])
    assert (values == -steps).all(), np.unique(values)
    return steps


def step(table: er.Table) -> None:
    """Step every row once."""
    table.update(IDS, ONES)


# ---------------------------------------------------------------- what threads do, until they are stopped


def train(table: er.Table) -> None:
    """Step, in the background."""
    step(table)


def serve(table: er.Table) -> None:
    """Look rows up on several threads while others step."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: steps_of(table), range(8)))
    step(table)


def commit(table: er.Table) -> None:
    """Step, and commit in the background."""
    step(table)
    table.commit(wait=False)


def compact(table: er.Table) -> None:
    """Step, commit, and fold logs into base chunks."""
    step(table)
    table.commit()
    table.compact()


def prefetch(table: er.Table) -> None:
    """Step in a loop that looks ahead, through a cache that holds a part of the rows."""
    for ids in table.prefetch(IDS.reshape(-1, 25), depth=1):
        table.update(ids, ONES[ids])


def read(table: er.Table) -> None:
    """Look rows up."""
    steps_of(table)


# ---------------------------------------------------------------- what children do


def leave(table: er.Table) -> None:
    """Do nothing but end."""


def close(table: er.Table) -> None:
    """Close the table."""
    table.close()


def use(table: er.Table) -> None:
    """Look rows up, and step them."""
    before = steps_of(table)
    step(table)
    assert steps_of(table) == before + 1


def use_another(table: er.Table) -> None:
    """Step another table."""
    with er.Table(ROWS, DIM, **OPTIONS) as other:
        step(other)
        assert steps_of(other) == 1


def look_up(table: er.Table) -> None:
    """Look rows up, also with a loop that looks ahead."""
    before = steps_of(table)
    for ids in table.prefetch(IDS.reshape(-1, 25), depth=1):
        assert (table.lookup(ids) == -before).all()


def fork(table: er.Table) -> None:
    """Fork again, twice."""
    for action in (look_up, leave):
        in_child(table, action)


def be_refused(table: er.Table) -> None:
    """Be told that the parent writes the table, and find its lock held and its files whole."""
    with pytest.raises(ReadOnlyTableError, match="this is its child"):
        table.lookup(IDS)
    path = str(table.path)
    with pytest.raises(TableLockedError):
        er.open(path)
    with er.open(path, mode="r") as snapshot:
        assert len(snapshot.lookup(IDS)) == ROWS


IN_RAM = (leave, use, close, use_another, fork)
OF_WRITER = (leave, be_refused, close, use_another)
OF_READER = (leave, look_up, close, fork)
CHILDREN = {train: IN_RAM, serve: IN_RAM, read: OF_READER, **dict.fromkeys((commit, compact, prefetch), OF_WRITER)}
WORKS = {work.__name__: work for work in CHILDREN}


def in_child(table: er.Table, action: Callable[[er.Table], None], whole_exit: bool = False) -> None:
    """Fork, call a function in the child, and fail unless that ends well, as programs end."""
    number = os.fork()
    if number == 0:
        signal.alarm(LIMIT)
        action(table)
        if whole_exit:
            sys.exit(0)
        threading._shutdown()  # type: ignore[attr-defined]  # what `sys.exit` does, up to where the interpreter is taken apart: a second saved
        atexit._run_exitfuncs()
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
    assert status == 0, f"{action.__name__}: {status}"


def made(work: str, folder: str) -> er.Table:
    """Return a table for a work, whose rows have made a step."""
    in_ram = er.Table(ROWS, DIM, **OPTIONS)
    memory = in_ram.memory_for(100 if work == "prefetch" else ROWS)
    if work in ("train", "serve"):
        table = in_ram
    else:
        table = er.Table(ROWS, DIM, path=f"{folder}/table", memory=memory, **OPTIONS)
    for ids in IDS.reshape(-1, 25):
        table.update(ids, ONES[ids])
    if table.is_on_disk:
        table.commit()
    if work == "read":
        table.close()
        table = er.open(f"{folder}/table", mode="r", memory=memory)
    return table


def main(name: str, forks: int, folder: str) -> None:
    faulthandler.register(signal.SIGALRM, chain=True)  # the stacks of all threads, and then the end
    work, table, stopped, errors = WORKS[name], made(name, folder), threading.Event(), []

    def go_on() -> None:
        while not stopped.is_set():
            try:
                work(table)
            except BaseException as error:
                errors.append(error)
                raise

    threads = [threading.Thread(target=go_on) for _ in range(2 if name in ("train", "read") else 1)]
    for thread in threads:
        thread.start()
    try:
        for count, action in zip(range(forks), itertools.cycle(CHILDREN[work]), strict=False):
            in_child(table, action, whole_exit=count % 10 == 0)
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
    assert not errors
    steps = steps_of(table)
    if name in ("commit", "compact", "prefetch"):
        table.commit()
        assert table.verify().problems == []
        table.close()
        with er.open(f"{folder}/table") as again:
            assert steps_of(again) == steps
    print(f"{forks} forks, {steps} steps")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
