"""`Training`: the one training loop of the demo, over a `Learner`, which is what a framework brings."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from embedrock.demo.data.examples import Examples
from embedrock.demo.model_spec import PairSpec
from embedrock.demo.tables import Tables

DEPTH = 2  # batches that are looked ahead
SAVE_STEPS = 250  # between two checkpoints

Batches = Callable[[int], Examples]  # makes the batch of a step; that of the first step is 0


class Learner(Protocol):
    """A model with its optimizers.

    Attributes:
        name: of what keeps and steps the rows, for people.
        tables: of its features, in their order.
        waited_s: how long `train` has waited for rows from the disk, seconds; None: the framework does not say.
    """

    @property
    def name(self) -> str: ...

    @property
    def tables(self) -> Tables: ...

    @property
    def waited_s(self) -> float | None: ...

    def resume(self) -> int:
        """Go on from the last checkpoint, if there is one; return its step."""
        ...

    def train(self, batches: Batches, steps: range, after_step: Callable[[float], None]) -> None:
        """Train on the batches of some steps, and make checkpoints on the way.

        Args:
            batches: makes them.
            steps: which.
            after_step: is called after each step, with the mean loss of its batch, of before the step.
        """
        ...

    def scores(self, *inputs: np.ndarray) -> np.ndarray:
        """Return the logits of examples, float32, by their inputs, as `Examples` has them.

        Of pairs, users may be (n, 1) and items (n, m), to score each user with many items: (n, m).
        """
        ...


class Framework(Protocol):
    """What the demo needs of PyTorch, or of Keras: the modules `torch.learner` and `keras.learner`."""

    def use_threads(self, count: int | None) -> None:
        """Give the framework and Embedrock `count` threads each; None: their own choice."""
        ...

    def warm_up(self, spec: PairSpec) -> None:
        """Compile and load what the first steps of a process need, where that can be done ahead."""
        ...

    def make_learner(self, spec: PairSpec, checkpoints: Path | None) -> Learner:
        """Return a learner with tables of Embedrock; `checkpoints` is their folder, None: there are none."""
        ...


class Measured(NamedTuple):
    """What was measured after some steps.

    Attributes:
        step: how many steps there were, with those of earlier parts and of earlier processes.
        loss: mean of the last batches.
        train_s: seconds in the steps of this part.
        scores: how good the model is, by name.
    """

    step: int
    loss: float
    train_s: float
    scores: dict[str, float]


class Training:
    """A learner's way through its batches.

    Args:
        learner: what is trained.
        evaluate: tells how good it is, by name.
        recent: how many batches the loss that is measured is the mean of; None: those of the part.

    Attributes:
        losses: of the batches, in order.
        parts: what was measured after each part.
    """

    def __init__(
        self, learner: Learner, evaluate: Callable[[Learner], dict[str, float]], recent: int | None = None
    ) -> None:
        self.learner, self._evaluate, self._recent = learner, evaluate, recent
        self.losses: list[float] = []
        self.parts: list[Measured] = []

    def mean_loss(self, count: int) -> float:
        """Return the mean of the last losses; NaN where there are none."""
        return float(np.mean(self.losses[-count:])) if self.losses else float("nan")

    def train(self, batches: Batches, steps: range, after_step: Callable[[], None]) -> Measured:
        """Train on the batches of some steps, then measure.

        Args:
            batches: makes them.
            steps: which; where there are none, nothing is trained.
            after_step: is called after each step.
        """

        def note(loss: float) -> None:
            self.losses.append(loss)
            after_step()

        start = time.perf_counter()
        if steps:
            self.learner.train(batches, steps, note)
        train_s = time.perf_counter() - start
        loss = self.mean_loss(self._recent or len(steps))
        self.parts.append(Measured(steps.stop, loss, train_s, self._evaluate(self.learner)))
        return self.parts[-1]
