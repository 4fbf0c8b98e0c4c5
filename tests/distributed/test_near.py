"""Messages that ranks of one machine leave where the others read them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from embedrock.distributed.messages import pack_all
from embedrock.distributed.near import NearRanks
from embedrock.system.shared_memory import GRAIN, MappedMemory, SharedMemory

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no such memory")


class Meeting:
    """Threads that stand for ranks."""

    def __init__(self, ranks: int) -> None:
        self._told, self._barrier = [np.empty(0)] * ranks, Barrier(ranks, timeout=30)

    def gather(self, rank: int, numbers: np.ndarray) -> list[np.ndarray]:
        self._told[rank] = numbers
        self._barrier.wait()
        found = list(self._told)
        self._barrier.wait()
        return found


def swaps(rank: int, meeting: Meeting, sizes: list[int]) -> list[list[list[int]]]:
    near, found = NearRanks.of(rank, 3, lambda numbers: meeting.gather(rank, numbers)), []
    assert near is not None
    for size in sizes:
        letters: Any = [[np.full(size + to, 10 * rank + to, np.int32)] for to in range(3)]
        mail = pack_all(letters, near.room) if size % 2 else pack_all(letters)  # those lie elsewhere
        notes = near.swapped(near.left(mail), 30.0)
        found.append([[len(one), *set(one.tolist())] for one in near.read(notes)])
    near.close()
    return found


def test_each_rank_reads_what_the_others_have_left_for_it() -> None:
    sizes, meeting = [3, 4, GRAIN, 5, 3 * GRAIN + 1, 1], Meeting(3)
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda rank: swaps(rank, meeting, sizes), range(3)))
    for rank, each in enumerate(found):
        assert each == [[[size + rank, 10 * other + rank] for other in range(3)] for size in sizes]


@pytest.mark.parametrize("gone", ["closed", "silent"])
def test_what_waits_for_a_rank_that_has_closed_its_lines_or_says_nothing_raises(gone: str) -> None:
    meeting, numbers = Meeting(2), np.zeros((2, 2), np.int64)
    with ThreadPoolExecutor(2) as threads:
        ours, theirs = threads.map(lambda r: NearRanks.of(r, 2, lambda told: meeting.gather(r, told)), range(2))
    assert ours is not None
    assert theirs is not None
    if gone == "closed":
        theirs.close()
    with pytest.raises(OSError, match="Broken pipe" if gone == "closed" else "timed out"):
        ours.swapped(numbers, 0.0)


def test_one_that_does_not_see_the_others_has_all_of_them_go_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = Meeting(2)
    monkeypatch.setattr("embedrock.distributed.near.SharedMemory", lambda: _fails())
    with ThreadPoolExecutor(2) as threads:
        ranks = list(threads.map(lambda r: NearRanks.of(r, 2, lambda numbers: meeting.gather(r, numbers)), range(2)))
    assert ranks == [None, None]
    assert NearRanks.of(0, 1, lambda numbers: [numbers]) is None


def _fails() -> SharedMemory:
    raise OSError("no such memory")


def test_a_file_that_is_no_segment_or_another_one_is_refused() -> None:
    one, other = SharedMemory(), SharedMemory()
    np.testing.assert_array_equal(MappedMemory(one.address, one.token).view(0, 16).view(np.int64), one.token)
    with pytest.raises(OSError, match="the segment is another one"):
        MappedMemory(one.address, other.token)
    with open(os.devnull) as file, pytest.raises(OSError, match="the file is another one"):
        MappedMemory((os.getpid(), file.fileno()), one.token)


def test_memory_that_the_system_does_not_have_is_an_error_and_what_there_is_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    segment = SharedMemory()
    segment.take(8)[:] = 7

    def refuses(*args: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuses)
    with pytest.raises(MemoryError, match="no 1,245,184 bytes for messages to other processes: No space left"):
        segment.take(1 << 20)
    np.testing.assert_array_equal(segment.take(8), 7)
