"""What the user can choose, and what it is if not chosen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from embedrock.bench.harness.many_tables import BAGS, CARDINALITIES

# Models of pairs, and what the width of their rows must be a multiple of.
DIM_MULTIPLES = {"mf": 1, "gmf": 1, "neumf": 8}
# What `--full` means for options that were not given.
FULL = {"dim": 128, "max_rows": max(CARDINALITIES), "max_bag": max(BAGS), "memory": 4 << 30}


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Options of every demo.

    Attributes:
        dim: width of the rows.
        batch_size: examples in a batch.
        lr: learning rate of Adam.
        seed: of data, first values and negatives.
        compare: run PyTorch's own embeddings as well.
        threads: of PyTorch (or TensorFlow) and of Embedrock each; None: their own choice.
    """

    dim: int = 64
    batch_size: int = 8192
    lr: float
    seed: int = 0
    compare: bool = True
    threads: int | None = None


@dataclass(frozen=True, kw_only=True)
class SourceOptions(DemoOptions):
    """Options of a demo on an endless source of batches, whose tables may lie on disk.

    Attributes:
        steps: batches to train on; None: all that there are.
        path: folder of tables and checkpoints, which stays; None: one that is removed when the training is done.
        memory: RAM of all tables together, bytes; None: a tenth of what the rows trained take.
        in_ram: keep the tables in RAM.
    """

    # What must be the same for a training to go on. `steps` and `memory` may change.
    SAME: ClassVar[tuple[str, ...]] = ("dim", "batch_size", "lr", "seed")
    FOLDER: ClassVar[str] = "demo"  # of a training without `path`, in the user's cache

    steps: int | None = None
    path: Path | None = None
    memory: int | None = None
    in_ram: bool = False

    @property
    def batches(self) -> int:
        """How many batches to train on."""
        return self.steps or 0

    @property
    def same(self) -> dict[str, Any]:
        """What must be the same for a training to go on, as plain JSON values."""
        plain = (int, float, str, bool)
        values = {name: getattr(self, name) for name in self.SAME}
        return {name: each if each is None or isinstance(each, plain) else str(each) for name, each in values.items()}


@dataclass(frozen=True, kw_only=True)
class ClickOptions(SourceOptions):
    """Options of the demo on planted clicks.

    Attributes:
        model: a name in `DIM_MULTIPLES`.
        users, items: rows of the two tables.
        keras: train with Keras on TensorFlow.
        ranks: processes that share the rows out, and train together.
    """

    SAME: ClassVar = ("keras", "model", "users", "items", "ranks", *SourceOptions.SAME)

    model: str = "mf"
    lr: float = 0.005
    users: int = 20_000_000
    items: int = 2_000_000
    steps: int | None = 3000
    keras: bool = False
    ranks: int = 1


@dataclass(frozen=True, kw_only=True)
class DlrmOptions(SourceOptions):
    """Options of the demo of DLRM.

    Attributes:
        dlrm: this demo.
        data: a log in Criteo's format; None: planted impressions.
        full: MLPerf's sizes, for what is not chosen otherwise.
        max_rows: the most rows of a table.
        max_bag: the most ids of a bag.
        ids_below: ids of a log are taken modulo this; None: as they are.
    """

    SAME: ClassVar = ("data", "full", "max_rows", "max_bag", "ids_below", *SourceOptions.SAME)
    FOLDER: ClassVar[str] = "demo-dlrm"

    dlrm: bool = True
    data: Path | None = None
    full: bool = False
    dim: int = 16
    batch_size: int = 2048
    lr: float = 0.005
    steps: int | None = None
    max_rows: int = 200_000
    max_bag: int = 10
    ids_below: int | None = None


@dataclass(frozen=True, kw_only=True)
class StreamOptions(DemoOptions):
    """Options of the demo on a stream whose items are born and die.

    Attributes:
        stream: this demo.
        data: a log whose items are the stream; None: a planted one.
        days: of the stream.
        steps_a_day: batches of each day.
        alive: items that are there at a time.
        life: days that an item is there.
        once: share of the impressions whose item is never shown again.
        png: file to draw the days to.
    """

    stream: bool = True
    data: Path | None = None
    dim: int = 16
    batch_size: int = 4096
    lr: float = 0.01
    days: int = 10
    steps_a_day: int = 150
    alive: int = 20_000
    life: int = 5
    once: float = 0.3
    png: Path | None = None


@dataclass(frozen=True, kw_only=True)
class LogOptions(DemoOptions):
    """Options of the demo on a log of the user's own.

    Attributes:
        data: the file.
        model: a name in `DIM_MULTIPLES`.
        epochs: passes over it.
    """

    data: Path
    model: str = "neumf"
    lr: float = 0.003
    epochs: int = 12
