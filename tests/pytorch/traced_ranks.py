"""The gate with ranks: random programs of training that several processes share, beside one table each, alone in RAM.

A program is drawn from its seed, and is the same for any number of ranks: so are the blocks that it trains by, which
ranks take in turn. `play` runs it on one rank; `Oracle` is what must come of it, by the verbs of `Table` only.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import embedrock as er
import embedrock.torch as ert
from embedrock.batch.gradients import RowGradients
from embedrock.batch.ids import owners
from embedrock.torch.training.sharing import RankGroup
from same_tables import RULES
from suites import records_of

ROWS, BLOCK, TABLES = 400, 8, 3  # rows, ids of a block, tables at most
KINDS: tuple[Any, ...] = (True, False, "rank 0", "last rank")
EVENTS = (
    "train",
    "train",
    "train",
    "train",
    "unevenly",
    "one evaluates",
    "a wrong id",
    "not a number",
    "save",
    "again",
)


@dataclass(frozen=True)
class Layout:
    """One table of a program.

    Attributes:
        kind: who has its rows: one of `KINDS`.
        slots: rows that fit its memory, on disk; 0: it is in RAM.
        lookups: how often a batch looks it up.
        bags: how many ids a bag has; 0: there are no bags.
    """

    kind: Any
    slots: int
    lookups: int
    bags: int
    dim: int
    dtype: str
    is_open: bool

    def sharded(self, ranks: int) -> Any:
        return f"rank {ranks - 1}" if self.kind == "last rank" else self.kind

    def is_here(self, ids: np.ndarray, rank: int, ranks: int) -> np.ndarray:
        """Return which of some ids a rank has the rows of."""
        sharded = self.sharded(ranks)
        return owners(ids, ranks) == rank if sharded is True else np.full(len(ids), sharded in (False, f"rank {rank}"))

    def ids(self, numbers: np.ndarray) -> np.ndarray:
        """Return row numbers as ids: the open ones lie far apart."""
        with np.errstate(over="ignore"):
            return numbers * np.int64(-7046029254386353131) if self.is_open else numbers


@dataclass(frozen=True)
class Program:
    """What is trained, how, and what is done: names of `EVENTS`, each with a seed of its own."""

    seed: int
    tables: tuple[Layout, ...]
    rule: er.Rule
    positions: bool
    depth: int
    threads: int
    is_near: bool
    acts: tuple[tuple[str, int], ...]


def drawn_program(seed: int, length: int) -> Program:
    """Draw a program of so many acts."""
    rng = random.Random(seed)
    rule, positions = rng.choice(RULES), rng.random() < 0.25
    tables = []
    for _ in range(rng.randint(1, TABLES)):
        kind = rng.choice(KINDS)
        on_disk = kind is not False and rng.random() < 0.5
        table = Layout(
            kind,
            slots=rng.choice((150, 250)) if on_disk else 0,
            lookups=rng.choice((1, 1, 2)),
            bags=rng.choice((0, 0, 2)),
            dim=rng.choice((1, 3, 8)),
            dtype=rng.choice(("float32", "float32", "bfloat16", "float16")),
            is_open=rng.random() < 0.5,
        )
        tables.append(table)
    acts = [(rng.choice(EVENTS), rng.randrange(2**31)) for _ in range(length)]
    acts = (("train", seed), *acts, ("train", seed + 1))
    return Program(
        seed, tuple(tables), rule, positions, rng.choice((0, 1, 2, 5)), rng.randint(1, 3), rng.random() < 0.7, acts
    )


Block = list[list[np.ndarray]]  # row numbers by table, by lookup


def drawn_block(program: Program, seed: int, place: int) -> Block:
    """Draw what one block looks up; now and then a table is not used, or ids are few."""
    rng = np.random.default_rng([seed, place])
    found = []
    for table in program.tables:
        count = 0 if rng.random() < 0.15 else int(rng.integers(1, BLOCK // 2 + 1)) * 2
        found.append([np.minimum(rng.zipf(1.3, count) - 1, ROWS - 1) for _ in range(table.lookups)])
    return found


def no_block(program: Program) -> Block:
    return [[np.empty(0, np.int64)] * table.lookups for table in program.tables]


def weight_of(block: Block, table: int, lookup: int, layout: Layout) -> np.ndarray:
    """Return by how much the loss weighs what a lookup returned: float32 (ids or bags, dim), powers of two."""
    numbers = block[table][lookup]
    numbers = numbers[:: layout.bags] if layout.bags else numbers
    powers = (numbers[:, None] * 5 + np.arange(layout.dim) * 3 + lookup) % 7 - 4
    return (np.float32(2.0) ** powers * np.where(powers % 2, 1, -1)).astype(np.float32)


def drawn_steps(seed: int) -> list[int]:
    """Draw how many blocks each step has."""
    rng = random.Random(seed)
    return [rng.choice((1, 2, 3, 4, 4, 6)) for _ in range(rng.randint(1, 4))]


def drawn_lengths(seed: int) -> list[int]:
    """Draw how many batches each of up to four ranks has, where they differ."""
    rng = random.Random(seed)
    return [rng.randint(0, 3) for _ in range(4)]


def clip_of(seed: int) -> float:
    """Draw what gradients are multiplied by before a step."""
    return random.Random(seed).choice((1.0, 1.0, 0.5, -2.0))


# ---------------------------------------------------------------- one rank


class Net(nn.Module):
    """The layers of a program."""

    def __init__(self, program: Program, ranks: int, folder: Path) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for number, table in enumerate(program.tables):
            options: dict[str, Any] = {
                "init": er.Uniform(-1, 1),
                "seed": number,
                "dtype": getattr(torch, table.dtype),
                "sharded": table.sharded(ranks),
                "positions": program.positions,
            }
            rows = None if table.is_open else ROWS
            if table.slots:
                options["path"] = folder / f"{number}.rock"
                options["memory"] = er.Table(
                    rows, table.dim, dtype=table.dtype, rule=program.rule, path=None
                ).memory_for(table.slots)
            make = ert.EmbeddingBag if table.bags else ert.Embedding
            options |= {"mode": "sum"} if table.bags else {}
            self.layers.append(make(rows, table.dim, **options))


class Player:
    """One rank that plays a program."""

    def __init__(self, program: Program, rank: int, ranks: int, folder: str) -> None:
        self.program, self.rank, self.ranks, self.folder = program, rank, ranks, Path(folder)
        self.seen: list[np.ndarray] = []
        self.saved = 0
        self.begin()

    def begin(self) -> None:
        self.net = Net(self.program, self.ranks, self.folder)
        rule: Any = self.program.rule
        options = {field.name: getattr(rule, field.name) for field in fields(rule)}
        self.rows = getattr(ert, type(rule).__name__)(self.net, **options)

    # ---- acts

    def train(self, seed: int) -> None:
        table_locks, last = [], []
        for step, blocks in enumerate(drawn_steps(seed)):
            own = [self._block(seed + step, place) for place in self._places(blocks)]
            table_locks += own
            last += [step if place == len(own) - 1 else None for place in range(len(own))]
        for block, step in zip(self._ahead(table_locks), last, strict=True):
            self._backward(block)
            if step is not None:
                self._step(clip_of(seed + step))

    def _places(self, blocks: int) -> Iterator[int | None]:
        """Go through this rank's blocks of a step; None: others have one yet."""
        for first in range(0, blocks, self.ranks):
            yield first + self.rank if first + self.rank < blocks else None

    def _block(self, seed: int, place: int | None) -> Block:
        return no_block(self.program) if place is None else drawn_block(self.program, seed, place)

    def unevenly(self, seed: int) -> None:
        if self.program.positions:  # other orders than those of one batch
            return
        count = drawn_lengths(seed)[self.rank]
        with ert.uneven(self.net):
            for block in self._ahead([self._block(seed, 10 * step + self.rank) for step in range(count)]):
                self._backward(block)
                self._step(clip_of(seed))

    def one_evaluates(self, seed: int) -> None:
        """Let one rank look rows up, then all."""
        with ert.uneven(self.net), torch.no_grad():
            if self.rank == seed % self.ranks:
                self._looked_at(seed)
        self._looked_at(seed)

    def _looked_at(self, seed: int) -> None:
        with torch.no_grad():
            for table, layer in zip(self.program.tables, self.net.layers, strict=True):
                ids = torch.from_numpy(table.ids(looked_at(seed)))
                self.seen.append(layer(ids[:, None] if table.bags else ids).float().numpy())

    def a_wrong_id(self, seed: int) -> None:
        """Be refused a lookup, on the rank that asks for a row that there is not, and on all where rows are shared."""
        for table, layer in zip(self.program.tables, self.net.layers, strict=True):
            bad = not table.is_open and self.rank == seed % self.ranks
            ids = torch.from_numpy(table.ids(looked_at(seed))) + (ROWS if bad else 0)
            is_told = not table.is_open and (bad or table.kind is not False)
            with pytest.raises((er.IdError, er.OtherRankError)) if is_told else contextlib.nullcontext():
                layer(ids[:, None] if table.bags else ids)

    def not_a_number(self, seed: int) -> None:
        """Be refused a step on all ranks, as one has brought NaN."""
        self._backward(self._block(seed, self.rank), math_of=np.nan if self.rank == seed % self.ranks else 1.0)
        if any(handle.grad is not None and not torch.isfinite(handle.grad) for handle in ert.handles(self.net)):
            with pytest.raises(er.NonFiniteGradientError):
                self.rows.step()
        self.rows.zero_grad()

    def save(self, seed: int) -> None:
        self.saved += 1
        ert.save(self.net, self.folder / "checkpoints", step=self.saved)

    def again(self, seed: int) -> None:
        """Begin again where it was saved last."""
        self.close()
        self.begin()
        with contextlib.suppress(ert.NoCheckpointError):
            self.saved = ert.load(self.net, self.folder / "checkpoints")

    # ---- what they are made of

    def _ahead(self, blocks: list[Block]) -> Any:
        asked: dict[Any, Callable[[Block], Any]] = {
            layer: self._ids_of(number) for number, layer in enumerate(self.net.layers)
        }
        return ert.prefetch(blocks, asked, self.program.depth) if self.program.depth else blocks

    def _ids_of(self, number: int) -> Callable[[Block], Any]:
        table = self.program.tables[number]
        return lambda block: tuple(table.ids(numbers) for numbers in block[number])

    def _backward(self, block: Block, math_of: float = 1.0) -> None:
        outs, grads = [], []
        for number, (table, layer) in enumerate(zip(self.program.tables, self.net.layers, strict=True)):
            for lookup, numbers in enumerate(block[number]):
                if table.kind is False and not len(numbers) and outs:
                    continue  # of rows that each rank has all of nothing need be done, but that there is a backward
                ids = torch.from_numpy(table.ids(numbers))
                out = layer(ids.reshape(-1, table.bags) if table.bags else ids)
                weight = torch.from_numpy(weight_of(block, number, lookup, table)) * math_of
                outs.append(out)
                grads.append(
                    weight.to(out.dtype) if table.bags else (weight * out.detach().float().clamp(-1, 1)).to(out.dtype)
                )
        torch.autograd.backward(outs, grads)

    def _step(self, clip: float) -> None:
        for handle in ert.handles(self.net):
            if handle.grad is not None and is_power_of_two(self.ranks):
                handle.grad *= self.ranks * clip
        self.rows.step()
        self.rows.zero_grad()

    def close(self) -> None:
        if self.ranks > 1:
            dist.barrier()  # others may need the rows still
        for table in self.tables:
            table.close()

    @property
    def tables(self) -> list[er.Table]:
        layers: Any = self.net.layers
        return [layer.table for layer in layers]

    def result(self) -> tuple[list[np.ndarray], list[tuple[int, np.ndarray, np.ndarray]]]:
        found = [(table.steps, *records_of(table)) for table in self.tables]
        self.close()
        return self.seen, found


