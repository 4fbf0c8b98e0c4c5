"""Lists of changes: their bytes, which are not trusted, and lists that are joined."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedrock.store import change_lists, publishing
from embedrock.store.change_lists import BLOCK_IDS, ChangeList, decode, encode, ids_of, joined, parse
from embedrock.store.segments import CorruptTableError
from slow import examples

WHERE = "/t/changes/0000000003-0000000002-99-ababcdcd-1.ids"
any_id = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(0, 5000))


def of(ids: list[int]) -> np.ndarray:
    return np.unique(np.array(ids, np.int64))


def made(commit: int = 3, **tables: np.ndarray | None) -> ChangeList:
    return ChangeList("ab" * 16, commit, commit - 1, f"{commit:064x}", f"{commit - 1:064x}", tables)


@settings(max_examples=examples(200))
@given(st.lists(any_id, max_size=50), st.integers(0, 3 * BLOCK_IDS), st.integers(1, 2**40))
def test_ids_come_back(some: list[int], count: int, step: int):
    ids = np.union1d(of(some), np.arange(count) * (step if count * step < 2**62 else 1))
    data = encode(ids)
    np.testing.assert_array_equal(decode(data, len(ids)), ids)
    assert len(data) <= 8 * len(ids) + -(-len(ids) // BLOCK_IDS)


def test_near_ids_take_a_byte_each():
    assert len(encode(np.arange(0, 200 * 5000, 200))) == 5000 + 5


@settings(max_examples=examples(300))
@given(st.data())
def test_malformed_bytes_are_an_error_and_take_no_more_ram_than_the_file(data: st.DataObject):
    whole = made(a=of(list(range(0, 9000, 3))), b=None, c=of([-(2**63), 2**63 - 1])).to_bytes()
    line, _, rest = whole.partition(b"\n")
    body, ids = json.loads(line), bytearray(rest[65:])
    for _ in range(data.draw(st.integers(1, 3))):
        match data.draw(st.sampled_from(["count", "size", "ids", "cut", "more"])):
            case "count" | "size" as what:
                numbers = st.sampled_from([None, 0, 1, -1, 2**31, 2**40, 2**63, 2**70, 3001, 1.5])
                body["tables"][data.draw(st.integers(0, 2))][1 + (what == "size")] = data.draw(numbers)
            case "ids" if ids:
                ids[data.draw(st.integers(0, len(ids) - 1))] = data.draw(st.integers(0, 255))
            case "cut" if ids:
                del ids[data.draw(st.integers(0, len(ids) - 1)) :]
            case _:
                ids += bytes(data.draw(st.integers(1, 99)))
    forged = publishing.to_bytes(body | {"crc": zlib.crc32(ids)}) + ids
    tracemalloc.start()
    try:
        for count in (0, 1, len(forged) // 2, len(forged) - 1):
            with pytest.raises(CorruptTableError, match="is damaged"):
                parse(forged[:count], WHERE)
        with contextlib.suppress(CorruptTableError):
            found = parse(forged, WHERE)
            assert all(ids is None or np.all(ids[:-1] < ids[1:]) for ids in found.tables.values())
        assert tracemalloc.get_traced_memory()[1] < 60 * len(forged) + (1 << 20)
    finally:
        tracemalloc.stop()


@settings(max_examples=examples(200))
@given(st.data())
def test_joined_lists_say_what_they_said_one_by_one(data: st.DataObject):
    live, lists, serial = ["a", "b"], list[ChangeList](), 0
    for commit in range(1, 7):
        renamed, new = list[tuple[str, str]](), set[str]()
        for _ in range(data.draw(st.integers(0, 3))):
            if live and data.draw(st.booleans()):  # a member gets a new name, or that of one that was dropped
                serial += 1
                old, free = data.draw(st.sampled_from(live)), sorted({"a", "b", f"n{serial}"} - {*live})
                live[live.index(old)] = name = data.draw(st.sampled_from(free))
                renamed.append((old, name))
                new = {name if each == old else each for each in new}
            elif live and data.draw(st.booleans()):
                gone = live.pop()
                new.discard(gone)
        for name in {"a", "b"} - {*live}:
            if data.draw(st.booleans()):
                live.append(name)
                new.add(name)
        changed = {
            name: None if name in new else of(data.draw(st.lists(st.integers(0, 9), max_size=3))) for name in live
        }
        tables = {name: ids for name, ids in changed.items() if ids is None or len(ids)}
        lists.insert(0, made(commit, **tables)._replace(renamed=tuple(renamed)))
    one = joined(lists)
    assert (one.since, one.commit, one.manifest, one.parent) == (0, 6, lists[0].manifest, lists[-1].parent)
    for name in live:
        expected, got = ids_of(lists, name)[0], ids_of([one], name)[0]
        assert (got is None) == (expected is None), name
        if got is not None:
            np.testing.assert_array_equal(got, expected)


def test_parts_of_joined_lists_are_removed():
    # A crash after a join has left some of the lists that were joined.
    files = [change_lists.ListFile(16, 0, 9, False, "joined")]
    files += [change_lists.ListFile(commit, commit - 1, 9, False, str(commit)) for commit in (7, 16, 17, 18)]
    assert [file.name for file in change_lists.superfluous(sorted(files), 18, 0)] == ["7", "16"]
    assert [file.name for file in change_lists.orphans(sorted(files), 17)] == ["7", "16", "18"]
    assert [file.name for file in change_lists.orphans(sorted(files), 7)] == ["joined", "16", "17", "18"]
