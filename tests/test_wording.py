"""Near misses get "did you mean", and messages have their plurals right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import embedrock as er
import embedrock.torch as ert
from embedrock.spec.description import rule_of

NEAR: dict[str, tuple[Callable[[Path], Any], str]] = {
    "dtype": (lambda path: er.Table(9, 4, dtype="bfloat61"), "bfloat16"),
    "directory": (lambda path: er.Table(9, 4, directory="hash"), "hashed"),
    "policy": (lambda path: er.Table(9, 4, path=path, policy="LRU"), "lru"),
    "mode of a table": (lambda path: er.open(path, mode="R"), "r"),
    "on_nonfinite": (lambda path: er.Table(9, 4, on_nonfinite="skipp"), "skip"),
    "missing": (lambda path: er.Table(9, 4).lookup([1], missing="zero"), "zeros"),
    "mode of bags": (lambda path: ert.EmbeddingBag(9, 4, mode="Mean"), "mean"),
    "dtype of a layer": (lambda path: ert.Embedding(9, 4, dtype="float32"), "torch.float32"),  # pyright: ignore
    "argument of Table": (lambda path: er.Table(9, 4, memroy="1GB"), "memory"),  # pyright: ignore[reportCallIssue]
    "argument of open": (lambda path: er.open(path, memroy="1GB"), "memory"),  # pyright: ignore[reportCallIssue]
    "argument of a layer": (lambda path: ert.Embedding(9, 4, paddng_idx=0), "padding_idx"),  # pyright: ignore
    "argument of pretrained": (lambda path: ert.Embedding.from_pretrained(torch.eye(2), paht="t"), "path"),  # pyright: ignore
    "hyperparameter": (lambda path: er.Adam(beta=(0.9, 0.99)), "betas"),  # pyright: ignore[reportCallIssue]
    "of a step": (lambda path: er.Table(9, 4, rule=er.Adam()).update([1], np.ones((1, 4)), epss=1), "eps"),
    "saved rule": (lambda path: rule_of({"name": "adam"}), "Adam"),
}


@pytest.mark.parametrize(("make", "meant"), NEAR.values(), ids=NEAR)
def test_a_near_miss(tmp_path: Path, make: Callable[[Path], Any], meant: str):
    with pytest.raises((er.ArgumentError, er.UnknownArgumentError)) as caught:
        make(tmp_path / "t.rock")
    assert f" Did you mean {meant!r}?" in str(caught.value)


def test_what_is_far_from_everything_is_no_near_miss():
    with pytest.raises(er.ArgumentError, match=r"`directory` must be one of auto, direct, hashed: got 'tree'\.$"):
        er.Table(9, 4, directory="tree")
    with pytest.raises(er.ArgumentError, match=r"`directory` must be one of auto, direct, hashed: got 7\.$"):
        er.Table(9, 4, directory=7)  # pyright: ignore[reportArgumentType]


def test_one_is_no_plural(tmp_path: Path):
    table = er.Table(9, 4, rule=er.SGD(lr=0.1))
    with pytest.raises(er.NonFiniteGradientError, match="NaN or Inf in 1 of 1 row, first"):
        table.update([1], np.full((1, 4), np.nan))
    table.update([1], np.ones((1, 4)))
    assert ", 1 row touched, " in repr(table)
    table = er.Table(9, 4096, rule=er.SGD(lr=0.1), memory="60KiB", directory="hashed")
    table.update([1], np.ones((1, 4096)))
    with pytest.raises(er.MemoryBudgetError, match="the table has 1 row in RAM and this batch touches 8 new ones"):
        table.update(range(9), np.ones((9, 4096)))
    memory = er.Table(9, 4, rule=er.SGD()).memory_for(1)
    table = er.Table(9, 4, rule=er.SGD(lr=0.1), memory=memory, path=tmp_path / "t.rock")
    with table, pytest.raises(er.CacheTooSmallError, match="holds 1 row, and this batch needs"):
        table.update(range(9), np.ones((9, 4)))
