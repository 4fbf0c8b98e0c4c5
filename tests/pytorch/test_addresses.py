"""Addresses in the place of paths: refused before a folder "s3:" is made."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import embedrock as er
import embedrock.torch as ert

URL = "s3://users"
TAKE_PATHS: dict[str, Callable[[], object]] = {
    "Embedding": lambda: ert.Embedding(10, 4, path=URL),
    "EmbeddingBag": lambda: ert.EmbeddingBag(10, 4, path=URL),
    "from_pretrained": lambda: ert.Embedding.from_pretrained(torch.zeros(10, 4), path=URL),
    "save": lambda: ert.save(torch.nn.Sequential(ert.Embedding(10, 4)), URL, step=1),
    "load": lambda: ert.load(torch.nn.Sequential(ert.Embedding(10, 4)), URL),
}


@pytest.mark.parametrize("what", TAKE_PATHS)
def test_an_address_is_no_path(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(er.ArgumentError, match="on a disk of this machine: got 's3://users'"):
        TAKE_PATHS[what]()
    assert os.listdir(tmp_path) == []
