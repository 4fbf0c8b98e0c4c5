"""Rows of Keras' layers are used by the CPU: who asks for GPU memory, has GPUs, or rows there, is told."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

import embedrock as er
import embedrock.keras as erk
from embedrock.errors import UnsupportedError

ROWS, DIM = 12, 4
IDS = np.array([[1, 5], [5, 11]])
BY_HOST = "TensorFlow's programs look rows up, and step them, by calls of the host, in RAM or on disk"


@pytest.mark.parametrize("kind", [erk.Embedding, erk.EmbeddingBag])
def test_gpu_memory_is_refused(kind):
    said = rf"^`device_memory` of erk\.{kind.__name__} must be None or 0: got '1MiB'\. {BY_HOST}.* Leave it out\. .*ert"
    with pytest.raises(UnsupportedError, match=said.removesuffix("ert") + r"use embedrock\.torch"):
        kind(ROWS, DIM, device_memory="1MiB")
    with pytest.raises(UnsupportedError, match=rf"of erk\.{kind.__name__}\.from_pretrained must be None or 0: got 9"):
        kind.from_pretrained(np.eye(DIM, dtype=np.float32), device_memory=9)
    assert kind(ROWS, DIM, device_memory=0).table.device_memory == 0


def test_a_table_may_have_gpu_memory_for_layers_of_pytorch():
    layer = erk.Embedding(er.Table(ROWS, DIM, device_memory="1MiB"))
    assert layer(IDS).shape == (2, 2, DIM)
    assert layer.get_config()["table"]["device_memory"] == 1 << 20


@pytest.fixture
def gpus(monkeypatch):
    """Let TensorFlow say that it has two GPUs."""
    named = [SimpleNamespace(name=f"/physical_device:GPU:{k}") for k in range(2)]
    before = tf.config.get_visible_devices
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: named if kind == "GPU" else before(kind))


@pytest.mark.usefixtures("gpus")
def test_where_there_are_gpus_it_is_told_once_that_they_use_no_rows():
    said = rf"TensorFlow has /physical_device:GPU:0, /physical_device:GPU:1, and rows .* not used there: {BY_HOST}.*=0 "
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


def test_a_table_that_pytorch_has_on_a_gpu_is_read_and_stepped_rightly_and_it_is_told():
    torch = pytest.importorskip("torch")
    import embedrock.torch as ert

    def trained(places):
        table = er.Table(ROWS, DIM, seed=3, rule=er.Adagrad(lr=0.5), init=er.Normal(), name="shared")
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

    with pytest.warns(erk.PlacementWarning, match=r"rows of 'embedding.*are on cpu: .*where layers of PyTorch use"):
        found = trained(places=True)
    for one, other in zip(found, trained(places=False), strict=True):
        np.testing.assert_array_equal(one, other)
