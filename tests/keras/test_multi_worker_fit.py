"""`erk.distribute`: Keras' own `fit` under several workers, with dense models."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from workers import Outcome, WorkersError, outcomes_of, run

WORKERS = 2
BATCH = 16
SAMPLES = 41  # the last batch is of 5 and 4

# What runs in the workers imports Keras itself: pytest's process has to leave TensorFlow alone to be quick.


def samples() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((SAMPLES, 4)).astype(np.float32)
    return x, x.sum(axis=1, keepdims=True)


def dataset(drop_remainder: bool = True) -> Any:
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    batches = tf.data.Dataset.from_tensor_slices(samples()).batch(BATCH, drop_remainder=drop_remainder)
    return batches.with_options(options)


def compiled_model(**options: Any) -> Any:
    import keras

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **options)
    return model


def worker_model(**options: Any) -> Any:
    import tensorflow as tf

    from embedrock.keras.workers.cluster import distribute

    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        return distribute(compiled_model(**options))


def weights_of(model: Any) -> list[np.ndarray]:
    return [weight.numpy() for weight in model.weights]


def loaded() -> set[str]:
    return {"torch", "triton", "keras"} & sys.modules.keys()


def test_the_front_end_loads_no_other_framework() -> None:
    """A worker has imported `embedrock.keras`, and this file."""
    assert run(loaded, workers=1) == [{"keras"}]


# ---------------------------------------------------------------- it gives what one process gives


def everything(model: Any) -> dict[str, Any]:
    """Return what Keras' methods return, one after the other."""
    import keras

    x, y = samples()
    losses: list[float] = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(float(logs["loss"])))
    results = {
        "fit": model.fit(dataset(), epochs=2, verbose=0, callbacks=[note]).history,
        "fit arrays": model.fit(x[:32], y[:32], batch_size=BATCH, shuffle=False, verbose=0).history,
        "fit validated": model.fit(dataset(), validation_data=dataset(), verbose=0).history,
        "evaluate": model.evaluate(dataset(drop_remainder=False), verbose=0, return_dict=True),
        "predict": model.predict(x, batch_size=BATCH, verbose=0),
        "predict one by one": model.predict(x[:5], batch_size=2, verbose=0),
        "train_on_batch": model.train_on_batch(x, y, return_dict=True),
        "test_on_batch": model.test_on_batch(x, y, return_dict=True),
    }
    return results | {"weights": weights_of(model), "losses of batches": losses}


def everything_in_a_worker() -> dict[str, Any]:
    from embedrock.keras.workers.cluster import distribute

    model = worker_model()
    fit = model.fit
    once = distribute(model) is model and model.fit is fit
    return everything(model) | {"distributed once": once}


def everything_in_one_process() -> dict[str, Any]:
    return everything(compiled_model(run_eagerly=True))  # which is sooner done than graphs are made


@pytest.fixture(scope="module")
def by_workers() -> list[dict[str, Any]]:
    return run(everything_in_a_worker, workers=WORKERS)


@pytest.fixture(scope="module")
def by_one() -> dict[str, Any]:
    return run(everything_in_one_process, workers=1)[0]


def check_close(got: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key in expected:
            check_close(got[key], expected[key])
    elif isinstance(expected, list):
        for one, other in zip(got, expected, strict=True):
            check_close(one, other)
    else:
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6)


COMPARED = ("fit", "fit arrays", "fit validated", "evaluate", "predict", "predict one by one", "weights")


def test_workers_give_what_one_process_gives(by_workers: list[dict[str, Any]], by_one: dict[str, Any]) -> None:
    for results in by_workers:
        check_close({key: results[key] for key in COMPARED}, {key: by_one[key] for key in COMPARED})


def test_workers_end_with_equal_weights(by_workers: list[dict[str, Any]]) -> None:
    first, second = (results["weights"] for results in by_workers)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


def predict_the_same_batch() -> np.ndarray:
    return worker_model().predict_on_batch(samples()[0])


def test_predict_on_batch_returns_the_rows_of_all_workers() -> None:
    for predicted in run(predict_the_same_batch, workers=WORKERS):
        assert predicted.shape == (WORKERS * SAMPLES, 1)
        np.testing.assert_array_equal(predicted[:SAMPLES], predicted[SAMPLES:])


def test_logs_of_a_batch_are_means_over_the_workers(by_workers: list[dict[str, Any]]) -> None:
    first, second = (results["losses of batches"] for results in by_workers)
    assert first == second
    assert len(set(first)) == 4


def test_distribute_is_idempotent(by_workers: list[dict[str, Any]]) -> None:
    assert all(results["distributed once"] for results in by_workers)


# ---------------------------------------------------------------- upstream


def plain_fit() -> None:
    import tensorflow as tf

    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = compiled_model()
    model.fit(dataset(), verbose=0)


@pytest.mark.xfail(
    raises=WorkersError, strict=True, reason="Keras: the day this passes, `distribute` has nothing left to repair"
)
def test_keras_alone_fits_under_several_workers() -> None:
    run(plain_fit, workers=WORKERS, timeout_s=60)


# ---------------------------------------------------------------- what it refuses


