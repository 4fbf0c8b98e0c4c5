"""What PyTorch brings to the demo: a `Learner` on any backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import embedrock as er
import embedrock.torch as ert
from embedrock.demo.data.examples import Examples
from embedrock.demo.model_spec import ModelSpec
from embedrock.demo.torch.backends import EMBEDROCK, Backend
from embedrock.demo.torch.models import MODELS
from embedrock.demo.training import DEPTH, SAVE_STEPS, Batches
from embedrock.table.table import Table

WARM_UP_STEPS = 3

T = TypeVar("T")


def use_threads(count: int | None) -> None:
    """Give PyTorch and Embedrock `count` threads each; None: their own choice."""
    if count is not None:
        torch.set_num_threads(count)
        er.set_threads(count)


def warm_up(spec: ModelSpec, backend: Backend = EMBEDROCK) -> None:
    """Compile and load what the first steps of a process need, on a small copy of the model."""
    learner = TorchLearner(replace(spec, users=64, items=64, folder=None, budgets=(None, None)), backend)
    ids = np.arange(64)
    for _ in range(WARM_UP_STEPS):
        learner.step(Examples(ids, ids, np.zeros(64, np.float32)))
    learner.scores(ids[:, None], ids[:, None])


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
        users, items = (backend.embedding(embedding) for embedding in spec.embeddings)
        torch.manual_seed(spec.seed)  # of the dense weights, which are drawn next
        self.model: nn.Module = MODELS[spec.model](users, items, spec.dim)
        self.optimizers = backend.optimizers(self.model, spec.lr)
        self._score_pairs, self._checkpoints = spec.score_pairs, checkpoints
        self._ids_of: dict[Any, Callable[[Examples], np.ndarray]] = {users: _users_of, items: _items_of}
        self._next_s = self._making_s = 0.0

    @property
    def tables(self) -> Sequence[Table]:
        """Embedrock's tables of users and items; none on other backends."""
        return [layer.table for layer in self._ids_of if isinstance(layer, ert.Embedding)]

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
        ahead = ert.prefetch(_timed(batches, self._add_making), self._ids_of, DEPTH)
        return _timed(ahead, self._add_next)

    def _add_making(self, seconds: float) -> None:
        self._making_s += seconds

    def _add_next(self, seconds: float) -> None:
        self._next_s += seconds

    def step(self, examples: Examples) -> float:
        """Train on a batch, and return its mean loss of before."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        logits = self.model(torch.from_numpy(examples.users), torch.from_numpy(examples.items))
        loss = binary_cross_entropy_with_logits(logits, torch.from_numpy(examples.labels))
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.item()

    @torch.no_grad()
    def scores(self, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Return the logits of pairs: float32 (n, m).

        Args:
            users: int64 (n, 1).
            items: int64 (n, m).
        """
        rows = max(1, self._score_pairs // items.shape[1])
        parts = [
            self.model(torch.from_numpy(users[start : start + rows]), torch.from_numpy(items[start : start + rows]))
            for start in range(0, len(items), rows)
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


def _users_of(examples: Examples) -> np.ndarray:
    return examples.users


def _items_of(examples: Examples) -> np.ndarray:
    return examples.items
