"""``keras``: ours beside `keras.layers.Embedding` in `fit`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.benchmark import ROUNDS, SIZES, Benchmark, Option, several_rows
from benchmarks.implementations import LEARNING_RATE, Implementation, Timing, Unavailable
from benchmarks.options import BenchmarkOptions
from benchmarks.targets import faster, ratio
from benchmarks.workload import Workload

SIZES_OF_TABLES = (100_000, 1_000_000, 10_000_000)
HIDDEN = 64  # units of the first of the two Dense layers
REPLICAS = 2  # of MirroredStrategy, which share a batch
KERAS_PROCESS_BYTES = 900 << 20  # with TensorFlow
LEAST_STEPS = 2  # of a fit: one to settle, and one that is timed
LOOK_AHEAD = 2  # batches


def import_keras(cpus: int = 1) -> Any:
    """Return the module, on TensorFlow with as many threads as an implementation may use, and `cpus` logical CPUs."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ["KERAS_BACKEND"] = "tensorflow"
    try:
        import keras
        import tensorflow as tf
    except ImportError as error:
        raise Unavailable(f"Keras does not import: {error}. pip install 'embedrock[keras]'") from error
    threads = int(os.environ["EMBEDROCK_THREADS"])
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    tf.config.set_visible_devices([], "GPU")
    (processor,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(processor, [tf.config.LogicalDeviceConfiguration()] * cpus)
    return keras


class FitSession:
    """In an implementation's own process: makes a model, fits it, and times its steps, with `fit`'s own work."""

    def __init__(self, make: Callable[[Workload], Any], workload: Workload) -> None:
        self._model = make(workload)
        self._data = _dataset(workload)
        self._batches, self._count = workload.batches, 0

    def warm_up(self, seconds: float) -> list[float]:
        return self._fit(self._batches, seconds)

    def turn(self, steps: int, seconds: float) -> Timing:
        """Make `steps` timed steps, or as many as fit into `seconds`.

        The first step of a fit is not among them: Keras prepares all the others in it.
        """
        return Timing.now(self._fit(steps + 1, seconds)[1:])

    def _fit(self, steps: int, seconds: float) -> list[float]:
        import keras

        data = self._data.skip(self._count % self._batches).prefetch(LOOK_AHEAD)
        times = [time.perf_counter()]

        def record(batch: int, logs: Any) -> None:
            times.append(time.perf_counter())
            if len(times) > LEAST_STEPS and times[-1] - times[0] > seconds:
                self._model.stop_training = True

        timer = keras.callbacks.LambdaCallback(on_train_batch_end=record)
        self._model.fit(data, steps_per_epoch=steps, callbacks=[timer], verbose=0, shuffle=False)
        self._count += len(times) - 1
        return [end - start for start, end in pairwise(times)]


def _dataset(workload: Workload) -> Any:
    """Return the workload's batches over and over, with labels."""
    import tensorflow as tf

    ids = tf.data.Dataset.from_tensor_slices(np.stack(workload.ids()))
    labels = tf.data.Dataset.from_tensors((workload.gradient()[:, 0, :1] > 0).astype(np.float32))
    return tf.data.Dataset.zip((ids.repeat(), labels.repeat()))


def _model(workload: Workload, embedding: Any, optimizer: Any) -> Any:
    """Return a compiled model: an embedding of `Workload.features` ids, and two Dense layers."""
    import keras

    dense = keras.layers.Dense(HIDDEN, activation="relu"), keras.layers.Dense(1)
    rows = keras.Input((workload.features,), dtype="int64"), embedding, keras.layers.Flatten()
    model = keras.Sequential([*rows, *dense])
    model.compile(optimizer=optimizer, loss=keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def our_model(workload: Workload, optimizer: str, rule: str | None = None, replicas: int = 1, **options: float) -> Any:
    """Return a model on `embedrock.keras.Embedding`.

    Args:
        workload: sizes.
        optimizer, rule: of Keras and of Embedrock, by the names of their classes; None: the rows follow the optimizer.
        replicas: under MirroredStrategy, on logical CPUs; 1: no strategy.
        options: of the optimizer.
    """
    keras = import_keras(cpus=replicas)
    import tensorflow as tf

    import embedrock as er
    import embedrock.keras as erk

    devices = [f"CPU:{k}" for k in range(replicas)]
    strategy = tf.distribute.get_strategy() if replicas == 1 else tf.distribute.MirroredStrategy(devices)
    with strategy.scope():
        embedding = erk.Embedding(workload.rows, workload.dim, rule=None if rule is None else getattr(er, rule)())
        return _model(workload, embedding, erk.optimizer(_optimizer(keras, optimizer, **options)))


def keras_model(workload: Workload, optimizer: str) -> Any:
    """Return a model on `keras.layers.Embedding`."""
    keras = import_keras()
    return _model(workload, keras.layers.Embedding(workload.rows, workload.dim), _optimizer(keras, optimizer))


def _optimizer(keras: Any, name: str, **options: float) -> Any:
    return getattr(keras.optimizers, name)(learning_rate=LEARNING_RATE, **options)


def _ours(name: str, label: str, tables: float, **arguments: Any) -> Implementation:
    make = partial(our_model, **arguments)
    return Implementation(name, f"erk.Embedding, {label}", make, tables, True, KERAS_PROCESS_BYTES, FitSession)


def _keras(optimizer: str, tables: float) -> Implementation:
    name, make = f"keras-{optimizer.lower()}", partial(keras_model, optimizer=optimizer)
    label = f"keras.layers.Embedding, {optimizer}"
    return Implementation(name, label, make, tables, False, KERAS_PROCESS_BYTES, FitSession)


IMPLEMENTATIONS = (
    _ours("ours-adam", "erk.optimizer(Adam)", 3.1, optimizer="Adam"),
    _ours("ours-adam-lazy", "the same, rule=er.Adam()", 3, optimizer="Adam", rule="Adam"),
    _ours("ours-adam-clipped", "erk.optimizer(Adam(global_clipnorm=1))", 3.1, optimizer="Adam", global_clipnorm=1.0),
    _ours("ours-adagrad", "erk.optimizer(Adagrad)", 2, optimizer="Adagrad"),
    _ours("ours-sgd", "erk.optimizer(SGD)", 1, optimizer="SGD"),
    _ours("ours-mirrored", "ours-adam under MirroredStrategy", 3.1, optimizer="Adam", replicas=REPLICAS),
    # Weights, states, and the temporaries of making and of updating all rows, as measured.
    _keras("Adam", 6.5),
    _keras("Adagrad", 4),
    _keras("SGD", 3.2),
)
_targets = (
    faster("ours-adam", "keras-adam", 3.5, rows=100_000),
    faster("ours-adam", "keras-adam", 12, rows=1_000_000),
    faster("ours-adam", "keras-adam", 80, rows=10_000_000),
    faster("ours-mirrored", "ours-adam", 1.5, at_most=True),
    ratio("peak RAM of ours-adam over keras-adam", "ours-adam", "keras-adam", "peak_bytes", 0.5, rows=10_000_000),
)


KERAS = Benchmark(
    "keras",
    "training by Keras' fit",
    IMPLEMENTATIONS,
    tuple(replace(target, what=f"{{rows:,}} rows: {target.what}") for target in _targets),
    (Workload(features=1),),
    BenchmarkOptions(rounds=5, steps=20),
    (*SIZES, *ROUNDS),
    own=(Option("--rows", "sizes", several_rows, SIZES_OF_TABLES, "numbers of rows"),),
)