def refusal(make: Callable[[], Any]) -> str:
    from embedrock.errors import ArgumentError, UnsupportedError

    try:
        make()
    except (ArgumentError, UnsupportedError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was refused")


def made_outside_of_a_scope() -> str:
    import tensorflow as tf

    from embedrock.keras.workers.cluster import distribute

    model = compiled_model()
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        return refusal(lambda: distribute(model))


def made_under_another_strategy() -> str:
    import tensorflow as tf

    from embedrock.keras.workers.cluster import distribute

    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        return refusal(lambda: distribute(compiled_model()))


def several_steps_per_execution() -> str:
    model = worker_model(steps_per_execution=3)
    return refusal(lambda: model.fit(dataset(), verbose=0))


def several_steps_per_execution_mirrored() -> str:
    import tensorflow as tf

    from embedrock.keras.workers.cluster import distribute

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = distribute(compiled_model(steps_per_execution=3))
    return refusal(lambda: model.fit(dataset(), verbose=0))


def another_version_of_keras() -> str:
    import keras

    keras.__version__ = "3.99.1"
    return refusal(worker_model)


def two_replicas_per_worker() -> str:
    import tensorflow as tf

    module: Any = importlib.import_module("embedrock.keras.workers.cluster")

    class Extended:
        worker_devices = ("/GPU:0", "/GPU:1")

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = compiled_model()
    strategy._extended = Extended()
    module.has_several_workers = lambda strategy: True
    return refusal(lambda: module.distribute(model))


REFUSALS = [
    (made_outside_of_a_scope, 1, "ArgumentError: the model of `distribute` must have been made in the scope"),
    (made_under_another_strategy, 1, "UnsupportedError: Keras .* made under OneDeviceStrategy"),
    (several_steps_per_execution, 2, "`steps_per_execution` must be 1 under CollectiveAllReduce.*compiled with 3"),
    (several_steps_per_execution_mirrored, 1, "`steps_per_execution` must be 1 under MirroredStrategy"),
    (another_version_of_keras, 2, "repaired in Keras 3.15; installed is Keras 3.99.1. .*strategy.run"),
    (two_replicas_per_worker, 2, "must have one replica; this one has 2: /GPU:0, /GPU:1"),
]


@pytest.mark.parametrize(("function", "workers", "text"), REFUSALS, ids=[row[0].__name__ for row in REFUSALS])
def test_what_cannot_work_is_refused(function: Callable[[], str], workers: int, text: str) -> None:
    import re

    for message in run(function, workers=workers, timeout_s=60):
        assert re.search(text, message), message


# ---------------------------------------------------------------- lost workers


def fit_until_one_ends(victim: int, end: Callable[[], None]) -> None:
    import keras

    model = worker_model()
    rank = model.distribute_strategy.cluster_resolver.task_id
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: end() if batch == 1 and rank == victim else None
    )
    model.fit(dataset(), epochs=1000, verbose=0, callbacks=[callback])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_lost_worker_is_reported_within_a_minute(victim: int) -> None:
    outcomes: list[Outcome] = outcomes_of(fit_until_one_ends, victim, die, workers=WORKERS, timeout_s=60)
    lost, left = outcomes[victim], outcomes[1 - victim]
    assert lost.code == -signal.SIGKILL
    assert left.code == 1
    assert "WorkerLostError: a worker of the cluster failed, is gone" in left.error
    assert "start all workers again" in left.error


def run_out_of_disk() -> None:
    raise OSError("disk full")


def fail_and_stay(folder: Path, victim: int) -> str:
    try:
        fit_until_one_ends(victim, run_out_of_disk)
    except OSError as error:
        if "WorkerLostError" in repr(error):
            (folder / "told").touch()
        else:
            wait_for(folder / "told")  # the others must not need this process to end
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it went on")


def wait_for(file: Path) -> None:
    for _ in range(4000):
        if file.exists():
            return
        time.sleep(0.01)
    raise AssertionError("the others were not told")


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_one_worker_raises_all_others_are_told(victim: int, tmp_path: Path) -> None:
    results = run(fail_and_stay, tmp_path, victim, workers=WORKERS)
    failed, told = results[victim], results[1 - victim]
    assert failed == "OSError: disk full"
    assert told.startswith("WorkerLostError: ")
    assert f"worker {victim} failed: OSError: disk full" in told


def loop_with_an_error_of_a_host_call(victim: int) -> str:
    import tensorflow as tf

    from embedrock.keras.workers.cluster import worker_errors

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def checked(step: np.ndarray) -> np.ndarray:
        if step == 2 and strategy.cluster_resolver.task_id == victim:
            raise ValueError("`ids` must lie in [0, 10): got 10")
        return step

    def replica_step(step: tf.Tensor) -> tf.Tensor:
        number = tf.ensure_shape(tf.numpy_function(checked, [step], tf.float32), ())
        return tf.distribute.get_replica_context().all_reduce("SUM", number)

    @tf.function
    def train_step(step: tf.Tensor) -> tf.Tensor:
        return strategy.run(replica_step, args=(step,))

    try:
        with worker_errors(strategy):
            for step in range(5):
                train_step(tf.constant(step, tf.float32))
    except (ConnectionError, tf.errors.InvalidArgumentError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it went on")


def test_what_a_host_call_raises_all_others_are_told() -> None:
    told, failed = run(loop_with_an_error_of_a_host_call, 1, workers=WORKERS)
    assert failed.startswith("InvalidArgumentError: ")
    assert told.startswith("WorkerLostError: ")
    assert "worker 1 failed: ValueError: `ids` must lie in [0, 10): got 10. The others" in told
