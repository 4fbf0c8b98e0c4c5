"""`init=` by the names and functions of PyTorch: the distributions that they have there, and refusals of all else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import init

import embedrock as er
import embedrock.torch as ert

ROWS, DIM = 3000, 16  # so far apart that fans cannot be taken for each other
partial: Any = functools.partial

FUNCTIONS = [
    init.uniform_,
    init.normal_,
    init.trunc_normal_,
    init.xavier_uniform_,
    init.xavier_normal_,
    init.kaiming_uniform_,
    init.kaiming_normal_,
    partial(init.uniform_, a=-0.1, b=0.3),
    partial(init.normal_, mean=1.0, std=0.02),
    partial(init.trunc_normal_, std=0.02),  # whose default cut is never reached
    partial(init.trunc_normal_, std=0.02, a=-0.04, b=0.04),
    partial(init.trunc_normal_, mean=0.5, std=2.0, a=-0.5, b=1.5),
    partial(init.xavier_uniform_, gain=3.0),
    partial(init.kaiming_uniform_, mode="fan_out", nonlinearity="relu"),
    partial(init.kaiming_normal_, a=5**0.5),
    partial(init.kaiming_normal_, nonlinearity="tanh"),
]


def called(value: Any) -> str | None:
    """Return a name for a test that is the same in every process: addresses are not."""
    function = value.func if isinstance(value, functools.partial) else value
    keywords = value.keywords if isinstance(value, functools.partial) else {}
    return "-".join(map(str, (getattr(function, "__name__", function), *keywords)))


NAMES = {
    "uniform": init.uniform_,
    "normal": init.normal_,
    "trunc_normal": init.trunc_normal_,
    "truncated_normal": init.trunc_normal_,
    "xavier_uniform": init.xavier_uniform_,
    "xavier_uniform_": init.xavier_uniform_,
    "xavier_normal": init.xavier_normal_,
    "kaiming_uniform": init.kaiming_uniform_,
    "kaiming_normal": init.kaiming_normal_,
    "glorot_uniform": init.xavier_uniform_,
    "glorot_normal": init.xavier_normal_,
    "he_uniform": init.kaiming_uniform_,
    "he_normal": init.kaiming_normal_,
    "lecun_uniform": partial(init.kaiming_uniform_, nonlinearity="linear"),
    "lecun_normal": partial(init.kaiming_normal_, nonlinearity="linear"),
}


def drawn_here(given: Any, layer: Any = ert.Embedding) -> np.ndarray:
    return layer(ROWS, DIM, init=given, seed=1).table.lookup(np.arange(ROWS)).reshape(-1)


def drawn_there(function: Callable[..., Any]) -> np.ndarray:
    torch.manual_seed(2)
    return function(torch.empty(ROWS, DIM)).numpy().reshape(-1)


def check_same_distribution(got: np.ndarray, expected: np.ndarray) -> None:
    """Compare samples of 48,000: a scale that is 3 % off fails."""
    result: Any = stats.ks_2samp(got, expected)
    assert result.pvalue > 1e-3
    np.testing.assert_allclose(got.std(), expected.std(), rtol=0.015)
    np.testing.assert_allclose(got.mean(), expected.mean(), atol=0.02 * expected.std())


@pytest.mark.parametrize("function", FUNCTIONS, ids=called)
def test_functions_have_the_distribution_that_they_have_in_pytorch(function: Callable[..., Any]):
    got, expected = drawn_here(function), drawn_there(function)
    check_same_distribution(got, expected)
    if not isinstance(ert.Embedding(ROWS, DIM, init=function).table.spec.init, er.Normal):  # which has no bounds
        for edge in (np.min, np.max):
            assert edge(got) == pytest.approx(edge(expected), abs=2e-3 * float(expected.std()))


@pytest.mark.parametrize("name", NAMES)
def test_names_are_those_functions(name: str):
    layers = [ert.Embedding(ROWS, DIM, init=given) for given in (name, NAMES[name])]
    assert layers[0].table.spec.init == layers[1].table.spec.init
    assert ert.EmbeddingBag(ROWS, DIM, init=name).table.spec.init == layers[0].table.spec.init


def test_a_distribution_that_is_a_little_off_is_noticed():
    expected = drawn_there(init.xavier_normal_)
    with pytest.raises(AssertionError):
        check_same_distribution(expected * np.float32(1.03), expected)


def test_constants():
    for given, value in (("zeros", 0), (init.zeros_, 0), ("ones", 1), (partial(init.constant_, val=2.5), 2.5)):
        assert (drawn_here(given) == value).all()


def test_the_numbers_are_kept_with_the_table(tmp_path: Any):
    layer = ert.Embedding(ROWS, DIM, init="xavier_uniform", path=tmp_path / "t", seed=1)
    assert layer.table.spec.init == er.Uniform(-((6 / (ROWS + DIM)) ** 0.5), (6 / (ROWS + DIM)) ** 0.5)
    layer.table.close()
    again = ert.Embedding(ROWS, DIM, init="glorot_uniform", path=tmp_path / "t")
    again.table.close()
    with pytest.raises(er.TableFileError, match=r"`init` of .* must be that of the table.*Leave it out"):
        ert.Embedding(ROWS, DIM, init="xavier_normal", path=tmp_path / "t")


def test_open_ids_have_no_fan_of_their_own():
    assert ert.Embedding(None, DIM, init="kaiming_uniform").table.spec.init == er.Uniform(
        *ert.Embedding(ROWS, DIM, init="kaiming_uniform").table.spec.init.__dict__.values()
    )
    for given in ("xavier_uniform", "glorot_normal", partial(init.kaiming_normal_, mode="fan_out")):
        with pytest.raises(er.ArgumentError, match=r"follows from the number of rows, and open ids .*er\.Uniform\(low"):
            ert.Embedding(None, DIM, init=given)


@pytest.mark.parametrize(
    ("given", "error", "problem"),
    [
        (
            "xavier_unifrom",
            er.ArgumentError,
            r"must be one of zeros, .*got 'xavier_unifrom'\. Did you mean 'xavier_unif",
        ),
        ("Xavier_Normal", er.ArgumentError, "Did you mean 'xavier_normal'"),
        ("orthogonal", er.ArgumentError, r"got 'orthogonal'\.$"),
        (init.orthogonal_, er.UnsupportedError, r"\(zeros_, .*got <function orthogonal_.*er\.FromArray\(array\)"),
        (init.sparse_, er.UnsupportedError, r"from_pretrained\(array\)"),
        (torch.nn.init, er.UnsupportedError, "got <module"),
        (lambda weight: weight, er.UnsupportedError, "got <function <lambda>"),
        (partial(init.normal_, 0.0, 0.02), er.UnsupportedError, "arguments by name"),
        (partial(init.normal_, sigma=1), er.ArgumentError, r"init\.normal_ takes other arguments: .*'sigma'"),
        (init.constant_, er.ArgumentError, "missing a required argument: 'val'"),
        (partial(init.kaiming_normal_, mode="fan_avg"), er.ArgumentError, "one of fan_in, fan_out: got 'fan_avg'"),
        (partial(init.kaiming_normal_, nonlinearity="gelu"), er.ArgumentError, "`nonlinearity` of .*gelu"),
        (partial(init.trunc_normal_, a=0.0), er.UnsupportedError, r"as far below .* got mean=0.0, a=0.0, b=2.0"),
        (partial(init.normal_, generator=torch.Generator()), er.UnsupportedError, "pass seed= instead"),
        (partial(init.normal_, std=-1.0), er.ArgumentError, "must not be negative"),
    ],
    ids=called,
)
def test_what_is_refused(given: Any, error: type[Exception], problem: str):
    with pytest.raises(error, match=problem):
        ert.Embedding(ROWS, DIM, init=given)


def test_other_arguments_are_still_refused_for_themselves():
    with pytest.raises(er.ArgumentError, match=r"`embedding_dim` of ert\.Embedding must be a whole number .*got 0"):
        ert.Embedding(ROWS, 0, init="xavier_uniform")
    with pytest.raises(er.ArgumentError, match=r"`num_embeddings` of ert\.Embedding must be .*got -1"):
        ert.Embedding(-1, DIM, init="xavier_uniform")
    with pytest.raises(er.ArgumentError, match=r"`init` of ert\.Embedding belongs to the table"):
        ert.Embedding(er.Table(ROWS, DIM), init="zeros")
    with pytest.raises(er.ArgumentError, match=r"got 'zeros'\. For example er\.Normal.* Names are for layers"):
        er.Table(ROWS, DIM, init="zeros")  # pyright: ignore[reportArgumentType]
