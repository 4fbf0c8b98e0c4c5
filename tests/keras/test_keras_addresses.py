"""Addresses in the place of paths: refused before a folder "s3:" is made."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest

import embedrock as er
import embedrock.keras as erk

URL = "s3://users"


def built(layer: keras.layers.Layer) -> keras.Model:
    model = keras.Sequential([keras.Input((2,), dtype="int64"), layer])
    model(np.zeros((1, 2), np.int64))
    return model


TAKE_PATHS: dict[str, Callable[[], object]] = {
    "Embedding": lambda: built(erk.Embedding(10, 4, path=URL)),
    "EmbeddingBag": lambda: built(erk.EmbeddingBag(10, 4, path=URL)),
    "from_pretrained": lambda: built(erk.Embedding.from_pretrained(np.zeros((10, 4), np.float32), path=URL)),
    "TableCheckpoint": lambda: erk.TableCheckpoint(URL),
    "load_model": lambda: erk.load_model(URL),
    "export": lambda: erk.export(built(erk.Embedding(10, 4)), URL),
}


@pytest.mark.parametrize("what", TAKE_PATHS)
def test_an_address_is_no_path(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(er.ArgumentError, match="on a disk of this machine: got 's3://users'"):
        TAKE_PATHS[what]()
    assert os.listdir(tmp_path) == []
