"""A model before it is made: its tables, and everything else but what keeps their rows. No framework is needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import embedrock as er
from embedrock.demo.data.examples import Examples, Impressions, Pairs

FIRST_STD = 0.01  # of the rows' first values, as in the NCF paper
SCORE_IDS = 1 << 18  # ids of a table that are scored at a time ...
DISK_SCORE_IDS = 1 << 12  # ... and where their rows have to fit a cache
STATE = 3  # columns of a record for each column of a row: weights and Adam's two states
SMALL_ROWS = 64  # of the tables of a small copy
ANY_IDS = 1 << 32  # rows of a table whose ids nobody has counted
TABLES = "model.rock"  # in the folder of a training


@dataclass(frozen=True)
class Feature:
    """What a table is for.

    Attributes:
        name: of its table.
        rows: how many there are; None: nobody knows, and any integer of 32 bits is an id.
        bag: ids of an example, whose rows are summed; None: one id of each example.
    """

    name: str
    rows: int | None
    bag: int | None = None


@dataclass(frozen=True)
class EmbeddingSpec:
    """An embedding before it is made: how large, and its first values.

    Attributes:
        feature: how many rows, and what they are for.
        dim: width of the rows.
        std: standard deviation of the first values.
        seed: of the first values.
    """

    feature: Feature
    dim: int
    std: float
    seed: int

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return self.feature.rows or ANY_IDS

    @property
    def weight_bytes(self) -> int:
        """Bytes of the float32 weights of all rows."""
        return self.rows * self.dim * 4

    @property
    def first_values(self) -> er.Normal:
        """What rows start with."""
        return er.Normal(std=self.std)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model before it is made: everything but what keeps its rows.

    Args:
        model: a name in the `MODELS` of a framework.
        dim: width of the rows of all tables.
        lr: learning rate of Adam, for rows and dense weights.
        seed: of all first values.
        memory: the most RAM for all tables of Embedrock together, bytes; None: Embedrock's own choice.
        folder: where the tables of Embedrock lie on disk; None: in RAM.
    """

    model: str
    dim: int
    lr: float
    seed: int
    memory: int | None = None
    folder: Path | None = None

    @property
    def features(self) -> tuple[Feature, ...]:
        """What it has tables for."""
        raise NotImplementedError

    @property
    def embeddings(self) -> tuple[EmbeddingSpec, ...]:
        """Its tables."""
        features = self.features
        seeds = np.random.SeedSequence(self.seed).generate_state(len(features)).tolist()
        return tuple(
            EmbeddingSpec(feature, self.dim, FIRST_STD, seed) for feature, seed in zip(features, seeds, strict=True)
        )

    def group(self) -> er.Group:
        """Make the group of its tables, or open the one in its folder."""
        return er.Group(memory=self.memory, path=self.folder and self.folder / TABLES)

    @property
    def record_bytes(self) -> int:
        """Bytes of a row with its states."""
        return self.dim * STATE * 4

    @property
    def score_ids(self) -> int:
        """How many ids of a table are scored at a time."""
        return SCORE_IDS if self.folder is None else DISK_SCORE_IDS

    def small(self) -> ModelSpec:
        """Return a small copy of it in RAM."""
        return replace(self, folder=None, memory=None)

    def blank(self, count: int) -> Examples:
        """Return examples that it takes, of ids that every copy of it has."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PairSpec(ModelSpec):
    """A model that scores pairs of a user and an item.

    Args:
        users, items: rows of its two tables.
    """

    users: int
    items: int

    @property
    def features(self) -> tuple[Feature, ...]:
        """Users and items."""
        return Feature("users", self.users), Feature("items", self.items)

    def small(self) -> PairSpec:
        """Return a small copy of it in RAM."""
        return replace(self, users=SMALL_ROWS, items=SMALL_ROWS, folder=None, memory=None)

    def blank(self, count: int) -> Pairs:
        """Return pairs without a click."""
        ids = np.arange(count) % SMALL_ROWS
        return Pairs(ids, ids, np.zeros(count, np.float32))


@dataclass(frozen=True, kw_only=True)
class DlrmSpec(ModelSpec):
    """A DLRM, which scores impressions: Naumov et al., "Deep Learning Recommendation Model", 2019.

    Args:
        rows: of each of its tables; None: see `Feature`.
        bags: ids of an impression in each of its tables.
        numbers: how many numbers an impression has.
        bottom: widths of the hidden layers that the numbers go through; one as wide as the rows follows.
        top: widths of the hidden layers that score.
    """

    model: str = "dlrm"
    rows: tuple[int | None, ...]
    bags: tuple[int, ...]
    numbers: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]

    @property
    def features(self) -> tuple[Feature, ...]:
        """One for each table, numbered from 1 as in Criteo's description."""
        names = [f"feature{number:02d}" for number in range(1, len(self.rows) + 1)]
        return tuple(map(Feature, names, self.rows, self.bags))

    @property
    def score_ids(self) -> int:
        """How many ids of a table are scored at a time: lookups without a step need not fit a cache."""
        return SCORE_IDS

    def small(self) -> DlrmSpec:
        """Return a small copy of it in RAM."""
        rows = tuple(each and min(each, SMALL_ROWS) for each in self.rows)
        return replace(self, rows=rows, folder=None, memory=None)

    def blank(self, count: int) -> Impressions:
        """Return impressions without a click."""
        ids = tuple(np.zeros((count, bag), np.int64) for bag in self.bags)
        return Impressions(ids, np.zeros((count, self.numbers), np.float32), np.zeros(count, np.float32))
