"""A model before it is made: its tables, and everything else but what keeps their rows. No framework is needed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import embedrock as er

FIRST_STD = 0.01  # of the rows' first values, as in the paper
SCORE_PAIRS = 1 << 18  # pairs that are scored at a time ...
DISK_SCORE_PAIRS = 1 << 12  # ... and where their rows have to fit a cache


@dataclass(frozen=True)
class EmbeddingSpec:
    """An embedding before it is made: how large, its first values, and where its rows are.

    Attributes:
        rows, dim: how many rows, and their width.
        std: standard deviation of the first values.
        seed: of the first values.
        memory: the most bytes of RAM for a table of Embedrock, which then follow the rows touched (a hashed
            directory); None: Embedrock's own choice.
        path: where a table of Embedrock lies on disk; None: in RAM.
    """

    rows: int
    dim: int
    std: float
    seed: int
    memory: int | None
    path: Path | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the float32 weights of all rows."""
        return self.rows * self.dim * 4

    @property
    def first_values(self) -> er.Normal:
        """What rows start with."""
        return er.Normal(std=self.std)

    @property
    def placement(self) -> dict[str, Any]:
        """Arguments of Embedrock's layers that say where the rows are."""
        hashed = {"directory": "hashed"} if self.path is None and self.memory is not None else {}
        return {"path": self.path, "memory": self.memory, **hashed}


@dataclass(frozen=True)
class ModelSpec:
    """A model before it is made: everything but what keeps its rows.

    Args:
        model: a name in `MODELS`.
        users, items: rows of its two tables.
        dim: width of their rows.
        lr: learning rate of Adam, for rows and dense weights.
        seed: of all first values.
        budgets: RAM of the two tables, as for `EmbeddingSpec`.
        folder: where the tables of Embedrock lie on disk; None: in RAM.
    """

    model: str
    users: int
    items: int
    dim: int
    lr: float
    seed: int
    budgets: tuple[int | None, int | None] = (None, None)
    folder: Path | None = None

    @property
    def embeddings(self) -> tuple[EmbeddingSpec, EmbeddingSpec]:
        """The user and the item table."""
        user_seed, item_seed = np.random.SeedSequence(self.seed).generate_state(2).tolist()
        user_path, item_path = (self.folder and self.folder / name for name in ("users.rock", "items.rock"))
        return (
            EmbeddingSpec(self.users, self.dim, FIRST_STD, user_seed, self.budgets[0], user_path),
            EmbeddingSpec(self.items, self.dim, FIRST_STD, item_seed, self.budgets[1], item_path),
        )

    @property
    def score_pairs(self) -> int:
        """How many pairs are scored at a time."""
        return SCORE_PAIRS if self.folder is None else DISK_SCORE_PAIRS
