"""What Keras brings to the demo: a `Learner` that trains by `fit`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import embedrock as er
import embedrock.keras as erk
from embedrock import errors
from embedrock.demo.keras.models import make_model
from embedrock.demo.model_spec import PairSpec
from embedrock.demo.tables import GroupTables
from embedrock.demo.training import DEPTH, SAVE_STEPS, Batches
from embedrock.errors import EmbedrockError


class TrainingError(EmbedrockError, RuntimeError):
    """What `fit` failed with."""


def use_threads(count: int | None) -> None:
    """Give TensorFlow and Embedrock `count` threads each; None: their own choice."""
    if count is not None:
        tf.config.threading.set_intra_op_parallelism_threads(count)
        tf.config.threading.set_inter_op_parallelism_threads(count)
        er.set_threads(count)


def warm_up(spec: PairSpec) -> None:
    """Do nothing: what `fit` compiles is compiled for one model."""


def make_learner(spec: PairSpec, checkpoints: Path | None) -> KerasLearner:
    """Return a learner with tables of Embedrock; `checkpoints` is their folder, None: there are none."""
    return KerasLearner(spec, checkpoints)


class KerasLearner:
    """A compiled model: a `Learner`.

    Args:
        spec: of the model.
        checkpoints: their folder, if its tables lie on disk.
    """

    name = "Embedrock"
    waited_s = None  # a pipeline of tf.data waits where nobody sees it

    def __init__(self, spec: PairSpec, checkpoints: Path | None = None) -> None:
        self.model, self._score_ids = make_model(spec), spec.score_ids
        self._users, self._items = (self.model.get_layer(name) for name in ("user_rows", "item_rows"))
        self.group: er.Group = self._users.table.group
        self._checkpoints = [erk.TableCheckpoint(checkpoints, SAVE_STEPS, resume=False)] if checkpoints else []

    @property
    def tables(self) -> GroupTables:
        """Those that it trains."""
        return GroupTables(self.group)

    def resume(self) -> int:
        """Go on from the last checkpoint, if there is one; return its step."""
        for checkpoint in self._checkpoints:
            checkpoint.restore(self.model)
        return int(self.model.optimizer.iterations)

    def train(self, batches: Batches, steps: range, after_step: Callable[[float], None]) -> None:
        """Train on the batches of some steps, and make checkpoints on the way."""
        ids_of = {self._users: _users_of, self._items: _items_of}
        data = erk.prefetch(_dataset(batches, steps), ids_of, DEPTH)
        callbacks = [_Losses(after_step), *self._checkpoints]
        with _our_errors():
            self.model.fit(data, callbacks=callbacks, verbose=0, shuffle=False)

    def scores(self, *inputs: np.ndarray) -> np.ndarray:
        """Return the logits of pairs, float32: of users and items, (n,) each, or (n, 1) and (n, m)."""
        users, items = inputs
        pairs = {"users": np.broadcast_to(users, items.shape).ravel(), "items": items.ravel()}
        with _our_errors():
            return self.model.predict(pairs, self._score_ids, verbose=0).reshape(items.shape)


def _dataset(batches: Batches, steps: range) -> tf.data.Dataset:
    """Return the batches of some steps as `fit` takes them; all are as large as the first one."""
    size = len(batches(steps.start).labels)

    def made(step: np.ndarray) -> tuple[np.ndarray, ...]:
        examples = batches(int(step))
        return *examples.inputs, examples.labels

    def tensors(step: tf.Tensor) -> Any:
        users, items, labels = tf.numpy_function(made, [step], [tf.int64, tf.int64, tf.float32])
        for each in (users, items, labels):
            each.set_shape([size])
        return {"users": users, "items": items}, labels[:, tf.newaxis]

    return tf.data.Dataset.range(steps.start, steps.stop).map(tensors)


class _Losses(keras.callbacks.Callback):
    """Calls a function with the loss of each batch."""

    def __init__(self, after_step: Callable[[float], None]) -> None:
        super().__init__()
        self._after_step, self._sum = after_step, 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._sum = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        before, self._sum = self._sum, float(logs["loss"]) * (batch + 1)  # Keras tells the mean since the epoch began
        self._after_step(self._sum - before)


def _users_of(inputs: dict[str, tf.Tensor], labels: tf.Tensor) -> tf.Tensor:
    return inputs["users"]


def _items_of(inputs: dict[str, tf.Tensor], labels: tf.Tensor) -> tf.Tensor:
    return inputs["items"]


@contextmanager
def _our_errors() -> Iterator[None]:
    """Raise what Embedrock said where TensorFlow wrapped it in an error of its own."""
    try:
        yield
    except tf.errors.OpError as error:
        if (said := _our_error(str(error))) is None:
            raise
        raise TrainingError(said) from error


def _our_error(text: str) -> str | None:
    """Return what an error of Embedrock says that TensorFlow wrapped; None if there is none."""
    found = [said for name, said in re.findall(r"^(\w+): (.+)$", text, re.MULTILINE) if hasattr(errors, name)]
    return found[-1] if found else None
