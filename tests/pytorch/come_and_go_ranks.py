"""Random programs of tables whose rows come and go, which several ranks share, beside one table with the same segments.

A program has lives. Each life has its own number of ranks, so rows and counters move to other ranks between lives. What
is trained does not depend on the number of ranks: they take the blocks of a step in turn. `play` is one life on one
rank, and `Oracle` is what must come of all lives, by the verbs of `Table` only.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import embedrock as er
import embedrock.torch as ert
from embedrock.batch.gradients import RowGradients
from embedrock.batch.ids import owners
from embedrock.table.table import rows_of
from lifecycles import whole_of
from suites import records_of

DIM, SPREAD, BLOCK = 3, 900, 24
RULES = (er.SGD(lr=0.5), er.Adam(lr=0.1), er.Adagrad(lr=0.2))
NUMBERS = ("admitted", "evicted", "forgotten", "gradients_dropped", "gradients_shared", "pending", "rows_touched")


@dataclass(frozen=True)
class Life:
    """A life: its number of ranks, and its acts, each with a seed of its own. It ends with a save, or without."""

    ranks: int
    acts: tuple[tuple[str, int], ...]
    is_saved: bool


@dataclass(frozen=True)
class Program:
    """A table, and what is done with it."""

    seed: int
    rule: er.Rule
    dtype: str
    admission: er.Admission | None
    eviction: er.Eviction | None
    on_disk: bool
    positions: bool
    depth: int
    lives: tuple[Life, ...]

    @property
    def options(self) -> dict[str, Any]:
        return {"init": er.Uniform(-1, 1), "seed": self.seed, "admission": self.admission, "eviction": self.eviction}


def drawn(seed: int, most_ranks: int) -> Program:
    """Draw a program."""
    rng = random.Random(seed)
    admission = er.Admission(
        rng.choice((1, 2, 3)),
        within=rng.choice((None, 4, 12)),
        default=rng.choice(("first", "zeros", "shared", "shared")),
        **rng.choice(({}, {"sketch": "64KiB"})),
    )
    eviction = er.Eviction(
        max_rows=rng.choice((None, 300, 700)),
        idle=rng.choice((5, 20, "90s")),
        by=rng.choice(("use", "recency", "age")),
        half_life=rng.choice((2, 1000)),
        keep=[5 * 7919, 11],
    )
    have = rng.choice(("admission", "eviction", "both", "both"))
    on_disk = rng.random() < 0.5
    lives = []
    for number in range(rng.choice((2, 3, 4))):
        least = 2 if on_disk and number == 0 and most_ranks > 1 else 1  # a table that one rank made has no parts
        names = [rng.choice(ACTS) for _ in range(rng.randint(1, 4))]
        if "forget" in names:  # rows that were looked up may be stepped, and stay
            names = [name for name in names if name != "look"]
        acts = tuple((name, rng.randrange(2**31)) for name in names)
        lives.append(Life(rng.randint(least, most_ranks), (("train", rng.randrange(2**31)), *acts), rng.random() < 0.8))
    return Program(
        seed,
        rng.choice(RULES),
        rng.choice(("float32", "float32", "bfloat16")),
        None if have == "eviction" else admission,
        None if have == "admission" else eviction,
        on_disk,
        rng.random() < 0.2,
        rng.choice((0, 0, 1, 3)),
        tuple(lives),
    )


def block_of(seed: int, place: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of a block, with repeats, and a gradient for each: float32 (n, DIM)."""
    rng = np.random.default_rng([seed, place])
    count = int(rng.integers(0, BLOCK + 1))
    ids = np.where(rng.random(count) < 0.4, rng.integers(0, 30, count), rng.integers(0, SPREAD, count)) * 7919
    return ids, rng.normal(size=(count, DIM)).astype(np.float32)


def steps_of(seed: int) -> list[int]:
    """Return the number of blocks of each step."""
    rng = random.Random(seed)
    return [rng.choice((1, 2, 3, 4, 7)) for _ in range(rng.randint(3, 12))]


def forgotten_of(seed: int) -> np.ndarray:
    return np.unique(np.random.default_rng(seed).integers(0, SPREAD, 30)) * 7919


def time_of(program: Program, steps: int, place: int) -> int | None:
    """Return the time of a block's events, in seconds, where the table goes by it; `steps` were made before."""
    is_by_time = program.eviction is not None and isinstance(program.eviction.idle, str)
    return 10**9 + 10 * steps + place % 7 if is_by_time else None


