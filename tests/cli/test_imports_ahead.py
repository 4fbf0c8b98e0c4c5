"""Batches are read while others are written, in order, and no reader outlives its use."""

from __future__ import annotations

import threading
from collections.abc import Generator

import pytest

from embedrock.cli.imports import ahead


def test_order_and_end():
    with ahead(number for number in range(100)) as found:
        assert list(found) == list(range(100))
    with ahead(number for number in range(0)) as found:
        assert list(found) == []


def test_the_next_one_is_made_meanwhile():
    made = threading.Event()

    def items() -> Generator[int]:
        yield 0
        made.set()
        yield 1

    with ahead(items()) as found:
        assert next(found) == 0
        assert made.wait(60)  # although nobody has asked for it
        assert list(found) == [1]


def test_an_error_comes_where_its_item_would():
    def items() -> Generator[int]:
        yield 0
        raise ValueError("row 1")

    with ahead(items()) as found:
        assert next(found) == 0
        with pytest.raises(ValueError, match="row 1"):
            next(found)


def test_what_is_left_in_the_middle_is_closed():
    closed = []

    def items() -> Generator[int]:
        try:
            yield from range(100)
        finally:
            closed.append(True)

    with ahead(items()) as found:
        assert next(found) == 0
    assert closed == [True]
