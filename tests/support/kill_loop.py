"""The program that `test_kill_loop.py` kills: it trains a table on disk, and says what was made durable.

What the rows are after step k is a function of (seed, k) alone, also where the table was rolled back in between, or its
records laid out anew: so anybody can tell what a commit must hold that was made with ``step=k``. The settings that
change nothing about it (cache, policy, threads, when commits, compactions and rollbacks happen, what is kept) are drawn
anew from another seed at each start.

It is a server: to start quickly, it imports and compiles once, and then forks a child for each line of JSON on stdin,
the arguments of `run`. On stdout there is ``pid P``, then from the child

- ``open C K``: the table is open as of commit C, which was made at step K;
- ``begin C K``: commit C will be made, with the rows of step K;
- ``done C``: commit C is durable;
- ``kept C``: it has a name, and ``released C``: it will have none;
- ``end``, and at last ``exit CODE``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import embedrock as er
from embedrock.io.vfs import OS_SYSTEM, System
from embedrock.storage.cache import POLICIES
from embedrock.storage.ram_layout import memory_for
from embedrock.table.table import rows_of
from on_system import on
from small_pieces import SIZES, some_goal
from table_files import compact_in_background, files_of, store_of

ROWS, DIM, BATCH = 400, 3, 24
LAYOUT_STEPS = 60  # after so many, records are laid out anew


class Kind(NamedTuple):
    """A table and what it is trained by: one rule after the other, whose records differ."""

    rules: tuple[er.Rule, ...]
    dtype: str
    rows: int | None
    policies: tuple[Any, Any] = (None, None)

    def arguments(self, seed: int) -> dict[str, Any]:
        admission, eviction = self.policies
        return {
            "admission": admission,
            "eviction": eviction,
            "rows": self.rows,
            "dim": DIM,
            "rule": self.rules[0],
            "dtype": self.dtype,
            "seed": seed,
        }

    def rule_of(self, step: int) -> er.Rule:
        return self.rules[step // LAYOUT_STEPS % len(self.rules)]


KINDS = {
    "adam": Kind((er.Adam(lr=0.1), er.SGD(lr=0.1), er.Momentum(lr=0.1)), "float32", ROWS),
    "dense": Kind((er.Adam(lr=0.1, dense=True), er.Momentum(lr=0.1, dense=True)), "bfloat16", ROWS),
    "open": Kind((er.Adagrad(lr=0.1), er.Adam(lr=0.1)), "float16", None),
    "come and go": Kind(
        (er.Adagrad(lr=0.1), er.Adam(lr=0.1)),
        "float32",
        None,
        (er.Admission(2, within=60, sketch=1024), er.Eviction(max_rows=5 * BATCH, idle=70, half_life=20)),
    ),
}


def train(table: er.Table, kind: str, seed: int, step: int) -> None:
    """Make step number `step` (from 1 on)."""
    ids, grads = batch(seed, step)
    if step % LAYOUT_STEPS == 0:
        table.set_rule(KINDS[kind].rule_of(step), reset_state=True)
    table.update(ids, grads)


def steps_at(step: int) -> int:
    """Return how many steps the table counts after step number `step`: it begins anew with each layout."""
    return step if step < LAYOUT_STEPS else step % LAYOUT_STEPS + 1


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
        self._unconfirmed: tuple[int, bool] | None = None
        self.depth = int(self.rng.choice([0, 1, 3]))
        self._every, self._waits = int(self.rng.integers(1, 9)), float(self.rng.choice([0.0, 0.5, 1.0]))
        self._compactions = float(self.rng.choice([0.0, 0.02, 0.2]))
        self._rollbacks = bool(self.rng.random() < 0.5)
        er.set_threads(int(self.rng.integers(1, 5)))

    def options(self, memory_for: Callable[[int], int]) -> dict[str, Any]:
        """Return how the table is opened."""
        slots = int(self.rng.choice([(self.depth + 2) * BATCH, 200, 2 * ROWS]))
        policy, keep = str(self.rng.choice(sorted(POLICIES))), int(self.rng.integers(1, 5))
        return {"memory": memory_for(slots), "policy": policy, "keep": keep}

    def stretch(self, left: int) -> int:
        """Return how many steps come before the table is rolled back."""
        return min(left, int(self.rng.integers(20, 100))) if self._rollbacks else left

    def after(self, table: er.Table, step: int) -> None:
        """Do what is due after a step."""
        if step % self._every == 0:
            self.commit(table, step, wait=bool(self.rng.random() < self._waits))
        if self.rng.random() < self._compactions:
            self._compact(table)
        if self.rng.random() < 0.02:
            self._release(table)

    def commit(self, table: er.Table, step: int, wait: bool) -> None:
        number, is_named = self.begin(table, step), bool(self.rng.random() < 0.05)
        table.commit(step=step, name=f"commit {number}" if is_named else None, wait=wait)
        self._unconfirmed = number, is_named
        if wait:
            self._confirm()

    def roll_back(self, table: er.Table) -> None:
        """Go back to any commit that is kept."""
        self._settle(table)
        target = self.rng.choice(np.array(table.commits(), object))
        number = self.begin(table, target["step"] or 0)
        table.rollback(target["commit"])
        self.done(number)

    def close(self, table: er.Table, step: int) -> None:
        """Close the table, most often with a commit before."""
        if self.rng.random() < 0.7:
            self.commit(table, step, wait=False)
        close(table)
        self._confirm()

    def close_interrupted(self, table: er.Table, step: int) -> None:
        """Do what programs do in `finally`: commit whatever there is, or just close the table."""
        made = {steps_at(step): step, steps_at(step - 1): step - 1}.get(table.steps)
        if made and not self._rollbacks and self.rng.random() < 0.5:
            self.commit(table, made, wait=True)
        close(table)

    def begin(self, table: er.Table, step: int) -> int:
        """Say which commit comes next."""
        self._settle(table)
        number = table.last_commit + 1
        say(f"begin {number} {step}")
        return number

    def _settle(self, table: er.Table) -> None:
        rows = rows_of(table)
        with rows.table_lock.alone():
            files_of(table).end_commit()
        self._confirm()

    def _confirm(self) -> None:
        if self._unconfirmed is not None:
            number, is_named = self._unconfirmed
            self._unconfirmed = None
            self.done(number)
            if is_named:
                say(f"kept {number}")

    def done(self, number: int) -> None:
        say(f"done {number}")

    def _compact(self, table: er.Table) -> None:
        if self.rng.random() < 0.5:
            compact_in_background(table, some_goal(store_of(table), self.rng.random()))
        else:
            self._settle(table)
            number = self.begin(table, table.last_step or 0)
            if table.compact() == number:
                self.done(number)

    def _release(self, table: er.Table) -> None:
        self._settle(table)
        named = [commit for commit in table.commits() if commit["name"] is not None]
        if named:
            say(f"released {named[0]['commit']}")
            table.release(named[0]["name"])


def close(table: er.Table) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", er.UncommittedWarning)
        table.close()


class Deadly(System):
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


def run(
    path: str, kind: str, seed: int, draw: int, steps: int, dies_at: int | None = None, planted: str | None = None
) -> None:
    """Train for some steps more, or until killed.

    Args:
        path: of the table, made if it is not there.
        kind: of `KINDS`.
        seed: of what is trained.
        draw: seed of all that must not matter.
        steps: how many.
        dies_at: the call of the operating system in which the process kills itself; None: it does not.
        planted: of `PLANTED`.
    """
    life = Life(draw)
    if life.rng.random() < 0.5:
        cut_small()
    if planted is not None:
        PLANTED[planted]()
    train_table(life, path, kind, seed, steps, System() if dies_at is None else Deadly(dies_at))


def train_table(life: Life, path: str, kind: str, seed: int, steps: int, system: System = OS_SYSTEM) -> None:
    table = open_table(life, path, kind, seed, system)
    step = table.last_step or 0
    say(f"open {table.last_commit} {step}")
    try:
        while steps:
            stretch = life.stretch(steps)
            coming = range(step + 1, step + 1 + stretch)
            batches = table.prefetch((batch(seed, k)[0] for k in coming), life.depth)
            for step, ids in zip(coming, batches, strict=True):
                table.lookup(ids)
                train(table, kind, seed, step)
                life.after(table, step)
            steps -= stretch
            if steps:
                life.roll_back(table)
                step = table.last_step or 0
        life.close(table, step)
    except KeyboardInterrupt:
        life.close_interrupted(table, step)
        raise
    say("end")


def open_table(life: Life, path: str, kind: str, seed: int, system: System) -> er.Table:
    """Open the table with room for records of every layout."""
    arguments = KINDS[kind].arguments(seed)
    widest = max(KINDS[kind].rules, key=lambda rule: rule.state_width(DIM))
    spec = er.Table(**arguments).spec.with_rule(widest)
    options = life.options(lambda slots: memory_for(spec, slots))
    try:
        return on(system).open(path, **options)
    except er.TableFileError:
        return on(system).Table(path=path, **arguments, **options)


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
    try:
        say(f"pid {os.getpid()}")
        run(**json.loads(line))
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


INTERRUPTED = 130


# ---------------------------------------------------------------- what the test must find


def link_in_pieces() -> None:
    """Write manifests under their own names, piece by piece."""

    def link(self: System, source: str, target: str) -> None:
        with open(source, "rb") as file:
            data = memoryview(file.read())
        fd = self.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        for start in range(0, len(data), 100):
            self.pwrite(fd, data[start : start + 100], start)
        self.close(fd)

    System.link = link


def acknowledge_early() -> None:
    """Say that commits are durable, and make them then."""

    def commit(self: Life, table: er.Table, step: int, wait: bool) -> None:
        self.done(self.begin(table, step))
        table.commit(step=step)

    Life.commit = commit


PLANTED = {"manifests in pieces": link_in_pieces, "acknowledged early": acknowledge_early}


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
