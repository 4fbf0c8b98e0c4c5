"""Who takes part in ``bench keras``: small models that differ in their embedding and optimizer only.

Nothing heavier than NumPy is imported before a contender is made in its own process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from embedrock.bench.harness.comparison import Step, Timing
from embedrock.bench.harness.contenders import LEARNING_RATE, Unavailable
from embedrock.bench.harness.workload import Workload
from embedrock.bench.step.contenders import StepContender, our_step

HIDDEN = 64  # units of the first of the two Dense layers
REPLICAS = 2  # of MirroredStrategy, which share a batch
KERAS_PROCESS_BYTES = 900 << 20  # with TensorFlow
LEAST_STEPS = 2  # of a fit: one to settle, and one that is timed
LOOK_AHEAD = 2  # batches


def import_keras(cpus: int = 1) -> Any:
    """Return the module, on TensorFlow with as many threads as a contender may use.

    Args:
        cpus: logical devices that the processor is shown as.
    """
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
    """In a contender's own process: makes a model, fits it, and times its steps, with what `fit` does in between."""

    def __init__(self, make: Callable[[Workload], Any], workload: Workload) -> None:
        self._model = make(workload)
        self._data = _dataset(workload)
        self._batches, self._count = workload.batches, 0

    def warm_up(self, seconds: float) -> list[float]:
        """Fit on all batches, or as many as fit into `seconds`; return the seconds of each step."""
        return self._fit(self._batches, seconds)

    def turn(self, steps: int, seconds: float) -> Timing:
        """Make `steps` timed steps, or as many as fit into `seconds`.

        The first step of a fit is not among them: Keras makes ready for all the others in it.
        """
        return Timing.now(self._fit(steps + 1, seconds)[1:])

    def _fit(self, steps: int, seconds: float) -> list[float]:
        import keras

        data = self._data.skip(self._count % self._batches).prefetch(LOOK_AHEAD)
        times = [time.perf_counter()]

        def note(batch: int, logs: Any) -> None:
            times.append(time.perf_counter())
            if len(times) > LEAST_STEPS and times[-1] - times[0] > seconds:
                self._model.stop_training = True

        timer = keras.callbacks.LambdaCallback(on_train_batch_end=note)
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

    layers = [
        keras.Input((workload.features,), dtype="int64"),
        embedding,
        keras.layers.Flatten(),
        keras.layers.Dense(HIDDEN, activation="relu"),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential(layers)
    model.compile(optimizer=optimizer, loss=keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def our_model(workload: Workload, optimizer: str, rule: str | None = None, replicas: int = 1, **options: float) -> Any:
    """Return a model on `embedrock.keras.Embedding`.

    Args:
        workload: what it works on.
        optimizer: of Keras, by the name of its class.
        rule: of Embedrock, by the name of its class; None: the rows follow the optimizer.
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


def layer_step(workload: Workload) -> Step:
    """Train `embedrock.keras.Embedding` alone, in a `tf.function`: no model, no `fit`, and a gradient that is given."""
    keras = import_keras()
    import tensorflow as tf

    import embedrock as er
    import embedrock.keras as erk

    layer = erk.Embedding(workload.rows, workload.dim, rule=er.Adam())
    layer.build()
    optimizer = erk.optimizer(_optimizer(keras, "Adam"))
    variables = layer.trainable_variables
    optimizer.build(variables)
    ids = [tf.constant(batch) for batch in workload.ids()]
    gradient = tf.constant(workload.gradient())

    @tf.function(jit_compile=False)
    def train(batch: Any, gradient: Any) -> None:
        with tf.GradientTape() as tape:
            rows = layer(batch)
        optimizer.apply(tape.gradient(rows, variables, output_gradients=gradient), variables)

    return lambda index: train(ids[index], gradient)


def _ours(name: str, label: str, tables: float, make: Any = our_model, **arguments: Any) -> StepContender:
    text = f"erk.Embedding, {label}"
    return StepContender(name, text, partial(make, **arguments), tables, lazy=True, process_bytes=KERAS_PROCESS_BYTES)


def _keras(name: str, label: str, tables: float, **arguments: Any) -> StepContender:
    text = f"keras.layers.Embedding, {label}"
    return StepContender(name, text, partial(keras_model, **arguments), tables, process_bytes=KERAS_PROCESS_BYTES)


FIT = (
    _ours("ours-adam", "erk.optimizer(Adam)", 3.1, optimizer="Adam"),
    _ours("ours-adam-lazy", "the same, rule=er.Adam()", 3, optimizer="Adam", rule="Adam"),
    _ours("ours-adam-clipped", "erk.optimizer(Adam(global_clipnorm=1))", 3.1, optimizer="Adam", global_clipnorm=1.0),
    _ours("ours-adagrad", "erk.optimizer(Adagrad)", 2, optimizer="Adagrad"),
    _ours("ours-sgd", "erk.optimizer(SGD)", 1, optimizer="SGD"),
    _ours("ours-mirrored", "ours-adam under MirroredStrategy", 3.1, optimizer="Adam", replicas=REPLICAS),
    # Weights, states, and the temporaries of making and of updating all rows, as measured.
    _keras("keras-adam", "Adam", 6.5, optimizer="Adam"),
    _keras("keras-adagrad", "Adagrad", 4, optimizer="Adagrad"),
    _keras("keras-sgd", "SGD", 3.2, optimizer="SGD"),
)
LAYER = (
    StepContender("torch-layer", "ert.Embedding and ert.Adam alone", partial(our_step, optimizer="Adam"), 3, lazy=True),
    _ours("keras-layer", "rule=er.Adam(), alone in a tf.function", 3, layer_step),
)
