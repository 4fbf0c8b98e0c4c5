"""What the user can choose, and what it is if not chosen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# Models, and what the width of their rows must be a multiple of.
DIM_MULTIPLES = {"mf": 1, "gmf": 1, "neumf": 8}


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Options of either demo.

    Attributes:
        model: a name in `DIM_MULTIPLES`.
        dim: width of the rows.
        batch_size: interactions in a batch.
        lr: learning rate of Adam.
        seed: of data, first values and negatives.
        compare: run PyTorch's own embeddings as well.
        threads: of PyTorch (or TensorFlow) and of Embedrock each; None: their own choice.
    """

    model: str
    dim: int = 64
    batch_size: int = 8192
    lr: float
    seed: int = 0
    compare: bool = True
    threads: int | None = None


@dataclass(frozen=True, kw_only=True)
class ClickOptions(DemoOptions):
    """Options of the demo on planted clicks.

    Attributes:
        users, items: rows of the two tables.
        steps: batches to train on.
        path: folder of tables and checkpoints, which stays; None: one that is removed when the training is done.
        memory: RAM of both tables together, bytes; None: a tenth of what the rows trained take.
        in_ram: keep the tables in RAM.
        keras: train with Keras on TensorFlow.
    """

    model: str = "mf"
    lr: float = 0.005
    users: int = 20_000_000
    items: int = 2_000_000
    steps: int = 3000
    path: Path | None = None
    memory: int | None = None
    in_ram: bool = False
    keras: bool = False


@dataclass(frozen=True, kw_only=True)
class LogOptions(DemoOptions):
    """Options of the demo on a log of the user's own.

    Attributes:
        data: the file.
        epochs: passes over it.
    """

    data: Path
    model: str = "neumf"
    lr: float = 0.003
    epochs: int = 12
