"""Who has tables: locks of several are taken in one order, all of them or none."""

from __future__ import annotations

from typing import Any

import pytest

from embedrock.storage.table_lock import TableLock, together


class Interrupted:
    """A lock at which Ctrl-C comes."""

    def acquire(self) -> None:
        raise KeyboardInterrupt


def test_locks_are_taken_in_one_order_once_each() -> None:
    table_locks = [TableLock() for _ in range(3)]
    with together([table_locks[2], table_locks[0], table_locks[2]]) as _:
        assert [table_lock.lock._is_owned() for table_lock in table_locks] == [True, False, True]
    assert not any(table_lock.lock._is_owned() for table_lock in table_locks)


def test_none_stays_taken_where_one_cannot_be() -> None:
    table_locks = [TableLock() for _ in range(3)]
    broken: Any = table_locks[1]
    broken.lock = Interrupted()
    with pytest.raises(KeyboardInterrupt), together(table_locks):
        pass
    assert not table_locks[0].lock._is_owned()
    assert not table_locks[2].lock._is_owned()
