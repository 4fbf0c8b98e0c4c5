"""One step of training, and scores; the same for every model and backend."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import embedrock as er
from embedrock.demo.backends import Backend
from embedrock.demo.models import MODELS
from embedrock.demo.plan import ModelPlan

WARM_UP_STEPS = 3


def use_threads(count: int | None) -> None:
    """Have PyTorch and Embedrock use `count` threads each; None: their own choice."""
    if count is not None:
        torch.set_num_threads(count)
        er.set_threads(count)


def warm_up(plan: ModelPlan, backend: Backend) -> None:
    """Compile and load what the first steps of a process need, on a small copy of the model."""
    trainer = Trainer(replace(plan, users=64, items=64, folder=None, budgets=(None, None)), backend)
    ids = np.arange(64)
    for _ in range(WARM_UP_STEPS):
        trainer.step(ids, ids, np.zeros(64, np.float32))
    trainer.scores(ids[:, None], ids[:, None])


class Trainer:
    """A model on a backend, with its optimizers.

    Two trainers of one plan start with the same values, whatever their backends.
    """

    def __init__(self, plan: ModelPlan, backend: Backend) -> None:
        users, items = (backend.embedding(size) for size in plan.sizes)
        torch.manual_seed(plan.seed)  # of the dense weights, which are drawn next
        self.model: nn.Module = MODELS[plan.model](users, items, plan.dim)
        self.optimizers = backend.optimizers(self.model, plan.lr)
        self._score_pairs = plan.score_pairs

    def step(self, users: np.ndarray, items: np.ndarray, labels: np.ndarray) -> float:
        """Train on a batch, int64 (n,), int64 (n,), float32 (n,), and return its mean loss of before."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        logits = self.model(torch.from_numpy(users), torch.from_numpy(items))
        loss = binary_cross_entropy_with_logits(logits, torch.from_numpy(labels))
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
