"""`embeddings_initializer`: the distributions of Keras' own, and refusals of those that are no formula."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import initializers
from scipy import stats

import embedrock as er
import embedrock.keras as erk

ROWS, DIM = 3000, 16  # so far apart that fans cannot be taken for each other

# Made without a seed, one of Keras' draws other values in each process.
SCALED = [
    initializers.VarianceScaling(scale=scale, mode=mode, distribution=distribution, seed=3)
    for scale, mode in ((1.0, "fan_in"), (2.0, "fan_out"), (0.5, "fan_avg"))
    for distribution in ("uniform", "truncated_normal", "untruncated_normal")
]
ACCEPTED = [
    *("uniform", "normal", "random_uniform", "random_normal", "truncated_normal"),
    *(f"{name}_{kind}" for name in ("glorot", "he", "lecun") for kind in ("uniform", "normal")),
    initializers.RandomUniform(minval=-0.2, maxval=0.1, seed=3),
    initializers.RandomNormal(mean=0.3, stddev=0.02, seed=3),
    initializers.TruncatedNormal(mean=0.3, stddev=0.02, seed=3),
    initializers.GlorotNormal(seed=3),
    initializers.HeUniform,
    {"class_name": "LecunNormal", "config": {}},
    *SCALED,
]


def named(value: Any) -> str:
    """Return a name for a test that is the same in every process: addresses are not."""
    config = value.get_config() if isinstance(value, initializers.Initializer) else value
    return f"{getattr(value, '__name__', type(value).__name__)}-{config if isinstance(config, str | dict) else ''}"


@pytest.mark.parametrize("given", ACCEPTED, ids=named)
def test_rows_have_the_distribution_that_they_have_in_keras(given: Any):
    got = erk.Embedding(ROWS, DIM, given, seed=1).table.lookup(np.arange(ROWS)).reshape(-1)
    keras.utils.set_random_seed(2)
    theirs: Any = initializers.get(given)
    expected = np.asarray(theirs((ROWS, DIM))).reshape(-1)
    result: Any = stats.ks_2samp(got, expected)
    assert result.pvalue > 1e-3
    np.testing.assert_allclose(got.std(), expected.std(), rtol=0.015)
    if not isinstance(erk.Embedding(ROWS, DIM, given).table.spec.init, er.Normal):  # which has no bounds
        for edge in (np.min, np.max):
            assert edge(got) == pytest.approx(edge(expected), abs=2e-3 * float(expected.std()))


def test_constants():
    for given, value in (("zeros", 0), ("ones", 1), (initializers.Constant(2.5), 2.5), (initializers.Ones, 1)):
        assert (np.asarray(erk.Embedding(ROWS, DIM, given)(np.arange(9))) == value).all()


@pytest.mark.parametrize(("theirs", "ours"), [("xavier_uniform", "glorot_uniform"), ("kaiming_normal", "he_normal")])
def test_names_of_pytorch_are_those_of_the_same_in_keras(theirs: str, ours: str):
    layers = [erk.EmbeddingBag(ROWS, DIM, name) for name in (theirs, ours)]
    assert layers[0].table.spec.init == layers[1].table.spec.init
    again = erk.EmbeddingBag.from_config(layers[0].get_config())
    assert again.table.spec.init == layers[0].table.spec.init


class Own(initializers.RandomNormal):
    """Draws what it likes."""

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        return keras.ops.ones(shape)


@pytest.mark.parametrize(
    ("given", "error", "problem"),
    [
        ("glorot_unifrom", er.ArgumentError, r"got 'glorot_unifrom'\. Did you mean 'glorot_uniform'"),
        ("xavier_norml", er.ArgumentError, r"Did you mean 'xavier_normal'"),
        ("orthogonal", er.UnsupportedError, r"got 'orthogonal'\. Use zeros, .*glorot_normal.*er\.FromArray\(array\)"),
        (initializers.Identity(), er.UnsupportedError, r"from_pretrained\(array\)"),
        (Own(), er.UnsupportedError, "must draw each row by itself: got .*Own"),
        (lambda shape, dtype=None: keras.ops.ones(shape), er.UnsupportedError, "got <function"),
        (
            "constant",
            er.ArgumentError,
            r"'constant' lacks its 'value'\. Pass an instance: keras\.initializers\.Constant",
        ),
        (5, er.ArgumentError, "must be one of Keras' or of Embedrock's.*: got 5"),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_what_is_refused(given: Any, error: type[Exception], problem: str):
    with pytest.raises(error, match=problem):
        erk.Embedding(ROWS, DIM, given)


def test_open_ids_have_no_fan_in():
    fan_out = initializers.VarianceScaling(mode="fan_out", distribution="uniform")
    layers = [erk.Embedding(rows, DIM, fan_out) for rows in (None, ROWS)]
    assert layers[0].table.spec.init == layers[1].table.spec.init
    with pytest.raises(er.ArgumentError, match=r"'glorot_uniform' follows from the number of rows, and open ids"):
        erk.Embedding(None, DIM, "glorot_uniform")
