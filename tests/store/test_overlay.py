"""Overlays against a dict, and what they take."""

from __future__ import annotations

import mmap
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from embedrock.errors import CorruptTableError, MemoryBudgetError
from embedrock.store.log_index import LogIndex
from reference.storage import unmix
from slow import examples

PAGE = 4096


def check_size(log_index: LogIndex) -> None:
    assert log_index.nbytes <= 24 * log_index.count + PAGE


def items(log_index: LogIndex, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    ids, locations = log_index.behind(None, batch)
    while len(ids):
        yield ids, locations
        ids, locations = log_index.behind(int(ids[-1]), batch)


def content(log_index: LogIndex, batch: int = 100) -> dict[int, int]:
    found: dict[int, int] = {}
    for ids, locations in items(log_index, batch):
        assert 0 < len(ids) <= batch
        assert not found.keys() & set(ids.tolist())
        found.update(zip(ids.tolist(), locations.tolist(), strict=True))
    return found


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.log_index, self.model, self.run = LogIndex(), {}, 0

    @rule(seed=st.integers(0, 2**32), count=st.sampled_from([0, 1, 5, 300, 2000]), spread=st.sampled_from([9, 30, 63]))
    def insert(self, seed: int, count: int, spread: int) -> None:
        rng = np.random.default_rng(seed)
        ids = rng.integers(-(2**spread), 2**spread - 1, count)
        locations = (self.run << 40) + rng.integers(0, 2**40, count)
        most = self.log_index.bytes_with(count)
        self.log_index.insert(ids, locations)
        assert self.log_index.nbytes <= most
        self.model.update(zip(ids.tolist(), locations.tolist(), strict=True))
        self.run += 1

    @rule(low=st.integers(0, 9))
    def insert_neighbours(self, low: int) -> None:
        # Hashes that lie closely together at the end of the table, which is where they have no room.
        hashes = range(2**64 - 1 - 3000 * low, 2**64 - 401 - 3000 * low, -1)
        ids = (np.array([unmix(key) for key in hashes], np.uint64) ^ self.log_index._salt).view(np.int64)
        self.log_index.insert(ids, np.full(400, self.run << 40))
        self.model.update(dict.fromkeys(ids.tolist(), self.run << 40))

    @rule(back=st.integers(0, 6), share=st.sampled_from([0.1, 0.5, 1.0]))
    def remove(self, back: int, share: float) -> None:
        asked = {row: location for row, location in self.model.items() if row % 1000 < 1000 * share}
        ids, locations = (np.array([*each], np.int64) for each in (asked, asked.values()))
        first = max(0, self.run - back)
        locations[locations >> 40 >= first] += 1 << 40  # where they are not
        self.log_index.remove(ids, locations)
        self.log_index.fit()
        kept = {row: location for row, location in self.model.items() if row not in asked or location >> 40 >= first}
        self.model = kept

    @rule(batch=st.sampled_from([1, 50, 1000]), count=st.integers(0, 300))
    def go_through(self, batch: int, count: int) -> None:
        """What is there all the while is found once, though rows are inserted and the memory grows."""
        before, seen, last = dict(self.model), list[int](), None
        while len((part := self.log_index.behind(last, batch))[0]) and len(seen) < 20 * batch:
            seen += part[0].tolist()
            last = seen[-1]
            if len(seen) < 5 * batch:
                self.insert(len(seen), count, 40)
        assert len(set(seen)) == len(seen)
        if len(seen) < 20 * batch:
            assert before.keys() <= set(seen)

    @invariant()
    def agree(self) -> None:
        assert self.log_index.count == len(self.model)
        check_size(self.log_index)
        assert content(self.log_index) == self.model
        ids = np.array([*self.model, 12345, -(2**63), 2**63 - 1], np.int64)
        assert self.log_index.find(ids).tolist() == [self.model.get(row, -1) for row in ids.tolist()]


Machine.TestCase.settings = settings(max_examples=examples(30), stateful_step_count=20)
TestMachine = Machine.TestCase


@settings(max_examples=examples(20))
@given(st.integers(0, 2**32))
def test_size_while_it_grows(seed: int):
    rng, log_index = np.random.default_rng(seed), LogIndex()
    while log_index.count < 20_000:
        count = int(rng.integers(1, 900))
        most = log_index.bytes_with(count)
        log_index.insert(rng.integers(-(2**63), 2**63 - 1, count), rng.integers(0, 2**62, count))
        check_size(log_index)
        assert log_index.nbytes <= most
    for share in (0.0, 0.1, 0.2, 0.7, 0.9, 0.99, 1.0):
        ids, locations = (np.concatenate(each) for each in zip(*items(log_index, 1000), strict=True))
        chosen = locations >> 40 < int(share * 2**22)
        log_index.remove(ids[chosen], locations[chosen])
        log_index.fit()
        check_size(log_index)
    assert log_index.count == 0


PEAK = """
import numpy as np
from embedrock.store.log_index import LogIndex

def high_water():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

overlay, ids = LogIndex(), np.arange(10_000)
overlay.insert(ids - 10_000, ids)
overlay.find(ids)
before = high_water()
for start in range(0, 3_000_000, 10_000):
    overlay.insert(ids + start, ids)
print(high_water() - before, overlay.count)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_growing_never_takes_the_memory_twice():
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    grown, count = map(int, done.stdout.split())
    assert count == 3_010_000
    assert grown <= 24 * count + (4 << 20)  # a few MB for what the kernel and the allocator round up


def test_the_last_of_equal_ids_counts():
    log_index = LogIndex()
    log_index.insert(np.array([7, 7, 8, 7]), np.array([1, 2, 3, 4]))
    assert log_index.find(np.array([7, 8, 9, 7])).tolist() == [4, 3, -1, 4]
    assert log_index.count == 2


def test_many_ids_that_are_there_already():
    log_index, ids = LogIndex(), np.arange(10_000)
    for _ in range(3):
        log_index.insert(np.tile(ids, 20), np.arange(200_000))
        check_size(log_index)
    assert log_index.find(ids).tolist() == list(range(190_000, 200_000))


def test_room_for_many_rows():
    log_index, ids = LogIndex(10_000), np.arange(10_000)
    nbytes = log_index.nbytes
    for part in np.split(ids, 10):
        log_index.insert(part, part)
        assert log_index.nbytes == nbytes
    check_size(log_index)
    assert content(log_index) == dict(zip(ids.tolist(), ids.tolist(), strict=True))
    log_index.insert(ids + 10_000, ids)
    check_size(log_index)


def test_room_that_is_not_needed_is_released():
    log_index, ids = LogIndex(1_000_000), np.arange(100)
    log_index.insert(ids, ids)
    log_index.fit()
    assert log_index.nbytes == PAGE
    assert log_index.find(ids).tolist() == ids.tolist()


@pytest.mark.parametrize("damage", ["order", "count"])
def test_entries_that_are_damaged_are_noticed(damage: str):
    log_index = LogIndex()
    log_index.insert(np.arange(100), np.arange(100))
    used = np.flatnonzero(log_index._entries[:, 1])
    if damage == "order":
        log_index._entries[used[[3, 90]], 0] = log_index._entries[used[[90, 3]], 0]
    else:
        log_index._entries[used[7], 1] = 0
    more, told = np.arange(100, 1000), r"the index in RAM of \d+ rows that are .* is damaged: .* open it again"
    with pytest.raises(CorruptTableError, match=told):
        log_index.insert(more, more)
    for call in (lambda: log_index.find(more), lambda: log_index.insert(more, more), lambda: log_index.behind(None, 9)):
        with pytest.raises(CorruptTableError, match=told):
            call()


def test_order_is_no_other_overlays():
    # Ids that come in the order of a table's own hashes would fill one part of it at a time.
    first, second = LogIndex(), LogIndex()
    for log_index in (first, second):
        log_index.insert(np.arange(1000), np.arange(1000))
    assert list(content(first)) != list(content(second))
    assert content(first) == content(second)


def test_greatest_location():
    log_index, greatest = LogIndex(), (2**23 - 1 << 40) + 2**40 - 2
    log_index.insert(np.array([1]), np.array([greatest]))
    assert log_index.find(np.array([1])).tolist() == [greatest]


def test_read_only_arrays_are_taken():
    log_index, ids = LogIndex(), np.arange(5)
    ids.flags.writeable = False
    log_index.insert(ids, ids)
    assert log_index.find(ids).tolist() == ids.tolist()


def test_empty():
    log_index, nothing = LogIndex(), np.empty(0, np.int64)
    log_index.insert(nothing, nothing)
    log_index.remove(nothing, nothing)
    log_index.fit()
    assert log_index.find(nothing).tolist() == []
    assert content(log_index) == {}
    assert log_index.bytes_with(0) == log_index.nbytes == PAGE


def test_refused_memory(monkeypatch: pytest.MonkeyPatch):
    class Refusing(mmap.mmap):
        def resize(self, newsize: int) -> None:
            raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    log_index, ids = LogIndex(), np.arange(1000)
    with pytest.raises(
        MemoryBudgetError, match=r"index of 235 rows .* needs 20\.0 KiB, and the system refused"
    ) as error:
        log_index.insert(ids, ids)
    assert "compact()" in str(error.value)
    assert log_index.find(ids).tolist() == [*range(235), *([-1] * 765)]


def test_its_size_can_be_asked_for_while_it_is_resized(monkeypatch: pytest.MonkeyPatch):
    """Statistics and eviction ask without the store's lock, while there is no view of its memory."""
    sizes: list[tuple[int, int, int]] = []

    class Asking(mmap.mmap):
        def resize(self, newsize: int) -> None:
            sizes.append((log_index.nbytes, log_index.bytes_with(0), log_index.count))
            super().resize(newsize)

    monkeypatch.setattr(mmap, "mmap", Asking)
    log_index = LogIndex()
    log_index.insert(np.arange(1000), np.arange(1000))
    assert sizes[0] == (PAGE, PAGE, 235)
    assert all(nbytes == most and count < 1000 for nbytes, most, count in sizes)
    check_size(log_index)
