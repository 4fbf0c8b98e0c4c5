"""Small models whose rows are on the device in one way or another, and the same training for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gpu_device import DEVICE, INTERPRETED
from torch import Tensor, nn

import embedrock as er
import embedrock.torch as ert
from embedrock.device import memory_for

ROWS, DIM, BATCH = 120, 6, 20
EVERYTHING = 1 << 30  # bytes that hold all rows of any table here


@dataclass(frozen=True)
class DrawnByHost(er.Normal):
    """The same first values, which the device does not know to draw: so the host plans."""


class Way(NamedTuple):
    """How a table is spread: near rows (None: all; 0: none), or with a directory."""

    name: str
    near_rows: int | None = None
    arguments: tuple[tuple[str, Any], ...] = ()


ALL_NEAR, NONE_NEAR = Way("all near"), Way("none near", 0)
SOME_NEAR = [Way("one near", 1), Way("some near", 17), Way("half near", 60)]
OF_HOST = (("directory", "hashed"), ("init", DrawnByHost(std=0.5)))
HOSTED = [
    Way("of the host", None, OF_HOST),
    Way("open ids of the host", None, (("rows", None), *OF_HOST[1:])),
    Way("of the host, some near", None, (*OF_HOST, ("device_memory", 1600))),
    Way("of the host, most near", None, (*OF_HOST, ("device_memory", 8000))),
]
HASHED = [
    Way("hashed", None, OF_HOST[:1]),
    Way("open ids", None, (("rows", None),)),
    Way("hashed, some near", None, (*OF_HOST[:1], ("device_memory", 1600))),
    Way("hashed, all near", None, (*OF_HOST[:1], ("device_memory", 1 << 16))),
]
OPEN = Way("open ids, all near", None, (("rows", None), ("device_memory", 1 << 16)))
WAYS = [ALL_NEAR, NONE_NEAR, *SOME_NEAR, *HOSTED, *HASHED, OPEN]


def memory_of(near: int | None) -> int:
    """Return the GPU memory that holds so many rows of a table here (None: all of them) under Adam."""
    return EVERYTHING if near is None else near and memory_for(er.Table(ROWS, DIM, rule=er.Adam()).spec, near)


def by_name(way: Way) -> str:
    return way.name


class Scaled(nn.Module):
    """The dense part: rows get gradients of products alone, which a GPU rounds as the CPU does. It does not so sums."""

    scale: Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, dtype=dtype))
        self.register_buffer("scale", torch.randn(DIM, dtype=dtype), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.hstack([(rows * self.scale).flatten(), self.weight])  # not torch.cat, which tests let fail


class Model(NamedTuple):
    rows: ert.Embedding
    whole: nn.Module
    step_rows: ert.RowOptimizer
    step_dense: torch.optim.Optimizer

    @property
    def table(self) -> er.Table:
        return self.rows.table

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.step_rows.zero_grad(set_to_none)
        self.step_dense.zero_grad(set_to_none)

    def step(self) -> None:
        self.step_rows.step()
        self.step_dense.step()

    def weights(self) -> np.ndarray:
        return self.table.lookup(np.arange(ROWS))


def make(way: Way | None, rule: str = "Adam", options: dict[str, Any] | None = None, **arguments: Any) -> Model:
    """Return a model whose rows are on the device, or (None) used by the CPU."""
    torch.manual_seed(0)
    options = {"lr": 0.05, **(options or {})}
    if way is not None:
        dtype = str(arguments.get("dtype", torch.float32)).removeprefix("torch.")
        spec = er.Table(ROWS, DIM, rule=getattr(er, rule)(**options), dtype=dtype).spec
        near = EVERYTHING if way.near_rows is None else way.near_rows and memory_for(spec, way.near_rows)
        # What has a directory has no rows near, unless its memory is given.
        arguments = {"device_memory": None if way.arguments else near, **dict(way.arguments), **arguments}
    arguments = {"init": er.Normal(std=0.5), **arguments}
    rows = ert.Embedding(arguments.pop("rows", ROWS), DIM, seed=5, **arguments)
    dense = Scaled(rows.dtype)
    whole = nn.Sequential(rows, dense)
    step_rows = getattr(ert, rule)(whole, **options)
    whole = whole if way is None else on_device(whole)
    return Model(rows, whole, step_rows, torch.optim.SGD(ert.dense_parameters(whole), lr=0.01))


def on_device(model: nn.Module) -> nn.Module:
    """Move a model as a user would; under the interpreter, its rows go where the interpreter is."""
    if not INTERPRETED:
        return model.to(DEVICE)
    ert.place(model, DEVICE)
    return model


def off_device(model: nn.Module) -> None:
    """Move a model back to the CPU as a user would; under the interpreter, its rows stay where the interpreter is."""
    if INTERPRETED:
        ert.place(model, "cpu")
    else:
        model.to("cpu")


def batches(count: int, seed: int = 0) -> list[Tensor]:
    """Return ids, a few of them far hotter than the others."""
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(np.minimum(rng.zipf(1.3, BATCH) - 1, ROWS - 1)) for _ in range(count)]


def loss_of(model: Model, ids: Tensor) -> Tensor:
    return model.whole(ids).float().square().sum()


def train(model: Model, ids_of_batches: Iterable[Tensor], before_step: Callable[[Model], None] | None = None) -> Model:
    """Train for a step for each batch."""
    for ids in ids_of_batches:
        model.zero_grad()
        loss_of(model, ids).backward()
        if before_step is not None:
            before_step(model)
        model.step()
    return model


def assert_same_table(mine: er.Table, other: er.Table) -> None:
    """Compare all bits of two tables: weights, which rows have records, steps."""
    np.testing.assert_array_equal(mine.lookup(np.arange(ROWS)), other.lookup(np.arange(ROWS)))
    for got, expected in zip(mine.export(), other.export(), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert mine.steps == other.steps


def on_disk(folder: Path) -> Way:
    return Way("on disk", None, (("path", str(folder / "rows.rock")), ("memory", "256KiB")))
