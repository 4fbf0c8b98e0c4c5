"""Keras' `fit` under several workers: repairs of Keras, and clear errors for a lost worker."""

from __future__ import annotations

import contextlib
import re
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import trainer
from tensorflow.python.eager import context as tf_context

from embedrock.distributed.messages import MessageReader, pack_all
from embedrock.errors import ArgumentError, EmbedrockError, UnsupportedError, WorkerLostError
from embedrock.keras import callers

# Versions of Keras in which `fit` fails under several workers, and works after the repairs below. A test of
# plain `fit`, expected to fail, shows when a new version needs no repair.
REPAIRED_VERSIONS = ("3.15",)

_KERAS_METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_reduce_in_keras: Callable[..., Any] = trainer.reduce_per_replica
_check_finite_in_keras: Callable[..., Any] = keras.optimizers.LossScaleOptimizer.check_finite


def distribute(model: Any) -> Any:
    """Make `fit`, `evaluate` and `predict` work under the strategy of a model, and return the same model.

    Under `tf.distribute.MultiWorkerMirroredStrategy` Keras fails in all of them. The repairs are:

    - models, metrics and optimizers are built from the worker's own batch;
    - logs of a batch are means over the workers, equal on all of them, so callbacks decide alike;
    - an error of one worker ends them all: see `worker_errors`.

    Under other strategies it raises errors for the things that Keras cannot do, and changes nothing. A second call is
    harmless.

    Args:
        model: made under the scope of a strategy; it may be compiled or built already.

    Raises:
        ArgumentError: the model was made outside of a strategy's scope.
        UnsupportedError: a strategy or a version of Keras without a repair. `fit` raises it later, too, if the model
            was compiled with ``steps_per_execution > 1``.

    Example:
        >>> import keras, tensorflow as tf, embedrock.keras as erk
        >>> with tf.distribute.MirroredStrategy(["CPU:0"]).scope():  # a MultiWorkerMirroredStrategy in a cluster
        ...     model = keras.Sequential([keras.Input((2,)), erk.Embedding(10**9, 4)])
        >>> erk.distribute(model).predict(tf.constant([[3, 14]]), verbose=0).shape
        (1, 2, 4)
    """
    strategy = _strategy_of(model)
    if getattr(model._maybe_symbolic_build, "__func__", None) is _build_symbolically:
        return model
    model._maybe_symbolic_build = types.MethodType(_build_symbolically, model)
    if has_several_workers(strategy):
        trainer.reduce_per_replica = _reduce_per_replica
        for name in _KERAS_METHODS:
            setattr(model, name, worker_errors(strategy)(getattr(model, name)))
    return model


# ---------------------------------------------------------------- lost workers


