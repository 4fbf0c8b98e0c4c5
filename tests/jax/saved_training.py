"""A training of tables and dense weights that saves itself by Orbax, and a program of it that a test kills.

Step k is a function of its number and of the state before it. So is the state after it.

The program is a server: it imports once, and forks a process for each line of JSON on stdin, the arguments of `run`.
On stdout there is ``pid P``, then ``saved K`` after each save that was begun, the training's `digest` at its end, and
``exit CODE``.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import embedrock as er
import embedrock.jax as ej
import embedrock.jax.orbax as ejo
from embedrock.table.saved import remembered
from embedrock.table.table import rows_of
from suites import records_of

NAMES = ("user", "item", "shop")
ADAM = er.Adam(lr=0.1)
TABLES: dict[str, dict[str, Any]] = {
    "user": {"rows": 10**9, "rule": ADAM},
    "item": {"rows": None, "rule": ADAM, "admission": er.Admission(2), "eviction": er.Eviction(max_rows=30)},
    "shop": {"rows": 60, "rule": er.Momentum(lr=0.1, dense=True)},
}
KINDS = ("RAM", "disk", "group", "mixed")
DIM, BATCH = 4, 12

rates = optax.exponential_decay(0.1, 4, 0.9)
optimizer = optax.adam(rates)


def tables_in(folder: Path, kind: str) -> ej.Tables:
    """Return tables of a kind, new ones or those in the folder."""

    def made(name: str, seed: int, group: er.Group | None = None, **options: Any) -> er.Table:
        arguments = {"dim": DIM, "seed": seed, **TABLES[name], **options}
        return er.Table(**arguments) if group is None else group.table(name, **arguments)

    on_disk = {name: {"path": folder / name, "memory": "64KiB"} for name in NAMES}
    if kind == "RAM":
        return ej.Tables({name: made(name, seed) for seed, name in enumerate(NAMES)})
    if kind == "disk":
        return ej.Tables({name: made(name, seed, **on_disk[name]) for seed, name in enumerate(NAMES)})
    group = er.Group(path=folder / "group", memory="128KiB")
    if kind == "group":
        return ej.Tables({name: made(name, seed, group) for seed, name in enumerate(NAMES)})
    of_group = {name: made(name, seed, group) for seed, name in enumerate(NAMES[:2])}
    return ej.Tables({**of_group, "shop": made("shop", 2)})


def batch(step: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(step)
    return {name: rng.integers(0, 60, BATCH) for name in NAMES}, rng.standard_normal(BATCH).astype(np.float32)


@jax.jit
def step_of(dense: Any, state: Any, batch: ej.Batch, target: Any) -> Any:
    def loss(dense: Any, rows: Any) -> Any:
        user, item, shop = (batch.with_rows(rows).lookup(name) for name in NAMES)
        return jnp.mean(((user * item * dense["w"] + shop).sum(1) + dense["b"] - target) ** 2)

    grads, of_rows = jax.grad(loss, (0, 1))(dense, batch.rows)
    finite = ej.all_finite(grads, of_rows)
    updates, new = optimizer.update(grads, state, dense)
    dense, state = ej.where(finite, (optax.apply_updates(dense, updates), new), (dense, state))
    return dense, state, of_rows, finite


class Training:
    """Tables and dense weights.

    Attributes:
        step: number of steps made.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.tables = tables_in(folder, kind)
        self.step = 0
        dense = {"w": jnp.ones(DIM), "b": jnp.zeros((), jnp.float32)}
        self.dense = dense, optimizer.init(dense)

    def train(self, steps: int, manager: ocp.CheckpointManager | None = None, every: int = 3, depth: int = 2) -> None:
        """Train up to a number of steps, with a save before the first one of each `every`."""
        for _ in self.steps(steps, depth):
            if manager is not None and self.step % every == 0:
                self.save(manager)

    def steps(self, steps: int, depth: int = 2) -> Iterator[None]:
        """Yield before each step. What the caller does then comes before it."""
        loader = map(batch, range(self.step, steps))
        for fetched, (_, target) in ej.prefetch(loader, self.tables, depth):
            yield
            self.make(fetched, target)

    def make(self, fetched: ej.Batch, target: np.ndarray) -> None:
        """Make the step of a batch."""
        *self.dense, grads, finite = step_of(*self.dense, fetched, target)
        self.tables.apply(fetched, grads, finite, lr=rates)
        self.step += 1

    def save(self, manager: ocp.CheckpointManager) -> bool:
        return manager.save(
            self.step,
            args=ocp.args.Composite(dense=ocp.args.StandardSave(tuple(self.dense)), rows=ejo.TablesSave(self.tables)),
        )

    def restore(self, manager: ocp.CheckpointManager, step: int | None = None) -> None:
        step = manager.latest_step() if step is None else step
        assert step is not None
        dense = ocp.args.StandardRestore(tuple(self.dense))
        found: Any = manager.restore(step, args=ocp.args.Composite(dense=dense, rows=ejo.TablesRestore(self.tables)))
        assert found.rows is self.tables
        self.dense, self.step = found.dense, step

    def close(self) -> None:
        """Close the tables, without the steps since the last save."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", er.UncommittedWarning)
            for table in self.tables.by_name.values():
                (table if table.group is None else table.group).close()

    @property
    def digest(self) -> str:
        """A hash of all bits of the state."""
        found = hashlib.sha256()
        for table in self.tables.by_name.values():
            beside = remembered(rows_of(table))
            found.update(repr([table.steps, *sorted(beside)]).encode())
            for array in (*records_of(table), *(beside[name] for name in sorted(beside))):
                found.update(np.ascontiguousarray(array).tobytes())
        for array in jax.tree.leaves(self.dense):
            found.update(np.asarray(array).tobytes())
        return found.hexdigest()


def manager_in(folder: Path, **options: Any) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(**{"max_to_keep": 2, **options}))


# ---------------------------------------------------------------- the program


def say(text: str) -> None:
    os.write(sys.stdout.fileno(), f"{text}\n".encode())  # at once, and as a whole


def run(folder: str, kind: str, steps: int, every: int) -> None:
    """Go on from the newest checkpoint, up to a number of steps."""
    training = Training(Path(folder), kind)
    with manager_in(Path(folder, "checkpoints")) as manager:
        if manager.latest_step() is not None:
            training.restore(manager)
        for _ in training.steps(steps):
            if training.step % every == 0 and training.step not in manager.all_steps():
                training.save(manager)
                say(f"saved {training.step}")
        training.save(manager)
    say(training.digest)


def warm_up() -> None:
    """Load all kernels, without a call of JAX: a forked process has none of its threads."""
    with tempfile.TemporaryDirectory() as folder:
        tables = tables_in(Path(folder), "mixed")
        fetcher, user = tables.fetcher, tables.by_name["user"]
        for step in range(2):
            fetched = fetcher.plan([[batch(step)[0][name]] for name in tables.by_name])
            fetcher.bring(lambda fetched=fetched: fetched).release()
            rows = fetcher.read(fetched)
            fetcher.step(fetched, rows, [[own] for own in rows])
            user.commit()
        user.rollback(user.last_commit - 1)
        for table in tables.by_name.values():
            records_of(table)
            table.close()


def main() -> None:
    warm_up()
    say("ready")
    for line in sys.stdin:
        if not (number := os.fork()):
            try:
                say(f"pid {os.getpid()}")
                run(**json.loads(line))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(number, 0)
        say(f"exit {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()