EVERY = np.arange(-3, SPREAD + 3) * 7919


class Player:
    """One rank of a life."""

    def __init__(self, program: Program, life: Life, number: int, rank: int, group: Any, folder: str) -> None:
        self.program, self.life, self.rank, self.folder = program, life, rank, Path(folder)
        options = dict(program.options)
        if program.on_disk:
            options |= {"path": self.folder / "t.rock", "memory": "1MiB", "reshard": "auto", "keep": 3}
        kind = getattr(torch, program.dtype)
        self.layer = ert.Embedding(None, DIM, dtype=kind, sharded=group, positions=program.positions, **options)
        self.place = rank  # of the next block of a step
        rule: Any = program.rule
        given = {field.name: getattr(rule, field.name) for field in fields(rule)}
        self.rows = getattr(ert, type(rule).__name__)(self.layer, **given)
        if any(one.is_saved for one in program.lives[:number]):
            ert.load(self.layer, self.folder / "saved")

    def train(self, seed: int) -> None:
        batches = []
        for step, count in enumerate(steps_of(seed)):
            for first in range(0, count, self.life.ranks):
                ids, grads = block_of(seed + step, first + self.rank)
                there = slice(None if first + self.rank < count else 0)
                batches.append((ids[there], grads[there], first + self.life.ranks >= count))
        self._train(batches)

    def _train(self, batches: Sequence[tuple[np.ndarray, np.ndarray, bool]]) -> None:
        """Train by ids and gradients of batches. The last batch of a step says so."""
        depth = self.program.depth
        for ids, grads, is_last in ert.prefetch(batches, {self.layer: lambda one: one[0]}, depth) if depth else batches:
            place = self.place if len(ids) else 0
            out = self.layer(torch.from_numpy(ids), time=time_of(self.program, self.layer.table.steps, place))
            out.backward(torch.from_numpy(grads).to(out.dtype))
            self.place += self.life.ranks
            if is_last:
                self.step()
                self.place = self.rank

    def unevenly(self, seed: int) -> None:
        """Train by batches of which each rank has another number."""
        with ert.uneven(self.layer):
            self._train([(*block_of(seed + step, self.rank), True) for step in range(3 - self.rank)])
        self.layer.handle.sharing  # noqa: B018  # waits until all have left: verbs of tables do not

    def step(self) -> None:
        handle: Any = self.layer.handle
        if self.life.ranks == 3:  # the mean of three ranks cannot be undone to the bit from outside
            behind = handle.grad._behind
            behind.rows = handle.pending.grads = replace(behind.rows, factor=1.0)
        else:
            handle.grad *= self.life.ranks
        self.rows.step()
        self.rows.zero_grad()

    def forget(self, seed: int) -> None:
        ids = forgotten_of(seed)
        self.layer.table.forget(ids[owners(ids, self.life.ranks, bits_of(self.layer.table)) == self.rank])

    def commit(self, seed: int) -> None:
        if self.program.on_disk:
            self.layer.table.commit(step=self.layer.table.steps, wait=bool(seed % 2))

    def look(self, seed: int) -> None:
        """Look at rows between a backward and its step, which changes nothing."""
        with torch.no_grad():
            self.layer(torch.from_numpy(block_of(seed, self.rank)[0]))

    def result(self) -> dict[str, Any]:
        with torch.no_grad():
            seen = self.layer(torch.from_numpy(EVERY)).float().numpy()
        table = self.layer.table
        lifecycle: Any = rows_of(table).lifecycle
        stats = table.stats()
        return {
            "seen": seen,
            "records": records_of(table),
            "state": lifecycle.state(),
            "stats": {name: stats[name] for name in NUMBERS if name in stats},
            "steps": (table.steps, lifecycle.steps),
        }

    def end(self) -> None:
        if self.life.is_saved:
            ert.save(self.layer, self.folder / "saved", step=self.layer.table.steps)


ACTS = ("train", "train", "train", "unevenly", "forget", "commit", "look")


def bits_of(table: er.Table) -> int:
    return table.spec.segments.bit_length() - 1