def looked_at(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, ROWS, 20)


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


ACTS: dict[str, Callable[[Any, int], None]] = {
    "train": lambda one, seed: one.train(seed),
    "unevenly": lambda one, seed: one.unevenly(seed),
    "one evaluates": lambda one, seed: one.one_evaluates(seed),
    "a wrong id": lambda one, seed: one.a_wrong_id(seed),
    "not a number": lambda one, seed: one.not_a_number(seed),
    "save": lambda one, seed: one.save(seed),
    "again": lambda one, seed: one.again(seed),
}


def play(rank: int, program: Program, ranks: int, folder: str) -> Any:
    """Play a program on one rank; return what evaluations have seen, and each table's steps, ids and records here."""
    from embedrock.kernels.cpu import threads

    before = threads.get_threads()
    threads.set_threads(program.threads)
    with pytest.MonkeyPatch.context() as patch:
        if ranks > 1 and not program.is_near:
            world: Any = dist.group.WORLD
            patch.setattr(RankGroup.of(world).ranks, "_near", None)
        player, at = Player(program, rank, ranks, folder), ("", 0)
        try:
            for at in program.acts:
                ACTS[at[0]](player, at[1])
            return player.result()
        except BaseException as error:
            error.add_note(f"{program}, rank {rank} of {ranks}, in act {at}")
            raise
        finally:
            threads.set_threads(before)


