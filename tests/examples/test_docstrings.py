"""The examples in docstrings of examples/ and tools/ run."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["common", "planted", "interactions", "leave_one_out", "scale"])
def test_docstrings(name: str):
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted
    assert not found.failed
