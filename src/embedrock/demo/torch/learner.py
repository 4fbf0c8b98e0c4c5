"""What PyTorch brings to the demo: a `Learner` on any backend."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import embedrock as er
import embedrock.torch as ert
from embedrock.demo.data.examples import Examples
from embedrock.demo.model_spec import ModelSpec
from embedrock.demo.tables import GroupTables, Tables
from embedrock.demo.torch.backends import EMBEDROCK, Backend
from embedrock.demo.torch.models import make_model
from embedrock.demo.training import DEPTH, SAVE_STEPS, Batches

WARM_UP_STEPS, WARM_UP_SIZE = 3, 64

T = TypeVar("T")


def use_threads(count: int | None) -> None:
    """Give PyTorch and Embedrock `count` threads each; None: their own choice."""
    if count is not None:
        torch.set_num_threads(count)
        er.set_threads(count)


def warm_up(spec: ModelSpec, backend: Backend = EMBEDROCK) -> None:
    """Compile and load what the first steps of a process need, on a small copy of the model."""
    learner = TorchLearner(spec.small(), backend)
    examples = spec.blank(WARM_UP_SIZE)
    for _ in range(WARM_UP_STEPS):
        learner.step(examples)
    learner.scores(*examples.inputs)


def make_learner(spec: ModelSpec, checkpoints: Path | None) -> TorchLearner:
    """Return a learner with tables of Embedrock; `checkpoints` is their folder, None: there are none."""
    return TorchLearner(spec, EMBEDROCK, checkpoints)


class TorchLearner:
    """A model on a backend, with its optimizers: a `Learner`.

    Two learners of one spec start with the same values, whatever their backends.

    Args:
        spec: of the model.
        backend: keeps and steps its rows.
        checkpoints: their folder, if its tables lie on disk.
    """

    def __init__(self, spec: ModelSpec, backend: Backend, checkpoints: Path | None = None) -> None:
        self.name = backend.name
        self._layers = backend.embeddings(spec)
        torch.manual_seed(spec.seed)  # of the dense weights, which are drawn next
        self.model = self.net = make_model(spec, self._layers, backend.together)
        self.optimizers = backend.optimizers(self.model, spec.lr)
        self._score_ids, self._checkpoints = spec.score_ids, checkpoints
        self._next_s = self._making_s = 0.0

    @property
    def group(self) -> er.Group:
        """Embedrock's tables."""
        return next(layer.table.group for layer in self._layers if isinstance(layer, ert.Embedding | ert.EmbeddingBag))

    @property
    def tables(self) -> Tables:
        """Those that it trains."""
        return GroupTables(self.group)

    @property
    def waited_s(self) -> float:
        """How long `train` has waited for rows from the disk; the making of batches is not the disk's fault."""
        return self._next_s - self._making_s

    def resume(self) -> int:
        """Go on from the last checkpoint, if there is one; return its step."""
        if self._checkpoints is None:
            return 0
        try:
            return ert.load(self.model, self._checkpoints, self.optimizers)
        except ert.NoCheckpointError:
            return 0

    def train(self, batches: Batches, steps: range, after_step: Callable[[float], None]) -> None:
        """Train on the batches of some steps, and make checkpoints on the way."""
        for step, examples in enumerate(self._looked_ahead(map(batches, steps)), start=steps.start + 1):
            loss = self.step(examples)
            if self._checkpoints and (step % SAVE_STEPS == 0 or step == steps.stop):
                ert.save(self.model, self._checkpoints, step, self.optimizers)
            after_step(loss)

    def _looked_ahead(self, batches: Iterator[Examples]) -> Iterable[Examples]:
        """Return the batches; on disk, each comes when its rows are in RAM."""
        if self._checkpoints is None:
            return batches
        ids_of: dict[Any, Callable[[Examples], np.ndarray]] = {
            layer: partial(_input, number) for number, layer in enumerate(self._layers)
        }
        ahead = ert.prefetch(_timed(batches, self._add_making), ids_of, DEPTH)
        return _timed(ahead, self._add_next)

    def _add_making(self, seconds: float) -> None:
        self._making_s += seconds

    def _add_next(self, seconds: float) -> None:
        self._next_s += seconds

    def step(self, examples: Examples) -> float:
        """Train on a batch, and return its mean loss of before."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        logits = self.net(*map(torch.from_numpy, examples.inputs))
        loss = binary_cross_entropy_with_logits(logits, torch.from_numpy(examples.labels))
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.item()

    @torch.no_grad()
    def scores(self, *inputs: np.ndarray) -> np.ndarray:
        """Return the logits of examples, float32: of pairs also (n, m), of users (n, 1) and items (n, m)."""
        most_ids = max(math.prod(each.shape[1:]) for each in inputs)
        rows, count = max(1, self._score_ids // most_ids), len(inputs[0])
        parts = [
            self.model(*(torch.from_numpy(each[start : start + rows]) for each in inputs))
            for start in range(0, count, rows)
        ]
        return torch.cat(parts).numpy()


def _timed(batches: Iterable[T], add: Callable[[float], None]) -> Iterator[T]:
    """Go through batches, and add up the seconds that they take to come."""
    source, end = iter(batches), object()
    while True:
        start = time.perf_counter()
        batch: Any = next(source, end)
        add(time.perf_counter() - start)
        if batch is end:
            return
        yield batch


def _input(number: int, examples: Examples) -> np.ndarray:
    return examples.inputs[number]
