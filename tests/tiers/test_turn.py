"""Who has tables: locks of several are taken in one order, all of them or none."""

from __future__ import annotations

from typing import Any

import pytest

from embedrock.tiers.turn import TableLock, together


class Interrupted:
    """A lock at which Ctrl-C comes."""

    def acquire(self) -> None:
        raise KeyboardInterrupt


def test_locks_are_taken_in_one_order_once_each() -> None:
    turns = [TableLock() for _ in range(3)]
    with together([turns[2], turns[0], turns[2]]) as _:
        assert [turn.lock._is_owned() for turn in turns] == [True, False, True]
    assert not any(turn.lock._is_owned() for turn in turns)


def test_none_stays_taken_where_one_cannot_be() -> None:
    turns = [TableLock() for _ in range(3)]
    broken: Any = turns[1]
    broken.lock = Interrupted()
    with pytest.raises(KeyboardInterrupt), together(turns):
        pass
    assert not turns[0].lock._is_owned()
    assert not turns[2].lock._is_owned()
