"""Settings over RAM and disk, drawn by a seed: tables, batches, memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from embedrock.initializers import Zeros
from embedrock.planner.zipf import expected_misses
from embedrock.rules import Adam
from embedrock.spec import Spec
from embedrock.tiers.placing import memory_for

TABLES = (1, 26)
DIMS = (16, 32, 64, 128, 256)
LEAST_BATCH, MOST_BATCH = 512, 65_536
ZIPF = (0.8, 1.3)
LEAST_SHARE = 0.02  # of a table's records that `memory=` has
IN_RAM = 4  # one setting in so many is in RAM
NUMBERS = 1 << 22  # of a batch of all tables, at most
LEAST_BYTES, MOST_BYTES = 32 << 20, 256 << 20  # of the records of all tables, but where a small share must hold batches
BATCHES_HELD = 2.2  # by a cache, at least
IDS, LEAST_STEPS, MOST_STEPS = 1_000_000, 24, 150  # before the steps that count
ROUNDS = 6  # of steps that count


@dataclass(frozen=True)
class Setting:
    """Tables that are alike, and what they are asked for.

    Attributes:
        tables: how many.
        rows, dim: of each.
        batch: ids of each in a step.
        zipf: exponent of their popularity.
        share: of a table's records that its memory has.
        memory: bytes of each; 0: in RAM.
        steps: before those that count.
        together: steps of a round.
    """

    tables: int
    rows: int
    dim: int
    batch: int
    zipf: float
    share: float
    memory: int
    steps: int
    together: int

    @property
    def middle(self) -> int:
        """Steps up to the one in the middle of those that count."""
        return self.steps + ROUNDS * self.together // 2

    @property
    def middles(self) -> list[int]:
        """Steps up to the one in the middle of each round."""
        return [self.steps + number * self.together + (self.together + 1) // 2 for number in range(ROUNDS)]

    @property
    def nbytes(self) -> int:
        """Bytes of the tables in RAM, and about those of the logs of rows that leave caches."""
        record = 3 * 4 * self.dim
        if not self.memory:
            return self.tables * self.rows * record
        steps = self.steps + ROUNDS * self.together
        left = expected_misses(self.rows, self.zipf, self.batch, self.memory // record)
        return self.tables * (self.memory + int(left * steps * record))

    @classmethod
    def of_line(cls, line: Mapping[str, Any]) -> Setting:
        """Return the one that a line of results is of."""
        return cls(**{field.name: line[field.name] for field in fields(cls)})

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return asdict(self)

    def demands(self) -> dict[str, dict[str, Any]]:
        """Return what `er.plan` is told of its tables."""
        table = {"rows": self.rows, "dim": self.dim, "rule": "adam", "zipf": self.zipf, "memory": self.memory or "RAM"}
        return {f"t{number}": table for number in range(self.tables)}


def drawn(count: int, seed: int) -> list[Setting]:
    """Draw settings. Each seed has others."""
    random = np.random.default_rng(seed)
    return [_drawn(random, number) for number in range(count)]


def _drawn(random: np.random.Generator, number: int) -> Setting:
    tables, dim = TABLES[number % 5 in (1, 3)], int(random.choice(DIMS))
    most = min(MOST_BATCH, NUMBERS // (tables * dim))
    batch = int(_between(random, LEAST_BATCH, max(LEAST_BATCH, most)))
    zipf, share = float(random.uniform(*ZIPF)), float(_between(random, LEAST_SHARE, 1.0))
    in_ram, nbytes = number % IN_RAM == 0, _between(random, LEAST_BYTES, MOST_BYTES)
    share = 1.0 if in_ram else share
    spec = Spec(None, dim, "float32", Adam(), Zeros(), 0)
    used = expected_misses(1 << 30, zipf, batch, 0)
    least = 0 if in_ram else memory_for(spec, int(used * BATCHES_HELD))
    rows = math.ceil(max(nbytes / tables, least / share) / spec.record_bytes)
    memory = 0 if in_ram else max(least, int(share * rows * spec.record_bytes))
    steps = int(np.clip(IDS // (batch * tables), LEAST_STEPS, MOST_STEPS))
    return Setting(tables, rows, dim, batch, round(zipf, 3), share, memory, steps, max(2, steps // (4 * ROUNDS)))


def _between(random: np.random.Generator, low: float, high: float) -> float:
    return math.exp(random.uniform(math.log(low), math.log(high)))
