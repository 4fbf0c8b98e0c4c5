"""Processes that wait for each other in a circle, as they find it out: here, threads stand for them."""

from __future__ import annotations

import os

import pytest

from embedrock.distributed.near import WaitBoard, waits_here

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no such memory")


def looks(ranks: list[WaitBoard], *edges: tuple[int, int]) -> list[bool]:
    return [ranks[one].look(ranks[other].address) for one, other in edges]


def ranks(count: int) -> list[WaitBoard]:
    return [WaitBoard() for _ in range(count)]


def test_a_circle_is_known_once_all_in_it_have_looked_again_and_then_to_all() -> None:
    found, circle = ranks(4), [(0, 1), (1, 2), (2, 0)]
    assert looks(found, (3, 0), *circle, (3, 0)) == [False] * 5  # 3 waits for one of it, and is not in it
    assert looks(found, *circle[:2]) == [False, False]  # it is seen for the first time
    assert looks(found, *circle) == [False, False, True]  # which had seen it before, and each has looked since
    found[2].end()  # as it raises an error
    assert looks(found, (0, 1), (1, 2), (3, 0)) == [True, True, False]


def test_who_goes_on_is_in_no_circle() -> None:
    found, circle = ranks(2), [(0, 1), (1, 0)]
    looks(found, *circle)
    found[1].end()  # its message has come
    assert looks(found, *[(0, 1)] * 5) == [False] * 5
    looks(found, (1, 0))  # another wait
    assert looks(found, (0, 1), (0, 1)) == [False, False]  # of which nobody knows yet whether it lasts
    assert looks(found, (1, 0), (0, 1)) == [True, True]  # each has looked since the other began


def test_a_circle_of_before_is_none_of_now() -> None:
    found, circle = ranks(2), [(0, 1), (1, 0)]
    while not all(looks(found, *circle)):
        pass
    for one in found:
        one.end()
    assert looks(found, (0, 1), (0, 1), (0, 1)) == [False] * 3  # 1 does something else now


def test_who_waits_for_one_that_is_gone_is_in_no_circle() -> None:
    one, other = ranks(2)
    address = other.address
    other.look(one.address)
    del other
    assert [one.look(address) for _ in range(3)] == [False] * 3


def test_a_process_has_one_board() -> None:
    assert waits_here() is waits_here()
