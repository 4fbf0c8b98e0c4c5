"""Tables whose rows start as a published table: they train as over an array, and hold the difference."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.storage.base_cache import BaseCache
from embedrock.storage.cache import SlotCache
from embedrock.table.prefetch import prefetch
from forked import in_child
from published_files import NAME, Published, base_of, codes, floats, table_of, written
from slow import slow

ROWS, DIM = 900, 24
RULES = {
    "RowwiseAdagrad": er.RowwiseAdagrad(lr=0.1),
    "Adam": er.Adam(lr=0.1),
    "dense AdamW": er.AdamW(lr=0.1, dense=True),
    "SGD": er.SGD(lr=0.1),
}


@pytest.fixture
def published() -> Published:
    made = codes("I8", ROWS, DIM, (ROWS, 1), "F32")
    scale = made.tensors[f"{NAME}.weight_scale"].clamp_(max=0.01)
    weight = made.tensors[f"{NAME}.weight"]
    return Published(made.tensors, (weight.float() * scale).numpy()).split(300, 301)


def train(table: er.Table, steps: int = 6, start: int = 0) -> None:
    for step in range(start, start + steps):
        draw = np.random.default_rng(step)
        ids = draw.integers(0, ROWS // 2, 120)  # half of the rows stay as they are
        table.update(ids, table.lookup(ids) * 0.1 + draw.standard_normal((120, DIM)).astype(np.float32))


def all_rows(table: er.Table) -> np.ndarray:
    return table.lookup(np.arange(ROWS))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("memory", ["1MiB", "map", 2000])
def test_training_is_that_over_an_array(memory: Any, rule: str, dtype: str, published: Published, tmp_path: Path):
    init, same = written(published, tmp_path / "base", memory), {"rule": RULES[rule], "dtype": dtype, "seed": 5}
    expected = table_of(er.FromArray(published.rows), **same)
    in_ram, on_disk = table_of(init, **same), table_of(init, **same, path=tmp_path / "delta", memory="256KiB")
    for table in (expected, in_ram, on_disk):
        train(table)
    on_disk.commit()
    for table in (in_ram, on_disk):
        np.testing.assert_array_equal(all_rows(table), all_rows(expected))
        assert table.stats()["rows_touched"] == expected.stats()["rows_touched"] < ROWS
    on_disk.close()
    with er.open(tmp_path / "delta") as again:  # goes on as if nothing had happened
        for table in (expected, again):
            train(table, 2, start=6)
        np.testing.assert_array_equal(all_rows(again), all_rows(expected))
        again.commit()


def test_a_commit_has_the_stepped_rows_only(published: Published, tmp_path: Path):
    init = written(published, tmp_path / "base")
    with table_of(init, rule=er.SGD(lr=1.0), path=tmp_path / "delta") as table:
        table.update([3, 700, 3], np.ones((3, DIM), np.float32))
        table.commit()
        assert table.stats()["rows_touched"] == 2
    size = sum(file.stat().st_size for file in (tmp_path / "delta").rglob("*") if file.is_file())
    assert size < 40_000 < published.rows.nbytes
    with er.open(tmp_path / "delta", mode="r") as reader:
        expected = published.rows.copy()
        expected[3] -= 2
        expected[700] -= 1
        np.testing.assert_array_equal(all_rows(reader), expected)


def test_a_forgotten_row_is_that_of_the_base_again(published: Published, tmp_path: Path):
    table = table_of(written(published, tmp_path), rule=er.SGD(lr=1.0))
    table.update([3, 5], np.ones((2, DIM), np.float32))
    table.forget([3])
    expected = published.rows.copy()
    expected[5] -= 1
    np.testing.assert_array_equal(all_rows(table), expected)
    assert table.contains([3, 5]).all()


def delta_of(published: Published, folder: Path) -> Path:
    with table_of(written(published, folder / "base"), rule=er.SGD(lr=1.0), path=folder / "delta") as table:
        table.update([3], np.ones((1, DIM), np.float32))
        table.commit()
    return folder / "delta"


def stepped(published: Published) -> np.ndarray:
    expected = published.rows.copy()
    expected[3] -= 1
    return expected


@pytest.mark.parametrize("options", [{}, {"mode": "r"}, {"mode": "r", "memory": "map"}])
def test_a_delta_finds_its_base(options: dict[str, Any], published: Published, tmp_path: Path):
    with er.open(delta_of(published, tmp_path), **options) as table:
        np.testing.assert_array_equal(all_rows(table), stepped(published))


def test_a_base_that_moved(published: Published, tmp_path: Path):
    delta = delta_of(published, tmp_path)
    shutil.move(tmp_path / "base", tmp_path / "moved")
    with pytest.raises(er.TableFileError) as caught:
        er.open(delta)
    assert f"first values of {delta} are those of {NAME!r} in {tmp_path}/base: " in str(caught.value)
    assert str(caught.value).endswith(f"in another folder, pass it: init=er.FromSafetensors(folder, {NAME!r}).")
    moved = base_of(tmp_path / "moved", "map")
    with er.open(delta, init=moved, mode="r") as table:
        np.testing.assert_array_equal(all_rows(table), stepped(published))
    with er.Table(ROWS, DIM, dtype="float32", path=delta, init=moved) as table:
        np.testing.assert_array_equal(all_rows(table), stepped(published))
        table.update([3], np.zeros((1, DIM), np.float32))
        table.commit()
    with er.open(delta) as table:  # the commit knows the new folder
        np.testing.assert_array_equal(all_rows(table), stepped(published))


def test_another_base(published: Published, tmp_path: Path):
    delta = delta_of(published, tmp_path)
    other = written(floats("BF16", ROWS, DIM), tmp_path / "other")
    with pytest.raises(er.TableFileError) as caught:
        er.open(delta, init=other)
    assert f"`init` of {delta} must be that of the table, {{" in str(caught.value)
    assert f"got {other.describe()}. Leave it out." in str(caught.value)
    with pytest.raises(er.TableFileError, match="init"):
        er.Table(ROWS, DIM, dtype="float32", path=delta, init=other)
    shutil.rmtree(tmp_path / "base")
    floats("BF16", ROWS, DIM).write(tmp_path / "base")
    with pytest.raises(er.TableFileError, match=r"whose files must have the digest .* Put the right files back"):
        er.open(delta)
    published.write(tmp_path / "base")
    with er.open(delta) as table:
        np.testing.assert_array_equal(all_rows(table), stepped(published))


@pytest.mark.parametrize("memory", ["1MiB", "map"])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("how", ["written in place", "truncated", "touched"])
def test_a_base_that_changes_while_it_is_open(how: str, before: bool, memory: str, tmp_path: Path):
    """`before`: it was read before. Rows in the cache are those of the files as they were."""
    published = floats("F32", ROWS, DIM)
    init = written(published, tmp_path, memory, names="a.safetensors")
    table, path = table_of(init), tmp_path / "a.safetensors"
    if before:
        np.testing.assert_array_equal(table.lookup(np.arange(100)), published.rows[:100])
    with open(path, "r+b") as file:
        if how == "written in place":
            file.seek(2000)
            file.write(b"\1" * 50_000)
        elif how == "truncated":
            file.truncate(3000)
    os.utime(path, (1, 1))
    for ids in (np.arange(200, 800), [500]):
        with pytest.raises(er.TableFileError) as caught:
            table.lookup(ids)
        expected = f"{path} must stay as it is while a table reads it: it has changed. Write a new file instead, and "
        assert str(caught.value) == f"{expected}make the table anew."
    if before and memory != "map":
        np.testing.assert_array_equal(table.lookup(np.arange(100)), published.rows[:100])


def test_a_base_that_is_replaced_is_read_as_it_was(tmp_path: Path):
    published = floats("F32", ROWS, DIM)
    table = table_of(written(published, tmp_path, names="a.safetensors"))
    table.lookup([0])
    floats("F32", ROWS, DIM, seed=1).write(tmp_path, names="b.safetensors")
    os.replace(tmp_path / "b.safetensors", tmp_path / "a.safetensors")
    np.testing.assert_array_equal(all_rows(table), published.rows)
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(all_rows(table_of(base_of(tmp_path))), published.rows)


def test_states_between_tables_with_the_base_in_another_folder(published: Published, tmp_path: Path):
    here, there = (table_of(written(published, tmp_path / name), rule=er.Adam(lr=0.1)) for name in "ab")
    train(here)
    state = here.state()
    assert len(state["ids"]) == here.stats()["rows_touched"] < ROWS
    there.load_state(state)
    np.testing.assert_array_equal(all_rows(there), all_rows(here))
    other = table_of(written(floats("F32", ROWS, DIM), tmp_path / "c"), rule=er.Adam(lr=0.1))
    with pytest.raises(er.EmbedrockError, match="init"):
        other.load_state(state)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_of_the_initializer(duplicate: Any, published: Published, tmp_path: Path):
    init = written(published, tmp_path)
    copied = duplicate(init)
    assert copied.describe() == init.describe()
    np.testing.assert_array_equal(all_rows(table_of(copied)), published.rows)


def test_a_copy_of_a_table(published: Published, tmp_path: Path):
    table = table_of(written(published, tmp_path), rule=er.SGD(lr=1.0))
    table.update([3], np.ones((1, DIM), np.float32))
    other = copy.deepcopy(table)
    table.update([4], np.ones((1, DIM), np.float32))
    np.testing.assert_array_equal(all_rows(other), stepped(published))


def test_a_copy_does_not_read_other_files(published: Published, tmp_path: Path):
    pickled = pickle.dumps(written(published, tmp_path, names="a.safetensors"))
    floats("F32", ROWS, DIM).write(tmp_path, names="a.safetensors")
    with pytest.raises(er.TableFileError, match="digest"):
        pickle.loads(pickled)


@pytest.mark.parametrize("memory", ["1MiB", "map"])
def test_forks(memory: str, published: Published, tmp_path: Path):
    table = table_of(written(published, tmp_path, memory))
    table.lookup(np.arange(0, ROWS, 7))
    in_child(lambda: np.testing.assert_array_equal(all_rows(table), published.rows))
    np.testing.assert_array_equal(all_rows(table), published.rows)


def test_forks_while_another_thread_reads(published: Published, tmp_path: Path):
    table, done = table_of(written(published, tmp_path, 5000)), threading.Event()

    def read() -> None:
        while not done.is_set():
            table.lookup(np.random.default_rng(0).integers(0, ROWS, 300))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for _ in range(5):
            in_child(lambda: np.testing.assert_array_equal(all_rows(table), published.rows))
    finally:
        done.set()
        thread.join()


def test_members_of_a_group(published: Published, tmp_path: Path):
    init, rule, expected = written(published, tmp_path / "base"), er.SGD(lr=1.0), published.rows
    for path in (None, tmp_path / "group"):
        with er.Group(path=path) as group:
            group.table("one", ROWS, DIM, init=init, rule=rule)
            group.table("two", ROWS, DIM, init=er.FromArray(published.rows), rule=rule)
            for step in range(3):
                ids = np.random.default_rng(step).integers(0, ROWS, 50)
                gradients = np.random.default_rng(step).standard_normal((50, DIM)).astype(np.float32)
                group.update({"one": ids, "two": ids}, {"one": gradients, "two": gradients})
            found = group.lookup({"one": np.arange(ROWS), "two": np.arange(ROWS)})
            np.testing.assert_array_equal(found["one"], found["two"])
            expected = found["one"]
            if path is not None:
                group.commit()
    with er.open(tmp_path / "group", mode="r", kind=er.Group) as group:
        np.testing.assert_array_equal(all_rows(group["one"]), expected)


def test_growing_is_refused(published: Published, tmp_path: Path):
    table = table_of(written(published, tmp_path))
    for rows in (ROWS + 1, None):
        with pytest.raises(er.ArgumentError) as caught:
            table.grow(rows)
        assert "are those of a published table, FromSafetensors(" in str(caught.value)
        assert str(caught.value).endswith("Make another table for new rows.")
    np.testing.assert_array_equal(all_rows(table), published.rows)


# ---------------------------------------------------------------- the cache


@pytest.mark.parametrize("path", [None, "delta"])
def test_too_little_memory_is_an_error_before_anything_is_made(path: str | None, published: Published, tmp_path: Path):
    init, where = written(published, tmp_path / "base", 10), {} if path is None else {"path": tmp_path / path}
    with pytest.raises(er.ArgumentError) as caught:
        table_of(init, **where)
    assert str(caught.value) == (
        f"`memory` of {init} must hold two rows of 28 bytes, and their index: got 10 B. Pass more, such as 1MiB."
    )
    assert [each.name for each in tmp_path.iterdir()] == ["base"]


def test_admission_and_eviction(published: Published, tmp_path: Path):
    base = written(published, tmp_path)
    zeros = table_of(base, admission=er.Admission(min_count=2, default="zeros"), rule=er.SGD(lr=1.0))
    assert not zeros.lookup(np.arange(9)).any()
    table = table_of(base, eviction=er.Eviction(max_rows=2), rule=er.SGD(lr=1.0))
    for k in range(5):
        table.update([k], np.ones((1, DIM), np.float32))
    other = (all_rows(table) != published.rows).any(1)  # evicted rows are those of the base
    assert other.sum() == table.stats()["rows_touched"] == 2


def test_tables_over_the_same_files_share_a_cache(published: Published, tmp_path: Path):
    published.write(tmp_path)
    tables = [table_of(base_of(tmp_path)) for _ in range(26)]
    tables[0].lookup(np.arange(100))
    tables[25].lookup(np.arange(50))
    assert {(table.stats()["base_hits"], table.stats()["base_misses"]) for table in tables} == {(50, 100)}
    other = table_of(base_of(tmp_path, "2MiB"))
    assert other.stats()["base_misses"] == 0
    assert "base_hits" not in table_of(base_of(tmp_path, "map")).stats()


def test_brought_rows_stay_until_they_are_released(published: Published, tmp_path: Path):
    table = table_of(written(published, tmp_path, 6000))
    pin = table.bring(np.arange(10))
    for start in range(20, ROWS - 100, 50):
        table.lookup(np.arange(start, start + 50))
    before = table.stats()
    np.testing.assert_array_equal(table.lookup(np.arange(10)), published.rows[:10])
    assert table.stats()["base_hits"] - before["base_hits"] == 10
    pin.release()
    pin.release()
    for _ in range(3):
        for start in range(20, ROWS - 100, 50):
            table.lookup(np.arange(start, start + 50))
    before = table.stats()
    table.lookup(np.arange(10))
    assert table.stats()["base_misses"] > before["base_misses"]


def test_more_brought_rows_than_the_cache_has(published: Published, tmp_path: Path):
    table = table_of(written(published, tmp_path, 3000))
    pins = [table.bring(np.arange(start, start + 300)) for start in (0, 300, 600)]
    np.testing.assert_array_equal(all_rows(table), published.rows)
    for pin in pins:
        pin.release()
    np.testing.assert_array_equal(all_rows(table), published.rows)
    assert table.stats()["base_bytes_used"] <= 3000


def test_rows_with_records_are_not_brought_from_the_base(published: Published, tmp_path: Path):
    table = table_of(written(published, tmp_path), rule=er.SGD(lr=1.0))
    table.update(np.arange(50), np.ones((50, DIM), np.float32))
    before = table.stats()["base_bytes_used"]
    table.bring(np.arange(50)).release()
    assert table.stats()["base_bytes_used"] == before


@pytest.mark.parametrize("path", [None, "delta"])
@pytest.mark.filterwarnings("error")
def test_prefetch(path: str | None, published: Published, tmp_path: Path):
    where = {} if path is None else {"path": tmp_path / path, "memory": "256KiB"}
    init = written(published, tmp_path / "base", 20_000)
    with table_of(init, rule=er.SGD(lr=0.1), seed=1, **where) as table:
        expected = table_of(er.FromArray(published.rows), rule=er.SGD(lr=0.1), seed=1)
        batches = [np.random.default_rng(k).integers(0, ROWS, 60) for k in range(40)]
        for ids in prefetch(batches, {table: lambda ids: ids}, depth=3):
            for each in (table, expected):
                each.update(ids, each.lookup(ids) * 0.5)
        np.testing.assert_array_equal(all_rows(table), all_rows(expected))
        if path is not None:
            table.commit()


def test_a_failed_read_leaves_no_row_pinned(tmp_path: Path):
    published = floats("F32", ROWS, DIM)
    init = written(published, tmp_path, 8000, names="a.safetensors")
    table = table_of(init)
    table.lookup(np.arange(10))
    os.utime(tmp_path / "a.safetensors", (1, 1))
    with pytest.raises(er.TableFileError, match="it has changed"):
        table.bring(np.arange(20))
    cache = BaseCache.of(init)
    assert cache is not None
    assert not cache._slots._pins[: cache._slots.used_slots].any()


@pytest.mark.parametrize("read", [er.Table.lookup, lambda table, ids: table.bring(ids).release()])
def test_ctrl_c_never_leaves_a_slot_without_its_row(
    read: Any, published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    table, insert = table_of(written(published, tmp_path)), SlotCache.insert
    own = table_of(er.FromArray(published.rows))

    def interrupted(cache: SlotCache, ids: np.ndarray) -> np.ndarray:
        slots = insert(cache, ids)
        signal.raise_signal(signal.SIGINT)
        return slots

    monkeypatch.setattr(SlotCache, "insert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        read(table, np.arange(100))
    monkeypatch.setattr(SlotCache, "insert", insert)
    np.testing.assert_array_equal(all_rows(table), all_rows(own))
    cache = BaseCache.of(table.spec.init)
    assert cache is not None
    assert not cache._slots._pins[: cache._slots.used_slots].any()


RAM = """
import numpy as np
import embedrock as er