# ---------------------------------------------------------------- what must come of it


class Oracle:
    """Tables alone, in RAM, that take the blocks one after the other."""

    def __init__(self, program: Program, ranks: int) -> None:
        self.program, self.ranks = program, ranks
        self.begin()
        self.saved = copy.deepcopy(self.tables)
        self.seen: list[list[np.ndarray]] = [[] for _ in range(ranks)]

    def begin(self) -> None:
        self.tables = [
            er.Table(
                None if table.is_open else ROWS,
                table.dim,
                rule=self.program.rule,
                dtype=table.dtype,
                init=er.Uniform(-1, 1),
                seed=number,
            )
            for number, table in enumerate(self.program.tables)
        ]

    def train(self, seed: int) -> None:
        for step, count in enumerate(drawn_steps(seed)):
            blocks = [drawn_block(self.program, seed + step, place) for place in range(count)]
            blocks += [no_block(self.program)] * (-len(blocks) % self.ranks)
            rounds = [blocks[first : first + self.ranks] for first in range(0, len(blocks), self.ranks)]
            self._step(rounds, clip_of(seed + step))

    def unevenly(self, seed: int) -> None:
        if self.program.positions:
            return
        lengths = drawn_lengths(seed)[: self.ranks]
        for step in range(max(lengths)):
            of_step = [
                drawn_block(self.program, seed, 10 * step + rank) for rank in range(self.ranks) if step < lengths[rank]
            ]
            self._step([of_step], clip_of(seed))

    def one_evaluates(self, seed: int) -> None:
        for rank in range(self.ranks):
            for _ in range(2 if rank == seed % self.ranks else 1):
                for layout, table in zip(self.program.tables, self.tables, strict=True):
                    rows = table.lookup(layout.ids(looked_at(seed)))
                    self.seen[rank].append(in_dtype(rows, layout.dtype))

    def a_wrong_id(self, seed: int) -> None:
        """Do nothing: it is refused."""

    not_a_number = a_wrong_id

    def save(self, seed: int) -> None:
        self.saved = copy.deepcopy(self.tables)

    def again(self, seed: int) -> None:
        self.tables = copy.deepcopy(self.saved)

    def _step(self, rounds: Sequence[Sequence[Block]], clip: float) -> None:
        scale = clip if is_power_of_two(self.ranks) else 1 / self.ranks
        for number, layout in enumerate(self.program.tables):
            table = self.tables[number]
            is_used = number == 0 or any(len(ids) for blocks in rounds for block in blocks for ids in block[number])
            if layout.kind is False and not is_used:
                continue
            sums = [one for blocks in rounds for one in self._brought(number, blocks)]
            table.step(RowGradients.sum_of(sums), scale=scale)

    def _brought(self, number: int, blocks: Sequence[Block]) -> list[RowGradients]:
        """Return what a backward of all ranks brings of a table, in the order in which it is added up."""
        lookups = range(self.program.tables[number].lookups - 1, -1, -1)  # autograd goes backwards
        if not self.program.positions:
            return [RowGradients.sum_of([self._summed(number, [block], k) for k in lookups]) for block in blocks]
        return [RowGradients.sum_of([self._summed(number, blocks, k) for k in lookups])]

    def _summed(self, number: int, blocks: Sequence[Block], lookup: int) -> RowGradients:
        layout, table = self.program.tables[number], self.tables[number]
        ids = layout.ids(np.concatenate([block[number][lookup] for block in blocks]))
        grads = np.concatenate([weight_of(block, number, lookup, layout) for block in blocks])
        rows = in_dtype(table.lookup(ids), layout.dtype).clip(-1, 1)  # or what 16 bits hold would not be enough
        grads = np.repeat(grads, layout.bags, axis=0) if layout.bags else grads * rows
        return table.sum(table.plan(ids), in_dtype(grads, layout.dtype))


def in_dtype(numbers: np.ndarray, dtype: str) -> np.ndarray:
    """Return numbers as a layer's output has them, or their gradients."""
    return torch.from_numpy(numbers).to(getattr(torch, dtype)).float().numpy()


def check_program(program: Program, ranks: int, found: Sequence[Any]) -> None:
    """Fail unless ranks that have played a program have what must come of it, to the bit."""
    oracle = Oracle(program, ranks)
    for name, seed in program.acts:
        ACTS[name](oracle, seed)
    for rank, (seen, tables) in enumerate(found):
        for ours, theirs in zip(seen, oracle.seen[rank], strict=True):
            np.testing.assert_array_equal(ours, theirs)
        for layout, table, (steps, ids, records) in zip(program.tables, oracle.tables, tables, strict=True):
            all_ids, all_records = records_of(table)
            holds = layout.is_here(all_ids, rank, ranks)
            if layout.sharded(ranks) in (True, False, f"rank {rank}"):  # others have nothing that is stepped
                assert steps == table.steps
            np.testing.assert_array_equal(ids, all_ids[holds])
            np.testing.assert_array_equal(records, all_records[holds])
