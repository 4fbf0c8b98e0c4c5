"""`Arena`: what its pages cost, as the system counts it."""

from __future__ import annotations

import mmap
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.errors import MemoryBudgetError
from embedrock.system import arena
from embedrock.system.arena import HUGE_PAGE, PAGE, Arena, reserve

SMALL_PAGES = HUGE_PAGE // PAGE


def huge_bytes(of: Arena) -> int:
    """Return how much of an arena lies in huge pages, as the system says."""
    start, stop = of.memory.ctypes.data, of.memory.ctypes.data + len(of.memory)
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = start <= int(span[1], 16) and int(span[2], 16) <= stop + PAGE
        elif inside and line.startswith("AnonHugePages:"):
            total += int(line.split()[1]) * 1024
    return total


def can_collapse() -> bool:
    """Return whether this system makes huge pages of small ones when it is asked to."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    memory = mmap.mmap(-1, 2 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = np.frombuffer(memory, np.uint8)
    view[::PAGE] = 1
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(arena._COLLAPSE, -view.ctypes.data % HUGE_PAGE, HUGE_PAGE)
    except OSError:
        return False
    return True


needs_huge_pages = pytest.mark.skipif(not can_collapse(), reason="needs huge pages, and Linux 6.1 or later")


def settle(of: Arena, nbytes: int) -> None:
    for _ in range(len(of.memory) // HUGE_PAGE):
        of.densify(nbytes)


def test_scattered_bytes_take_a_page_each() -> None:
    scattered = Arena(1 << 30, "a test", scattered=True)
    assert scattered.resident_bytes == 0
    places = np.arange(0, 1 << 30, 1 << 20)
    scattered.memory[places] = 7
    assert scattered.resident_bytes == len(places) * PAGE
    settle(scattered, 1 << 30)
    assert scattered.resident_bytes == len(places) * PAGE
    assert (scattered.memory[places] == 7).all()


def test_memory_that_is_filled_in_order_begins_with_small_pages() -> None:
    first = Arena(1 << 30, "a test")
    first.memory[:5000] = 1
    assert first.resident_bytes == 2 * PAGE


@needs_huge_pages
def test_memory_that_is_filled_in_order_has_huge_pages_from_the_second_on() -> None:
    filled = Arena(16 * HUGE_PAGE, "a test")
    filled.memory[:] = 1
    assert huge_bytes(filled) >= 14 * HUGE_PAGE
    settle(filled, len(filled.memory))
    assert huge_bytes(filled) >= 15 * HUGE_PAGE


@needs_huge_pages
def test_places_get_huge_pages_once_half_of_the_small_ones_are_in_use() -> None:
    some = Arena(12 * HUGE_PAGE, "a test", scattered=True)
    start = -some.memory.ctypes.data % HUGE_PAGE
    pages = some.memory[start : start + 11 * HUGE_PAGE].reshape(11, SMALL_PAGES, PAGE)
    pages[3, : SMALL_PAGES // 2, 0] = 3  # half
    pages[4, : SMALL_PAGES // 2 - 1, 0] = 4  # less
    pages[6, ::2, 0] = 6
    settle(some, some.resident_bytes)
    assert huge_bytes(some) == 2 * HUGE_PAGE
    assert some.resident_bytes == 2 * HUGE_PAGE + (SMALL_PAGES // 2 - 1) * PAGE
    expected = np.zeros_like(pages)  # its twin, as it is looked at only now: a page that is read counts as in use
    expected[3, : SMALL_PAGES // 2, 0], expected[4, : SMALL_PAGES // 2 - 1, 0], expected[6, ::2, 0] = 3, 4, 6
    np.testing.assert_array_equal(pages, expected)
    pages[..., 0] = 9
    settle(some, len(some.memory))
    assert huge_bytes(some) == 11 * HUGE_PAGE


@needs_huge_pages
def test_memory_of_which_all_will_be_used_has_huge_pages_at_once() -> None:
    whole = Arena(8 * HUGE_PAGE, "a test", scattered=True)
    whole.expect_all()
    whole.memory[::PAGE] = 1
    assert huge_bytes(whole) >= 7 * HUGE_PAGE


@needs_huge_pages
@pytest.mark.parametrize("path", [None, "t.rock"], ids=["ram", "disk"])
def test_a_direct_table_whose_rows_are_all_touched_lies_in_huge_pages(tmp_path: Path, path: str | None) -> None:
    place: dict[str, Any] = {"directory": "direct"} if path is None else {"path": tmp_path / path}
    with er.Table(100_000, 16, rule=er.Adam(), seed=0, **place) as table:  # 18.3 MiB
        ids, arena = np.random.default_rng(0).permutation(100_000), table._rows.tier.arena
        grads = np.ones((1000, 16), np.float32)
        table.update(ids[:1000], grads)
        assert table.stats()["direct"] == 1
        assert huge_bytes(arena) == 0
        for part in ids.reshape(100, 1000):
            table.update(part, grads)
        if path is not None:
            table.commit()
        assert huge_bytes(arena) >= 7 * HUGE_PAGE


def test_its_pages_are_looked_at_only_when_its_use_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    whole = Arena(64 * HUGE_PAGE, "a test", scattered=True)
    monkeypatch.setattr(whole, "_look", lambda: looks.append(1))
    for nbytes in range(0, len(whole.memory) + 1, PAGE):
        whole.densify(nbytes)
    if whole._is_small.size:
        assert 10 < len(looks) < 40
        more = len(looks)
        whole.densify(len(whole.memory))
        assert len(looks) == more


@pytest.mark.parametrize("advise", [None, OSError(12, "Cannot allocate memory")], ids=["old", "out of areas"])
def test_a_system_that_refuses_is_no_error(advise: OSError | None, monkeypatch: pytest.MonkeyPatch) -> None:
    some = Arena(4 * HUGE_PAGE, "a test", scattered=True)
    some.memory[:] = 5

    class Refusing:
        def madvise(self, option: int, *_: int) -> None:
            if option == arena._COLLAPSE:
                raise OSError(22, "Invalid argument")
            if advise is not None:
                raise advise

    monkeypatch.setattr(some, "_map", Refusing())
    settle(some, len(some.memory))
    assert (some.memory == 5).all()


@pytest.mark.parametrize("make", [Arena, reserve])
def test_more_than_there_is_of_address_space_is_refused(make: Callable[[int, str], object]) -> None:
    with pytest.raises(MemoryBudgetError, match=r"table 'users' needs .* of address space, and the system refused: "):
        make(1 << 62, "table 'users'")
    assert len(reserve(0, "nothing")) == 0


def test_a_child_process_reads_what_is_there() -> None:
    script = (
        "import os; from embedrock.system.arena import Arena\n"
        "a = Arena(1 << 24, 'a test', scattered=True); a.memory[:] = 3; a.densify(1 << 24)\n"
        "pid = os.fork()\n"
        "if not pid: a.densify(1 << 24); os._exit(int((a.memory == 3).all()))\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
