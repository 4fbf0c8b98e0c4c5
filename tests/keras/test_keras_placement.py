"""Where rows of Keras' layers are used: by the CPU, or by TensorFlow's GPU, to the same bits.

The GPU is the CPU here, by Triton's interpreter.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import embedrock as er
import embedrock.keras as erk
from embedrock.errors import IdError, NonFiniteGradientError, UnsupportedError
from embedrock.keras.training import placement
from slow import slow

pytest.importorskip("torch")
pytest.importorskip("triton")

ROWS, DIM = 12, 4
IDS = np.array([[1, 5], [5, 11]])
BY_HOST = "TensorFlow's programs look rows up, and step them, by calls of the host, in RAM or on disk"
NEAR, FAR = "1MiB", None
OTHERS = np.array([[0, 5, 7], [7, 3, 0]])


@pytest.fixture
def gpus(monkeypatch):
    """Let TensorFlow say that it has two GPUs."""
    named = [SimpleNamespace(name=f"/physical_device:GPU:{k}") for k in range(2)]
    before = tf.config.get_visible_devices
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: named if kind == "GPU" else before(kind))
    return named


def every_row(layer):
    return layer.table.lookup(np.arange(ROWS))


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


# ---------------------------------------------------------------- the same bits


def trained(memory: Any, steps: int, gradients_of: Any = lambda grads: grads) -> list[Any]:
    """Train rows, weighted bags and maxima of two tables, in a program on the GPU, and without one on the CPU.

    Returns:
        What was found, and all rows.
    """
    options: dict[str, Any] = {"seed": 3, "rule": er.Adagrad(lr=0.1), "device_memory": memory}
    layer = erk.Embedding(ROWS, DIM, mask_zero=True, **options)
    largest = erk.EmbeddingBag(layer.table, mode="max", rule=er.Adagrad(lr=0.1))
    bags = erk.EmbeddingBag(ROWS, DIM, mode="mean", mask_zero=True, **options)
    optimizer, weights = erk.optimizer("sgd"), tf.ones((2, 3)) * [[1.0, 2.0, 3.0]]

    def step(ids, others):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            found = [layer(ids), largest(others), bags(others, weights)]
            loss = tf.add_n([tf.reduce_sum(each**2) for each in found])
        rows = [layer.rows, bags.rows]
        *grads, of_weights = tape.gradient(loss, [*rows, weights])
        optimizer.apply(gradients_of(grads), rows)
        return [*found, of_weights]

    for each in layer, largest, bags:
        each(OTHERS)  # Keras builds it
    optimizer.build([layer.rows, bags.rows])
    found = [
        step(tf.constant((IDS + k) % ROWS, tf.int32), tf.constant((OTHERS + k) % ROWS)) for k in range(-1, steps - 1)
    ]
    assert (layer.table.executor is None) == (memory is None)
    assert layer.table.steps == steps
    return [*tf.nest.flatten(found), every_row(layer), every_row(bags)]


@pytest.mark.parametrize("steps", [1, *slow(4)])
def test_a_program_trains_on_the_gpu_what_it_trains_on_the_cpu(steps):
    assert_same(trained(NEAR, steps), trained(FAR, steps))


@pytest.mark.slow
def test_gradients_that_a_program_changes_come_back_to_the_gpu():
    def halved(grads):
        return [tf.clip_by_value(grad * 0.5, -0.1, 0.1) for grad in grads]

    assert_same(trained(NEAR, 3, halved), trained(FAR, 3, halved))


def trained_eagerly(memory: Any) -> list[Any]:
    """Train by a loop: rows that grow and are forgotten, gradients of two lookups, a table on the CPU beside."""
    layer = erk.Embedding(ROWS, DIM, seed=3, device_memory=memory)
    beside = erk.Embedding(ROWS, DIM, seed=4)
    optimizer, loss = erk.optimizer(keras.optimizers.Adam(0.1)), None
    for k in range(3):
        if k == 1:
            layer.grow(ROWS + 2)
            assert layer.forget(IDS) == len(np.unique(IDS))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(IDS + k) ** 2) + tf.reduce_sum(layer([IDS - 1, IDS[:, :1]])[0])
            loss += tf.reduce_sum(layer(np.empty((0, 3), np.int64))) + tf.reduce_sum(beside(IDS) ** 2)
        rows = [layer.rows, beside.rows]
        optimizer.apply(tape.gradient(loss, rows), rows)
    return [loss, every_row(layer), every_row(beside)]


@pytest.mark.slow
def test_a_loop_of_ones_own_trains_on_the_gpu_what_it_trains_on_the_cpu():
    assert_same(trained_eagerly(NEAR), trained_eagerly(FAR))


def fitted(optimizer: Any, device_memory: Any, folder: Any = None, count: int = 1, **options: Any) -> Any:
    """Fit a model; return it and, after its history and predictions, the rows of each layer."""
    keras.utils.set_random_seed(7)
    inputs = keras.Input((3,), dtype="int64")
    options |= {"seed": 3, "device_memory": device_memory}
    rows = [erk.Embedding(ROWS, DIM, **options) for _ in range(count)]
    pooled = [keras.layers.GlobalAveragePooling1D()(each(inputs)) for each in rows]
    hidden = pooled[0] if count == 1 else keras.layers.Add()(pooled)
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(hidden))
    model.compile(erk.optimizer(optimizer), "mse")
    ids, targets = np.random.default_rng(0).integers(0, ROWS, (32, 3)), np.ones((32, 1), np.float32)
    callbacks = [] if folder is None else [erk.TableCheckpoint(folder, every=1), erk.TableStats()]
    history = model.fit(ids, targets, 8, 2, verbose=0, shuffle=False, validation_split=0.25, callbacks=callbacks)
    found = [history.history["loss"], history.history["val_loss"], model.predict(ids, verbose=0)]
    return model, [*found, *map(every_row, rows)]


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "adamw": lambda: keras.optimizers.AdamW(0.1),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.1),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "clipvalue": lambda: keras.optimizers.Adam(0.1, clipvalue=0.01),
    "accumulation": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fit_trains_on_the_gpu_what_it_trains_on_the_cpu(name):
    assert_same(fitted(OPTIMIZERS[name](), NEAR)[1], fitted(OPTIMIZERS[name](), FAR)[1])


LAYERS = {
    "in a small cache": {"device_memory": 1200},
    "open ids": {"input_dim": None},
    "halves": {"dtype": "bfloat16"},
    "hashed": {"directory": "hashed"},
    "regularized": {"embeddings_regularizer": "l2"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_all_kinds_train_on_the_gpu_what_they_train_on_the_cpu(name):
    options = dict(LAYERS[name])
    near = options.pop("device_memory", NEAR)

    def trained_by_fit(memory):
        rows = options.get("input_dim", ROWS)
        others = {key: value for key, value in options.items() if key != "input_dim"}
        layer = erk.Embedding(rows, DIM, seed=3, device_memory=memory, **others)
        inputs = keras.Input((3,), dtype="int64")
        hidden = keras.layers.Flatten()(layer(inputs))
        model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(hidden))
        model.compile(erk.optimizer("adam"), "mse")
        ids = np.random.default_rng(0).integers(0, ROWS, (24, 3))
        losses = model.fit(ids, np.ones((24, 1), np.float32), 8, 2, verbose=0, shuffle=False).history["loss"]
        assert (layer.table.executor is None) == (memory is None)
        return [losses, every_row(layer)]

    assert_same(trained_by_fit(near), trained_by_fit(FAR))


@pytest.mark.slow
def test_26_layers_of_a_group_train_on_the_gpu_what_they_train_on_the_cpu():
    near, far = (fitted("sgd", None, count=26, group=er.Group(device_memory=memory))[1] for memory in (NEAR, FAR))
    assert_same(near, far)


@pytest.mark.slow
def test_files_checkpoints_and_exports_have_what_is_on_the_gpu(tmp_path):
    model, found = fitted("adam", NEAR, tmp_path / "checkpoints", path=tmp_path / "rows", memory="1MiB")
    ids = np.random.default_rng(0).integers(0, ROWS, (32, 3))
    model.save(tmp_path / "model.keras")
    served = erk.load_model(tmp_path / "model.keras", mode="r")
    assert served.layers[1].get_config()["device_memory"] == NEAR
    np.testing.assert_array_equal(served.predict(ids, verbose=0), found[2])
    erk.export(model, tmp_path / "served")
    alone: Any = tf.saved_model.load(tmp_path / "served")
    np.testing.assert_allclose(alone.serve(ids), found[2], rtol=1e-6)
    before = every_row(model.layers[1])
    model.fit(ids, np.zeros((32, 1), np.float32), 8, verbose=0)
    assert not np.array_equal(every_row(model.layers[1]), before)
    assert erk.TableCheckpoint(tmp_path / "checkpoints").restore(model)
    np.testing.assert_array_equal(every_row(model.layers[1]), found[-1])


@pytest.mark.slow
def test_the_script_for_machines_with_a_gpu():
    script = Path(__file__).parent.parent / "gpu" / "keras_on_gpu.py"
    sizes = ["--rows", "60", "--dim", "4", "--batch", "8", "--steps", "2"]
    done = subprocess.run([sys.executable, script, *sizes], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["side"].split()[0] for each in told[:4]] == ["on", "on", "on", "None"]
    assert told[-1] == {"same bits on the GPU": True, "as on the CPU, within rounding": True}


# ---------------------------------------------------------------- errors


def test_wrong_ids_and_gradients_are_refused_at_once_and_nothing_changes():
    layer = erk.Embedding(ROWS, DIM, seed=3, device_memory=NEAR)
    first = every_row(layer)
    with pytest.raises(IdError, match=rf"must lie in \[0, {ROWS}\): got 12 at \[1, 0\]"):
        layer(np.array([[1, 2], [ROWS, 3]]))
    optimizer = erk.optimizer("sgd")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(IDS)) * np.inf * 0.0
    with pytest.raises(NonFiniteGradientError, match="must be finite: got NaN or Inf"):
        optimizer.apply(tape.gradient(loss, [layer.rows]), [layer.rows])
    np.testing.assert_array_equal(every_row(layer), first)
    assert (layer.table.steps, int(optimizer.iterations)) == (0, 0)
    with pytest.raises(
        UnsupportedError, match=r"`embeddings_constraint` of 'embedding.* cannot go with device_memory="
    ):
        erk.Embedding(ROWS, DIM, device_memory=NEAR, embeddings_constraint="non_neg")(IDS)


def test_of_a_group_the_cpu_uses_what_no_gpu_does_and_it_is_told():
    words = erk.Embedding(None, DIM, group=er.Group(device_memory=NEAR), admission=er.Admission(2))
    with pytest.warns(erk.PlacementWarning, match="is in a group, and its rows come and go: .* stepped by the CPU"):
        words(IDS)
    assert words.table.executor is None


def test_without_a_gpu_the_cpu_uses_the_rows_and_it_is_told(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    layer = erk.Embedding(ROWS, DIM, device_memory=NEAR)
    with pytest.warns(erk.PlacementWarning, match="device_memory=.* of 'embedding.* TensorFlow has no GPU here"):
        layer(IDS)
    assert layer.table.executor is None


def test_where_there_are_gpus_it_is_told_once_that_they_use_no_rows(gpus):
    said = rf'TensorFlow has {gpus[0].name}, {gpus[1].name}, and rows .* not used there: {BY_HOST}.*="2GiB".*=0 '
    texts = []
    for layer in erk.Embedding(ROWS, DIM), erk.EmbeddingBag(ROWS, DIM):
        with pytest.warns(erk.PlacementWarning, match=said) as told:
            layer(IDS)
        layer(IDS)
        texts += [str(each.message) for each in told]
    assert len(set(texts)) == 1  # which Python tells once
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        erk.Embedding(ROWS, DIM, device_memory=0)(IDS)


def test_what_keeps_a_gpu_from_using_rows_is_told_with_its_remedy(gpus, monkeypatch):
    import torch

    from embedrock.device import requirements

    table = er.Table(ROWS, DIM, device_memory=NEAR)

    def refused(lack):
        said = (
            rf"^rows of 'a layer' cannot be used by TensorFlow's GPU \(device_memory=1048576\): .*{lack}.* the CPU uses"
        )
        with pytest.raises(UnsupportedError, match=said):
            placement.executor_of(table, "'a layer'")

    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        refused("MirroredStrategy has replicas on several GPUs.*without a strategy")
    with monkeypatch.context() as patch:
        patch.setattr(placement.importlib.util, "find_spec", lambda name: None)
        refused(r"PyTorch, whose kernels use them, is not installed\. pip install")
    missing = requirements.MissingRequirement("there is no compiler", "apt-get install gcc")
    monkeypatch.setattr(requirements, "lack_for_kernels", lambda device_type: missing)
    refused("there is no compiler. Install it: apt-get install gcc")
    monkeypatch.setattr(requirements, "lack_for_kernels", lambda device_type: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(r"sees no GPU\. Install one that is built for CUDA")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    refused(rf'TensorFlow has {gpus[0].name}, {gpus[1].name}, .*"CUDA_VISIBLE_DEVICES"')
    del gpus[1]
    config: Any = tf.config
    monkeypatch.setattr(config, "get_logical_device_configuration", lambda gpu: None)
    monkeypatch.setattr(config.experimental, "get_memory_growth", lambda gpu: False)
    refused("takes all of its memory when it starts.*set_memory_growth")
    monkeypatch.setattr(config.experimental, "get_memory_growth", lambda gpu: True)
    executor: Any = placement.executor_of(table, "'a layer'")
    assert executor.device == torch.device("cuda", 0)


@pytest.mark.parametrize("memory", [None, *slow(NEAR)])
def test_a_table_that_pytorch_has_on_a_gpu_is_read_and_stepped_rightly(memory):
    import torch

    import embedrock.torch as ert

    def trained_by_both(places):
        table = er.Table(ROWS, DIM, seed=3, rule=er.Adagrad(lr=0.5), init=er.Normal(), name="s", device_memory=memory)
        theirs = ert.Embedding(table)
        step, layer = ert.Adagrad(theirs, lr=0.5), erk.Embedding(table, rule=er.Adagrad(lr=0.5))
        if places:
            ert.place(theirs, "cpu")  # Triton interprets its kernels there
        ours, found = erk.optimizer("sgd"), []
        for _ in range(2):
            theirs(torch.from_numpy(IDS)).square().sum().backward()
            step.step()
            step.zero_grad()
            with tf.GradientTape() as tape:
                found.append(layer(IDS))
                loss = tf.reduce_sum(found[-1] ** 2)
            ours.apply([*tape.gradient(loss, layer.trainable_variables)], layer.trainable_variables)
        return [*map(np.asarray, found), table.lookup(np.arange(ROWS)), table.steps]

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = trained_by_both(places=True)
    on_cpu = "are on cpu: " in "".join(str(each.message) for each in told)
    assert on_cpu == (memory is None)  # or both use them there
    assert_same(found, trained_by_both(places=False))