def play(rank: int, program: Program, number: int, folder: str) -> dict[str, Any] | None:
    """Play a life on one rank; None on a rank that it does not have."""
    life = program.lives[number]
    group: Any = dist.new_group(list(range(life.ranks))) if dist.is_initialized() else True
    if rank >= life.ranks:
        return None
    try:
        with pytest.warns() if not dist.is_initialized() else pytest.MonkeyPatch.context():
            player = Player(program, life, number, rank, group, folder)
        for name, seed in life.acts:
            getattr(player, name)(seed)
        found = player.result()
        player.end()
        if dist.is_initialized():
            dist.barrier(group)
        player.layer.table.close()
        return found
    except BaseException as error:
        error.add_note(f"life {number} of {program}, on rank {rank}")
        raise


# ---------------------------------------------------------------- what must come of it


class Oracle:
    """One table alone, in RAM."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.table = self.made()
        self.saved, self.is_saved = self.table.state(), False

    def made(self) -> er.Table:
        options = {**self.program.options, "rule": self.program.rule, "dtype": self.program.dtype}
        return er.Table(None, DIM, segments=None, **options)

    def live(self, life: Life) -> None:
        for name, seed in life.acts:
            if name != "look":
                getattr(self, name)(seed, life)

    def end(self, life: Life) -> None:
        if life.is_saved:
            self.saved, self.is_saved = self.table.state(), True
        self.table = self.made()
        self.table.load_state(self.saved)

    def train(self, seed: int, life: Life) -> None:
        for step, count in enumerate(steps_of(seed)):
            blocks = [block_of(seed + step, place) for place in range(count)]
            time = self._time(blocks)
            if self.program.positions:  # those of all ranks are one batch
                rounds = [blocks[first : first + life.ranks] for first in range(0, count, life.ranks)]
                blocks = [tuple(map(np.concatenate, zip(*each, strict=True))) for each in rounds]
            self._step(blocks, time)

    def _time(self, blocks: Sequence[Any]) -> int | None:
        places = [place if len(ids) else 0 for place, (ids, _) in enumerate(blocks)]
        times = [time_of(self.program, self.table.steps, place) for place in places]
        return None if None in times else max(times)  # pyright: ignore

    def unevenly(self, seed: int, life: Life) -> None:
        for step in range(3):
            blocks = [block_of(seed + step, rank) for rank in range(life.ranks) if step < 3 - rank]
            time = self._time(blocks)
            if self.program.positions:
                blocks = [tuple(map(np.concatenate, zip(*blocks, strict=True)))]
            self._step(blocks, time)

    def _step(self, blocks: Sequence[Any], time: int | None) -> None:
        made = [self.table.sum(self.table.plan(ids), in_dtype(grads, self.program.dtype)) for ids, grads in blocks]
        self.table.step(RowGradients.sum_of(made), time=time)

    def forget(self, seed: int, life: Life) -> None:
        self.table.forget(forgotten_of(seed))

    def commit(self, seed: int, life: Life) -> None:
        if self.program.on_disk and not self.is_saved:  # otherwise the next life loads what was saved
            self.saved = self.table.state()


def in_dtype(numbers: np.ndarray, dtype: str) -> np.ndarray:
    return torch.from_numpy(numbers).to(getattr(torch, dtype)).float().numpy()


def check_life(oracle: Oracle, found: Sequence[Mapping[str, Any]]) -> None:
    """Fail unless ranks have what one table has, to the bit."""
    table, ranks = oracle.table, len(found)
    seen, (ids, records) = table.lookup(EVERY), records_of(table)
    lifecycle: Any = rows_of(table).lifecycle
    of = owners(ids, ranks, bits_of(table))
    for rank, one in enumerate(found):
        np.testing.assert_array_equal(one["seen"], seen)
        np.testing.assert_array_equal(one["records"][0], ids[of == rank])
        np.testing.assert_array_equal(one["records"][1], records[of == rank])
        assert one["steps"] == (table.steps, lifecycle.steps)
        assert one["state"].get("residents_shared", np.zeros(0)).tobytes() == (
            b"" if lifecycle.shared is None else lifecycle.shared.tobytes()
        )
    stats = table.stats()
    for name in found[0]["stats"]:
        total = sum(one["stats"][name] for one in found)
        assert total == stats[name] or stats[name] == -1, (name, total, stats[name])
    assert whole_of([one["state"] for one in found]) == whole_of([lifecycle.state()])