def ram():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

init = er.FromSafetensors({folder!r}, {name!r}, {memory!r})
table = er.Table(*init.shape, init=init, dtype="bfloat16")
draw = np.random.default_rng(0)
for _ in range(2):
    table.lookup(draw.integers(0, 120_000, 1500))  # compiled code, and buffers of a batch and of reads
before = ram()
for _ in range(60):
    table.lookup(draw.integers(0, 120_000, 1500))
print(ram() - before, table.stats().get("base_bytes_used", 0))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the RAM of a process is in /proc")
@pytest.mark.parametrize(("memory", "least", "most"), [("16MiB", 8, 22), *slow(("map", 0, 6))])
def test_the_cache_takes_the_ram_that_it_is_given(memory: str, least: int, most: int, tmp_path: Path):
    """100 MB of rows are read, each in another page."""
    header = json.dumps(
        {f"{NAME}.weight": {"dtype": "BF16", "shape": [120_000, 512], "data_offsets": [0, 122_880_000]}}
    )
    with open(tmp_path / "a.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + 122_880_000)
    program = RAM.format(folder=str(tmp_path), name=NAME, memory=memory)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    grown, used = map(float, done.stdout.split())
    assert least << 20 <= grown <= most << 20
    assert memory == "map" or 15 << 20 <= used <= 16 << 20
