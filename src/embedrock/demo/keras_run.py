"""The demo on planted clicks with Keras, from top to bottom."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tqdm import tqdm

import embedrock as er
import embedrock.keras as erk
from embedrock import errors
from embedrock.demo.course import (
    Course,
    format_head,
    format_point,
    format_start,
    format_training,
    plan_in_ram,
    trained,
)
from embedrock.demo.keras_models import make_model
from embedrock.demo.meter import DiskMeter
from embedrock.demo.options import ClickOptions
from embedrock.demo.plan import ModelPlan
from embedrock.demo.storage import DEPTH, SAVE_STEPS, Storage, on_disk
from embedrock.errors import EmbedrockError


class TrainingError(EmbedrockError, RuntimeError):
    """What `fit` failed with."""


def run(options: ClickOptions) -> dict[str, Any]:
    """Train on planted clicks by `fit` and print how it goes; return all numbers, as plain JSON values."""
    _use_threads(options.threads)
    in_ram = plan_in_ram(options)
    print(format_start(options, in_ram))
    train = _train_in_ram if options.in_ram else _train_on_disk
    try:
        return {"training": train(in_ram, options)}
    except tf.errors.OpError as error:
        if (said := _our_error(str(error))) is None:
            raise
        raise TrainingError(said) from error


def _train_in_ram(plan: ModelPlan, options: ClickOptions) -> dict[str, Any]:
    return trained(Training(plan, options, None))


def _train_on_disk(plan: ModelPlan, options: ClickOptions) -> dict[str, Any]:
    with Storage.of(options).claimed(options) as storage:
        return trained(Training(on_disk(plan, storage), options, storage))


class Training:
    """The model in training.

    Args:
        plan: of the model.
        options: how many batches, and so on.
        storage: where the tables lie on disk; None: in RAM.

    Attributes:
        tables: of users and items.
    """

    def __init__(self, plan: ModelPlan, options: ClickOptions, storage: Storage | None) -> None:
        self._plan, self._options, self._storage = plan, options, storage
        self._course, self._model = Course(options), make_model(plan)
        self._users, self._items = (self._model.get_layer(name) for name in ("user_rows", "item_rows"))
        self.tables = [self._users.table, self._items.table]
        self._checkpoints = [erk.TableCheckpoint(storage.checkpoints, SAVE_STEPS, resume=False)] if storage else []
        self._step = 0

    def run(self) -> dict[str, Any]:
        """Train, print how it goes, and return all numbers."""
        first = self._step = self._resume()
        print(format_head(self._course.best))
        meter = DiskMeter(self.tables, waits=False)
        curve = self._fit(first, meter)
        disk = meter.totals(self._options.steps - first) if self._storage else None
        results = self._course.results(first, curve, self.tables, disk)
        print(format_training(results))
        return results

    def _fit(self, first: int, meter: DiskMeter) -> list[dict[str, float]]:
        """Train, and return some points of the learning curve."""
        curve, train_s = list[dict[str, float]](), 0.0
        with tqdm(total=self._options.steps, initial=first, unit="it", leave=False, disable=None) as bar:
            callbacks = [_Losses(partial(self._note, meter, bar)), *self._checkpoints]
            for begin, end in pairwise([first, *(step for step in self._course.due if step > first)]):
                start = time.perf_counter()
                self._model.fit(self._batches(begin, end), callbacks=callbacks, verbose=0, shuffle=False)
                train_s += time.perf_counter() - start
                curve.append({"step": end, "train_s": train_s, **self._measure()})
                bar.write(format_point(curve[-1]))
        return curve or [{"step": first, "train_s": train_s, **self._measure()}]

    def _note(self, meter: DiskMeter, bar: Any, loss: float) -> None:
        """Do what is to be done after each step."""
        self._step += 1
        self._course.losses.append(loss)
        bar.set_postfix_str(f"loss={self._course.loss:.4f}{meter.line(self._step)}", refresh=False)
        bar.update()

    def _resume(self) -> int:
        """Go on from the last checkpoint, if there is one; return its step."""
        for checkpoint in self._checkpoints:
            checkpoint.restore(self._model)
        return int(self._model.optimizer.iterations)

    def _batches(self, first: int, until: int) -> tf.data.Dataset:
        """Return the batches of steps in [first, until)."""

        def batch(step: tf.Tensor) -> Any:
            users, items, labels = tf.numpy_function(self._made, [step], [tf.int64, tf.int64, tf.float32])
            for each in (users, items, labels):
                each.set_shape([self._options.batch_size])
            return {"users": users, "items": items}, labels[:, tf.newaxis]

        ids_of = {self._users: _users_of, self._items: _items_of}
        return erk.prefetch(tf.data.Dataset.range(first, until).map(batch), ids_of, DEPTH)

    def _made(self, step: np.ndarray) -> tuple[np.ndarray, ...]:
        clicks = self._course.batch(int(step))
        return clicks.users, clicks.items, clicks.labels

    def _measure(self) -> dict[str, float]:
        test = self._course.test
        inputs = {"users": test.users, "items": test.items}
        return self._course.measure(self._model.predict(inputs, self._plan.score_pairs, verbose=0)[:, 0])


class _Losses(keras.callbacks.Callback):
    """Calls a function with the loss of each batch."""

    def __init__(self, note: Callable[[float], None]) -> None:
        super().__init__()
        self._note, self._sum = note, 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._sum = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        before, self._sum = self._sum, float(logs["loss"]) * (batch + 1)  # Keras tells the mean since the epoch began
        self._note(self._sum - before)


def _users_of(inputs: dict[str, tf.Tensor], labels: tf.Tensor) -> tf.Tensor:
    return inputs["users"]


def _items_of(inputs: dict[str, tf.Tensor], labels: tf.Tensor) -> tf.Tensor:
    return inputs["items"]


def _use_threads(count: int | None) -> None:
    """Have TensorFlow and Embedrock use `count` threads each; None: their own choice."""
    if count is not None:
        tf.config.threading.set_intra_op_parallelism_threads(count)
        tf.config.threading.set_inter_op_parallelism_threads(count)
        er.set_threads(count)


def _our_error(text: str) -> str | None:
    """Return what an error of Embedrock says that TensorFlow wrapped; None if there is none."""
    found = [said for name, said in re.findall(r"^(\w+): (.+)$", text, re.MULTILINE) if hasattr(errors, name)]
    return found[-1] if found else None