@contextlib.contextmanager
def worker_errors(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Make all workers fail if one does, in custom training loops; `fit` does so already.

    An error of one worker, raised inside, ends the collective operations of all, so the others do not wait.
    TensorFlow's error about a lost worker is raised as `WorkerLostError`.

    Args:
        strategy: of the training loop.

    Raises:
        WorkerLostError: another worker failed, is gone, or did not answer in time.

    Example:
        >>> import tensorflow as tf, embedrock.keras as erk
        >>> strategy = tf.distribute.get_strategy()  # a MultiWorkerMirroredStrategy in a cluster
        >>> with erk.worker_errors(strategy):
        ...     total = strategy.run(tf.add, (1, 2))
    """
    try:
        yield
    except EmbedrockError:  # a refusal, which all workers meet before anything starts
        raise
    except tf.errors.OpError as error:
        reason = _reason_of_loss(error.message)
        if reason is None:
            _tell_other_workers(strategy, error)
            raise
        raise WorkerLostError(
            f"a worker of the cluster failed, is gone or did not answer in time: {reason}. The others cannot go on "
            "without it, and this process has to end, too: start all workers again. Tables on disk are as of their "
            "last commit. A worker that hangs is waited for as long as the strategy is told to by "
            "communication_options=tf.distribute.experimental.CommunicationOptions(timeout_seconds=...)."
        ) from error
    except BaseException as error:
        _tell_other_workers(strategy, error)
        raise


def _reason_of_loss(message: str) -> str | None:
    """Return TensorFlow's words about a lost worker; None for another error."""
    _, found, reason = message.rpartition("Collective ops is aborted by: ")
    if found:
        reason = reason.replace("\\n", "\n").partition("\nThe error could be from a previous")[0]
        return " ".join(reason.split()).rstrip(".")
    return "a collective operation timed out" if "Collective has timed out" in message else None


def _tell_other_workers(strategy: tf.distribute.Strategy, error: BaseException) -> None:
    """End the collective operations here, and so, in 0.1 s, those of the workers that wait for this one.

    Without it they would wait until this process exits: for ever if the error is caught.
    """
    if has_several_workers(strategy):
        said = f"worker {strategy.cluster_resolver.task_id} failed: {_sentence_of(error)}"
        collectives: Any = tf_context.context()
        collectives.report_error_to_cluster(tf.errors.UNAVAILABLE, said)


def _sentence_of(error: BaseException) -> str:
    """Return one line of an error; for a host call of a graph, the line of Python's error."""
    raised = re.findall(r"^[\w.]*(?:Error|Exception): .*", str(error), re.MULTILINE)
    return raised[-1] if raised else f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


# ---------------------------------------------------------------- refused models


def _strategy_of(model: Any) -> tf.distribute.Strategy:
    strategy = model._distribute_strategy  # without a strategy of the model, the public name gives the current one
    if strategy is None:
        raise ArgumentError(
            "the model of `distribute` must have been made in the scope of a strategy, but was made outside. "
            "Make it there: `with strategy.scope(): model = ...`."
        )
    if not isinstance(strategy, (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)):
        raise UnsupportedError(
            f"Keras {keras.__version__} trains under MirroredStrategy and MultiWorkerMirroredStrategy; the model was "
            f"made under {type(strategy).__name__}. Make it under one of those."
        )
    if has_several_workers(strategy):
        _check_workers(strategy)
    return strategy


def _check_workers(strategy: tf.distribute.Strategy) -> None:
    devices = strategy.extended.worker_devices
    if len(devices) > 1:
        raise UnsupportedError(
            f"each worker of a MultiWorkerMirroredStrategy must have one replica; this one has {len(devices)}: "
            f"{', '.join(devices)}. Start one worker for each device, and show it no other: "
            "`CUDA_VISIBLE_DEVICES=0`."
        )
    if ".".join(keras.__version__.split(".")[:2]) not in REPAIRED_VERSIONS:
        raise UnsupportedError(
            f"`fit` under several workers is repaired in Keras {', '.join(REPAIRED_VERSIONS)}; installed is Keras "
            f"{keras.__version__}. Install one of those, or train in a loop of your own with strategy.run(), which "
            "needs no repair."
        )


def _check_steps_per_execution(model: Any) -> None:
    if model.compiled and model.steps_per_execution > 1 and model.distribute_strategy.num_replicas_in_sync > 1:
        raise UnsupportedError(
            f"`steps_per_execution` must be 1 under {type(model.distribute_strategy).__name__}; the model was "
            f"compiled with {model.steps_per_execution}, with which Keras {keras.__version__} fails under several "
            "replicas. Leave it out of compile()."
        )


def check_traced_fit() -> None:
    """Raise an error if a `fit` is being traced that cannot work, of a model without `distribute`.

    Keras hides the number of steps in a program. So it is read from the tracing function on the call stack.
    """
    model = callers.local(callers.KERAS_TRAINER, "multi_step_on_iterator", "self")
    if model is not callers.MISSING:
        _check_steps_per_execution(model)


def has_several_workers(strategy: tf.distribute.Strategy) -> bool:
    """Return whether a strategy runs on several workers of a cluster."""
    return trainer._collective_all_reduce_multi_worker(strategy)


# ---------------------------------------------------------------- the repairs


def _build_symbolically(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
    """Replace `Model._maybe_symbolic_build`, which cannot take a batch out of an iterator over workers.

    Keras averages the batches of all replicas, only to see their shapes. The worker's own batch is enough.
    """
    _check_steps_per_execution(self)
    strategy = self.distribute_strategy
    if iterator is None or not has_several_workers(strategy):
        type(self)._maybe_symbolic_build(self, iterator=iterator, data_batch=data_batch)
        return
    for _, _, batches in iterator:
        data_batch = keras.tree.map_structure(lambda v: strategy.experimental_local_results(v)[0], next(batches))
        break
    with strategy.scope():
        self._symbolic_build(data_batch=data_batch)


def repair_loss_scaling() -> None:
    """Make `keras.optimizers.LossScaleOptimizer` skip a step by the gradients of all replicas.

    It uses only the rows of a batch: Keras would make all rows of a table.

    Keras checks each replica's gradients before they are summed, and follows the first replica. Under several workers
    each would follow its own, and workers that do not skip would wait for the others.
    """
    keras.optimizers.LossScaleOptimizer.check_finite = _check_finite


def _check_finite(self: Any, grads: Any) -> tf.Tensor:
    finite = _check_finite_in_keras(self, [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads])
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return finite
    not_finite = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(tf.logical_not(finite), tf.float32))
    return tf.equal(not_finite, 0.0)


def _reduce_per_replica(values: Any, strategy: tf.distribute.Strategy, reduction: str) -> Any:
    """Replace Keras' function of this name, which cannot average scalars over workers.

    All logs of a batch travel in one message.
    """
    if reduction != "auto" or not has_several_workers(strategy):
        return _reduce_in_keras(values, strategy, reduction)
    logs = [tf.convert_to_tensor(value) for value in keras.tree.flatten(values)]
    numbers = tf.concat([tf.reshape(tf.cast(log, tf.float64), [-1]) for log in logs], axis=0)
    means = tf.split(strategy.reduce("MEAN", numbers, axis=None), [tf.size(log) for log in logs])
    shaped = [tf.cast(tf.reshape(mean, tf.shape(log)), log.dtype) for mean, log in zip(means, logs, strict=True)]
    return keras.tree.pack_sequence_as(values, shaped)


class WorkerGroup:
    """The group of workers that train a model together. All must call the same methods in the same order.

    Attributes:
        rank: rank of this worker, from 0.
        count: number of workers; 1 for one process.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy, self.rank, self.count = strategy, 0, 1
        if has_several_workers(strategy):
            self.rank, self.count = strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync

    def all(self, is_so: bool) -> bool:
        """Return whether `is_so` is true on all workers."""
        if self.count == 1:
            return is_so
        return not self._strategy.reduce(tf.distribute.ReduceOp.SUM, tf.constant(float(not is_so)), axis=None)

    def common(self, numbers: Sequence[int]) -> list[int]:
        """Return the numbers that all workers passed, in this worker's order."""
        given = self._numbers_of_all(numbers)
        return [number for number in numbers if all(number in others for others in given)]

    def first(self, number: int) -> int:
        """Return the number that the first worker passed."""
        return self._numbers_of_all([number])[0][0]

    def _numbers_of_all(self, numbers: Sequence[int]) -> list[list[int]]:
        if self.count == 1:
            return [list(numbers)]
        message = tf.constant(pack_all([[np.array([len(numbers), *numbers], np.int64)]]).flat)
        reader = MessageReader(np.asarray(self._strategy.run(tf.function(lambda: gather(message)))))
        return [reader.ints(int(reader.ints(1)[0])).tolist() for _ in range(self.count)]


def gather(message: tf.Tensor) -> tf.Tensor:
    """Return the messages of all workers, int32 (n,) each, concatenated in the order of their ranks.

    Must be called in a replica context. The messages may differ in length.
    """
    message.set_shape([None])
    context = tf.distribute.get_replica_context()
    return context.all_gather(tf.identity(message), axis=0)  # on the replica's device
