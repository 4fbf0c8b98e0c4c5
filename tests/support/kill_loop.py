"""The program that `test_kill_loop.py` kills: it trains a table on disk, and says what was made durable.

What step k does is a function of (seed, k) alone, so that anybody can tell what the table must hold after it. The
settings that change nothing about it (cache, policy, threads, when commits and compactions happen, what is kept) are
drawn anew from another seed at each start.

It is a server: to start quickly, it imports and compiles once, and then forks a child for each line of JSON on stdin,
the arguments of `run`. On stdout there is ``pid P``, then from the child ``open S`` (the step it resumes from),
``done K`` (the commit of step K is durable) and ``end``, and at last ``exit CODE``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import embedrock as er
from embedrock.machine.vfs import OS_SYSTEM, OSSystem, System
from embedrock.tiers.cache import POLICIES
from small_pieces import SIZES
from table_files import files_of

ROWS, DIM, BATCH = 400, 3, 24


class Kind(NamedTuple):
    """A table and what it is trained by."""

    rule: er.Rule
    dtype: str
    rows: int | None

    def arguments(self, seed: int) -> dict[str, Any]:
        return {"rows": self.rows, "dim": DIM, "rule": self.rule, "dtype": self.dtype, "seed": seed}


KINDS = {
    "adam": Kind(er.Adam(lr=0.1), "float32", ROWS),
    "dense": Kind(er.Adam(lr=0.1, dense=True), "bfloat16", ROWS),
    "open": Kind(er.Adagrad(lr=0.1), "float16", None),
}


def train(table: er.Table, seed: int, step: int) -> None:
    """Make step number `step` (from 1 on)."""
    ids, grads = batch(seed, step)
    table.update(ids, grads)


def batch(seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and gradients of a step: a few hot rows, and all others now and then."""
    rng = np.random.default_rng([seed, step])
    hot = np.minimum(rng.zipf(1.3, BATCH) - 1, ROWS - 1)
    ids = np.where(rng.random(BATCH) < 0.6, hot, rng.integers(0, ROWS, BATCH))
    return ids, rng.standard_normal((BATCH, DIM)).astype(np.float32)


class Life:
    """One run of the program: the settings that it drew, and what it does to the table between steps."""

    def __init__(self, draw: int) -> None:
        self.rng = np.random.default_rng(draw)
        self._unconfirmed: int | None = None
        self.depth = int(self.rng.choice([0, 1, 3]))
        self._every, self._waits = int(self.rng.integers(1, 9)), float(self.rng.choice([0.0, 0.5, 1.0]))
        self._compactions = float(self.rng.choice([0.0, 0.02, 0.2]))
        er.set_threads(int(self.rng.integers(1, 5)))

    def options(self, memory_for: Callable[[int], int]) -> dict[str, Any]:
        """Return how the table is opened."""
        slots = int(self.rng.choice([(self.depth + 2) * BATCH, 200, 2 * ROWS]))
        policy, keep = str(self.rng.choice(sorted(POLICIES))), int(self.rng.integers(1, 5))
        return {"memory": memory_for(slots), "policy": policy, "keep": keep}

    def after(self, table: er.Table, step: int) -> None:
        """Do what is due after a step."""
        if step % self._every == 0:
            self.commit(table, step, wait=bool(self.rng.random() < self._waits))
        if self.rng.random() < self._compactions:
            self._compact(table)

    def commit(self, table: er.Table, step: int, wait: bool) -> None:
        name = f"step {step}" if self.rng.random() < 0.05 else None
        table.commit(step=step, name=name, wait=wait)
        self._confirm()  # it waited for the one before
        self._unconfirmed = step
        if wait:
            self._confirm()

    def _confirm(self) -> None:
        if self._unconfirmed is not None:
            say(f"done {self._unconfirmed}")
            self._unconfirmed = None

    def _compact(self, table: er.Table) -> None:
        if self.rng.random() < 0.5:
            files_of(table).compact_in_background(table.rows)
        else:
            table.compact()
            self._confirm()

    def close(self, table: er.Table, step: int) -> None:
        self.commit(table, step, wait=False)
        table.close()
        self._confirm()


class Deadly(OSSystem):
    """Kills the process at its n-th call."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self._left = calls

    def __getattribute__(self, name: str) -> Any:
        if name in CALLS:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getattribute__(name)


CALLS = frozenset(
    {"open", "close", "pwrite", "fdatasync", "fsync_folder", "mkdir", "rmdir", "link", "unlink", "lock", "read_many"}
)


def run(path: str, kind: str, seed: int, draw: int, steps: int, dies_at: int | None = None) -> None:
    """Train for some steps more, or until killed.

    Args:
        path: of the table, made if it is not there.
        kind: of `KINDS`.
        seed: of what is trained.
        draw: seed of all that must not matter.
        steps: how many.
        dies_at: the call of the operating system in which the process kills itself; None: it does not.
    """
    life = Life(draw)
    if life.rng.random() < 0.5:
        cut_small()
    train_table(life, path, kind, seed, steps, OSSystem() if dies_at is None else Deadly(dies_at))


def train_table(life: Life, path: str, kind: str, seed: int, steps: int, system: System = OS_SYSTEM) -> None:
    arguments = KINDS[kind].arguments(seed)
    options = life.options(er.Table(**arguments).memory_for)
    table = er.Table(path=path, **arguments, **options, system=system)
    first = 1 + (table.last_step or 0)
    say(f"open {first - 1}")
    coming = range(first, first + steps)
    for step, ids in zip(coming, table.prefetch((batch(seed, k)[0] for k in coming), life.depth), strict=True):
        table.lookup(ids)
        train(table, seed, step)
        life.after(table, step)
    life.close(table, coming[-1])
    say("end")


def cut_small() -> None:
    """Make many small pieces where there would be a large one, in this process."""
    for module, sizes in SIZES.items():
        for name, size in sizes.items():
            setattr(module, name, size)


def say(text: str) -> None:
    os.write(sys.stdout.fileno(), f"{text}\n".encode())  # at once, and as a whole


def child(line: str) -> int:
    """Fork a process that runs `run`, and return its number."""
    if number := os.fork():
        return number
    say(f"pid {os.getpid()}")
    try:
        run(**json.loads(line))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def warm_up() -> None:
    """Load all kernels, in this process."""
    for number, kind in enumerate(KINDS):
        with tempfile.TemporaryDirectory() as folder:
            train_table(Life(number), f"{folder}/table", kind, seed=0, steps=20)


def main() -> None:
    warm_up()
    say("ready")
    for line in sys.stdin:
        _, status = os.waitpid(child(line), 0)
        say(f"exit {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()
