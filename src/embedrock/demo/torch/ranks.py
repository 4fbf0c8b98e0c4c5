"""The demo in several processes of torch.distributed: each has its part of the rows, and of every batch.

The first one is the program itself. It starts the others, which make what it makes, call for call, and print nothing.
"""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from embedrock.bench.harness.processes import Child
from embedrock.demo import course
from embedrock.demo.data.examples import Examples, Source
from embedrock.demo.model_spec import ModelSpec
from embedrock.demo.options import ClickOptions
from embedrock.demo.tables import Numbers, close_all
from embedrock.demo.torch.backends import shared_out
from embedrock.demo.torch.learner import TorchLearner, use_threads, warm_up
from embedrock.demo.training import Batches
from embedrock.process.platform import usable_cores

WAIT = datetime.timedelta(minutes=2)  # for a rank that starts, measures, or saves
END_S = 10.0  # that the others have to end, once the first one is done
LONG_S = 1e6  # a training may take days
SUMMED = ("hits", "misses", "reads", "rows_touched", "bytes_used", "disk_bytes")  # over ranks and tables

SourceOf = Callable[[ClickOptions], Source]


class Place(NamedTuple):
    """Which rank a process is.

    Attributes:
        rank, ranks: which one, of how many.
        store: file by which they find each other.
    """

    rank: int
    ranks: int
    store: str

    @contextmanager
    def taken(self, threads: int | None) -> Iterator[None]:
        """Be that rank, with so many threads; None: with its part of the cores."""
        use_threads(threads or max(1, usable_cores() // self.ranks))
        found = f"file://{self.store}"
        dist.init_process_group("gloo", init_method=found, rank=self.rank, world_size=self.ranks, timeout=WAIT)
        try:
            yield
        finally:
            dist.destroy_process_group()


class RankLearner(TorchLearner):
    """A rank's part of a model, under DistributedDataParallel: a `Learner`.

    Args:
        spec, checkpoints: as of `TorchLearner`.
        others: the trainings of other processes, which end when this one does.
    """

    def __init__(self, spec: ModelSpec, checkpoints: Path | None, others: Sequence[Future[None]] = ()) -> None:
        super().__init__(spec, shared_out(dist.get_world_size()), checkpoints)
        self.net, self._others = DistributedDataParallel(self.model), others

    @property
    def tables(self) -> RankTables:
        """Its tables."""
        return RankTables(self._layers, self._others)

    def train(self, batches: Batches, steps: range, after_step: Callable[[float], None]) -> None:
        """Train on this rank's part of the batches of some steps."""
        super().train(lambda step: _part(batches(step)), steps, after_step)

    def step(self, examples: Examples) -> float:
        """Train on a part of a batch, and return the mean loss of all parts, of before."""
        loss = torch.tensor(super().step(examples))
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()


def _part(examples: Any) -> Any:
    """Return what this rank has of a batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = {name: np.array_split(values, ranks)[rank] for name, values in vars(examples).items()}
    return replace(examples, **own)


class RankTables:
    """Tables that processes share, as one: `Tables`. All of them ask for the same.

    Args:
        layers: of this process.
        others: the trainings of others.
    """

    def __init__(self, layers: Sequence[Any], others: Sequence[Future[None]]) -> None:
        self._tables, self._others = [layer.table for layer in layers], others

    def stats(self) -> Numbers:
        """Return numbers about all of them on all ranks."""
        each = self.each()
        return {name: sum(one.get(name, 0) for one in each) for name in SUMMED}

    def each(self) -> list[Numbers]:
        """Return numbers about each, of all ranks together."""
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, [table.stats() for table in self._tables])
        return [one[0] | _sums(one) for one in zip(*everywhere, strict=True)]

    def close(self) -> None:
        """Give them back, after which nobody writes to their files."""
        close_all(self._tables)
        wait(self._others, END_S)


def _sums(parts: tuple[Numbers, ...]) -> Numbers:
    return {name: sum(part[name] for part in parts) for name in SUMMED if name in parts[0]}


class OtherRank:
    """One of the processes that the first one starts."""

    def train(
        self, place: Place, spec: ModelSpec, checkpoints: Path | None, source_of: SourceOf, options: ClickOptions
    ) -> None:
        """Train with the others."""
        with place.taken(options.threads):
            course.train_learner(RankLearner(spec, checkpoints), spec, source_of(options), options.batches)


class Ranks:
    """Several processes that train as one: a `Framework`.

    Args:
        options: of the demo.
        source_of: makes the batches.
    """

    warm_up = staticmethod(warm_up)

    def __init__(self, options: ClickOptions, source_of: SourceOf) -> None:
        self._options, self._source_of = options, source_of
        self._held, self._others = ExitStack(), list[Future[None]]()

    def use_threads(self, count: int | None) -> None:
        """Give PyTorch and Embedrock `count` threads each; None: their own choice, until the others are there."""
        use_threads(count)

    def make_learner(self, spec: ModelSpec, checkpoints: Path | None) -> RankLearner:
        """Start the other processes; return the learner of this one."""
        folder = self._held.enter_context(tempfile.TemporaryDirectory())
        places = [Place(rank, self._options.ranks, str(Path(folder, "store"))) for rank in range(self._options.ranks)]
        pool = self._held.enter_context(ThreadPoolExecutor(len(places)))
        for place in places[1:]:
            child = self._held.enter_context(Child(OtherRank, environment={}, timeout_s=LONG_S))
            work = place, spec, checkpoints, self._source_of, self._options
            self._others.append(pool.submit(child.call, "train", *work))
        self._held.enter_context(places[0].taken(self._options.threads))
        return RankLearner(spec, checkpoints, self._others)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: Any, *error: object) -> None:
        with self._held:
            for other in self._others if kind is None else ():
                other.result()
